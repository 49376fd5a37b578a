"""Quantizations of tensors outside of graphs: compiled once for each kind of tensor, then called like a function."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import Tensor, fx

from fxquant.compat.inside.memory import compile_lock
from fxquant.compat.private import make_fx

Compile = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


class Quantizations:
    """The compiled quantizations of one backend, by what is done and by the kind of tensors that it is done to."""

    def __init__(self, compile: Compile) -> None:
        self._compile = compile
        self._functions: dict[Hashable, tuple[Callable[..., Any], tuple[int, ...]]] = {}

    def __call__(
        self, what: Hashable, run: Callable[..., Sequence[Sequence[Tensor]]], *inputs: Tensor
    ) -> list[list[Tensor]]:
        """Returns what `run` gives for the inputs, compiled; equal `what` must mean that it does the same."""
        kinds = tuple((t.dtype, t.device, t.shape, t.stride(), t.data_ptr() % 16) for t in inputs)
        if (what, kinds) not in self._functions:
            with compile_lock:  # while one thread traces, torch's modules are changed under all
                self._functions[what, kinds] = self._compiled(run, inputs)
        compiled, sizes = self._functions[what, kinds]
        flat = iter(compiled(*inputs))
        return [list(itertools.islice(flat, size)) for size in sizes]

    def _compiled(
        self, run: Callable[..., Sequence[Sequence[Tensor]]], inputs: Sequence[Tensor]
    ) -> tuple[Callable[..., Any], tuple[int, ...]]:
        """The function with its results in one list, and how many are in each of its own."""
        sizes: list[int] = []

        def flat(*tensors: Tensor) -> list[Tensor]:
            parts = run(*tensors)
            sizes[:] = map(len, parts)
            return [*itertools.chain(*parts)]

        graph = make_fx(flat, tracing_mode="fake")(*inputs)
        return self._compile(graph, inputs), tuple(sizes)
