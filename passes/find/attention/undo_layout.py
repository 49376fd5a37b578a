"""Undoes what stands in front of a product of attention: batch axes merged for `bmm`, and a scale of queries or keys.

    (q * 0.5).expand(b, h, s, d).reshape(b * h, s, d) @ (k.mT * 0.5).expand(b, h, d, s).reshape(b * h, d, s)
    # is read as
    q @ k.mT, of four axes, times 0.25

So `run_decompositions()` writes `matmul`, `einsum` and attention, and so do users: what had axes of batch and heads has
them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import fx

from fxquant.passes.find.contraction import contraction_of
from fxquant.passes.find.facts import Contraction, Label, Operand
from fxquant.passes.graph.axes import Parts, same
from fxquant.passes.graph.builder import Builder
from fxquant.passes.graph.names import COPIES, op_name
from fxquant.passes.graph.values import Dim, value_of

_MULTIPLICATIONS = frozenset(("mul", "multiply"))
_DIVISIONS = frozenset(("div", "divide", "truediv", "true_divide"))
_WRITES = frozenset(("setitem", "iadd", "isub", "imul", "itruediv"))


@dataclass(frozen=True)
class _Undone:
    """An operand, the sizes of the axes that its batch axis was merged of, and what it is to be multiplied by."""

    operand: Operand
    batch: tuple[Dim, ...] = ()
    by: float = 1.0


def undone(written: Contraction) -> tuple[Contraction, float]:
    """A product of queries and keys as that of what they were before, and the number its result is to be scaled by."""
    left, right = (_undone(each, written, scales=True) for each in (written.left, written.right))
    found = _planned(written, left, right)
    return (written, 1.0) if found is None else (found, left.by * right.by)


def undone_like(written: Contraction, lead: Sequence[Dim]) -> Contraction:
    """A product of weights and values with the batch axes that the product of queries and keys has."""
    right = _undone(written.right, written, scales=False)
    left, (batch, *rest), many = written.left, written.left.labels, len(lead)
    if len(rest) != 2 or not right.batch or many != len(right.batch):
        return written
    labels = (*((batch, part) for part in range(many)), *rest)
    left = replace(left, labels=labels, sizes=(*lead, *left.sizes[1:]))
    return _planned(written, _Undone(left, tuple(lead)), right) or written


def _planned(written: Contraction, left: _Undone, right: _Undone) -> Contraction | None:
    """The product with the batch axes of its operands, where these are the same."""
    if len(left.batch) != len(right.batch) or not all(map(same, left.batch, right.batch)):
        return None
    if not left.batch:
        return replace(written, left=left.operand, right=right.operand)
    batch, *rest = written.out
    parts = [(batch, part) for part in range(len(left.batch))]
    found = contraction_of(left.operand, right.operand, (*parts, *rest))
    return found if isinstance(found, Contraction) else None


def _undone(operand: Operand, written: Contraction, *, scales: bool) -> _Undone:
    """What an operand is a view or a multiple of, as far as it is one."""
    node, by = operand.node, 1.0
    splits = len(operand.labels) == 3 and written.batch == operand.labels[:1] == written.out[:1]
    found = _Undone(operand)
    views: list[fx.Node] = []
    while operand.view is None and node.all_input_nodes:
        source, number = node.all_input_nodes[0], _number(node) if scales else None
        before, after = value_of(source), value_of(node)
        if not isinstance(before, torch.Tensor) or before.dtype != after.dtype:
            break
        if (op_name(node) in COPIES or number is not None) and any(map(_writes, source.users)):
            break
        by *= 1.0 if number is None else number
        views.insert(0, node)
        labelled = _labelled(operand, source, views)
        if labelled is None or (labelled[1] and not splits):
            break
        labels, batch = labelled
        if found.batch and len(batch) != len(found.batch):
            break
        if number is not None or batch:
            view = partial(_source, depth=len(views))
            sizes = tuple(before.shape)
            found = _Undone(replace(operand, labels=labels, sizes=sizes, view=view), batch, by)
        node = source
    return found


def _labelled(
    operand: Operand, source: fx.Node, views: Sequence[fx.Node]
) -> tuple[tuple[Label, ...], tuple[Dim, ...]] | None:
    """The labels of a tensor's axes that an operand is a view of, and the sizes that its first axis was merged of."""
    parts = Parts(source)
    for node in views:
        if _number(node) is None and not parts.view(node):
            return None
    first, *rest = parts.axes
    known = {axis: label for axis, label in zip(parts.axes, operand.labels, strict=True) if axis}
    ones = [label for axis, label in zip(parts.axes, operand.labels, strict=True) if not axis]
    if len(first) > 1:
        del known[first]
        known |= {(part,): (operand.labels[0], place) for place, part in enumerate(first)}
    labels: list[Label] = []
    for axis in parts.source:
        labels.append(known.pop(axis, None) if axis else ones.pop(0) if ones else None)
        if axis and labels[-1] is None:
            return None
    if ones or any(axis in known for axis in rest):
        return None  # repeated rows or columns
    return tuple(labels), tuple(parts.sizes[part] for part in first) if len(first) > 1 else ()


def _source(builder: Builder, node: fx.Node, depth: int) -> fx.Node:
    """What a node is computed from, so many operations before."""
    for _ in range(depth):
        node = node.all_input_nodes[0]
    return node


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


__all__ = ["undone", "undone_like"]
