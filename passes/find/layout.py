"""The views around a product: operands into GEMM layout, and its result into that of the node it replaces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import fx

from fxquant.compat.values import size_hint, statically_known_true
from fxquant.passes.find.facts import Contraction, Label, Operand
from fxquant.passes.find.weights import expanded_from
from fxquant.passes.graph.builder import Builder
from fxquant.passes.graph.names import ORDERS, calls
from fxquant.passes.graph.values import Dim, value_of

aten = torch.ops.aten


def multiply(
    builder: Builder, add: Callable[..., fx.Node], plan: Contraction, lhs: fx.Node, rhs: fx.Node, *bias: fx.Node
) -> fx.Node:
    """Adds the views of both operands, the GEMM, and the views of its result."""
    singles = [(label,) for label in plan.batch]
    rows = [(label,) for label in plan.rows] if plan.rows and not plan.batch else [plan.rows]
    lhs, rhs = plan.left.viewed(builder, lhs), plan.right.viewed(builder, rhs)
    left = arrange(builder, lhs, plan.left, [*singles, *rows, plan.inner])
    right = arrange(builder, rhs, plan.right, [*singles, plan.columns, plan.inner])
    result = add(left, right, *bias)
    if len(plan.columns) > 1:
        result = builder.call(torch.unflatten, result, -1, sizes(builder, rhs, plan.right, plan.columns))
    if plan.batch and len(plan.rows) > 1:
        result = builder.call(torch.unflatten, result, len(plan.batch), sizes(builder, lhs, plan.left, plan.rows))
    if not plan.rows:
        result = builder.call(torch.squeeze, result, 0)
    return permute(builder, result, (*plan.batch, *plan.rows, *plan.columns), plan.out)


def sizes(builder: Builder, node: fx.Node, operand: Operand, labels: Sequence[Label]) -> tuple[int | fx.Node, ...]:
    """Returns the sizes of the axes with these labels, of the node that stands for an operand."""
    return tuple(builder.size(node, operand.labels.index(label)) for label in labels)


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
    """Puts the axes of an operand in the order of `groups` and makes each group one axis."""
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
    """Puts the axes of a tensor in another order."""
    if have == wanted:
        return node
    order = tuple(have.index(label) for label in wanted)
    if order == _swapped(range(len(order))):
        return transposed(builder, node)
    return builder.call(torch.permute, node, order)


def transposed(builder: Builder, node: fx.Node) -> fx.Node:
    """Transposes a matrix, or each of a batch. A transpose becomes its source, so that a tied weight is one tensor."""
    source, value = node.args[0] if node.args else None, value_of(node)
    if calls(node, ORDERS) and isinstance(source, fx.Node) and value_of(source).ndim == value.ndim:
        before = value_of(source)
        # other orders leave the axes as they are
        if (value.stride(), value.shape) == (_swapped(before.stride()), _swapped(before.shape)):
            return source
    return builder.call(torch.permute, node, _swapped(range(value.ndim)))


def _swapped(axes: Sequence[Any]) -> tuple[Any, ...]:
    *batch, rows, columns = axes
    return (*batch, columns, rows)


def is_one(size: Dim) -> bool:
    """Returns True for a size that is the number 1."""
    return isinstance(size, int) and size == 1


def _memory_order(value: torch.Tensor) -> tuple[int, ...] | None:
    """Returns the axes of a dense tensor from the slowest to the fastest; None for one with gaps or repeats."""
    if statically_known_true(value.numel() == 0):
        return None
    sized = [axis for axis in range(value.ndim) if not is_one(value.shape[axis])]
    strides: tuple[Dim, ...] = value.stride()
    order = sorted(sized, key=lambda axis: -size_hint(strides[axis]))
    step: Dim = 1
    for axis in reversed(order):
        if not statically_known_true(strides[axis] == step):
            return None
        step = step * value.shape[axis]
    # axes of size 1 may stand anywhere: in front of the axis that follows them
    for axis in reversed([axis for axis in range(value.ndim) if axis not in sized]):
        place = order.index(axis + 1) if axis + 1 in order else len(order)
        order.insert(place, axis)
    return tuple(order)
