# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Triton kernels for attention on FP8 operands, forward and backward, and on dequantized ones.

Names: B batches, H query heads, G of which share each of Hkv key-value heads, Sq queries, Sk keys, D head size.
Scales are what dequantization multiplies by, as `triton_head_cast` has them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from fxquant.compat.device import triton_workspace
from fxquant.compat.patches import declare_written
from fxquant.compat.values import statically_known_true
from fxquant.kernels.attention.choice import Scaling
from fxquant.kernels.attention.triton_cast import (  # fmt: skip
    BLOCK,
    BLOCK_LEN,
    KINDS,
    dequantize_qkv,
    quantize_heads,
    scale_place,
)
from fxquant.kernels.cast.codes import INTERPRETED, raise_amax

_NO_MASK, _BOOL_MASK, _ADDED_MASK, _KEY_MASK = (tl.constexpr(i) for i in range(4))
"""What hides scores: nothing, a boolean or an added [Sq, Sk], a boolean [Sk] that is the same for all queries."""
_E4M3, _WIDE, _WIDE_TWICE = (tl.constexpr(i) for i in range(3))
"""Operands of a backward: e4m3, or of 16 bits, with one do for both its products or one for each."""
_LOG2_E = tl.constexpr(math.log2(math.e))
_LN_2 = tl.constexpr(math.log(2))
_P_LOG = tl.constexpr(8.0)
"""log2 of what probabilities are multiplied by before their cast, so that small ones are not lost."""


@triton.jit
def _masked(
    s, rows, columns, q_len, kv_len, mask, row_step, column_step, CAUSAL: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Scores in units of log2 with -inf where a query does not see a key. `rows` and `columns` broadcast."""
    seen = columns < kv_len
    if CAUSAL:
        seen = seen & (columns <= rows)
    if MASK == _KEY_MASK:
        hidden = mask + columns.to(tl.int64) * column_step
        seen = seen & (tl.load(hidden, mask=columns < kv_len, other=0) != 0)
    elif MASK != _NO_MASK:
        at = mask + (rows.to(tl.int64) * row_step + columns.to(tl.int64) * column_step)
        there = (rows < q_len) & (columns < kv_len)
        if MASK == _BOOL_MASK:
            seen = seen & (tl.load(at, mask=there, other=0) != 0)
        else:
            s += tl.load(at, mask=there, other=0.0).to(tl.float32) * _LOG2_E
    return tl.where(seen, s, float("-inf"))


@triton.jit
def _survivors(seed, row, first, DROPPED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Which weights of rows [ROWS], numbered over the batch, and KEYS keys from `first` on dropout keeps.

    As `attention_reference.kept` has it; DROPPED is the probability of the others times 2^32.
    """
    zero = tl.zeros((ROWS, KEYS // 4), tl.int32)
    place = first // 4 + tl.arange(0, KEYS // 4)
    a, b, c, d = tl.philox(seed, zero + place[None, :], zero + row[:, None], zero, zero)
    words = tl.join(tl.join(a, c), tl.join(b, d))
    return tl.reshape(words >= tl.full([], DROPPED, tl.uint32), (ROWS, KEYS))


@triton.jit
def _times_values(acc, p, values, j, WIDE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """acc + p v of the tile of keys at j. In FP8 the columns of p [BM, BN] are put in the order of v's keys."""
    if WIDE:
        acc = tl.dot(p.to(values.dtype), values.load([j, 0]), acc)
    else:
        p = tl.reshape(tl.permute(tl.reshape(p, (BM, BN // 16, 2, 4, 2)), (0, 1, 3, 2, 4)), (BM, BN))
        acc = tl.dot(p.to(tl.float8e4nv), values.load([0, j]).T, acc)
    return acc


@triton.jit
def _masked_step(
    acc, total, most, unit, q, keys, values, k_scale, v_scale, j, q_factor, rows, q_len, kv_len, mask, mask_row_step,
    mask_column_step, seed, row,
    SCALING: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, DROPPED: tl.constexpr, WIDE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One tile of keys. `most` is the running maximum of scores, in units of log2, `unit` the scale of acc."""
    factor = q_factor
    own = unit
    if SCALING == BLOCK:
        factor = q_factor * tl.load(k_scale + j // BLOCK_LEN)
        own = tl.load(v_scale + j // BLOCK_LEN)
    s = tl.dot(q, keys.load([j, 0]).T) * factor
    columns = j + tl.arange(0, BN)
    s = _masked(s, rows[:, None], columns[None, :], q_len, kv_len, mask, mask_row_step, mask_column_step, CAUSAL, MASK)
    new = tl.maximum(most, tl.max(s, 1))
    finite = tl.where(new == float("-inf"), 0.0, new)  # a row may have seen no key yet
    alpha = tl.exp2(most - finite)
    p = tl.exp2(s - (finite - _P_LOG)[:, None])
    total = total * alpha + tl.sum(p, 1)
    if DROPPED > 0:
        p = tl.where(_survivors(seed, row, j, DROPPED, BM, BN), p, 0.0)
    if SCALING == BLOCK:
        alpha *= unit / own
    return _times_values(acc * alpha[:, None], p, values, j, WIDE, BM, BN), total, new, own


@triton.jit
def _without_hidden(s, j, kv_len, mask, mask_column_step, MASK: tl.constexpr, BN: tl.constexpr):
    """Scores of the tile of keys at j, -inf where a mask of keys hides them."""
    if MASK == _KEY_MASK:
        column = j + tl.arange(0, BN)
        seen = tl.load(mask + column.to(tl.int64) * mask_column_step, mask=column < kv_len, other=0)
        s = tl.where((seen != 0)[None, :], s, float("-inf"))
    return s


@triton.jit
def _finite(most, MASK: tl.constexpr):
    """Maxima to subtract: under a mask a row may have seen no key yet."""
    if MASK != _NO_MASK:
        most = tl.where(most == float("-inf"), 0.0, most)
    return most


@triton.jit
def _scale_at(place):
    """A scale, by an instruction that Triton does not pipeline: copies to shared memory cost a barrier a step."""
    if INTERPRETED:
        scale = tl.load(place)
    else:
        scale = tl.inline_asm_elementwise(
            "ld.global.nc.f32 $0, [$1];", "=f,l", [place.to(tl.int64)], dtype=tl.float32, is_pure=True, pack=1
        )
    return scale


@triton.jit
def _lagged_step(
    acc, total, most, unit, s, p, factor, q, keys, values, k_scale, v_scale, j, start, q_factor, kv_len, mask,
    mask_column_step,
    SCALING: tl.constexpr, MASK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Multiplies the probabilities of the tile before last with v, and makes those of the last tile of keys before j
    while the scores of the tile at j are computed. `factor` is that of s, `unit` the scale of the v that p meets.

    Triton waits for the first product at once, and by that for the scores that came from the step before; the second
    it lets run on, since nothing in this step reads it. Everything that reads s stands before the second product, or
    ptxas would let each instruction of it wait for the one before (warning C7514).
    """
    next_factor, next_unit = factor, unit
    if SCALING == BLOCK:
        next_factor = q_factor * _scale_at(k_scale + j // BLOCK_LEN)
        next_unit = _scale_at(v_scale + (j - BN) // BLOCK_LEN)
    acc = _times_values(acc, p, values, tl.maximum(j - 2 * BN, start), False, BM, BN)
    s = _without_hidden(s, j - BN, kv_len, mask, mask_column_step, MASK, BN)
    new = tl.maximum(most, tl.max(s, 1) * factor)
    finite = _finite(new, MASK)
    alpha = tl.exp2(most - finite)
    exponent = s * factor - (finite - _P_LOG)[:, None]
    s = tl.dot(q, keys.load([j, 0]).T)
    p = tl.exp2(exponent)
    total = total * alpha + tl.sum(p, 1)
    if SCALING == BLOCK:
        alpha *= unit / next_unit
    acc = acc * alpha[:, None]
    return acc, total, new, next_unit, s, p, next_factor


@triton.jit(do_not_specialize=["most_heads"])
def fprop_kernel(
    q, k, v, out, lse, s_amax, q_scale, k_scale, v_scale, mask, seen, seed, scale, heads, kv_heads, batch_heads, q_len,
    kv_len, v_len, most_heads, mask_batch_step, mask_head_step, mask_row_step, mask_column_step, seen_batch_step,
    seen_head_step,
    SCALING: tl.constexpr, CAUSAL: tl.constexpr, EVEN: tl.constexpr, MASK: tl.constexpr, DROPPED: tl.constexpr,
    RAISED: tl.constexpr, WIDE: tl.constexpr, RECORD: tl.constexpr, STAGES: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """One tile of BM queries of one head. v is transposed: [B, Hkv, D, v_len].

    Those of `most_heads` heads, whose keys and values fit the L2 cache, come first, and of these the ones that see most
    keys. `scale`, in units of log2, is float64 where Inductor launches. Without a mask only the last tile of keys can
    hold what a query does not see, for which BN is not less than BM. `seen` has the first key that a mask of keys
    leaves, and the one after the last. Under dropout, which keeps weights RAISED, the seed [1] is int64. WIDE: q, k
    and v [B, Hkv, Sk, D] are 16-bit values without scales. RECORD: the softmax's amax is taken into s_amax, float32.
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
    first = block * BM
    rows = first + tl.arange(0, BM)
    queries = tl.make_tensor_descriptor(q + head.to(tl.int64) * q_len * D, [q_len, D], [D, 1], [BM, D])
    keys = tl.make_tensor_descriptor(k + kv_head.to(tl.int64) * kv_len * D, [kv_len, D], [D, 1], [BN, D])
    if WIDE:
        values = tl.make_tensor_descriptor(v + kv_head.to(tl.int64) * kv_len * D, [kv_len, D], [D, 1], [BN, D])
        q_factor, unit = tl.cast(scale, tl.float32), 1.0
    else:
        values = tl.make_tensor_descriptor(v + kv_head.to(tl.int64) * v_len * D, [D, v_len], [v_len, 1], [D, BN])
        q_factor = (tl.load(q_scale + scale_place(kv_head, first, q_len, SCALING)) * scale).to(tl.float32)
        k_scale += scale_place(kv_head, 0, kv_len, SCALING)
        v_scale += scale_place(kv_head, 0, kv_len, SCALING)
        unit = tl.load(v_scale)
    factor = q_factor
    if not WIDE:
        factor = q_factor * tl.load(k_scale)
    if SCALING != BLOCK:
        q_factor = factor
    most = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    query = queries.load([first, 0])
    end = kv_len
    if CAUSAL:
        end = tl.minimum(kv_len, first + BM)
    start = 0
    if MASK == _KEY_MASK:
        seen += batch.to(tl.int64) * seen_batch_step + (head % heads).to(tl.int64) * seen_head_step
        start = tl.load(seen) // BN * BN
        end = tl.minimum(end, tl.load(seen + 1))
        end = tl.maximum(end, start + 1)  # a tile that is hidden as a whole, where the mask leaves nothing
    if MASK != _NO_MASK:
        mask += batch.to(tl.int64) * mask_batch_step + (head % heads).to(tl.int64) * mask_head_step
    if (MASK == _NO_MASK or MASK == _KEY_MASK) and DROPPED == 0 and not WIDE:
        if SCALING == BLOCK:
            factor = q_factor * tl.load(k_scale + start // BLOCK_LEN)
            unit = tl.load(v_scale + start // BLOCK_LEN)
        s = tl.dot(query, keys.load([start, 0]).T)
        p = tl.zeros((BM, BN), tl.float32)
        for j in tl.range(start + BN, end, BN, num_stages=STAGES):
            acc, total, most, unit, s, p, factor = _lagged_step(
                acc, total, most, unit, s, p, factor, query, keys, values, k_scale, v_scale, j, start, q_factor,
                kv_len, mask, mask_column_step, SCALING, MASK, BM, BN,
            )  # fmt: skip
        last = (end - 1) // BN * BN
        acc = _times_values(acc, p, values, tl.maximum(last - BN, start), WIDE, BM, BN)
        s = _without_hidden(s, last, kv_len, mask, mask_column_step, MASK, BN)
        if CAUSAL or not EVEN:
            columns = last + tl.arange(0, BN)
            s = _masked(s, rows[:, None], columns[None, :], q_len, kv_len, 0, 0, 0, CAUSAL, _NO_MASK)
        new = tl.maximum(most, tl.max(s, 1) * factor)
        finite = _finite(new, MASK)
        alpha = tl.exp2(most - finite)
        p = tl.exp2(s * factor - (finite - _P_LOG)[:, None])
        total = total * alpha + tl.sum(p, 1)
        if SCALING == BLOCK:
            own = tl.load(v_scale + last // BLOCK_LEN)
            alpha *= unit / own
            unit = own
        acc = _times_values(acc * alpha[:, None], p, values, last, WIDE, BM, BN)
        most = new
    else:
        draw = tl.full([], 0, tl.int64)
        if DROPPED > 0:
            draw = tl.load(seed)
        row = (head.to(tl.int64) * q_len + rows).to(tl.int32)
        for j in tl.range(start, end, BN, num_stages=STAGES):
            acc, total, most, unit = _masked_step(
                acc, total, most, unit, query, keys, values, k_scale, v_scale, j, q_factor, rows, q_len, kv_len, mask,
                mask_row_step, mask_column_step, draw, row, SCALING, CAUSAL, MASK, DROPPED, WIDE, BM, BN,
            )  # fmt: skip
    inverse = unit * RAISED / total
    if MASK != _NO_MASK:
        inverse = tl.where(total > 0, inverse, 0.0)
    acc = acc * inverse[:, None]
    at = out + (head.to(tl.int64) * q_len + first) * D + (tl.arange(0, BM)[:, None] * D + tl.arange(0, D)[None, :])
    tl.store(at, acc.to(out.dtype.element_ty), mask=rows[:, None] < q_len)
    tl.store(lse + head.to(tl.int64) * q_len + rows, (most + tl.log2(total) - _P_LOG) * _LN_2, mask=rows < q_len)
    if RECORD:  # the largest of a row's weights is exp2(_P_LOG) over their sum
        raise_amax(s_amax, tl.minimum(tl.max(tl.where((rows < q_len) & (total > 0), 256.0 / total, 0.0), 0), 1.0))


@triton.jit
def _tile(source, head, first, ROWS: tl.constexpr, D: tl.constexpr):
    """Rows of one head from a descriptor of [heads, S, D]; zeros past the end."""
    return tl.reshape(source.load([head, first, 0]), (ROWS, D))


@triton.jit
def dkdv_kernel(
    q, k, v, do, q_wide, do_wide, log_sum, delta, dk, dv, q_scale, k_scale, v_scale, do_scale, mask, seen, seed, scale,
    heads, kv_heads, batches, q_len, kv_len, mask_batch_step, mask_head_step, mask_row_step, mask_column_step,
    seen_batch_step, seen_head_step,
    SCALING: tl.constexpr, CAUSAL: tl.constexpr, EVEN: tl.constexpr, MASK: tl.constexpr, DROPPED: tl.constexpr,
    RAISED: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of BN keys, over the queries of all heads that share them, BM at a time.

    q_wide holds the values of q, do_wide the unquantized do, both of 16 bits; log_sum is the log-sum-exp in units of
    log2, infinite where there is nothing. Keys are rows here, queries columns. WIDE: q, k, v and do are 16-bit values
    too, q_wide is not read, and do_wide only where it is another.
    """
    blocks = tl.cdiv(kv_len, BN)
    kv_head = tl.program_id(0) // blocks
    first = (tl.program_id(0) % blocks) * BN
    batch = kv_head // kv_heads
    group = heads // kv_heads
    k_factor, v_factor = tl.cast(scale, tl.float32) * _LOG2_E, 1.0
    if not WIDE:
        k_factor *= tl.load(k_scale + scale_place(kv_head, first, kv_len, SCALING))
        v_factor = tl.load(v_scale + scale_place(kv_head, first, kv_len, SCALING))
        q_scale += scale_place(kv_head, 0, q_len, SCALING)
    factor = k_factor
    if SCALING != BLOCK and not WIDE:
        factor = k_factor * tl.load(q_scale)
    queries = tl.make_tensor_descriptor(q, [batches * heads, q_len, D], [q_len * D, D, 1], [1, BM, D])
    grads = tl.make_tensor_descriptor(do, [batches * heads, q_len, D], [q_len * D, D, 1], [1, BM, D])
    keys = tl.make_tensor_descriptor(k, [batches * kv_heads, kv_len, D], [kv_len * D, D, 1], [1, BN, D])
    values = tl.make_tensor_descriptor(v, [batches * kv_heads, kv_len, D], [kv_len * D, D, 1], [1, BN, D])
    if WIDE != _WIDE:
        wide_grads = tl.make_tensor_descriptor(do_wide, [batches * heads, q_len, D], [q_len * D, D, 1], [1, BM, D])
    if not WIDE:
        wide_queries = tl.make_tensor_descriptor(q_wide, [batches * heads, q_len, D], [q_len * D, D, 1], [1, BM, D])
    key = _tile(keys, kv_head, first, BN, D)
    value = _tile(values, kv_head, first, BN, D)
    columns = first + tl.arange(0, BN)
    acc_k = tl.zeros((BN, D), tl.float32)
    acc_v = tl.zeros((BN, D), tl.float32)
    start = 0
    if CAUSAL:
        start = first // BM
    steps = tl.maximum(tl.cdiv(q_len, BM) - start, 0)
    if MASK == _KEY_MASK:
        seen += batch.to(tl.int64) * seen_batch_step
        hidden = (first >= tl.load(seen + 1)) | (first + BN <= tl.load(seen))
        steps = tl.where(hidden & (seen_head_step == 0), 0, steps)  # a key that one head does not see another may
    draw = tl.full([], 0, tl.int64)
    if DROPPED > 0:
        draw = tl.load(seed)
    for i in tl.range(0, group * steps, num_stages=STAGES):
        within = (kv_head % kv_heads) * group + i // steps
        head = batch * heads + within
        j = (start + i % steps) * BM
        rows = j + tl.arange(0, BM)
        if SCALING == BLOCK:
            factor = k_factor * tl.load(q_scale + j // BLOCK_LEN)
        query = _tile(queries, head, j, BM, D)
        grad = _tile(grads, head, j, BM, D)
        s = tl.dot(key, query.T) * factor
        if CAUSAL or MASK != _NO_MASK or not EVEN:
            s = _masked(
                s, rows[None, :], columns[:, None], q_len, kv_len,
                mask + (batch.to(tl.int64) * mask_batch_step + within.to(tl.int64) * mask_head_step), mask_row_step,
                mask_column_step, CAUSAL, MASK,
            )  # fmt: skip
        at = head.to(tl.int64) * q_len + rows
        p = tl.exp2(s - tl.load(log_sum + at, mask=rows < q_len, other=float("inf"))[None, :])
        if WIDE:
            dp = tl.dot(value, grad.T)
        else:
            dp = tl.dot(value, grad.T) * (tl.load(do_scale + head) * v_factor)
        weights = p
        if DROPPED > 0:
            kept = tl.trans(_survivors(draw, at.to(tl.int32), first, DROPPED, BM, BN))
            weights = tl.where(kept, p * RAISED, 0.0)
            dp = tl.where(kept, dp * RAISED, 0.0)
        if WIDE == _WIDE:
            wide_grad = grad
        else:
            wide_grad = _tile(wide_grads, head, j, BM, D)
        if WIDE:
            wide_query = query
        else:
            wide_query = _tile(wide_queries, head, j, BM, D)
        acc_v = tl.dot(weights.to(wide_grad.dtype), wide_grad, acc_v)
        ds = p * (dp - tl.load(delta + at, mask=rows < q_len, other=0.0)[None, :])
        acc_k = tl.dot(ds.to(wide_query.dtype), wide_query, acc_k)
    at = (kv_head.to(tl.int64) * kv_len + first) * D + (tl.arange(0, BN)[:, None] * D + tl.arange(0, D)[None, :])
    acc_k = acc_k * tl.cast(scale, tl.float32)
    tl.store(dk + at, acc_k.to(dk.dtype.element_ty), mask=columns[:, None] < kv_len)
    tl.store(dv + at, acc_v.to(dv.dtype.element_ty), mask=columns[:, None] < kv_len)


@triton.jit
def dq_kernel(
    q, k, v, do, k_wide, log_sum, delta, dq, dp_amax, q_scale, k_scale, v_scale, do_scale, mask, seen, seed, scale,
    heads, kv_heads, q_len, kv_len, mask_batch_step, mask_head_step, mask_row_step, mask_column_step, seen_batch_step,
    seen_head_step,
    SCALING: tl.constexpr, CAUSAL: tl.constexpr, EVEN: tl.constexpr, MASK: tl.constexpr, DROPPED: tl.constexpr,
    RAISED: tl.constexpr, WIDE: tl.constexpr, RECORD: tl.constexpr, STAGES: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """dq of one tile of BM queries, over the keys, BN at a time. k_wide holds the values of k in 16 bits.

    RECORD: the amax of the gradient of q k^T is taken into dp_amax, float32 [1].
    """
    blocks = tl.cdiv(q_len, BM)
    head = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    if CAUSAL:
        block = blocks - 1 - block
    first = block * BM
    batch = head // heads
    kv_head = batch * kv_heads + head % heads // (heads // kv_heads)
    q_factor, v_factor = tl.cast(scale, tl.float32) * _LOG2_E, 1.0
    if not WIDE:
        q_factor *= tl.load(q_scale + scale_place(kv_head, first, q_len, SCALING))
        k_scale += scale_place(kv_head, 0, kv_len, SCALING)
        v_scale += scale_place(kv_head, 0, kv_len, SCALING)
        do_factor = tl.load(do_scale + head)
        v_factor = do_factor * tl.load(v_scale)
    factor = q_factor
    if SCALING != BLOCK and not WIDE:
        factor = q_factor * tl.load(k_scale)
    wide_head = head.to(tl.int64)
    wide_kv = kv_head.to(tl.int64) * kv_len * D
    queries = tl.make_tensor_descriptor(q + wide_head * q_len * D, [q_len, D], [D, 1], [BM, D])
    grads = tl.make_tensor_descriptor(do + wide_head * q_len * D, [q_len, D], [D, 1], [BM, D])
    keys = tl.make_tensor_descriptor(k + wide_kv, [kv_len, D], [D, 1], [BN, D])
    values = tl.make_tensor_descriptor(v + wide_kv, [kv_len, D], [D, 1], [BN, D])
    if not WIDE:
        wide_keys = tl.make_tensor_descriptor(k_wide + wide_kv, [kv_len, D], [D, 1], [BN, D])
    query = queries.load([first, 0])
    grad = grads.load([first, 0])
    rows = first + tl.arange(0, BM)
    at = wide_head * q_len + rows
    minus = tl.load(log_sum + at, mask=rows < q_len, other=float("inf"))
    mean = tl.load(delta + at, mask=rows < q_len, other=0.0)
    if MASK != _NO_MASK:
        mask += batch.to(tl.int64) * mask_batch_step + (head % heads).to(tl.int64) * mask_head_step
    acc = tl.zeros((BM, D), tl.float32)
    largest = tl.zeros((BM,), tl.float32)
    start = 0
    end = kv_len
    if CAUSAL:
        end = tl.minimum(kv_len, first + BM)
    if MASK == _KEY_MASK:
        seen += batch.to(tl.int64) * seen_batch_step + (head % heads).to(tl.int64) * seen_head_step
        start = tl.load(seen) // BN * BN
        end = tl.minimum(end, tl.load(seen + 1))
    draw = tl.full([], 0, tl.int64)
    if DROPPED > 0:
        draw = tl.load(seed)
    for j in tl.range(start, end, BN, num_stages=STAGES):
        if SCALING == BLOCK:
            factor = q_factor * tl.load(k_scale + j // BLOCK_LEN)
            v_factor = do_factor * tl.load(v_scale + j // BLOCK_LEN)
        key = keys.load([j, 0])
        s = tl.dot(query, key.T) * factor
        if CAUSAL or MASK != _NO_MASK or not EVEN:
            columns = j + tl.arange(0, BN)
            s = _masked(
                s, rows[:, None], columns[None, :], q_len, kv_len, mask, mask_row_step, mask_column_step, CAUSAL, MASK
            )
        p = tl.exp2(s - minus[:, None])
        dp = tl.dot(grad, values.load([j, 0]).T) * v_factor
        if DROPPED > 0:
            dp = tl.where(_survivors(draw, at.to(tl.int32), j, DROPPED, BM, BN), dp * RAISED, 0.0)
        ds = p * (dp - mean[:, None])
        if RECORD:
            largest = tl.maximum(largest, tl.max(tl.abs(ds), 1))  # of NaN and a number that is the number
        if WIDE:
            wide_key = key
        else:
            wide_key = wide_keys.load([j, 0])
        acc = tl.dot(ds.to(wide_key.dtype), wide_key, acc)
    at = dq + wide_head * q_len * D + (rows[:, None] * D + tl.arange(0, D)[None, :])
    tl.store(at, (acc * tl.cast(scale, tl.float32)).to(dq.dtype.element_ty), mask=rows[:, None] < q_len)
    if RECORD:
        raise_amax(dp_amax, tl.max(largest, 0) * tl.cast(scale, tl.float32))


@dataclass(frozen=True, kw_only=True)
class _Config:
    """How a forward is tiled and launched."""

    block_m: int = 64
    block_n: int = 128
    warps: int = 4
    stages: int = 2
    cached: int = 4 << 20
    """Bytes of keys and values that are worked on at a time."""


def _config(head_dim: int, *, lagged: bool, plain: bool) -> _Config:
    """The quickest of those tried on an H100 (docs/performance.md); `plain` has neither masks nor scales of blocks."""
    if head_dim == 256:
        return _Config(block_n=64)
    if plain:
        return _Config(block_n=64, stages=3)
    return _Config(block_n=128 if lagged else 32)


_KEY_TILES = {64: (64, 64, 4, 2), 128: (64, 64, 4, 2), 256: (32, 64, 8, 2)}
"""Queries of a step and keys of a program of `dkdv_kernel`, its warps and stages, by head size."""
_QUERY_TILES = {64: (128, 128, 8, 2), 128: (64, 64, 4, 3), 256: (128, 64, 8, 2)}
"""Queries of a program and keys of a step of `dq_kernel`, its warps and stages."""
_WIDE_KEY_TILES = {64: (64, 64, 4, 2), 128: (32, 64, 4, 2), 256: (32, 64, 8, 1)}
"""As `_KEY_TILES`, for 16-bit operands."""
_WIDE_QUERY_TILES = {64: (128, 64, 8, 2), 128: (128, 64, 8, 2), 256: (64, 32, 4, 1)}
"""As `_QUERY_TILES`, for 16-bit operands."""


def forward(
    q: Tensor, k: Tensor, v: Tensor, q_scale_inv: Tensor | None, k_scale_inv: Tensor | None,
    v_scale_inv: Tensor | None, *, causal: bool, scale: float, out_dtype: torch.dtype, scaling: Scaling = "head",
    mask: Tensor | None = None, dropout: float = 0.0, seed: Tensor | None = None, s_amax: Tensor | None = None,
    config: _Config | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dropout(softmax(q k^T * scale + mask)) v: o [B, H, Sq, D] and the log-sum-exp [B, H, Sq] in float32.

    Of e4m3 operands with scales, q [B, H, Sq, D], k [B, Hkv, Sk, D] and v [B, Hkv, D, Sp] (see `quantize_heads`), or,
    without, of 16-bit q, k and v [B, Hkv, Sk, D]; contiguous. `causal` lets query i see keys up to i; `mask` broadcasts
    to [B, H, Sq, Sk] and is boolean, True where a key is seen, or added. A row that sees nothing gives zeros, and -inf.
    P is rounded to e4m3 times 256, or to 16 bits, and divided by the sum of what it was before. `dropout` keeps what
    `attention_reference.kept` keeps for the seed, int64 [1]. Raises ValueError for a scale that is not positive.

    The amax of the softmax, which is the largest 1 / sum of exp(x - max) of a row, is taken into `s_amax`, float32 [1],
    where a delayed scale records it. The delayed scale itself is not needed: what multiplies P is divided out again,
    and e4m3 rounds relatively alike at every scale, so that scales differ only in what they lose at either end. With
    the largest weight of a row at 256 none saturates, as happens by a scale from before the softmax grew sharper, and
    none is lost to the scale 1 of a first step, which drops all below 2^-10. Weights below 2^-14 of their row's largest
    are rounded to multiples of 2^-17 of it; by 448 over the amax that starts 0.8 bits lower, but below the largest
    weight of all rows, which in most rows is more.
    """
    if not scale > 0:
        raise ValueError(f"attention in FP8 needs a positive softmax scale, not {scale}")
    wide = q_scale_inv is None
    batches, heads, q_len = q.shape[:3]
    head_dim = int(q.shape[3])  # a constant of the kernels
    kv_heads, kv_len, v_len = k.shape[1], k.shape[2], v.shape[3]
    kind, mask, seen, mask_steps = _mask_arguments(mask, q.device)
    lagged = kind in (_NO_MASK.value, _KEY_MASK.value) and not dropout and not wide
    plain = lagged and kind == _NO_MASK.value and scaling != "block"
    config = config or _config(head_dim, lagged=lagged, plain=plain)
    even = statically_known_true(kv_len % config.block_n == 0)
    out = torch.empty((batches, heads, q_len, head_dim), dtype=out_dtype, device=q.device)
    lse = torch.empty((batches, heads, q_len), dtype=torch.float32, device=q.device)
    grid = (triton.cdiv(q_len, config.block_m) * (batches * heads),)
    together = config.cached // (2 * k.element_size() * head_dim * kv_len) * (heads // kv_heads)
    with triton_workspace(q.device):
        wrap_triton(fprop_kernel)[grid](
            q, k, v, out, lse, *_given(s_amax, q_scale_inv, k_scale_inv, v_scale_inv, device=q.device), mask, seen,
            *_given(seed, device=q.device), scale * _LOG2_E.value, heads, kv_heads, batches * heads, q_len, kv_len,
            v_len, together, *mask_steps, 0 if wide else KINDS[scaling], causal, even, kind, *_dropped(dropout), wide,
            s_amax is not None, config.stages, config.block_m, config.block_n, head_dim,
            num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip
    return out, lse


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, q_scale_inv: Tensor, k_scale_inv: Tensor,
    v_scale_inv: Tensor, *, causal: bool, scale: float, scaling: Scaling = "head", mask: Tensor | None = None,
    dropout: float = 0.0, seed: Tensor | None = None, do_dtype: torch.dtype = torch.float8_e4m3fn,
    do_multiplier: Tensor | None = None, do_amax: Tensor | None = None, dp_amax: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients (dq, dk, dv) of `forward`, of the dtype of do, from e4m3 operands; v is transposed there too.

    do [B, H, Sq, D] is quantized to `do_dtype` with a scale per query head, or by a `do_multiplier`, float32 [1], for
    all. What is rounded: S = q k^T and dP = do v^T multiply FP8 operands, and are float32. For dv, P is rounded to 16
    bits, and multiplied with do as it came; for dq and dk, dS = P (dP - rowsum(do o)) is rounded to 16 bits, and
    multiplied with the dequantized k and q. Sums are float32. The tests hold it to the same in plain torch
    (tests/attention_rounding.py).

    Into `do_amax` and `dp_amax`, float32 [1], the amaxes are taken that delayed scales record: of do, and of dS times
    `scale`, the gradient of q k^T. Since that is not rounded to FP8 here, it needs no scale.
    """
    do = do.contiguous()
    do8, do_scale_inv = quantize_heads(do, 1, False, dtype=do_dtype, multiplier=do_multiplier, recorded=do_amax)
    scales = (q_scale_inv, k_scale_inv, v_scale_inv)
    wide_q, wide_k, rows = dequantize_qkv((q, q_scale_inv), (k, k_scale_inv), (v, v_scale_inv), scaling, do.dtype, True)
    return _backward(
        do8, q, k, rows, (do, wide_q, wide_k), o, lse, (*scales, do_scale_inv), causal, scale, KINDS[scaling], mask,
        dropout, seed, delta_of=do, dp_amax=dp_amax,
    )  # fmt: skip


def wide_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *, causal: bool, scale: float,
    mask: Tensor | None = None, dropout: float = 0.0, seed: Tensor | None = None,
    rounded: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of `forward` in high precision, from 16-bit operands [B, H, S, D] of the dtype of do.

    `rounded` is what of do is multiplied with v, and with P.
    """
    do = do.contiguous()
    row, column = (do, None) if rounded is None else (x.contiguous() for x in rounded)
    return _backward(
        row, q, k, v, (column, None, None), o, lse, (None,) * 4, causal, scale, 0, mask, dropout, seed, delta_of=do
    )  # fmt: skip


def _backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, wide: Sequence[Tensor | None], o: Tensor, lse: Tensor,
    scales: Sequence[Tensor | None], causal: bool, scale: float, scaling: int, mask: Tensor | None, dropout: float,
    seed: Tensor | None, delta_of: Tensor, dp_amax: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Both kernels. `wide` are do, q and k in 16 bits where the operands are of e4m3."""
    batches, heads, q_len = q.shape[:3]
    head_dim = int(q.shape[3])  # a constant of the kernels
    kv_heads, kv_len = k.shape[1], k.shape[2]
    operands = _E4M3 if wide[1] is not None else _WIDE if wide[0] is None else _WIDE_TWICE
    is_wide = operands.value != _E4M3.value
    delta, log_sum = row_terms(delta_of, o, lse)
    dq, dk, dv = (torch.empty(x.shape, dtype=delta_of.dtype, device=do.device) for x in (q, k, k))
    kind, mask, seen, mask_steps = _mask_arguments(mask, q.device)
    wide_do, wide_q, wide_k = _given(*wide, device=do.device)
    shared = (*_given(*scales, device=do.device), mask, seen, *_given(seed, device=do.device), scale)
    key_tiles, query_tiles = (_WIDE_KEY_TILES, _WIDE_QUERY_TILES) if is_wide else (_KEY_TILES, _QUERY_TILES)
    with triton_workspace(q.device):
        block_m, block_n, warps, stages = key_tiles[head_dim]
        even = statically_known_true(kv_len % block_n == 0)
        grid = (triton.cdiv(kv_len, block_n) * (batches * kv_heads),)
        wrap_triton(dkdv_kernel)[grid](
            q, k, v, do, wide_q, wide_do, log_sum, delta, dk, dv, *shared, heads, kv_heads, batches, q_len, kv_len,
            *mask_steps, scaling, causal, even, kind, *_dropped(dropout), operands.value, stages, block_m, block_n,
            head_dim, num_warps=warps, num_stages=stages,
        )  # fmt: skip
        block_m, block_n, warps, stages = query_tiles[head_dim]
        even = statically_known_true(kv_len % block_n == 0)
        grid = (triton.cdiv(q_len, block_m) * (batches * heads),)
        wrap_triton(dq_kernel)[grid](
            q, k, v, do, wide_k, log_sum, delta, dq, *_given(dp_amax, device=do.device), *shared, heads, kv_heads,
            q_len, kv_len, *mask_steps, scaling, causal, even, kind, *_dropped(dropout), operands.value,
            dp_amax is not None, stages, block_m, block_n, head_dim, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return dq, dk, dv


def row_terms(do: Tensor, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """rowsum(do o), and the log-sum-exp in units of log2, infinite for a row that saw nothing, which has no P."""
    return (do.float() * o.float()).sum(-1), torch.where(lse == -math.inf, math.inf, lse) * _LOG2_E.value


def _given(*tensors: Tensor | None, device: torch.device) -> list[Tensor]:
    """With something in the place of what a kernel does not read: not another argument, or Inductor copies that."""
    return [torch.empty(1, device=device) if tensor is None else tensor for tensor in tensors]


def _dropped(dropout: float) -> tuple[int, float]:
    """The probability times 2^32, and what weights that are kept are multiplied by."""
    return round(dropout * 2**32), 1 / (1 - dropout)


def _mask_arguments(mask: Tensor | None, device: torch.device) -> tuple[int, Tensor, Tensor, tuple[Any, ...]]:
    """The kind of a mask, the mask, the range of keys it leaves, and their strides over [B, H, Sq, Sk] and [B, H]."""
    if mask is None:
        return _NO_MASK.value, *_given(None, None, device=device), (0, 0, 0, 0, 0, 0)
    mask = mask.reshape(*[1] * (4 - mask.ndim), *mask.shape)
    steps = _steps(mask)
    of_keys = statically_known_true(mask.shape[2] == 1) and not statically_known_true(mask.shape[3] == 1)
    if mask.dtype != torch.bool or not of_keys:
        kind = _BOOL_MASK if mask.dtype == torch.bool else _ADDED_MASK
        return kind.value, mask, *_given(None, device=device), (*steps, 0, 0)
    keys = torch.arange(mask.shape[3], device=device)
    first = torch.where(mask, keys, mask.shape[3] - 1).amin((2, 3))
    after = torch.where(mask, keys + 1, 0).amax((2, 3))
    seen = torch.stack((first, after), -1).to(torch.int32)
    return _KEY_MASK.value, mask, seen, (*steps, *_steps(seen)[:2])


def _steps(x: Tensor) -> list[Any]:
    """Strides, 0 for axes that are broadcast."""
    return [0 if statically_known_true(size == 1) else step for size, step in zip(x.shape, x.stride(), strict=True)]


_WRITTEN = {
    fprop_kernel: ["out", "lse", "s_amax"],
    dkdv_kernel: ["dk", "dv"],
    dq_kernel: ["dq", "dp_amax"],
}
_RECORDED = ("s_amax", "dp_amax")


def written(arguments: Mapping[str, Any]) -> list[str]:
    """The names of the arguments that a launch of a kernel of this file writes."""
    names = next((names for names in _WRITTEN.values() if arguments.keys() >= set(names)), [])
    return [name for name in names if name not in _RECORDED or arguments["RECORD"]]


for _kernel in _WRITTEN:
    declare_written(_kernel, written)
