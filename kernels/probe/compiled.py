"""The statistics on a GPU: compiled by Inductor, once for each kind of operand, and then called like a function.

Layers of one size share them, which a graph that had them traced in would compile one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from fxquant.compat.inside.memory import compile_lock
from fxquant.compat.patches import compile_with_inductor
from fxquant.compat.private import make_fx

_SETTINGS = {"eager_numerics.division_rounding": True, "triton.cudagraphs": False}
_functions: dict[Hashable, Callable[..., Sequence[Tensor]]] = {}


@torch.no_grad()
def call(what: Hashable, run: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Returns what `run` gives for tensors, compiled; equal `what` must mean that it does the same."""
    kinds = tuple((t.dtype, t.device, t.shape, t.stride(), t.data_ptr() % 16) for t in inputs)
    if (what, kinds) not in _functions:
        with compile_lock:  # while one thread traces, torch's modules are changed under all
            graph = make_fx(lambda *tensors: [run(*tensors)], tracing_mode="fake")(*inputs)
            _functions[what, kinds] = compile_with_inductor(graph, inputs, _SETTINGS)
    (result,) = _functions[what, kinds](*inputs)
    return result
