"""What a node costs, measured: torch's FLOP counter over a run on its example values."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import FlopCounterMode

from fxquant.compat import enable_python_dispatcher, fake_mode_of, size_hint, tree_leaves, tree_map_only
from fxquant.passes.facts import value_of


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
        fresh = nullcontext() if mode.shape_env is None else mode.shape_env.ignore_fresh_unbacked_symbols()
        with fresh, torch.no_grad(), mode, enable_python_dispatcher(), FlopCounterMode(display=False) as counter:
            call(*(args[1:] if isinstance(node.target, str) else args), **kwargs)
        return size_hint(counter.get_total_flops())
    except Exception:
        # whatever a foreign op raises on a second run, the model must still compile
        return None
