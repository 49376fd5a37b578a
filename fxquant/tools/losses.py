"""The losses of short trainings under recipes, or choices for operands: means over several orders of the batches."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fxquant.recipes import HighPrecision, Recipe
from fxquant.recipes.operands import Operand
from fxquant.roles import QuantizerRole
from fxquant.tools.emulation import ROLES, Emulation, Switchable
from fxquant.tools.measured import Measured, key_of
from fxquant.tools.space import Chosen
from fxquant.tools.training import Training
from fxquant.tools.trials import Trials, kept_state

log = logging.getLogger(__name__)

MOST = 8
"""The orders of batches over which a loss is a mean, at most."""


class Losses:
    """Measures losses, each once: what is known, or stands in a file, is not measured again.

    A training is chaotic: rounding anything moves its loss by chance, up or down. A loss is the mean over `orders`
    orders of the batches, of which the first is the one that there is.
    """

    def __init__(self, training: Training, trials: Trials, measured: Measured, recipes: Sequence[Recipe]) -> None:
        self.training, self.trials, self.measured, self.recipes = training, trials, measured, recipes
        self.orders, self.runs = 1, 0
        self.tried: dict[str, Chosen] = {}
        self.roles: Mapping[Operand, QuantizerRole] = {}
        self.recipe_of: Callable[[Chosen], Recipe] = lambda chosen: HighPrecision()
        self._graphs: dict[str, tuple[Any, Emulation]] = {}

    def real(self, recipe: Recipe, key: str) -> float:
        """The loss under a recipe as it will run, in one compiled model."""
        missing = [order for order in range(self.orders) if self.measured.get(_key(key, order)) is None]
        self.trials.decisions = []
        if missing:
            self.trials.run(recipe, lambda compiled: self._train(compiled, key, missing))
        return self._mean(key)

    def of(self, chosen: Chosen, orders: int = 0) -> float:
        """The loss under a choice, in a graph whose linears are switched; one for each choice for all others."""
        key = key_of(chosen)
        self.tried.setdefault(key, dict(chosen))
        missing = [i for i in range(orders or self.orders) if self.measured.get(_key(key, i)) is None]
        if missing:
            compiled, emulation = self._graph(chosen)
            emulation.choose(self.recipes, chosen)
            with self.trials.scope(), emulation.running():
                self._train(compiled, key, missing)
        return self._mean(key, orders)

    def _graph(self, chosen: Chosen) -> tuple[Any, Emulation]:
        """The model whose attention and experts are as in a choice, and the switches of its linears."""
        others = {o: i for o, i in chosen.items() if self.roles[o].module_type not in ROLES}
        key = key_of(others)
        if key not in self._graphs:
            numbered = Switchable(others=self.recipe_of(others))
            self._graphs[key] = self.trials.compile(numbered)[0], Emulation(numbered)
        return self._graphs[key]

    def gap(self, chosen: Chosen, orders: int = 0) -> float:
        """The share by which the loss under a choice is above that of the same graph in high precision."""
        return share(self.of(chosen, orders), self.of({}, orders))

    def gaps(self, chosen: Chosen, orders: int) -> list[float]:
        """The gap in each order."""
        self.gap(chosen, orders)
        keys = key_of(chosen), key_of({})
        return [share(*(float(self.measured.get(_key(key, i))) for key in keys)) for i in range(orders)]

    def knows(self, key: str) -> bool:
        """Returns True for what was measured in the first order."""
        return self.measured.get(key) is not None

    def known(self, key: str) -> float:
        """The loss that was measured in the first order; NaN for none."""
        return float(self.measured.get(key)) if self.knows(key) else math.nan

    def count(self, chosen: Chosen) -> int:
        """The number of orders in which a choice and high precision were measured, from the first on."""
        keys, count = (key_of(chosen), key_of({})), 0
        while all(self.measured.get(_key(key, count)) is not None for key in keys):
            count += 1
        return count

    def put(self, key: str, losses: Sequence[float]) -> None:
        """Keeps the losses of a training in the first order."""
        self.runs += 1
        self.measured.put(_key(key, 0), self.training.score(losses))

    def _train(self, compiled: Any, key: str, orders: Sequence[int]) -> None:
        for order in orders:
            training = self.training.in_order(order, self.trials.seed)
            with kept_state(self.training.model):
                torch.manual_seed(self.trials.seed)
                score = training.score(training.run(compiled))
            self.runs += 1
            self.measured.put(_key(key, order), score)
            log.info("search: %s, order %d, loss %g", key, order, score)

    def _mean(self, key: str, orders: int = 0) -> float:
        count = orders or self.orders
        return sum(float(self.measured.get(_key(key, order))) for order in range(count)) / count


def share(loss: float, plain: float) -> float:
    """The share by which a loss is above another; infinite for one that is not finite, NaN for one not measured."""
    if math.isnan(loss):
        return math.nan
    return (loss - plain) / max(abs(plain), 1e-30) if math.isfinite(loss) else math.inf


def _key(key: str, order: int) -> str:
    return f"{key} order {order}" if order else key
