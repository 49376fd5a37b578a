"""Attention written by hand: read backwards from its second product, through dropout, softmax, mask and scale.

    scores = torch.matmul(q, k.transpose(-1, -2)); weights = softmax(scores / 8 + mask, -1); out = weights @ v
    # is read as
    steps mul 0.125, add mask, of q, k and v

Axes may stand in any order, as those of einsum do. Every operation must be known, and nothing outside may read what
lies between the products; else a reason is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from fxquant.compat.values import statically_known_true
from fxquant.formats import Step
from fxquant.passes.find.attention.undo_layout import undone, undone_like
from fxquant.passes.find.contraction import arrange, permute, requires_grad, settle
from fxquant.passes.find.facts import Attend, Attention, Builder, Contraction, Label, Match, product_of
from fxquant.passes.graph.axes import order_before, same
from fxquant.passes.graph.names import COPIES, EXPANDS, PICKS, RESHAPES, SAME_PLACES, UNIT_AXES, op_name
from fxquant.passes.graph.values import Dim, value_of

_OF_MASKS = frozenset("invert __invert__ bitwise_not logical_not eq ne".split()) | UNIT_AXES | PICKS
_DIVISIONS = frozenset(("div", "truediv", "true_divide"))


class Unknown(Exception):
    """Why a chain cannot be read."""


Change = Callable[[Builder, fx.Node], fx.Node]


@dataclass(frozen=True)
class _Extra:
    """Input `slot` of `user`, taken when the chain is rewritten, in a place where the scores have these batch sizes."""

    user: fx.Node
    slot: int
    lead: tuple[Dim, ...]
    change: Change | None = None
    order: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, user: fx.Node, node: fx.Node, lead: tuple[Dim, ...], change: Change | None = None,
        order: tuple[int, ...] = (),
    ) -> _Extra:  # fmt: skip
        return cls(user, user.all_input_nodes.index(node), lead, change, order)

    def repeated(self) -> tuple[Dim, ...]:
        """The batch sizes along which the tensor must be repeated before its batch axes can be reshaped."""
        shape = tuple(value_of(self.user.all_input_nodes[self.slot]).shape)
        if self.order:
            shape = (1,) * (len(self.order) - len(shape)) + shape
            shape = tuple(shape[axis] for axis in self.order)
        outer = shape[:-2]
        if all(isinstance(size, int) and size == 1 for size in outer):
            return ()
        outer = (1,) * (len(self.lead) - len(outer)) + outer
        return tuple(size for size, own in zip(self.lead, outer, strict=True) if not _same((size,), (own,)))

    def build(self, builder: Builder, lead: tuple[Dim, ...], like: fx.Node) -> fx.Node:
        """The tensor for scores whose batch sizes are `lead`, those of `like` [*lead, _, _]."""
        repeated = self.repeated()
        node = self.user.all_input_nodes[self.slot]
        node = node if self.change is None else self.change(builder, node)
        outer = value_of(node).shape[:-2]
        if _same(self.lead, lead) or not outer:
            return node
        if all(isinstance(size, int) and size == 1 for size in outer):
            return builder.call(torch.reshape, node, [builder.size(node, axis) for axis in (-2, -1)])
        if repeated:
            sizes = [*_sizes(builder, self.lead, like), -1, -1]
            node = builder.call(torch.Tensor.expand, node, sizes)
        return _with_lead(builder, node, lead, like)


@dataclass
class _Chain:
    """What has been read so far; steps and extras from the softmax backwards."""

    first: fx.Node
    path: frozenset[fx.Node]
    order: tuple[int, ...]
    """The order in which the axes of the node that is read are [*batch, queries, keys]."""
    steps: list[tuple[str, float, _Extra | None]] = field(default_factory=list)
    sink: _Extra | None = None
    dropped_column: bool = False
    zeroed: list[Any] = field(default_factory=list)
    """Masks of weights that became zero."""
    dropout: float = 0.0
    read: list[fx.Node] = field(default_factory=list)

    def step(self, kind: str, value: float = 0.0, extra: _Extra | None = None) -> None:
        self.steps.append((kind, value, extra))

    def lead(self, node: fx.Node) -> tuple[Dim, ...]:
        """The batch sizes of the scores."""
        return tuple(value_of(node).shape[axis] for axis in self.order[:-2])

    def is_over_keys(self, node: fx.Node, axis: Any) -> bool:
        """Whether an axis of a node is that of its keys."""
        axis = axis[0] if isinstance(axis, (list, tuple)) and len(axis) == 1 else axis
        return isinstance(axis, int) and axis % value_of(node).ndim == self.order[-1]

    def along(self, node: fx.Node) -> list[fx.Node]:
        """The inputs of a node that come from the first product."""
        return [each for each in node.all_input_nodes if each in self.path]


def read_chain(first: Match, second: Match) -> Attention | str:
    """The attention of two products of activations with a softmax between them, or why they are none."""
    if first.contraction is None or second.contraction is None:
        return "one of its products is not a plain matmul"
    reason = ""
    try:
        chain, scores, context = _read(first.node, first.contraction, second.contraction)
    except Unknown as unknown:
        return str(unknown)
    before, scale = undone(scores)
    lead = [before.size(label) for label in before.out[:-2]]
    for plans in ((before, undone_like(context, lead)), (scores, context)):
        try:
            return _attention(chain, second, plans, scale if plans[0] is before else 1.0)
        except Unknown as unknown:
            reason = str(unknown)
    return reason


def _read(first: fx.Node, product: Contraction, context: Contraction) -> tuple[_Chain, Contraction, Contraction]:
    """What is between the products, and both: of queries and keys, with the result's axes so, of weights and values."""
    reached = _reached([first])
    if context.left.node not in reached:
        context = _exchanged(context)
    start = context.left.node
    path = reached & _backward(start)
    if start not in path or context.right.node in reached:
        raise Unknown("the softmax is not one operand of the second product")
    chain = _Chain(first, path, _order_of_weights(context))
    node = _scores_of_weights(chain, start)
    while node is not first:
        node = _before(chain, node)
    _of_product(chain, first)
    scores = replace(product, out=tuple(product.out[axis] for axis in chain.order))
    return chain, scores if scores.out[-1] in scores.columns else _exchanged(scores), context


def _exchanged(plan: Contraction) -> Contraction:
    """The same product with its left operand on the right."""
    return replace(plan, left=plan.right, right=plan.left, rows=plan.columns, columns=plan.rows)


def _order_of_weights(context: Contraction) -> tuple[int, ...]:
    """The order in which the axes of weights are [*batch, queries, keys]."""
    labels = context.left.labels
    rows = [axis for axis, label in enumerate(labels) if label in context.rows]
    if len(context.inner) != 1 or not rows or None in labels:
        raise Unknown("its second product does not contract the keys")
    batch = [axis for axis, label in enumerate(labels) if label in context.batch]
    return (*batch, *rows, labels.index(context.inner[0]))


def _attention(chain: _Chain, second: Match, plans: tuple[Contraction, Contraction], scale: float) -> Attention:
    first, (scores, context) = chain.first, plans
    assert second.contraction is not None
    into, out_of = _Scores(scores), _Context(context, len(second.contraction.out))
    inside = _closed(chain, second.node)
    for _, _, extra in chain.steps:
        if extra is not None and extra.user.all_input_nodes[extra.slot] in inside:
            raise Unknown("a mask or scale is computed from the scores")
    if chain.dropped_column != (chain.sink is not None):
        raise Unknown("a column is added before the softmax or dropped after it, but not both")

    hidden = [
        e.user.all_input_nodes[e.slot] for kind, value, e in chain.steps if e and (kind, value) == ("fill", -math.inf)
    ]
    if not all(any(_alike(mask, each) for each in hidden) for mask in chain.zeroed):
        raise Unknown("its weights are masked otherwise than its scores")
    steps: list[Step] = []
    extras: list[_Extra] = []
    scaled = [("mul", scale, None)] if scale != 1 else []
    for kind, value, extra in [*scaled, *reversed(chain.steps), *([("sink", 0.0, chain.sink)] if chain.sink else [])]:
        steps.append(Step(kind, value, -1 if extra is None else len(extras)))
        extras += [] if extra is None else [extra]
    if not statically_known_true(product_of(into.shared) == product_of(out_of.shared)):
        raise Unknown("keys and values differ in their heads")
    lead = into.canonical()
    repeated = [extra.repeated() for extra in extras if not _same(extra.lead, lead)]
    if len(_unknown(out_of.lead, lead)) > 1 or any(_unknown(each, lead) for each in repeated):
        raise Unknown("batch axes are reshaped and dynamic")
    slots = [_slots(first, scores), _slots(second.node, context)]

    def emit(builder: Builder, attend: Attend) -> fx.Node:
        q, k = into.operands(builder, *(first.all_input_nodes[slot] for slot in slots[0]))
        v = _with_lead(builder, out_of.operand(builder, second.node.all_input_nodes[slots[1][1]]), into.shared, k)
        k, v = without_repeats(k, v)
        result = attend(q, k, v, [extra.build(builder, lead, q) for extra in extras])
        return settle(builder, out_of.result(builder, _with_lead(builder, result, out_of.lead, result)))

    return Attention(
        node=second.node, steps=tuple(steps), dropout=chain.dropout, emit=emit, inside=inside | {first},
        axes=len(lead) + 2,
        learned=any(requires_grad(extra.user.all_input_nodes[extra.slot]) for extra in extras),
    )  # fmt: skip


def _slots(node: fx.Node, plan: Contraction) -> tuple[int, int]:
    left, right = (node.all_input_nodes.index(operand.node) for operand in (plan.left, plan.right))
    return left, right


class _Scores:
    """The first product: the scores are [*lead, queries, keys]."""

    def __init__(self, plan: Contraction) -> None:
        *self.labels, self.row, column = plan.out
        outer = [label for label in self.labels if label in plan.rows]
        shared = [label for label in self.labels if label in plan.batch]
        if (
            plan.columns != (column,) or self.row not in plan.rows or len(plan.inner) != 1
            or self.labels != [*shared, *outer]
        ):  # fmt: skip
            raise Unknown("its scores are not [*batch, queries, keys]")
        self.plan, self.shared_labels, self.outer = plan, shared, outer
        self.lead = tuple(map(plan.left.size, self.labels))

    @property
    def shared(self) -> tuple[Dim, ...]:
        """The batch sizes of k and v: of one head, where queries alone have heads."""
        sizes = tuple(map(self.plan.left.size, self.shared_labels))
        return (*sizes, 1) if self.outer and len(sizes) < 2 else sizes

    def canonical(self) -> tuple[Dim, ...]:
        """The batch sizes of q: those of k, the last one times the heads that only queries have."""
        if not self.outer:
            return self.lead
        *batch, heads = self.shared
        return (*batch, heads * product_of(map(self.plan.left.size, self.outer)))

    def operands(self, builder: Builder, left: fx.Node, right: fx.Node) -> tuple[fx.Node, fx.Node]:
        plan, batch = self.plan, len(self.shared) - 1
        left, right = (operand.viewed(builder, node) for operand, node in ((plan.left, left), (plan.right, right)))
        q = arrange(builder, left, plan.left, [*((label,) for label in self.labels), (self.row,), plan.inner])
        k = arrange(builder, right, plan.right, [*((label,) for label in self.shared_labels), plan.columns, plan.inner])
        if len(self.shared) > len(self.shared_labels):
            k = builder.call(torch.unsqueeze, k, batch)
        return q if len(self.labels) == len(self.shared) else builder.call(torch.flatten, q, batch, -3), k


class _Context:
    """The second product: of weights [*lead, queries, keys]."""

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
        plan = self.plan
        right = plan.right.viewed(builder, right)
        return arrange(
            builder, right, plan.right, [*((label,) for label in self.shared_labels), plan.inner, plan.columns]
        )

    def result(self, builder: Builder, node: fx.Node) -> fx.Node:
        have: tuple[Label, ...] = (*self.labels, self.row, *self.plan.columns)
        result = permute(builder, node, have, self.plan.out)
        merged = len(self.plan.out) - self.axes
        return builder.call(torch.flatten, result, 0, merged) if merged else result


def _with_lead(builder: Builder, node: fx.Node, lead: tuple[Dim, ...], like: fx.Node) -> fx.Node:
    """A tensor [*batch, S, D] with its batch axes in other sizes, of which at most one is not of `like`."""
    if _same(value_of(node).shape[:-2], lead):
        return node
    sizes = _sizes(builder, lead, like)
    return builder.call(torch.reshape, node, [*sizes, builder.size(node, -2), builder.size(node, -1)])


def _sizes(builder: Builder, sizes: Sequence[Dim], like: fx.Node) -> list[int | fx.Node]:
    """Numbers, or nodes of the same sizes of `like`, or -1."""
    found: list[int | fx.Node] = []
    for size in sizes:
        axes = [axis for axis, x in enumerate(value_of(like).shape) if _same((size,), (x,))]
        found.append(size if isinstance(size, int) else builder.size(like, axes[0]) if axes else -1)
    return found


def _unknown(sizes: Sequence[Dim], among: Sequence[Dim]) -> list[Dim]:
    """The dynamic ones of the sizes that are not among others."""
    return [size for size in sizes if not isinstance(size, int) and not any(_same((size,), (x,)) for x in among)]


def without_repeats(key: fx.Node, value: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Keys and values [B, H, S, D] before each of their heads was repeated for several queries, if both were."""
    before = [_unrepeated(node) for node in (key, value)]
    if before[0] is None or before[1] is None:
        return key, value
    alike = _same(value_of(before[0]).shape[:2], value_of(before[1]).shape[:2])
    return (before[0], before[1]) if alike else (key, value)


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
    whole = _same(narrow, (*wide[:2], *wide[3:])) and _same(shape, (wide[0], wide[1] * wide[2], *wide[3:]))
    return node if whole else None


def _scores_of_weights(chain: _Chain, node: fx.Node) -> fx.Node:
    """Reads from the weights back to what the softmax is of."""
    while True:
        chain.read.append(node)
        name, inner = op_name(node), chain.along(node)
        if name in ("softmax", "_softmax", "_safe_softmax", "special_softmax"):
            axis = _argument(node, 1, "dim")
            if not chain.is_over_keys(node, axis):
                raise Unknown(f"its softmax is over axis {axis}")
            return inner[0]
        if name == "dropout":
            rate, training = (
                _argument(node, 1, "p", 0.5),
                _argument(node, 2, "training", node.kwargs.get("train", True)),
            )
            if not isinstance(rate, (int, float)) or not isinstance(training, bool) or chain.dropout:
                raise Unknown("its dropout is computed")
            chain.dropout = float(rate) if training else 0.0
            node = inner[0]
        elif name == "getitem" and _drops_last(node) and chain.is_over_keys(node, -1):
            chain.dropped_column = True
            node = inner[0]
        elif name == "where" and isinstance(node.args[2], fx.Node) and _constant(node.args[1]) == 0:
            node = node.args[2]  # the safe softmax: rows with nothing to attend to are zero
        elif name.strip("_") == "masked_fill" and _constant(_argument(node, 2, "value")) == 0:
            chain.zeroed.append(_argument(node, 1, "mask"))
            node = inner[0]
        elif name in _DIVISIONS and (scores := _by_hand(chain, node)) is not None:
            chain.read.append(inner[0])
            return scores
        elif name == "slice" and node.args[2:] == (0, -1) and chain.is_over_keys(node, node.args[1]):
            chain.dropped_column = True
            node = inner[0]
        else:
            node = _through_views(chain, node, inner)


def _by_hand(chain: _Chain, node: fx.Node) -> fx.Node | None:
    """The scores of exp(scores) / sum of exp(scores)."""
    weights, total = node.args[:2]
    if not isinstance(weights, fx.Node) or not isinstance(total, fx.Node) or op_name(weights) != "exp":
        return None
    axis, kept = _argument(total, 1, "dim"), _argument(total, 2, "keepdim")
    last = chain.is_over_keys(weights, axis)
    return weights.args[0] if op_name(total) == "sum" and total.args[0] is weights and last and kept else None  # type: ignore[return-value]


def _before(chain: _Chain, node: fx.Node) -> fx.Node:
    """Reads one operation on the scores; returns what it is of."""
    order = chain.order
    source = _operation(chain, node)
    rows, more = _rows(node, order), len(order) - value_of(source).ndim
    if chain.order is order and more > 0:
        chain.order = tuple(axis - more for axis in order if axis >= more)
    if len(chain.order) < 2 or not statically_known_true(_rows(source, chain.order) == rows):
        raise Unknown(f"{node.name} repeats the scores")
    return source


def _rows(node: fx.Node, order: Sequence[int]) -> Dim:
    """How many rows of scores there are."""
    return product_of(value_of(node).shape[axis] for axis in order[:-1])


def _operation(chain: _Chain, node: fx.Node) -> fx.Node:
    chain.read.append(node)
    name, inner = op_name(node).strip("_"), chain.along(node)
    if name.startswith("i") and name[1:] in ("add", "sub", "mul", "truediv"):
        name = name[1:]
    lead, order = chain.lead(node), chain.order

    def extra(node: fx.Node, value: fx.Node, lead: tuple[Dim, ...], change: Change | None = None) -> _Extra:
        if order == tuple(range(len(order))):
            return _Extra.of(node, value, lead, change)

        def ordered(builder: Builder, value: fx.Node) -> fx.Node:
            value = value if change is None else change(builder, value)
            for _ in range(len(order) - value_of(value).ndim):
                value = builder.call(torch.unsqueeze, value, 0)
            return builder.call(torch.permute, value, order)

        return _Extra.of(node, value, lead, ordered, order)

    def other(source: fx.Node, value: Any, kind: str, change: Change | None = None, number: float = 0.0) -> fx.Node:
        if isinstance(value, fx.Node):
            if value in chain.path:
                raise Unknown(f"{node.name} combines the scores with themselves")
            chain.step(kind, extra=extra(node, value, lead, change))
        elif isinstance(value, (int, float)):
            chain.step(kind, number)
        else:
            raise Unknown(f"{node.name} is not read")
        return source

    if name in ("cat", "concat", "concatenate"):
        parts: Any = node.args[0]
        last = chain.is_over_keys(node, _argument(node, 1, "dim", 0)) and chain.is_over_keys(node, -1)
        column = last and not chain.steps and len(parts) == 2 and parts[0] in inner and value_of(parts[1]).shape[-1]
        if not statically_known_true(column == 1):
            raise Unknown(f"{node.name} adds more than a column before the softmax")
        chain.sink = extra(node, parts[1], lead)
        return parts[0]  # type: ignore[no-any-return]
    if name in ("mul", "multiply", "add", "sub", *_DIVISIONS):
        left, right = node.args[:2]
        alpha: Any = node.kwargs.get("alpha", 1)
        if (alpha != 1 and left not in inner) or node.kwargs.get("rounding_mode"):
            raise Unknown(f"{node.name} is not read")
        if left not in inner and name in ("mul", "multiply", "add"):
            left, right = right, left
        if not isinstance(left, fx.Node) or left not in inner:
            raise Unknown(f"{node.name} divides or subtracts by the scores")
        if name == "sub" and isinstance(right, fx.Node) and _is_one_for_a_row(right, order):
            return left  # one number for a row, such as its largest score, is nothing to a softmax
        if name in ("mul", "multiply"):
            return other(left, right, "mul", None, _float(right))
        if name == "add":
            return other(left, right, "add", None if alpha == 1 else _calls(torch.mul, alpha), alpha * _float(right))
        if name == "sub":
            return other(left, right, "add", _calls(torch.mul, -alpha), -alpha * _float(right))
        return other(left, right, "mul", _calls(torch.reciprocal), 1 / (_float(right) or 1.0))
    if name == "tanh":
        chain.step("tanh")
        return inner[0]
    if name == "masked_fill" and isinstance(_argument(node, 1, "mask"), fx.Node):
        value = _constant(_argument(node, 2, "value"))
        chain.step("fill", _number(node, value), extra(node, _argument(node, 1, "mask"), lead))
        return inner[0]
    if name == "where" and len(node.args) == 3:
        condition, kept, filled = node.args
        swapped = kept not in inner
        if swapped:
            kept, filled = filled, kept
        value, change = _constant(filled), None if swapped else _calls(torch.logical_not)
        if value is None and isinstance(filled, fx.Node) and not value_of(filled).ndim and not requires_grad(filled):
            made = _filled_in(node, filled, swapped)
            chain.step("add", extra=extra(node, condition, lead, made))  # type: ignore[arg-type]
            value = 0.0
        chain.step("fill", _number(node, value), extra(node, condition, lead, change))  # type: ignore[arg-type]
        return kept  # type: ignore[return-value]
    if name in ("max", "maximum") and len(node.args) == 2 and all(isinstance(each, fx.Node) for each in node.args):
        kept, other_one = node.args if node.args[0] in inner else reversed(node.args)
        least = _constant(other_one)
        if isinstance(least, (int, float)) and least <= torch.finfo(value_of(node).dtype).min:
            return kept  # type: ignore[return-value]
    return _through_views(chain, node, inner)


def _is_one_for_a_row(node: fx.Node, order: Sequence[int]) -> bool:
    """Whether a tensor beside the scores has one number for all keys."""
    shape = value_of(node).shape
    axis = order[-1] - len(order)
    return len(shape) >= -axis and _same((shape[axis],), (1,))


def _of_product(chain: _Chain, node: fx.Node) -> None:
    """What the first product itself does to its scores."""
    name = op_name(node)
    if name == "baddbmm":
        alpha, beta = node.kwargs.get("alpha", 1), node.kwargs.get("beta", 1)
        alpha, beta = _number(node, alpha), _number(node, beta)
        if beta:
            input: Any = node.args[0]
            change = None if beta == 1 else _calls(torch.mul, beta)
            if chain.order != (0, 1, 2):
                raise Unknown(f"{node.name} is not read")
            chain.step("add", extra=_Extra.of(node, input, chain.lead(node), change))
        if alpha != 1:
            chain.step("mul", alpha)
    elif name.startswith(("add", "baddbmm")):
        raise Unknown(f"its scores come from {name}")


def _through_views(chain: _Chain, node: fx.Node, inner: Sequence[fx.Node]) -> fx.Node:
    """Goes through a cast, or a view in which queries and keys are axes of their own."""
    name = op_name(node)
    if name == "type_as" and node.args[0] in inner:
        inner = [each for each in inner if each is node.args[0]]  # the other one may be scores too
    if len(inner) != 1:
        raise Unknown(f"{node.name} is not read")
    if name == "getitem" and op_name(inner[0]) == "native_dropout":
        raise Unknown("its dropout is computed")
    before, after = value_of(inner[0]).shape, value_of(node).shape
    same = len(before) > 1 and len(after) > 1 and _same(before[-2:], after[-2:])
    if name in SAME_PLACES and _same(before, after):
        return inner[0]
    if name in RESHAPES | UNIT_AXES | EXPANDS and same and chain.order == tuple(range(len(after))):
        if statically_known_true(product_of(before) == product_of(after)):
            chain.order = tuple(range(len(before)))
            return inner[0]
    elif inner[0] is node.all_input_nodes[0]:
        order = order_before(node, chain.order)
        if order is not None and statically_known_true(product_of(before) == product_of(after)):
            chain.order = order
            return inner[0]
    raise Unknown(f"{name} is not read")


def _closed(chain: _Chain, last: fx.Node) -> frozenset[fx.Node]:
    """All nodes between the products. What they compute must be read by none but each other and the last product."""
    inside = _reached((*chain.read, chain.first), stop=last)
    for node in inside:
        if op_name(node) == "_assert_tensor_metadata" or (op_name(node) == "getitem" and not node.users):
            continue  # in an exported program, of a cast and of a result that nobody takes: it goes with the chain
        if node.op == "output" or not node.users:
            reader = "what the graph returns" if node.op == "output" else node.name
            raise Unknown(f"{reader} reads its scores or weights too")
    return inside


def _reached(nodes: Iterable[fx.Node], stop: fx.Node | None = None) -> frozenset[fx.Node]:
    """The nodes and everything computed from them, but for `stop` and what is computed from that alone."""
    queue = list(nodes)
    seen = set(queue)
    while queue:
        for user in queue.pop().users:
            if user not in seen and user is not stop:
                seen.add(user)
                queue.append(user)
    return frozenset(seen)


def _backward(node: fx.Node) -> frozenset[fx.Node]:
    """Everything a node is computed from, itself included."""
    seen, queue = {node}, [node]
    while queue:
        for each in queue.pop().all_input_nodes:
            if each not in seen:
                seen.add(each)
                queue.append(each)
    return frozenset(seen)


def _alike(a: Any, b: Any) -> bool:
    """Whether nodes are one mask, perhaps written twice as in ``scores.masked_fill(~mask, -inf)``."""
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node) or a is b:
        return bool(a == b)
    known = a.target == b.target and op_name(a) in _OF_MASKS and len(a.args) == len(b.args) and a.kwargs == b.kwargs
    return known and all(map(_alike, a.args, b.args))


def _same(a: Sequence[Dim], b: Sequence[Dim]) -> bool:
    """Whether sizes are equal, as far as is known without deciding on dynamic ones."""
    return len(a) == len(b) and all(map(same, a, b))


def _drops_last(node: fx.Node) -> bool:
    index = node.args[1]
    last = index[-1] if isinstance(index, tuple) else None
    rest = index[:-1] if isinstance(index, tuple) else ()
    whole = all(each is Ellipsis or each == slice(None) for each in rest)
    return whole and last == slice(None, -1)


def _argument(node: fx.Node, place: int, name: str, default: Any = None) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def _constant(value: Any) -> Any:
    """The number that a value or a node is, if it is one."""
    if isinstance(value, fx.Node):
        if op_name(value) in SAME_PLACES and isinstance(value.args[0], fx.Node):
            return _constant(value.args[0])
        place = {"full": 1, "full_like": 1, "tensor": 0, "scalar_tensor": 0}.get(op_name(value))
        return None if place is None else _constant(_argument(value, place, "fill_value"))
    return value


def _number(node: fx.Node, value: Any) -> float:
    if not isinstance(value, (int, float)):
        raise Unknown(f"{node.name} fills in or scales by what is computed")
    return float(value)


def _float(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0


def _filled_in(user: fx.Node, filled: fx.Node, at: bool) -> Change:
    """Of the condition of a `where` what it fills in, and zero elsewhere; for a number that is known at run time."""
    slot = user.all_input_nodes.index(filled)

    def change(builder: Builder, condition: fx.Node) -> fx.Node:
        elsewhere = builder.call(torch.logical_not, condition) if at else condition
        return builder.call(torch.masked_fill, user.all_input_nodes[slot], elsewhere, 0.0)

    return change


def _calls(target: Callable[..., Any], *args: Any) -> Change:
    return lambda builder, node: builder.call(target, node, *args)


__all__ = ["read_chain", "without_repeats"]
