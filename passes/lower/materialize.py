"""Materialize shared inputs: what a launch reads, and something else too, is written by one kernel and read again.

    y = x + residual               # Inductor would compute it again, and write it, for each launch that reads it
    amax(y), cast(y), y + z
    # becomes
    y = force_stride_order(x + residual, [K, 1])

Inductor holds the arguments of a Triton kernel to their strides, and does that to a tensor which is not in memory yet
by a copy for every launch. Other readers would compute it from what it is made of: of a residual stream, from all that
was added since one of its sums was last in memory.
"""

from __future__ import annotations

from torch import Tensor, fx

from fxquant.compat.private import OpOverload, force_stride_order, triton_kernel_wrapper_functional
from fxquant.compat.values import on_fakes
from fxquant.passes.graph.considered import allowed
from fxquant.passes.graph.match import behind_views, readers
from fxquant.passes.graph.meta import VAL
from fxquant.passes.graph.names import VIEWS
from fxquant.passes.graph.values import val
from fxquant.passes.joint.sides import EXTERNAL
from fxquant.passes.settings import Settings


def materialize_shared_inputs(graph: fx.Graph, settings: Settings) -> int:
    """Rewrites `graph` in place, after lowering; returns how many tensors it concerns."""
    bases = dict.fromkeys(
        behind_views(source)
        for launch in graph.find_nodes(op="call_function", target=triton_kernel_wrapper_functional)
        for source in launch.all_input_nodes
    )
    count = 0
    for base in bases:
        shared = len(set(readers(base, VIEWS))) > 1
        if not isinstance(base.target, OpOverload) or base.target in EXTERNAL or not shared:
            continue
        if not allowed(base, "materialize_shared_inputs", _obstacle(base)):
            continue
        users = list(base.users)
        with graph.inserting_after(base):
            written = graph.call_function(force_stride_order, (base, [int(step) for step in val(base).stride()]))
        with on_fakes(val(base)):
            written.meta = {**base.meta, VAL: val(base).clone()}
        for user in users:
            user.replace_input_with(base, written)
        count += 1
    return count


def _obstacle(node: fx.Node) -> str:
    """Returns why the strides of a result cannot be asked for; empty if they can."""
    value = val(node)
    if not isinstance(value, Tensor) or value.numel() <= 1:
        return "it is one number, or several results"
    if not value.is_contiguous():
        return "it is not dense"
    return "" if all(isinstance(step, int) for step in value.stride()) else "its strides are dynamic"
