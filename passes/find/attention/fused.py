"""Attention that is one node of the graph: `scaled_dot_product_attention`, and the module that is not opened."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxquant.compat.values import statically_known_true
from fxquant.decisions import SkipReason
from fxquant.formats import Step
from fxquant.passes.find.attention.emit import without_repeats
from fxquant.passes.find.contraction import Site, requires_grad, settle
from fxquant.passes.find.facts import Attend, Attention, Match, Product, product_of
from fxquant.passes.graph.builder import Builder
from fxquant.passes.graph.values import Dim, value_of


def fused(
    site: Site,
    query: fx.Node,
    key: fx.Node,
    value: fx.Node,
    attn_mask: fx.Node | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Match:
    """`scaled_dot_product_attention`."""
    q, k, v = map(value_of, (query, key, value))
    *batch, _, width = q.shape
    trained = requires_grad(site.node)
    weights = trained and any(requires_grad(x) for x in (query, key, attn_mask) if x is not None)
    needs_grad = (
        (trained and requires_grad(query), trained and requires_grad(key)),
        (weights, trained and requires_grad(value)),
    )
    match = site.match("dpa", *attention_products(query, key, value), needs_grad=needs_grad)
    same = batch == list(k.shape[:-2]) == list(v.shape[:-2])
    fewer = k.ndim > 2 and (enable_gqa or statically_known_true(k.shape[-3] == 1))  # one head is broadcast
    grouped = fewer and k.shape[:-2] == v.shape[:-2] and batch[:-1] == list(k.shape[:-3])
    problem = ""
    if not (same or grouped):
        problem = "query, key and value differ in their batch"
    elif not isinstance(dropout_p, (int, float)) or not isinstance(scale, (int, float, type(None))):
        problem = "dropout or scale is computed"
    elif scale is None and not isinstance(width, int):
        problem = "the head dimension is dynamic"
    if problem:
        return replace(match, skip=(SkipReason.ATTENTION, problem))
    steps = [Step("mul", width**-0.5 if scale is None else float(scale))]
    if attn_mask is not None:
        steps.append(Step("keep" if value_of(attn_mask).dtype == torch.bool else "add", extra=0))
    if is_causal:
        steps.append(Step("causal"))
    nodes = [each for each in (query, key, value, attn_mask) if each is not None]
    slots = [site.node.all_input_nodes.index(each) for each in nodes]

    def emit(builder: Builder, attend: Attend) -> fx.Node:
        query, key, value, *extras = (builder.anchor.all_input_nodes[slot] for slot in slots)
        return settle(builder, attend(query, *without_repeats(key, value), extras))

    attention = Attention(
        node=site.node, steps=tuple(steps), dropout=float(dropout_p), emit=emit, axes=q.ndim,
        learned=attn_mask is not None and requires_grad(attn_mask),
    )  # fmt: skip
    return replace(match, attention=attention)


def attention_products(query: fx.Node, key: fx.Node, value: fx.Node) -> tuple[Product, Product]:
    """The scores and the context of q [*batch, Sq, D], k and v."""
    *batch, length, width = value_of(query).shape
    keys, features = value_of(key).shape[-2], value_of(value).shape[-1]
    scores = Product(m=length, k=width, n=keys, batch=tuple(batch), lhs=query, rhs=key, rhs_is_weight=False)
    context = Product(m=length, k=keys, n=features, batch=tuple(batch), lhs=query, rhs=value, rhs_is_weight=False)
    return scores, context


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
    return replace(site.match("dpa", *products, skip=(SkipReason.OPAQUE, detail)), can_open=True)
