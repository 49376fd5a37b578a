"""The result of a search whose time limit is over: the best that was measured, and a sentence."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from fxquant.recipes.operands import Operand
from fxquant.tools.least_bits import OUTLIER
from fxquant.tools.result import Point


def best_of(
    points: Iterable[Point], kind: str, limit: float, unfit: Mapping[tuple[Operand, int], int],
    within: Callable[[Point], bool],
) -> Point | None:  # fmt: skip
    """The best of what was measured: with the fewest bits that keeps an allowed loss, or within another budget.

    A choice in which an outlier has what it is protected from does not keep an allowed loss. None if there is none.
    """
    if kind != "loss":
        return min(filter(within, points), key=lambda point: point.loss, default=None)
    outliers = {key for key, level in unfit.items() if level >= OUTLIER}
    kept = [point for point in points if point.gap <= limit and outliers.isdisjoint(point.chosen.items())]
    return min(kept, key=lambda point: point.cost["bits"], default=None)


def sentence(limit: float, doing: str, result: Point, kind: str) -> str:
    """Says that the time limit has cut a search, and what it returns."""
    if not result.chosen:
        kept = "the loss and protects outliers" if kind == "loss" else "the budget"
        what = f"nothing that was measured until then keeps {kept}, so all stays in high precision"
    elif math.isnan(result.loss):
        what = f"the recipe keeps {kind} by estimates, and was not measured"
    else:
        what = "the recipe is the best that was measured until then"
    return f"The time limit of {limit:g} s ended the search at: {doing}; {what}."
