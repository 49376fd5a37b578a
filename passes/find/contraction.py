"""One engine for every product of two tensors: named axes in, a matmul with its operands in GEMM layout out.

`mm`, `F.linear`, `einsum("bsi,io->bso")`, `tensordot`, a patch convolution: each is two operands whose axes carry
labels, and the labels of the result. An axis of both operands that the result lacks is contracted (K), one of the left
operand alone is a row (M), one of the right alone a column (N), one of all three a batch axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch import fx

from fxquant.decisions import SkipReason
from fxquant.passes.find.experts import by_expert
from fxquant.passes.find.facts import Contraction, Finish, Gemm2d, Label, Match, Operand, Skip, shape_text
from fxquant.passes.find.layout import is_one, multiply
from fxquant.passes.find.opaque import refused
from fxquant.passes.find.site import Site
from fxquant.passes.find.weights import Weight, find_weight
from fxquant.passes.graph.builder import Builder
from fxquant.passes.graph.values import value_of


def contraction_of(
    left: Operand, right: Operand, out: Sequence[Label], *, rhs_is_weight: bool = False
) -> Contraction | str:
    """Sorts the axes of two operands, or returns the reason why they are no matmul."""
    if any(len(set(operand.kept)) != len(operand.kept) for operand in (left, right)):
        return "an axis label appears twice in one operand (a diagonal)"
    for label in [label for label in left.kept if label in right.kept]:
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
        out=tuple(out),
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
    """Returns the match of a node that multiplies two operands.

    The operand that is a parameter becomes the right one, in weight layout. `bias` [N] goes into the GEMM, `finish`
    does whatever else the node does to the product.
    """
    rhs_is_weight = rhs_is_weight or site.is_weight(right.node)
    if not rhs_is_weight and site.is_weight(left.node):
        left, right, rhs_is_weight = right, left, True
    contraction = contraction_of(left, right, out, rhs_is_weight=rhs_is_weight)
    weight = find_weight(right.node, site.outer) if rhs_is_weight else None
    kind = "linear" if rhs_is_weight else "matmul"
    if weight is not None and weight.stacked and value_of(right.node).ndim == 2:
        kind = "grouped_linear"
    if isinstance(contraction, str):
        skip = SkipReason.UNSUPPORTED_FORM, contraction
        return refused(site, kind, left.node, right.node, rhs_is_weight, skip)
    if contraction.batch and rhs_is_weight:
        kind = "grouped_linear"
        match = by_expert(site, contraction, finish) if bias is None else None
        if match is not None:
            return match
    product = contraction.product(rhs_is_weight)
    small = _skip(contraction, weight, rhs_is_weight)
    if small is not None:
        return site.match(kind, product, skip=small)

    def write(builder: Builder, gemm: Gemm2d, *inputs: fx.Node) -> fx.Node:
        result = multiply(builder, partial(gemm, 0), contraction, *inputs)
        return result if finish is None else finish(builder, result)

    emit = site.emit(write, contraction.left.node, contraction.right.node, *([] if bias is None else [bias]))
    return replace(site.match(kind, product, emit=emit), contraction=contraction)


def _repeats(operand: Operand, label: Label) -> bool:
    """Returns True if an operand was expanded along this axis, which is then not empty."""
    axis = operand.labels.index(label)
    stride = None if operand.view is not None else value_of(operand.node).stride(axis)
    return isinstance(stride, int) and stride == 0 and operand.sizes[axis] != 0


def _without(operand: Operand, label: Label) -> Operand:
    return replace(operand, labels=tuple(None if other == label else other for other in operand.labels))


def _skip(contraction: Contraction, weight: Weight | None, rhs_is_weight: bool) -> Skip | None:
    shapes = " x ".join(shape_text(operand.sizes) for operand in (contraction.left, contraction.right))
    if contraction.batch and weight is not None and weight.gathered:
        return SkipReason.GATHERED_WEIGHT, shapes
    if not contraction.columns or (not contraction.rows and not rhs_is_weight):
        return SkipReason.TOO_SMALL, f"N=1: {shapes}, a matrix times a vector"
    if not contraction.inner:
        return SkipReason.TOO_SMALL, f"K=1: {shapes}, an outer product"
    return None
