"""The views around a product: operands into GEMM layout, and its result into that of the node it replaces."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import fx

from fxquant.compat.values import size_hint, statically_known_true
from fxquant.passes.find.facts import Contraction, Gemm2d, Label, Operand
from fxquant.passes.find.weights import expanded_from
from fxquant.passes.graph.builder import Builder
from fxquant.passes.graph.names import ORDERS, calls
from fxquant.passes.graph.values import Dim, value_of

aten = torch.ops.aten


def multiply(
    builder: Builder,
    gemm: Gemm2d,
    index: int,
    planned: Contraction,
    lhs: fx.Node,
    rhs: fx.Node,
    bias: fx.Node | None = None,
) -> fx.Node:
    """Adds the views of both operands, the GEMM, and the views of its result."""
    singles = [(label,) for label in planned.batch]
    rows = [(label,) for label in planned.rows] if planned.rows and not planned.batch else [planned.rows]
    lhs, rhs = planned.left.viewed(builder, lhs), planned.right.viewed(builder, rhs)
    result = gemm(
        index,
        arrange(builder, lhs, planned.left, [*singles, *rows, planned.inner]),
        arrange(builder, rhs, planned.right, [*singles, planned.columns, planned.inner]),
        bias,
    )

    def sizes(node: fx.Node, operand: Operand, labels: tuple[Label, ...]) -> tuple[int | fx.Node, ...]:
        return tuple(builder.size(node, operand.labels.index(label)) for label in labels)

    if len(planned.columns) > 1:
        result = builder.call(torch.unflatten, result, -1, sizes(rhs, planned.right, planned.columns))
    if planned.batch and len(planned.rows) > 1:
        split = sizes(lhs, planned.left, planned.rows)
        result = builder.call(torch.unflatten, result, len(planned.batch), split)
    if not planned.rows:
        result = builder.call(torch.squeeze, result, 0)
    return permute(builder, result, (*planned.batch, *planned.rows, *planned.columns), planned.out)


def settle(builder: Builder, result: fx.Node) -> fx.Node:
    """Gives a result the dtype and the memory layout of the node it replaces."""
    wanted, have = value_of(builder.anchor), value_of(result)
    if have.dtype != wanted.dtype:
        result = builder.call(aten.to.dtype, result, wanted.dtype)
    order = _memory_order(wanted)
    if order is None or _memory_order(have) == order:
        return result
    if order == tuple(range(len(order))):
        return builder.call(aten.contiguous.default, result)
    back = tuple(order.index(axis) for axis in range(len(order)))
    packed = builder.call(aten.contiguous.default, builder.call(torch.permute, result, order))
    return builder.call(torch.permute, packed, back)


def arrange(builder: Builder, node: fx.Node, operand: Operand, groups: list[tuple[Label, ...]]) -> fx.Node:
    """Puts the axes in the order of `groups` and makes each group one axis."""
    repeating = [axis for axis, label in enumerate(operand.labels) if label is None]
    source = expanded_from(node, repeating)
    for axis in reversed(repeating if source is None else []):
        node = builder.call(torch.select, node, axis, 0)
    node = node if source is None else source
    node = permute(builder, node, operand.kept, tuple(chain.from_iterable(groups)))
    for axis, group in enumerate(groups):
        if not group:
            node = builder.call(torch.unsqueeze, node, axis)
        elif len(group) > 1:
            node = builder.call(torch.flatten, node, axis, axis + len(group) - 1)
    return node


def permute(builder: Builder, node: fx.Node, have: tuple[Label, ...], wanted: tuple[Label, ...]) -> fx.Node:
    """A tensor with its axes in another order."""
    if have == wanted:
        return node
    order = tuple(have.index(label) for label in wanted)
    if order == _swapped(range(len(order))):
        return transposed(builder, node)
    return builder.call(torch.permute, node, order)


def transposed(builder: Builder, node: fx.Node) -> fx.Node:
    """The transpose of a matrix or of a batch of them."""
    source = _transposed_from(node)
    if source is not None:
        return source
    return builder.call(torch.permute, node, _swapped(range(value_of(node).ndim)))


def _swapped(axes: Sequence[Any]) -> tuple[Any, ...]:
    *batch, rows, columns = axes
    return (*batch, columns, rows)


def _transposed_from(node: fx.Node) -> fx.Node | None:
    """What a node is the transpose of, matrix by matrix, so that a tied weight is seen as one tensor."""
    transpose = calls(node, ORDERS)
    source = node.args[0] if transpose and node.args else None
    if not isinstance(source, fx.Node):
        return None
    matrix, value = value_of(source), value_of(node)
    # other orders leave the axes as they are
    if matrix.ndim != value.ndim or tuple(value.stride()) != _swapped(matrix.stride()):
        return None
    return source if tuple(value.shape) == _swapped(matrix.shape) else None


def is_one(size: Dim) -> bool:
    """Returns True for a size that is the number 1."""
    return isinstance(size, int) and size == 1


def _memory_order(value: torch.Tensor) -> tuple[int, ...] | None:
    """The axes from the slowest to the fastest of a dense tensor; None for a tensor with gaps or repeats."""
    if statically_known_true(value.numel() == 0):
        return None
    sized = [axis for axis in range(value.ndim) if not is_one(value.shape[axis])]
    strides: tuple[Dim, ...] = value.stride()
    ordered = sorted(sized, key=lambda axis: -size_hint(strides[axis]))
    step: Dim = 1
    for axis in reversed(ordered):
        if not statically_known_true(strides[axis] == step):
            return None
        step = step * value.shape[axis]
    # axes of size 1 may stand anywhere: in front of the axis that follows them
    order = list(ordered)
    for axis in reversed([axis for axis in range(value.ndim) if axis not in sized]):
        place = order.index(axis + 1) if axis + 1 in order else len(order)
        order.insert(place, axis)
    return tuple(order)
