"""Quantized weights that last from one change of a parameter to the next: once a step, not once a micro-batch."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.compat.private import make_fx
from fxquant.compat.values import version
from fxquant.passes.insert.cache_weights import Taken, Weight

Compile = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]

_optimizer_steps = [0]
"""The number of optimizer steps: their writes through `.data`, or into shards, change no version."""


@functools.cache
def _watch_optimizers() -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def stepped(*_: Any) -> None:
        _optimizer_steps[0] += 1

    register_optimizer_step_post_hook(stepped)


@dataclass
class _Entry:
    """The parts of one weight, by direction, and the state of its parameter when they were made."""

    parameter: weakref.ref[Tensor]
    state: tuple[Any, ...]
    parts: dict[str, list[Tensor]] = field(default_factory=dict)


class WeightCache:
    """The quantized weights of the graphs of one backend.

    A weight is quantized again after its parameter has got another version or memory, or an optimizer has stepped. Its
    payloads take memory in each direction that is used: 8-bit formats two bytes an element in training.
    """

    def __init__(self, compile: Compile) -> None:
        self._compile = compile
        self._functions: dict[Any, tuple[Callable[..., Any], tuple[int, ...]]] = {}
        self._entries: dict[tuple[int, Weight], _Entry] = {}
        _watch_optimizers()

    def parts(self, taken: Sequence[Taken], inputs: Sequence[Any]) -> list[Tensor]:
        """All parts that a graph takes, in order, given its inputs."""
        wanted: dict[tuple[int, Weight], list[str]] = {}
        for part in taken:
            wanted.setdefault((part.place, part.weight), []).append(part.direction)
        quantized = {key: self._get(inputs[key[0]], key[1], directions) for key, directions in wanted.items()}
        return [tensor for part in taken for tensor in quantized[part.place, part.weight][part.direction]]

    def clear(self) -> None:
        """Forgets all quantized weights, so that the next forward quantizes them again."""
        self._entries.clear()

    def _get(self, parameter: Tensor, weight: Weight, directions: list[str]) -> dict[str, list[Tensor]]:
        key, state = (id(parameter), weight), _state(parameter)
        entry = self._entries.get(key)
        if entry is None or entry.parameter() is not parameter or entry.state != state:
            forget = functools.partial(self._forget, key)
            entry = self._entries[key] = _Entry(weakref.ref(parameter, forget), state)
        missing = [direction for direction in directions if direction not in entry.parts]
        if missing:
            entry.parts |= self._quantize(parameter, weight, missing)
        return entry.parts

    def _forget(self, key: tuple[int, Weight], dead: weakref.ref[Tensor]) -> None:
        entry = self._entries.get(key)
        if entry is not None and entry.parameter is dead:
            del self._entries[key]

    def _quantize(self, parameter: Tensor, weight: Weight, directions: list[str]) -> dict[str, list[Tensor]]:
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(parameter.device.type, enabled=False):
            value = parameter.detach()
            key = (weight, *directions, value.dtype, value.device, value.shape, value.stride())
            if key not in self._functions:
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


def _state(parameter: Tensor) -> tuple[Any, ...]:
    """A value that changes with a parameter. Inference tensors have no version, and never the same state twice."""
    writes = object() if parameter.is_inference() else version(parameter)
    return writes, parameter.data_ptr(), parameter.dtype, parameter.shape, _optimizer_steps[0]
