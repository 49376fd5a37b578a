"""Questions to a model however it was compiled: its report, its recipe, its state and its cached weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from fxquant.backend.backend import Backend, ByName
from fxquant.backend.controls import Controls, controls_that_compiled
from fxquant.compat.frames import backends_behind
from fxquant.errors import OptionError
from fxquant.recipes import Recipe
from fxquant.report.report import Report


def report(model: Any) -> Report:
    """The fate of every operand of a compiled model, under the recipe that ran last.

    The model may be compiled by `fxquant.compile`, by name, with a `Backend`, in place or in blocks, and wrapped
    since: also the module that was compiled may be given. Raises OptionError for one that fxquant has not compiled.
    """
    controls = _controls(model)
    used = [one for one in controls if one.compiled_any()] or controls[:1]
    first, *others = [one.latest().records.report() for one in used]
    for other in others:
        sites = 1 + max((decision.site for decision in first.decisions), default=-1)
        first.decisions += [replace(decision, site=decision.site + sites) for decision in other.decisions]
        first.unused = [part for part in first.unused if part in other.unused]
        first.uncompiled = [why for why in first.uncompiled if why in other.uncompiled]
        first.not_fused = [*dict.fromkeys([*first.not_fused, *other.not_fused])]
    return first


def set_recipe(model: Any, recipe: Recipe | str) -> None:
    """Runs a compiled model under another recipe from its next call on.

    Raises RecipeError for an unknown recipe, and OptionError for a model that fxquant has not compiled, or a function
    that was compiled by name: calls of torch.compile with equal options share its graphs.
    """
    module = model if isinstance(model, nn.Module) else None
    for controls in _controls(model):
        if module is None and controls.by_name:
            raise OptionError(
                "a function that torch.compile(function, backend='fxquant', options=..) has compiled keeps its recipe: "
                "use fxquant.compile(function, recipe), or fxquant.autocast(recipe=recipe) around the call"
            )
        alone = module is not None and not controls.by_name and controls.compiles_nothing_but(module)
        controls.set_recipe(recipe, None if alone else module)


def clear_cache(model: Any) -> None:
    """Forgets the quantized weights that the option `cache_weights` keeps of a compiled model."""
    for controls in _controls(model):
        controls.latest().clear_cache()


def state_dict(model: Any) -> dict[str, Tensor]:
    """The state of delayed scaling and stochastic rounding of a compiled model, as plain tensors.

    Raises OptionError for a model that several backends have compiled, each of which has a `state_dict` of its own.
    """
    return _only_backend(model).state_dict()


def load_state_dict(model: Any, state: Mapping[str, Tensor]) -> None:
    """Restores what `state_dict` gave, also before the model has run."""
    _only_backend(model).load_state_dict(state)


quantization_state_dict, load_quantization_state_dict = state_dict, load_state_dict
"""The same, under the names that the methods of a compiled model have."""


def _only_backend(model: Any) -> Backend:
    controls = _controls(model)
    first, *others = [one for one in controls if one.compiled_any()] or controls
    if others:
        raise OptionError(
            f"{len(others) + 1} backends have compiled this {type(model).__name__}, each with a state of its own: ask "
            "the compiled blocks, or their backends, by state_dict() and load_state_dict(state)"
        )
    return first.latest()


def _controls(model: Any) -> list[Controls]:
    """The controls of all backends that have compiled a model, or are to compile it, in the order of creation."""
    controls = {id(one): one for one in _behind(model)}
    if isinstance(model, nn.Module):
        controls |= {id(one): one for one in controls_that_compiled(model)}
    if not controls:
        name = type(model).__name__ if isinstance(model, nn.Module) else repr(model)
        raise OptionError(
            f"fxquant has compiled no part of {name}: compile it by fxquant.compile(model, recipe), or by "
            "torch.compile(model, backend='fxquant', options={'recipe': recipe}); a function is asked for by what "
            "compiling it gave"
        )
    return sorted(controls.values(), key=lambda one: one.number)


def _behind(model: Any) -> Iterator[Controls]:
    if isinstance(model, Backend):
        yield model.controls
    for holder, function, keywords in backends_behind(model):
        if isinstance(function, Backend):
            yield function.controls
        elif isinstance(function, ByName):
            backend = function.backend(**keywords)
            vars(holder)["fxquant"] = backend  # keeps it alive until the first graph does
            yield backend.controls
