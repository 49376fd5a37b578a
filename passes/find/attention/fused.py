"""Attention: fused, as a higher-order op, as an opaque module, and written by hand as product, softmax, product."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from fxquant.compat.values import statically_known_true
from fxquant.decisions import SkipReason
from fxquant.formats import Step
from fxquant.passes.find.attention.written_out import read_chain, without_repeats
from fxquant.passes.find.contraction import Site, product_of, requires_grad, settle
from fxquant.passes.find.facts import Attend, Attention, Builder, Match, Product
from fxquant.passes.graph.names import SAME_VALUES, op_name
from fxquant.passes.graph.values import Dim, value_of

_BETWEEN = SAME_VALUES | frozenset(
    """mul div truediv true_divide add sub neg masked_fill where tanh cat concat concatenate dropout amax max clamp
    maximum minimum nan_to_num imul iadd isub itruediv sum native_dropout""".split()
)
"""What may stand between the products of an attention, besides the softmax: scale, mask, bias, cap, sink, dropout."""

_SOFTMAX = frozenset(("softmax", "_softmax", "log_softmax", "_log_softmax", "exp", "_safe_softmax", "special_softmax"))


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
    match = site.match("dpa", *attention_products(query, key, value))
    q, k, v = map(value_of, (query, key, value))
    *batch, _, width = q.shape
    trained = requires_grad(site.node)
    weights = trained and any(requires_grad(x) for x in (query, key, attn_mask) if x is not None)
    match.needs_grad = (match.needs_grad[0], (weights, trained and requires_grad(value)))
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
        match.skip = (SkipReason.ATTENTION, problem)
        return match
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

    match.attention = Attention(
        steps=tuple(steps), dropout=float(dropout_p), emit=emit, axes=q.ndim,
        learned=attn_mask is not None and requires_grad(attn_mask),
    )  # fmt: skip
    return match


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
    return site.match("dpa", *products, skip=(SkipReason.OPAQUE, detail))


def mark_chains(matches: Sequence[Match]) -> None:
    """Makes attention of every pair of activation products with a softmax, and nothing but its trimmings, between.

    What cannot be one attention stays two products, with a remark that says why.
    """
    for match in matches:
        if match.module_type == "matmul":
            _name_writes(match.node)
    products = {match.node: match for match in matches if match.module_type == "matmul"}
    pairs = [(first, second) for first in products for second in _reached(first, products)]
    for first, second in pairs:
        both = (products[first], products[second])
        alone = all(sum(node in pair for pair in pairs) == 1 for node in (first, second))
        found = read_chain(*both) if alone else "its products belong to several attentions"
        for match in both:
            if isinstance(found, Attention):
                match.module_type, match.attention = "dpa", found
            else:
                match.remark = f"attention of {first.name} and {second.name}: {found}"


def _name_writes(node: fx.Node) -> None:
    """Makes what is read after ``scores.mul_(2)`` that operation's result, which is the same tensor."""
    while True:
        writes = [user for user in node.users if op_name(user).endswith("_") and user.args[:1] == (node,)]
        writes = [user for user in writes if user.op == "call_method" and not user.users]
        if not writes:
            return
        first = min(writes)
        node.replace_all_uses_with(first, partial(operator.lt, first))
        node = first


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
