"""The effects that quantizers would have on an unquantized model, by probes: errors of products, and their cost."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fxquant.backend.probing import Session
from fxquant.probes import Candidate, Request
from fxquant.recipes import HighPrecision, Recipe
from fxquant.recipes.operands import Operand
from fxquant.roles import GEMM_OPERANDS
from fxquant.tools.emulation import WithoutHistory
from fxquant.tools.outliers import SIGNS, STATISTICS, Place, Seen, noise, outliers, products_times_usual
from fxquant.tools.trials import Trials

_STATISTICS = (*STATISTICS, "loss_change")

_UNUSUAL = 1.8
"""How many times the usual error of a product is more than chance."""

_LEAST = 0.04
"""The least usual error: of finer formats, many times it hurts nothing."""

Key = tuple[Operand, int]
"""An operand, and the number of a candidate."""


@dataclass
class Sensitivity:
    """The effects of each candidate on each operand alone, of all steps that were measured.

    `losses` has what the loss would grow by, of operands of the forward whose product has a gradient. `errors` has the
    relative errors of their products, the largest of all steps, and `squares` the sums of their squares. Of experts,
    whose products probes do not compare, errors are those of the operand itself. `steps` has what was lost in each
    step, of several products of a layer, as experts have, in that whose elements lose most.
    """

    losses: dict[Key, float] = field(default_factory=lambda: defaultdict(float))
    errors: dict[Key, float] = field(default_factory=lambda: defaultdict(float))
    squares: dict[Key, float] = field(default_factory=lambda: defaultdict(float))
    steps: dict[Key, list[Seen]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]], matmuls: frozenset[str] = frozenset()) -> Sensitivity:
        """The effects that the rows of a probe tell of; layers of `matmuls` multiply two inputs."""
        result, ends = cls(), dict[Key, Any]()
        for row in rows:
            if not row["whatif"]:
                continue
            role = "input" if row["role"] == "weight" and row["layer"] in matmuls else row["role"]
            key = (Operand(row["layer"], role, row["direction"]), int(row["candidate"]))
            error = row["product_error"] if row["product_error"] is not None else noise(row["sqnr"])
            result.errors[key] = max(result.errors[key], error)
            result.squares[key] += error**2
            steps, step = result.steps[key], row.get("step")
            if step is None or ends.get(key) != step:
                steps.append(Seen.of(row))
            else:
                steps[-1] = max(steps[-1], Seen.of(row), key=lambda one: one.elements)
            ends[key] = step
            if row.get("loss_change") is not None:
                result.losses[key] += row["loss_change"]
        return result


def unfit(seen: Sensitivity) -> dict[Key, int]:
    """The operands for which a candidate is unfit: 2 for outliers, 1 where the error of products is unusual only.

    What an outlier is multiplied with is one too, if it hurts the product: the small weights of large channels.
    """
    places = {key: Place(*key[0], key[1]) for key in seen.steps}
    levels = {key: 1 for key, times in _times_usual(seen.errors).items() if times > _UNUSUAL}
    outlying = outliers(seen.steps, places)
    levels |= dict.fromkeys(outlying, 2)
    products = products_times_usual(seen.steps, places)
    hurting = {key for key, times in products.items() if times > _UNUSUAL and key in levels}
    for (layer, *side), i in [key for key, one in outlying.items() if one.sign != "same tail"]:
        for pair in GEMM_OPERANDS.values():
            sides = [(role, str(direction)) for role, direction in pair]
            if tuple(side) in sides:
                others = {(Operand(layer, *other), i) for other in sides}
                levels |= dict.fromkeys(others & hurting, 2)
    return levels


def signs(seen: Sensitivity, levels: Mapping[Key, int]) -> dict[Key, str]:
    """Why a candidate is unfit for operands, as sentences; `levels` is what `unfit` has answered."""
    times = _times_usual(seen.errors)
    hurt = outliers(seen.steps, {key: Place(*key[0], key[1]) for key in seen.steps})
    result = {}
    for key, level in levels.items():
        if key in hurt:
            result[key] = SIGNS[hurt[key].sign].format(hurt[key].times)
        else:
            beside = ", beside an outlier" if level > 1 else ""
            result[key] = SIGNS["product"].format(times[key]) + beside
    return result


def _times_usual(errors: Mapping[Key, float]) -> dict[Key, float]:
    """How many times the usual error an operand has, the median of its candidate and role: a format mostly fits."""
    alike = defaultdict(list)
    for (operand, i), error in errors.items():
        alike[i, operand.role].append(error)
    usual = {kind: max(statistics.median_low(numbers), _LEAST) for kind, numbers in alike.items()}
    return {(operand, i): error / usual[i, operand.role] for (operand, i), error in errors.items()}


def request_of(recipes: Sequence[Recipe], statistics: Sequence[str] = _STATISTICS) -> Request:
    """The request for a probe that tries recipes: rows name them by number."""
    candidates = (Candidate(WithoutHistory(recipe), str(i)) for i, recipe in enumerate(recipes))
    return Request(statistics=tuple(statistics), candidates=tuple(candidates))


def errors_of(trials: Trials, recipe: Recipe, run: Callable[[Any], object]) -> dict[Operand, float]:
    """The relative errors of products with each operand quantized by a recipe, while `run` runs a model.

    Of experts, whose products probes do not compare, it is the larger of the errors in the norm and of the elements:
    a few large elements hide what the others lose.
    """

    def use(compiled: Any, _: Session) -> None:
        run(compiled)

    request = request_of([recipe], ("sqnr", "relative_error", "product_error"))
    _, rows = trials.measured(HighPrecision(), request, 1, use)
    result = {operand: error for (operand, _), error in Sensitivity.of(rows).errors.items()}
    for row in rows:
        operand = Operand(row["layer"], row["role"], row["direction"])
        if row["product_error"] is None and operand in result:
            result[operand] = max(result[operand], row["relative_error"] or 0.0)
    return result


def to_json(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of candidates, with what `Sensitivity.of` reads of them, as JSON has them."""
    return [{name: _text_of(row.get(name)) for name in _KEPT} for row in rows if row["whatif"]]


def from_json(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The inverse of `to_json`."""
    return [{name: float(x) if x in ("inf", "-inf") else x for name, x in row.items()} for row in rows]


_KEPT = ("step", "layer", "role", "direction", "candidate", "whatif", *_STATISTICS)


def _text_of(value: Any) -> Any:
    return str(value) if isinstance(value, float) and math.isinf(value) else value
