"""Captured graphs of functions, before and after a stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from helpers import captured
from torch import fx

from fxquant import Recipe, recipes
from fxquant.backend.states import ModuleStates
from fxquant.passes.captured import Bound, Captured
from fxquant.passes.pipeline import BOUND, CAPTURED, run
from fxquant.passes.settings import Settings


def rewrite(
    recipe: Recipe | str, function: Callable[..., Any], *args: Any, autocast: Mapping[str, torch.dtype] | None = None
) -> Captured:
    """The facts and the changed graph of a function that is captured as one."""
    (gm,) = captured(function, *args)
    facts = run(CAPTURED, Captured(gm=gm, recipe=recipes.resolve(recipe), autocast=autocast), Settings())
    gm.graph.lint()
    gm.recompile()
    return facts


def rewritten(recipe: Recipe | str, function: Callable[..., Any], *args: Any, **options: Any) -> fx.GraphModule:
    return rewrite(recipe, function, *args, **options).gm


def bind(facts: Captured, settings: Settings) -> Bound:
    """A copy of a changed graph with its state and, by the settings, its quantized weights."""
    bound = Bound(gm=facts.gm, slots=facts.slots, states=ModuleStates().get(facts.slots, torch.device("cpu")))
    bound = run(BOUND, bound, settings)
    bound.gm.graph.lint()
    return bound
