"""The controls of compiled models: the recipe of a call, and the backends of a model, however it was compiled.

Every graph has a guard that asks, before it runs, for the recipe of the call: that of the scope `autocast`, or what
`set_recipe` has chosen, or the one that it was compiled with. Where the answer is not the recipe of the graph, Dynamo
looks for another graph, and compiles one if there is none; so a recipe that was left is found again.
"""

from __future__ import annotations

import contextvars
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ContextDecorator, contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fxquant.backend.blocks import Place, expected, holds, names_in, path_in, place_of
from fxquant.backend.checkpoint import Part, gathered, restore
from fxquant.backend.copies import mark
from fxquant.backend.missed import Missed
from fxquant.backend.notices import tell_prompt, watch
from fxquant.backend.outer import outermost
from fxquant.checks import checked
from fxquant.compat.inside.frames import add_guard, compiled_call, frame_being_compiled, is_method_of, unwrapped
from fxquant.compat.inside.recompiles import compiles_nothing_new
from fxquant.errors import ArgumentError, FxQuantWarning, tell
from fxquant.recipes import HighPrecision, Recipe, resolve

if TYPE_CHECKING:
    from fxquant.backend.backend import Backend
    from fxquant.backend.probing import Session

log = logging.getLogger(__name__)


@dataclass
class _Scope:
    """A scope of `autocast`; `recipe` is None where every model keeps its own."""

    recipe: Recipe | None
    met: bool = False


_scope: contextvars.ContextVar[_Scope | None] = contextvars.ContextVar("fxquant_scope", default=None)


@checked(
    ArgumentError,
    called="fxquant.autocast",
    takes={"fp8_recipe": "write recipe=", "dtype": "write recipe=, which names the format"},
)
def autocast(*, recipe: Recipe | str | None = None, enabled: bool = True) -> Autocast:
    """A scope in which compiled models run under `recipe` in place of their own, however they were compiled.

    `enabled=False` runs them unquantized; without a recipe each model keeps its own. Scopes nest, the inner one counts.
    A model that is not compiled is never quantized: a scope with a recipe that met no compiled one warns at its end.
    The scope may be entered again, and decorates functions too. Raises RecipeError for an unknown recipe.
    """
    return Autocast(resolve(recipe) if recipe is not None else None, enabled)


class Autocast(ContextDecorator):
    """A scope with a recipe, or without one, which may be entered several times."""

    def __init__(self, recipe: Recipe | None, enabled: bool) -> None:
        self.recipe, self.enabled = recipe, enabled
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        scope = _autocast(self.recipe, self.enabled)
        scope.__enter__()
        self._entered.append(scope)

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)


@contextmanager
def _autocast(chosen: Recipe | None, enabled: bool) -> Iterator[None]:
    scope, outer = _Scope(chosen if enabled else HighPrecision()), _scope.get()
    token = _scope.set(scope)
    try:
        yield
    finally:
        _scope.reset(token)
        if outer is not None:
            outer.met |= scope.met
    if not scope.met and not isinstance(scope.recipe, HighPrecision | None):
        tell(
            f"fxquant.autocast(recipe={scope.recipe}) met no compiled model and quantized nothing: compile models by "
            "fxquant.compile(model, recipe), or by torch.compile(model, backend='fxquant', options={'recipe': recipe})",
            FxQuantWarning,
        )


def scoped(recipe: Recipe) -> Recipe:
    """The recipe of the scope around, or a model's own."""
    scope = _scope.get()
    if scope is None:
        return recipe
    scope.met = True
    return scope.recipe or recipe


class Controls:
    """The recipe of what one backend compiles, and a backend of the same options for each recipe that it has had."""

    def __init__(self, first: Backend) -> None:
        self.number = next(_numbers)
        self.model: Callable[[], nn.Module | None] = lambda: None
        self.within: Sequence[str] = ()
        """The parts of the model that are compiled; the whole of it if there are none."""
        self.recipe = first.recipe
        self.of_a_model = first.switches
        self.backends: dict[Recipe, Backend] = {first.recipe: first}
        self.running: Recipe | None = None
        self.warned = False
        self._numbers = itertools.count()
        self.roots: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self.named: object = None
        """The object that torch finds by a name, if it made this backend."""
        self.session: Session | None = None
        """The probe that measures now, if there is one."""
        self._located: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # looked for once: a guard asks in every call
        self._recipes: weakref.WeakKeyDictionary[nn.Module, Recipe] = weakref.WeakKeyDictionary()
        self._copies: weakref.WeakKeyDictionary[nn.Module, Mapping[str, Tensor]] = weakref.WeakKeyDictionary()
        self._ran: weakref.WeakKeyDictionary[nn.Module, Recipe] = weakref.WeakKeyDictionary()
        """The recipe under which each module ran last, in the order of changes."""
        self._noted: tuple[Callable[[], nn.Module | None], Recipe | None] = (lambda: None), None
        """The module that ran last, and its recipe."""
        self._guarded = threading.local()
        self._missed = Missed(self._runs_here)
        _all.add(self)

    def add_root(self, module: nn.Module) -> None:
        """Notes that this backend compiles a module, with the model around it where trainers gave it no model."""
        if module in self.roots:
            return
        if self.by_name:
            self.roots.setdefault(self._model_around(module), next(self._numbers))
        self._begin_copies(module)
        self.roots[module] = next(self._numbers)
        if self.of_a_model:
            mark(module, self)

    def are_of(self, backend: object) -> bool:
        """Returns True for what torch.compile was given, if these are its controls."""
        return backend is self.named or getattr(backend, "controls", None) is self

    def note_copy(self, module: nn.Module, copied: nn.Module) -> None:
        """Notes that a copy was made of a module, with what is compiled in it, which begins with the module's state."""
        if copied not in self._copies:
            self._copies[copied] = self._copies.get(module) or gathered(self._parts_in(module))
            if module in self._recipes:
                self._recipes[copied] = self._recipes[module]

    def begin_copies_in(self, parts: Set[int]) -> None:
        """Gives copies their names, recipes and states that are among modules, which their ids name."""
        for copied in [copied for copied in [*self._copies] if id(copied) in parts]:
            self._begin_copies(copied)

    def _begin_copies(self, module: nn.Module) -> None:
        """Gives the copies that hold a module their names, recipes and states."""
        for copied in [copied for copied in [*self._copies] if path_in(copied, module) is not None]:
            state = self._copies.pop(copied)
            self.roots.setdefault(copied, next(self._numbers))
            self.first().states.of(self.place_of(copied).home)
            if copied in self._recipes:
                self._recipes.update(dict.fromkeys(copied.modules(), self._recipes[copied]))
            if state:
                restore(state, self._parts_in(copied))

    def _parts_in(self, model: nn.Module) -> list[Part]:
        return [part for part in self.parts(model) if part.module is not None]

    def _model_around(self, module: nn.Module) -> nn.Module:
        """The model that holds a module, all of whose parts have names from then on."""
        model = unwrapped(outermost(module))
        self._located.add(module)
        self.first().states.of(model)
        return model

    @property
    def by_name(self) -> bool:
        return self.named is not None

    def compiles_nothing_but(self, model: nn.Module) -> bool:
        """Returns True if all modules that this backend has compiled are parts of a model."""
        parts = set(map(id, model.modules()))
        return all(id(root) in parts for root in [*self.roots, *self._copies])

    def share_recipes(self, named: object) -> None:
        """Follows the recipes that were set for modules which any backend called by name has compiled.

        Dynamo gives one graph to two calls of torch.compile with equal options, and one to modules of a class.
        """
        self.named, self._recipes = named, _recipes_by_name

    def set_recipe(self, recipe: Recipe | str, model: nn.Module | None = None) -> None:
        """Runs `model`, or all that was compiled, under another recipe from the next call on.

        Raises RecipeError for an unknown one.
        """
        recipe = resolve(recipe)
        self.under(recipe)
        if model is None:
            self.recipe = recipe
            self._recipes.clear()
        else:
            self._recipes.update(dict.fromkeys(model.modules(), recipe))

    def under(self, recipe: Recipe) -> Backend:
        """The backend for a recipe."""
        if recipe not in self.backends:
            self.backends[recipe] = self.first().under(recipe)
        return self.backends[recipe]

    def first(self) -> Backend:
        """The backend that all others came from."""
        return next(iter(self.backends.values()))

    def compiled_any(self) -> bool:
        """Returns True if a graph has run."""
        return any(backend.captured for backend in self.backends.values())

    def latest(self, model: nn.Module | None = None) -> Backend:
        """The backend under which something ran last: the model or a part of it, if one is given that has run."""
        ran = [
            recipe for root, recipe in [*self._ran.items()] if model is not None and path_in(model, root) is not None
        ]
        return self.under(ran[-1] if ran else self.running or self.recipe)

    def run(self) -> None:
        """Notes the module of the call whose guards have held: torch also asks the guards of graphs that do not run."""
        self._guarded.runs = self._runs_here() + 1
        root = getattr(self._guarded, "root", None)
        if root is not None:
            self._guarded.root = None
            if self._noted[0]() is root and self._noted[1] is self.running:  # as in each step of a decode
                return
            self.add_root(root)
            if self.running is not None and self._ran.get(root) is not self.running:
                self._ran.pop(root, None)
                self._ran[root] = self.running
            self._noted = weakref.ref(root), self.running

    def runs(self) -> tuple[int, int]:
        """Counts the runs of compiled graphs so far: on this thread, and on all, where some may be missed."""
        return self._runs_here(), sum(backend.records.runs for backend in [*self.backends.values()])

    def _runs_here(self) -> int:
        return getattr(self._guarded, "runs", 0)

    def ran_since(self, before: tuple[int, int]) -> bool:
        """Returns True if a compiled graph has run since `runs` gave this, for threads of one call too."""
        return any(now > then for now, then in zip(self.runs(), before, strict=True))

    def begin(self) -> Backend:
        """The backend for the graph that is being compiled, which gets its guard."""
        code, frame = frame_being_compiled()
        place = place_of_root(frame)
        root = root_at(frame, place)
        recipe = self._of_call(root)
        backend = self.under(recipe)
        self._add_called()
        if root is not None:
            self.add_root(root)

        def holds(frame: Mapping[str, Any]) -> bool:
            root = root_at(frame, place)
            if root is None:
                root = root_of(frame)
            current = self._of_call(root)
            if compiles_nothing_new() and not isinstance(current, HighPrecision):
                self._missed.ask(backend.records, code)
            if current is not recipe and current != recipe:
                return False
            if root is not None and root not in self._located:
                self._locate(root)
            self._guarded.root = root
            self.enter(recipe)
            return True

        add_guard(holds, f"fxquant: the recipe of the call is {recipe}")
        if backend.tells:
            others = [other.records for other in self.backends.values()]
            if not any(records.graphs for records in others):
                tell_prompt(backend.records)
            watch(backend.records, instead_of=others)
        self.enter(recipe)
        return backend

    def _of_call(self, root: nn.Module | None) -> Recipe:
        recipes = self._recipes
        return scoped(self.recipe if root is None or not recipes else recipes.get(root, self.recipe))

    def _recipe_in(self, home: nn.Module) -> Recipe:
        """The recipe of a module, which may have been set for the part of it that is compiled."""
        chosen = (
            self._recipes[root]
            for root in [home, *self.roots]
            if root in self._recipes and path_in(home, root) is not None
        )
        return next(chosen, self.recipe)

    def enter(self, recipe: Recipe) -> None:
        """Notes the recipe under which a graph is about to run."""
        if recipe is self.running or recipe == self.running:
            return
        if self.running is not None:
            self._note_change(self.running, recipe)
        self.running = recipe

    def _note_change(self, before: Recipe, after: Recipe) -> None:
        kinds = type(before), type(after)
        if kinds[0] is not kinds[1] and HighPrecision not in kinds and not self.warned:
            self.warned = True
            names = [kind.__name__ for kind in kinds]
            log.warning("Recipe type changed from %s to %s. This may affect model behavior.", *names)
        else:
            log.info("recipe changed from %s to %s", before, after)

    def place(self) -> Place | None:
        """The place of the module whose frame Dynamo is compiling; that of the backend's model for a function."""
        code, frame = frame_being_compiled()
        root = root_of({name: value for name, value in frame.items() if name in ("self", "fn")})
        if root is None:
            modules = (value for value in frame.values() if isinstance(value, nn.Module))
            root = next((module for module in modules if is_method_of(module, code)), None) or self._model_of_call()
        return None if root is None else self.place_of(root)

    def _locate(self, root: nn.Module) -> None:
        """Learns the names of a module whose call runs a graph that was captured for another one."""
        if self.by_name:
            self._model_around(root)
        else:
            self._located.add(root)
            self._begin_copies(root)
            self._add_called()

    def _add_called(self) -> None:
        """Notes the module that torch.compile was given: behind a graph break, the frame is of a part of it."""
        called = self._compiled_now()
        if called is not None and called not in self.roots:
            self.add_root(called)
            self.first().states.of(self.place_of(called).home)

    def _compiled_now(self) -> nn.Module | None:
        """The module that torch.compile was given for the call that runs now; tools have but the one they know.

        None for a call of another backend, whose guards torch asks after those of this one.
        """
        call = compiled_call() if self.of_a_model else None
        another = call is not None and getattr(call.backend, "controls", self) is not self
        return None if call is None or another else call.module

    def _model_of_call(self) -> nn.Module | None:
        """The backend's own model, or the module that is called if this is another."""
        model, called = self.model(), self._compiled_now()
        if called is None or model is None:
            return model or called
        related = path_in(called, model) is not None or path_in(model, called) is not None
        return model if related else called

    def names(self) -> dict[str, str]:
        """The names of the parts of the modules that this backend compiles, by the ids of these parts."""
        return {part: name for home in reversed(self.homes()) for part, name in names_in(home).items()}

    def homes(self) -> list[nn.Module]:
        """The outermost modules that this backend compiles, in which layers have their names."""
        return [*self.first().states.by_module]

    def place_of(self, root: nn.Module) -> Place:
        """The place of a module in the first that this backend compiles and that holds it."""
        return place_of(root, [*self.roots])

    def place_with(self, tensors: Mapping[str, Any]) -> Place | None:
        """The place of the module that holds these tensors by name."""
        root = next((root for root in [*self.roots] if holds(root, tensors)), None)
        return None if root is None else self.place_of(root)

    def parts(self, model: nn.Module | None = None) -> list[Part]:
        """The states of the modules that this backend compiles, by their own names or those in a model."""
        first = self.first()
        store, group = first.states, first.options.group
        parts = [Part(store.nowhere)]
        orphan = store.latest() if model is None and not store.by_module else None
        if orphan is not None:
            parts.append(Part(orphan))
        for home in [*store.by_module]:
            within = [path for path in self.within if path in names_in(home).values()]
            slots = expected(home, self._recipe_in(home), within, group)
            if model is None or home is model:
                parts.append(Part(store.of(home), home, slots))
            elif (path := path_in(model, home)) is not None:
                parts.append(Part(store.of(home), home, slots, prefix=path))
            elif (path := path_in(home, model)) is not None:
                parts.append(Part(store.of(home), home, slots, inner=path))
        return parts


Root = tuple[str, bool]
"""The variable of a frame that has the module which it runs, and True if that is the first of a tuple."""


def root_of(frame: Mapping[str, Any]) -> nn.Module | None:
    """The module that a frame runs, from its variables."""
    return root_at(frame, place_of_root(frame))


def place_of_root(frame: Mapping[str, Any]) -> Root | None:
    """Returns where a frame has the module that it runs; frames of one code have it in the same place."""
    names = [name for name in ("self", "fn", *sorted(frame)) if name in frame]
    places = ((name, first) for first in (False, True) for name in names)
    return next((place for place in places if root_at(frame, place) is not None), None)


def root_at(frame: Mapping[str, Any], place: Root | None) -> nn.Module | None:
    """The module at a place in a frame, if there is one, or that of a method there."""
    if place is None:
        return None
    name, first = place
    value = frame.get(name)
    if first:
        value = value[0] if isinstance(value, tuple) and value else None
    owner = value.__self__ if isinstance(value, MethodType) else value
    return owner if isinstance(owner, nn.Module) else None


_numbers = itertools.count()
_recipes_by_name: weakref.WeakKeyDictionary[nn.Module, Recipe] = weakref.WeakKeyDictionary()
_all: weakref.WeakSet[Controls] = weakref.WeakSet()


def controls_that_compiled(model: nn.Module) -> list[Controls]:
    """The controls of all backends that compile a model or a part of it; those of tools, which look once, are none."""
    parts = set(map(id, model.modules()))
    for controls in [*_all]:
        controls.begin_copies_in(parts)
    return [
        controls for controls in [*_all] if controls.of_a_model and any(id(root) in parts for root in [*controls.roots])
    ]
