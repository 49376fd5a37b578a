"""The modules that compiled graphs run, by which their states are told apart.

Dynamo gives all modules of a class one graph, such as the blocks of a model that are compiled each. The parameters are
inputs of the graph, so a call shows by their identity which block it runs, and the graph reads the states of that one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxquant.backend.states import Expected, ModuleStates, StateStore
from fxquant.compat.inside.frames import unwrapped
from fxquant.compat.inside.ranks import differs_by_rank
from fxquant.formats import LINEAR_OPERANDS
from fxquant.passes.plan.layers import clean_path
from fxquant.quantizers import DelayedScalingRequest, Quantizer
from fxquant.recipes import Recipe
from fxquant.roles import QuantizerRole
from fxquant.state import DelayedState, RandomState, Slots, State

_Read = tuple[ModuleStates, list[State]]
"""The states of a module, and those of them that a graph reads."""

_FEW = 3
"""The parameters that tell blocks apart: a first one may be tied, and so the same in all."""


@dataclass(frozen=True)
class Place:
    """A module `root` that a frame runs, at `path` in `home`, the outermost module that its backend compiles."""

    root: nn.Module
    home: nn.Module
    path: str

    def names(self) -> dict[str, str]:
        """The names in `home` of the modules of `root` by their ids, and its own for what stands in none of them."""
        inside = {str(id(part)): _joined(self.path, clean_path(name)) for name, part in self.root.named_modules()}
        return {**inside, "": self.path}


def place_of(root: nn.Module, roots: Sequence[nn.Module]) -> Place:
    """The place of a module in the first of `roots` that holds it."""
    root = unwrapped(root)
    for outer in roots:
        home = unwrapped(outer)
        path = path_in(home, root)
        if path is not None:
            return Place(root, home, path)
    return Place(root, root, "")


def path_in(module: nn.Module, part: nn.Module) -> str | None:
    """The path of a part in a module; None if it holds none such."""
    names = (name for name, inside in module.named_modules(remove_duplicate=False) if inside is part)
    name = next(names, None)
    return None if name is None else clean_path(name)


def names_in(home: nn.Module | None) -> dict[str, str]:
    """The paths of the modules in a module by their ids; none for None."""
    named = () if home is None else home.named_modules()
    return {str(id(part)): clean_path(name) for name, part in named if name}


def _joined(*words: str) -> str:
    return ".".join(filter(None, words))


@dataclass(frozen=True)
class _Attribute:
    """A parameter or a buffer of a module by its name: `swap_tensors` refuses a tensor that anything refers to."""

    module: weakref.ref[nn.Module]
    name: str

    @classmethod
    def of(cls, root: nn.Module, path: str) -> _Attribute:
        parent, _, name = path.rpartition(".")
        return cls(weakref.ref(root.get_submodule(parent)), name)

    def has(self, tensor: object) -> bool:
        return getattr(self.module(), self.name, None) is tensor


class Blocks:
    """The states of the modules that one graph serves: of each, those of the slots that the graph asks for.

    `first` is the module that the graph was captured for, and any that is not found.
    """

    def __init__(
        self, slots: Slots, device: torch.device, group: str | None, store: StateStore, first: Place | None
    ) -> None:
        self._slots, self._device, self._group, self._store = slots, device, group, store
        self._path = first.path if first is not None else ""
        self.first = self._of(first)
        self._marks: list[tuple[int, str]] = []
        self._known: dict[tuple[int, ...], tuple[list[_Attribute], _Read]] = {}
        self._renamed: dict[int, tuple[Mapping[str, str], _Read]] = {}
        self._places: Callable[[Mapping[str, Any]], Place | None] = lambda tensors: None

    def look_at(
        self, root: nn.Module, inputs: Sequence[Any], places: Callable[[Mapping[str, Any]], Place | None]
    ) -> None:
        """Tells blocks apart by the parameters of `root` among the inputs; `places` finds what holds such tensors."""
        held = {id(tensor): name for name, tensor in _tensors(root)}
        self._marks = [(i, held[id(x)]) for i, x in enumerate(inputs) if id(x) in held][:_FEW]
        self._places = places

    def of_call(self, inputs: Sequence[Any], names: Mapping[str, str]) -> list[State]:
        """The states of the module that a call of the graph runs, made the valid ones of their slots.

        `names` are those of the captured layers in this call, which count where no parameter shows the module.
        """
        states, valid = self._of_inputs(inputs) or self._of_names(names)
        for state in valid:
            states.enter(state)
        return valid

    def _of_names(self, names: Mapping[str, str]) -> _Read:
        if not self.first[1] or all(layer == name for layer, name in names.items()):
            return self.first
        if id(names) not in self._renamed:
            states = self.first[0]
            self._renamed[id(names)] = names, (states, self._get(states, self._slots.renamed(names)))
        return self._renamed[id(names)][1]

    def _get(self, states: ModuleStates, slots: Slots, rename: Callable[[str], str] = str) -> list[State]:
        return states.get(slots, self._device, rename, self._group)

    def _of_inputs(self, inputs: Sequence[Any]) -> _Read | None:
        if not self.first[1]:
            return self.first
        if not self._marks:
            return None
        marks = [inputs[i] for i, _ in self._marks]
        key = tuple(map(id, marks))
        if key in self._known:
            attributes, read = self._known[key]
            if all(attribute.has(mark) for attribute, mark in zip(attributes, marks, strict=True)):
                return read
        place = self._places({name: mark for (_, name), mark in zip(self._marks, marks, strict=True)})
        if place is None:
            return None
        read = self._of(place)
        self._known[key] = ([_Attribute.of(place.root, name) for _, name in self._marks], read)
        return read

    def _of(self, place: Place | None) -> _Read:
        states = self._store.of(place.home if place is not None else None)

        def rename(address: str) -> str:
            """The address in this module of what the graph has in the first."""
            if place is None or place.path == self._path:
                return address
            inside = address == self._path or address.startswith(f"{self._path}.") or not self._path
            rest = address.removeprefix(self._path).strip(".")
            return _joined(place.path, rest) if inside else address

        return states, self._get(states, self._slots, rename)


def holds(root: nn.Module, tensors: Mapping[str, Any]) -> bool:
    """Returns True if a module has these very tensors as parameters or buffers, by name."""
    try:
        root = unwrapped(root)
        return all(_tensor(root, name) is tensor for name, tensor in tensors.items())
    except AttributeError:
        return False


def _tensor(root: nn.Module, name: str) -> Any:
    path, _, attribute = name.rpartition(".")
    return getattr(root.get_submodule(path), attribute)


def _tensors(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from root.named_parameters(remove_duplicate=False)
    yield from root.named_buffers(remove_duplicate=False)


def expected(module: nn.Module, recipe: Recipe, within: Sequence[str] = (), group: str | None = None) -> list[Expected]:
    """The states that the linear layers of a module, or of parts of it, will have under a recipe before any has run.

    `group` is the process group that amaxes are taken over, if one was named.
    """
    slots: list[Expected] = []
    for name, layer in module.named_modules():
        if not isinstance(layer, nn.Linear) or type(layer).forward is not nn.Linear.forward:
            continue
        parent = module.get_submodule(name.rpartition(".")[0])
        if isinstance(parent, nn.MultiheadAttention):  # it does not call its layers
            continue
        path = clean_path(name)
        if within and not any(f"{path}.".startswith(f"{part}.") for part in within):
            continue
        for operand in LINEAR_OPERANDS:
            answer = recipe.quantizer(QuantizerRole("linear", operand, path))
            address = _joined(path, operand)
            if isinstance(answer, DelayedScalingRequest):
                slots.append(
                    Expected(address, DelayedState, answer.amax_history_len, differs_by_rank(answer.reduce_amax, group))
                )
            elif isinstance(answer, Quantizer) and answer.operand_spec().is_stochastic:
                slots.append(Expected(address, RandomState))
    return slots
