"""Attention: fused, as a higher-order op, as an opaque module, and written by hand as product, softmax, product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from fxquant.decisions import SkipReason
from fxquant.passes.facts import Dim, Match, Product, value_of
from fxquant.passes.forms_contraction import Site, product_of
from fxquant.passes.forms_weights import VIEWS, op_name

_BETWEEN = VIEWS | frozenset(
    """mul div truediv true_divide add sub neg masked_fill where tanh cat concat concatenate dropout amax max clamp
    maximum minimum nan_to_num imul iadd isub itruediv sum""".split()
)
"""What may stand between the products of an attention, besides the softmax: scale, mask, bias, cap, sink, dropout."""

_SOFTMAX = frozenset(("softmax", "_softmax", "exp", "_safe_softmax"))


def fused(site: Site, query: fx.Node, key: fx.Node, value: fx.Node, *_: Any, **__: Any) -> Match:
    """`scaled_dot_product_attention` and `flex_attention`: scores and context, no window or causality discounted."""
    *batch, length, width = value_of(query).shape
    keys, features = value_of(key).shape[-2], value_of(value).shape[-1]
    scores = Product(m=length, k=width, n=keys, batch=tuple(batch), lhs=query, rhs=key, rhs_is_weight=False)
    context = Product(m=length, k=keys, n=features, batch=tuple(batch), lhs=query, rhs=value, rhs_is_weight=False)
    return site.match("dpa", scores, context, skip=(SkipReason.ATTENTION, "fused attention"))


def multi_head(
    site: Site,
    query: fx.Node,
    key: fx.Node,
    value: fx.Node,
    embed_dim_to_check: Dim,
    num_heads: int,
    in_proj_weight: fx.Node | None,
    in_proj_bias: fx.Node | None,
    bias_k: fx.Node | None,
    bias_v: fx.Node | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: fx.Node,
    *_: Any,
    q_proj_weight: fx.Node | None = None,
    k_proj_weight: fx.Node | None = None,
    v_proj_weight: fx.Node | None = None,
    **__: Any,
) -> Match:
    """`F.multi_head_attention_forward` as it stands in a Dynamo graph: four linears and an attention in one node."""
    *rows, width = value_of(query).shape
    length, batch = rows[0], tuple(rows[1:])
    keys = value_of(key).shape[0]
    products = []
    for x, weight in ((query, q_proj_weight), (key, k_proj_weight), (value, v_proj_weight)):
        *axes, features = value_of(x).shape
        used = weight or in_proj_weight or out_proj_weight
        products.append(Product(m=product_of(axes), k=features, n=width, lhs=x, rhs=used))
    seen = keys + int(bias_k is not None) + int(add_zero_attn)
    head, many = width // num_heads, (*batch, num_heads)
    products.append(Product(m=length, k=head, n=seen, batch=many, lhs=query, rhs=key, rhs_is_weight=False))
    products.append(Product(m=length, k=seen, n=head, batch=many, lhs=query, rhs=value, rhs_is_weight=False))
    products.append(Product(m=product_of(rows), k=width, n=width, lhs=query, rhs=out_proj_weight))
    detail = "multi_head_attention_forward was not opened"
    return site.match("dpa", *products, skip=(SkipReason.OPAQUE, detail))


def mark_chains(matches: Sequence[Match]) -> None:
    """Makes attention of every pair of activation products with a softmax, and nothing but its trimmings, between."""
    products = {match.node: match for match in matches if match.module_type == "matmul"}
    for first in products:
        for second in _reached(first, products):
            for match in (products[first], products[second]):
                match.module_type, match.emit = "dpa", None
                match.skip = (SkipReason.ATTENTION, f"a softmax between {first.name} and {second.name}")


def _reached(first: fx.Node, products: dict[fx.Node, Match]) -> list[fx.Node]:
    """The products that a softmax of this product's result goes into."""
    found: list[fx.Node] = []
    seen: set[tuple[fx.Node, bool]] = set()
    queue = [(user, False) for user in first.users]
    while queue:
        node, soft = queue.pop()
        if (node, soft) in seen:
            continue
        seen.add((node, soft))
        name = op_name(node).strip("_") if node.op in ("call_function", "call_method") else ""
        if node in products:
            if soft:
                found.append(node)
        elif name in _BETWEEN or name in _SOFTMAX or op_name(node) in _BETWEEN:
            queue += [(user, soft or name in _SOFTMAX) for user in node.users]
    return found
