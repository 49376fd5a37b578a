# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""The amax of a tensor that lies in memory: one read, at the rate of a copy. And the scale that amaxes give.

Where a tensor's producer can take the amax along, Inductor fuses them; the kernel of the amax is for what no such
producer made: parameters, inputs, and the results of GEMMs and attention. The scale is one launch either way. As
operators of ATen it would be a dozen nodes, for which Inductor makes loops and code in each layer anew.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from fxquant.compat.patches import writes
from fxquant.compat.values import statically_known_true
from fxquant.formats import QuantSpec
from fxquant.kernels.cast import reference
from fxquant.kernels.cast.codes import magnitude
from fxquant.kernels.cast.triton_scales import side_constants, side_multiplier

_STEPS, _BLOCK, _WARPS = 8, 4096, 4
_MOST_AMAXES = 1 << 15
"""Amaxes that one program reads."""
_MOST_AT_ONCE = 1 << 13
"""Amaxes that it reads at once, also where their number is dynamic."""


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


@writes("out")
@triton.jit
def scale_kernel(amaxes, out, numel, BLOCK: tl.constexpr, SIDE: tl.constexpr):
    """Stores the multiplier of a tensor whose parts have these amaxes, none NaN, or if SIDE is None the largest."""
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, numel, BLOCK):
        at = start + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.load(amaxes + at, mask=at < numel, other=0.0).to(tl.float32))
    amax = tl.max(largest, axis=0, keep_dims=True)
    if SIDE is not None:
        amax = side_multiplier(amax, SIDE)
    tl.store(out + tl.arange(0, 1), amax)


def tensor_amax(x: Tensor) -> Tensor:
    """`reference.amax` of a tensor of any shape: float32 [1]. What is not contiguous is copied first.

    The amaxes of its pieces are left to Inductor, which takes theirs in one kernel with what is made of them.
    """
    return _amaxes_of_pieces(x).amax(0, keepdim=True)


def tensor_scale(x: Tensor, spec: QuantSpec) -> Tensor:
    """`reference.multiplier_from_amax` for the amax of a tensor of any shape: float32 [1]."""
    return _scale(_amaxes_of_pieces(x), spec)


def made_tensor_scale(x: Tensor, spec: QuantSpec) -> Tensor:
    """The same for a tensor [.., K] that a kernel of Inductor's makes, which takes the amaxes of rows along.

    That kernel has x unrounded (`rounded`). Here this does not matter: rounding keeps the order of numbers, so the
    largest of rounded magnitudes is the largest magnitude, rounded as it is stored in the dtype of x.
    """
    return _scale(_amaxes_of_rows(x), spec)


def stored_amax(x: Tensor) -> Tensor:
    """`tensor_amax` for a kernel that is not Inductor's: it is stored by a launch, not by what is made of it."""
    return largest(_amaxes_of_pieces(x))


def made_amax(x: Tensor) -> Tensor:
    """The same for a tensor [.., K] of known sizes that a kernel of Inductor's makes (see `made_tensor_scale`)."""
    return largest(_amaxes_of_rows(x))


def largest(amaxes: Tensor) -> Tensor:
    """The largest of amaxes, none of them NaN: float32 [1]."""
    return _scale(amaxes, None)


def _amaxes_of_rows(x: Tensor) -> Tensor:
    amaxes = reference.magnitude(x).amax(-1)
    while amaxes.ndim > 1 and not statically_known_true(amaxes.numel() <= _MOST_AMAXES):
        amaxes = amaxes.amax(-1)
    return amaxes


def _scale(amaxes: Tensor, spec: QuantSpec | None) -> Tensor:
    numel = amaxes.numel()
    block = min(triton.next_power_of_2(numel), _MOST_AT_ONCE) if isinstance(numel, int) else _MOST_AT_ONCE
    out = torch.empty(1, dtype=torch.float32, device=amaxes.device)
    constants = None if spec is None else side_constants(spec, torch.float32)
    wrap_triton(scale_kernel)[(1,)](amaxes, out, numel, block, constants, num_warps=max(1, min(16, block // 256)))
    return out


def _amaxes_of_pieces(x: Tensor) -> Tensor:
    x = x.contiguous()
    pieces = triton.cdiv(x.numel(), _STEPS * _BLOCK)
    out = torch.empty(pieces, dtype=torch.float32, device=x.device)
    wrap_triton(tensor_amax_kernel)[(pieces,)](x, out, x.numel(), _STEPS, _BLOCK, num_warps=_WARPS)
    return out
