"""A short training, or an evaluation, whose loss says what a recipe does to a model."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fxquant.errors import OptionError
from fxquant.tools.trials import call, loss_in

_MODEL_NAMES = ("model", "module", "compiled", "net", "network", "m")


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW with a learning rate of 1e-3."""
    return torch.optim.AdamW(parameters, lr=1e-3)


class OutOfTime(Exception):
    """A time limit is over."""


@dataclass(frozen=True)
class Training:
    """The steps of a training over batches, one after another and again from the first.

    Its loss is the mean of the second half of the steps; without steps, the mean over the batches, without training.
    With `moved` weights begin next to where they are, by 2^-9 of their size. Behind `end`, a time of the monotonic
    clock, no forward and no backward begins.
    """

    model: Any
    batches: Sequence[Any]
    loss: Callable[..., Any] | None
    steps: int
    optimizer: Callable[[Any], torch.optim.Optimizer]
    moved: int = 0
    end: float = math.inf

    def check_time(self) -> None:
        """Raises OutOfTime behind the end."""
        if time.monotonic() > self.end:
            raise OutOfTime

    def in_order(self, number: int, seed: int) -> Training:
        """The same training with its batches in another order; the first is the one that there is.

        Of few batches, which have few orders, weights begin elsewhere.
        """
        if not number:
            return self
        seed = 1000 * seed + number
        places = torch.randperm(len(self.batches), generator=torch.Generator().manual_seed(seed)).tolist()
        return replace(self, batches=[self.batches[i] for i in places], moved=0 if len(places) > 3 else seed)

    def run(self, compiled: Any, seen: Callable[[int], None] = lambda step: None) -> list[float]:
        """The losses of all steps; they end with the first that is not finite. `seen` is called before each step.

        Raises OutOfTime where time is over before all is done.
        """
        if not self.steps:
            return self._evaluated(compiled)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        if self.moved:
            _move(parameters, self.moved)
        optimizer, losses = self.optimizer(parameters), list[float]()
        for step in range(self.steps):
            seen(step)
            self.check_time()
            loss = loss_of(self.loss, compiled, self.batches[step % len(self.batches)])
            losses.append(loss.item())
            if not math.isfinite(losses[-1]):
                break
            self.check_time()
            torch.autograd.backward([loss])
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return losses

    def _evaluated(self, compiled: Any) -> list[float]:
        losses = list[float]()
        with torch.no_grad():
            for batch in self.batches:
                self.check_time()
                losses.append(float(loss_of(self.loss, compiled, batch)))
        return losses

    def score(self, losses: Sequence[float]) -> float:
        """The loss of a run; infinite where one was not finite."""
        if not losses or not math.isfinite(losses[-1]):
            return math.inf
        last = losses[self.steps // 2 :] if self.steps else losses
        return sum(last) / len(last)


@torch.no_grad()
def _move(parameters: Iterable[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.mul_(1 + (torch.rand(parameter.shape, generator=generator).to(parameter) - 0.5) * 2.0**-8)


def loss_of(loss: Callable[..., Any] | None, model: Any, batch: Any) -> Tensor:
    """The loss of a batch, a scalar: the model's own; or by a function of the output and target, or model and batch.

    Raises OptionError where there is none.
    """
    if loss is None:
        value = loss_in(call(model, batch))
    else:
        value = _by_function(loss, model, batch)
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise OptionError(
            "the loss must be a tensor with one element: pass loss=, a function of (output, target) for batches "
            "(input, target), or of (model, batch)"
        )
    return value.sum()


def _by_function(loss: Callable[..., Any], model: Any, batch: Any) -> Any:
    try:
        parameters = [p for p in inspect.signature(loss).parameters.values() if p.default is p.empty]
        names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    except (TypeError, ValueError):
        names = ["output", "target"]
    if len(names) == 1 and names[0] not in _MODEL_NAMES:
        return loss(call(model, batch))
    if names and names[0] in _MODEL_NAMES:
        return loss(model, batch) if len(names) > 1 else loss(model)
    if isinstance(batch, tuple) and len(batch) > 1:
        *inputs, target = batch
        return loss(model(*inputs), target)
    return loss(call(model, batch), batch)
