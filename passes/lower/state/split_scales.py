"""Split scales: the delayed scales of a graph, entries of one vector, become tensors of their own on CUDA.

    a = aten.slice(scales, 0, 0, 1)
    b = aten.slice(scales, 0, 1, 2)
    # becomes
    a, b = aten._foreach_mul([aten.slice(scales, 0, 0, 1), aten.slice(scales, 0, 1, 2)], 1)    # one kernel

The number of an entry is written into every kernel that reads it, so that the same cast in two layers would be two
kernels to compile.
"""

from __future__ import annotations

import itertools
import operator

import torch
from torch import Tensor, fx

from fxquant.compat.values import on_fakes
from fxquant.passes.graph.meta import VAL
from fxquant.passes.graph.names import is_fxquant
from fxquant.passes.graph.values import val
from fxquant.passes.settings import Settings

_aten = torch.ops.aten


def split_scales(graph: fx.Graph, settings: Settings) -> int:
    """Rewrites `graph` in place; returns how many scales got a tensor of their own."""
    entries: dict[fx.Node, dict[int, list[fx.Node]]] = {}
    for node in graph.find_nodes(op="call_function", target=_aten.slice.Tensor):
        vector, index = node.args[0], node.args[2] if len(node.args) > 2 else 0
        here = val(vector).ndim == 1 and val(vector).device.type == settings.device
        if here and isinstance(index, int) and _is_scale(node):
            entries.setdefault(vector, {}).setdefault(index, []).append(node)
    count = 0
    for vector, by_index in entries.items():
        users = [user for nodes in by_index.values() for node in nodes for user in node.users]
        if len(by_index) > 1 and any(map(is_fxquant, users)):
            _split(vector, by_index)
            count += len(by_index)
    return count


def _is_scale(node: fx.Node) -> bool:
    """Returns True if a node of one element goes to quantizations alone, of this graph or of the backward."""
    quantizes = [is_fxquant(user) or user.op == "output" for user in node.users]
    value = val(node)
    return isinstance(value, Tensor) and tuple(value.shape) == (1,) and bool(quantizes) and all(quantizes)


def _split(vector: fx.Node, by_index: dict[int, list[fx.Node]]) -> None:
    graph = vector.graph
    originals = [nodes[0] for nodes in by_index.values()]
    with graph.inserting_before(_behind(vector)), on_fakes(val(vector)):
        slices = [graph.node_copy(node) for node in originals]
        products = graph.call_function(_aten._foreach_mul.Scalar, (slices, 1))
        like = val(vector)
        products.meta[VAL] = [torch.empty(1, dtype=like.dtype, device=like.device) for _ in slices]
        for i, nodes in enumerate(by_index.values()):
            scale = graph.call_function(operator.getitem, (products, i))
            scale.meta = {**nodes[0].meta, VAL: products.meta[VAL][i]}
            for node in nodes:
                node.replace_all_uses_with(scale)
    for node in itertools.chain(*by_index.values()):
        graph.erase_node(node)


def _behind(node: fx.Node) -> fx.Node:
    """Returns the first place behind a node where nodes can be inserted."""
    following = node.next
    while following.op == "placeholder":
        following = following.next
    return following
