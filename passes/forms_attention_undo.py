"""Undoes what stands in front of a product of attention: batch axes merged for `bmm`, and a scale of queries or keys.

    (q * 0.5).expand(b, h, s, d).reshape(b * h, s, d) @ (k.mT * 0.5).expand(b, h, d, s).reshape(b * h, d, s)
    # is read as
    q @ k.mT, of four axes, times 0.25

So `run_decompositions()` writes `matmul` and attention, and so do users: what was [B, H, S, D] is so again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import fx

from fxquant.compat import statically_known_true
from fxquant.passes.facts import Builder, Dim, value_of
from fxquant.passes.forms_contraction import Contraction, Operand, plan, product_of
from fxquant.passes.forms_weights import op_name, swaps_last

_MERGES = frozenset(("view", "reshape", "_unsafe_view", "flatten"))
_COPIES = frozenset(("clone", "contiguous"))
_MULTIPLICATIONS = frozenset(("mul", "multiply"))
_DIVISIONS = frozenset(("div", "divide", "truediv", "true_divide"))
_WRITES = frozenset(("setitem", "iadd", "isub", "imul", "itruediv"))


def undone(written: Contraction) -> tuple[Contraction, float]:
    """A product of queries and keys as that of what they were before, and the number its result is to be scaled by."""
    (left, by_left), (right, by_right) = (_undone(each, written, True) for each in (written.left, written.right))
    found = _planned(written, left, right)
    return (written, 1.0) if found is None else (found, by_left * by_right)


def undone_like(written: Contraction, scores: Contraction) -> Contraction:
    """A product of weights and values with the batch axes that the product of queries and keys has."""
    right, _ = _undone(written.right, written, False)
    batch = tuple(map(scores.size, scores.out[:-2]))
    if len(written.left.labels) != 3 or len(batch) != len(right.labels) - 2:
        return written
    labels = (*right.labels[:-2], *written.left.labels[1:])
    left = replace(written.left, labels=labels, sizes=(*batch, *written.left.sizes[1:]))
    return _planned(written, left, right) or written


def _planned(written: Contraction, left: Operand, right: Operand) -> Contraction | None:
    """The product with the batch axes of its operands, where these are the same, perhaps repeated."""
    more = len(left.labels) - len(written.left.labels)
    if more != len(right.labels) - len(written.right.labels):
        return None
    if not more:
        return replace(written, left=left, right=right)
    out = (*left.labels[: more + 1], *written.out[1:])
    found = plan(left, right, out)
    pairs = zip(left.sizes[: more + 1], right.sizes[: more + 1], strict=True)
    alike = all(_same(x, y) or _same(x, 1) or _same(y, 1) for x, y in pairs)
    return found if alike and isinstance(found, Contraction) else None


def _undone(operand: Operand, written: Contraction, scales: bool) -> tuple[Operand, float]:
    """What an operand is a view or a multiple of, as far as it is one, and the multiple."""
    node, labels, by, depth = operand.node, operand.labels, 1.0, 0
    merged = len(labels) != 3 or written.batch != labels[:1] or written.out[:1] != labels[:1]
    found = operand, by
    while operand.view is None and node.all_input_nodes:
        source = node.all_input_nodes[0]
        before, after, name = value_of(source), value_of(node), op_name(node)
        if not isinstance(before, torch.Tensor) or before.dtype != after.dtype:
            break
        number = _number(node) if scales else None
        copies = name in _COPIES
        if (copies or number is not None) and any(map(_writes, source.users)):
            break
        if number is not None:
            by *= number
        elif swaps_last(node, before.ndim):
            labels = (*labels[:-2], labels[-1], labels[-2])
        elif not merged and name in _MERGES and _merges(before.shape, after.shape):
            labels, merged = (*((labels[0], axis) for axis in range(before.ndim - 2)), *labels[1:]), True
        elif not copies and not (name == "expand" and len(labels) > len(operand.labels) and before.ndim == after.ndim):
            break
        node, depth = source, depth + 1
        if number is not None or len(labels) > len(operand.labels):
            view = partial(_source, depth=depth)
            found = replace(operand, labels=labels, sizes=tuple(before.shape), view=view), by
    return found


def _source(builder: Builder, node: fx.Node, depth: int) -> fx.Node:
    """What a node is computed from, so many operations before."""
    for _ in range(depth):
        node = node.all_input_nodes[0]
    return node


def _merges(before: Sequence[Dim], after: Sequence[Dim]) -> bool:
    """Whether sizes [*batch, rows, columns] became [product of batch, rows, columns]."""
    ends = len(before) > 3 == len(after) and all(map(_same, before[-2:], after[-2:]))
    return ends and _same(product_of(before[:-2]), after[0])


def _number(node: fx.Node) -> float | None:
    """What a node multiplies its one tensor by, if that is a number."""
    name, numbers = op_name(node), [each for each in node.args if not isinstance(each, fx.Node)]
    if len(node.args) != 2 or node.kwargs or len(numbers) != 1 or not isinstance(numbers[0], (int, float)):
        return None
    if name in _MULTIPLICATIONS:
        return float(numbers[0])
    return 1 / numbers[0] if name in _DIVISIONS and numbers[0] and numbers[0] is node.args[1] else None


def _writes(node: fx.Node) -> bool:
    """Whether a node changes what it reads."""
    return op_name(node).endswith("_") or op_name(node) in _WRITES


def _same(a: Dim, b: Dim) -> bool:
    return statically_known_true(a == b)


__all__ = ["undone", "undone_like"]
