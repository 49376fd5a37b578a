"""Quantized weights that last from one change of a parameter to the next: once a step, not once a micro-batch."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from fxquant.backend.outside import Quantizations
from fxquant.compat.inside.memory import Memories, Memory, compile_lock, is_captured, is_fake, stream_of, unseen_writes
from fxquant.compat.inside.placements import held_part
from fxquant.compat.values import storage_key
from fxquant.errors import FxQuantWarning, tell
from fxquant.passes.insert.cache_weights import Taken, Weight
from fxquant.report.data import MODEL

Moment = tuple[int, int | None]
"""The number of optimizer steps so far, and the stream: what is computed on one is not ready on another."""

_optimizer_steps = [0]
"""The number of optimizer steps: kernels of optimizers may write without counting a version."""


@functools.cache
def _watch_optimizers() -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def stepped(*_: Any) -> None:
        _optimizer_steps[0] += 1

    register_optimizer_step_post_hook(stepped)


_Reader = tuple["weakref.ref[CachedWeights]", int]
"""A graph, and the module for which it remembers parts."""


@dataclass
class _Entry:
    """The parts of one weight, by direction; its memory, and what else was so when they were made."""

    memory: Memory
    device: torch.device
    moment: Moment
    parts: dict[str, list[Tensor]] = field(default_factory=dict)
    readers: set[_Reader] = field(default_factory=set)

    def of(self, parameter: Tensor) -> dict[str, list[Tensor]]:
        """Returns the parts if they can be seen to be those of a parameter still; else none."""
        parts = self.parts  # taken before the memory is looked at: another thread may empty the entry at any time
        as_it_was = _is_moment(self.device, self.moment) and self.memory.unchanged(parameter)
        return parts if as_it_was else {}


@contextmanager
def _as_it_is(parameter: Tensor) -> Iterator[None]:
    """Lets operators on a parameter run without autograd, and without the autocast that may be on around the call."""
    device = parameter.device.type
    able = torch.amp.is_autocast_available(device)  # not the meta device
    with torch.no_grad(), torch.autocast(device, enabled=False) if able else nullcontext():
        yield


class WeightCache:
    """The quantized weights of the graphs of one backend.

    A weight is quantized again unless it can be seen that nothing has written into it: version and memory are as they
    were, the memory is the weight's alone, nothing has asked for its `.data`, and no optimizer has stepped. Payloads
    take memory in each direction that is used: 8-bit formats two bytes an element in training. Threads may share them.
    """

    def __init__(self, quantizations: Quantizations) -> None:
        self._quantizations = quantizations
        self._entries: dict[tuple[int, Weight], _Entry] = {}
        self._lock = threading.RLock()
        self._warned = False
        _watch_optimizers()

    def of(self, taken: Sequence[Taken]) -> CachedWeights:
        """Returns the weights that a graph takes, to be asked for in each of its calls."""
        return CachedWeights(self, taken)

    def clear(self) -> None:
        """Forgets all quantized weights, so that the next forward quantizes them again."""
        with self._lock:
            for key in list(self._entries):
                self._forget(key)

    def _forget(self, key: tuple[int, Weight]) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            entry.parts = {}
            for reader, module in entry.readers:
                if (graph := reader()) is not None:
                    graph.steady.pop(module, None)

    def remember(self, graph: CachedWeights, module: int, steady: _Steady) -> None:
        """Lets a graph keep the parts for one of its modules until one of the entries is forgotten."""
        reader = weakref.ref(graph), module
        with self._lock:
            if not all(entry.parts for entry in steady.entries):
                return
            for entry in steady.entries:
                if reader not in entry.readers:
                    entry.readers = {other for other in entry.readers if other[0]() is not None} | {reader}
            graph.steady[module] = steady

    def get(self, parameter: Tensor, taken: Sequence[Taken]) -> tuple[dict[str, list[Tensor]], _Entry | None]:
        """Returns the parts of the directions of one weight, and where they are kept, if they are."""
        weight, directions = taken[0].weight, [part.direction for part in taken]
        if is_fake(parameter):  # as torch runs the parts of a graph that it has split
            with _as_it_is(parameter):
                parts = weight.quantize(parameter.detach(), tuple(directions))
            return dict(zip(directions, parts, strict=True)), None
        if is_captured(parameter.device):  # a recorded graph is replayed when the payloads may be gone
            return self._quantize(parameter, weight, directions), None
        with self._lock:
            if reason := unseen_writes(parameter):
                self._forget((storage_key(parameter), weight))
                self._warn(parameter, taken[0], reason)
                return self._quantize(parameter, weight, directions), None
            entry = self._entry(parameter, weight)
            missing = [direction for direction in directions if direction not in entry.parts]
            if missing:
                entry.parts = entry.parts | self._quantize(parameter, weight, missing)
            return entry.parts, entry

    def _entry(self, parameter: Tensor, weight: Weight) -> _Entry:
        """The entry of a weight, which is new and empty if it cannot be seen that the weight is as it was."""
        device = parameter.device
        moment = moment_on(device)
        key = (storage_key(parameter), weight)
        entry = self._entries.get(key)
        if entry is None or entry.moment != moment or not entry.memory.unchanged(parameter):
            self._forget(key)
            memory = Memory(parameter, functools.partial(self._forget, key))
            entry = self._entries[key] = _Entry(memory, device, moment)
        return entry

    def _warn(self, parameter: Tensor, taken: Taken, reason: str) -> None:
        if self._warned or not compile_lock.acquire(blocking=False):  # a thread that compiles holds it for a moment
            return
        compile_lock.release()
        self._warned = True
        tell(
            f"cache_weights quantizes the weight {[*parameter.shape]} of layer {taken.layer or MODEL} in every call, "
            f"and perhaps others: it {reason}, so that a change could pass unseen. Let go of tensors and arrays made "
            "of it, or give it memory of its own: p.data = p.data.clone(). What FSDP gathers is always shared",
            FxQuantWarning,
        )

    def _quantize(self, parameter: Tensor, weight: Weight, directions: list[str]) -> dict[str, list[Tensor]]:
        def run(value: Tensor) -> list[list[Tensor]]:
            return weight.quantize(value, tuple(directions))

        with torch.inference_mode(False), _as_it_is(parameter):
            quantized = self._quantizations((weight, *directions), run, parameter.detach())
        # dense, as graphs expect their inputs; kernels may not give them so
        dense = ([part.contiguous() for part in parts] for parts in quantized)
        return dict(zip(directions, dense, strict=True))


def _is_moment(device: torch.device, moment: Moment) -> bool:
    return not is_captured(device) and moment_on(device) == moment


def moment_on(device: torch.device) -> Moment:
    """Returns what must be as it was for a weight on a device to be as it was."""
    return _optimizer_steps[0], stream_of(device)


@dataclass(frozen=True)
class _Steady:
    """The weights of one module as they were at the last call, and all parts in the order of the graph's inputs."""

    entries: Sequence[_Entry]
    memories: Memories
    moments: Mapping[torch.device, Moment]
    parts: Sequence[Tensor]

    def holds(self, parameters: Sequence[Tensor]) -> bool:
        """Returns True if the parts can be seen to be those of the parameters still."""
        return all(map(_is_moment, self.moments, self.moments.values())) and self.memories.unchanged(parameters)


class CachedWeights:
    """The weights that one graph takes.

    It remembers the parts of the last call, for each module that runs the graph. If all can be seen to be those of the
    weights still, nothing is looked up, and no lock is taken; else the cache looks at each.
    """

    def __init__(self, cache: WeightCache, taken: Sequence[Taken]) -> None:
        self._cache = cache
        slots: dict[tuple[int, Weight], list[Taken]] = {}
        for part in taken:
            slots.setdefault((part.place, part.weight), []).append(part)
        numbers = {key: number for number, key in enumerate(slots)}
        self._order = [(numbers[part.place, part.weight], part.direction) for part in taken]
        self._slots = [*slots.values()]
        self._places = [place for place, _ in slots]
        self.steady: dict[int, _Steady] = {}
        """The parts for each module that has run the graph, by the id of its first parameter."""

    def parts(self, inputs: Sequence[Any]) -> Sequence[Tensor]:
        """All parts that the graph takes, in order, given its inputs."""
        if not self._slots:
            return ()
        parameters = [inputs[place] for place in self._places]
        steady = self.steady.get(id(parameters[0]))
        if steady is not None and steady.holds(parameters):
            return steady.parts
        return self._look(parameters, steady)

    def _look(self, parameters: Sequence[Tensor], before: _Steady | None) -> Sequence[Tensor]:
        quantized: list[dict[str, list[Tensor]]] = []
        entries: list[_Entry | None] = []
        for i, parameter in enumerate(map(held_part, parameters)):
            entry = None if before is None else before.entries[i]
            parts = {} if entry is None else entry.of(parameter)
            if not parts:
                parts, entry = self._cache.get(parameter, self._slots[i])
            quantized.append(parts)
            entries.append(entry)
        all_parts = [tensor for index, direction in self._order for tensor in quantized[index][direction]]
        kept = [entry for entry in entries if entry is not None]
        # a part of a DTensor is a tensor of its own in each call, and no parameter
        if len(kept) == len(entries) and {*map(type, parameters)} == {Parameter}:
            moments = {entry.device: entry.moment for entry in kept}
            steady = _Steady(kept, Memories([entry.memory for entry in kept]), moments, all_parts)
            self._cache.remember(self, id(parameters[0]), steady)
        return all_parts
