# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""The Triton kernels before and behind the backward of attention in Gluon."""

from __future__ import annotations

import triton
import triton.language as tl

from fxquant.kernels.attention.triton_scores import LOG2_E


@triton.jit
def row_terms_kernel(do, o, lse, log_sum, delta, q_len, tiles, ROWS: tl.constexpr, D: tl.constexpr):
    """Stores the log-sum-exp in units of log2, infinite where there is nothing, and rowsum(do o), of ROWS rows."""
    head = tl.program_id(0) // tiles
    first = tl.program_id(0) % tiles * ROWS
    row = tl.arange(0, ROWS)
    inside = first + row < q_len
    start = head.to(tl.int64) * q_len + first
    at = row[:, None] * D + tl.arange(0, D)[None, :]
    x = tl.load(do + start * D + at, mask=inside[:, None], other=0.0).to(tl.float32)
    y = tl.load(o + start * D + at, mask=inside[:, None], other=0.0).to(tl.float32)
    sums = tl.load(lse + start + row, mask=inside, other=float("-inf"))
    to = tl.program_id(0).to(tl.int64) * ROWS + row
    tl.store(log_sum + to, tl.where(sums == float("-inf"), float("inf"), sums * LOG2_E))
    tl.store(delta + to, tl.sum(x * y, 1))


@triton.jit
def gather_kernel(parts, dq, scale, q_len, tiles):
    """Stores half of the columns of a tile of dq, times the scale, from the order that `_add` describes."""
    index = tl.program_id(0) // 2
    head = index // tiles
    first = index % tiles * 64
    x = tl.load(parts + tl.program_id(0).to(tl.int64) * 4096 + tl.arange(0, 4096)) * scale
    x = tl.reshape(tl.permute(tl.reshape(x, (8, 4, 8, 4, 2, 2)), (1, 4, 2, 0, 3, 5)), (64, 64))
    row = tl.arange(0, 64)
    at = dq + (head.to(tl.int64) * q_len + first) * 128 + tl.program_id(0) % 2 * 64
    tl.store(
        at + (row[:, None] * 128 + tl.arange(0, 64)[None, :]), x.to(dq.dtype.element_ty),
        mask=(first + row < q_len)[:, None],
    )  # fmt: skip
