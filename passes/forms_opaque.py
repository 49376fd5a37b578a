"""Matmuls that no form knows: ops whose cost, measured on fake tensors, says that they multiply matrices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from fxquant.compat import OpOverload, OpOverloadPacket, enable_python_dispatcher, fake_mode_of, size_hint
from fxquant.decisions import SkipReason
from fxquant.passes.facts import Match, Product, value_of
from fxquant.passes.forms_contraction import Site
from fxquant.passes.forms_weights import VIEWS, op_name

_TELLING = frozenset("mm addmm bmm matmul gemm linear attention attn conv convolution encoder lstm gru".split())


def node_flops(node: fx.Node) -> int | None:
    """The matmul FLOPs of a node by torch's counter, dynamic sizes at their example values; None if it cannot run."""
    try:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), value_of)
        mode = fake_mode_of(args, kwargs)
        if mode is None:
            return None
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        # only autocast, which is off here, lets the operands of a product have several dtypes
        if len({t.dtype for t in tensors if t.is_floating_point()}) > 1:
            args, kwargs = tree_map_only(Tensor, lambda t: t.float() if t.is_floating_point() else t, (args, kwargs))
        call = getattr(args[0], node.target) if isinstance(node.target, str) else node.target
        with torch.no_grad(), mode, enable_python_dispatcher(), FlopCounterMode(display=False) as counter:
            call(*(args[1:] if isinstance(node.target, str) else args), **kwargs)
        return size_hint(counter.get_total_flops())
    except Exception:
        # whatever a foreign op raises on a second run, the model must still compile
        return None


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
    """Whether this is a custom op with a telling name: its kernel may multiply without being counted."""
    if not isinstance(node.target, (OpOverload, OpOverloadPacket)):
        return False
    namespace, _, name = op_name(node).rpartition("::")
    return namespace not in ("", "prim", "prims", "fxquant") and bool(_TELLING & set(name.lower().split("_")))
