"""Opens `F.multi_head_attention_forward`, which Dynamo captures as one node.

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
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from fxquant.compat.values import fake_mode_of
from fxquant.decisions import SkipReason
from fxquant.passes.find.facts import Match, Product, product_of
from fxquant.passes.find.site import Site, requires_grad
from fxquant.passes.find.weights import find_weight
from fxquant.passes.graph.builder import Builder, erase_unused, put_in_places
from fxquant.passes.graph.meta import PROJECTION
from fxquant.passes.graph.names import calls
from fxquant.passes.graph.trace import inline, trace
from fxquant.passes.graph.values import value_of

log = logging.getLogger(__name__)

_SIGNATURE = inspect.signature(F.multi_head_attention_forward)


def multi_head(site: Site, *args: Any, **kwargs: Any) -> Match:
    """Describes the function as it stands in a Dynamo graph: four linears and an attention in one node."""
    arguments = _SIGNATURE.bind(*args, **kwargs).arguments
    query, key, value, heads = (arguments[name] for name in ("query", "key", "value", "num_heads"))
    out_proj, in_proj = arguments["out_proj_weight"], arguments["in_proj_weight"]
    *rows, width = value_of(query).shape
    length, batch = rows[0], tuple(rows[1:])
    products = []
    for x, name in ((query, "q_proj_weight"), (key, "k_proj_weight"), (value, "v_proj_weight")):
        *axes, features = value_of(x).shape
        weight = arguments.get(name) or in_proj or out_proj
        products.append(Product(m=product_of(axes), k=features, n=width, lhs=x, rhs=weight))
    keys = value_of(key).shape[0] + int(arguments["bias_k"] is not None) + int(arguments["add_zero_attn"])
    head, many = width // heads, (*batch, heads)
    products.append(Product(m=length, k=head, n=keys, batch=many, lhs=query, rhs=key, rhs_is_weight=False))
    products.append(Product(m=length, k=keys, n=head, batch=many, lhs=query, rhs=value, rhs_is_weight=False))
    products.append(Product(m=product_of(rows), k=width, n=width, lhs=query, rhs=out_proj))
    detail = "multi_head_attention_forward was not opened"
    return replace(site.match("dpa", *products, skip=(SkipReason.OPAQUE, detail)), can_open=True)


def open_modules(matches: Sequence[Match]) -> int:
    """Opens the modules that were captured as one node; returns their number. Matmuls must be looked for anew then.

    Masks, dropout, returned weights and gradients are those of the node, since what replaces it is its own trace.
    """
    return sum(_open(match) for match in matches if match.can_open)


def _open(match: Match) -> bool:
    node = match.node
    if any(user.target is not operator.getitem for user in node.users):
        return False
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), value_of)
    if fake_mode_of(args, kwargs) is None:
        return False
    device, trained = value_of(node.all_input_nodes[0]).device.type, requires_grad(node)
    dtype = match.autocast
    region = torch.autocast(device, dtype=dtype or torch.bfloat16, enabled=dtype is not None)
    try:
        with torch.set_grad_enabled(trained), region:
            traced = trace(F.multi_head_attention_forward, args, kwargs, pre_dispatch=True)
    except Exception as error:
        log.info("%s stays closed: %s", node.name, error)
        return False
    if any(inner.op == "get_attr" for inner in traced.graph.nodes):
        log.info("%s stays closed: its trace holds constants", node.name)
        return False
    with torch.set_grad_enabled(trained), region:
        results, copies = inline(Builder(node), traced)
    _name_linears(node, copies.values())
    put_in_places(results, node)
    erase_unused(result for result in results if isinstance(result, fx.Node))  # averages of weights that nobody reads
    return True


def _name_linears(node: fx.Node, copies: Iterable[fx.Node]) -> None:
    """Names the linears of an opened node by their weights."""
    arguments = _SIGNATURE.bind(*node.args, **node.kwargs).arguments
    parts = {
        weight: name.removesuffix("_weight")
        for name, weight in arguments.items()
        if name.endswith("_weight") and isinstance(weight, fx.Node)
    }
    for copy in copies:
        weight = find_weight(copy.args[1], {}) if calls(copy, ("linear",)) else None  # type: ignore[arg-type]
        if weight is not None and weight.parameter in parts:
            copy.meta[PROJECTION] = parts[weight.parameter]
