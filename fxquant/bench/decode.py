"""Times a linear layer with few tokens, as in decoding, beside reading its FP8 weight at the rate of a copy.

The activation's quantization is part of what is timed; weights are quantized before. On CUDA calls run in a graph, and
copies of the weight take turns, so that none is in the L2 cache when its turn comes.
"""

from __future__ import annotations

import copy
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxquant.backend.backend import Backend
from fxquant.compat.private import inductor_config
from fxquant.export.program import quantize_program

CALIBRATED = "current_scaling calibrated"
"""The recipe whose activation scales are constants."""
PROVIDERS = (
    "bf16", "current_scaling", CALIBRATED, "rowwise", "float8_blockwise", "torchao tensorwise", "torchao rowwise",
)  # fmt: skip
_ROTATED = 200_000_000
"""Bytes of weights that take turns, at least: four times the L2 cache of an H100."""


_GRAPH_MS = 4.0
"""Of a graph that is timed, about, if its calls are short."""


@dataclass(frozen=True)
class Decode:
    """Sizes of one linear layer: input [m, k], weight [n, k]."""

    m: int
    k: int
    n: int

    def __str__(self) -> str:
        return f"{self.m} tokens {self.k}x{self.n}"


SIZES = tuple(Decode(m, k, n) for k, n in ((4096, 14336), (8192, 28672)) for m in (1, 4, 16, 32, 64))
"""The up-projections of Llama3 8B and 70B."""
TINY = (Decode(1, 64, 96), Decode(16, 64, 96))


def prepare(provider: str, model: nn.Linear, x: Tensor, copies: int) -> list[Callable[[Tensor], Tensor]]:
    """Copies of the layer, each with a weight of its own in the provider's format, which share one compilation."""
    backend = compiler(provider)
    if provider == "bf16" or provider.startswith("torchao "):
        if provider != "bf16":
            from torchao.quantization import (  # type: ignore[import-not-found]
                Float8DynamicActivationFloat8WeightConfig,
                PerRow,
                PerTensor,
                quantize_,
            )

            granularity = PerTensor() if provider == "torchao tensorwise" else PerRow()
            quantize_(model, Float8DynamicActivationFloat8WeightConfig(granularity=granularity))
        call = torch.compile(lambda layer, x: layer(x), backend=backend, fullgraph=True, dynamic=False)
        return [functools.partial(call, copy.deepcopy(model)) for _ in range(copies)]
    calibration = [x] if provider == CALIBRATED else None
    program = quantize_program(
        torch.export.export(model, (x,)), provider.removesuffix(" calibrated"), calibration=calibration
    )
    module: nn.Module = program.module()

    def call_with(state: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(module, state, (x,))  # type: ignore[no-any-return]

    run = torch.compile(call_with, backend=backend, fullgraph=True, dynamic=False)
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return [
        functools.partial(run, {name: tensor.detach().clone() for name, tensor in state.items()}) for _ in range(copies)
    ]


def compiler(provider: str) -> Any:
    """What compiles a provider's layer: the backend lowers what a quantized program holds, and adds nothing."""
    return "inductor" if provider == "bf16" or provider.startswith("torchao ") else Backend("high_precision")


def prepared(provider: str, size: Decode, device: str) -> tuple[list[Callable[[], Any]], dict[str, str]]:
    """The layer compiled: calls that are to take turns, and what is known before they are timed."""
    torch.manual_seed(0)
    cuda = device == "cuda"
    if cuda:
        torch.cuda.empty_cache()
    with torch.device(device):
        model = nn.Linear(size.k, size.n, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        x = torch.randn(size.m, size.k, dtype=torch.bfloat16)
    weight_bytes = size.n * size.k * (2 if provider == "bf16" else 1)
    copies = 2 + _ROTATED // weight_bytes if cuda else 2
    started = time.perf_counter()
    with torch.no_grad(), inductor_config.patch(force_disable_caches=True):
        layers = prepare(provider, model, x, copies)
        layers[0](x)
    calls: list[Callable[[], Any]] = [torch.no_grad()(functools.partial(layer, x)) for layer in layers]
    return calls, {"compile_s": f"{time.perf_counter() - started:.1f}"}


@functools.cache
def copy_rate() -> float:
    """Bytes read and written a microsecond by copying 1 GiB on the current card; not in a graph, where it is slower."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    for _ in range(20):
        target.copy_(source)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(21)]  # type: ignore[no-untyped-call]
    events[0].record()
    for event in events[1:]:
        target.copy_(source)
        event.record()
    torch.cuda.synchronize()
    taken: float = statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events))
    return 2 * source.numel() / (1e3 * taken)


def in_a_graph(calls: Sequence[Callable[[], Any]], cuda: bool) -> tuple[Callable[[], None], int]:
    """What makes calls one after another, on CUDA in a graph of some milliseconds; and how many it makes."""
    if not cuda:

        def run() -> None:
            for call in calls:
                call()

        return run, len(calls)
    for call in calls:
        call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for call in calls:
        call()
    end.record()
    torch.cuda.synchronize()
    rounds = max(1, min(24 // len(calls), round(_GRAPH_MS / start.elapsed_time(end))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()

    def replay(_calls: Sequence[Callable[[], Any]] = tuple(calls)) -> None:  # what they hold, the graph reads
        graph.replay()

    return replay, rounds * len(calls)
