"""One engine for every product of two tensors: named axes in, a matmul with its operands in GEMM layout out.

`mm`, `F.linear`, `einsum("bsi,io->bso")`, `tensordot`, a patch convolution: each is two operands whose axes carry
labels, and the labels of the result. An axis of both operands that the result lacks is contracted (K), one of the left
operand alone is a row (M), one of the right alone a column (N), one of all three a batch axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import fx

from fxquant.compat.values import size_hint, statically_known_true
from fxquant.decisions import SkipReason
from fxquant.passes.find.facts import Contraction, Emit, Finish, Gemm2d, Label, Match, Operand, Product, product_of
from fxquant.passes.find.flops import node_flops
from fxquant.passes.find.weights import expanded_from, find_gather, find_weight
from fxquant.passes.graph.builder import Builder
from fxquant.passes.graph.names import ORDERS, calls, op_name
from fxquant.passes.graph.values import Dim, value_of

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class Site:
    """A node that may be a matmul. `outer` maps a body's placeholders to what the calling graph passes for them."""

    node: fx.Node
    outer: Mapping[fx.Node, fx.Node]

    def is_weight(self, node: fx.Node) -> bool:
        return find_weight(node, self.outer) is not None

    def is_expert(self, node: fx.Node) -> bool:
        """Whether a matrix is one of several that a parameter holds."""
        weight = find_weight(node, self.outer)
        return weight is not None and weight.stacked and value_of(node).ndim == 2

    def match(
        self,
        module_type: str,
        *products: Product,
        emit: Emit | None = None,
        skip: tuple[SkipReason, str] | None = None,
        needs_grad: tuple[tuple[bool, bool], ...] | None = None,
    ) -> Match:
        """A match of this node; gradients are those of the products' own operands unless given."""
        if needs_grad is None:
            trained = requires_grad(self.node)
            needs_grad = tuple((trained and requires_grad(p.lhs), trained and requires_grad(p.rhs)) for p in products)
        return Match(
            node=self.node, form=op_name(self.node), module_type=module_type, products=products, emit=emit, skip=skip,
            needs_grad=needs_grad,
        )  # fmt: skip


def requires_grad(node: fx.Node) -> bool:
    """Whether a node's example value, or any tensor in it, gets a gradient."""
    value = value_of(node)
    values = value if isinstance(value, (tuple, list)) else (value,)
    return any(isinstance(v, torch.Tensor) and v.requires_grad for v in values)


def contraction_of(
    left: Operand, right: Operand, out: Sequence[Label], *, rhs_is_weight: bool = False
) -> Contraction | str:
    """Sorts the axes of two operands, or says why they are no matmul."""
    out = tuple(out)
    for operand in (left, right):
        if len(set(operand.kept)) != len(operand.kept):
            return "an axis label appears twice in one operand (a diagonal)"
    shared = [label for label in left.kept if label in right.kept]
    for label in shared:
        ours, theirs = _is_one(left.size(label)), _is_one(right.size(label))
        repeats = rhs_is_weight and label in out and (theirs or _repeats(right, label))
        if (theirs and not ours) or repeats:
            right = _without(right, label)
        elif ours and not theirs:
            left = _without(left, label)
    in_left, in_right = left.kept, right.kept
    for label in (*in_left, *in_right):
        if label not in out and not (label in in_left and label in in_right):
            return "an axis of one operand alone is summed"
    return Contraction(
        left=left,
        right=right,
        out=out,
        batch=tuple(label for label in out if label in in_left and label in in_right),
        rows=tuple(label for label in out if label in in_left and label not in in_right),
        columns=tuple(label for label in out if label in in_right and label not in in_left),
        # the right operand's order, so that a weight is viewed and not copied
        inner=tuple(label for label in in_right if label in in_left and label not in out),
    )


def contract(
    site: Site,
    left: Operand,
    right: Operand,
    out: Sequence[Label],
    *,
    rhs_is_weight: bool = False,
    bias: fx.Node | None = None,
    finish: Finish | None = None,
) -> Match:
    """The match of a node that multiplies two operands.

    The operand that is a parameter becomes the right one, in weight layout. `bias` [N] goes into the GEMM, `finish`
    does whatever else the node does to the product.
    """
    rhs_is_weight = rhs_is_weight or site.is_weight(right.node)
    if not rhs_is_weight and site.is_weight(left.node):
        left, right, rhs_is_weight = right, left, True
    planned = contraction_of(left, right, out, rhs_is_weight=rhs_is_weight)
    kind = "linear" if rhs_is_weight else "matmul"
    if rhs_is_weight and site.is_expert(right.node):
        kind = "grouped_linear"
    if isinstance(planned, str):
        product = by_flops(site, left.node, right.node, rhs_is_weight)
        return site.match(kind, product, skip=(SkipReason.UNSUPPORTED_FORM, planned))
    if planned.batch and rhs_is_weight:
        kind = "grouped_linear"
    if planned.batch and rhs_is_weight and bias is None:
        match = _by_expert(site, planned, finish)
        if match is not None:
            return match
    product = planned.product(rhs_is_weight)
    skip = _skip(site, planned, rhs_is_weight)
    if skip is not None:
        return site.match(kind, product, skip=skip)

    # Operands are taken from the node when it is rewritten: by then the matmuls in front of it have been replaced.
    slots = [site.node.all_input_nodes.index(operand.node) for operand in (planned.left, planned.right)]
    bias_slot = None if bias is None else site.node.all_input_nodes.index(bias)

    def emit(builder: Builder, gemm: Gemm2d) -> fx.Node:
        inputs = builder.anchor.all_input_nodes
        lhs, rhs = (inputs[slot] for slot in slots)
        result = multiply(builder, gemm, 0, planned, lhs, rhs, None if bias_slot is None else inputs[bias_slot])
        return settle(builder, result if finish is None else finish(builder, result))

    return replace(site.match(kind, product, emit=emit), contraction=planned)


def _by_expert(site: Site, planned: Contraction, finish: Finish | None) -> Match | None:
    """Rows that are multiplied by the matrices `stack[index]`: sorted by index they are groups of rows.

    A weight is then quantized once, and not for each row that its expert gets. None where it is no such product.
    """
    left, right = planned.left, planned.right
    found = find_gather(right.node, site.outer)
    if found is None or right.view is not None or None in right.labels:
        return None
    chosen, ends = right.labels[:-2], right.labels[-2:]
    if len(planned.inner) != 1 or planned.inner[0] not in ends or not set(ends) <= {*planned.inner, *planned.columns}:
        return None
    stack, shared = value_of(found.stack), tuple(label for label in chosen if label in left.kept)
    (k,), (n,) = planned.inner, (label for label in ends if label not in planned.inner)
    rows_last = (ends[1] == k) != found.transposed
    """Whether the stack is [E, N, K]."""
    times, rows = product_of(map(right.size, chosen)), product_of(map(left.size, planned.rows))
    product = Product(
        m=times * rows, k=left.size(k), n=right.size(n), groups=stack.shape[0], lhs=left.node, rhs=right.node
    )
    slots = [site.node.all_input_nodes.index(operand.node) for operand in (left, right)]

    def emit(builder: Builder, gemm: Gemm2d) -> fx.Node:
        lhs, rhs = (builder.anchor.all_input_nodes[slot] for slot in slots)
        gather = find_gather(rhs, site.outer)
        assert gather is not None
        weight = gather.stack if rows_last else transposed(builder, gather.stack)
        if value_of(weight).dtype != value_of(rhs).dtype:
            weight = builder.call(aten.to.dtype, weight, value_of(rhs).dtype)
        lhs = left.viewed(builder, lhs)
        batch = [  # of what stays in the graph, as far as it goes
            builder.size(lhs, left.labels.index(label)) if label in shared
            else builder.size(*((gather.index, axis) if value_of(gather.index).ndim == len(chosen) else (rhs, axis)))
            for axis, label in enumerate(chosen)
        ]  # fmt: skip
        split = [builder.size(lhs, left.labels.index(label)) for label in planned.rows]
        lhs = arrange(builder, lhs, left, [*((label,) for label in shared), planned.rows, (k,)])
        for axis, label in enumerate(chosen):
            lhs = lhs if label in shared else builder.call(torch.unsqueeze, lhs, axis)
        if len(shared) < len(chosen):
            lhs = builder.call(aten.expand.default, lhs, [*batch, -1, -1])
        lhs = builder.call(torch.flatten, lhs, 0, -3) if len(chosen) > 1 else lhs
        index = builder.call(torch.flatten, gather.index)
        experts = builder.size(gather.stack, 0)
        behind = builder.call(torch.add, index, experts)
        index = builder.call(torch.where, builder.call(torch.lt, index, 0), behind, index)
        order = builder.call(torch.argsort, index, stable=True)
        behind = builder.call(torch.cumsum, builder.call(aten.new_ones.default, index, [experts]), 0)
        offs = builder.call(torch.searchsorted, builder.call(aten.index.Tensor, index, [order]), behind)
        offs = builder.call(torch.mul, offs, builder.size(lhs, 1))
        offs = builder.call(aten.to.dtype, offs, torch.int32)
        ragged = builder.call(torch.flatten, builder.call(aten.index.Tensor, lhs, [order]), 0, 1)
        result = builder.call(torch.unflatten, gemm(0, ragged, weight, offs=offs), 0, [-1, builder.size(lhs, 1)])
        result = builder.call(aten.index.Tensor, result, [builder.call(torch.argsort, order)])
        if not split:
            result = builder.call(torch.squeeze, result, 1)
        elif len(split) > 1:
            result = builder.call(torch.unflatten, result, 1, split)
        if len(batch) > 1:
            result = builder.call(torch.unflatten, result, 0, batch)
        result = permute(builder, result, (*chosen, *planned.rows, n), planned.out)
        return settle(builder, result if finish is None else finish(builder, result))

    return site.match("grouped_linear", product, emit=emit)


def by_flops(site: Site, lhs: fx.Node, rhs: fx.Node, rhs_is_weight: bool) -> Product:
    """A product [flops / 2, 1] x [1, 1], for a node whose products have no sizes of their own."""
    return Product(m=(node_flops(site.node) or 0) // 2, k=1, n=1, lhs=lhs, rhs=rhs, rhs_is_weight=rhs_is_weight)


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


def _is_one(size: Dim) -> bool:
    return isinstance(size, int) and size == 1


def _repeats(operand: Operand, label: Label) -> bool:
    """Whether the operand was expanded along this axis, which is then not empty."""
    if operand.view is not None:
        return False
    axis = operand.labels.index(label)
    stride = value_of(operand.node).stride(axis)
    return isinstance(stride, int) and stride == 0 and operand.sizes[axis] != 0


def _without(operand: Operand, label: Label) -> Operand:
    return replace(operand, labels=tuple(None if each == label else each for each in operand.labels))


def _skip(site: Site, planned: Contraction, rhs_is_weight: bool) -> tuple[SkipReason, str] | None:
    left, right = (_shape(operand) for operand in (planned.left, planned.right))
    if rhs_is_weight and planned.batch:
        weight = find_weight(planned.right.node, site.outer)
        if weight is not None and weight.gathered:
            return SkipReason.GATHERED_WEIGHT, f"{left} x {right}"
    if not planned.columns or (not planned.rows and not rhs_is_weight):
        return SkipReason.TOO_SMALL, f"N=1: {left} x {right}, a matrix times a vector"
    if not planned.inner:
        return SkipReason.TOO_SMALL, f"K=1: {left} x {right}, an outer product"
    return None


def _shape(operand: Operand) -> str:
    return f"[{', '.join(map(str, operand.sizes))}]"


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


def _memory_order(value: torch.Tensor) -> tuple[int, ...] | None:
    """The axes from the slowest to the fastest of a dense tensor; None for a tensor with gaps or repeats."""
    if statically_known_true(value.numel() == 0):
        return None
    sized = [axis for axis in range(value.ndim) if not _is_one(value.shape[axis])]
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
