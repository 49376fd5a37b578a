"""`flex_attention`: its score and mask functions read as steps on the scores.

    flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: tanh(s / 20) * 20 + slope[h] * (j - i), block_mask=causal)
    # is read as
    steps mul scale, mul 1/20, tanh, mul 20, add slope[h] * (j - i), causal

What the functions make of places and captured tensors is computed for all places at once, as tensors that broadcast
against the scores; a mask that is more than causality is one too, and its blocks are no longer skipped. As in torch's
own definition the mask function says what is attended to, and not the blocks that were made of it.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxquant.compat.values import fake_mode_of
from fxquant.decisions import SkipReason
from fxquant.formats import Step
from fxquant.passes.find.attention.emit import Unknown, without_repeats
from fxquant.passes.find.attention.fused import attention_products
from fxquant.passes.find.contraction import Site, requires_grad, settle
from fxquant.passes.find.facts import Attend, Attention, Match
from fxquant.passes.graph.builder import Builder
from fxquant.passes.graph.names import op_name
from fxquant.passes.graph.values import value_of

_ELEMENTWISE = frozenset(
    """add sub mul truediv div floordiv floor_divide mod remainder neg abs pow exp log sqrt sin cos tanh sigmoid
    minimum maximum clamp where ge gt le lt eq ne and or xor invert logical_and logical_or logical_not bitwise_and
    bitwise_or bitwise_not to float int long bool type getitem index new_ones""".split()
)
"""What functions of places may be made of: each element by itself, or picked from a captured tensor."""

_TRUE = frozenset(("new_ones", "ones"))
_AND = frozenset(("and", "bitwise_and", "logical_and"))


def _name(node: fx.Node) -> str:
    """The name of an operation, without the underscores of its methods."""
    return op_name(node).strip("_")


def flex(
    site: Site, query: fx.Node, key: fx.Node, value: fx.Node, score_mod: fx.Node, block_mask: Sequence[Any],
    scale: float, kernel_options: Any, score_buffers: Sequence[Any] = (), mask_buffers: Sequence[Any] = (),
) -> Match:  # fmt: skip
    """The higher-order operator. Its FLOPs are those of all scores, no window or causality discounted."""
    q, k = value_of(query), value_of(key)
    match = site.match("dpa", *attention_products(query, key, value))
    try:
        result = _result(site.node)
        if q.shape[:-3] != k.shape[:-3] or not isinstance(scale, (int, float)):
            raise Unknown("queries and keys differ in their batch, or the scale is computed")
        mods = (_body(score_mod), (*score_buffers,)), (_body(block_mask[-1]), (*mask_buffers,))
        steps = [("mul", float(scale), None), *_of_scores(*mods[0]), *_of_mask(*mods[1])]
    except Unknown as unknown:
        return replace(match, skip=(SkipReason.ATTENTION, f"flex_attention: {unknown}"))
    node, built = site.node, [each for each in steps if each[2] is not None]
    numbered, slots = iter(range(len(built))), [node.all_input_nodes.index(each) for each in (query, key, value)]

    def emit(builder: Builder, attend: Attend) -> fx.Node:
        query, key, value = (node.all_input_nodes[slot] for slot in slots)
        places = _Places(builder, query, key)
        extras = [places.tensor(expression) for _, _, expression in built if expression is not None]
        made = settle(Builder(result), attend(query, *without_repeats(key, value), extras))
        result.replace_all_uses_with(made)
        for user in list(node.users):
            node.graph.erase_node(user)
        return made

    attention = Attention(
        node=node, emit=emit, axes=q.ndim,
        steps=tuple(Step(kind, number, -1 if tensor is None else next(numbered)) for kind, number, tensor in steps),
        learned=any(isinstance(each, fx.Node) and requires_grad(each) for each in (*score_buffers, *mask_buffers)),
    )  # fmt: skip
    return replace(match, attention=attention)


def _result(node: fx.Node) -> fx.Node:
    """The only thing that is read of the operator: its output."""
    read = [user for user in node.users if user.users or user.op == "output"]
    if len(read) != 1 or read[0].target is not operator.getitem or read[0].args[1] != 0:
        raise Unknown("more than its output is read (return_lse)")
    return read[0]


def _body(function: Any) -> fx.Graph:
    body = value_of(function) if isinstance(function, fx.Node) else None
    if not isinstance(body, fx.GraphModule):
        raise Unknown("a function that is no graph")
    return body.graph


class _Expression:
    """A node of a function, with what its places and captured tensors are."""

    def __init__(self, node: fx.Node, given: dict[fx.Node, Any], negated: bool = False) -> None:
        self.node, self.given, self.negated = node, given, negated


_Step = tuple[str, float, _Expression | None]
_PLACES = ("batch", "head", "query", "key")


def _given(graph: fx.Graph, buffers: Sequence[Any], skipped: int) -> tuple[fx.Node, dict[fx.Node, Any]]:
    """The node that a function returns, and what its inputs behind the first `skipped` stand for."""
    inputs, output = graph.find_nodes(op="placeholder"), next(n for n in graph.nodes if n.op == "output").args[0]
    output = output[0] if isinstance(output, (tuple, list)) else output
    if len(inputs) != skipped + len(_PLACES) + len(buffers) or not isinstance(output, fx.Node):
        raise Unknown("a function of other things than places and tensors")
    return output, dict(zip(inputs[skipped:], (*_PLACES, *buffers), strict=True))


def _of_scores(graph: fx.Graph, buffers: Sequence[Any]) -> list[_Step]:
    """The steps of a score function, read backwards along what comes from the score."""
    node, given = _given(graph, buffers, 1)
    score = graph.find_nodes(op="placeholder")[0]
    path = {score}
    for each in graph.nodes:
        if path & set(each.all_input_nodes):
            path.add(each)
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
            steps.append(_with("mul", 1 / other if name != "mul" else other, given))  # type: ignore[operator]
        elif name == "add" or (name == "sub" and at == 0):
            steps.append(_with("add", other, given, negated=name == "sub"))
        elif name == "where" and at == 1 and _number(args[2]) == -math.inf:
            steps += reversed(list(_conjuncts(args[0], given)))  # type: ignore[arg-type]
        elif name not in ("to", "float") or at != 0:
            raise Unknown(f"its score function has {name}")
        node = args[at]  # type: ignore[assignment]
    return steps[::-1]


def _with(kind: str, other: Any, given: dict[fx.Node, Any], negated: bool = False) -> _Step:
    number = _number(other)
    if number is not None:
        return kind, -number if negated else number, None
    return kind, 0.0, _dense(other, given, negated)


def _number(x: Any) -> float | None:
    return float(x) if isinstance(x, (int, float)) and not isinstance(x, bool) else None


def _of_mask(graph: fx.Graph, buffers: Sequence[Any]) -> list[_Step]:
    return list(_conjuncts(*_given(graph, buffers, 0)))


def _conjuncts(node: fx.Node, given: dict[fx.Node, Any]) -> Iterator[_Step]:
    """A condition on places as steps, one for all that is no causality."""
    whole, causal = _dense(node, given), False
    parts, rest = [node], []
    while parts:
        part = parts.pop(0)
        if _name(part) in _AND and len(part.all_input_nodes) == 2:
            parts = [*part.all_input_nodes, *parts]
        elif _is_causal(part, given):
            causal = True
        elif _name(part) not in _TRUE:
            rest.append(part)
    if rest:
        yield "keep", 0.0, whole if len(rest) > 1 else _dense(rest[0], given)
    if causal and len(rest) < 2:
        yield "causal", 0.0, None


def _is_causal(node: fx.Node, given: dict[fx.Node, Any]) -> bool:
    """Whether this is query >= key."""
    sides = {"ge": ("query", "key"), "le": ("key", "query")}.get(_name(node))
    return sides is not None and len(node.args) == 2 and all(
        given.get(_shifted(arg)) == side for arg, side in zip(node.args, sides, strict=True)
    )  # fmt: skip


def _shifted(node: Any) -> Any:
    """Behind additions of zero."""
    while isinstance(node, fx.Node) and _name(node) == "add" and node.args[1] == 0:
        node = node.args[0]
    return node


def _dense(node: Any, given: dict[fx.Node, Any], negated: bool = False) -> _Expression:
    """An expression of places alone. Raises Unknown for what is more than elementwise."""
    queue = [node]
    while queue:
        each = queue.pop()
        if each in given:
            continue
        called = isinstance(each, fx.Node) and each.op in ("call_function", "call_method")
        if not called or _name(each) not in _ELEMENTWISE:
            raise Unknown(f"{_name(each) if isinstance(each, fx.Node) else each} in one of its functions")
        queue += each.all_input_nodes
    return _Expression(node, given, negated)


class _Places:
    """Writes expressions for all places at once: batch [B, 1, 1, 1], head [H, 1, 1], query [Sq, 1], key [Sk]."""

    def __init__(self, builder: Builder, query: Any, key: Any) -> None:
        self.builder, device = builder, value_of(query).device
        self.made: dict[str, fx.Node] = {}
        axes = {"batch": (query, 0), "head": (query, 1), "query": (query, 2), "key": (key, 2)}
        self.make: dict[str, Callable[[], fx.Node]] = {
            name: lambda name=name, node=node, axis=axis: self._arange(name, node, axis, device)  # type: ignore[misc]
            for name, (node, axis) in axes.items()
        }

    def _arange(self, name: str, node: fx.Node, axis: int, device: torch.device) -> fx.Node:
        size = self.builder.size(node, axis)
        with fake_mode_of(value_of(node)) or contextlib.nullcontext():
            places = self.builder.call(torch.arange, size, device=device)
        ones = 3 - _PLACES.index(name)
        return self.builder.call(torch.reshape, places, [-1, *[1] * ones]) if ones else places

    def tensor(self, expression: _Expression) -> fx.Node:
        """The tensor of an expression, of at least the axes of queries and keys."""
        env: dict[fx.Node, fx.Node] = {}

        def of(node: fx.Node) -> fx.Node:
            if node in env:
                return env[node]
            given = expression.given.get(node)
            if isinstance(given, str):
                if given not in self.made:
                    self.made[given] = self.make[given]()
                env[node] = self.made[given]
            elif given is not None:
                env[node] = given
            else:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), of)
                target = node.target
                if node.op == "call_method":
                    target = getattr(torch.Tensor, str(node.target))
                env[node] = self.builder.call(target, *args, **kwargs)  # type: ignore[arg-type]
            return env[node]

        made = of(expression.node)
        if expression.negated:
            made = self.builder.call(torch.neg, made)
        missing = 2 - value_of(made).ndim
        return self.builder.call(torch.reshape, made, [*[1] * missing, *value_of(made).shape]) if missing > 0 else made
