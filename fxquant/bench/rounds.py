"""Times the providers of a problem in turn, round after round, and writes their times as text."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fxquant.bench.providers import gemms
from fxquant.compat.private import inductor_config, inductor_settings_restored, unlimited_recompiles

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

    def agreed(self, value: bool) -> bool:
        """The value, on which processes that run together agree, since their steps wait for each other."""
        return value


class LeftOut(Exception):
    """The reason why a provider was not tried."""


@dataclass
class Contender:
    """A step of some calls to time in turn with others, the columns filled in so far, and milliseconds of each step.

    Its turns are in a scope of its own.
    """

    name: str
    step: Callable[[], object]
    row: Row = field(default_factory=dict)
    calls: int = 1
    times: list[float] = field(default_factory=list)
    scope: Callable[[], AbstractContextManager[object]] = nullcontext


class Problem:
    """A problem of some size that every provider solves in its own way; `str(problem)` is the size.

    One that is not `timed` is solved once, when its contender is made.
    """

    timed = True

    def takes(self, provider: str) -> bool:
        """Returns True if a provider has something to time."""
        return True

    def contender(self, provider: str, turns: Turns) -> Contender:
        """Compiles the step of a provider; other tensors may be on the device already."""
        raise NotImplementedError

    def beside(self, providers: Iterable[str], turns: Turns) -> list[Contender]:
        """More contenders, whose times are no rows of the table but part of its ratios."""
        return []

    def gemms(self, provider: str, turns: Turns) -> str:
        """The column ``gemms``: ``native`` or ``emulated``."""
        return gemms(provider, turns.device)

    def columns(self, contender: Contender, ms: Mapping[str, float], turns: Turns) -> Row:
        """The columns of a contender that was timed; `ms` are the milliseconds of a call of all."""
        raise NotImplementedError


@dataclass(frozen=True)
class Layer(Problem):
    """A problem of one linear layer: input [m, k], weight [n, k]."""

    m: int
    k: int
    n: int

    def input(self) -> Tensor:
        """Normal values in bfloat16, on the default device."""
        return torch.randn(self.m, self.k, dtype=torch.bfloat16)


def measure(providers: Sequence[str], problem: Problem, turns: Turns) -> list[Row]:
    """Times all providers in turn; one that fails gets a row that says why."""
    torch.compiler.reset()
    with unlimited_recompiles():
        contenders = [_attempt(provider, problem, turns) for provider in providers if problem.takes(provider)]
        everyone = [*contenders, *problem.beside(providers, turns)]
        if problem.timed:
            time_in_turn(everyone, turns)
    ms = {c.name: statistics.median(c.times) / c.calls for c in everyone if c.times}
    rows = []
    for contender in contenders:
        row = {"provider": contender.name, "gemms": problem.gemms(contender.name, turns), **contender.row}
        rows.append(row | (problem.columns(contender, ms, turns) if contender.times else {}))
    return rows


@contextmanager
def compiling(row: Row) -> Iterator[None]:
    """A scope without Inductor's caches, whose seconds become the column ``compile_s``."""
    started = time.perf_counter()
    with inductor_config.patch(force_disable_caches=True):
        yield
    row["compile_s"] = f"{time.perf_counter() - started:.1f}"


def _attempt(provider: str, problem: Problem, turns: Turns) -> Contender:
    try:
        with inductor_settings_restored():  # torchao's `quantize_` changes them for all who compile behind it
            return problem.contender(provider, turns)
    except Exception as error:
        return Contender(provider, lambda: None, {"gemms": failure(error)})


def failure(error: Exception) -> str:
    """The text of an error in a table."""
    if isinstance(error, LeftOut):
        return f"left out: {error}"
    return f"failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}"


def time_in_turn(contenders: Sequence[Contender], turns: Turns) -> None:
    """Fills in `times`. All have a turn in each of `ROUNDS`, so that a card that grows warm slows all alike.

    A contender that fails loses its times, and its row gets the reason.
    """
    for _ in range(ROUNDS):
        for contender in contenders:
            if "gemms" in contender.row:
                continue
            try:
                with contender.scope():
                    until = time.perf_counter() + turns.seconds / ROUNDS
                    while turns.agreed(time.perf_counter() < until):
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
    """Waits until the device is idle."""
    if device == "cuda":
        torch.cuda.synchronize()


def times_text(times: Sequence[float]) -> Row:
    """The columns of the median and the spread."""
    return {name: f"{_quantile(times, q):.4g}" for name, q in (("ms", 0.5), ("ms_20", 0.2), ("ms_80", 0.8))}


def _quantile(values: Sequence[float], q: float) -> float:
    return statistics.median(values) if q == 0.5 else sorted(values)[round(q * (len(values) - 1))]
