"""Times inference, or an attention, in CUDA graphs."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram

from fxquant.bench.providers import CALIBRATED
from fxquant.bench.rounds import Contender, Problem, Row, Turns, timed
from fxquant.export.program import quantize_program

_GRAPH_MS = 4.0
"""The approximate milliseconds of a graph that is timed, if its calls are short."""


class Inference(Problem):
    """A problem of inference."""

    def prepared(self, provider: str, device: str) -> tuple[list[Callable[[], Any]], Row]:
        """The compiled calls of a provider, which take turns, and the columns that are filled in before the timing."""
        raise NotImplementedError

    def weight_bytes(self, provider: str) -> int:
        """Bytes of the weight whose reading is the floor of a provider's time; 0 for no floor."""
        return 0

    def contender(self, provider: str, turns: Turns) -> Contender:
        calls, row = self.prepared(provider, turns.device)
        step, count = in_a_graph(calls, turns.cuda)
        return Contender(provider, step, row, count)

    def columns(self, contender: Contender, ms: Mapping[str, float], turns: Turns) -> Row:
        us = 1e3 * ms[contender.name]
        row = {"us": f"{us:.1f}", "over_bf16": f"{1e3 * ms['bf16'] / us:.2f}x" if "bf16" in ms else ""}
        read = self.weight_bytes(contender.name)
        if read and turns.cuda:
            row["over_read"] = f"{us / (read / copy_rate()):.2f}x"
        return row


def quantized_program(provider: str, program: ExportedProgram, inputs: tuple[Any, ...]) -> ExportedProgram:
    """The program quantized by a provider's recipe, for `CALIBRATED` with scales of these inputs."""
    calibration = [inputs] if provider == CALIBRATED else None
    return quantize_program(program, provider.removesuffix(" calibrated"), calibration=calibration)


@functools.cache
def copy_rate() -> float:
    """Bytes that copying 1 GiB reads and writes in a microsecond on the current card, outside of a graph."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    for _ in range(20):
        target.copy_(source)
    ms = statistics.median(timed(lambda: target.copy_(source), 20, cuda=True))
    return 2 * source.numel() / (1e3 * ms)


def in_a_graph(calls: Sequence[Callable[[], Any]], cuda: bool) -> tuple[Callable[[], None], int]:
    """A step that makes calls one after another, on CUDA in a graph of some milliseconds, and their number."""

    def run() -> None:
        for call in calls:
            call()

    if not cuda:
        return run, len(calls)
    run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    rounds = max(1, min(24 // len(calls), round(_GRAPH_MS / start.elapsed_time(end))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            run()

    def replay(_calls: Sequence[Callable[[], Any]] = tuple(calls)) -> None:  # the graph reads the tensors they hold
        graph.replay()

    return replay, rounds * len(calls)
