"""MeasureUnviewed: the amax of a tensor is taken of it as it is made, and not of a view.

    y = grad + norm_backward(...)                         # [B, S, K]
    parts = fxquant.quantize(view(y, [B * S, K]), "per_tensor_e4m3", "rowwise")
    # becomes
    scale = fxquant.scale_from_amax(fxquant.amax(y), "per_tensor_e4m3")
    parts = fxquant.quantize(view(y, [B * S, K]), "per_tensor_e4m3", "rowwise", scale)

Inductor compares what two kernels read and write by sizes and strides: the loops over [B, S, K] and over [B S, K] share
nothing for it, and the amax would read the tensor once more.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from fxquant.formats import QuantSpec
from fxquant.passes.base import behind_views, in_memory, is_fxquant, val
from fxquant.passes.partition import scale_of
from fxquant.passes.patterns import RESHAPES


def measure_unviewed(graph: fx.Graph, device: str = "cuda") -> int:
    """Rewrites `graph` in place, for tensors on `device`; returns how many amaxes or quantizations it concerns."""
    count = 0
    for node in list(graph.nodes):
        sides = 2 if is_fxquant(node, "hybrid_quantize") else 1 if is_fxquant(node, "quantize") else 0
        base = behind_views(node.args[0], RESHAPES) if sides or is_fxquant(node, "amax") else None
        if base is None or base is node.args[0] or in_memory(base) or val(base).device.type != device:
            continue
        if sides:
            count += _give_scales(node, sides, base)
        else:
            node.args = (base,)
            count += 1
    if count:
        graph.lint()
    return count


def _give_scales(node: fx.Node, sides: int, base: fx.Node) -> int:
    """Gives a quantization the scales that are made of its own amax; returns whether there are any."""
    specs = [str(spec) for spec in node.args[1 : 1 + sides]]
    first = 1 + 2 if sides == 1 else 1 + sides  # behind the direction
    states: list[Any] = [*node.args[first:], None, None][:sides]
    made: dict[str, fx.Node] = {}
    for i, spec in enumerate(specs):
        if states[i] is not None or QuantSpec.parse(spec).row.family != "per_tensor":
            continue
        if spec not in made:
            made[spec] = scale_of(node, "amax", 1, spec)
            made[spec].args[0].args = (base,)  # type: ignore[union-attr]
        states[i] = made[spec]
    if made:
        node.args = (*node.args[:first], *states)
    return len(made) > 0
