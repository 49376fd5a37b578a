"""Merge: quantizes each tensor once, and in both directions at once where both are wanted in one graph.

    row = fxquant.quantize(x, "mxfp8_e4m3", "rowwise")
    column = fxquant.quantize(x, "mxfp8_e4m3", "columnwise")
    # becomes
    both = fxquant.hybrid_quantize(x, "mxfp8_e4m3", "mxfp8_e4m3")     # one read, two writes

Runs after partitioning, so that the partitioner could still place each direction by itself. Equal quantize nodes,
such as those of q, k and v, become one first.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fxquant.passes.base import is_fxquant


def merge(graph: fx.Graph) -> int:
    """Rewrites `graph` in place; returns how many nodes went away."""
    before = len(graph.nodes)
    order = {node: i for i, node in enumerate(graph.nodes)}
    first: dict[tuple[Any, ...], fx.Node] = {}
    for node in list(graph.nodes):
        if not is_fxquant(node, "quantize"):
            continue
        earlier = first.setdefault(node.args, node)
        if earlier is not node:
            _replace_outputs(node, earlier, 0)
            graph.erase_node(node)
    columns = {node: args for args, node in first.items() if args[2] == "columnwise"}
    for (x, spec, direction, *scale), node in first.items():
        if direction != "rowwise":
            continue
        pairs = [n for n, args in columns.items() if args[0] is x]
        if not pairs:
            continue
        pair = next((n for n in pairs if n.args[1] == spec), pairs[0])
        anchor = min(node, pair, key=order.__getitem__)
        scales = [*(scale or [None]), *(pair.args[3:] or [None])]
        if any(order[n] > order[anchor] for n in scales if isinstance(n, fx.Node)):
            continue  # a scale that is not there yet
        while scales and scales[-1] is None:
            scales.pop()
        with graph.inserting_before(anchor):
            both = graph.call_function(torch.ops.fxquant.hybrid_quantize.default, (x, spec, pair.args[1], *scales))
        both.meta = {**anchor.meta, "val": [*node.meta["val"], *pair.meta["val"]]}
        _replace_outputs(node, both, 0)
        _replace_outputs(pair, both, len(node.meta["val"]))
        del columns[pair]
        for old in (node, pair):
            graph.erase_node(old)
    graph.lint()
    return before - len(graph.nodes)


def _replace_outputs(old: fx.Node, new: fx.Node, offset: int) -> None:
    """Points the users of a list-valued node at another one's outputs, right behind it."""
    made: dict[int, fx.Node] = {n.args[1]: n for n in new.users if n.target is operator.getitem}  # type: ignore[misc]
    for item in list(old.users):
        assert item.target is operator.getitem, item.format_node()
        index = offset + int(item.args[1])  # type: ignore[arg-type]
        if index not in made:
            with old.graph.inserting_after(new):
                made[index] = old.graph.call_function(operator.getitem, (new, index))
            made[index].meta = dict(item.meta)
        item.replace_all_uses_with(made[index])
        old.graph.erase_node(item)
