# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""The Triton kernel that gives the values of NVFP4 operands as bfloat16, for GEMMs of cards that do not read them.

It is one launch for an operand. As operators of ATen it would be some thirty nodes, for which Inductor makes loops and
code for each operand of each GEMM anew.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from fxquant.compat.patches import writes

_WORDS, _WARPS = 1024, 4


@writes("out")
@triton.jit
def nvfp4_values_kernel(data, scale, out, words, WORDS: tl.constexpr):
    """Stores elements times their block's scale, of WORDS of 8 elements each; a scale is that of two words."""
    first = tl.program_id(0).to(tl.int64) * WORDS
    # a word for each thread, which stores its 16 bytes: told that words are contiguous, Triton would exchange them
    word = tl.max_contiguous(tl.arange(0, WORDS), [1])
    inside = word < words - first
    codes = tl.load(data.to(tl.pointer_type(tl.int32), bitcast=True) + first + word, mask=inside, other=0)
    factor = tl.load(scale + (first // 2 + word // 2), mask=inside, other=0.0).to(tl.float32)
    code = (codes[:, None] >> (4 * tl.arange(0, 8))[None, :]) & 15
    magnitude = code & 7
    bits = tl.where(magnitude < 2, magnitude * 0x3F000000, (magnitude + 252) << 22)  # 0 and 1 stand for 0 and 0.5
    values = (bits | ((code & 8) << 28)).to(tl.float32, bitcast=True) * factor[:, None]
    place = 8 * tl.arange(0, WORDS)[:, None] + tl.arange(0, 8)[None, :]
    tl.store(out + 8 * first + place, values.to(tl.bfloat16), mask=inside[:, None])


def nvfp4_values(parts: Sequence[Tensor]) -> Tensor:
    """Returns elements times block scales, bfloat16 [*, Cp], of data [*, Cp / 2] and scales [*, Cp / 16], not empty.

    They are exact. The factor of the global amax is left out, and scales are not in the order of tensor cores.
    """
    data, scale = parts[0].contiguous(), parts[1].contiguous()
    out = torch.empty((*data.shape[:-1], 2 * data.shape[-1]), dtype=torch.bfloat16, device=data.device)
    words = data.numel() // 4
    wrap_triton(nvfp4_values_kernel)[(triton.cdiv(words, _WORDS),)](data, scale, out, words, _WORDS, num_warps=_WARPS)
    return out
