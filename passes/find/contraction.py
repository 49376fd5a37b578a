"""One engine for every product of two tensors: named axes in, a matmul with its operands in GEMM layout out.

`mm`, `F.linear`, `einsum("bsi,io->bso")`, `tensordot`, a patch convolution: each is two operands whose axes carry
labels, and the labels of the result. An axis of both operands that the result lacks is contracted (K), one of the left
operand alone is a row (M), one of the right alone a column (N), one of all three a batch axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from fxquant.decisions import SkipReason
from fxquant.passes.find.experts import by_expert
from fxquant.passes.find.facts import Contraction, Finish, Gemm2d, Label, Match, Operand
from fxquant.passes.find.layout import is_one, multiply, settle
from fxquant.passes.find.opaque import by_flops
from fxquant.passes.find.site import Site
from fxquant.passes.find.weights import find_weight
from fxquant.passes.graph.builder import Builder
from fxquant.passes.graph.values import value_of


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
        ours, theirs = is_one(left.size(label)), is_one(right.size(label))
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
    contraction = contraction_of(left, right, out, rhs_is_weight=rhs_is_weight)
    kind = "linear" if rhs_is_weight else "matmul"
    if rhs_is_weight and site.is_expert(right.node):
        kind = "grouped_linear"
    if isinstance(contraction, str):
        product = by_flops(site, left.node, right.node, rhs_is_weight)
        return site.match(kind, product, skip=(SkipReason.UNSUPPORTED_FORM, contraction))
    if contraction.batch and rhs_is_weight:
        kind = "grouped_linear"
    if contraction.batch and rhs_is_weight and bias is None:
        match = by_expert(site, contraction, finish)
        if match is not None:
            return match
    product = contraction.product(rhs_is_weight)
    skip = _skip(site, contraction, rhs_is_weight)
    if skip is not None:
        return site.match(kind, product, skip=skip)

    slots = site.slots(contraction.left.node, contraction.right.node)
    bias_slot = None if bias is None else site.slots(bias)[0]

    def emit(builder: Builder, gemm: Gemm2d) -> fx.Node:
        inputs = builder.anchor.all_input_nodes
        lhs, rhs = (inputs[slot] for slot in slots)
        result = multiply(builder, gemm, 0, contraction, lhs, rhs, None if bias_slot is None else inputs[bias_slot])
        return settle(builder, result if finish is None else finish(builder, result))

    return replace(site.match(kind, product, emit=emit), contraction=contraction)


def _repeats(operand: Operand, label: Label) -> bool:
    """Returns True if the operand was expanded along this axis, which is then not empty."""
    if operand.view is not None:
        return False
    axis = operand.labels.index(label)
    stride = value_of(operand.node).stride(axis)
    return isinstance(stride, int) and stride == 0 and operand.sizes[axis] != 0


def _without(operand: Operand, label: Label) -> Operand:
    return replace(operand, labels=tuple(None if other == label else other for other in operand.labels))


def _skip(site: Site, contraction: Contraction, rhs_is_weight: bool) -> tuple[SkipReason, str] | None:
    left, right = (_shape(operand) for operand in (contraction.left, contraction.right))
    if rhs_is_weight and contraction.batch:
        weight = find_weight(contraction.right.node, site.outer)
        if weight is not None and weight.gathered:
            return SkipReason.GATHERED_WEIGHT, f"{left} x {right}"
    if not contraction.columns or (not contraction.rows and not rhs_is_weight):
        return SkipReason.TOO_SMALL, f"N=1: {left} x {right}, a matrix times a vector"
    if not contraction.inner:
        return SkipReason.TOO_SMALL, f"K=1: {left} x {right}, an outer product"
    return None


def _shape(operand: Operand) -> str:
    return f"[{', '.join(map(str, operand.sizes))}]"
