# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""The amax of a tensor that lies in memory: one read, at the rate of a copy.

Where a tensor's producer can take the amax along, Inductor fuses them; this kernel is for what no such producer made:
parameters, inputs, and the results of GEMMs and attention.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from fxquant.compat.patches import writes
from fxquant.kernels.cast.codes import magnitude

_STEPS, _BLOCK, _WARPS = 8, 4096, 4


@writes("out")
@triton.jit
def tensor_amax_kernel(x, out, numel, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """Stores the largest magnitude, NaN ignored, in each STEPS blocks of x, as float32."""
    first = tl.program_id(0).to(tl.int64) * (STEPS * BLOCK)
    source = x + first
    count = numel - first
    largest = tl.zeros((BLOCK,), tl.float32)
    for step in tl.static_range(STEPS):
        at = step * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(source + at, mask=at < count, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, magnitude(value))
    tl.store(out + tl.program_id(0), tl.max(largest, axis=0))


def tensor_amax(x: Tensor) -> Tensor:
    """`reference.amax` of a tensor of any shape: float32 [1]. What is not contiguous is copied first.

    The amaxes of its pieces are left to Inductor, which takes theirs in one kernel with the scale that is made of it.
    """
    x = x.contiguous()
    pieces = triton.cdiv(x.numel(), _STEPS * _BLOCK)
    out = torch.empty(pieces, dtype=torch.float32, device=x.device)
    wrap_triton(tensor_amax_kernel)[(pieces,)](x, out, x.numel(), _STEPS, _BLOCK, num_warps=_WARPS)
    return out.amax(0, keepdim=True)
