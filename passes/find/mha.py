"""Opens `F.multi_head_attention_forward`, which Dynamo captures as one node, into the ops inside it.

out, weights = multi_head_attention_forward(query, key, value, 64, 4, in_proj_weight, ...)
# becomes
linear = torch.ops.aten.linear.default(query, in_proj_weight, in_proj_bias)
...
scaled_dot_product_attention = torch.ops.aten.scaled_dot_product_attention.default(...)
linear_1 = torch.ops.aten.linear.default(reshape, out_proj_weight, out_proj_bias)
"""

from __future__ import annotations

import inspect
import logging
import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from fxquant.compat.private import enable_python_dispatcher, make_fx, tree_flatten, tree_unflatten
from fxquant.compat.values import fake_mode_of
from fxquant.passes.find.contraction import requires_grad
from fxquant.passes.find.facts import Match
from fxquant.passes.find.weights import find_weight
from fxquant.passes.graph.builder import Builder, erase_unused, put_in_places
from fxquant.passes.graph.meta import PROJECTION
from fxquant.passes.graph.names import op_name
from fxquant.passes.graph.values import value_of

log = logging.getLogger(__name__)

_SIGNATURE = inspect.signature(F.multi_head_attention_forward)


def open_modules(matches: Sequence[Match]) -> int:
    """Opens the modules that were captured as one node; returns their number. Matmuls must be found anew after it.

    Masks, dropout, returned weights and gradients are those of the node, since what replaces it is its own trace.
    """
    return sum(_open(match) for match in matches if match.can_open)


def _open(match: Match) -> bool:
    node = match.node
    if any(user.target is not operator.getitem for user in node.users):
        return False
    leaves, spec = tree_flatten((node.args, node.kwargs))
    inputs = list(dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, fx.Node)))
    fakes = [value_of(each) for each in inputs]
    mode = fake_mode_of(fakes)
    if mode is None:
        return False

    def run(*values: Any) -> Any:
        given = dict(zip(inputs, values, strict=True))
        args, kwargs = tree_unflatten([given[x] if isinstance(x, fx.Node) else x for x in leaves], spec)
        return F.multi_head_attention_forward(*args, **kwargs)

    device, trained = fakes[0].device.type, requires_grad(node)
    dtype = match.autocast
    region = torch.autocast(device, dtype=dtype or torch.bfloat16, enabled=dtype is not None)
    try:
        with torch.set_grad_enabled(trained), region, mode, enable_python_dispatcher():
            traced = make_fx(run, pre_dispatch=True)(*fakes)
    except Exception as error:
        log.info("%s stays closed: %s", node.name, error)
        return False
    if any(each.op == "get_attr" for each in traced.graph.nodes):
        log.info("%s stays closed: its trace holds constants", node.name)
        return False
    with torch.set_grad_enabled(trained), region, mode:
        results = _inline(Builder(node), traced.graph, inputs)
    put_in_places(results, node)
    erase_unused(each for each in results if isinstance(each, fx.Node))  # averages of weights that nobody reads
    return True


def _inline(builder: Builder, graph: fx.Graph, inputs: Sequence[fx.Node]) -> Any:
    """Copies a traced graph in front of the builder's anchor and names the linears by their weights."""
    anchor = builder.anchor
    arguments = _SIGNATURE.bind(*anchor.args, **anchor.kwargs).arguments
    parts = {
        weight: name.removesuffix("_weight")
        for name, weight in arguments.items()
        if name.endswith("_weight") and isinstance(weight, fx.Node)
    }
    copies: dict[fx.Node, Any] = dict(zip(graph.find_nodes(op="placeholder"), inputs, strict=True))
    for node in graph.nodes:
        if node.op == "output":
            return fx.node.map_arg(node.args[0], copies.__getitem__)
        if node.op == "placeholder":
            continue
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
        copies[node] = copy = builder.call(node.target, *args, **kwargs)
        if op_name(copy) == "linear":
            weight = find_weight(args[1], {})
            if weight is not None and weight.parameter in parts:
                copy.meta[PROJECTION] = parts[weight.parameter]
    raise AssertionError("a graph without an output")
