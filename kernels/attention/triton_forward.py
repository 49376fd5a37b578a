# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""The Triton kernel for the forward of attention, on FP8 operands and on dequantized ones.

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
from fxquant.kernels.attention.scores import Scores, filled
from fxquant.kernels.attention.triton_cast import BLOCK, BLOCK_LEN, KINDS, scale_place
from fxquant.kernels.attention.triton_scores import KEY_MASK, LOG2_E, NO_MASK, masked, survivors
from fxquant.kernels.cast.codes import INTERPRETED, raise_amax

_LN_2 = tl.constexpr(math.log(2))
_P_LOG = tl.constexpr(8.0)
"""log2 of what probabilities are multiplied by before their cast, so that small ones are not lost."""


@triton.jit
def _times_values(acc, p, values, j, WIDE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Returns acc + p v of the tile of keys at j. In FP8 the columns of p [BM, BN] are put in the order of v's keys."""
    if WIDE:
        acc = tl.dot(p.to(values.dtype), values.load([j, 0]), acc)
    else:
        p = tl.reshape(tl.permute(tl.reshape(p, (BM, BN // 16, 2, 4, 2)), (0, 1, 3, 2, 4)), (BM, BN))
        acc = tl.dot(p.to(tl.float8e4nv), values.load([0, j]).T, acc)
    return acc


@triton.jit
def _masked_step(
    acc, total, most, unit, q, keys, values, k_scale, v_scale, j, q_factor, rows, q_len, kv_len, mask, mask_row_step,
    mask_column_step, seed, row, SCALING: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, DROPPED: tl.constexpr,
    WIDE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Adds one tile of keys. `most` is the running maximum of scores, in units of log2, `unit` the scale of acc."""
    factor = q_factor
    new_unit = unit
    if SCALING == BLOCK:
        factor = q_factor * tl.load(k_scale + j // BLOCK_LEN)
        new_unit = tl.load(v_scale + j // BLOCK_LEN)
    s = tl.dot(q, keys.load([j, 0]).T) * factor
    columns = j + tl.arange(0, BN)
    s = masked(s, rows[:, None], columns[None, :], q_len, kv_len, mask, mask_row_step, mask_column_step, CAUSAL, MASK)
    new = tl.maximum(most, tl.max(s, 1))
    finite = tl.where(new == float("-inf"), 0.0, new)  # a row may have seen no key yet
    alpha = tl.exp2(most - finite)
    p = tl.exp2(s - (finite - _P_LOG)[:, None])
    total = total * alpha + tl.sum(p, 1)
    if DROPPED > 0:
        p = tl.where(survivors(seed, row, j, DROPPED, BM, BN), p, 0.0)
    if SCALING == BLOCK:
        alpha *= unit / new_unit
    return _times_values(acc * alpha[:, None], p, values, j, WIDE, BM, BN), total, new, new_unit


@triton.jit
def _without_hidden(s, j, kv_len, mask, mask_column_step, MASK: tl.constexpr, BN: tl.constexpr):
    """Returns scores of the tile of keys at j, -inf where a mask of keys hides them."""
    if MASK == KEY_MASK:
        column = j + tl.arange(0, BN)
        seen = tl.load(mask + column.to(tl.int64) * mask_column_step, mask=column < kv_len, other=0)
        s = tl.where((seen != 0)[None, :], s, float("-inf"))
    return s


@triton.jit
def _finite(most, MASK: tl.constexpr):
    """Returns the maxima to subtract: under a mask a row may have seen no key yet."""
    if MASK != NO_MASK:
        most = tl.where(most == float("-inf"), 0.0, most)
    return most


@triton.jit
def _scale_at(place):
    """Loads a scale by an instruction that Triton does not pipeline: copies to shared memory cost a barrier a step."""
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
    mask_column_step, SCALING: tl.constexpr, MASK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
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


@writes("out", "lse", s_amax="RECORD")
@triton.jit(do_not_specialize=["most_heads"])
def fprop_kernel(
    q, k, v, out, lse, s_amax, q_scale, k_scale, v_scale, mask, seen, seed, scale, heads, kv_heads, batch_heads, q_len,
    kv_len, v_len, most_heads, mask_batch_step, mask_head_step, mask_row_step, mask_column_step, seen_batch_step,
    seen_head_step, SCALING: tl.constexpr, CAUSAL: tl.constexpr, EVEN: tl.constexpr, MASK: tl.constexpr,
    DROPPED: tl.constexpr, RAISED: tl.constexpr, WIDE: tl.constexpr, RECORD: tl.constexpr, STAGES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Computes one tile of BM queries of one head. v is transposed: [B, Hkv, D, v_len].

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
    if MASK == KEY_MASK:
        seen += batch.to(tl.int64) * seen_batch_step + (head % heads).to(tl.int64) * seen_head_step
        start = tl.load(seen) // BN * BN
        end = tl.minimum(end, tl.load(seen + 1))
        end = tl.maximum(end, start + 1)  # a tile that is hidden as a whole, where the mask leaves nothing
    if MASK != NO_MASK:
        mask += batch.to(tl.int64) * mask_batch_step + (head % heads).to(tl.int64) * mask_head_step
    if (MASK == NO_MASK or MASK == KEY_MASK) and DROPPED == 0 and not WIDE:
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
            s = masked(s, rows[:, None], columns[None, :], q_len, kv_len, 0, 0, 0, CAUSAL, NO_MASK)
        new = tl.maximum(most, tl.max(s, 1) * factor)
        finite = _finite(new, MASK)
        alpha = tl.exp2(most - finite)
        p = tl.exp2(s * factor - (finite - _P_LOG)[:, None])
        total = total * alpha + tl.sum(p, 1)
        if SCALING == BLOCK:
            last_unit = tl.load(v_scale + last // BLOCK_LEN)
            alpha *= unit / last_unit
            unit = last_unit
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
    if MASK != NO_MASK:
        inverse = tl.where(total > 0, inverse, 0.0)
    acc = acc * inverse[:, None]
    at = out + (head.to(tl.int64) * q_len + first) * D + (tl.arange(0, BM)[:, None] * D + tl.arange(0, D)[None, :])
    tl.store(at, acc.to(out.dtype.element_ty), mask=rows[:, None] < q_len)
    tl.store(lse + head.to(tl.int64) * q_len + rows, (most + tl.log2(total) - _P_LOG) * _LN_2, mask=rows < q_len)
    if RECORD:  # the largest of a row's weights is exp2(_P_LOG) over their sum
        raise_amax(s_amax, tl.minimum(tl.max(tl.where((rows < q_len) & (total > 0), 256.0 / total, 0.0), 0), 1.0))


@dataclass(frozen=True, kw_only=True)
class _Config:
    """The tiles and the launch of a forward."""

    block_m: int = 64
    block_n: int = 128
    warps: int = 4
    stages: int = 2
    cached: int = 4 << 20
    """Bytes of keys and values that are worked on at a time."""


def _config(head_dim: int, *, lagged: bool, plain: bool) -> _Config:
    """Returns the quickest of those on an H100 (docs/measurements/attention.md); `plain`: no masks, no block scales."""
    if head_dim == 256:
        return _Config(block_n=64)
    if plain:
        return _Config(block_n=64, stages=3)
    return _Config(block_n=128 if lagged else 32)


def forward(
    operands: Sequence[Sequence[Tensor]], scores: Scores, out_dtype: torch.dtype, *, scaling: Scaling = "head",
    s_amax: Tensor | None = None, config: _Config | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dropout(softmax(q k^T * scale + mask)) v: o [B, H, Sq, D] and the log-sum-exp [B, H, Sq] in float32.

    The operands are q [B, H, Sq, D], k [B, Hkv, Sk, D] and v [B, Hkv, D, Sp] in e4m3, each with its scales (see
    `quantize_heads`), or 16-bit q, k and v [B, Hkv, Sk, D] alone; contiguous. A row that sees nothing gives zeros, and
    -inf. P is rounded to e4m3 times 256, or to 16 bits, and divided by the sum of what it was before. Dropout keeps
    what `attention.reference.kept` keeps for the seed. Raises ValueError for a scale that is not positive.

    The amax of the softmax, which is the largest 1 / sum of exp(x - max) of a row, is taken into `s_amax`, float32 [1],
    where a delayed scale records it. The delayed scale itself is not needed: what multiplies P is divided out again,
    and e4m3 rounds relatively alike at every scale, so that scales differ only in what they lose at either end. With
    the largest weight of a row at 256 none saturates, as happens by a scale from before the softmax grew sharper, and
    none is lost to the scale 1 of a first step, which drops all below 2^-10. Weights below 2^-14 of their row's largest
    are rounded to multiples of 2^-17 of it; by 448 over the amax that starts 0.8 bits lower, but below the largest
    weight of all rows, which in most rows is more.
    """
    if not scores.scale > 0:
        raise ValueError(f"attention in FP8 needs a positive softmax scale, not {scores.scale}")
    (q, *q_scale), (k, *k_scale), (v, *v_scale) = operands
    wide = not q_scale
    batches, heads, q_len = q.shape[:3]
    head_dim = int(q.shape[3])  # a constant of the kernels
    kv_heads, kv_len, v_len = k.shape[1], k.shape[2], v.shape[3]
    kind, hidden, mask_steps = scores.arguments(q.device)
    lagged = kind in (NO_MASK.value, KEY_MASK.value) and not scores.dropout and not wide
    plain = lagged and kind == NO_MASK.value and scaling != "block"
    config = config or _config(head_dim, lagged=lagged, plain=plain)
    even = statically_known_true(kv_len % config.block_n == 0)
    out = torch.empty((batches, heads, q_len, head_dim), dtype=out_dtype, device=q.device)
    lse = torch.empty((batches, heads, q_len), dtype=torch.float32, device=q.device)
    grid = (triton.cdiv(q_len, config.block_m) * (batches * heads),)
    together = config.cached // (2 * k.element_size() * head_dim * kv_len) * (heads // kv_heads)
    scales = (None, None, None) if wide else (*q_scale, *k_scale, *v_scale)
    with triton_workspace(q.device):
        wrap_triton(fprop_kernel)[grid](
            q, k, v, out, lse, *filled(s_amax, *scales, device=q.device), *hidden, scores.scale * LOG2_E.value, heads,
            kv_heads, batches * heads, q_len, kv_len, v_len, together, *mask_steps, 0 if wide else KINDS[scaling],
            scores.causal, even, kind, *scores.rule, wide, s_amax is not None, config.stages, config.block_m,
            config.block_n, head_dim, num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip
    return out, lse
