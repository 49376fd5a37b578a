"""The states of a model as one dict of plain tensors: gathered from all that was compiled, checked, and restored."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor, nn

from fxquant.backend.by_rank import of_this_rank
from fxquant.backend.states import KINDS, Expected, ModuleStates, Saved
from fxquant.errors import OptionError, RecipeError
from fxquant.passes.plan.layers import clean_path
from fxquant.state import DelayedState, State
from fxquant.weights.delayed import load_scales

T = TypeVar("T")


def _renamed(values: Mapping[str, T], before: str, after: str) -> dict[str, T]:
    """Returns the values whose names begin with a path, under names that begin with another."""
    old, new = (f"{path}." if path else "" for path in (before, after))
    return {new + name.removeprefix(old): value for name, value in values.items() if name.startswith(old)}


@dataclass(eq=False)
class Part:
    """The states of a compiled module, or of functions where it is None; `expected` are those that it will have.

    `prefix` is its path in the model that is asked, or, where that lies inside, `inner` the path of that model in it.
    """

    states: ModuleStates
    module: nn.Module | None = None
    expected: Sequence[Expected] = field(default_factory=list)
    prefix: str = ""
    inner: str = ""

    @property
    def what(self) -> str:
        return "the compiled functions" if self.module is None else f"this {type(self.module).__name__}"

    def named(self, values: Mapping[str, T]) -> dict[str, T]:
        """Values under their names in the model that is asked, without those outside of it."""
        return _renamed(values, self.inner, self.prefix)

    def own(self, values: Mapping[str, T]) -> dict[str, T]:
        """The values of this part, under its own names."""
        return _renamed(values, self.prefix, self.inner)

    def of_rank(self) -> set[str]:
        """The values, by name in the model that is asked, of which other ranks have their own."""
        slots = [*(slot.address for slot in self.expected if slot.of_rank), *self.states.of_rank()]
        return {f"{name}.{key}" for name in self.named(dict.fromkeys(slots)) for key in DelayedState.names}

    def needed(self) -> dict[tuple[str, type[State]], None]:
        """The slots that a saved state must have: the expected ones, and those that graphs have read."""
        slots = dict.fromkeys([*((slot.address, slot.kind) for slot in self.expected), *self.states.slots()])
        return {(name, kind): None for name, kind in slots if self.named({name: None})}


def gathered(parts: Sequence[Part]) -> dict[str, Tensor]:
    """The states of all parts by name."""
    state: dict[str, Tensor] = {}
    for part in parts:
        initial = {f"{slot.address}.{key}": value for slot in part.expected for key, value in slot.initial().items()}
        state |= part.named(initial)
    for part in parts:
        state |= part.named(part.states.waiting())
    named: dict[str, Part] = {}
    for part in parts:
        values = part.named(part.states.held())
        both = [name for name in values if name in named and not (named[name].prefix or part.prefix)]
        if both:
            raise OptionError(
                f"several modules that one backend has compiled have a state {both[0]}: ask fxquant.state_dict(model) "
                "for a model that holds them all, or give the backend the model: fxquant.Backend(recipe, model=model)"
            )
        named |= dict.fromkeys(values, part)
        state |= values
    return state


def restore(saved: object, parts: Sequence[Part]) -> None:
    """Gives every part its states. Raises RecipeError, before anything is changed, for what is not theirs."""
    rest = _parsed(of_this_rank(saved))
    shares: list[tuple[Part, Saved]] = []
    for part in sorted(parts, key=lambda part: -len(part.prefix)):
        mine = part.own(rest)
        needed = {name for name, _ in part.needed()}
        alone = part.prefix or part.inner or not any(other is not part and not other.prefix for other in parts)
        share = mine if alone else {name: values for name, values in mine.items() if name in needed}
        shares.append((part, share))
        taken = part.named(share)
        rest = {name: values for name, values in rest.items() if name not in taken}
    if rest:  # of graphs that are still to come
        part, share = next((one for one in shares if one[0].module is not None), shares[-1])
        share |= part.own(rest)
    for part, share in shares:
        _check(share, part)
    for part, share in shares:
        part.states.write(share)
        if part.module is not None:
            load_scales(part.module, share)


_OLD = re.compile(r"\d+\.(scale|amax_history|random)")
_PARTS = {part for kind in KINDS for part in kind.names}


def _parsed(saved: object) -> Saved:
    """The values of a saved state by address and name.

    Raises RecipeError for what is none, and for values that no state has: other shapes, NaN.
    """
    if not isinstance(saved, Mapping):
        raise RecipeError(f"a quantization state is a dict of tensors, not a {type(saved).__name__}")
    by_address: Saved = {}
    for key, value in saved.items():
        name, _, part = str(key).rpartition(".")
        if _OLD.fullmatch(str(key)):
            raise RecipeError(
                f"{key!r} is of a quantization state that an earlier fxquant saved by the order of compilation, which "
                "cannot be told apart by layers: begin with new scales, and save again"
            )
        if part not in _PARTS or not name:
            raise RecipeError(
                f"{key!r} is no key of a quantization state, such as 'layers.0.up.input.scale': load what state_dict() "
                "of the quantization gave, not the model's state_dict"
            )
        if problem := _problem(part, value):
            raise RecipeError(f"the saved quantization state has {problem} in {key!r}; nothing was loaded")
        by_address.setdefault(name, {})[part] = value
    for name, parts in by_address.items():
        if absent := [part for kind in KINDS if set(kind.names) & set(parts) for part in set(kind.names) - set(parts)]:
            raise RecipeError(
                f"the saved quantization state has {name}.{', '.join(parts)} but not {name}.{absent[0]}: it was "
                "truncated; nothing was loaded"
            )
    return by_address


def _problem(part: str, value: object) -> str:
    """The reason why a value cannot be one of a slot; empty if it can."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__} in the place of a tensor"
    dims = {"scale": 0}.get(part, 1)
    if value.dim() != dims or (part == "random" and len(value) != 2) or (dims and not len(value)):
        shape = {"scale": "a scalar", "amax_history": "amaxes [steps]", "random": "seed and step [2]"}[part]
        return f"the shape {[*value.shape]} in the place of {shape}"
    if value.is_floating_point() == (part == "random"):
        return f"{value.dtype}"
    if value.is_meta:
        return "no data (device meta)"
    if part == "scale" and not (value.isfinite() & (value > 0)).item():
        return f"{value.item()}"
    return "NaN" if part == "amax_history" and value.isnan().any() else ""


def _check(saved: Saved, part: Part) -> None:
    """Raises RecipeError if a saved state is not that of a part of the model."""
    needed = part.needed()
    absent = [name for name, kind in needed if not set(kind.names) <= set(saved.get(name, {}))]
    if absent:
        held = "; ".join(f"{name}: {', '.join(parts)}" for name, parts in [*saved.items()][:4])
        raise RecipeError(
            f"the saved quantization state lacks {len(absent)} of the {len(needed)} states of {part.what}: "
            f"{_some(absent)}. It holds {held or 'nothing'}{'; ...' if len(saved) > 4 else ''}: it was saved from "
            "another model or recipe, or was lost on the way; nothing was loaded"
        )
    if saved and not needed and part.module is not None:
        raise RecipeError(
            f"the saved quantization state is of {_some([*saved])}, and the recipe of {part.what} has no state: set "
            "the recipe that it was saved under first; nothing was loaded"
        )
    if part.module is not None:
        modules = {clean_path(name): module for name, module in part.module.named_modules()}
        strangers = list(dict.fromkeys(layer for layer in map(_layer_of, saved) if not _is_layer(layer, modules)))
        if strangers:
            raise RecipeError(
                f"the saved quantization state has layers that {part.what} has not: {_some(strangers)}. It was saved "
                "from another model; nothing was loaded"
            )


def _some(names: Sequence[str]) -> str:
    return f"{', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"


def _layer_of(name: str) -> str:
    """The layer of an address."""
    words = name.split(".")
    return ".".join(words[: -2 if words[-1].isdecimal() else -1])


def _is_layer(layer: str, modules: Mapping[str, nn.Module]) -> bool:
    """Returns True for a module, for a projection named after a parameter, and for what no module of a model holds."""
    first, (parent, _, projection) = layer.partition(".")[0], layer.rpartition(".")
    if layer in modules or (first not in modules and not first.isdecimal()):
        return True
    held = modules[parent].named_parameters(recurse=False) if parent in modules else ()
    return any(name.startswith(projection) for name, _ in held)
