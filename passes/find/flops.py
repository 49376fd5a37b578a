"""What a node costs, measured: torch's FLOP counter over a run on its example values."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode

from fxquant.compat.private import enable_python_dispatcher, tree_leaves, tree_map_only
from fxquant.compat.values import fake_mode_of, size_hint
from fxquant.passes.graph.names import op_name
from fxquant.passes.graph.values import value_of

RECURRENT = frozenset("rnn lstm gru".split())
"""Parts of the names of recurrent layers, whose fused kernels torch's counter does not know."""


def recurrent_flops(tensors: Sequence[Tensor]) -> int:
    """The matmul FLOPs of a recurrent layer: every weight times every row of its input, which is the first."""
    weights = sum(x.numel() for x in tensors if isinstance(x, nn.Parameter) and x.ndim == 2)
    return 2 * size_hint(tensors[0].shape[:-1].numel()) * weights


def node_flops(node: fx.Node) -> int | None:
    """The matmul FLOPs of a node by torch's counter, dynamic sizes at their example values; None if it cannot run."""
    try:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), value_of)
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
        with fresh, torch.no_grad(), mode, enable_python_dispatcher(), FlopCounterMode(display=False) as counter:
            call(*(args[1:] if isinstance(node.target, str) else args), **kwargs)
        recurrent = RECURRENT & set(op_name(node).split("_"))
        return size_hint(counter.get_total_flops()) or (recurrent_flops(tensors) if recurrent else 0)
    except Exception:
        # whatever a foreign op raises on a second run, the model must still compile
        return None
