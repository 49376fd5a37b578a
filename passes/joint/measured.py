"""Weights that a probe has the forward quantize for the backward are quantized there once more, and not saved.

    column = fxquant.quantize(w, "per_tensor_e4m3", "columnwise", scale)            # of the backward, measured before
    vector = fxquant.probe_operand(w.mT, column, ..)

Unmeasured, that is where the backward quantizes them: w is kept anyway.
"""

from __future__ import annotations

from torch import fx

from fxquant.compat.private import prefer_recompute
from fxquant.passes.graph.match import behind_views
from fxquant.passes.graph.names import is_fxquant
from fxquant.passes.joint.repeat import rounds_weight
from fxquant.passes.joint.scales import nodes_of_backward
from fxquant.passes.joint.sides import is_for_backward, measures
from fxquant.passes.settings import Settings


def quantize_measured_again(graph: fx.Graph, settings: Settings) -> int:
    """Marks quantizations that the backward computes again; returns how many."""
    of_backward, count = nodes_of_backward(graph), 0
    for node in graph.nodes:
        if not is_fxquant(node, "quantize") or not is_for_backward(node, of_backward):
            continue
        source = behind_views(node.args[0])
        measured = any(measures(user) for part in node.users for user in part.users)
        if measured and (source.op == "placeholder" or rounds_weight(source)):
            for part in (node, *node.users):
                prefer_recompute(part)
            count += 1
    return count
