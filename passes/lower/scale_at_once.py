"""Scale at once: the scale of a tensor is made with its amax, by an operator that has a kernel for both.

    amax = fxquant.amax(x)
    scale = fxquant.scale_from_amax(amax, "per_tensor_e4m3")
    # becomes
    scale = fxquant.tensor_scale(x, "per_tensor_e4m3")

where nothing else reads the amax. The kernel is one node in the place of a dozen, which Inductor makes into loops and
code for each scale of each layer anew.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxquant.passes.graph.names import is_fxquant
from fxquant.passes.graph.values import val
from fxquant.passes.settings import Settings


def scale_at_once(graph: fx.Graph, settings: Settings) -> int:
    """Rewrites `graph` in place; returns how many scales it concerns."""
    if not settings.kernels:
        return 0
    count = 0
    for node in graph.find_nodes(op="call_function", target=torch.ops.fxquant.scale_from_amax.default):
        amax: Any = node.args[0]
        if not is_fxquant(amax, "amax") or len(amax.users) > 1 or val(amax).device.type != settings.device:
            continue
        amax.target = torch.ops.fxquant.tensor_scale.default
        amax.args = (*amax.args, node.args[1])
        node.replace_all_uses_with(amax)
        graph.erase_node(node)
        count += 1
    return count
