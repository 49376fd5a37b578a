# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Triton kernels for attention on FP8 operands: casts with a scale per head, forward and backward.

Names: B batches, H query heads, G of which share each of Hkv key-value heads, Sq queries, Sk keys, D head size.
Scales are float32 [B, Hkv] or [1], and what dequantization multiplies by.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from fxquant.compat import declare_written, is_hopper, statically_known_true, triton_workspace
from fxquant.kernels.triton_codes import four, in_words, magnitude, word

_NO_MASK, _BOOL_MASK, _ADDED_MASK = (tl.constexpr(i) for i in range(3))
_LOG2_E = tl.constexpr(math.log2(math.e))
_LN_2 = tl.constexpr(math.log(2))
_P_LOG = tl.constexpr(8.0)
"""log2 of what probabilities are multiplied by before their cast, so that small ones are not lost."""
_KEYS = 16
"""Keys of a transposed v are padded to a multiple of this, and of every 16 their order is 0 1 8 9, 2 3 10 11,
4 5 12 13, 6 7 14 15: Hopper's FP8 multiplication wants four neighbouring columns of P in a thread, where the product
that computes P leaves two pairs 8 columns apart. (FlashAttention-3, section 3.3.)"""
HEAD_DIMS = (64, 128, 256)
_E4M3_MAX = 448.0
_LEAST_AMAX = 1e-12


@triton.jit
def _head_amax(
    x, first, length, row_step, STEPS: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """The bits of the amax, NaN ignored, of STEPS times ROWS rows of a head: magnitudes are ordered as they are."""
    largest = tl.zeros((ROWS, D), tl.float32)
    for step in range(STEPS):
        row = first + step * ROWS + tl.arange(0, ROWS)
        at = row[:, None].to(tl.int64) * row_step + tl.arange(0, D)[None, :]
        tile = tl.load(x + at, mask=row[:, None] < length, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, magnitude(tile))
    return tl.max(tl.max(largest, axis=1), axis=0).to(tl.int32, bitcast=True)


@triton.jit
def _head_cast(
    x, out, first, scale, length, padded, row_step, TRANSPOSED: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Casts ROWS rows of a head. Bytes are put together as words of four."""
    row = first + tl.arange(0, ROWS)
    at = row[:, None].to(tl.int64) * row_step + tl.arange(0, D)[None, :]
    tile = tl.load(x + at, mask=row[:, None] < length, other=0.0).to(tl.float32)
    words = in_words(tile * scale, False, ROWS, D)
    out = out.to(tl.pointer_type(tl.uint32), bitcast=True)
    if TRANSPOSED:
        out += first // 4
        words = tl.reshape(tl.trans(words), (D // 4, ROWS // 16, 2, 4, 2))  # see _KEYS
        words = tl.reshape(tl.permute(words, (0, 1, 3, 2, 4)), (D // 4, ROWS))
        a, b, c, d = four(words, D // 4, ROWS // 4)
        quads = tl.arange(0, ROWS // 4)
        mask = (first + 4 * quads)[None, :] < padded
        for i in tl.static_range(4):
            channel = 4 * tl.arange(0, D // 4) + i
            tl.store(out + (channel[:, None] * (padded // 4) + quads[None, :]), word(a, b, c, d, 8 * i), mask=mask)
    else:
        out += first.to(tl.int64) * (D // 4)
        at = tl.arange(0, ROWS)[:, None] * (D // 4) + tl.arange(0, D // 4)[None, :]
        tl.store(out + at, words, mask=row[:, None] < length)


@triton.jit
def _head_scale(bits, FMAX: tl.constexpr, LEAST: tl.constexpr):
    """What a head is multiplied by, from the bits of its amax."""
    amax = bits.to(tl.float32, bitcast=True)
    return tl.where((amax > LEAST) & (amax < float("inf")), tl.div_rn(FMAX, amax), 1.0)


@triton.jit
def head_amax_kernel(
    x, amax, heads, groups, length, batch_step, head_step, row_step,
    STEPS: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """The bits of the amaxes of each `groups` heads of x [B, H, S, D], into zeroed int32 [B, H / groups]."""
    blocks = tl.cdiv(length, ROWS * STEPS)
    head = tl.program_id(0) // blocks
    first = (tl.program_id(0) % blocks) * (ROWS * STEPS)
    source = x + (head // heads).to(tl.int64) * batch_step + (head % heads).to(tl.int64) * head_step
    tl.atomic_max(amax + head // groups, _head_amax(source, first, length, row_step, STEPS, ROWS, D), sem="relaxed")


@triton.jit
def head_cast_kernel(
    x, data, scale_inv, given, heads, groups, length, padded, batch_step, head_step, row_step,
    TRANSPOSED: tl.constexpr, FMAX: tl.constexpr, LEAST: tl.constexpr,
    ROWS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """x [B, H, S, D] times FMAX / amax, given as bits, as e4m3 [B, H, S, D] or [B, H, D, padded].

    From the end, which the L2 cache still holds from when the amaxes were taken.
    """
    blocks = tl.cdiv(padded, ROWS)
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    head = index // blocks
    first = (index % blocks) * ROWS
    scale = _head_scale(tl.load(given + head // groups), FMAX, LEAST)
    if (first == 0) & (head % groups == 0):
        tl.store(scale_inv + head // groups, tl.div_rn(1.0, scale))
    source = x + (head // heads).to(tl.int64) * batch_step + (head % heads).to(tl.int64) * head_step
    out = data + head.to(tl.int64) * padded * D
    _head_cast(source, out, first, scale, length, padded, row_step, TRANSPOSED, ROWS, D)


@triton.jit
def _masked(
    s, rows, columns, q_len, kv_len, mask, row_step, column_step, CAUSAL: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Scores in units of log2 with -inf where a query does not see a key. `rows` and `columns` broadcast."""
    seen = columns < kv_len
    if CAUSAL:
        seen = seen & (columns <= rows)
    if MASK != _NO_MASK:
        at = mask + (rows.to(tl.int64) * row_step + columns.to(tl.int64) * column_step)
        there = (rows < q_len) & (columns < kv_len)
        if MASK == _BOOL_MASK:
            seen = seen & (tl.load(at, mask=there, other=0) != 0)
        else:
            s += tl.load(at, mask=there, other=0.0).to(tl.float32) * _LOG2_E
    return tl.where(seen, s, float("-inf"))


@triton.jit
def _times_values(acc, p, values, j, BM: tl.constexpr, BN: tl.constexpr):
    """acc + p v of the tile of keys at j, p [BM, BN] with its columns in the order of v's keys and rounded to e4m3."""
    p = tl.reshape(tl.permute(tl.reshape(p, (BM, BN // 16, 2, 4, 2)), (0, 1, 3, 2, 4)), (BM, BN))
    return tl.dot(p.to(tl.float8e4nv), values.load([0, j]).T, acc)


@triton.jit
def _masked_step(
    acc, total, most, q, keys, values, j, factor, rows, q_len, kv_len, mask, mask_row_step, mask_column_step,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One tile of keys under a mask. `most` is the running maximum of scores in units of log2."""
    s = tl.dot(q, keys.load([j, 0]).T) * factor
    columns = j + tl.arange(0, BN)
    s = _masked(s, rows[:, None], columns[None, :], q_len, kv_len, mask, mask_row_step, mask_column_step, CAUSAL, MASK)
    new = tl.maximum(most, tl.max(s, 1))
    finite = tl.where(new == float("-inf"), 0.0, new)  # a row may have seen no key yet
    alpha = tl.exp2(most - finite)
    p = tl.exp2(s - (finite - _P_LOG)[:, None])
    total = total * alpha + tl.sum(p, 1)
    return _times_values(acc * alpha[:, None], p, values, j, BM, BN), total, new


@triton.jit
def _lagged_step(acc, total, most, s, p, q, keys, values, j, factor, BM: tl.constexpr, BN: tl.constexpr):
    """Multiplies the probabilities of the tile before last with v, and makes those of the last tile of keys before j
    while the scores of the tile at j are computed.

    Triton waits for the first product at once, and by that for the scores that came from the step before; the second
    it lets run on, since nothing in this step reads it. Everything that reads s stands before the second product, or
    ptxas would let each instruction of it wait for the one before (warning C7514).
    """
    acc = _times_values(acc, p, values, tl.maximum(j - 2 * BN, 0), BM, BN)
    new = tl.maximum(most, tl.max(s, 1) * factor)
    alpha = tl.exp2(most - new)
    exponent = s * factor - (new - _P_LOG)[:, None]
    s = tl.dot(q, keys.load([j, 0]).T)
    p = tl.exp2(exponent)
    total = total * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]
    return acc, total, new, s, p


@triton.jit
def fprop_kernel(
    q, k, v, out, lse, q_scale, k_scale, v_scale, mask, scale, heads, kv_heads, batch_heads, q_len, kv_len, v_len,
    most_heads, mask_batch_step, mask_head_step, mask_row_step, mask_column_step,
    PER_HEAD: tl.constexpr, CAUSAL: tl.constexpr, EVEN: tl.constexpr, MASK: tl.constexpr, STAGES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """One tile of BM queries of one head. v is transposed: [B, Hkv, D, v_len].

    Those of `most_heads` heads, whose keys and values fit the L2 cache, come first, and of these the ones that see most
    keys. `scale`, in units of log2, is float64 where Inductor launches. Without a mask only the last tile of keys can
    hold what a query does not see, for which BN is not less than BM.
    """
    blocks = tl.cdiv(q_len, BM)
    together = tl.maximum(most_heads, 1)
    first_head = tl.program_id(0) // (blocks * together) * together
    within = tl.program_id(0) - first_head * blocks
    width = tl.minimum(batch_heads - first_head, together)
    head = first_head + within % width
    block = within // width
    if CAUSAL:
        block = blocks - 1 - block
    batch = head // heads
    kv_head = batch * kv_heads + head % heads // (heads // kv_heads)
    at_scale = kv_head if PER_HEAD else 0
    factor = (tl.load(q_scale + at_scale) * tl.load(k_scale + at_scale) * scale).to(tl.float32)
    queries = tl.make_tensor_descriptor(q + head.to(tl.int64) * q_len * D, [q_len, D], [D, 1], [BM, D])
    keys = tl.make_tensor_descriptor(k + kv_head.to(tl.int64) * kv_len * D, [kv_len, D], [D, 1], [BN, D])
    values = tl.make_tensor_descriptor(v + kv_head.to(tl.int64) * v_len * D, [D, v_len], [v_len, 1], [D, BN])
    first = block * BM
    rows = first + tl.arange(0, BM)
    most = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    query = queries.load([first, 0])
    end = kv_len
    if CAUSAL:
        end = tl.minimum(kv_len, first + BM)
    if MASK == _NO_MASK:
        s = tl.dot(query, keys.load([0, 0]).T)
        p = tl.zeros((BM, BN), tl.float32)
        for j in tl.range(BN, end, BN, num_stages=STAGES):
            acc, total, most, s, p = _lagged_step(acc, total, most, s, p, query, keys, values, j, factor, BM, BN)
        last = (end - 1) // BN * BN
        acc = _times_values(acc, p, values, tl.maximum(last - BN, 0), BM, BN)
        if CAUSAL or not EVEN:
            columns = last + tl.arange(0, BN)
            s = _masked(s, rows[:, None], columns[None, :], q_len, kv_len, 0, 0, 0, CAUSAL, MASK)
        new = tl.maximum(most, tl.max(s, 1) * factor)
        alpha = tl.exp2(most - new)
        p = tl.exp2(s * factor - (new - _P_LOG)[:, None])
        total = total * alpha + tl.sum(p, 1)
        acc = _times_values(acc * alpha[:, None], p, values, last, BM, BN)
        most = new
    else:
        mask += batch.to(tl.int64) * mask_batch_step + (head % heads).to(tl.int64) * mask_head_step
        for j in tl.range(0, end, BN, num_stages=STAGES):
            acc, total, most = _masked_step(
                acc, total, most, query, keys, values, j, factor, rows, q_len, kv_len, mask, mask_row_step,
                mask_column_step, CAUSAL, MASK, BM, BN,
            )  # fmt: skip
    inverse = tl.load(v_scale + at_scale) / total
    if MASK != _NO_MASK:
        inverse = tl.where(total > 0, inverse, 0.0)
    acc = acc * inverse[:, None]
    at = out + (head.to(tl.int64) * q_len + first) * D + (tl.arange(0, BM)[:, None] * D + tl.arange(0, D)[None, :])
    tl.store(at, acc.to(out.dtype.element_ty), mask=rows[:, None] < q_len)
    tl.store(lse + head.to(tl.int64) * q_len + rows, (most + tl.log2(total) - _P_LOG) * _LN_2, mask=rows < q_len)


@triton.jit
def _tile(source, head, first, ROWS: tl.constexpr, D: tl.constexpr):
    """Rows of one head from a descriptor of [heads, S, D]; zeros past the end."""
    return tl.reshape(source.load([head, first, 0]), (ROWS, D))


@triton.jit
def dkdv_kernel(
    q, k, v, do, q_wide, do_wide, log_sum, delta, dk, dv, q_scale, k_scale, v_scale, do_scale, mask, scale, heads,
    kv_heads, batches, q_len, kv_len, mask_batch_step, mask_head_step, mask_row_step, mask_column_step,
    PER_HEAD: tl.constexpr, CAUSAL: tl.constexpr, EVEN: tl.constexpr, MASK: tl.constexpr, STAGES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of BN keys, over the queries of all heads that share them, BM at a time.

    q_wide holds the codes of q, do_wide the unquantized do, both in bfloat16; log_sum is the log-sum-exp in units of
    log2, infinite where there is nothing. Keys are rows here, queries columns.
    """
    blocks = tl.cdiv(kv_len, BN)
    kv_head = tl.program_id(0) // blocks
    first = (tl.program_id(0) % blocks) * BN
    batch = kv_head // kv_heads
    group = heads // kv_heads
    at_scale = kv_head if PER_HEAD else 0
    q_factor = (tl.load(q_scale + at_scale) * scale).to(tl.float32)
    factor = q_factor * tl.load(k_scale + at_scale) * _LOG2_E
    v_factor = tl.load(v_scale + at_scale)
    queries = tl.make_tensor_descriptor(q, [batches * heads, q_len, D], [q_len * D, D, 1], [1, BM, D])
    wide_queries = tl.make_tensor_descriptor(q_wide, [batches * heads, q_len, D], [q_len * D, D, 1], [1, BM, D])
    grads = tl.make_tensor_descriptor(do, [batches * heads, q_len, D], [q_len * D, D, 1], [1, BM, D])
    wide_grads = tl.make_tensor_descriptor(do_wide, [batches * heads, q_len, D], [q_len * D, D, 1], [1, BM, D])
    keys = tl.make_tensor_descriptor(k, [batches * kv_heads, kv_len, D], [kv_len * D, D, 1], [1, BN, D])
    values = tl.make_tensor_descriptor(v, [batches * kv_heads, kv_len, D], [kv_len * D, D, 1], [1, BN, D])
    key = _tile(keys, kv_head, first, BN, D)
    value = _tile(values, kv_head, first, BN, D)
    columns = first + tl.arange(0, BN)
    acc_k = tl.zeros((BN, D), tl.float32)
    acc_v = tl.zeros((BN, D), tl.float32)
    start = 0
    if CAUSAL:
        start = first // BM
    steps = tl.maximum(tl.cdiv(q_len, BM) - start, 0)
    for i in tl.range(0, group * steps, num_stages=STAGES):
        within = (kv_head % kv_heads) * group + i // steps
        head = batch * heads + within
        j = (start + i % steps) * BM
        rows = j + tl.arange(0, BM)
        s = tl.dot(key, _tile(queries, head, j, BM, D).T) * factor
        if CAUSAL or MASK != _NO_MASK or not EVEN:
            s = _masked(
                s, rows[None, :], columns[:, None], q_len, kv_len,
                mask + (batch.to(tl.int64) * mask_batch_step + within.to(tl.int64) * mask_head_step), mask_row_step,
                mask_column_step, CAUSAL, MASK,
            )  # fmt: skip
        at = head.to(tl.int64) * q_len + rows
        p = tl.exp2(s - tl.load(log_sum + at, mask=rows < q_len, other=float("inf"))[None, :])
        acc_v = tl.dot(p.to(tl.bfloat16), _tile(wide_grads, head, j, BM, D), acc_v)
        dp = tl.dot(value, _tile(grads, head, j, BM, D).T) * (tl.load(do_scale + head) * v_factor)
        ds = p * (dp - tl.load(delta + at, mask=rows < q_len, other=0.0)[None, :])
        acc_k = tl.dot(ds.to(tl.bfloat16), _tile(wide_queries, head, j, BM, D), acc_k)
    at = (kv_head.to(tl.int64) * kv_len + first) * D + (tl.arange(0, BN)[:, None] * D + tl.arange(0, D)[None, :])
    tl.store(dk + at, (acc_k * q_factor).to(dk.dtype.element_ty), mask=columns[:, None] < kv_len)
    tl.store(dv + at, acc_v.to(dv.dtype.element_ty), mask=columns[:, None] < kv_len)


@triton.jit
def dq_kernel(
    q, k, v, do, k_wide, log_sum, delta, dq, q_scale, k_scale, v_scale, do_scale, mask, scale, heads, kv_heads, q_len,
    kv_len, mask_batch_step, mask_head_step, mask_row_step, mask_column_step,
    PER_HEAD: tl.constexpr, CAUSAL: tl.constexpr, EVEN: tl.constexpr, MASK: tl.constexpr, STAGES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """dq of one tile of BM queries, over the keys, BN at a time. k_wide holds the codes of k in bfloat16."""
    blocks = tl.cdiv(q_len, BM)
    head = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    if CAUSAL:
        block = blocks - 1 - block
    first = block * BM
    batch = head // heads
    kv_head = batch * kv_heads + head % heads // (heads // kv_heads)
    at_scale = kv_head if PER_HEAD else 0
    k_factor = (tl.load(k_scale + at_scale) * scale).to(tl.float32)
    factor = k_factor * tl.load(q_scale + at_scale) * _LOG2_E
    v_factor = tl.load(v_scale + at_scale) * tl.load(do_scale + head)
    wide_head = head.to(tl.int64)
    wide_kv = kv_head.to(tl.int64) * kv_len * D
    queries = tl.make_tensor_descriptor(q + wide_head * q_len * D, [q_len, D], [D, 1], [BM, D])
    grads = tl.make_tensor_descriptor(do + wide_head * q_len * D, [q_len, D], [D, 1], [BM, D])
    keys = tl.make_tensor_descriptor(k + wide_kv, [kv_len, D], [D, 1], [BN, D])
    wide_keys = tl.make_tensor_descriptor(k_wide + wide_kv, [kv_len, D], [D, 1], [BN, D])
    values = tl.make_tensor_descriptor(v + wide_kv, [kv_len, D], [D, 1], [BN, D])
    query = queries.load([first, 0])
    grad = grads.load([first, 0])
    rows = first + tl.arange(0, BM)
    at = wide_head * q_len + rows
    minus = tl.load(log_sum + at, mask=rows < q_len, other=float("inf"))
    mean = tl.load(delta + at, mask=rows < q_len, other=0.0)
    if MASK != _NO_MASK:
        mask += batch.to(tl.int64) * mask_batch_step + (head % heads).to(tl.int64) * mask_head_step
    acc = tl.zeros((BM, D), tl.float32)
    end = kv_len
    if CAUSAL:
        end = tl.minimum(kv_len, first + BM)
    for j in tl.range(0, end, BN, num_stages=STAGES):
        s = tl.dot(query, keys.load([j, 0]).T) * factor
        if CAUSAL or MASK != _NO_MASK or not EVEN:
            columns = j + tl.arange(0, BN)
            s = _masked(
                s, rows[:, None], columns[None, :], q_len, kv_len, mask, mask_row_step, mask_column_step, CAUSAL, MASK
            )
        p = tl.exp2(s - minus[:, None])
        dp = tl.dot(grad, values.load([j, 0]).T) * v_factor
        ds = p * (dp - mean[:, None])
        acc = tl.dot(ds.to(tl.bfloat16), wide_keys.load([j, 0]), acc)
    at = dq + wide_head * q_len * D + (rows[:, None] * D + tl.arange(0, D)[None, :])
    tl.store(at, (acc * k_factor).to(dq.dtype.element_ty), mask=rows[:, None] < q_len)


@dataclass(frozen=True, kw_only=True)
class _Config:
    """How a forward is tiled and launched."""

    block_m: int = 64
    block_n: int = 128
    warps: int = 4
    stages: int = 2
    cached: int = 4 << 20
    """Bytes of keys and values that are worked on at a time."""


def _config(head_dim: int, has_mask: bool) -> _Config:
    """The quickest of those tried on an H100 (docs/performance.md)."""
    if has_mask:
        return _Config(block_n=64 if head_dim == 256 else 32)
    return _Config(block_n=64 if head_dim == 256 else 128)


_KEY_TILES = {64: (64, 64, 4, 2), 128: (64, 64, 4, 2), 256: (32, 64, 8, 2)}
"""Queries of a step and keys of a program of `dkdv_kernel`, its warps and stages, by head size."""
_QUERY_TILES = {64: (128, 128, 8, 2), 128: (128, 128, 8, 2), 256: (128, 64, 8, 2)}
"""Queries of a program and keys of a step of `dq_kernel`, its warps and stages."""


def supports(
    *, head_dim: int, kv_len: int | torch.SymInt, causal: bool, has_mask: bool, dropout: float, dtype: torch.dtype,
    device: torch.device,
) -> bool:  # fmt: skip
    """Whether `forward` and `backward` can run such an attention, of operands of this dtype on this device."""
    if dropout or head_dim not in HEAD_DIMS or dtype not in (torch.bfloat16, torch.float16):
        return False
    if statically_known_true(kv_len == 0):
        return False
    return device.type == "cuda" and (not torch.cuda.is_available() or is_hopper(device))


def quantize_heads(x: Tensor, groups: int, transposed: bool) -> tuple[Tensor, Tensor]:
    """Quantizes x [B, H, S, D] with one scale for each `groups` heads: e4m3, and the scales' inverse [B, H / groups].

    The payload is [B, H, S, D]; with `transposed` [B, H, D, Sp], Sp being S padded with zeros to a multiple of 16, and
    its keys in an order of their own (`_KEYS`). A scale is 448 / amax, NaN ignored; 1 where the amax is not above 1e-12
    or infinite. The last dimension of x is dense.
    """
    batches, heads, length = x.shape[:3]
    head_dim = int(x.shape[3])  # a constant of the kernels
    padded = triton.cdiv(length, _KEYS) * _KEYS if transposed else length
    shape = (batches, heads, head_dim, padded) if transposed else (batches, heads, length, head_dim)
    data = torch.empty(shape, dtype=torch.float8_e4m3fn, device=x.device)
    scale_inv = torch.empty((batches, heads // groups), dtype=torch.float32, device=x.device)
    amax = torch.zeros((batches, heads // groups), dtype=torch.int32, device=x.device)
    steps, amax_rows = 8, 4096 // head_dim
    rows = 64 if transposed else 8192 // head_dim
    grid = (triton.cdiv(length, amax_rows * steps) * (batches * heads),)
    wrap_triton(head_amax_kernel)[grid](
        x, amax, heads, groups, length, *x.stride()[:3], steps, amax_rows, head_dim, num_warps=4
    )
    grid = (triton.cdiv(padded, rows) * (batches * heads),)
    wrap_triton(head_cast_kernel)[grid](
        x, data, scale_inv, amax, heads, groups, length, padded, *x.stride()[:3], transposed,
        _E4M3_MAX, _LEAST_AMAX, rows, head_dim, num_warps=4,
    )  # fmt: skip
    return data, scale_inv


def forward(
    q: Tensor, k: Tensor, v: Tensor, q_scale_inv: Tensor, k_scale_inv: Tensor, v_scale_inv: Tensor, *,
    causal: bool, scale: float, out_dtype: torch.dtype, mask: Tensor | None = None, config: _Config | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """softmax(q k^T * scale + mask) v of e4m3 operands: o [B, H, Sq, D] and the log-sum-exp [B, H, Sq] in float32.

    q [B, H, Sq, D], k [B, Hkv, Sk, D] and v [B, Hkv, D, Sp] (see `quantize_heads`) are contiguous. `causal` lets query
    i see keys up to i; `mask` broadcasts to [B, H, Sq, Sk] and is boolean, True where a key is seen, or added. A row
    that sees nothing gives zeros, and -inf. P is rounded to e4m3 times 256, and divided by the sum of what it was
    before. Raises ValueError for a scale that is not positive.
    """
    if not scale > 0:
        raise ValueError(f"attention in FP8 needs a positive softmax scale, not {scale}")
    batches, heads, q_len = q.shape[:3]
    head_dim = int(q.shape[3])  # a constant of the kernels
    kv_heads, kv_len, v_len = k.shape[1], k.shape[2], v.shape[3]
    config = config or _config(head_dim, mask is not None)
    even = statically_known_true(kv_len % config.block_n == 0)
    out = torch.empty((batches, heads, q_len, head_dim), dtype=out_dtype, device=q.device)
    lse = torch.empty((batches, heads, q_len), dtype=torch.float32, device=q.device)
    kind, mask, mask_steps = _mask_arguments(mask, q)
    grid = (triton.cdiv(q_len, config.block_m) * (batches * heads),)
    together = config.cached // (2 * head_dim * kv_len) * (heads // kv_heads)
    with triton_workspace(q.device):
        wrap_triton(fprop_kernel)[grid](
            q, k, v, out, lse, q_scale_inv, k_scale_inv, v_scale_inv, mask, scale * _LOG2_E.value, heads, kv_heads,
            batches * heads, q_len, kv_len, v_len, together, *mask_steps, q_scale_inv.ndim > 1, causal, even, kind,
            config.stages, config.block_m, config.block_n, head_dim,
            num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip
    return out, lse


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, q_scale_inv: Tensor, k_scale_inv: Tensor,
    v_scale_inv: Tensor, *, causal: bool, scale: float, mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients (dq, dk, dv) of `forward`, of the dtype of do, from e4m3 q, k and v [B, Hkv, Sk, D].

    do [B, H, Sq, D] is quantized with a scale per query head. What is rounded: S = q k^T and dP = do v^T multiply
    e4m3 operands, and are float32. For dv, P is rounded to bfloat16, and multiplied with do as it came, in
    bfloat16; for dq and dk, dS = P (dP - rowsum(do o)) is rounded to bfloat16, and multiplied with the dequantized
    k and q. Sums are float32. The tests hold it to the same in plain
    torch (tests/attention_rounding.py).
    """
    batches, heads, q_len = q.shape[:3]
    head_dim = int(q.shape[3])  # a constant of the kernels
    kv_heads, kv_len = k.shape[1], k.shape[2]
    do = do.contiguous()
    do8, do_scale_inv = quantize_heads(do, 1, False)
    delta = (do.float() * o.float()).sum(-1)
    log_sum = torch.where(lse == -math.inf, math.inf, lse) * _LOG2_E.value  # a row that saw nothing has no P
    dq, dk, dv = (torch.empty(x.shape, dtype=do.dtype, device=do.device) for x in (q, k, k))
    kind, mask, mask_steps = _mask_arguments(mask, q)
    per_head = q_scale_inv.ndim > 1
    with triton_workspace(q.device):
        block_m, block_n, warps, stages = _KEY_TILES[head_dim]
        even = statically_known_true(kv_len % block_n == 0)
        grid = (triton.cdiv(kv_len, block_n) * (batches * kv_heads),)
        wrap_triton(dkdv_kernel)[grid](
            q, k, v, do8, q.to(torch.bfloat16), do.to(torch.bfloat16), log_sum, delta, dk, dv, q_scale_inv, k_scale_inv,
            v_scale_inv, do_scale_inv, mask, scale, heads, kv_heads, batches, q_len, kv_len, *mask_steps, per_head,
            causal, even, kind, stages, block_m, block_n, head_dim, num_warps=warps, num_stages=stages,
        )  # fmt: skip
        block_m, block_n, warps, stages = _QUERY_TILES[head_dim]
        even = statically_known_true(kv_len % block_n == 0)
        grid = (triton.cdiv(q_len, block_m) * (batches * heads),)
        wrap_triton(dq_kernel)[grid](
            q, k, v, do8, k.to(torch.bfloat16), log_sum, delta, dq, q_scale_inv, k_scale_inv, v_scale_inv, do_scale_inv,
            mask, scale, heads, kv_heads, q_len, kv_len, *mask_steps, per_head, causal, even, kind, stages,
            block_m, block_n, head_dim, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return dq, dk, dv


def _mask_arguments(mask: Tensor | None, q: Tensor) -> tuple[int, Tensor, tuple[Any, ...]]:
    """The kind of a mask, the mask and its strides over [B, H, Sq, Sk]; in the place of none, q."""
    if mask is None:
        return _NO_MASK.value, q, (0, 0, 0, 0)
    kind = _BOOL_MASK if mask.dtype == torch.bool else _ADDED_MASK
    axes = zip(mask.shape, mask.stride(), strict=True)
    steps = [0 if statically_known_true(size == 1) else step for size, step in axes]
    return kind.value, mask, (*[0] * (4 - len(steps)), *steps)


_WRITTEN = {
    head_amax_kernel: ["amax"],
    head_cast_kernel: ["data", "scale_inv"],
    fprop_kernel: ["out", "lse"],
    dkdv_kernel: ["dk", "dv"],
    dq_kernel: ["dq"],
}


def written(arguments: Mapping[str, Any]) -> list[str]:
    """The names of the arguments that a launch of a kernel of this file writes."""
    return next((names for names in _WRITTEN.values() if arguments.keys() >= set(names)), [])


for _kernel in _WRITTEN:
    declare_written(_kernel, written)
