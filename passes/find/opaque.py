"""Matmuls that no form knows: ops whose cost, measured on fake tensors, says that they multiply matrices."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from fxquant.compat.private import tree_leaves
from fxquant.decisions import SkipReason
from fxquant.passes.find.contraction import Site
from fxquant.passes.find.facts import Match, Product
from fxquant.passes.find.flops import RECURRENT, node_flops
from fxquant.passes.graph.names import SAME_VALUES, op_name
from fxquant.passes.graph.values import value_of

_TELLING = RECURRENT | frozenset("mm addmm bmm matmul gemm linear attention attn conv convolution encoder".split())

_REMEDIES = {
    name: "; torch.backends.mha.set_fastpath_enabled(False) has torch write it out"
    for name in ("_transformer_encoder_layer_fwd", "_native_multi_head_attention")
}
"""What a user can do about an operator, by its name."""


def opaque(site: Site, free: set[Any]) -> Match | None:
    """A match for a node that costs matmul FLOPs, or whose name says so.

    `free` collects the targets found to cost nothing, so that each is run once.
    """
    node = site.node
    if node.target in free:
        return None
    telling = node.op == "call_function" and tells(op_name(node))
    flops = node_flops(node) if telling or _worth_running(node) else 0
    if not flops and not telling:
        free.add(node.target)
        return None
    tensors = [each for each in node.all_input_nodes if isinstance(value_of(each), Tensor)]
    operands = [each for each in tensors if value_of(each).is_floating_point()] or tensors
    if not operands:
        return None
    weights = [each for each in operands if site.is_weight(each)]
    product = Product(
        m=(flops or 0) // 2, k=1, n=1, lhs=operands[0], rhs=(weights or operands)[-1], rhs_is_weight=bool(weights)
    )
    cost = f"{flops} FLOPs" if flops else "its FLOPs are unknown"
    detail = f"{op_name(node)} is not a form that can be rewritten ({cost})" + _REMEDIES.get(op_name(node), "")
    return site.match("linear" if weights else "matmul", product, skip=(SkipReason.OPAQUE, detail))


def _worth_running(node: fx.Node) -> bool:
    """Leaves out what is surely no matmul, what makes no floating tensor, and what would write into its operands."""
    name = op_name(node)
    if name in SAME_VALUES or name.endswith("_") or getattr(node.target, "__module__", "") == "_operator":
        return False
    results = [leaf for leaf in tree_leaves(value_of(node)) if isinstance(leaf, Tensor)]
    return any(leaf.is_floating_point() or leaf.is_complex() for leaf in results)


def tells(operator: str) -> bool:
    """Whether an operator has a telling name: a custom one, or a fused kernel that torch cannot count."""
    namespace, _, name = operator.rpartition("::")
    return bool(_TELLING & set(name.lower().split("_"))) and namespace not in ("prim", "prims", "fxquant")
