"""The result of a search: a recipe, the front of all choices that were measured, and the effect of every operand."""

from __future__ import annotations

import math
import textwrap
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fxquant.recipes import CustomRecipe
from fxquant.recipes.operands import Operand
from fxquant.recipes.source import python_of
from fxquant.report.text import aligned

_MOST = 12
"""The reasons that the text of a result has."""


@dataclass(frozen=True)
class Point:
    """A choice that was measured.

    `cost` has its bits and memory, and its time where the budget is one; `gap` is the share by which the loss is above
    that in high precision, `quantized` the share of FLOPs in GEMMs both of whose operands are quantized. `name` is that
    of a recipe that was measured as it runs.
    """

    cost: Mapping[str, float]
    loss: float
    gap: float
    quantized: float
    chosen: Mapping[Operand, int] = field(repr=False)
    name: str = ""


@dataclass(frozen=True)
class Effect:
    """The effect of a candidate on one operand.

    `error` is that of the product, relative in the norm, `effect` the estimated change of the loss. Where it was
    `measured`, that has the shares by which the loss grows with this operand alone quantized, and by which it falls
    when this operand alone is left out of the cheapest choice.
    """

    layer: str
    role: str
    direction: str
    candidate: str
    error: float
    effect: float
    measured: tuple[float, float] | None = None


def pareto(points: Sequence[Point], kind: str) -> list[Point]:
    """The points that no other one beats in both cost and gap, the cheapest first."""
    kind = "bits" if kind == "loss" else kind
    front: list[Point] = []
    for point in sorted(points, key=lambda point: (point.cost[kind], point.gap)):
        if not front or point.gap < front[-1].gap:
            front.append(point)
    return front


def against(gap: float, cost: Mapping[str, float], point: Point, kind: str, limit: float) -> str:
    """Says by what a choice with a gap and a cost beats a candidate everywhere under a budget, or that it does not."""
    losses = f"a loss of {gap:+.2%} instead of {point.gap:+.2%}"
    by = "bits" if kind == "loss" else kind
    costs = f"{cost[by]:.3g} instead of {point.cost[by]:.3g} {'bits' if by == 'bits' else f'of the {by}'}"
    mine, its = (gap, point.gap) if kind == "loss" else (cost[kind], point.cost[kind])
    if not mine <= limit * (1 + 1e-9):
        return f"not beaten: {losses}, {costs}"
    if not its <= limit * (1 + 1e-9):
        return f"beaten, since it does not keep {kind} {limit:g}: {losses}, {costs}"
    if kind == "loss":
        return (
            f"{'beaten by bits' if cost[by] < point.cost[by] else 'not beaten'}, both keep the loss: {costs}, {losses}"
        )
    return f"{'beaten by the loss' if gap < point.gap else 'not beaten'}, both keep {kind} {limit:g}: {losses}, {costs}"


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """A recipe that a search has found; ``str(result)`` is Python that makes it, to be kept in a repository.

    `loss` is measured with the recipe as it runs, `plain` in high precision, `gap` the share between them. Losses are
    means over `orders` orders of the batches. `front` has the best choices that were measured, `uniform` each candidate
    everywhere, `effects` the estimates for all operands, the largest first. `chosen` has the candidate of each operand;
    those that are missing stay in high precision. `cut` is empty, or says that the time limit has ended the search, and
    what the result is then. `signs` says of operands and candidates that do not fit what was seen, `note` why a
    candidate everywhere is the result, or is not. `outliers` has operands and their cheapest candidates, from which
    they are protected in any case.
    """

    recipe: CustomRecipe
    front: list[Point]
    uniform: list[Point]
    loss: float
    plain: float
    gap: float
    cost: Mapping[str, float]
    coverage: float
    effects: list[Effect]
    chosen: Mapping[Operand, str]
    runs: int
    orders: int
    budget: Mapping[str, float]
    cut: str = ""
    signs: Mapping[tuple[Operand, str], str] = field(default_factory=dict, repr=False)
    note: str = ""
    outliers: frozenset[tuple[Operand, str]] = field(default=frozenset(), repr=False)

    @property
    def kept(self) -> list[Operand]:
        """The operands that stay in high precision although a candidate would quantize them."""
        operands = dict.fromkeys(Operand(e.layer, e.role, e.direction) for e in self.effects)
        return sorted(operand for operand in operands if operand not in self.chosen)

    @property
    def protected(self) -> list[Operand]:
        """The operands with another format, or none, than most of their role and direction have, and all outliers.

        Outliers without what they are protected from, that is, though a whole GEMM may be without it.
        """
        operands = sorted({*self.chosen, *self.kept})
        kinds: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        for operand in operands:
            kinds[operand.role, operand.direction][self.chosen.get(operand, "")] += 1
        whole = sum(kinds.values(), Counter[str]())  # decides where half of a kind has one format, and half another
        usual = {kind: max(names, key=lambda name: (names[name], whole[name])) for kind, names in kinds.items()}
        hurt = {o for o, name in self.outliers if self.chosen.get(o, "") != name}
        return [o for o in operands if o in hurt or self.chosen.get(o, "") != usual[o.role, o.direction]]

    @property
    def against(self) -> dict[str, str]:
        """The sentences that say by what the result beats each candidate everywhere, or that it does not."""
        ((kind, limit),) = self.budget.items()
        measured = [point for point in self.uniform if not math.isnan(point.loss + self.loss)]
        return {point.name: against(self.gap, self.cost, point, kind, limit) for point in measured}

    @property
    def why(self) -> dict[Operand, str]:
        """Why operands are protected, and why others are not for which a probe has seen that a candidate is unfit."""
        ((kind, limit),) = self.budget.items()
        reasons, protected = dict[Operand, str](), set(self.protected)
        for operand in sorted(protected | {operand for operand, _ in self.signs}):
            chosen = self.chosen.get(operand, "")
            seen = {name: text for (one, name), text in self.signs.items() if one == operand}
            others = "; ".join(f"{name}: {text}" for name, text in seen.items() if name != chosen)
            if operand in protected:
                reasons[operand] = others or f"chosen for {kind} {limit:g}, no probe has seen that others are unfit"
            elif chosen in seen:
                reasons[operand] = f"not protected, {self._within} with it; {chosen}: {seen[chosen]}"
        return reasons

    @property
    def _within(self) -> str:
        ((kind, limit),) = self.budget.items()
        return f"the loss is {self.gap:+.2%}" if kind == "loss" else f"{kind} {limit:g} is kept"

    def _reasons(self) -> list[str]:
        """The lines of text about operands, alike ones together."""
        alike = defaultdict[tuple[str, str], list[str]](list)
        for operand, reason in self.why.items():
            alike[self.chosen.get(operand, "high precision"), reason].append(" ".join(operand))
        lines = [f"{', '.join(operands)} ({name}): {reason}" for (name, reason), operands in alike.items()]
        more = [f"and {len(lines) - _MOST} more reasons, in result.why"] if len(lines) > _MOST else []
        return [*lines[:_MOST], *more]

    def __str__(self) -> str:
        ((kind, limit),) = self.budget.items()
        costs = ", ".join(f"{value:.3g} {'bits' if name == 'bits' else name}" for name, value in self.cost.items())
        of_orders = f", losses are means over {self.orders} orders of the batches" if self.orders > 1 else ""
        loss = f"loss {self.loss:.5g}, {self.gap:+.2%} of {self.plain:.5g} in high precision"
        about = (
            f"fxquant.search under {kind} {limit:g}: {'loss not measured' if math.isnan(self.loss) else loss}; "
            f"{self.coverage:.0%} of FLOPs quantized; {costs}; {self.runs} runs{of_orders}"
        )
        beside = [f"{name} everywhere is {text}" for name, text in self.against.items()]
        lines = [f"# {line}" for text in (about, self.cut, *beside, self.note) for line in textwrap.wrap(text, 86)]
        for reason in self._reasons():
            lines += [f"# {line}" for line in textwrap.wrap(reason, 86, subsequent_indent="    ")]
        lines += [f"#   {line}" for line in self.front_table().splitlines()]
        return "\n".join([*lines, python_of(self.recipe), ""])

    def front_table(self) -> str:
        """The front, and each candidate everywhere, as text."""
        rows = [["bits", "memory", "loss", "gap", "quantized", "recipe"]]
        for p in [*self.front, *(point for point in self.uniform if point not in self.front)]:
            numbers = [f"{p.cost['bits']:.2f}", f"{p.cost['memory']:.2f}", f"{p.loss:.5g}", f"{p.gap:+.2%}"]
            rows.append([*numbers, f"{p.quantized:.0%}", p.name or "a choice"])
        return aligned(rows)

    def table(self, most: int = 20) -> str:
        """The operands with the largest effects, as text."""
        rows = [["layer", "role", "direction", "candidate", "error", "effect", "alone", "left out"]]
        for e in self.effects[:most]:
            measured = ["", ""] if e.measured is None else [f"{e.measured[0]:+.2%}", f"{-e.measured[1]:+.2%}"]
            rows.append([e.layer, e.role, e.direction, e.candidate, f"{e.error:.3g}", f"{e.effect:.3g}", *measured])
        return aligned(rows)
