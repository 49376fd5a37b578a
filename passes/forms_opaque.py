"""Matmuls that no form knows: ops whose cost, measured on fake tensors, says that they multiply matrices."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from fxquant.compat import OpOverload, OpOverloadPacket, tree_leaves
from fxquant.decisions import SkipReason
from fxquant.passes.facts import Match, Product, value_of
from fxquant.passes.forms_contraction import Site
from fxquant.passes.forms_flops import node_flops
from fxquant.passes.forms_weights import VIEWS, op_name

_RECURRENT = frozenset(("lstm", "gru", "rnn_tanh", "rnn_relu"))
"""Layers of torch that multiply, uncounted, in a kernel of their own."""

_TELLING = frozenset("mm addmm bmm matmul gemm linear attention attn conv convolution encoder lstm gru".split())


def opaque(site: Site, free: set[Any]) -> Match | None:
    """A match for a node that costs matmul FLOPs, or is a custom op whose name says so.

    `free` collects the targets found to cost nothing, so that each is run once.
    """
    node = site.node
    if node.target in free:
        return None
    flops = node_flops(node) if _worth_running(node) else 0
    if not flops and not _tells(node):
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
    detail = f"{op_name(node)} is not a form that can be rewritten ({cost})"
    return site.match("linear" if weights else "matmul", product, skip=(SkipReason.OPAQUE, detail))


def _worth_running(node: fx.Node) -> bool:
    """Leaves out what is surely no matmul, what makes no floating tensor, and what would write into its operands."""
    name = op_name(node)
    if name in VIEWS or name.endswith("_") or getattr(node.target, "__module__", "") == "_operator":
        return False
    results = [leaf for leaf in tree_leaves(value_of(node)) if isinstance(leaf, Tensor)]
    return any(leaf.is_floating_point() or leaf.is_complex() for leaf in results)


def _tells(node: fx.Node) -> bool:
    """Whether this is a recurrent layer or a custom op with a telling name: its kernel may multiply uncounted."""
    if not isinstance(node.target, (OpOverload, OpOverloadPacket)):
        return False
    namespace, _, name = op_name(node).rpartition("::")
    if name in _RECURRENT:
        return True
    return namespace not in ("", "prim", "prims", "fxquant") and bool(_TELLING & set(name.lower().split("_")))
