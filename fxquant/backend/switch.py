"""The typed front door `fxquant.compile`, and the scope `autocast` that changes the recipe of compiled models.

Every recipe of a model has a backend of its own, so going back to one finds its compiled graphs again.
"""

from __future__ import annotations

import contextvars
import copy
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fxquant.backend.backend import Backend
from fxquant.backend.notices import Calls, watch_methods
from fxquant.backend.options import Options, check_keywords, check_model
from fxquant.checks import checked
from fxquant.compat.private import isolated, own_errors
from fxquant.errors import ArgumentError, OptionError
from fxquant.recipes import HighPrecision, Recipe, resolve
from fxquant.report.report import Report
from fxquant.state import StateStore

log = logging.getLogger(__name__)

_scope: contextvars.ContextVar[Recipe | None] = contextvars.ContextVar("fxquant_recipe", default=None)


@checked(
    ArgumentError,
    called="fxquant.autocast",
    takes={"fp8_recipe": "write recipe=", "dtype": "write recipe=, which names the format"},
)
@contextmanager
def autocast(*, recipe: Recipe | str | None = None, enabled: bool = True) -> Iterator[None]:
    """A scope in which models from `fxquant.compile` run under `recipe` in place of their own.

    `enabled=False` runs them unquantized; without a recipe each model keeps its own. Scopes nest, the inner one counts.
    """
    chosen = resolve(recipe) if recipe is not None else None
    token = _scope.set(chosen if enabled else HighPrecision())
    try:
        yield
    finally:
        _scope.reset(token)


class _Switch:
    """One model or function, compiled under each recipe that it has run with."""

    def __init__(self, model: Any, recipe: Recipe | str, options: Mapping[str, Any], kwargs: Mapping[str, Any]) -> None:
        self.model, self.options, self.kwargs = model, dict(options), dict(kwargs)
        self.recipe = resolve(recipe)
        self.states = StateStore()
        self.compiled: dict[Recipe, tuple[Backend, Callable[..., Any]]] = {}
        self.running: Recipe | None = None
        self.warned = False
        self.calls = Calls(model)

    def get(self, recipe: Recipe) -> tuple[Backend, Callable[..., Any]]:
        if recipe not in self.compiled:
            model = self.model if isinstance(self.model, nn.Module) else None
            kwargs = {**isolated(), **{key: value for key, value in self.kwargs.items() if key != "mode"}}
            backend = Backend(recipe, **self.options, mode=self.kwargs.get("mode"), model=model, states=self.states)
            backend.records.what, backend.records.whole = self.calls.name, True
            self.compiled[recipe] = (backend, torch.compile(self.model, backend=backend, **kwargs))
        return self.compiled[recipe]

    def current(self) -> Callable[..., Any]:
        """The compiled model under the recipe of this call."""
        recipe = _scope.get() or self.recipe
        backend, run = self.get(recipe)
        if recipe != self.running:
            self.note_change(recipe)
            backend.activate()
            self.running = recipe
        return run

    def note_change(self, recipe: Recipe) -> None:
        if self.running is None:
            return
        before, after = type(self.running), type(recipe)
        if before is not after and HighPrecision not in (before, after) and not self.warned:
            self.warned = True
            log.warning(
                "Recipe type changed from %s to %s. This may affect model behavior.", before.__name__, after.__name__
            )
        else:
            log.info("recipe changed from %s to %s", self.running, recipe)

    def runs(self) -> int:
        """Counts the runs of compiled graphs so far; 0 while another torch.compile captures a call."""
        if torch.compiler.is_compiling():
            return 0
        return sum(backend.records.runs for backend, _ in self.compiled.values())

    def check(self, before: int) -> None:
        """Warns once of what a call ran unquantized; `before` counts the runs of graphs before it."""
        if not self.kwargs.get("disable") and not torch.compiler.is_compiling():
            assert self.running is not None
            self.calls.over(self.compiled[self.running][0].records, ran=self.runs() > before)

    def set_recipe(self, recipe: Recipe | str) -> None:
        """Runs the model under another recipe from the next call on. Raises RecipeError for an unknown one."""
        self.recipe = resolve(recipe)
        self.get(self.recipe)

    def report(self) -> Report:
        """The decisions under the recipe that ran last."""
        return self.get(self.running or self.recipe)[0].report()

    def clear_cache(self) -> None:
        """Forgets the cached weights of all recipes."""
        for backend, _ in self.compiled.values():
            backend.clear_cache()


@checked(
    ArgumentError,
    called="fxquant.compile",
    takes={
        "model": "a module or a function",
        "recipe": 'a name, such as fxquant.compile(model, "mxfp8"), or a Recipe',
        "options": "a dict of options of the backend",
    },
)
def compile(model: Any, recipe: Recipe | str, *, options: Mapping[str, Any] | None = None, **kwargs: Any) -> Any:
    """`torch.compile` with fxquant as its backend.

    `model` is a module or function, `recipe` a name or a Recipe, `options` are the backend's, `kwargs` torch.compile's
    (`dynamic`, `fullgraph`, `mode`). The result has more methods: `set_recipe(recipe)`, `report()`, `clear_cache()` for
    cached weights, and `quantization_state_dict()` and `load_quantization_state_dict(state)` for the state of delayed
    scaling and stochastic rounding, which is never among the model's keys. Raises RecipeError and OptionError for
    unknown recipes and options.
    """
    _check_arguments(model, recipe, options, kwargs)
    switch = _Switch(model, recipe, options or {}, kwargs)
    _, run = switch.get(switch.recipe)
    if isinstance(run, nn.Module):
        compiled: Any = run
        own_forward = run.forward

        @functools.wraps(model.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            current: Any = switch.current()
            before = switch.runs()
            with own_errors():
                result = (own_forward if current is run else current.forward)(*args, **kwargs)
            switch.check(before)
            return result

        object.__setattr__(compiled, "forward", forward)
    else:

        @functools.wraps(model)
        def compiled(*args: Any, **kwargs: Any) -> Any:
            before = switch.runs()
            with own_errors():
                result = switch.current()(*args, **kwargs)
            switch.check(before)
            return result

    methods = {
        "set_recipe": switch.set_recipe,
        "report": switch.report,
        "clear_cache": switch.clear_cache,
        "quantization_state_dict": switch.states.state_dict,
        "load_quantization_state_dict": switch.states.load_state_dict,
    }
    for name, method in methods.items():
        object.__setattr__(compiled, name, method)
    if isinstance(compiled, nn.Module):
        watch_methods(compiled, model, switch.calls, switch.runs)

        def settings() -> tuple[Any, ...]:
            return switch.recipe, switch.options, switch.kwargs, switch.states.state_dict()

        # torch's own copies would not have the methods, nor the recipe set by one
        object.__setattr__(
            compiled, "__deepcopy__", lambda memo: _compiled_again(copy.deepcopy(model, memo), *settings())
        )
        object.__setattr__(compiled, "__reduce_ex__", lambda _protocol: (_compiled_again, (model, *settings())))
    return compiled


def _check_arguments(model: Any, recipe: Recipe | str, options: Any, kwargs: Mapping[str, Any]) -> None:
    if "backend" in kwargs:
        raise OptionError("fxquant.compile is torch.compile with backend='fxquant': drop the backend argument")
    check_model(model, "compiled")
    check_keywords(kwargs)
    if isinstance(options, Mapping):
        if "recipe" in options:
            raise OptionError("the recipe is an argument of its own: drop it from the options")
        Options.of({**options, "recipe": recipe})
    elif options is not None:
        Options.of(options)


def _compiled_again(
    model: nn.Module, recipe: Recipe, options: Mapping[str, Any], kwargs: Mapping[str, Any], state: Mapping[str, Tensor]
) -> Any:
    """A copy of a compiled model, with its recipe and state."""
    compiled = compile(model, recipe, options=options, **kwargs)
    compiled.load_quantization_state_dict(state)
    return compiled
