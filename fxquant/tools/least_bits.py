"""The choice with the fewest bits that keeps the loss."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fxquant.recipes.operands import Operand
from fxquant.tools.losses import Losses
from fxquant.tools.space import Chosen, Path, Space, Step

log = logging.getLogger(__name__)

_SURE = 3.0
"""The standard errors by which a gap is beyond the limit for sure, so that further orders need not be measured."""

_WORTH = 0.8
"""The share of bits that formats for single operands must come down to, beside formats for whole GEMMs."""

OUTLIER = 2
"""The level of operands that stay protected, since a short training does not tell what a candidate costs there."""


@dataclass(frozen=True)
class Tolerance:
    """Tells if the loss is kept within `limit`, measured in several orders.

    A gap has the standard deviation `spread` from one order to another, and its mean the deviation `chance`.
    """

    losses: Losses
    limit: float
    spread: float
    chance: float

    def keeps(self, chosen: Chosen, margin: float = 0.0) -> bool:
        """Returns True if the loss is kept under a choice, by a share of `chance` for one of many that are tried.

        Of few, one for which chance decides is measured in twice as many orders.
        """
        limit, orders = self.limit - margin * self.chance, self.losses.orders
        gap = math.inf
        for count in range(1, (orders if margin or orders == 1 else 2 * orders) + 1):
            gap = self.losses.gap(chosen, count)
            if abs(gap - limit) > (_SURE if count < orders else 1.0) * self.spread / math.sqrt(count):
                break
        log.info("search: %d operands cost %+.3f%% of the loss, limit %.3f%%", len(chosen), 100 * gap, 100 * limit)
        return gap <= limit

    @property
    def tells_apart(self) -> bool:
        """True if chance is less than what single operands may cost."""
        return self.spread / math.sqrt(self.losses.orders) <= self.limit / 2


@dataclass(frozen=True)
class LeastBits:
    """Looks for the choice with the fewest bits that keeps the loss, along a path for single operands and others.

    `unfit` has operands for which a candidate is unfit, with their level; `over` says that there is no time left.
    """

    space: Space
    tolerance: Tolerance
    effects: Mapping[tuple[Operand, int], float]
    unfit: Mapping[tuple[Operand, int], int]
    over: Callable[[], bool]

    def search(self, single: Path) -> tuple[Chosen, Path]:
        """The choice, and the path with further steps from it.

        Where the cheapest candidate will do for all operands but outliers, the choice is that. Otherwise each of the
        three GEMMs has a format of its own in all layers; single operands have others if that saves bits, and chance
        does not hide what they cost.
        """
        outliers, unusual = ([step for step in single.steps if step.first >= level] for level in (OUTLIER, 1))
        if self.over() or self._keeps(single, outliers):
            return single.along(outliers), single
        if len(unusual) > len(outliers) and self._keeps(single, unusual):
            return single.along(self._pruned(single, unusual)), single
        outstanding = {key: level for key, level in self.unfit.items() if level >= OUTLIER}
        groups = self.space.products(operand for operand, _ in outstanding)
        products = self.space.path("loss", self.effects, outstanding, groups)
        steps, is_kept = self._shortest(products, linear=True)
        whole = products.along(steps)
        if not is_kept or not self.tolerance.tells_apart:
            return whole, products
        bits = _WORTH * self.space.bits(whole)
        end = sum(1 for k in range(1, len(single.steps) + 1) if self.space.bits(single.along(single.steps[:k])) <= bits)
        part = Path(self.space, single.groups, single.cheapest, single.steps[:end])
        if end <= len(unusual) or self.over() or not self._keeps(part, part.steps, 1.0):
            return whole, products
        steps, is_kept = self._shortest(part)
        if not is_kept:
            return whole, products
        return part.along(self._pruned(part, steps, 1.0)), single

    def _keeps(self, path: Path, steps: Iterable[Step], margin: float = 0.0) -> bool:
        return self.tolerance.keeps(path.along(steps), margin)

    def _shortest(self, path: Path, linear: bool = False) -> tuple[list[Step], bool]:
        """The shortest beginning of a path behind what is unfit that keeps the loss, and if that was seen in time."""
        margin = 0.0 if linear else 1.0
        low, stride, is_kept = sum(step.first > 0 for step in path.steps), 1, False
        high = min(low + 1, len(path.steps))  # numbers of steps with which the loss is too high, and is kept
        while not self.over():
            is_kept = high == len(path.steps) or self._keeps(path, path.steps[:high], margin)
            if is_kept:
                break
            low, high, stride = high, min(len(path.steps), high + stride), stride if linear else stride * 2
        while high - low > 1 and not self.over():
            middle = (low + high) // 2
            kept = self._keeps(path, path.steps[:middle], margin)
            low, high = (low, middle) if kept else (middle, high)
        return [*path.steps[:high]], is_kept

    def _pruned(self, path: Path, steps: Sequence[Step], margin: float = 0.0) -> list[Step]:
        """The steps without those that can be taken back: all, halves of them, down to one by one if they are few.

        What an outlier has is not taken back.
        """
        fixed = [step for step in steps if step.first >= OUTLIER]
        free = [step for step in steps if step.first < OUTLIER]
        size, least = len(free), max(1, len(free) // 8)
        while free and not self.over():
            end = len(free)
            while end > 0 and not self.over():
                rest = [*free[: max(0, end - size)], *free[end:]]
                end = max(0, end - size)
                if self._keeps(path, [*fixed, *rest], margin):
                    free = rest
            if size <= least:
                break
            size = max(least, size // 2)
        return [*fixed, *free]
