"""Quantized weights that last from one change of a parameter to the next: once a step, not once a micro-batch."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.backend.notices import tell
from fxquant.compat.memory import Memory, compile_lock, is_captured, is_fake, stream_of, unseen_writes
from fxquant.compat.placements import held_part
from fxquant.compat.private import make_fx
from fxquant.compat.values import storage_key
from fxquant.errors import FxQuantWarning
from fxquant.passes.insert.cache_weights import Taken, Weight
from fxquant.report.data import MODEL

Compile = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]

_optimizer_steps = [0]
"""The number of optimizer steps: kernels of optimizers may write without counting a version."""


@functools.cache
def _watch_optimizers() -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def stepped(*_: Any) -> None:
        _optimizer_steps[0] += 1

    register_optimizer_step_post_hook(stepped)


@dataclass
class _Entry:
    """The parts of one weight, by direction; its memory, and what else was so when they were made."""

    memory: Memory
    moment: tuple[Any, ...]
    parts: dict[str, list[Tensor]] = field(default_factory=dict)


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

    def __init__(self, compile: Compile) -> None:
        self._compile = compile
        self._functions: dict[Any, tuple[Callable[..., Any], tuple[int, ...]]] = {}
        self._entries: dict[tuple[int, Weight], _Entry] = {}
        self._lock = threading.RLock()
        self._warned = False
        _watch_optimizers()

    def parts(self, taken: Sequence[Taken], inputs: Sequence[Any]) -> list[Tensor]:
        """All parts that a graph takes, in order, given its inputs."""
        wanted: dict[tuple[int, Weight], list[Taken]] = {}
        for part in taken:
            wanted.setdefault((part.place, part.weight), []).append(part)
        quantized = {key: self._get(held_part(inputs[key[0]]), parts) for key, parts in wanted.items()}
        return [tensor for part in taken for tensor in quantized[part.place, part.weight][part.direction]]

    def clear(self) -> None:
        """Forgets all quantized weights, so that the next forward quantizes them again."""
        self._entries.clear()

    def _get(self, parameter: Tensor, taken: Sequence[Taken]) -> dict[str, list[Tensor]]:
        weight, directions = taken[0].weight, [part.direction for part in taken]
        if is_fake(parameter):  # as torch runs the parts of a graph that it has split
            with _as_it_is(parameter):
                return dict(zip(directions, weight.quantize(parameter.detach(), tuple(directions)), strict=True))
        if is_captured(parameter):  # a recorded graph is replayed when the payloads may be gone
            return self._quantize(parameter, weight, directions)
        with self._lock:
            if reason := unseen_writes(parameter):
                self._entries.pop((storage_key(parameter), weight), None)
                self._warn(parameter, taken[0], reason)
                return self._quantize(parameter, weight, directions)
            entry = self._entry(parameter, weight)
            missing = [direction for direction in directions if direction not in entry.parts]
            if missing:
                entry.parts |= self._quantize(parameter, weight, missing)
            return dict(entry.parts)

    def _entry(self, parameter: Tensor, weight: Weight) -> _Entry:
        """The entry of a weight, which is new and empty if it cannot be seen that the weight is as it was."""
        # what is computed on one stream of a GPU is not ready on another
        moment = (_optimizer_steps[0], stream_of(parameter))
        key = (storage_key(parameter), weight)
        entry = self._entries.get(key)
        if entry is None or entry.moment != moment or not entry.memory.unchanged(parameter):
            memory = Memory(parameter, functools.partial(self._entries.pop, key, None))
            entry = self._entries[key] = _Entry(memory, moment)
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
        with torch.inference_mode(False), _as_it_is(parameter):
            value = parameter.detach()
            key = (weight, *directions, value.dtype, value.device, value.shape, value.stride())
            if key not in self._functions:
                with compile_lock:  # while one thread traces, torch's modules are changed under all
                    self._functions[key] = self._compiled(value, weight, directions)
            run, sizes = self._functions[key]
            flat = (part.contiguous() for part in run(value))  # as graphs expect their inputs; kernels may not
        return {direction: list(itertools.islice(flat, n)) for direction, n in zip(directions, sizes, strict=True)}

    def _compiled(
        self, value: Tensor, weight: Weight, directions: list[str]
    ) -> tuple[Callable[..., Any], tuple[int, ...]]:
        """The quantization as one flat list, and the number of parts of each direction."""
        sizes: list[int] = []

        def run(value: Tensor) -> list[Tensor]:
            parts = weight.quantize(value, tuple(directions))
            sizes[:] = map(len, parts)
            return [*itertools.chain(*parts)]

        graph = make_fx(run, tracing_mode="fake")(value)
        return self._compile(graph, [value]), tuple(sizes)
