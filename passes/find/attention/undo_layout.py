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
    """An operand, the sizes of the axes that its batch axis was merged of, and the factor that was taken out of it."""

    operand: Operand
    batch: tuple[Dim, ...] = ()
    by: float = 1.0


def undone(written: Contraction) -> tuple[Contraction, float]:
    """Returns the product of queries and keys before views and factors, and the factor of its result."""
    left, right = (_undone(operand, written, scales=True) for operand in (written.left, written.right))
    before = _planned(written, left, right)
    return (written, 1.0) if before is None else (before, left.by * right.by)


def undone_like(written: Contraction, lead: Sequence[Dim]) -> Contraction:
    """Returns the product of weights and values with the batch axes that the product of queries and keys has."""
    right = _undone(written.right, written, scales=False)
    left, (batch, *rest) = written.left, written.left.labels
    if len(rest) != 2 or not right.batch or len(lead) != len(right.batch):
        return written
    labels = (*((batch, part) for part in range(len(lead))), *rest)
    left = replace(left, labels=labels, sizes=(*lead, *left.sizes[1:]))
    return _planned(written, _Undone(left, tuple(lead)), right) or written


def _planned(written: Contraction, left: _Undone, right: _Undone) -> Contraction | None:
    """Returns the product with the batch axes of its operands, where these are the same."""
    if len(left.batch) != len(right.batch) or not all(map(same, left.batch, right.batch)):
        return None
    if not left.batch:
        return replace(written, left=left.operand, right=right.operand)
    batch, *rest = written.out
    parts = [(batch, part) for part in range(len(left.batch))]
    plan = contraction_of(left.operand, right.operand, (*parts, *rest))
    return plan if isinstance(plan, Contraction) else None


def _undone(operand: Operand, written: Contraction, *, scales: bool) -> _Undone:
    """Returns the tensor that an operand is a view or a multiple of, as far as it is one."""
    node, by = operand.node, 1.0
    splits = len(operand.labels) == 3 and written.batch == operand.labels[:1] == written.out[:1]
    result = _Undone(operand)
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
        if result.batch and len(batch) != len(result.batch):
            break
        if number is not None or batch:
            view = partial(_source, depth=len(views))
            result = _Undone(replace(operand, labels=labels, sizes=tuple(before.shape), view=view), batch, by)
        node = source
    return result


def _labelled(
    operand: Operand, source: fx.Node, views: Sequence[fx.Node]
) -> tuple[tuple[Label, ...], tuple[Dim, ...]] | None:
    """Returns the labels of `source`, which an operand is a view of, and the sizes merged to its first axis."""
    parts = Parts(source)
    for node in views:
        if _number(node) is None and not parts.view(node):
            return None
    first, *rest = parts.axes
    label_of = {axis: label for axis, label in zip(parts.axes, operand.labels, strict=True) if axis}
    ones = [label for axis, label in zip(parts.axes, operand.labels, strict=True) if not axis]
    if len(first) > 1:
        del label_of[first]
        label_of |= {(part,): (operand.labels[0], place) for place, part in enumerate(first)}
    labels: list[Label] = []
    for axis in parts.source:
        labels.append(label_of.pop(axis, None) if axis else ones.pop(0) if ones else None)
        if axis and labels[-1] is None:
            return None
    if ones or any(axis in label_of for axis in rest):
        return None  # repeated rows or columns
    return tuple(labels), tuple(parts.sizes[part] for part in first) if len(first) > 1 else ()


def _source(builder: Builder, node: fx.Node, depth: int) -> fx.Node:
    """Returns the first input of a node, `depth` operations before it."""
    for _ in range(depth):
        node = node.all_input_nodes[0]
    return node


def _number(node: fx.Node) -> float | None:
    """Returns the number that a node multiplies its one tensor by; None where it does anything else."""
    name, numbers = op_name(node), [argument for argument in node.args if not isinstance(argument, fx.Node)]
    if len(node.args) != 2 or node.kwargs or len(numbers) != 1 or not isinstance(numbers[0], (int, float)):
        return None
    if name in _MULTIPLICATIONS:
        return float(numbers[0])
    return 1 / numbers[0] if name in _DIVISIONS and numbers[0] and numbers[0] is node.args[1] else None


def _writes(node: fx.Node) -> bool:
    """Returns True if a node changes its input."""
    return op_name(node).endswith("_") or op_name(node) in _WRITES
