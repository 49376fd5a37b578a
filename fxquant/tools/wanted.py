"""The arguments of `fxquant.search`: candidates, budget and settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fxquant.checks import did_you_mean
from fxquant.errors import ArgumentError
from fxquant.quantizers import Quantizer, quantizer_text
from fxquant.recipes import AutoRecipe, CustomRecipe, HighPrecision, Recipe, Rule, Rules, resolve
from fxquant.tools.space import KINDS

SETTINGS = ("steps", "optimizer", "exclude", "card", "time_limit", "file")


def check_settings(settings: Iterable[str]) -> None:
    """Raises ArgumentError for a setting that there is not."""
    for name in settings:
        if name not in SETTINGS:
            hint = did_you_mean(name, SETTINGS) or "."
            names = ", ".join(SETTINGS)
            raise ArgumentError(f"fxquant.search got an unexpected keyword {name!r}{hint} Known settings: {names}")


def candidates_of(candidates: Any) -> dict[str, Recipe]:
    """The recipes that are candidates, each once, by what tables call them. Raises ArgumentError for none.

    A quantizer stands for a recipe that gives it to all operands of linear layers, grouped ones too.
    """
    if isinstance(candidates, str | Recipe | Quantizer):
        candidates = [candidates]
    labelled = candidates if isinstance(candidates, Mapping) else {}
    named = dict[str, Recipe]()
    for label, candidate in [*labelled.items()] or [("", candidate) for candidate in candidates]:
        if not isinstance(label, str):
            raise ArgumentError(f"fxquant.search: candidates are called by texts, not by {label!r}")
        is_quantizer = isinstance(candidate, Quantizer)
        recipe = resolve(_of_linears(candidate) if is_quantizer else candidate)
        recipe = recipe.recipe if isinstance(recipe, AutoRecipe) else recipe
        if not isinstance(recipe, HighPrecision) and recipe not in named.values():
            named[label or (quantizer_text(candidate) if is_quantizer else str(recipe))] = recipe
    if not named:
        raise ArgumentError(
            "fxquant.search needs candidates: recipes, their names or quantizers, such as ['nvfp4', 'mxfp8'], or a "
            "dict of them by names of yours"
        )
    return named


def _of_linears(quantizer: Quantizer) -> Recipe:
    return CustomRecipe(qfactory=Rules([Rule(quantizer, module_type="linear|grouped_linear")]))


def budget_of(budget: Any) -> tuple[str, float]:
    """The kind of a budget, and its limit. Raises ArgumentError for what is none."""
    budget = {"loss": 0.005} if budget is None else budget
    if not isinstance(budget, Mapping) or len(budget) != 1:
        raise ArgumentError(f"fxquant.search: budget must be a dict with one of {', '.join(KINDS)}, not {budget!r}")
    ((kind, limit),) = budget.items()
    if kind not in KINDS:
        raise ArgumentError(f"fxquant.search: unknown budget {kind!r}{did_you_mean(kind, KINDS) or ';'} known: {KINDS}")
    if not isinstance(limit, int | float) or isinstance(limit, bool) or not limit > 0:
        raise ArgumentError(f"fxquant.search: the limit of {kind!r} must be a number above 0, not {limit!r}")
    return kind, float(limit)
