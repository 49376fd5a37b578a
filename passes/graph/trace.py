"""Functions traced into graphs, and traced graphs put into others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.compat.private import make_fx, tree_flatten, tree_leaves
from fxquant.compat.values import on_fakes
from fxquant.passes.graph.builder import Builder
from fxquant.passes.graph.meta import OF_A_TRACE
from fxquant.passes.graph.values import value_of

_INPUTS = (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)


def trace(
    run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, *, guarded: bool = True,
    **options: Any,
) -> fx.GraphModule:  # fmt: skip
    """`run` as an ATen graph, whose inputs are the tensors and the symbolic numbers among the arguments, in order.

    A graph that is compiled for these sizes is `guarded`: it holds for what `run` has asked them. A program has no
    guards to hold it. `options` are those of `make_fx`.
    """
    flat, tree = tree_flatten((tuple(args), dict(kwargs or {})))
    places = [i for i, value in enumerate(flat) if isinstance(value, _INPUTS)]

    def call(*inputs: Any) -> Any:
        filled = list(flat)
        for i, value in zip(places, inputs, strict=True):
            filled[i] = value
        args, kwargs = tree.unflatten(filled)
        return run(*args, **kwargs)

    with on_fakes(flat, guarded=guarded):
        return make_fx(call, **options)(*(flat[i] for i in places))


def inline(builder: Builder, body: fx.GraphModule) -> tuple[Any, dict[fx.Node, fx.Node]]:
    """Copies the trace of a call of the builder's anchor in front of it; returns its outputs, and copies by node."""
    anchor = builder.anchor
    inputs = [x for x in tree_leaves((anchor.args, anchor.kwargs)) if isinstance(value_of(x), _INPUTS)]
    copies: dict[fx.Node, fx.Node] = dict(zip(body.graph.find_nodes(op="placeholder"), inputs, strict=True))
    *nodes, output = body.graph.nodes
    for node in nodes:
        if node.op == "get_attr":
            copies[node] = builder.constant(getattr(body, str(node.target)))
        elif node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
            copies[node] = builder.call(node.target, *args, **kwargs)
            copies[node].meta.update((key, node.meta[key]) for key in OF_A_TRACE if key in node.meta)
    return fx.node.map_arg(output.args[0], copies.__getitem__), copies
