"""The choices of a search: operands, their candidates, what these cost, and the way from the cheapest to none."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from fxquant.cost.estimate import estimate
from fxquant.decisions import Decision
from fxquant.errors import OptionError
from fxquant.formats import gemm_mismatch
from fxquant.recipes import Recipe
from fxquant.recipes.operands import Operand
from fxquant.roles import GEMM_OPERANDS, Gemm, QuantizerRole
from fxquant.tools.trials import operands_of

Chosen = dict[Operand, int]
"""The candidate of each operand that is quantized; those that are missing stay in high precision."""
PLAIN_BITS = 16.0
KINDS = ("bits", "memory", "time", "loss")


class Step(NamedTuple):
    """Gives a group of operands a better candidate, or None, for `ratio`: the loss that a unit of cost saves.

    Those with the largest `first` go before all others.
    """

    group: int
    candidate: int | None
    ratio: float
    first: int


@dataclass(frozen=True)
class Path:
    """The cheapest choice, and the steps from it to high precision, each of one of `groups`."""

    space: Space
    groups: Sequence[tuple[Operand, ...]]
    cheapest: Chosen
    steps: Sequence[Step]

    def along(self, steps: Iterable[Step]) -> Chosen:
        """The choice behind some steps."""
        chosen = dict(self.cheapest)
        for step in steps:
            for operand in self.groups[step.group]:
                chosen.pop(operand, None)
            chosen |= self.space.of_group(self.groups[step.group], step.candidate)
        return self.space.mended(chosen)


@dataclass
class Space:
    """All operands of a model, with the candidates that quantize them.

    `options` has the decision for each operand under each candidate that quantizes it, `decisions` all of the
    unquantized model. Operands of one of `units` are chosen together.
    """

    recipes: Sequence[Recipe]
    decisions: Sequence[Decision]
    card: str = ""
    units: list[tuple[Operand, ...]] = field(default_factory=list)
    options: dict[Operand, dict[int, Decision]] = field(default_factory=dict)
    roles: dict[Operand, QuantizerRole] = field(default_factory=dict)
    excluded: dict[Operand, QuantizerRole] = field(default_factory=dict)

    def add(self, candidate: int, decisions: Sequence[Decision], excluded: Sequence[str] = ()) -> None:
        """Notes what a candidate quantizes; layers that are excluded stay in high precision."""
        for unit in operands_of(decisions, self.recipes[candidate]):
            if unit[0].layer in excluded:
                continue
            overlapping = [other for other in self.units if set(other) & set(unit)]
            merged = tuple(dict.fromkeys(operand for other in (*overlapping, unit) for operand in other))
            self.units = [other for other in self.units if other not in overlapping] + [merged]
        for decision in decisions:
            operand = operand_of(decision)
            if decision.quantizer is not None and operand.layer in excluded:
                self.excluded[operand] = decision.role
            elif decision.quantizer is not None:
                self.options.setdefault(operand, {})[candidate] = decision
                self.roles[operand] = decision.role
        order = {operand: i for i, operand in enumerate(map(operand_of, self.decisions))}
        self.units.sort(key=lambda unit: min(order.get(operand, 0) for operand in unit))

    def cheapest(self) -> list[tuple[Operand, int]]:
        """Each operand with its candidate of the fewest bits."""
        return [(o, min(options, key=lambda i: bits_of(options[i]))) for o, options in self.options.items()]

    def under(self, chosen: Mapping[Operand, int]) -> list[Decision]:
        """The decisions as they would be under a choice."""
        result = []
        for decision in self.decisions:
            operand = operand_of(decision)
            index = chosen.get(operand)
            option = None if index is None else self.options.get(operand, {}).get(index)
            if option is not None:
                reason = {"skip_reason": None, "bits": option.bits}
                decision = replace(decision, quantizer=option.quantizer, detail=option.detail, **reason)  # type: ignore[arg-type]
            result.append(decision)
        return result

    def bits(self, chosen: Mapping[Operand, int]) -> float:
        """The bits of an element that GEMMs read, mean by FLOPs."""
        return self._mean_bits(chosen, [decision.flops for decision in self.decisions])

    def memory(self, chosen: Mapping[Operand, int]) -> float:
        """The bytes of all operands as a share of those in bfloat16."""
        sizes = [_elements(decision) for decision in self.decisions]
        return self._mean_bits(chosen, sizes) / PLAIN_BITS

    def _mean_bits(self, chosen: Mapping[Operand, int], weights: Sequence[float]) -> float:
        if not weights:
            return PLAIN_BITS
        total = sum(weights) or 1.0
        pairs = zip(self.decisions, weights, strict=True)
        return sum(weight * self._bits_of(operand_of(decision), chosen) for decision, weight in pairs) / total

    def _bits_of(self, operand: Operand, chosen: Mapping[Operand, int]) -> float:
        option = self.options.get(operand, {}).get(chosen.get(operand, -1))
        return PLAIN_BITS if option is None else bits_of(option)

    def time(self, chosen: Mapping[Operand, int]) -> float:
        """The estimated time of all matmuls as a share of that in high precision.

        Raises OptionError where there are no measured rates for the device.
        """
        decisions = self.under(chosen)
        estimates = estimate(decisions, self.card)
        times = [(work.unquantized, work.quantized) for work in estimates.values()]
        rated = [(before, after) for before, after in times if before is not None and after is not None]
        if not rated:
            raise OptionError(
                'no rates are known for this device: name a card, such as fxquant.search(.., card="H100")'
            )
        return sum(after for _, after in rated) / sum(before for before, _ in rated)

    def cost(self, kind: str, chosen: Mapping[Operand, int]) -> float:
        """The cost of a choice by a kind of budget; one of the loss is kept with as few bits as possible."""
        costs = {"bits": self.bits, "memory": self.memory, "time": self.time, "loss": self.bits}
        return costs[kind](chosen)

    def weight(self, kind: str) -> float:
        """The sum over which `cost` is a mean."""
        if kind == "time":
            return sum(work.unquantized or 0.0 for work in estimate(self.decisions, self.card).values()) or 1.0
        sizes = [_elements(decision) for decision in self.decisions] if kind == "memory" else []
        return sum(sizes or [decision.flops for decision in self.decisions]) or 1.0

    def coverage(self, chosen: Mapping[Operand, int]) -> float:
        """The share of FLOPs in GEMMs both of whose operands are quantized."""
        pairs: dict[tuple[int, Gemm], list[Decision]] = defaultdict(list)
        for decision in self.under(chosen):
            pairs[decision.site, decision.gemm].append(decision)
        total = sum(pair[0].flops for pair in pairs.values()) or 1
        both = [pair[0].flops for pair in pairs.values() if all(d.quantizer is not None for d in pair)]
        return sum(both) / total

    def fits(self, chosen: Mapping[Operand, int]) -> bool:
        """Returns True if every GEMM can multiply the formats of its two operands."""
        pairs: dict[tuple[int, Gemm], list[Decision]] = defaultdict(list)
        for decision in self.under(chosen):
            if decision.quantizer is not None:
                pairs[decision.site, decision.gemm].append(decision)
        for pair in pairs.values():
            specs = [d.quantizer.spec(d.direction) for d in pair if d.quantizer is not None]
            if len(specs) == 2 and gemm_mismatch(*specs):
                return False
        return True

    def groups(self, kind: str) -> list[tuple[Operand, ...]]:
        """The operands that move together: whole layers for time, which one operand of a GEMM alone does not save."""
        if kind != "time":
            return self.units
        layers: dict[str, list[Operand]] = defaultdict(list)
        for unit in self.units:
            for operand in unit:
                layers[operand.layer].append(operand)
        return [tuple(operands) for operands in layers.values()]

    def products(self, alone: Iterable[Operand]) -> list[tuple[Operand, ...]]:
        """The operands of each of the three GEMMs of all layers; those that are `alone`, by units."""
        single = set(alone)
        gemms: dict[Gemm | None, list[Operand]] = defaultdict(list)
        units = []
        for unit in self.units:
            if single.isdisjoint(unit):
                gemms[_gemm_of(unit[0])] += unit
            else:
                units.append(unit)
        return [*units, *map(tuple, gemms.values())]

    def path(
        self, kind: str, effects: Mapping[tuple[Operand, int], float], first: Mapping[tuple[Operand, int], int],
        groups: Sequence[tuple[Operand, ...]] = (),
    ) -> Path:  # fmt: skip
        """The path from the cheapest choice to high precision: steps first that save most loss for their cost.

        Those that take an operand from a candidate which is in `first` go before all others. Each group goes along the
        lower hull of its candidates by cost and effect, so that steps can be taken in order.
        """
        cheapest, steps, whole = Chosen(), list[Step](), self.weight(kind)
        groups = groups or self.groups(kind)
        for number, group in enumerate(groups):
            choices = [*sorted({i for operand in group for i in self.options[operand]}), None]
            points = {}
            layers = {operand.layer for operand in group}
            part = replace(self, decisions=[d for d in self.decisions if d.layer in layers])
            share = part.weight(kind) / whole
            for choice in choices:
                chosen = self.of_group(group, choice)
                effect = sum(effects.get((operand, i), 0.0) for operand, i in chosen.items())
                points[choice] = (part.cost(kind, chosen) * share, min(effect, 1e30))
            current = min(choices, key=lambda c: points[c])
            cheapest |= self.of_group(group, current)
            while True:
                better = [c for c in choices if points[c][0] > points[current][0] and points[c][1] < points[current][1]]
                leaves = max((first.get(key, 0) for key in self.of_group(group, current).items()), default=0)
                ratios = {c: (points[current][1] - points[c][1]) / (points[c][0] - points[current][0]) for c in better}
                if not better:
                    break
                current = max(better, key=lambda c: (ratios[c], c is None))
                steps.append(Step(number, current, ratios[current], leaves))
        steps.sort(key=lambda step: (-step.first, -step.ratio, step.group))
        return Path(self, groups, cheapest, steps)

    def of_group(self, group: Sequence[Operand], candidate: int | None) -> Chosen:
        """The choice of a candidate for a group, of which it may quantize a part."""
        if candidate is None:
            return {}
        return {operand: candidate for operand in group if candidate in self.options[operand]}

    def mended(self, chosen: Chosen) -> Chosen:
        """A choice without pairs that no GEMM multiplies: both operands then have the candidate of the second."""
        if self.fits(chosen):
            return chosen
        result = dict(chosen)
        for decision in self.decisions:
            operand = operand_of(decision)
            for sides in GEMM_OPERANDS.values():
                pair = [Operand(operand.layer, role, str(direction)) for role, direction in sides]
                indices = [result.get(side) for side in pair]
                if operand in pair and None not in indices and indices[0] != indices[1]:
                    alone = {side: result[side] for side in pair}
                    if not self.fits(alone):
                        result.pop(pair[0])
        return result


def operand_of(decision: Decision) -> Operand:
    """The operand that a decision is about."""
    return Operand(decision.layer, decision.role.tensor_type, str(decision.direction))


def _gemm_of(operand: Operand) -> Gemm | None:
    """The GEMM of a linear layer that reads an operand; None for one of attention."""
    sides = {(role, str(direction)): gemm for gemm, pair in GEMM_OPERANDS.items() for role, direction in pair}
    return sides.get((operand.role, operand.direction))


def bits_of(decision: Decision) -> float:
    """The bits of an element of a quantized operand."""
    assert decision.quantizer is not None
    return decision.bits or decision.quantizer.spec(decision.direction).row.bytes_per_element * 8


def _elements(decision: Decision) -> float:
    count = 1.0
    for size in decision.shape:
        count *= size if isinstance(size, int) else 1
    return count
