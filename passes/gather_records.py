"""Gather records: the amaxes that a graph takes into its state one by one are taken in together, at the last.

    amaxes = fxquant.record(amaxes, [a], [0])
    amaxes = fxquant.record(amaxes, [b], [1])
    # becomes
    amaxes = fxquant.record(amaxes, [a, b], [0, 1])

and so `record_since`, which is the backward's.
"""

from __future__ import annotations

from torch import fx

from fxquant.passes.base import is_fxquant


def gather_records(graph: fx.Graph) -> int:
    """Rewrites `graph` in place; returns how many records went into another."""
    count = 0
    for node in list(graph.nodes):
        if not any(is_fxquant(node, name) for name in ("record", "record_since")):
            continue
        before, *rest, new, slots = node.args
        same = isinstance(before, fx.Node) and before.target is node.target and [*before.args[1:-2]] == rest
        if not same or list(before.users) != [node]:
            continue
        known = list(zip(before.args[-2], before.args[-1], strict=True))
        added = [pair for pair in zip(new, slots, strict=True) if pair not in known]
        news, places = zip(*known, *added, strict=True)
        node.args = (before.args[0], *rest, list(news), list(places))
        graph.erase_node(before)
        count += 1
    return count
