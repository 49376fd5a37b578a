"""Amaxes over several ranks: those of one tensor are taken once, and reduced once.

    one = wait_tensor(all_reduce(fxquant.amax(view(x)), "max", "tp"))        # q_proj
    other = wait_tensor(all_reduce(fxquant.amax(view_1(x)), "max", "tp"))    # k_proj, or the backward
    # becomes, on the joint graph
    one = wait_tensor(all_reduce(fxquant.amax(view(x)), "max", "tp"))        # for both

No later pass finds that out: what waits for other ranks is left alone by whoever looks for equal computations.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fxquant.passes.graph.match import behind_views
from fxquant.passes.graph.names import SAME_ELEMENTS, is_collective, is_fxquant
from fxquant.passes.settings import Settings

_DTYPE = torch.ops.aten.view.dtype


def share_amaxes(graph: fx.Graph, settings: Settings) -> int:
    """Rewrites a joint graph in place; returns how many reductions went away."""
    first: dict[Any, fx.Node] = {}
    count = 0
    for node in list(graph.nodes):
        if not _of_amax(node):
            continue
        source, *rest = node.args
        if is_fxquant(node, "amax"):  # of the whole tensor, however its elements lie
            source = behind_views(source, SAME_ELEMENTS)
        earlier = first.setdefault((node.target, source, *rest), node)
        if earlier is not node:
            node.replace_all_uses_with(earlier)
            graph.erase_node(node)
            count += is_collective(node)
    graph.lint()
    return count


def drop_unused(graph: fx.Graph) -> int:
    """Erases what ranks send each other for nothing from the forward or the backward; returns how often they did.

    The partitioner copies into both what it can compute in both, and removes nothing that waits for other ranks.
    """
    count = 0
    for node in reversed(graph.nodes):
        if is_collective(node) and not node.users and _of_quantization(node):
            graph.erase_node(node)
            count += 1
    if count:
        graph.eliminate_dead_code()
    return count


def _of_quantization(node: Any) -> bool:
    """Returns True for amaxes, payloads and scales, and for what ranks send each other of them."""
    while is_collective(node) or node.target in (_DTYPE, operator.getitem):
        node = node.args[0]
    return is_fxquant(node)


def _of_amax(node: fx.Node) -> bool:
    """Returns True for an amax that is reduced over ranks, the reduction, and the scale that is made of it."""
    if is_fxquant(node, "amax", "amaxes_of"):
        return any(map(is_collective, node.users))
    if is_fxquant(node, "scale_from_amax"):
        source: Any = node.args[0]
        return is_collective(source) and _of_amax(source)
    if not is_collective(node):
        return False
    before: Any = node.args[0]
    return isinstance(before, fx.Node) and (is_fxquant(before, "amax", "amaxes_of") or _of_amax(before))
