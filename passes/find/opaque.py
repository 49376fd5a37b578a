"""Matmuls that no form knows: ops whose cost, measured on fake tensors, says that they multiply matrices."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode

from fxquant.compat.private import tree_leaves, tree_map_only
from fxquant.compat.values import fake_mode_of, on_fakes, size_hint
from fxquant.decisions import SkipReason
from fxquant.passes.find.facts import Match, Product, Skip
from fxquant.passes.find.site import Site
from fxquant.passes.graph.names import SAME_VALUES, op_name
from fxquant.passes.graph.values import maybe_value, value_of

RECURRENT = frozenset("rnn lstm gru".split())
"""Parts of the names of recurrent layers, whose fused kernels torch's counter does not know."""

_TELLING = RECURRENT | frozenset(
    "mm addmm bmm matmul gemm gemv linear attention attn mha sdpa conv convolution encoder cdist solve tensorsolve "
    "lstsq ormqr orgqr householder trilinear".split()
)
_TELLING_PAIRS = frozenset({"matrix exp"})
"""Words, and pairs of words, in the names of operators that multiply matrices, also where torch does not count that."""

_REMEDIES = {
    name: "; torch.backends.mha.set_fastpath_enabled(False) has torch write it out"
    for name in ("_transformer_encoder_layer_fwd", "_native_multi_head_attention")
}
"""Remedies that a user has, by the name of the operator."""


def opaque(site: Site, free: set[Any]) -> Match | None:
    """Returns a match for a node that costs matmul FLOPs, or whose name says so.

    `free` collects the targets that cost nothing, so that each runs once.
    """
    node = site.node
    if node.target in free:
        return None
    telling = node.op == "call_function" and tells(op_name(node))
    flops = node_flops(node) if telling or _worth_running(node) else 0
    if not flops and not telling:
        free.add(node.target)
        return None
    tensors = [source for source in node.all_input_nodes if isinstance(maybe_value(source), Tensor)]
    operands = [tensor for tensor in tensors if value_of(tensor).is_floating_point()] or tensors
    if not operands:
        return None
    weights = [operand for operand in operands if site.is_weight(operand)]
    product = Product.unknown(flops or 0, operands[0], (weights or operands)[-1], bool(weights))
    cost = f"{flops} FLOPs" if flops else "its FLOPs are unknown"
    detail = f"{op_name(node)} is not a form that can be rewritten ({cost})" + _REMEDIES.get(op_name(node), "")
    return site.match("linear" if weights else "matmul", product, skip=(SkipReason.OPAQUE, detail))


def _worth_running(node: fx.Node) -> bool:
    """Returns False for a node that is surely no matmul, has no floating result, or would write into its operands."""
    name = op_name(node)
    in_place = name.endswith("_") and not name.endswith("__")
    if name in SAME_VALUES or in_place or getattr(node.target, "__module__", "") == "_operator":
        return False
    results = [leaf for leaf in tree_leaves(value_of(node)) if isinstance(leaf, Tensor)]
    return any(leaf.is_floating_point() or leaf.is_complex() for leaf in results)


def tells(operator: str) -> bool:
    """Returns True if an operator has a telling name: a custom one, or a fused kernel that torch cannot count."""
    namespace, _, name = operator.rpartition("::")
    words = name.lower().split("_")
    multiplies = bool(_TELLING & set(words)) or any(" ".join(pair) in _TELLING_PAIRS for pair in pairwise(words))
    return multiplies and namespace not in ("prim", "prims", "fxquant")


def refused(site: Site, kind: str, lhs: fx.Node, rhs: fx.Node, rhs_is_weight: bool, skip: Skip) -> Match:
    """Returns the match of a node whose products have no sizes."""
    return site.match(kind, Product.unknown(node_flops(site.node) or 0, lhs, rhs, rhs_is_weight), skip=skip)


def recurrent_flops(tensors: Sequence[Tensor]) -> int:
    """Returns the matmul FLOPs of a recurrent layer: every weight times every row of its input, the first tensor."""
    weights = sum(x.numel() for x in tensors if isinstance(x, nn.Parameter) and x.ndim == 2)
    return 2 * size_hint(tensors[0].shape[:-1].numel()) * weights


def _argument(node: fx.Node) -> Any:
    """Returns the value of a node; one without is a constant that the graph makes, such as a user's configuration."""
    try:
        return value_of(node)
    except KeyError:
        if node.op != "call_function":
            raise
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), _argument)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def node_flops(node: fx.Node) -> int | None:
    """Measures the matmul FLOPs of a node on its example values, by torch's counter; None if it cannot run."""
    try:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), _argument)
        mode = fake_mode_of(args, kwargs)
        if mode is None:
            return None
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        # several dtypes are those of autocast, which is off here, or of FP8 operands and their scales
        floating = {t.dtype for t in tensors if t.is_floating_point()}
        if len(floating) > 1 and all(dtype.itemsize > 1 for dtype in floating):
            args, kwargs = tree_map_only(Tensor, lambda t: t.float() if t.is_floating_point() else t, (args, kwargs))
        call = getattr(args[0], node.target) if isinstance(node.target, str) else node.target
        fresh = nullcontext() if mode.shape_env is None else mode.shape_env.ignore_fresh_unbacked_symbols()
        with fresh, torch.no_grad(), on_fakes(args, kwargs), FlopCounterMode(display=False) as counter:
            call(*(args[1:] if isinstance(node.target, str) else args), **kwargs)
        recurrent = RECURRENT & set(op_name(node).split("_"))
        return size_hint(counter.get_total_flops()) or (recurrent_flops(tensors) if recurrent else 0)
    except Exception:
        # whatever a foreign op raises on a second run, the model must still compile
        return None
