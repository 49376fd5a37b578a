"""The typed front door `fxquant.compile`."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from fxquant.backend.backend import Backend
from fxquant.backend.controls import scoped
from fxquant.backend.notices import Calls, at_end, tell_uncaptured, watch_methods
from fxquant.backend.options import A_DICT, check_arguments
from fxquant.backend.uncaptured import Uncaptured
from fxquant.checks import checked
from fxquant.compat.private import isolated
from fxquant.errors import ArgumentError
from fxquant.recipes import Recipe

Model = TypeVar("Model")


class _Switch:
    """One model or function, compiled for each recipe that it has run under, so that recompilations count by recipe."""

    def __init__(self, model: Any, recipe: Recipe | str, options: Mapping[str, Any], kwargs: Mapping[str, Any]) -> None:
        self.model, self.options, self.kwargs = model, dict(options), dict(kwargs)
        module = model if isinstance(model, nn.Module) else None
        self.backend = Backend(recipe, **self.options, mode=kwargs.get("mode"), model=module)
        self.controls = self.backend.controls
        self.compiled: dict[Recipe, Callable[..., Any]] = {}
        self.calls = Calls(model, self.controls.compiled_any)

    def get(self, recipe: Recipe) -> Callable[..., Any]:
        if recipe not in self.compiled:
            kwargs = {**isolated(), **{key: value for key, value in self.kwargs.items() if key != "mode"}}
            records = self.controls.under(recipe).records
            records.what, records.whole = self.calls.name, True
            self.compiled[recipe] = torch.compile(self.model, backend=self.backend, **kwargs)
        return self.compiled[recipe]

    def current(self) -> Callable[..., Any]:
        """The compiled model under the recipe of this call."""
        recipe = scoped(self.controls.recipe)
        run = self.get(recipe)
        self.controls.enter(recipe)
        return run

    def call(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a compiled model, and warns once of what runs unquantized."""
        if self.kwargs.get("disable") or torch.compiler.is_compiling():
            return run(*args, **kwargs)
        records, before = self.controls.latest().records, self.controls.runs()
        seen = None if records.first_seen else Uncaptured(self.backend.names())
        if seen is not None:
            records.first_seen = True
            records.uncaptured.append(seen)
        with contextlib.nullcontext() if seen is None else seen.watching():
            result = run(*args, **kwargs)

        def over() -> None:
            ran = self.controls.ran_since(before)
            self.calls.over(records, ran=ran)
            if seen is not None and ran:
                tell_uncaptured(records, seen)

        return at_end(result, over)


@checked(
    ArgumentError,
    called="fxquant.compile",
    takes={
        "model": "a module or a function",
        "recipe": 'a name, such as fxquant.compile(model, "mxfp8"), or a Recipe',
        "options": A_DICT,
    },
)
def compile(model: Model, recipe: Recipe | str, *, options: Mapping[str, Any] | None = None, **kwargs: Any) -> Model:
    """`torch.compile` with fxquant as its backend.

    `model` is a module or function, `recipe` a name or a Recipe, `options` are the backend's, `kwargs` torch.compile's
    (`dynamic`, `fullgraph`, `mode`). Type checkers see the type of the model. The result has more methods:
    `set_recipe(recipe)`, `report()`, `clear_cache()` for cached weights, and `quantization_state_dict()` and
    `load_quantization_state_dict(state)` for the state of delayed scaling and stochastic rounding, which is never among
    the model's keys. Raises RecipeError and OptionError for unknown recipes and options.
    """
    check_arguments(model, recipe, options, kwargs, called="fxquant.compile")
    return cast(Model, _compiled(model, recipe, options or {}, kwargs))


def _compiled(model: Any, recipe: Recipe | str, options: Mapping[str, Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns the model with the methods of `compile`."""
    switch = _Switch(model, recipe, options, kwargs)
    run = switch.get(switch.controls.recipe)
    if isinstance(run, nn.Module):
        compiled: Any = run
        own_forward = run.forward

        @functools.wraps(model.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            current: Any = switch.current()
            return switch.call(own_forward if current is run else current.forward, *args, **kwargs)

        object.__setattr__(compiled, "forward", forward)
    else:

        @functools.wraps(model)
        def compiled(*args: Any, **kwargs: Any) -> Any:
            return switch.call(switch.current(), *args, **kwargs)

    methods = {
        "set_recipe": switch.backend.set_recipe,
        "report": switch.backend.report,
        "clear_cache": switch.backend.clear_cache,
        "quantization_state_dict": switch.backend.state_dict,
        "load_quantization_state_dict": switch.backend.load_state_dict,
    }
    for name, method in methods.items():
        object.__setattr__(compiled, name, method)
    if isinstance(compiled, nn.Module):
        watch_methods(compiled, model, switch.calls, switch.controls)

        def settings() -> tuple[Any, ...]:
            return switch.controls.recipe, switch.options, switch.kwargs, switch.backend.state_dict()

        # torch's own copies would not have the methods, nor the recipe set by one
        object.__setattr__(
            compiled, "__deepcopy__", lambda memo: _compiled_again(copy.deepcopy(model, memo), *settings())
        )
        object.__setattr__(compiled, "__reduce_ex__", lambda _protocol: (_compiled_again, (model, *settings())))
    return compiled


def _compiled_again(
    model: nn.Module, recipe: Recipe, options: Mapping[str, Any], kwargs: Mapping[str, Any], state: Mapping[str, Tensor]
) -> Any:
    """A copy of a compiled model, with its recipe and state."""
    compiled = _compiled(model, recipe, options, kwargs)
    compiled.load_quantization_state_dict(state)
    return compiled
