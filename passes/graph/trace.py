"""Functions traced into graphs, and traced graphs put into others."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.compat.private import make_fx, tree_flatten, tree_leaves, tree_map_only
from fxquant.compat.values import fake_mode_of, has_memory_of_its_own, in_other_memory, on_fakes
from fxquant.passes.graph.builder import Builder
from fxquant.passes.graph.meta import OF_A_TRACE, VAL
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


_VALUES = "fxquant_values"
"""The key in the meta of a trace under which the values of its first copy stand, by its nodes."""


def inline(builder: Builder, body: fx.GraphModule) -> tuple[Any, dict[fx.Node, fx.Node]]:
    """Copies the trace of a call of the builder's anchor in front of it; returns its outputs, and copies by node.

    The first copy stands in the place of the very call that was traced, and has the values of the trace.
    """
    anchor = builder.anchor
    inputs = [x for x in tree_leaves((anchor.args, anchor.kwargs)) if isinstance(value_of(x), _INPUTS)]
    copies: dict[fx.Node, fx.Node] = dict(zip(body.graph.find_nodes(op="placeholder"), inputs, strict=True))
    *nodes, output = body.graph.nodes
    fake = builder.calls is None and fake_mode_of(anchor.meta.get(VAL)) is not None  # of real values a trace has fakes
    first = fake and builder.key == VAL and _VALUES not in body.meta
    values = body.meta.setdefault(_VALUES, {})
    for node in nodes:
        if node.op == "get_attr":
            copies[node] = builder.constant(getattr(body, str(node.target)))
        elif node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
            copies[node] = _copy(builder, node, args, kwargs, values, first)
            copies[node].meta.update((key, node.meta[key]) for key in OF_A_TRACE if key in node.meta)
    return fx.node.map_arg(output.args[0], copies.__getitem__), copies


def _copy(builder: Builder, node: fx.Node, args: Any, kwargs: Any, values: dict[fx.Node, Any], first: bool) -> fx.Node:
    """Adds the copy of a node of a trace. Equal calls have equal values, each in memory of its own."""
    if node.target is operator.getitem and isinstance(args[0], fx.Node):
        return builder.with_value(value_of(args[0])[args[1]], operator.getitem, args, kwargs)
    target: Any = node.target
    if node in values and builder.calls is None:
        value = tree_map_only(Tensor, in_other_memory, values[node])
        return builder.with_value(value, target, args, kwargs)
    if first and VAL in node.meta:
        copy = builder.with_value(node.meta[VAL], target, args, kwargs)
    else:
        copy = builder.call(target, *args, **kwargs)
    if has_memory_of_its_own(value_of(copy), fx.node.map_arg((args, kwargs), value_of)):
        values[node] = value_of(copy)
    return copy
