"""The states of compiled models by the names of their layers, as they are saved, restored and found again.

    {"layers.0.up.input.scale": .., "layers.0.up.input.amax_history": .., "layers.0.up.grad_output.random": ..}

A slot, which is one operand of one product, has one address whichever graphs read it: the graph that runs takes over
what others have written.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fxquant.compat.inside.ranks import differs_by_rank
from fxquant.errors import FxQuantWarning, tell
from fxquant.passes.plan.layers import clean_path
from fxquant.state import DelayedState, RandomState, Slots, State, address, signed

Saved = dict[str, dict[str, Tensor]]
"""The values of slots by address and name."""

KINDS: tuple[type[State], ...] = (DelayedState, RandomState)


@dataclass(frozen=True)
class Expected:
    """A slot that a model will have, of which nothing may have run: a kind of state, and the length of its history."""

    address: str
    kind: type[State]
    length: int = 0
    of_rank: bool = False
    """True where other ranks have values of their own."""

    def initial(self) -> dict[str, Tensor]:
        """The values that it begins with."""
        if self.kind is DelayedState:
            return {"scale": torch.tensor(1.0), "amax_history": torch.zeros(self.length)}
        return {"random": torch.tensor([signed(torch.initial_seed()), 0])}


class ModuleStates:
    """The states of a module and its parts, of which each slot has one that is valid.

    Delayed scaling has a state for each history length. What was loaded waits for the graphs that will read it, also
    with `others`, the states of nowhere.
    """

    def __init__(self, others: ModuleStates | None = None) -> None:
        self._others = others
        self.module: Callable[[], nn.Module | None] | None = None
        self._states: dict[tuple[type[State], tuple[str, ...], int, torch.device], State] = {}
        self._holders: dict[tuple[str, type[State]], State] = {}
        self._waiting: Saved = {}
        self._loaded: set[type[State]] = set()
        self._told = False

    def get(
        self, slots: Slots, device: torch.device, rename: Callable[[str], str] = str, group: str | None = None
    ) -> list[State]:
        """The states that a graph with these slots needs, whose addresses are renamed for the module that it runs."""
        states: list[State] = []
        if slots.request is not None:
            addresses = tuple(rename(address(key)) for key in slots.keys)
            length = slots.request.amax_history_len
            state = self._get(DelayedState, addresses, length, device)
            assert isinstance(state, DelayedState)
            state.group, state.reduced = group, slots.request.reduce_amax
            states.append(state)
        if slots.rounded:
            states.append(self._get(RandomState, tuple(rename(address(key)) for key in slots.rounded), 0, device))
        return states

    def _get(self, kind: type[State], addresses: tuple[str, ...], length: int, device: torch.device) -> State:
        key = (kind, addresses, length, device)
        if key not in self._states:
            if kind is DelayedState:
                self._states[key] = DelayedState(addresses, length, device)
            else:
                self._states[key] = RandomState(addresses, torch.initial_seed(), device, self._marks(addresses))
        return self._states[key]

    def _marks(self, addresses: tuple[str, ...]) -> list[str]:
        """The addresses with the places of layers in their module for their names, which wrappers inside it change."""
        module = self.module() if self.module is not None else None
        leaves = [name for name, part in module.named_modules() if not [*part.children()]] if module is not None else []
        places = {clean_path(name): str(i) for i, name in enumerate(leaves) if name}
        layers = {layer: place for layer, place in places.items() if any(a.startswith(f"{layer}.") for a in addresses)}
        split = ((next((x for x in layers if a.startswith(f"{x}.")), ""), a) for a in addresses)
        return [a.replace(layer, layers[layer], 1) if layer else a for layer, a in split]

    def _take(self, name: str, kind: type[State]) -> dict[str, Tensor]:
        """Removes the values of a slot from those that wait for a graph; empty if there are none."""
        for waiting in (self._waiting, self._others._waiting if self._others else {}):
            values = waiting.get(name, {})
            if set(kind.names) <= set(values):
                return {part: values.pop(part) for part in kind.names}
        return {}

    def _tell_absent(self, kind: type[State], absent: list[str]) -> None:
        """Warns once of slots that begin anew, though others were loaded."""
        loaded = self._loaded | (self._others._loaded if self._others else set())
        if absent and kind in loaded and not self._told:
            self._told = True
            tell(
                f"the quantization state that was loaded has nothing for {', '.join(absent[:8])}"
                f"{', ...' if len(absent) > 8 else ''}, which begin anew",
                FxQuantWarning,
            )

    def reset(self) -> None:
        """Makes all states what they were before any graph ran, also those that were loaded."""
        self._holders.clear()
        self._waiting.clear()
        self._loaded.clear()
        for state in self._states.values():
            state.reset()

    def enter(self, state: State) -> None:
        """Makes a state the valid one of its slots, before a graph runs.

        It takes over what other states have recorded, and what was loaded for slots that no graph has read.
        """
        if state.current:
            return
        kind = type(state)
        by_holder: dict[State, list[int]] = {}
        for i, name in enumerate(state.addresses):
            holder = self._holders.get((name, kind))
            if holder is not None and holder is not state:
                by_holder.setdefault(holder, []).append(i)
        for holder, columns in by_holder.items():
            if any(tensor.is_meta for tensor in holder.tensors().values()):  # nothing was recorded there
                continue
            places = [holder.addresses.index(state.addresses[i]) for i in columns]
            state.write({name: value[..., places] for name, value in holder.read().items()}, columns)
            holder.current = False
        new = [name for name in state.addresses if (name, kind) not in self._holders]
        values = {name: parts for name in new if (parts := self._take(name, kind))}
        _write(state, values)
        self._tell_absent(kind, [name for name in new if name not in values])
        self._holders |= dict.fromkeys(((name, kind) for name in state.addresses), state)
        state.current = True

    def slots(self) -> Iterator[tuple[str, type[State]]]:
        """The slots that graphs have read."""
        yield from self._holders

    def of_rank(self) -> Iterator[str]:
        """The slots that graphs have read of which other ranks have values of their own."""
        for (name, _), state in self._holders.items():
            if isinstance(state, DelayedState) and differs_by_rank(state.reduced, state.group):
                yield name

    def held(self) -> dict[str, Tensor]:
        """Copies of the values of the slots that graphs have read, by name."""
        values = {state: state.read(over_ranks=True) for state in dict.fromkeys(self._holders.values())}
        return {
            f"{name}.{part}": value[..., state.addresses.index(name)].clone()
            for (name, _), state in self._holders.items()
            for part, value in values[state].items()
        }

    def waiting(self) -> dict[str, Tensor]:
        """Copies of the values that no graph has read yet, by name."""
        return {
            f"{name}.{part}": value.clone() for name, parts in self._waiting.items() for part, value in parts.items()
        }

    def write(self, saved: Saved) -> None:
        """Takes values, which have been checked, for graphs that have run and those to come."""
        self._loaded = {kind_of(part) for parts in saved.values() for part in parts}
        self._told = False
        used: set[tuple[str, type[State]]] = set()
        for state in dict.fromkeys(self._holders.values()):
            kind = type(state)
            names = [name for name in state.addresses if self._holders[name, kind] is state and name in saved]
            _write(state, {name: {part: saved[name][part] for part in kind.names} for name in names})
            used |= {(name, kind) for name in names}
        self._waiting = {
            name: rest
            for name, parts in saved.items()
            if (rest := {part: value for part, value in parts.items() if (name, kind_of(part)) not in used})
        }


class StateStore:
    """The states of all modules that a backend has compiled, which last as long as these or their graphs do."""

    def __init__(self) -> None:
        self.nowhere = ModuleStates()
        """The states of graphs that run no module, and what was loaded before a module was known."""
        self.by_module: weakref.WeakKeyDictionary[nn.Module, ModuleStates] = weakref.WeakKeyDictionary()
        self._all: list[weakref.ref[ModuleStates]] = []

    def of(self, module: nn.Module | None) -> ModuleStates:
        """The states of a module and its parts."""
        if module is None:
            return self.nowhere
        if module not in self.by_module:
            self.by_module[module] = ModuleStates(self.nowhere)
            self.by_module[module].module = weakref.ref(module)
            self._all.append(weakref.ref(self.by_module[module]))
        return self.by_module[module]

    def reset(self) -> None:
        """Makes the states of all modules what they were before any graph ran."""
        for states in (self.nowhere, *self.by_module.values()):
            states.reset()

    def latest(self) -> ModuleStates | None:
        """The states of the module that was compiled last, which may be gone; None if none was."""
        self._all = [reference for reference in self._all if reference() is not None]
        return self._all[-1]() if self._all else None


def kind_of(part: str) -> type[State]:
    """The kind of state that has values of a name."""
    return next(kind for kind in KINDS if part in kind.names)


def _write(state: State, values: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Copies the values of some slots, by address, into a state."""
    columns = [i for i, name in enumerate(state.addresses) if name in values]
    if isinstance(state, DelayedState):  # histories may differ in length
        for i in columns:
            parts = values[state.addresses[i]]
            state.write({part: parts[part].unsqueeze(-1) for part in state.names}, [i])
    elif columns:
        state.write({"random": values[state.addresses[columns[0]]]["random"].unsqueeze(-1)}, columns[:1])
