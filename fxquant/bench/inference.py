"""Times inference, or an attention, in CUDA graphs."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxquant.bench.providers import gemms
from fxquant.bench.rounds import Contender, Row, Turns, attempt, medians, time_in_turn, timed
from fxquant.compat.private import unlimited_recompiles

_GRAPH_MS = 4.0
"""Milliseconds of a graph that is timed, about, if its calls are short."""


class Inference:
    """A problem of inference."""

    def takes(self, provider: str) -> bool:
        """Returns True if a provider has something to time."""
        return True

    def prepared(self, provider: str, device: str) -> tuple[list[Callable[[], Any]], Row]:
        """The compiled calls of a provider, which take turns, and the columns that are filled in before the timing."""
        raise NotImplementedError

    def weight_bytes(self) -> int:
        """Bytes of the FP8 weight whose reading is the floor of the time; 0 for no floor."""
        return 0


def measure(providers: Sequence[str], size: Inference, turns: Turns) -> list[Row]:
    """Times all providers in turn."""
    torch.compiler.reset()
    calls_of: dict[str, int] = {}

    def ready(provider: str) -> Contender:
        calls, row = size.prepared(provider, turns.device)
        step, calls_of[provider] = in_a_graph(calls, turns.cuda)
        return Contender(provider, step, row)

    with unlimited_recompiles():
        contenders = [attempt(provider, ready) for provider in providers if size.takes(provider)]
        time_in_turn(contenders, turns)
    us = {name: 1e3 * ms / calls_of[name] for name, ms in medians(contenders).items()}
    rows = []
    for contender in contenders:
        name = contender.name
        row = {"provider": name, "gemms": gemms(name, turns.device), **contender.row}
        if name in us:
            row["us"] = f"{us[name]:.1f}"
            row["over_bf16"] = f"{us['bf16'] / us[name]:.2f}x" if "bf16" in us else ""
            if size.weight_bytes() and turns.cuda:
                row["over_read"] = f"{us[name] / (size.weight_bytes() / copy_rate()):.2f}x"
        rows.append(row)
    return rows


@functools.cache
def copy_rate() -> float:
    """Bytes read and written a microsecond by copying 1 GiB on the current card; not in a graph, where it is slower."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    for _ in range(20):
        target.copy_(source)
    ms = statistics.median(timed(lambda: target.copy_(source), 20, cuda=True))
    return 2 * source.numel() / (1e3 * ms)


def in_a_graph(calls: Sequence[Callable[[], Any]], cuda: bool) -> tuple[Callable[[], None], int]:
    """A step that makes calls one after another, on CUDA in a graph of some milliseconds, and their number."""
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

    def replay(_calls: Sequence[Callable[[], Any]] = tuple(calls)) -> None:  # the graph reads the tensors they hold
        graph.replay()

    return replay, rounds * len(calls)
