# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""The scores of attention that a query sees: masks, causality and dropout, in Triton kernels and for their launches.

Inductor copies the source of what a kernel calls under the name it is called by: import these by their own names.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fxquant.compat.values import statically_known_true

NO_MASK, BOOL_MASK, ADDED_MASK, KEY_MASK = (tl.constexpr(i) for i in range(4))
"""What hides scores: nothing, a boolean or an added [Sq, Sk], a boolean [Sk] that is the same for all queries."""
LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def masked(
    s, rows, columns, q_len, kv_len, mask, row_step, column_step, CAUSAL: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Scores in units of log2 with -inf where a query does not see a key. `rows` and `columns` broadcast."""
    seen = columns < kv_len
    if CAUSAL:
        seen = seen & (columns <= rows)
    if MASK == KEY_MASK:
        hidden = mask + columns.to(tl.int64) * column_step
        seen = seen & (tl.load(hidden, mask=columns < kv_len, other=0) != 0)
    elif MASK != NO_MASK:
        at = mask + (rows.to(tl.int64) * row_step + columns.to(tl.int64) * column_step)
        there = (rows < q_len) & (columns < kv_len)
        if MASK == BOOL_MASK:
            seen = seen & (tl.load(at, mask=there, other=0) != 0)
        else:
            s += tl.load(at, mask=there, other=0.0).to(tl.float32) * LOG2_E
    return tl.where(seen, s, float("-inf"))


@triton.jit
def survivors(seed, row, first, DROPPED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Which weights of rows [ROWS], numbered over the batch, and KEYS keys from `first` on dropout keeps.

    As `attention_reference.kept` has it; DROPPED is the probability of the others times 2^32.
    """
    zero = tl.zeros((ROWS, KEYS // 4), tl.int32)
    place = first // 4 + tl.arange(0, KEYS // 4)
    a, b, c, d = tl.philox(seed, zero + place[None, :], zero + row[:, None], zero, zero)
    words = tl.join(tl.join(a, c), tl.join(b, d))
    return tl.reshape(words >= tl.full([], DROPPED, tl.uint32), (ROWS, KEYS))


def mask_arguments(mask: Tensor | None, device: torch.device) -> tuple[int, Tensor, Tensor, tuple[Any, ...]]:
    """The kind of a mask, the mask, the range of keys it leaves, and their strides over [B, H, Sq, Sk] and [B, H]."""
    if mask is None:
        return NO_MASK.value, *filled(None, None, device=device), (0, 0, 0, 0, 0, 0)
    mask = mask.reshape(*[1] * (4 - mask.ndim), *mask.shape)
    steps = _steps(mask)
    of_keys = statically_known_true(mask.shape[2] == 1) and not statically_known_true(mask.shape[3] == 1)
    if mask.dtype != torch.bool or not of_keys:
        kind = BOOL_MASK if mask.dtype == torch.bool else ADDED_MASK
        return kind.value, mask, *filled(None, device=device), (*steps, 0, 0)
    keys = torch.arange(mask.shape[3], device=device)
    first = torch.where(mask, keys, mask.shape[3] - 1).amin((2, 3))
    after = torch.where(mask, keys + 1, 0).amax((2, 3))
    seen = torch.stack((first, after), -1).to(torch.int32)
    return KEY_MASK.value, mask, seen, (*steps, *_steps(seen)[:2])


def _steps(x: Tensor) -> list[Any]:
    """Strides, 0 for axes that are broadcast."""
    return [0 if statically_known_true(size == 1) else step for size, step in zip(x.shape, x.stride(), strict=True)]


def filled(*tensors: Tensor | None, device: torch.device) -> list[Tensor]:
    """With something in the place of what a kernel does not read: not another argument, or Inductor copies that."""
    return [torch.empty(1, device=device) if tensor is None else tensor for tensor in tensors]


def dropped(dropout: float) -> tuple[int, float]:
    """The probability times 2^32, and what weights that are kept are multiplied by."""
    return round(dropout * 2**32), 1 / (1 - dropout)
