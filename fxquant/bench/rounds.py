"""Times several contenders in turn, round after round, and writes their times as text."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

Row = dict[str, str]
"""A line of the table of results, by column."""
ROUNDS = 3


@dataclass(frozen=True)
class Turns:
    """The device, and for each contender over all rounds the seconds of warm-up and the number of timed steps."""

    device: str
    seconds: float
    repeats: int

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"


@dataclass
class Contender:
    """A step to time in turn with others, the columns that are filled in already, and the milliseconds of each step."""

    name: str
    step: Callable[[], object]
    row: Row = field(default_factory=dict)
    times: list[float] = field(default_factory=list)


def attempt(provider: str, make: Callable[[str], Contender]) -> Contender:
    """A provider ready to be timed; one that fails is left out of the turns, and its row says why."""
    try:
        return make(provider)
    except Exception as error:
        return Contender(provider, lambda: None, {"gemms": failure(error)})


def failure(error: Exception) -> str:
    """An error as a table shows it."""
    return f"failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}"


def time_in_turn(contenders: Sequence[Contender], turns: Turns) -> None:
    """Fills in `times`. All have a turn in each of `ROUNDS`, so that a card that grows warm slows all alike.

    A contender that fails loses its times, and its row says why.
    """
    for _ in range(ROUNDS):
        for contender in contenders:
            if "gemms" in contender.row:
                continue
            try:
                until = time.perf_counter() + turns.seconds / ROUNDS
                while time.perf_counter() < until:
                    contender.step()
                    wait(turns.device)
                contender.times += timed(contender.step, max(1, turns.repeats // ROUNDS), turns.cuda)
            except Exception as error:
                contender.times.clear()
                contender.row["gemms"] = failure(error)


def timed(step: Callable[[], object], repeats: int, cuda: bool) -> list[float]:
    """Milliseconds of each of `repeats` steps; on CUDA the queue is never empty between them."""
    if not cuda:
        marks = [time.perf_counter()]
        for _ in range(repeats):
            step()
            marks.append(time.perf_counter())
        return [1e3 * (b - a) for a, b in itertools.pairwise(marks)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]  # type: ignore[no-untyped-call]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]


def wait(device: str) -> None:
    """Returns when the device is idle."""
    if device == "cuda":
        torch.cuda.synchronize()


def medians(contenders: Iterable[Contender]) -> dict[str, float]:
    """The median milliseconds of each contender that was timed."""
    return {contender.name: statistics.median(contender.times) for contender in contenders if contender.times}


def times_text(times: Sequence[float]) -> Row:
    """The columns of the median and the spread."""
    return {name: f"{_quantile(times, q):.4g}" for name, q in (("ms", 0.5), ("ms_20", 0.2), ("ms_80", 0.8))}


def _quantile(values: Sequence[float], q: float) -> float:
    return statistics.median(values) if q == 0.5 else sorted(values)[round(q * (len(values) - 1))]
