"""The result of a search, of what was measured: beside each candidate everywhere, and where the time limit is over."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

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


def not_worse(result: Point, uniform: Sequence[Point], kind: str, limit: float) -> tuple[Point, str]:
    """The result of a search, or a candidate everywhere that is better; and a sentence, if there is one to say.

    One is better that costs no more and has the smaller loss: by more than the limit of an allowed loss, below which
    losses count as equal, and outliers stay protected. A loss below the unquantized one counts as that one: rounding
    improves a training by luck alone. So is one better that keeps the loss if the result does not.
    """
    kept = [point for point in uniform if point.gap <= limit]
    if kind == "loss" and kept and result.gap > limit:
        best = min(kept, key=lambda point: point.cost["bits"])
        return best, f"{best.name} everywhere keeps the loss; what the search chose is at {result.gap:+.2%}."
    cost, margin = ("bits", limit) if kind == "loss" else (kind, 0.0)
    most = result.cost["bits"] if kind == "loss" else limit
    no_dearer = [point for point in uniform if point.cost[cost] <= most * (1 + 1e-9)]
    better = [point for point in no_dearer if max(point.gap, 0.0) < result.gap - margin]
    if better:
        best = min(better, key=lambda point: point.gap)
        chose = f"what the search chose has {result.gap:+.2%} and {result.cost['bits']:.3g} bits"
        return best, f"{best.name} everywhere costs no more and has a smaller loss here; {chose}."
    equal = [point for point in no_dearer if kind == "loss" and point.gap <= limit and point.chosen != result.chosen]
    if equal:
        best = min(equal, key=lambda point: point.cost["bits"])
        return result, (
            f"{best.name} everywhere keeps the loss here too, with {best.cost['bits']:.3g} bits ({best.gap:+.2%}). "
            "Outliers are protected all the same: a short training does not tell what they cost in a long one."
        )
    return result, ""


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
