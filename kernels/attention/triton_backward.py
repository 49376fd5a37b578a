# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""The Triton kernels for the backward of attention, on FP8 operands and on dequantized ones.

Names: B batches, H query heads, G of which share each of Hkv key-value heads, Sq queries, Sk keys, D head size.
Scales are what dequantization multiplies by, as `triton_cast` has them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from fxquant.compat.device import triton_workspace
from fxquant.compat.patches import writes
from fxquant.compat.values import statically_known_true
from fxquant.kernels.attention.choice import Scaling
from fxquant.kernels.attention.gluon_op import attention_bprop
from fxquant.kernels.attention.scores import Scores, filled
from fxquant.kernels.attention.triton_cast import BLOCK, BLOCK_LEN, KINDS, quantize_heads, scale_place
from fxquant.kernels.attention.triton_dequantize import dequantize_qkv
from fxquant.kernels.attention.triton_scores import KEY_MASK, LOG2_E, NO_MASK, masked, survivors
from fxquant.kernels.cast.codes import raise_amax

_E4M3, _WIDE, _WIDE_TWICE = (tl.constexpr(i) for i in range(3))
"""Operands of a backward: e4m3, or of 16 bits, with one do for both its products or one for each."""


@triton.jit
def _tile(source, head, first, ROWS: tl.constexpr, D: tl.constexpr):
    """Loads rows of one head from a descriptor of [heads, S, D]; zeros past the end."""
    return tl.reshape(source.load([head, first, 0]), (ROWS, D))


@writes("dk", "dv")
@triton.jit
def dkdv_kernel(
    q, k, v, do, q_wide, do_wide, log_sum, delta, dk, dv, q_scale, k_scale, v_scale, do_scale, mask, seen, seed, scale,
    heads, kv_heads, batches, q_len, kv_len, mask_batch_step, mask_head_step, mask_row_step, mask_column_step,
    seen_batch_step, seen_head_step, SCALING: tl.constexpr, CAUSAL: tl.constexpr, EVEN: tl.constexpr,
    MASK: tl.constexpr, DROPPED: tl.constexpr, RAISED: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Computes dk and dv of one tile of BN keys, over the queries of all heads that share them, BM at a time.

    q_wide holds the values of q, do_wide the unquantized do, both of 16 bits; log_sum is the log-sum-exp in units of
    log2, infinite where there is nothing. Keys are rows here, queries columns. WIDE: q, k, v and do are 16-bit values
    too, q_wide is not read, and do_wide only where it is another.
    """
    blocks = tl.cdiv(kv_len, BN)
    kv_head = tl.program_id(0) // blocks
    first = (tl.program_id(0) % blocks) * BN
    batch = kv_head // kv_heads
    group = heads // kv_heads
    k_factor, v_factor = tl.cast(scale, tl.float32) * LOG2_E, 1.0
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
    if MASK == KEY_MASK:
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
        if CAUSAL or MASK != NO_MASK or not EVEN:
            s = masked(
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
            kept = tl.trans(survivors(draw, at.to(tl.int32), first, DROPPED, BM, BN))
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


@writes("dq", dp_amax="RECORD")
@triton.jit
def dq_kernel(
    q, k, v, do, k_wide, log_sum, delta, dq, dp_amax, q_scale, k_scale, v_scale, do_scale, mask, seen, seed, scale,
    heads, kv_heads, q_len, kv_len, mask_batch_step, mask_head_step, mask_row_step, mask_column_step, seen_batch_step,
    seen_head_step, SCALING: tl.constexpr, CAUSAL: tl.constexpr, EVEN: tl.constexpr, MASK: tl.constexpr,
    DROPPED: tl.constexpr, RAISED: tl.constexpr, WIDE: tl.constexpr, RECORD: tl.constexpr, STAGES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Computes dq of one tile of BM queries, over the keys, BN at a time. k_wide holds the values of k in 16 bits.

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
    q_factor, v_factor = tl.cast(scale, tl.float32) * LOG2_E, 1.0
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
    if MASK != NO_MASK:
        mask += batch.to(tl.int64) * mask_batch_step + (head % heads).to(tl.int64) * mask_head_step
    acc = tl.zeros((BM, D), tl.float32)
    largest = tl.zeros((BM,), tl.float32)
    start = 0
    end = kv_len
    if CAUSAL:
        end = tl.minimum(kv_len, first + BM)
    if MASK == KEY_MASK:
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
        if CAUSAL or MASK != NO_MASK or not EVEN:
            columns = j + tl.arange(0, BN)
            s = masked(
                s, rows[:, None], columns[None, :], q_len, kv_len, mask, mask_row_step, mask_column_step, CAUSAL, MASK
            )
        p = tl.exp2(s - minus[:, None])
        dp = tl.dot(grad, values.load([j, 0]).T) * v_factor
        if DROPPED > 0:
            dp = tl.where(survivors(draw, at.to(tl.int32), j, DROPPED, BM, BN), dp * RAISED, 0.0)
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


_KEY_TILES = {64: (64, 64, 4, 2), 128: (64, 64, 4, 2), 256: (32, 64, 8, 2)}
"""Queries of a step and keys of a program of `dkdv_kernel`, its warps and stages, by head size."""
_QUERY_TILES = {64: (128, 128, 8, 2), 128: (64, 64, 4, 3), 256: (128, 64, 8, 2)}
"""Queries of a program and keys of a step of `dq_kernel`, its warps and stages."""
_WIDE_KEY_TILES = {64: (64, 64, 4, 2), 128: (32, 64, 4, 2), 256: (32, 64, 8, 1)}
"""`_KEY_TILES` for 16-bit operands."""
_WIDE_QUERY_TILES = {64: (128, 64, 8, 2), 128: (128, 64, 8, 2), 256: (64, 32, 4, 1)}
"""`_QUERY_TILES` for 16-bit operands."""


@dataclass(frozen=True, kw_only=True)
class GradientCast:
    """The cast of do, with a scale per query head or by a `multiplier`, float32 [1], for all."""

    dtype: torch.dtype = torch.float8_e4m3fn
    multiplier: Tensor | None = None
    amax: Tensor | None = None
    """float32 [1], into which the amax of do is taken where a delayed scale records it."""
    scores_amax: Tensor | None = None
    """Likewise that of dS times the scale, the gradient of q k^T, which is not rounded to FP8 and needs no scale."""


def backward(
    do: Tensor, operands: Sequence[Sequence[Tensor]], o: Tensor, lse: Tensor, scores: Scores, scaling: Scaling = "head",
    cast: GradientCast | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients (dq, dk, dv) of `forward`, of the dtype of do, from e4m3 operands; v is transposed too.

    S = q k^T and dP = do v^T multiply FP8 operands, and are float32. For dv, P is rounded to 16 bits, and multiplied
    with do [B, H, Sq, D] as it came; for dq and dk, dS = P (dP - rowsum(do o)) is rounded to 16 bits, and multiplied
    with the dequantized k and q. Sums are float32. The tests hold it to the same in plain torch
    (tests/attention_rounding.py).
    """
    do, cast = do.contiguous(), cast or GradientCast()
    do8, do_scale = quantize_heads(do, 1, False, dtype=cast.dtype, multiplier=cast.multiplier, recorded=cast.amax)
    q, k, v = operands
    wide_q, wide_k, rows = dequantize_qkv(q, k, v, scaling, do.dtype, True)
    wide, scales = (do, wide_q, wide_k), (q[1], k[1], v[1], do_scale)
    return _backward(
        (do8, q[0], k[0], rows), wide, scales, row_terms(do, o, lse), scores, KINDS[scaling], cast.scores_amax
    )


def backward_by_warps(
    do: Tensor, operands: Sequence[Sequence[Tensor]], o: Tensor, lse: Tensor, scores: Scores, scaling: Scaling = "head",
    cast: GradientCast | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`backward` without mask and dropout by the kernel in Gluon, where `choice.backward` says so.

    It records no amax of the scores' gradient, and dq does not repeat to the bit. P is rounded for dS too.
    """
    (q, q_scale), (k, k_scale), (v, v_scale) = operands
    do, cast = do.contiguous(), cast or GradientCast()
    do8, do_scale = quantize_heads(do, 1, False, dtype=cast.dtype, multiplier=cast.multiplier, recorded=cast.amax)
    wide_q, wide_k, rows = dequantize_qkv((q, q_scale), (k, k_scale), (v, v_scale), scaling, do.dtype, True)
    return attention_bprop(
        do, do8, wide_q, wide_k, q, k, rows, q_scale, k_scale, v_scale, do_scale, o, lse, scores.causal, scores.scale,
        scaling,
    )  # fmt: skip


def wide_backward(
    do: Tensor, operands: Sequence[Tensor], o: Tensor, lse: Tensor, scores: Scores,
    rounded: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients of `forward` in high precision, from 16-bit q, k and v [B, H, S, D] of the dtype of do.

    `rounded` are the do to multiply with v, and the do to multiply with P, in place of do itself.
    """
    do = do.contiguous()
    row, column = (do, None) if rounded is None else (x.contiguous() for x in rounded)
    return _backward((row, *operands), (column, None, None), (None,) * 4, row_terms(do, o, lse), scores, 0, None)


def _backward(
    operands: Sequence[Tensor], wide: Sequence[Tensor | None], scales: Sequence[Tensor | None],
    terms: tuple[Tensor, Tensor], scores: Scores, scaling: int, scores_amax: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Launches both kernels for do, q, k and v. `wide` are do, q and k in 16 bits where the operands are of e4m3."""
    do, q, k, v = operands
    batches, heads, q_len = q.shape[:3]
    head_dim = int(q.shape[3])  # a constant of the kernels
    kv_heads, kv_len = k.shape[1], k.shape[2]
    form = _E4M3 if wide[1] is not None else _WIDE if wide[0] is None else _WIDE_TWICE
    is_wide = form.value != _E4M3.value
    delta, log_sum = terms
    dtype = (do if wide[0] is None else wide[0]).dtype
    dq, dk, dv = (torch.empty(x.shape, dtype=dtype, device=do.device) for x in (q, k, k))
    kind, hidden, mask_steps = scores.arguments(q.device)
    wide_do, wide_q, wide_k = filled(*wide, device=do.device)
    shared = (*filled(*scales, device=do.device), *hidden, scores.scale)
    key_tiles, query_tiles = (_WIDE_KEY_TILES, _WIDE_QUERY_TILES) if is_wide else (_KEY_TILES, _QUERY_TILES)
    with triton_workspace(q.device):
        block_m, block_n, warps, stages = key_tiles[head_dim]
        even = statically_known_true(kv_len % block_n == 0)
        grid = (triton.cdiv(kv_len, block_n) * (batches * kv_heads),)
        wrap_triton(dkdv_kernel)[grid](
            q, k, v, do, wide_q, wide_do, log_sum, delta, dk, dv, *shared, heads, kv_heads, batches, q_len, kv_len,
            *mask_steps, scaling, scores.causal, even, kind, *scores.rule, form.value, stages, block_m, block_n,
            head_dim, num_warps=warps, num_stages=stages,
        )  # fmt: skip
        block_m, block_n, warps, stages = query_tiles[head_dim]
        even = statically_known_true(kv_len % block_n == 0)
        grid = (triton.cdiv(q_len, block_m) * (batches * heads),)
        wrap_triton(dq_kernel)[grid](
            q, k, v, do, wide_k, log_sum, delta, dq, *filled(scores_amax, device=do.device), *shared, heads, kv_heads,
            q_len, kv_len, *mask_steps, scaling, scores.causal, even, kind, *scores.rule, form.value,
            scores_amax is not None, stages, block_m, block_n, head_dim, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return dq, dk, dv


def row_terms(do: Tensor, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Returns rowsum(do o), and the log-sum-exp in units of log2, infinite for a row that saw nothing."""
    return (do.float() * o.float()).sum(-1), torch.where(lse == -math.inf, math.inf, lse) * LOG2_E.value
