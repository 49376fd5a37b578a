# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,misc"
"""`reference.merge` as one Triton kernel: a linear has it in its forward and in its backward."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fxquant.kernels.probe.reference import COLUMNS, LARGEST, SUMS, WORST

_SUMS, _WORST, _EXPONENTS = (
    tl.constexpr(n) for n in (len(SUMS), len(SUMS) + len(LARGEST), len(SUMS) + len(LARGEST) + len(WORST))
)


@triton.jit
def merge_kernel(old, new, out, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Stores a vector of two taken together: one a program."""
    first = tl.program_id(0) * WIDTH
    at = tl.arange(0, PADDED)
    a = tl.load(old + first + at, mask=at < WIDTH, other=0.0)
    b = tl.load(new + first + at, mask=at < WIDTH, other=0.0)
    largest = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    worse = tl.load(new + first + _WORST) > tl.load(old + first + _WORST)
    merged = tl.where(at < _SUMS, a + b, largest)
    merged = tl.where(at >= _WORST, tl.where(worse, b, a), merged)
    merged = tl.where(at >= _EXPONENTS, a + b, merged)
    tl.store(out + first + at, merged, mask=at < WIDTH)


def merge(old: Tensor, new: Tensor) -> Tensor:
    """The vectors [n, COLUMNS] of two parts of a step taken together."""
    out = torch.empty_like(old, memory_format=torch.contiguous_format)
    width = len(COLUMNS)
    merge_kernel[(old.numel() // width,)](old.contiguous(), new, out, width, triton.next_power_of_2(width), num_warps=1)
    return out
