"""The axes of a tensor, followed through its views."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
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
"""The parts that each axis of a tensor consists of, from the slowest; an axis of size 1 has none."""


class Parts:
    """The axes of a source and of the last view of it, as far as they can be told."""

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
        """Follows one node; returns False if it is no known view."""
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
        axes: Axes = []
        while len(axes) < len(shape):
            size = shape[len(axes)]
            if isinstance(size, int) and size == 1:
                axes.append(())
                continue
            count = _count(size, [self.sizes[part] for part in parts])
            if count:
                axes.append(tuple(parts[:count]))
                parts = parts[count:]
                continue
            count = _count(self.sizes[parts[0]], shape[len(axes) :]) if parts else 0
            if not count:
                return False
            split = [self._new(size) for size in shape[len(axes) : len(axes) + count]]
            whole, pieces = parts.pop(0), tuple(itertools.chain(*split))
            self.source = [
                tuple(itertools.chain(*(pieces if part == whole else (part,) for part in axis))) for axis in self.source
            ]
            axes += split
        self.axes = axes
        return not parts


def _count(size: Dim, sizes: Sequence[Dim]) -> int:
    """Returns how many of the sizes, from the first, multiply to a size; 0 if none do."""
    product: Dim = 1
    for count, factor in enumerate(sizes, 1):
        product = product * factor
        if same(product, size):
            return count
    return 0


def order_of(node: fx.Node, ndim: int) -> list[int] | None:
    """Returns the order that a node puts the axes of a tensor in; None if it does anything else."""
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
    """Returns the order of a tensor's axes for its view whose axes in `order` are [*batch, queries, keys]."""
    source = node.all_input_nodes[0]
    parts = Parts(source)
    if not isinstance(value_of(source), torch.Tensor) or not parts.view(node):
        return None
    *batch, queries, keys = (parts.axes[axis] for axis in order)
    lead = list(range(len(parts.source)))
    ends: list[int] = []
    for end in (keys, queries):
        equal = [axis for axis in lead if parts.source[axis] == end]
        if not equal:
            return None
        ends.insert(0, equal[-1])
        lead.remove(equal[-1])
    outer = [part for axis in batch for part in axis]
    if sorted(part for axis in lead for part in parts.source[axis]) != sorted(outer):
        return None
    place = len(outer)
    places: dict[int, int] = {}
    for axis in reversed(lead):  # an axis of size 1 goes in front of the one that follows it
        places[axis] = place = outer.index(parts.source[axis][0]) if parts.source[axis] else place
    lead.sort(key=lambda axis: (places[axis], axis))
    if [part for axis in lead for part in parts.source[axis]] != outer:
        return None
    return (*lead, *ends)


def same(a: Dim, b: Dim) -> bool:
    """Returns True if sizes are equal, as far as is known without deciding on dynamic ones."""
    return statically_known_true(a == b)


def same_sizes(a: Sequence[Dim], b: Sequence[Dim]) -> bool:
    """Returns True if all sizes are equal, as far as is known without deciding on dynamic ones."""
    return len(a) == len(b) and all(map(same, a, b))
