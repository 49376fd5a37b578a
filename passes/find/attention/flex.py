"""`flex_attention`: its score and mask functions read as steps on the scores.

    flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: tanh(s / 20) * 20 + slope[h] * (j - i), block_mask=causal)
    # is read as
    steps mul scale, mul 1/20, tanh, mul 20, add slope[h] * (j - i), causal

What the functions make of places and captured tensors is computed for all places at once, as tensors that broadcast
against the scores; a mask that is more than causality is one too, and its blocks are no longer skipped. As in torch's
own definition the mask function says what is attended to, and not the blocks that were made of it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fxquant.decisions import SkipReason
from fxquant.passes.find.attention.emit import Unknown, numbered, without_repeats
from fxquant.passes.find.attention.fused import attention_products
from fxquant.passes.find.facts import Attend, Attention, Match
from fxquant.passes.find.layout import settle
from fxquant.passes.find.site import Arguments, requires_grad
from fxquant.passes.graph.builder import Builder
from fxquant.passes.graph.names import op_name
from fxquant.passes.graph.values import value_of

_ELEMENTWISE = frozenset(
    """add sub mul truediv div floordiv floor_divide mod remainder neg abs pow exp log sqrt sin cos tanh sigmoid
    minimum maximum clamp where ge gt le lt eq ne and or xor invert logical_and logical_or logical_not bitwise_and
    bitwise_or bitwise_not to float int long bool type getitem index new_ones""".split()
)
"""Operations that functions of places may have: on each element, or picking from a captured tensor."""

_TRUE = frozenset(("new_ones", "ones"))
_AND = frozenset(("and", "bitwise_and", "logical_and"))


def _name(node: fx.Node) -> str:
    """Returns the name of an operation, without the underscores of its methods."""
    return op_name(node).strip("_")


@dataclass(frozen=True)
class Flex(Arguments):
    """The higher-order operator. Its FLOPs are those of all scores, no window or causality discounted."""

    query: fx.Node
    key: fx.Node
    value: fx.Node
    score_mod: fx.Node
    block_mask: Sequence[Any]
    scale: float
    kernel_options: Any
    score_buffers: Sequence[Any] = ()
    mask_buffers: Sequence[Any] = ()

    def match(self) -> Match:
        match = self.site.match("dpa", *attention_products(self.query, self.key, self.value))
        try:
            return replace(match, attention=self.attention(_result(self.site.node), self.read()))
        except Unknown as unknown:
            return replace(match, skip=(SkipReason.ATTENTION, f"flex_attention: {unknown}"))

    def read(self) -> list[_Step]:
        """Reads the steps of both functions."""
        if value_of(self.query).shape[:-3] != value_of(self.key).shape[:-3] or not isinstance(self.scale, (int, float)):
            raise Unknown("queries and keys differ in their batch, or the scale is computed")
        score_mod, mask_mod = _body(self.score_mod), _body(self.block_mask[-1])
        steps = [("mul", float(self.scale), None), *_of_scores(score_mod, self.score_buffers)]
        return [*steps, *_conjuncts(*_bound(mask_mod, self.mask_buffers, 0))]

    def attention(self, result: fx.Node, read: Sequence[_Step]) -> Attention:
        """Makes an attention of the steps; its output is `result`."""
        node, slots = self.site.node, self.site.slots(self.query, self.key, self.value)
        steps, expressions = numbered(read)

        def emit(builder: Builder, attend: Attend) -> fx.Node:
            query, key, value = (node.all_input_nodes[slot] for slot in slots)
            places = _Places(builder, query, key)
            extras = [places.tensor(expression) for expression in expressions]
            output = settle(Builder(result), attend(query, *without_repeats(key, value), extras))
            result.replace_all_uses_with(output)
            for user in list(node.users):
                node.graph.erase_node(user)
            return output

        buffers = [buffer for buffer in (*self.score_buffers, *self.mask_buffers) if isinstance(buffer, fx.Node)]
        axes, learned = value_of(self.query).ndim, any(map(requires_grad, buffers))
        return Attention(node=node, emit=emit, axes=axes, steps=steps, learned=learned)


def _result(node: fx.Node) -> fx.Node:
    """Returns the output of the operator. Raises Unknown where more is read of it."""
    read = [user for user in node.users if user.users or user.op == "output"]
    if len(read) != 1 or read[0].target is not operator.getitem or read[0].args[1] != 0:
        raise Unknown("more than its output is read (return_lse)")
    return read[0]


def _body(function: Any) -> fx.Graph:
    body = value_of(function) if isinstance(function, fx.Node) else None
    if not isinstance(body, fx.GraphModule):
        raise Unknown("a function that is no graph")
    return body.graph


@dataclass(frozen=True)
class _Expression:
    """A node of a function, with the places and captured tensors that its inputs are."""

    node: fx.Node
    inputs: dict[fx.Node, Any]
    negated: bool = False


_Step = tuple[str, float, _Expression | None]
_PLACES = ("batch", "head", "query", "key")


def _bound(graph: fx.Graph, buffers: Sequence[Any], skipped: int) -> tuple[fx.Node, dict[fx.Node, Any]]:
    """Returns the result of a function, and the meanings of its inputs behind the first `skipped`."""
    inputs, output = graph.find_nodes(op="placeholder"), next(n for n in graph.nodes if n.op == "output").args[0]
    output = output[0] if isinstance(output, (tuple, list)) else output
    if len(inputs) != skipped + len(_PLACES) + len(buffers) or not isinstance(output, fx.Node):
        raise Unknown("a function of other things than places and tensors")
    return output, dict(zip(inputs[skipped:], (*_PLACES, *buffers), strict=True))


def _of_scores(graph: fx.Graph, buffers: Sequence[Any]) -> list[_Step]:
    """Returns the steps of a score function, which is read backwards along the nodes that come from the score."""
    node, inputs = _bound(graph, buffers, 1)
    score = graph.find_nodes(op="placeholder")[0]
    path = {score}
    for inner in graph.nodes:
        if path & set(inner.all_input_nodes):
            path.add(inner)
    steps: list[_Step] = []
    while node is not score:
        if node not in path:
            raise Unknown("its scores are replaced")
        name, args = _name(node), node.args
        along = [i for i, arg in enumerate(args) if arg in path]
        if len(along) != 1 or (node.kwargs and name != "to"):
            raise Unknown(f"its score function has {name} of two scores")
        (at,) = along
        other = args[1 - at] if len(args) == 2 else None
        if name == "tanh":
            steps.append(("tanh", 0.0, None))
        elif name == "neg":
            steps.append(("mul", -1.0, None))
        elif name == "mul" or (name in ("truediv", "div") and at == 0 and isinstance(other, (int, float))):
            steps.append(_with("mul", 1 / other if name != "mul" else other, inputs))  # type: ignore[operator]
        elif name == "add" or (name == "sub" and at == 0):
            steps.append(_with("add", other, inputs, negated=name == "sub"))
        elif name == "where" and at == 1 and _number(args[2]) == -math.inf:
            steps += reversed(list(_conjuncts(args[0], inputs)))  # type: ignore[arg-type]
        elif name not in ("to", "float") or at != 0:
            raise Unknown(f"its score function has {name}")
        node = args[at]  # type: ignore[assignment]
    return steps[::-1]


def _with(kind: str, other: Any, inputs: dict[fx.Node, Any], negated: bool = False) -> _Step:
    number = _number(other)
    if number is not None:
        return kind, -number if negated else number, None
    return kind, 0.0, _dense(other, inputs, negated)


def _number(x: Any) -> float | None:
    return float(x) if isinstance(x, (int, float)) and not isinstance(x, bool) else None


def _conjuncts(node: fx.Node, inputs: dict[fx.Node, Any]) -> Iterator[_Step]:
    """Yields the steps of a condition on places: one for causality, and one for everything else."""
    whole, causal = _dense(node, inputs), False
    parts, rest = [node], []
    while parts:
        part = parts.pop(0)
        if _name(part) in _AND and len(part.all_input_nodes) == 2:
            parts = [*part.all_input_nodes, *parts]
        elif _is_causal(part, inputs):
            causal = True
        elif _name(part) not in _TRUE:
            rest.append(part)
    if rest:
        yield "keep", 0.0, whole if len(rest) > 1 else _dense(rest[0], inputs)
    if causal and len(rest) < 2:
        yield "causal", 0.0, None


def _is_causal(node: fx.Node, inputs: dict[fx.Node, Any]) -> bool:
    """Returns True if this is query >= key."""
    sides = {"ge": ("query", "key"), "le": ("key", "query")}.get(_name(node))
    return sides is not None and len(node.args) == 2 and all(
        inputs.get(_shifted(arg)) == side for arg, side in zip(node.args, sides, strict=True)
    )  # fmt: skip


def _shifted(node: Any) -> Any:
    """Returns a node without additions of zero."""
    while isinstance(node, fx.Node) and _name(node) == "add" and node.args[1] == 0:
        node = node.args[0]
    return node


def _dense(node: Any, inputs: dict[fx.Node, Any], negated: bool = False) -> _Expression:
    """Returns an expression of places alone. Raises Unknown where an operation is more than elementwise."""
    queue = [node]
    while queue:
        part = queue.pop()
        if part in inputs:
            continue
        called = isinstance(part, fx.Node) and part.op in ("call_function", "call_method")
        if not called or _name(part) not in _ELEMENTWISE:
            raise Unknown(f"{_name(part) if isinstance(part, fx.Node) else part} in one of its functions")
        queue += part.all_input_nodes
    return _Expression(node, inputs, negated)


class _Places:
    """Writes expressions for all places at once: batch [B, 1, 1, 1], head [H, 1, 1], query [Sq, 1], key [Sk]."""

    def __init__(self, builder: Builder, query: fx.Node, key: fx.Node) -> None:
        self.builder = builder
        self.axes = {"batch": (query, 0), "head": (query, 1), "query": (query, 2), "key": (key, 2)}
        self.device = value_of(query).device
        self.tensors: dict[str, fx.Node] = {}

    def place(self, name: str) -> fx.Node:
        """Adds the numbers of all places along an axis, once."""
        if name not in self.tensors:
            node, axis = self.axes[name]
            places = self.builder.call(torch.arange, self.builder.size(node, axis), device=self.device)
            ones = 3 - _PLACES.index(name)
            self.tensors[name] = self.builder.call(torch.reshape, places, [-1, *[1] * ones]) if ones else places
        return self.tensors[name]

    def tensor(self, expression: _Expression) -> fx.Node:
        """Adds the tensor of an expression, of at least the axes of queries and keys."""
        copies: dict[fx.Node, fx.Node] = {}

        def copy(node: fx.Node) -> fx.Node:
            if node not in copies:
                place = expression.inputs.get(node)
                if isinstance(place, str):
                    place = self.place(place)
                elif place is None:
                    args, kwargs = fx.node.map_arg((node.args, node.kwargs), copy)
                    target: Any = node.target
                    target = getattr(torch.Tensor, target) if node.op == "call_method" else target
                    place = self.builder.call(target, *args, **kwargs)
                copies[node] = place
            return copies[node]

        tensor = copy(expression.node)
        if expression.negated:
            tensor = self.builder.call(torch.neg, tensor)
        missing, shape = 2 - value_of(tensor).ndim, value_of(tensor).shape
        return self.builder.call(torch.reshape, tensor, [*[1] * missing, *shape]) if missing > 0 else tensor
