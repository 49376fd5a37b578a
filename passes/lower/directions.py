"""Pair directions: quantizes each tensor once, and in both directions at once where both are wanted in one graph.

    row = fxquant.quantize(x, "mxfp8_e4m3", "rowwise")
    column = fxquant.quantize(x, "mxfp8_e4m3", "columnwise")
    # becomes
    both = fxquant.hybrid_quantize(x, "mxfp8_e4m3", "mxfp8_e4m3")     # one read, two writes

and so `split_quantize`, of groups of rows, into `hybrid_split_quantize`.

Runs after partitioning, so that the partitioner could still place each direction by itself. Equal quantize nodes,
such as those of q, k and v, become one first, and before them equal views.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

from torch import fx

from fxquant.kernels.operator import traits_of
from fxquant.passes.graph.considered import allowed
from fxquant.passes.graph.meta import VAL
from fxquant.passes.graph.names import VIEWS, calls
from fxquant.passes.settings import Settings


def pair_directions(graph: fx.Graph, settings: Settings) -> int:
    """Rewrites `graph` in place; returns how many nodes went away."""
    before = len(graph.nodes)
    _merge_views(graph)
    order = {node: i for i, node in enumerate(graph.nodes)}
    first: dict[tuple[Any, ...], fx.Node] = {}
    for node in list(graph.nodes):
        if traits_of(node).both is None:
            continue
        earlier = first.setdefault((node.target, *node.args), node)
        if earlier is not node:
            _replace_outputs(node, earlier, 0)
            graph.erase_node(node)
    one_way = {node: _Quantization.of(node) for node in first.values()}
    columns = {node: way for node, way in one_way.items() if way.direction == "columnwise"}
    for node, row in one_way.items():
        if row.direction != "rowwise":
            continue
        pairs = [n for n, column in columns.items() if column.source == row.source]
        if not pairs:
            continue
        pair = next((n for n in pairs if columns[n].spec == row.spec), pairs[0])
        anchor = min(node, pair, key=order.__getitem__)
        column = columns[pair]
        scales = [row.scale, column.scale]
        late = any(order[scale] > order[anchor] for scale in scales if isinstance(scale, fx.Node))
        if not allowed(node, "pair_directions", "the scale of a direction is computed later" if late else ""):
            continue
        while scales and scales[-1] is None:
            scales.pop()
        target, *operands = row.source
        with graph.inserting_before(anchor):
            both = graph.call_function(target, (*operands, row.spec, column.spec, *scales))
        both.meta = {**anchor.meta, VAL: [*node.meta[VAL], *pair.meta[VAL]]}
        _replace_outputs(node, both, 0)
        _replace_outputs(pair, both, len(node.meta[VAL]))
        del columns[pair]
        for old in (node, pair):
            graph.erase_node(old)
    return before - len(graph.nodes)


def _merge_views(graph: fx.Graph) -> None:
    """Makes equal views one, as the partitioner does in training: q, k and v read one tensor by three reshapes."""
    first: dict[tuple[Any, ...], fx.Node] = {}
    for node in list(graph.nodes):
        if calls(node, VIEWS) and not node.kwargs:
            earlier = first.setdefault((node.target, node.args), node)
            if earlier is not node:
                node.replace_all_uses_with(earlier)
                graph.erase_node(node)


class _Quantization(NamedTuple):
    """A quantization in one direction. `source` is the operator for both directions and what it quantizes."""

    source: tuple[Any, ...]
    spec: str
    direction: str
    scale: fx.Node | None

    @classmethod
    def of(cls, node: fx.Node) -> _Quantization:
        traits = traits_of(node)
        assert traits.both is not None
        spec, direction, *scale = node.args[traits.operands :]
        source = (traits.both.target, *node.args[: traits.operands])
        return cls(source, str(spec), str(direction), scale[0] if scale else None)  # type: ignore[arg-type]


def _replace_outputs(old: fx.Node, new: fx.Node, offset: int) -> None:
    """Points the users of a list-valued node at another one's outputs, right behind it."""
    outputs: dict[int, fx.Node] = {n.args[1]: n for n in new.users if n.target is operator.getitem}  # type: ignore[misc]
    for item in list(old.users):
        assert item.target is operator.getitem, item.format_node()
        index = offset + int(item.args[1])  # type: ignore[arg-type]
        if index not in outputs:
            with old.graph.inserting_after(new):
                outputs[index] = old.graph.call_function(operator.getitem, (new, index))
            outputs[index].meta = dict(item.meta)
        item.replace_all_uses_with(outputs[index])
        old.graph.erase_node(item)
