"""Puts `fxquant::attention` in the place of every attention that is quantized.

    scores = torch.matmul(q, k.mT) / 8; out = torch.softmax(scores + mask, -1) @ v
    # becomes
    attention = torch.ops.fxquant.attention.default(q, k, v, [mask], "qkv=per_head_e4m3 s=... steps=mul:0.125:-1;...")

Attention that stays in high precision keeps its node, and with it the kernels that torch chooses. But a mask of sizes
alone that says causality, as Hugging Face writes it, becomes the flag, for which torch has kernels that are twice as
fast, and on a GPU keys that were repeated for several queries are read as they are. A graph in which nothing is
quantized stays as it is to the bit.

    out = scaled_dot_product_attention(q, k, v, attn_mask=arange(n)[None, :] <= arange(n)[:, None])
    # becomes
    out = scaled_dot_product_attention(q, k, v, attn_mask=None, is_causal=True)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from fxquant.formats import IDENTITY, AttentionSpec
from fxquant.passes.find.facts import Attention, Match, quantized
from fxquant.passes.graph.builder import Builder, erase_unused, put_in_place
from fxquant.passes.graph.meta import inserted_for


def insert_attention(matches: Sequence[Match]) -> int:
    """Rewrites the graphs of the matches in place; returns how many attentions were replaced."""
    count, changes = 0, any(map(quantized, matches))
    for match in matches:
        attention = match.attention
        if attention is None or attention.node is not match.node:
            continue
        inputs = match.node.all_input_nodes
        if attention.spec is not None:
            inputs = _insert(match, attention, attention.spec)
        elif not changes or attention.simplify is None or not attention.simplify(match.autocast):
            continue
        erase_unused(inputs, keep=[other.node for other in matches])
        count += 1
    return count


def _insert(match: Match, attention: Attention, spec: AttentionSpec) -> list[fx.Node]:
    """Returns the inputs of the attention's nodes; such as the repeating of keys has nothing left to do."""
    node, builder = match.node, Builder(match.node)
    # a spec that gives the same shape and dtype: the delayed scales of the real one are bound later
    plain = str(spec.each(lambda _: IDENTITY))

    def attend(q: fx.Node, k: fx.Node, v: fx.Node, extras: Sequence[fx.Node]) -> fx.Node:
        call = builder.call(torch.ops.fxquant.attention.default, q, k, v, list(extras), plain)
        call.args = (q, k, v, list(extras), str(spec))
        inserted_for(call, match.name, match.resolved[-1].decisions[0].site)
        return call

    result = attention.emit(builder, attend)
    inputs = dict.fromkeys(x for user in (node, *attention.inside) for x in user.all_input_nodes)
    put_in_place(result, node)
    for inner in reversed(list(builder.graph.nodes)):
        if inner in attention.inside and not inner.users:
            builder.graph.erase_node(inner)
    return [x for x in inputs if x not in attention.inside]
