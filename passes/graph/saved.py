"""The bytes that the forward half of a graph keeps for the backward, and what they would be in high precision."""

from __future__ import annotations

import math
import operator
from typing import Any

from torch import Tensor, fx

from fxquant.compat.values import size_hint
from fxquant.decisions import Saved
from fxquant.passes.graph.match import behind_views
from fxquant.passes.graph.names import fxquant_op
from fxquant.passes.graph.values import maybe_value


def saved(forward: fx.Graph, outputs: int) -> Saved:
    """Returns what a forward has behind its first `outputs` results, without its inputs, which are there anyway."""
    results: Any = next(node for node in forward.nodes if node.op == "output").args[0]
    kept = dict.fromkeys(behind_views(node) for node in results[outputs:] if isinstance(node, fx.Node))
    kept_tensors = [node for node in kept if node.op != "placeholder" and isinstance(maybe_value(node), Tensor)]
    payloads = {node: source for node in kept_tensors if (source := _source(node)) is not None}
    sources = dict.fromkeys(payloads.values())
    replaced = [source for source in sources if source.op != "placeholder" and source not in kept]
    return Saved(
        total=sum(map(_bytes, kept_tensors)),
        quantized=sum(map(_bytes, payloads)),
        instead=sum(map(_bytes, replaced)),
    )


def _source(node: fx.Node) -> fx.Node | None:
    """Returns the tensor that a node is a payload or scale of, None for other nodes."""
    if node.target is not operator.getitem or not isinstance(cast := node.args[0], fx.Node):
        return None
    read = [x for x in cast.all_input_nodes if isinstance(maybe_value(x), Tensor)]
    source = behind_views(read[0]) if read and "quantize" in fxquant_op(cast) else None
    return source if isinstance(source, fx.Node) else None


def _bytes(node: fx.Node) -> int:
    value = maybe_value(node)
    return math.prod(map(size_hint, value.shape)) * int(value.dtype.itemsize) if isinstance(value, Tensor) else 0
