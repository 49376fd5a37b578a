"""Attention that is one node of the graph: `scaled_dot_product_attention`."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import fx

from fxquant.compat.device import capability
from fxquant.compat.flops import count_groups
from fxquant.compat.values import statically_known_true
from fxquant.decisions import SkipReason
from fxquant.formats import Step
from fxquant.passes.find.attention import places
from fxquant.passes.find.attention.emit import without_repeats
from fxquant.passes.find.facts import Attend, Attention, Match, Product
from fxquant.passes.find.site import Arguments, requires_grad
from fxquant.passes.graph.builder import Builder
from fxquant.passes.graph.values import value_of


@dataclass(frozen=True)
class ScaledDotProduct(Arguments):
    """`scaled_dot_product_attention`."""

    query: fx.Node
    key: fx.Node
    value: fx.Node
    attn_mask: fx.Node | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def match(self) -> Match:
        products = attention_products(self.query, self.key, self.value)
        match = self.site.match("dpa", *products, needs_grad=self.needs_grad())
        problem = self.problem()
        if problem:
            return replace(match, skip=(SkipReason.ATTENTION, problem))
        conditions = None if self.attn_mask is None else places.kept(self.attn_mask, self.site.outer)
        if conditions is not None and (not conditions or places.is_causal(conditions)):
            return replace(self, attn_mask=None, is_causal=self.is_causal or bool(conditions)).match()
        masks = [] if self.attn_mask is None else [self.attn_mask]

        def write(builder: Builder, attend: Attend, q: fx.Node, k: fx.Node, v: fx.Node, *extras: fx.Node) -> fx.Node:
            return attend(q, *without_repeats(k, v), extras)

        attention = Attention(
            node=self.site.node, steps=self.steps(), dropout=float(self.dropout_p),
            emit=self.site.emit(write, self.query, self.key, self.value, *masks), axes=value_of(self.query).ndim,
            learned=any(map(requires_grad, masks)), simplify=self.simplify,
        )  # fmt: skip
        return replace(match, attention=attention)

    def simplify(self, autocast: torch.dtype | None) -> bool:
        """Has the node say causality by the flag instead of a mask, and read keys that are not repeated for queries.

        The latter on CUDA and without a mask, where torch has kernels of 16 bits that do so.
        """
        node, names = self.site.node, [field.name for field in fields(self)[1:]]
        arguments: dict[str, Any] = dict(zip(names, node.args, strict=False)) | node.kwargs
        changed: dict[str, Any] = {}
        if self.attn_mask is None and arguments.get("attn_mask") is not None:
            changed |= {"attn_mask": None, "is_causal": self.is_causal}
        key, value = without_repeats(arguments["key"], arguments["value"])
        if key is not arguments["key"] and self.reads_groups(autocast):
            changed |= {"key": key, "value": value, "enable_gqa": True}
            count_groups()
        if changed:
            arguments |= changed
            node.args, node.kwargs = tuple(arguments.pop(name) for name in names[:3]), arguments
        return bool(changed)

    def reads_groups(self, autocast: torch.dtype | None) -> bool:
        """Returns True if torch has a kernel for several queries of one key."""
        q, v = value_of(self.query), value_of(self.value)
        short = all(isinstance(x, int) and x % 8 == 0 and x <= 128 for x in (q.shape[-1], v.shape[-1]))
        dtype = autocast or q.dtype
        plain = self.attn_mask is None and not self.dropout_p and dtype in (torch.float16, torch.bfloat16)
        return plain and short and capability(q.device) >= (8, 0)

    def needs_grad(self) -> tuple[tuple[bool, bool], ...]:
        """Says for q and k, and for weights and v, who gets gradients; the weights need one for the mask as well."""
        if not requires_grad(self.site.node):
            return (False, False), (False, False)
        query, key, value = map(requires_grad, (self.query, self.key, self.value))
        mask = self.attn_mask is not None and requires_grad(self.attn_mask)
        return (query, key), (query or key or mask, value)

    def problem(self) -> str:
        """Returns the reason why this cannot be quantized; "" where it can."""
        q, k, v = map(value_of, (self.query, self.key, self.value))
        *batch, _, width = q.shape
        same = batch == list(k.shape[:-2]) == list(v.shape[:-2])
        fewer = k.ndim > 2 and (self.enable_gqa or statically_known_true(k.shape[-3] == 1))  # one head is broadcast
        grouped = fewer and k.shape[:-2] == v.shape[:-2] and batch[:-1] == list(k.shape[:-3])
        if not (same or grouped):
            return "query, key and value differ in their batch"
        if not isinstance(self.dropout_p, (int, float)) or not isinstance(self.scale, (int, float, type(None))):
            return "dropout or scale is computed"
        return "the head dimension is dynamic" if self.scale is None and not isinstance(width, int) else ""

    def steps(self) -> tuple[Step, ...]:
        width, mask = value_of(self.query).shape[-1], self.attn_mask
        steps = [Step("mul", width**-0.5 if self.scale is None else float(self.scale))]
        if mask is not None:
            steps.append(Step("keep" if value_of(mask).dtype == torch.bool else "add", extra=0))
        if self.is_causal:
            steps.append(Step("causal"))
        return tuple(steps)


def attention_products(query: fx.Node, key: fx.Node, value: fx.Node) -> tuple[Product, Product]:
    """Returns the products of an attention of q [*batch, Sq, D], k and v: the scores and the context."""
    *batch, length, width = value_of(query).shape
    keys, features = value_of(key).shape[-2], value_of(value).shape[-1]
    scores = Product(m=length, k=width, n=keys, batch=tuple(batch), lhs=query, rhs=key, rhs_is_weight=False)
    context = Product(m=length, k=keys, n=features, batch=tuple(batch), lhs=query, rhs=value, rhs_is_weight=False)
    return scores, context
