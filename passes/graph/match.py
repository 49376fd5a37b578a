"""Pieces of a graph that compute the same as a pattern, itself a traced graph; both are seen through views."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import fx

from fxquant.compat.private import inductor_decompositions, make_fx
from fxquant.compat.values import on_fakes, statically_known_true
from fxquant.passes.graph.meta import VAL
from fxquant.passes.graph.names import RESHAPES, VIEWS, calls
from fxquant.passes.graph.values import val

_aten = torch.ops.aten
_COMMUTATIVE = (_aten.mul.Tensor, _aten.add.Tensor)


def behind_views(node: Any, views: Collection[str] = VIEWS) -> Any:
    """Returns the tensor that a node is a view of, or the node itself; anything else stays."""
    while calls(node, views):
        node = node.args[0]
    return node


def readers(root: fx.Node, views: Collection[str] = RESHAPES) -> Iterator[fx.Node]:
    """Yields the nodes that read a tensor, through views."""
    for user in root.users:
        if calls(user, views):
            yield from readers(user, views)
        else:
            yield user


def shaped(node: fx.Node, shape: list[Any]) -> fx.Node:
    """Returns `node` as a tensor of a shape; where nodes are inserted, a reshape may come."""
    value = val(node)
    if len(value.shape) == len(shape) and all(map(statically_known_true, map(operator.eq, value.shape, shape))):
        return node
    reshaped = node.graph.call_function(_aten.reshape.default, (node, shape))
    with on_fakes(value):
        reshaped.meta = {**node.meta, VAL: value.reshape(shape)}
    return reshaped


@functools.cache
def pattern_of(
    run: Callable[..., Any], inputs: tuple[tuple[tuple[int, ...], torch.dtype], ...], *, decomposed: bool = True
) -> tuple[fx.Node, list[fx.Node]]:
    """Traces a function of tensors, given by shape and dtype, as Inductor's graphs show it, decomposed or not yet.

    Returns its output and its inputs.
    """
    tensors = [torch.zeros(shape, dtype=dtype) for shape, dtype in inputs]
    table = dict(inductor_decompositions()) if decomposed else {}
    graph = make_fx(lambda *x: run(*x), decomposition_table=table)(*tensors).graph
    (output,) = graph.find_nodes(op="output")
    return output.args[0], list(graph.find_nodes(op="placeholder"))


def matches(pattern: Any, node: Any, inputs: dict[fx.Node, fx.Node]) -> bool:
    """Returns True if a node computes what a node of a pattern does; fills `inputs`, the pattern's inputs here."""
    if not isinstance(pattern, fx.Node):
        return type(pattern) is type(node) and bool(pattern == node)
    if not isinstance(node, fx.Node):
        return False
    node = behind_views(node, RESHAPES)
    if pattern.op == "placeholder":
        return inputs.setdefault(pattern, node) is node
    if pattern.op != node.op or pattern.target is not node.target or len(pattern.args) != len(node.args):
        return False
    if pattern.kwargs != node.kwargs:
        return False
    before = dict(inputs)
    for args in (node.args, node.args[::-1])[: 2 if node.target in _COMMUTATIVE else 1]:
        if all(matches(a, b, inputs) for a, b in zip(pattern.args, args, strict=True)):
            return True
        inputs.clear()
        inputs.update(before)
    return False
