"""Steps: each operation between the products of an attention, read backwards from the weights to the scores.

Two tables say how an operator is read, by its name: `_OF_WEIGHTS` behind the softmax, `_OF_SCORES` in front of it. A
reader notes the operation in the chain and returns the node that it is applied to; None means that it is another use of
the operator, which is then read as a view or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxquant.compat.values import statically_known_true
from fxquant.passes.find.attention.emit import Change, Extra, Unknown
from fxquant.passes.find.facts import product_of
from fxquant.passes.find.site import requires_grad
from fxquant.passes.graph.axes import order_before, same_sizes
from fxquant.passes.graph.builder import Builder
from fxquant.passes.graph.names import EXPANDS, PICKS, RESHAPES, SAME_PLACES, UNIT_AXES, op_name
from fxquant.passes.graph.values import Dim, value_of

_SOFTMAX = frozenset(("softmax", "_softmax", "_safe_softmax", "special_softmax"))
_DIVISIONS = frozenset(("div", "truediv", "true_divide"))
_OF_MASKS = frozenset("invert __invert__ bitwise_not logical_not eq ne".split()) | UNIT_AXES | PICKS


@dataclass
class Chain:
    """The operations that were read so far: steps and extras from the softmax backwards."""

    first: fx.Node
    path: frozenset[fx.Node]
    order: tuple[int, ...]
    """The order in which the axes of the node that is read are [*batch, queries, keys]."""
    steps: list[tuple[str, float, Extra | None]] = field(default_factory=list)
    sink: Extra | None = None
    dropped_column: bool = False
    zeroed: list[Any] = field(default_factory=list)
    """Masks of weights that became zero."""
    dropout: float = 0.0
    read: list[fx.Node] = field(default_factory=list)

    def step(self, kind: str, value: float = 0.0, extra: Extra | None = None) -> None:
        self.steps.append((kind, value, extra))

    def step_with(self, node: fx.Node, kind: str, other: Any, number: float, change: Change | None = None) -> None:
        """Adds the step of a node that combines the scores with a number, or with a tensor not computed from them."""
        if isinstance(other, fx.Node):
            if other in self.path:
                raise Unknown(f"{node.name} combines the scores with themselves")
            self.step(kind, extra=self.extra(node, other, change))
        elif isinstance(other, (int, float)):
            self.step(kind, number)
        else:
            raise Unknown(f"{node.name} is not read")

    def extra(self, node: fx.Node, value: fx.Node, change: Change | None = None) -> Extra:
        """Returns a tensor that a node combines with the scores, with its axes in their order."""
        order, lead = self.order, tuple(value_of(node).shape[axis] for axis in self.order[:-2])
        slot = node.all_input_nodes.index(value)
        if order == tuple(range(len(order))):
            return Extra(node, slot, lead, change)

        def ordered(builder: Builder, value: fx.Node) -> fx.Node:
            value = value if change is None else change(builder, value)
            for _ in range(len(order) - value_of(value).ndim):
                value = builder.call(torch.unsqueeze, value, 0)
            return builder.call(torch.permute, value, order)

        return Extra(node, slot, lead, ordered, order)

    def is_over_keys(self, node: fx.Node, axis: Any) -> bool:
        """Returns True if an axis of a node is that of its keys."""
        axis = axis[0] if isinstance(axis, (list, tuple)) and len(axis) == 1 else axis
        return isinstance(axis, int) and axis % value_of(node).ndim == self.order[-1]

    def along(self, node: fx.Node) -> list[fx.Node]:
        """Returns the inputs of a node that come from the first product."""
        return [source for source in node.all_input_nodes if source in self.path]


Reader = Callable[[Chain, fx.Node], fx.Node | None]


def scores_of_weights(chain: Chain, node: fx.Node) -> fx.Node:
    """Reads from the weights back to the input of the softmax, and returns that."""
    while True:
        chain.read.append(node)
        name = op_name(node)
        if name in _SOFTMAX:
            axis = _argument(node, 1, "dim")
            if not chain.is_over_keys(node, axis):
                raise Unknown(f"its softmax is over axis {axis}")
            return chain.along(node)[0]
        if name in _DIVISIONS and (scores := _softmax_by_hand(chain, node)) is not None:
            chain.read.append(chain.along(node)[0])
            return scores
        node = _read(chain, node, _OF_WEIGHTS.get(name))


def scores_before(chain: Chain, node: fx.Node) -> fx.Node:
    """Reads one operation on the scores, and returns the scores before it."""
    order = chain.order
    chain.read.append(node)
    source = _read(chain, node, _OF_SCORES.get(op_name(node).strip("_")))
    rows, more = _rows(node, order), len(order) - value_of(source).ndim
    if chain.order is order and more > 0:
        chain.order = tuple(axis - more for axis in order if axis >= more)
    if len(chain.order) < 2 or not statically_known_true(_rows(source, chain.order) == rows):
        raise Unknown(f"{node.name} repeats the scores")
    return source


def read_product(chain: Chain, node: fx.Node) -> None:
    """Reads the factor and the addend of the first product itself."""
    name = op_name(node)
    if name == "baddbmm":
        alpha, beta = (_number(node, node.kwargs.get(factor, 1)) for factor in ("alpha", "beta"))
        if beta:
            addend: Any = node.args[0]
            if chain.order != (0, 1, 2):
                raise Unknown(f"{node.name} is not read")
            chain.step("add", extra=chain.extra(node, addend, None if beta == 1 else _calls(torch.mul, beta)))
        if alpha != 1:
            chain.step("mul", alpha)
    elif name.startswith(("add", "baddbmm")):
        raise Unknown(f"its scores come from {name}")


def alike(a: Any, b: Any) -> bool:
    """Returns True if nodes are one mask, perhaps written twice as in ``scores.masked_fill(~mask, -inf)``."""
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node) or a is b:
        return bool(a == b)
    same = a.target == b.target and op_name(a) in _OF_MASKS and len(a.args) == len(b.args) and a.kwargs == b.kwargs
    return same and all(map(alike, a.args, b.args))


def _read(chain: Chain, node: fx.Node, reader: Reader | None) -> fx.Node:
    source = None if reader is None else reader(chain, node)
    return _through_view(chain, node) if source is None else source


def _through_view(chain: Chain, node: fx.Node) -> fx.Node:
    """Returns the source of a cast, or of a view in which queries and keys are axes of their own."""
    name, inner = op_name(node), chain.along(node)
    if name == "type_as" and node.args[0] in inner:
        inner = [source for source in inner if source is node.args[0]]  # the other one may be scores too
    if len(inner) != 1:
        raise Unknown(f"{node.name} is not read")
    if name == "getitem" and op_name(inner[0]) == "native_dropout":
        raise Unknown("its dropout is computed")
    before, after = value_of(inner[0]).shape, value_of(node).shape
    if name in SAME_PLACES and same_sizes(before, after):
        return inner[0]
    order: tuple[int, ...] | None = None
    ends = len(before) > 1 and len(after) > 1 and same_sizes(before[-2:], after[-2:])
    if name in RESHAPES | UNIT_AXES | EXPANDS and ends and chain.order == tuple(range(len(after))):
        order = tuple(range(len(before)))
    elif inner[0] is node.all_input_nodes[0]:
        order = order_before(node, chain.order)
    if order is None or not statically_known_true(product_of(before) == product_of(after)):
        raise Unknown(f"{name} is not read")
    chain.order = order
    return inner[0]


def _softmax_by_hand(chain: Chain, node: fx.Node) -> fx.Node | None:
    """Returns the scores of exp(scores) / sum of exp(scores)."""
    weights, total = node.args[:2]
    if not isinstance(weights, fx.Node) or not isinstance(total, fx.Node) or op_name(weights) != "exp":
        return None
    axis, kept = _argument(total, 1, "dim"), _argument(total, 2, "keepdim")
    last = chain.is_over_keys(weights, axis)
    return weights.args[0] if op_name(total) == "sum" and total.args[0] is weights and last and kept else None  # type: ignore[return-value]


def _dropout(chain: Chain, node: fx.Node) -> fx.Node:
    rate, training = _argument(node, 1, "p", 0.5), _argument(node, 2, "training", node.kwargs.get("train", True))
    if not isinstance(rate, (int, float)) or not isinstance(training, bool) or chain.dropout:
        raise Unknown("its dropout is computed")
    chain.dropout = float(rate) if training else 0.0
    return chain.along(node)[0]


def _without_last_key(chain: Chain, node: fx.Node) -> fx.Node | None:
    """Reads ``weights[..., :-1]``, which drops the column of a sink."""
    axis: Any = -1
    index: Any = node.args[1]
    if op_name(node) == "slice":
        axis, drops = index, node.args[2:] == (0, -1)
    else:
        whole = isinstance(index, tuple) and all(part is Ellipsis or part == slice(None) for part in index[:-1])
        drops = whole and index[-1] == slice(None, -1)
    if not drops or not chain.is_over_keys(node, axis):
        return None
    chain.dropped_column = True
    return chain.along(node)[0]


def _zeroed_where(chain: Chain, node: fx.Node) -> fx.Node | None:
    """Reads the safe softmax: rows with nothing to attend to are zero."""
    weights = node.args[2]
    return weights if isinstance(weights, fx.Node) and _constant(node.args[1]) == 0 else None


def _zeroed(chain: Chain, node: fx.Node) -> fx.Node | None:
    if _constant(_argument(node, 2, "value")) != 0:
        return None
    chain.zeroed.append(_argument(node, 1, "mask"))
    return chain.along(node)[0]


def _cat(chain: Chain, node: fx.Node) -> fx.Node:
    """Reads a column beside the scores: the sink."""
    parts: Any = node.args[0]
    last = chain.is_over_keys(node, _argument(node, 1, "dim", 0)) and chain.is_over_keys(node, -1)
    alone = last and not chain.steps and len(parts) == 2 and parts[0] in chain.along(node)
    if not alone or not statically_known_true(value_of(parts[1]).shape[-1] == 1):
        raise Unknown(f"{node.name} adds more than a column before the softmax")
    chain.sink = chain.extra(node, parts[1])
    return parts[0]  # type: ignore[no-any-return]


def _operands(chain: Chain, node: fx.Node, *, commutes: bool) -> tuple[fx.Node, Any, Any]:
    """Returns the scores, the other operand, and the factor of that."""
    scores, other = node.args[:2]
    inner, alpha = chain.along(node), node.kwargs.get("alpha", 1)
    if (alpha != 1 and scores not in inner) or node.kwargs.get("rounding_mode"):
        raise Unknown(f"{node.name} is not read")
    if scores not in inner and commutes:
        scores, other = other, scores
    if not isinstance(scores, fx.Node) or scores not in inner:
        raise Unknown(f"{node.name} divides or subtracts by the scores")
    return scores, other, alpha


def _mul(chain: Chain, node: fx.Node) -> fx.Node:
    scores, other, _ = _operands(chain, node, commutes=True)
    chain.step_with(node, "mul", other, _float(other))
    return scores


def _add(chain: Chain, node: fx.Node) -> fx.Node:
    scores, other, alpha = _operands(chain, node, commutes=True)
    change = None if alpha == 1 else _calls(torch.mul, alpha)
    chain.step_with(node, "add", other, alpha * _float(other), change)
    return scores


def _sub(chain: Chain, node: fx.Node) -> fx.Node:
    scores, other, alpha = _operands(chain, node, commutes=False)
    if not isinstance(other, fx.Node) or not _is_one_for_a_row(other, chain.order):
        chain.step_with(node, "add", other, -alpha * _float(other), _calls(torch.mul, -alpha))
    return scores  # one number for a row, such as its largest score, is nothing to a softmax


def _div(chain: Chain, node: fx.Node) -> fx.Node:
    scores, other, _ = _operands(chain, node, commutes=False)
    chain.step_with(node, "mul", other, 1 / (_float(other) or 1.0), _calls(torch.reciprocal))
    return scores


def _tanh(chain: Chain, node: fx.Node) -> fx.Node:
    chain.step("tanh")
    return chain.along(node)[0]


def _masked_fill(chain: Chain, node: fx.Node) -> fx.Node | None:
    mask = _argument(node, 1, "mask")
    if not isinstance(mask, fx.Node):
        return None
    number = _number(node, _constant(_argument(node, 2, "value")))
    chain.step("fill", number, chain.extra(node, mask))
    return chain.along(node)[0]


def _where(chain: Chain, node: fx.Node) -> fx.Node | None:
    if len(node.args) != 3:
        return None
    condition: Any
    condition, scores, filled = node.args
    swapped = scores not in chain.along(node)
    if swapped:
        scores, filled = filled, scores
    number, change = _constant(filled), None if swapped else _calls(torch.logical_not)
    if number is None and isinstance(filled, fx.Node) and not value_of(filled).ndim and not requires_grad(filled):
        chain.step("add", extra=chain.extra(node, condition, _filled_in(node, filled, swapped)))
        number = 0.0
    chain.step("fill", _number(node, number), chain.extra(node, condition, change))
    return scores  # type: ignore[return-value]


def _maximum(chain: Chain, node: fx.Node) -> fx.Node | None:
    """Reads a lower bound that no number of the dtype is below."""
    if len(node.args) != 2 or not all(isinstance(operand, fx.Node) for operand in node.args):
        return None
    scores, other = node.args if node.args[0] in chain.along(node) else reversed(node.args)
    least = _constant(other)
    bounded = isinstance(least, (int, float)) and least <= torch.finfo(value_of(node).dtype).min
    return scores if bounded else None  # type: ignore[return-value]


_OF_WEIGHTS: dict[str, Reader] = {
    "dropout": _dropout,
    "getitem": _without_last_key,
    "slice": _without_last_key,
    "where": _zeroed_where,
    "masked_fill": _zeroed,
    "masked_fill_": _zeroed,
}

_OF_SCORES: dict[str, Reader] = {
    **dict.fromkeys(("cat", "concat", "concatenate"), _cat),
    **dict.fromkeys(("mul", "multiply", "imul"), _mul),
    **dict.fromkeys(("add", "iadd"), _add),
    **dict.fromkeys(("sub", "isub"), _sub),
    **dict.fromkeys((*_DIVISIONS, "itruediv"), _div),
    "tanh": _tanh,
    "masked_fill": _masked_fill,
    "where": _where,
    **dict.fromkeys(("max", "maximum"), _maximum),
}
"""Readers by names without underscores around them: in-place methods are read as well."""


def _rows(node: fx.Node, order: Sequence[int]) -> Dim:
    """Returns the number of rows of scores."""
    return product_of(value_of(node).shape[axis] for axis in order[:-1])


def _is_one_for_a_row(node: fx.Node, order: Sequence[int]) -> bool:
    """Returns True if a tensor beside the scores has one number for all keys."""
    shape = value_of(node).shape
    axis = order[-1] - len(order)
    return len(shape) >= -axis and same_sizes((shape[axis],), (1,))


def _argument(node: fx.Node, place: int, name: str, default: Any = None) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def _constant(value: Any) -> Any:
    """Returns the number that a value or a node is, if it is one."""
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
    """Turns the condition of a `where` into the number that it fills in, known at run time, and zero elsewhere."""
    slot = user.all_input_nodes.index(filled)

    def change(builder: Builder, condition: fx.Node) -> fx.Node:
        elsewhere = builder.call(torch.logical_not, condition) if at else condition
        return builder.call(torch.masked_fill, user.all_input_nodes[slot], elsewhere, 0.0)

    return change


def _calls(target: Callable[..., Any], *args: Any) -> Change:
    return lambda builder, node: builder.call(target, node, *args)
