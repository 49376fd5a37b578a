"""Batch amaxes: the amaxes that a graph takes into its state one by one are taken in together, at the last.

    amaxes = fxquant.record(amaxes, [a], [0])
    amaxes = fxquant.record(amaxes, [b], [1])
    # becomes
    amaxes = fxquant.record(amaxes, [a, b], [0, 1])

and so `record_since`, which is the backward's. AOTAutograd puts a copy between them where the entries of a state lie
apart, which goes away:

    amaxes = aten.copy(state, fxquant.record(...))
"""

from __future__ import annotations

import torch
from torch import fx

from fxquant.passes.graph.names import is_fxquant
from fxquant.passes.graph.values import val
from fxquant.passes.settings import Settings

_aten = torch.ops.aten


def batch_amaxes(graph: fx.Graph, settings: Settings) -> int:
    """Rewrites `graph` in place; returns how many records went into another."""
    _leave_copies_out(graph)
    count = 0
    for node in list(graph.nodes):
        if not is_fxquant(node, "record", "record_since"):
            continue
        before, *rest, new, slots = node.args
        same = isinstance(before, fx.Node) and before.target is node.target and [*before.args[1:-2]] == rest
        if not same or list(before.users) != [node]:
            continue
        earlier = list(zip(before.args[-2], before.args[-1], strict=True))
        added = [pair for pair in zip(new, slots, strict=True) if pair not in earlier]
        news, places = zip(*earlier, *added, strict=True)
        node.args = (before.args[0], *rest, list(news), list(places))
        graph.erase_node(before)
        count += 1
    return count


def _leave_copies_out(graph: fx.Graph) -> None:
    """Lets records, and the write into a state, read the source of a copy that is only laid out as the state."""
    for copy in list(graph.find_nodes(op="call_function", target=_aten.copy.default)):
        state, source, *_ = copy.args
        same = isinstance(source, fx.Node) and all(
            getattr(val(state), of) == getattr(val(source), of) for of in ("shape", "dtype", "device")
        )
        if same and all(_reads_values(user, copy) for user in copy.users):
            copy.replace_all_uses_with(source)
            graph.erase_node(copy)


def _reads_values(node: fx.Node, source: fx.Node) -> bool:
    """Returns True if a node reads the values of `source` and not its layout: a record, or a copy to elsewhere."""
    copies = node.target is _aten.copy_.default or (node.target is _aten.copy.default and node.args[1] is not source)
    return copies or is_fxquant(node, "record", "record_since")
