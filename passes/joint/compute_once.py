"""Operators that the forward and the backward would both run, run once.

    forward: row = fxquant.quantize(w, "mxfp8_e4m3", "rowwise")
    backward: again = fxquant.quantize(w, "mxfp8_e4m3", "rowwise")
              column = fxquant.quantize(fxquant.dequantize(again, ...), "nvfp4", "columnwise")
    # becomes, on the joint graph
    row = fxquant.quantize(w, "mxfp8_e4m3", "rowwise")
    column = fxquant.quantize(fxquant.dequantize(row, ...), "nvfp4", "columnwise")

torch's partitioner does so by itself before 2.14. Since then it keeps apart what the forward alone reads, so that no
cheap tensor is saved that the backward can compute; but no cast is cheap.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from fxquant.passes.graph.match import behind_views
from fxquant.passes.graph.names import EXPANDS, PICKS, SPLITS, VIEWS, is_fxquant
from fxquant.passes.settings import Settings


def compute_once(graph: fx.Graph, settings: Settings) -> int:
    """Rewrites a joint graph in place; returns how many operators of ours went away."""
    first: dict[Any, fx.Node] = {}
    returned = {behind_views(node, _PARTS) for node in graph.output_node().all_input_nodes}
    count = 0
    for node in list(graph.nodes):
        operation = node.args[0] if node.target is operator.getitem else node
        if not is_fxquant(operation) or node.is_impure() or operation in returned:  # results share no memory
            continue
        earlier = first.setdefault((node.target, str(node.args), str(node.kwargs)), node)
        if earlier is not node:
            node.replace_all_uses_with(earlier)
            graph.erase_node(node)
            count += operation is node
    graph.lint()
    return count


_PARTS = VIEWS | EXPANDS | SPLITS | PICKS
