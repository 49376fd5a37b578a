# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""The scores of attention that a query sees: masks, causality and dropout, in Triton kernels.

Inductor copies the source of what a kernel calls under the name it is called by: import these by their own names.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from fxquant.kernels.attention.scores import Mask

NO_MASK, BOOL_MASK, ADDED_MASK, KEY_MASK = (tl.constexpr(mask.value) for mask in Mask)
LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def masked(s, rows, columns, q_len, kv_len, mask, row_step, column_step, CAUSAL: tl.constexpr, MASK: tl.constexpr):
    """Returns scores in units of log2 with -inf where a query does not see a key. `rows` and `columns` broadcast."""
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
    """Returns True for the weights of rows [ROWS], numbered over the batch, and KEYS keys from `first` on that stay.

    Dropout is that of `attention.reference.kept`; DROPPED is the probability of the others times 2^32.
    """
    zero = tl.zeros((ROWS, KEYS // 4), tl.int32)
    place = first // 4 + tl.arange(0, KEYS // 4)
    a, b, c, d = tl.philox(seed, zero + place[None, :], zero + row[:, None], zero, zero)
    words = tl.join(tl.join(a, c), tl.join(b, d))
    return tl.reshape(words >= tl.full([], DROPPED, tl.uint32), (ROWS, KEYS))
