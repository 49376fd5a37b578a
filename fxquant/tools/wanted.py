"""The arguments of `fxquant.search`: candidates, budget and settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fxquant.checks import did_you_mean
from fxquant.errors import ArgumentError
from fxquant.recipes import AutoRecipe, HighPrecision, Recipe, resolve
from fxquant.tools.space import KINDS

SETTINGS = ("steps", "optimizer", "exclude", "card", "time_limit", "file")


def check_settings(settings: Iterable[str]) -> None:
    """Raises ArgumentError for a setting that there is not."""
    for name in settings:
        if name not in SETTINGS:
            hint = did_you_mean(name, SETTINGS) or "."
            names = ", ".join(SETTINGS)
            raise ArgumentError(f"fxquant.search got an unexpected keyword {name!r}{hint} Known settings: {names}")


def candidates_of(candidates: Any) -> list[Recipe]:
    """The recipes that are candidates, each once. Raises ArgumentError for none."""
    if isinstance(candidates, str | Recipe):
        candidates = [candidates]
    recipes = [resolve(candidate) for candidate in candidates]
    recipes = [recipe.recipe if isinstance(recipe, AutoRecipe) else recipe for recipe in recipes]
    recipes = [recipe for recipe in dict.fromkeys(recipes) if not isinstance(recipe, HighPrecision)]
    if not recipes:
        raise ArgumentError("fxquant.search needs candidates: recipes or their names, such as ['nvfp4', 'mxfp8']")
    return recipes


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
