"""The reasons why passes did not take what they considered, and what ranks send each other quantized.

A graph keeps both until a stage is done.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from torch import Tensor, fx

from fxquant.decisions import Considered, NotFused, SentQuantized
from fxquant.passes.graph.meta import CONSIDERED, layer_of
from fxquant.passes.graph.names import fxquant_op, op_name
from fxquant.passes.graph.values import val

log = logging.getLogger(__name__)

_KEY = "fxquant_not_fused"
"""The key in the meta of a graph module."""


def allowed(node: fx.Node, step: str, reason: str) -> bool:
    """Returns True if nothing speaks against a fusion, or a kernel, for a node; leaves the reason of a pass if not."""
    if reason:
        node.meta[CONSIDERED] = (*node.meta.get(CONSIDERED, ()), f"{step}: {reason}")
        log.debug("%s: layer %s: %s: %s", step, layer_of(node) or "<model>", node.format_node(), reason)
        if node.graph.owning_module is not None:
            reported = NotFused(step=step, layer=layer_of(node), operator=_text(node), reason=reason)
            node.graph.owning_module.meta.setdefault(_KEY, {})[reported] = None
    return not reason


def sent_quantized(graph: fx.Graph, sent: SentQuantized) -> None:
    """Leaves what ranks send each other quantized."""
    if graph.owning_module is not None:
        graph.owning_module.meta.setdefault(_KEY, {})[sent] = None


def considered(graph: fx.Graph, name: str = "") -> list[Considered]:
    """Takes all that passes have left in a graph, each once; `name` is the graph's in reports, such as ``forward``."""
    outcomes = [] if graph.owning_module is None else graph.owning_module.meta.pop(_KEY, ())
    return [replace(one, graph=name) if isinstance(one, NotFused) else one for one in outcomes]


def not_fused(graph: fx.Graph) -> list[NotFused]:
    """Takes the reasons that passes have left in a graph, each once."""
    return [reason for reason in considered(graph) if isinstance(reason, NotFused)]


def _text(node: fx.Node) -> str:
    """An operator, its formats and the shape of the tensor that it reads first."""
    shapes = [str(list(value.shape)) for value in map(val, node.all_input_nodes[:1]) if isinstance(value, Tensor)]
    return " ".join((fxquant_op(node) or op_name(node), *(x for x in node.args if isinstance(x, str)), *shapes))
