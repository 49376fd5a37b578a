"""Reads the trace of a step: what its collectives move, and how much of that time kernels that compute hide."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from fxquant.bench.rounds import wait

Span = tuple[float, float]
"""The start and the end of a kernel, in microseconds."""

BYTES = {
    "float": 4, "int": 4, "c10::BFloat16": 2, "c10::Half": 2, "unsigned char": 1, "signed char": 1, "double": 8,
    "long int": 8, "long": 8, "c10::Float8_e4m3fn": 1, "c10::Float8_e5m2": 1, "c10::Float8_e8m0fnu": 1,
}  # fmt: skip
"""The bytes of an element, by the names that traces have for dtypes."""

_SPACES = ("c10d::", "_c10d_functional::")
_KINDS = {"gather": ("allgather", "all_gather"), "scatter": ("reduce_scatter",), "reduce": ("allreduce", "all_reduce")}


@dataclass(frozen=True)
class Traffic:
    """The collectives of a step on this rank.

    `gathered` are the bytes of the whole tensors that all-gathers give, `received` those that come from other ranks in
    all collectives (a ring's: w - 1 of w parts, twice for an all-reduce). The rest are milliseconds of NCCL's kernels:
    of all-gathers and of all, and how much of each other kernels overlap.
    """

    gathered: int
    received: float
    gathers_ms: float = 0.0
    gathers_hidden_ms: float = 0.0
    all_ms: float = 0.0
    all_hidden_ms: float = 0.0


def traffic_of(step: Callable[[], object], device: str, ranks: int) -> Traffic:
    """The traffic of one step, which has run before."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device == "cuda")
    wait(device)
    with profile(activities=activities, record_shapes=True) as traced:
        step()
        wait(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        traced.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    return read(events, ranks)


def read(events: Iterable[dict[str, Any]], ranks: int) -> Traffic:
    """The traffic in the events of a trace."""
    gathered, received = 0, 0.0
    collectives: list[tuple[str, Span]] = []
    computed: list[Span] = []
    for event in events:
        if event.get("ph") != "X":
            continue
        name = str(event.get("name"))
        if event.get("cat") == "kernel":
            span = float(event["ts"]), float(event["ts"]) + float(event["dur"])
            if "nccl" in name.lower():
                collectives.append((name, span))
            else:
                computed.append(span)
        elif name.startswith(_SPACES) and (kind := _kind(name)):
            whole = _whole_bytes(name, kind, event.get("args", {}), ranks)
            gathered += whole if kind == "gather" else 0
            received += whole * (1 + (kind == "reduce")) * (ranks - 1) / ranks
    gathers = [span for name, span in collectives if "allgather" in name.lower()]
    times = [_milliseconds(chosen, computed) for chosen in (gathers, [span for _, span in collectives])]
    return Traffic(gathered, received, *times[0], *times[1])


def _kind(name: str) -> str | None:
    return next((kind for kind, words in _KINDS.items() if any(word in name for word in words)), None)


def _whole_bytes(name: str, kind: str, arguments: dict[str, Any], ranks: int) -> int:
    """The bytes of the whole that a collective gathers or reduces; functional ones do not take the gathered tensor."""
    sizes = _tensor_bytes(arguments.get("Input Dims", []), arguments.get("Input type", []))
    largest = max(sizes, default=0)
    return largest * ranks if kind == "gather" and name.startswith("_c10d_functional") else largest


def _tensor_bytes(dims: Sequence[Any], types: Sequence[Any]) -> list[int]:
    """The bytes of each tensor argument; of a list of tensors, their sum."""
    sizes = []
    for size, kind in zip(dims, types, strict=False):
        if size and isinstance(size[0], list):
            kinds = kind if isinstance(kind, list) else [kind] * len(size)
            sizes.append(sum(_tensor_bytes(size, kinds)))
        elif kind in BYTES:
            sizes.append(math.prod(size) * BYTES[kind])
    return sizes


def _milliseconds(chosen: Sequence[Span], others: Sequence[Span]) -> tuple[float, float]:
    """The time of some kernels, and the part of it in which others run."""
    covered = merged(others)
    total = hidden = 0.0
    for start, end in chosen:
        total += end - start
        hidden += sum(max(0.0, min(end, b) - max(start, a)) for a, b in covered if a < end and b > start)
    return total / 1e3, hidden / 1e3


def merged(spans: Iterable[Span]) -> list[Span]:
    """The times that at least one of some spans covers, as spans that do not touch."""
    result: list[Span] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(end, result[-1][1])
        else:
            result.append((start, end))
    return result
