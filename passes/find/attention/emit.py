"""Writes an attention that was found as two products: q, k and v in canonical axes, and the tensors of its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import fx

from fxquant.formats import Step
from fxquant.passes.find.facts import Contraction, product_of
from fxquant.passes.find.layout import arrange, is_one, permute
from fxquant.passes.graph.axes import same, same_sizes
from fxquant.passes.graph.builder import Builder
from fxquant.passes.graph.names import COPIES, EXPANDS, PICKS, RESHAPES, UNIT_AXES, op_name
from fxquant.passes.graph.values import Dim, value_of


class Unknown(Exception):
    """The reason why a chain cannot be read."""


Change = Callable[[Builder, fx.Node], fx.Node]
T = TypeVar("T")


def numbered(read: Iterable[tuple[str, float, T | None]]) -> tuple[tuple[Step, ...], list[T]]:
    """Returns the steps, and the tensors that they number."""
    steps: list[Step] = []
    extras: list[T] = []
    for kind, value, extra in read:
        steps.append(Step(kind, value, -1 if extra is None else len(extras)))
        extras += [] if extra is None else [extra]
    return tuple(steps), extras


@dataclass(frozen=True)
class Extra:
    """Input `slot` of `user`, taken when the chain is rewritten, in a place where the scores have these batch sizes."""

    user: fx.Node
    slot: int
    lead: tuple[Dim, ...]
    change: Change | None = None
    order: tuple[int, ...] = ()

    @property
    def node(self) -> fx.Node:
        return self.user.all_input_nodes[self.slot]

    def repeated(self) -> tuple[Dim, ...]:
        """Returns the batch sizes along which the tensor must be repeated before its batch axes can be reshaped."""
        shape = tuple(value_of(self.node).shape)
        if self.order:
            shape = (1,) * (len(self.order) - len(shape)) + shape
            shape = tuple(shape[axis] for axis in self.order)
        outer = shape[:-2]
        if all(map(is_one, outer)):
            return ()
        outer = (1,) * (len(self.lead) - len(outer)) + outer
        return tuple(wide for wide, size in zip(self.lead, outer, strict=True) if not same(wide, size))

    def build(self, builder: Builder, lead: tuple[Dim, ...], like: fx.Node) -> fx.Node:
        """Adds the tensor for scores whose batch sizes are `lead`, those of `like` [*lead, _, _]."""
        repeated = self.repeated()
        node = self.node if self.change is None else self.change(builder, self.node)
        outer = value_of(node).shape[:-2]
        if same_sizes(self.lead, lead) or not outer:
            return node
        if all(map(is_one, outer)):
            return builder.call(torch.reshape, node, [builder.size(node, axis) for axis in (-2, -1)])
        if repeated:
            node = builder.call(torch.Tensor.expand, node, [*_sizes(builder, self.lead, like), -1, -1])
        return with_lead(builder, node, lead, like)


class Scores:
    """The first product: the scores are [*lead, queries, keys]."""

    def __init__(self, plan: Contraction) -> None:
        *self.labels, self.row, column = plan.out
        outer = [label for label in self.labels if label in plan.rows]
        shared = [label for label in self.labels if label in plan.batch]
        ends = plan.columns == (column,) and self.row in plan.rows and len(plan.inner) == 1
        if not ends or self.labels != [*shared, *outer]:
            raise Unknown("its scores are not [*batch, queries, keys]")
        self.plan, self.shared_labels, self.outer = plan, shared, outer
        self.lead = tuple(map(plan.left.size, self.labels))

    @property
    def shared(self) -> tuple[Dim, ...]:
        """The batch sizes of k and v: of one head, where queries alone have heads."""
        sizes = tuple(map(self.plan.left.size, self.shared_labels))
        return (*sizes, 1) if self.outer and len(sizes) < 2 else sizes

    @property
    def canonical(self) -> tuple[Dim, ...]:
        """The batch sizes of q: those of k, the last one times the heads that only queries have."""
        if not self.outer:
            return self.lead
        *batch, heads = self.shared
        return (*batch, heads * product_of(map(self.plan.left.size, self.outer)))

    def operands(self, builder: Builder, left: fx.Node, right: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Arranges q and k in canonical axes."""
        plan, batch = self.plan, len(self.shared) - 1
        left, right = (operand.viewed(builder, node) for operand, node in ((plan.left, left), (plan.right, right)))
        q = arrange(builder, left, plan.left, [*((label,) for label in self.labels), (self.row,), plan.inner])
        k = arrange(builder, right, plan.right, [*((label,) for label in self.shared_labels), plan.columns, plan.inner])
        if len(self.shared) > len(self.shared_labels):
            k = builder.call(torch.unsqueeze, k, batch)
        return q if len(self.labels) == len(self.shared) else builder.call(torch.flatten, q, batch, -3), k


class Context:
    """The second product, whose left operand is the weights [*lead, queries, keys]."""

    def __init__(self, plan: Contraction, axes: int) -> None:
        shared = [label for label in plan.left.kept if label in plan.batch]
        *outer, self.row = (label for label in plan.left.kept if label in plan.rows)
        if len(plan.columns) != 1:
            raise Unknown("its second product does not contract the keys")
        self.labels = [*shared, *outer]
        self.plan, self.axes, self.shared_labels = plan, axes, shared
        self.lead = tuple(map(plan.left.size, self.labels))

    @property
    def shared(self) -> tuple[Dim, ...]:
        """The batch sizes of v."""
        return tuple(map(self.plan.left.size, self.shared_labels))

    def operand(self, builder: Builder, right: fx.Node) -> fx.Node:
        """Arranges v in canonical axes."""
        batch, operand = [(label,) for label in self.shared_labels], self.plan.right
        return arrange(builder, operand.viewed(builder, right), operand, [*batch, self.plan.inner, self.plan.columns])

    def result(self, builder: Builder, node: fx.Node) -> fx.Node:
        """Gives the output of an attention the axes of the second product."""
        result = permute(builder, node, (*self.labels, self.row, *self.plan.columns), self.plan.out)
        merged = len(self.plan.out) - self.axes
        return builder.call(torch.flatten, result, 0, merged) if merged else result


def with_lead(builder: Builder, node: fx.Node, lead: tuple[Dim, ...], like: fx.Node) -> fx.Node:
    """Gives the batch axes of a tensor [*batch, S, D] other sizes, at most one of which is not of `like`."""
    if same_sizes(value_of(node).shape[:-2], lead):
        return node
    sizes = _sizes(builder, lead, like)
    return builder.call(torch.reshape, node, [*sizes, builder.size(node, -2), builder.size(node, -1)])


def _sizes(builder: Builder, sizes: Sequence[Dim], like: fx.Node) -> list[int | fx.Node]:
    """Returns sizes as numbers, or as nodes that read them of `like`; -1 for another."""
    nodes: list[int | fx.Node] = []
    for size in sizes:
        axes = [axis for axis, x in enumerate(value_of(like).shape) if same(size, x)]
        nodes.append(size if isinstance(size, int) else builder.size(like, axes[0]) if axes else -1)
    return nodes


def unknown_sizes(sizes: Sequence[Dim], among: Sequence[Dim]) -> list[Dim]:
    """Returns the dynamic sizes that are not among others."""
    return [size for size in sizes if not isinstance(size, int) and not any(same(size, x) for x in among)]


def without_repeats(key: fx.Node, value: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Returns keys and values [B, H, S, D] before their heads were repeated for several queries, if both were."""
    k, v = _unrepeated(key), _unrepeated(value)
    if k is None or v is None or not same_sizes(value_of(k).shape[:2], value_of(v).shape[:2]):
        return key, value
    return k, v


def _unrepeated(node: fx.Node) -> fx.Node | None:
    shape = value_of(node).shape
    if len(shape) != 4:
        return None
    name, args = op_name(node), node.args
    if name == "repeat_interleave":
        times, axis = (*args[1:], node.kwargs.get("dim"))[:2] if len(args) > 1 else (None, None)
        source = args[0]
        return source if isinstance(times, int) and axis in (1, -3) and isinstance(source, fx.Node) else None
    chain: list[fx.Node] = []
    for names in (RESHAPES, COPIES | {""}, EXPANDS, PICKS | UNIT_AXES):
        if op_name(node) in names:
            chain.append(node)
            source = node.args[0]
            if not isinstance(source, fx.Node):
                return None
            node = source
        elif "" not in names:
            return None
    *_, expanded, one = chain
    wide, narrow = value_of(expanded).shape, value_of(node).shape
    if len(wide) != 5 or len(narrow) != 4 or value_of(one).shape[2] != 1:
        return None
    whole = same_sizes(narrow, (*wide[:2], *wide[3:])) and same_sizes(shape, (wide[0], wide[1] * wide[2], *wide[3:]))
    return node if whole else None
