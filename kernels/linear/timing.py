"""How long an FP8 GEMM takes by each kernel that there is for it: measured once for a card and a size, and remembered.

Besides cuBLAS's kernel for its scales there is Triton's, which can take the epilogue along, and for scales of whole
tensors cuBLAS's for those of rows, which are then all the same. The times are in a file beside Inductor's caches, one
entry for each card, versions and `Problem`.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from fxquant.compat.device import card_name, triton_version
from fxquant.compat.private import inductor_cache, no_modes
from fxquant.formats import QuantSpec
from fxquant.kernels.linear.cublas import by_cublas
from fxquant.kernels.linear.problem import Problem, Times

log = logging.getLogger(__name__)

_CALLS, _ROUNDS = 4, 5
"""The calls of a kernel in a CUDA graph, and the rounds in which the graphs take turns."""


def remembered(problem: Problem, device: torch.device) -> Times | None:
    """Returns what was measured before on such a card, or None."""
    entry = _read(_path()).get(_key(problem, device))
    return None if entry is None else Times(tuple(entry[:-1]), entry[-1])


def all_remembered() -> str:
    """Returns all that was measured before as text, a part of the key of what it decides."""
    return repr(_read(_path()))


def measured(problem: Problem, device: torch.device) -> Times | None:
    """Returns what was measured before, or else measures with random operands; None if memory is short.

    Takes some ten milliseconds, and the compilation of a kernel.
    """
    if (times := remembered(problem, device)) is not None:
        return times
    try:
        with no_modes(), torch.no_grad():
            times = measure(problem, device)
    except torch.OutOfMemoryError:
        log.warning("no memory to time a GEMM of %s; cuBLAS runs it", problem)
        return None
    log.info("GEMM %s: %s", problem, times)
    _remember(_key(problem, device), times)
    return times


def measure(problem: Problem, device: torch.device) -> Times:
    """Times the kernels in turn, in CUDA graphs."""
    from fxquant.kernels.linear import triton_gemm

    generator = torch.Generator(device).manual_seed(0)

    def operand(rows: int, text: str) -> tuple[list[Tensor], QuantSpec]:
        spec = QuantSpec.parse(text)
        assert spec.row.element is not None
        values = torch.randn(rows, problem.k, generator=generator, device=device, dtype=torch.bfloat16) * 64
        shape = (rows, 1) if spec.row.family == "per_row" else (1,)
        return [values.to(spec.row.element.dtype), torch.full(shape, 2.0**-6, device=device)], spec

    a, a_spec = operand(problem.m, problem.a)
    b, b_spec = operand(problem.n, problem.b)
    bias = torch.randn(problem.n, generator=generator, device=device).to(problem.dtype) if problem.bias else None
    y = torch.randn(problem.m, problem.n, generator=generator, device=device, dtype=torch.float32).to(problem.dtype)
    other = torch.empty_like(y)

    def by_scales() -> Tensor:
        return by_cublas(a, b, problem.a, problem.b, bias, problem.dtype, problem.fast_accum)

    def by_rows() -> Tensor:
        assert a_spec.row.element is not None
        rows = [a[0], a[1].expand(problem.m, 1).contiguous()]
        spec = f"per_row_{a_spec.row.element.name}"
        return by_cublas(rows, b, spec, problem.b, bias, problem.dtype, problem.fast_accum)

    def by_triton() -> list[Tensor]:
        return triton_gemm.scaled_mm(
            a, a_spec, b, b_spec, bias, problem.dtype, problem.fast_accum, activation=problem.activation,
            residual=y if problem.residual else None, record=problem.record,
        )  # fmt: skip

    runs = (by_scales, by_triton) if len(problem.kernels) == 2 else (by_scales, by_rows, by_triton)
    with torch.cuda.device(device):
        *times, copy = in_turn(*runs, lambda: other.copy_(y))
    return Times(tuple(round(us, 2) for us in times), round(copy, 2))  # as they are remembered: one choice, one reason


def in_turn(*runs: Callable[[], object]) -> list[float]:
    """Median microseconds of each of several functions, in CUDA graphs that take turns."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    graphs = []
    with torch.cuda.stream(stream):
        for run in runs:
            run()  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    for run in runs:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(_CALLS):
                run()
        graphs.append(graph)
    events = []
    for _ in range(_ROUNDS + 1):
        for graph in graphs:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            graph.replay()
            end.record()
            events.append((start, end))
    torch.cuda.synchronize()
    took = [start.elapsed_time(end) / _CALLS * 1e3 for start, end in events]
    return [statistics.median(took[i + len(runs) :: len(runs)]) for i in range(len(runs))]


def _key(problem: Problem, device: torch.device) -> str:
    return f"{card_name(device)}, torch {torch.__version__}, triton {triton_version()}: {problem}"


def _path() -> Path:
    return Path(inductor_cache()) / "fxquant_gemm.json"


def _read(path: Path) -> dict[str, list[float]]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):  # none yet, or not readable: then it is measured again
        return {}


def _remember(key: str, times: Times) -> None:
    path = _path()
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = {**_read(path), key: [*times.kernels, times.copy]}
    handle, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "w") as file:
        json.dump(entries, file, indent=1)
    os.replace(name, path)
