"""Which axes of a tensor are which of a view of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from fxquant.compat.values import statically_known_true
from fxquant.passes.graph.names import (
    ALIASES,
    COPIES,
    EXCHANGES,
    EXPANDS,
    MATRIX_TRANSPOSES,
    RESHAPES,
    REVERSALS,
    UNIT_AXES,
    op_name,
)
from fxquant.passes.graph.values import Dim, value_of

Axes = list[tuple[int, ...]]
"""For each axis of a tensor the parts that it consists of, from the slowest; an axis of size 1 has none."""


class Parts:
    """The axes of a source and, after some views of it, of the last of them, as far as they can be told."""

    def __init__(self, source: fx.Node) -> None:
        self.sizes: list[Dim] = []
        self.source = [self._new(size) for size in value_of(source).shape]
        self.axes = list(self.source)

    def _new(self, size: Dim) -> tuple[int, ...]:
        if isinstance(size, int) and size == 1:
            return ()
        self.sizes.append(size)
        return (len(self.sizes) - 1,)

    def view(self, node: fx.Node) -> bool:
        """Goes on through one node; False where it is no view that is known."""
        before, after, name = value_of(node.all_input_nodes[0]), value_of(node), op_name(node)
        order = order_of(node, before.ndim)
        if order is not None:
            self.axes = [self.axes[axis] for axis in order]
        elif name in RESHAPES | UNIT_AXES:
            return self._reshape(after.shape)
        elif name in EXPANDS and before.ndim == after.ndim:
            pairs = zip(self.axes, before.shape, after.shape, strict=True)
            self.axes = [axis if same(x, y) else self._new(y) for axis, x, y in pairs]
        elif name not in COPIES | ALIASES:
            return False
        return True

    def _reshape(self, shape: Sequence[Dim]) -> bool:
        parts = [part for axis in self.axes for part in axis]
        made: Axes = []
        while len(made) < len(shape):
            size = shape[len(made)]
            if isinstance(size, int) and size == 1:
                made.append(())
                continue
            count = _count(size, [self.sizes[part] for part in parts])
            if count:
                made.append(tuple(parts[:count]))
                parts = parts[count:]
                continue
            count = _count(self.sizes[parts[0]], shape[len(made) :]) if parts else 0
            if not count:
                return False
            several = [self._new(each) for each in shape[len(made) : len(made) + count]]
            whole, pieces = parts.pop(0), tuple(piece for each in several for piece in each)
            self.source = [tuple(_replaced(axis, whole, pieces)) for axis in self.source]
            made += several
        self.axes = made
        return not parts


def _replaced(axis: Iterable[int], whole: int, pieces: tuple[int, ...]) -> Iterable[int]:
    for part in axis:
        yield from pieces if part == whole else (part,)


def _count(size: Dim, sizes: Sequence[Dim]) -> int:
    """How many of the sizes, from the first, make up a size; 0 where none do."""
    product: Dim = 1
    for count, each in enumerate(sizes, 1):
        product = product * each
        if same(product, size):
            return count
    return 0


def order_of(node: fx.Node, ndim: int) -> list[int] | None:
    """The order that a node puts the axes of a tensor in; None if it does anything else."""
    name, rest = op_name(node), node.args[1:]
    numbers: list[Any] = list(rest[0]) if len(rest) == 1 and isinstance(rest[0], (list, tuple)) else list(rest)
    order = list(range(ndim))
    if name in MATRIX_TRANSPOSES or (name in EXCHANGES and len(numbers) == 2):
        first, second = (-1, -2) if name in MATRIX_TRANSPOSES else numbers
        order[first], order[second] = order[second], order[first]
        return order
    if name in REVERSALS:
        return order[::-1]
    return [axis % ndim for axis in numbers] if name == "permute" and len(numbers) == ndim else None


def order_before(node: fx.Node, order: Sequence[int]) -> tuple[int, ...] | None:
    """For a view whose axes in this order are [*batch, queries, keys], the order of the axes that it is a view of."""
    source = node.all_input_nodes[0]
    parts = Parts(source)
    if not isinstance(value_of(source), torch.Tensor) or not parts.view(node):
        return None
    *batch, queries, keys = (parts.axes[axis] for axis in order)
    left = list(range(len(parts.source)))
    ends: list[int] = []
    for wanted in (keys, queries):
        found = [axis for axis in left if parts.source[axis] == wanted]
        if not found:
            return None
        ends.insert(0, found[-1])
        left.remove(found[-1])
    outer = [part for axis in batch for part in axis]
    if sorted(part for axis in left for part in parts.source[axis]) != sorted(outer):
        return None
    places = {axis: outer.index(parts.source[axis][0]) for axis in left if parts.source[axis]}
    for axis in reversed(left):  # an axis of size 1 goes in front of the one that follows it
        following = [each for each in left if each > axis]
        places.setdefault(axis, places[following[0]] if following else len(outer))
    left.sort(key=lambda axis: (places[axis], axis))
    if [part for axis in left for part in parts.source[axis]] != outer:
        return None
    return (*left, *ends)


def same(a: Dim, b: Dim) -> bool:
    """Whether sizes are equal, as far as is known without deciding on dynamic ones."""
    return statically_known_true(a == b)


def same_sizes(a: Sequence[Dim], b: Sequence[Dim]) -> bool:
    """Returns True if all sizes are equal, as far as is known without deciding on dynamic ones."""
    return len(a) == len(b) and all(map(same, a, b))


__all__ = ["Parts", "order_before", "order_of", "same", "same_sizes"]
