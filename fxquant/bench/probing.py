"""Times the training steps of decoder blocks with a probe, and without one.

All providers run one compiled model in turn: without a probe, with one that measures every step, with one that does not
measure, and with one that measures every tenth step, whose time is the mean of ten. The first step of a probe compiles
the graphs that measure, once for all providers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fxquant.backend.backend import Backend
from fxquant.backend.model import report
from fxquant.bench import training
from fxquant.bench.rounds import Contender, Problem, Row, Turns, compiling, times_text, wait
from fxquant.tools.probe import probe

PROVIDERS = ("no probe", "measured", "off", "every=10")
_EVERY = 10
"""The steps of a call, so that what is measured is in each call; one where all are."""
_RECIPE = "current_scaling"


@dataclass(frozen=True)
class Probed(Problem):
    """A model, and an input of the shape of its output, that one recipe trains."""

    trained: training.Training

    def __str__(self) -> str:
        return f"{self.trained}, {_RECIPE}"

    def contender(self, provider: str, turns: Turns) -> Contender:
        step = _compiled(self, turns.device)
        scope = functools.partial(_scope, provider, step)
        calls = 1 if provider == "measured" else _EVERY
        row: Row = {}

        def several() -> None:
            for _ in range(calls):
                step()

        with compiling(row), scope():
            step()
            wait(turns.device)
        with scope():
            if turns.cuda:
                torch.cuda.reset_peak_memory_stats()
            several()
            wait(turns.device)
        row["peak_gib"] = f"{torch.cuda.max_memory_allocated() / 2**30 if turns.cuda else 0:.2f}"
        row["flops_quantized"] = f"{report(step.model).coverage:.0%}"
        return Contender(provider, several, row, calls, scope=scope)

    def gemms(self, provider: str, turns: Turns) -> str:
        return super().gemms(_RECIPE, turns)

    def columns(self, contender: Contender, ms: Mapping[str, float], turns: Turns) -> Row:
        row = times_text([time / contender.calls for time in contender.times])
        if PROVIDERS[0] in ms:
            row["probe_cost"] = f"{ms[contender.name] / ms[PROVIDERS[0]] - 1:+.1%}"
        return row


SIZES = (Probed(training.LLAMA3_8B),)
TINY = (Probed(training.TINY_STACK),)


@dataclass(frozen=True)
class Step:
    """A step of training: a forward, a backward, and an optimizer that steps a number, at which a probe's step ends."""

    model: nn.Module
    x: Tensor
    grad_output: Tensor
    optimizer: torch.optim.Optimizer

    def __call__(self) -> None:
        self.model(self.x).backward(self.grad_output)
        self.model.zero_grad(set_to_none=True)
        self.x.grad = None
        self.optimizer.step()


@functools.lru_cache(maxsize=1)
def _compiled(size: Probed, device: str) -> Step:
    """The step of the one model of all providers, which has been compiled by none of them yet."""
    torch.manual_seed(0)
    with torch.device(device):
        model, x = size.trained.model(), size.trained.input().requires_grad_()
        grad_output, number = torch.randn_like(x), nn.Parameter(torch.zeros(1))
    model.compile(backend=backend(model), fullgraph=True, dynamic=False)
    return Step(model, x, grad_output, torch.optim.SGD([number], 0.0))


def backend(model: nn.Module) -> Backend:
    """The backend that compiles the model."""
    return Backend(_RECIPE, model=model)


def _scope(provider: str, step: Step) -> AbstractContextManager[object]:
    """The scope in which a provider's steps run."""
    scopes: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "no probe": nullcontext,
        "measured": functools.partial(probe, step.model, every=1),
        "off": functools.partial(_off, step),
        "every=10": functools.partial(probe, step.model, every=_EVERY),
    }
    return scopes[provider]()


@contextmanager
def _off(step: Step) -> Iterator[None]:
    """The scope of a probe that measures one step at its beginning, and no other."""
    with probe(step.model, every=2**40):
        step()
        yield
