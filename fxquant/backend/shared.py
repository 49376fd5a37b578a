"""Graphs that several modules share: Dynamo captures one of a class, such as the first block of a model, for all.

The recipe was asked with the names of the layers of the first. A guard lets another module run the graph if the recipe
answers the same for the names of its layers; else Dynamo captures it again. The report gets the layers of each module
that has run.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CellType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any

from torch import Tensor, nn

from fxquant.compat.inside.frames import add_guard, frame_being_compiled
from fxquant.errors import FxQuantError
from fxquant.passes.plan.layers import clean_path
from fxquant.quantizers import value_text
from fxquant.recipes import Recipe
from fxquant.roles import QuantizerRole

Names = Callable[[], Mapping[str, str]]
"""Gives the paths of modules in the user's model, by ``str(id(module))``."""

Step = tuple[str, Any]
"""A way from a value to what it holds: ``self`` of a method, ``cell``, ``item`` or ``attribute``, and its key."""

Variable = tuple[Any, ...]
"""The name of a variable, and the steps from there to a module."""

Key = tuple["weakref.ref[nn.Module]", ...]


class Shared:
    """The modules that run one graph, and what their layers are called."""

    def __init__(self, recipe: Recipe, names: Names, roles: Sequence[QuantizerRole]) -> None:
        self._recipe, self._names = recipe, names
        self._roles = [*dict.fromkeys(roles)]
        _, frame = frame_being_compiled()
        full = names()
        places: dict[str, tuple[Variable, str]] = {}
        for variable, module in _modules_of(frame).items():
            for path, part in _parts(module).items():
                if (name := full.get(str(id(part)))) is not None:
                    places.setdefault(name, (variable, path))
        self._places = {layer: _place(layer, places) for layer in dict.fromkeys(r.name for r in self._roles)}
        self._variables = [*dict.fromkeys(place[0] for place in self._places.values() if place is not None)]
        self._now = threading.local()
        self._first = self._key(frame)
        self._ran: set[Key] = set()
        self._renamed: dict[Key, Mapping[str, str] | None] = {self._first: {layer: layer for layer in self._places}}
        if self.named:
            add_guard(
                self._holds, "fxquant: the recipe gives the layers of this module other answers than those captured"
            )

    @functools.cached_property
    def _answers(self) -> list[str]:
        return [value_text(self._recipe.quantizer(role)) for role in self._roles]

    @property
    def named(self) -> bool:
        """Tells the modules apart, as parts of a model that is known."""
        return bool(self._variables and self._places)

    def begin(self) -> tuple[Mapping[str, str], Key, bool]:
        """The names of the layers in this call by those captured, its modules, and True if these run it first."""
        key = getattr(self._now, "key", self._first)
        new = key not in self._ran
        self._ran.add(key)
        return self._renamed[key] or {}, key, new

    def _key(self, frame: Mapping[str, Any]) -> Key:
        return tuple(weakref.ref(m) for v in self._variables if (m := _module(frame, v)) is not None)

    def _holds(self, frame: Mapping[str, Any]) -> bool:
        """Returns True if the graph is right for the modules of a call."""
        self._now.key = key = self._key(frame)
        if key not in self._renamed:
            self._renamed[key] = self._rename({v: m for v in self._variables if (m := _module(frame, v)) is not None})
        return self._renamed[key] is not None

    def _rename(self, modules: Mapping[Variable, nn.Module]) -> Mapping[str, str] | None:
        """The names of the layers in other modules; None if the recipe answers something else for them."""
        full, renamed = self._names(), dict[str, str]()
        parts = {v: _parts(module) for v, module in modules.items()}
        for layer, place in self._places.items():
            if place is None:
                renamed[layer] = layer
                continue
            variable, path, rest = place
            part = parts.get(variable, {}).get(path)
            if part is None:
                return None
            renamed[layer] = ".".join(filter(None, (full.get(str(id(part)), path), rest)))
        for role, answer in zip(self._roles, self._answers, strict=True):
            if renamed[role.name] == role.name:
                continue
            try:
                other = self._recipe.quantizer(QuantizerRole(role.module_type, role.tensor_type, renamed[role.name]))
            except FxQuantError:  # told with the name when a graph of its own is compiled
                return None
            if value_text(other) != answer:
                return None
        return renamed


def named_here(names: Mapping[str, str]) -> dict[str, str]:
    """The names and, as the empty string's, that of the module whose method is captured, which torch does not say.

    There is none where this module has no name.
    """
    _, frame = frame_being_compiled()
    owners = (("self",), ("fn",), ("fn", ("self", None)))
    owner = next((m for variable in owners if (m := _module(frame, variable)) is not None), None)
    own_name = names.get(str(id(owner)))
    return {**names} if own_name is None else {"": own_name, **names}


def _modules_of(frame: Mapping[str, Any]) -> dict[Variable, nn.Module]:
    """The modules that a frame reaches from its variables, also through containers, functions and plain objects."""
    modules: dict[Variable, nn.Module] = {}
    visited: set[int] = set()
    reached: deque[tuple[Variable, Any]] = deque(((name,), frame[name]) for name in frame)
    while reached and len(visited) < _MOST_OBJECTS:
        variable, value = reached.popleft()
        if id(value) in visited or isinstance(value, _LEAVES):
            continue
        visited.add(id(value))
        if isinstance(value, nn.Module):
            modules[variable] = value
        elif len(variable) <= _MOST_STEPS:
            reached += (((*variable, step), inner) for step, inner in _inside(value))
    return modules


_MOST_OBJECTS, _MOST_STEPS = 1000, 4
"""The search for modules ends there."""

_LEAVES = (Tensor, str, bytes, int, float, complex, type, ModuleType, NoneType)


def _inside(value: Any) -> Iterator[tuple[Step, Any]]:
    """The values that a value holds, with the steps that lead there."""
    if isinstance(value, MethodType):
        yield ("self", None), value.__self__
    elif isinstance(value, FunctionType):
        yield from ((("cell", i), cell.cell_contents) for i, cell in enumerate(value.__closure__ or ()) if _full(cell))
    elif isinstance(value, (tuple, list)):
        yield from ((("item", i), inner) for i, inner in enumerate(value))
    elif isinstance(value, dict):
        yield from ((("item", key), inner) for key, inner in value.items())
    elif isinstance(value, functools.partial):
        yield from ((("attribute", name), getattr(value, name)) for name in ("func", "args", "keywords"))
    else:
        with contextlib.suppress(AttributeError):  # without asking what an object makes up
            held = object.__getattribute__(value, "__dict__")
            yield from ((("attribute", name), inner) for name, inner in [*held.items()])


def _full(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:  # the variable has no value yet
        return False
    return True


def _module(frame: Mapping[str, Any], variable: Variable) -> nn.Module | None:
    """The module that the variable of a frame leads to, if there is one."""
    name, *steps = variable
    try:
        value = frame[name]
        for kind, key in steps:
            if kind == "self":
                value = value.__self__
            elif kind == "cell":
                value = value.__closure__[key].cell_contents
            else:
                value = value[key] if kind == "item" else getattr(value, key)
    except (AttributeError, LookupError, TypeError, ValueError):
        return None
    return value if isinstance(value, nn.Module) else None


def _parts(module: nn.Module) -> dict[str, nn.Module]:
    """The modules in a module by their paths, which leave wrappers out: of one and what it wraps, the latter."""
    return {clean_path(path): part for path, part in module.named_modules(remove_duplicate=False)}


def _place(layer: str, places: Mapping[str, tuple[Variable, str]]) -> tuple[Variable, str, str] | None:
    """The variable, the path from there, and the rest of the name that is no module's; None for a layer elsewhere."""
    words = layer.split(".")
    for count in range(len(words), 0, -1):
        if (place := places.get(".".join(words[:count]))) is not None:
            return (*place, ".".join(words[count:]))
    return None
