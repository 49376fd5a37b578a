"""Amax before views: the amax of a tensor is taken of it as it is made, and not of a view.

    y = grad + norm_backward(...)                         # [B, S, K]
    parts = fxquant.quantize(view(y, [B * S, K]), "per_tensor_e4m3", "rowwise")
    # becomes
    scale = fxquant.scale_from_amax(fxquant.amax(y), "per_tensor_e4m3")
    parts = fxquant.quantize(view(y, [B * S, K]), "per_tensor_e4m3", "rowwise", scale)

Inductor compares what two kernels read and write by sizes and strides: the loops over [B, S, K] and over [B S, K] share
nothing for it, and the amax would read the tensor once more.
"""

from __future__ import annotations

from torch import fx

from fxquant.passes.graph.considered import allowed
from fxquant.passes.graph.match import behind_views
from fxquant.passes.graph.names import RESHAPES, is_fxquant
from fxquant.passes.graph.values import val
from fxquant.passes.joint.scales import scale_of
from fxquant.passes.joint.sides import in_memory, sides_of
from fxquant.passes.settings import Settings


def amax_before_views(graph: fx.Graph, settings: Settings) -> int:
    """Rewrites `graph` in place; returns how many amaxes or quantizations it concerns."""
    count = 0
    for node in list(graph.nodes):
        sides = sides_of(node)
        base = behind_views(node.args[0], RESHAPES) if sides or is_fxquant(node, "amax") else None
        if base is None or base is node.args[0] or val(base).device.type != settings.device:
            continue
        if not allowed(node, "amax_before_views", "the tensor is in memory" if in_memory(base) else ""):
            continue
        if sides:
            count += _give_scales(node, base)
        else:
            node.args = (base,)
            count += 1
    return count


def _give_scales(node: fx.Node, base: fx.Node) -> bool:
    """Gives a quantization the scales that are scales of its own amax; returns True if it has some."""
    sides = sides_of(node)
    scales: dict[str, fx.Node] = {}
    for side in sides:
        if side.state is None and side.per_tensor and side.spec not in scales:
            scales[side.spec] = scale_of(node, side.spec)
            scales[side.spec].args[0].args = (base,)  # type: ignore[union-attr]
    if scales:
        states = [scales.get(side.spec) if side.state is None else side.state for side in sides]
        node.args = (*node.args[:3], *states)
    return bool(scales)
