# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""The amax of a tensor that lies in memory: one read, at the rate of a copy.

Where a tensor's producer can take the amax along, Inductor fuses them; this kernel is for what no such producer made:
parameters, inputs, and the results of GEMMs and attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from fxquant.compat import declare_written
from fxquant.kernels.triton_codes import magnitude

_STEPS, _BLOCK, _WARPS = 8, 4096, 4


@triton.jit
def tensor_amax_kernel(x, out, numel, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest magnitude in STEPS blocks of x, NaN ignored, into a zeroed float32 [1]: ordered as their bits are."""
    first = tl.program_id(0).to(tl.int64) * (STEPS * BLOCK)
    source = x + first
    left = numel - first
    largest = tl.zeros((BLOCK,), tl.float32)
    for step in tl.static_range(STEPS):
        at = step * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(source + at, mask=at < left, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, magnitude(value))
    bits = tl.max(largest, axis=0).to(tl.int32, bitcast=True)
    tl.atomic_max(out.to(tl.pointer_type(tl.int32), bitcast=True), bits, sem="relaxed")


def tensor_amax(x: Tensor) -> Tensor:
    """`reference.amax` of a tensor of any shape: float32 [1]. What is not contiguous is copied first."""
    x = x.contiguous()
    out = torch.zeros(1, dtype=torch.float32, device=x.device)
    grid = ((x.numel() + _STEPS * _BLOCK - 1) // (_STEPS * _BLOCK),)
    wrap_triton(tensor_amax_kernel)[grid](x, out, x.numel(), _STEPS, _BLOCK, num_warps=_WARPS)
    return out


def written(arguments: Mapping[str, Any]) -> list[str]:
    """The names of the arguments that a launch writes."""
    return ["out"]


declare_written(tensor_amax_kernel, written)
