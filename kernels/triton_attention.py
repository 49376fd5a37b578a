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
from fxquant.kernels.triton_cast import _four, _magnitude, _word, _words

_NO_MASK, _BOOL_MASK, _ADDED_MASK = (tl.constexpr(i) for i in range(3))
_LOG2_E = tl.constexpr(math.log2(math.e))
_LN_2 = tl.constexpr(math.log(2))
_P_LOG = tl.constexpr(8.0)
"""log2 of what probabilities are multiplied by before their cast, so that small ones are not lost."""
_KEYS = 16
"""Keys of a transposed v are padded to a multiple of this, and ordered within each so many (see `key_order`)."""
HEAD_DIMS = (64, 128, 256)
_E4M3_MAX = 448.0
_LEAST_AMAX = 1e-12


@triton.jit
def head_amax_kernel(
    x, amax, heads, groups, length, batch_step, head_step, row_step,
    STEPS: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """The amaxes, NaN ignored, of each `groups` heads of x [B, H, S, D], into zeroed float32 [B, H / groups]."""
    blocks = tl.cdiv(length, ROWS * STEPS)
    head = tl.program_id(0) // blocks
    first = (tl.program_id(0) % blocks) * (ROWS * STEPS)
    source = x + (head // heads).to(tl.int64) * batch_step + (head % heads).to(tl.int64) * head_step
    largest = tl.zeros((ROWS, D), tl.float32)
    for step in range(STEPS):
        row = first + step * ROWS + tl.arange(0, ROWS)
        at = row[:, None].to(tl.int64) * row_step + tl.arange(0, D)[None, :]
        tile = tl.load(source + at, mask=row[:, None] < length, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, _magnitude(tile))
    bits = tl.max(tl.max(largest, axis=1), axis=0).to(tl.int32, bitcast=True)  # magnitudes are ordered as their bits
    tl.atomic_max(amax.to(tl.pointer_type(tl.int32), bitcast=True) + head // groups, bits, sem="relaxed")


@triton.jit
def head_cast_kernel(
    x, data, scale_inv, given, heads, groups, length, padded, batch_step, head_step, row_step,
    TRANSPOSED: tl.constexpr, ORDERED: tl.constexpr, FMAX: tl.constexpr, LEAST: tl.constexpr,
    ROWS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """x [B, H, S, D] times FMAX / amax, given for each `groups` heads, as e4m3 [B, H, S, D] or [B, H, D, padded].

    Bytes are put together as words of four; see `triton_cast._words`.
    """
    blocks = tl.cdiv(padded, ROWS)
    head = tl.program_id(0) // blocks
    first = (tl.program_id(0) % blocks) * ROWS
    largest = tl.load(given + head // groups)
    scale = tl.div_rn(FMAX, largest)
    scale = tl.where((largest > LEAST) & (largest < float("inf")), scale, 1.0)
    if (first == 0) & (head % groups == 0):
        tl.store(scale_inv + head // groups, tl.div_rn(1.0, scale))
    source = x + (head // heads).to(tl.int64) * batch_step + (head % heads).to(tl.int64) * head_step
    row = first + tl.arange(0, ROWS)
    at = row[:, None].to(tl.int64) * row_step + tl.arange(0, D)[None, :]
    tile = tl.load(source + at, mask=row[:, None] < length, other=0.0).to(tl.float32)
    words = _words(tile * scale, False, ROWS, D)
    out = data.to(tl.pointer_type(tl.uint32), bitcast=True)
    if TRANSPOSED:
        out += (head.to(tl.int64) * D * padded + first) // 4
        words = tl.trans(words)
        if ORDERED:
            words = tl.reshape(words, (D // 4, ROWS // 16, 2, 4, 2))
            words = tl.reshape(tl.permute(words, (0, 1, 3, 2, 4)), (D // 4, ROWS))
        a, b, c, d = _four(words, D // 4, ROWS // 4)
        quads = tl.arange(0, ROWS // 4)
        mask = (first + 4 * quads)[None, :] < padded
        for i in tl.static_range(4):
            channel = 4 * tl.arange(0, D // 4) + i
            tl.store(out + (channel[:, None] * (padded // 4) + quads[None, :]), _word(a, b, c, d, 8 * i), mask=mask)
    else:
        out += (head.to(tl.int64) * length + first) * (D // 4)
        at = tl.arange(0, ROWS)[:, None] * (D // 4) + tl.arange(0, D // 4)[None, :]
        tl.store(out + at, words, mask=row[:, None] < length)


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
def _fprop_step(
    acc, total, most, q, keys, values, j, factor, rows, q_len, kv_len, mask, mask_row_step, mask_column_step,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, MASKED: tl.constexpr, ORDERED: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """One tile of keys. `most` is the running maximum of scores in units of log2."""
    s = tl.dot(q, keys.load([j, 0]).T)
    if MASK != _NO_MASK:
        s = s * factor
        factor = 1.0
    if MASKED:
        columns = j + tl.arange(0, BN)
        s = _masked(
            s, rows[:, None], columns[None, :], q_len, kv_len, mask, mask_row_step, mask_column_step, CAUSAL, MASK
        )
    new = tl.maximum(most, tl.max(s, 1) * factor)
    subtracted = new - _P_LOG
    if MASK != _NO_MASK:  # a row may have seen no key yet
        subtracted = tl.where(new == float("-inf"), 0.0, subtracted)
        alpha = tl.exp2(most - tl.where(new == float("-inf"), 0.0, new))
    else:
        alpha = tl.exp2(most - new)
    p = tl.exp2(s * factor - subtracted[:, None])
    total = total * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]
    if ORDERED:
        p = tl.reshape(tl.permute(tl.reshape(p, (BM, BN // 16, 2, 4, 2)), (0, 1, 3, 2, 4)), (BM, BN))
    acc = tl.dot(p.to(tl.float8e4nv), values.load([0, j]).T, acc)
    return acc, total, new


@triton.jit
def fprop_kernel(
    q, k, v, out, lse, q_scale, k_scale, v_scale, mask, scale, heads, kv_heads, batch_heads, q_len, kv_len, v_len,
    mask_batch_step, mask_head_step, mask_row_step, mask_column_step,
    PER_HEAD: tl.constexpr, CAUSAL: tl.constexpr, EVEN: tl.constexpr, MASK: tl.constexpr, ORDERED: tl.constexpr,
    SPECIALIZED: tl.constexpr, STAGES: tl.constexpr, TOGETHER: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """One tile of BM queries of one head. v is transposed: [B, Hkv, D, v_len].

    The programs of TOGETHER heads, whose keys and values fit the L2 cache, run at a time, those with most keys first.
    """
    blocks = tl.cdiv(q_len, BM)
    first_head = tl.program_id(0) // (blocks * TOGETHER) * TOGETHER
    together = tl.minimum(batch_heads - first_head, TOGETHER)
    within = tl.program_id(0) - first_head * blocks
    head = first_head + within % together
    block = within // together
    if CAUSAL:
        block = blocks - 1 - block
    batch = head // heads
    kv_head = batch * kv_heads + head % heads // (heads // kv_heads)
    at_scale = kv_head if PER_HEAD else 0
    factor = tl.load(q_scale + at_scale) * tl.load(k_scale + at_scale) * scale
    queries = tl.make_tensor_descriptor(q + head.to(tl.int64) * q_len * D, [q_len, D], [D, 1], [BM, D])
    keys = tl.make_tensor_descriptor(k + kv_head.to(tl.int64) * kv_len * D, [kv_len, D], [D, 1], [BN, D])
    values = tl.make_tensor_descriptor(v + kv_head.to(tl.int64) * v_len * D, [D, v_len], [v_len, 1], [D, BN])
    first = block * BM
    rows = first + tl.arange(0, BM)
    if MASK != _NO_MASK:
        mask += batch.to(tl.int64) * mask_batch_step + (head % heads).to(tl.int64) * mask_head_step
    most = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    query = queries.load([first, 0])
    end = kv_len
    if CAUSAL:
        end = tl.minimum(kv_len, first + BM)
    if SPECIALIZED:
        for j in tl.range(0, end, BN, num_stages=STAGES, warp_specialize=True):
            acc, total, most = _fprop_step(
                acc, total, most, query, keys, values, j, factor, rows, q_len, kv_len, mask, mask_row_step,
                mask_column_step, CAUSAL, MASK, CAUSAL or not EVEN, ORDERED, BM, BN,
            )  # fmt: skip
    else:
        if MASK != _NO_MASK:
            whole = 0
        elif CAUSAL:
            whole = tl.minimum(kv_len, first) // BN * BN
        else:
            whole = kv_len // BN * BN
        if MASK == _NO_MASK:
            for j in tl.range(0, whole, BN, num_stages=STAGES):
                acc, total, most = _fprop_step(
                    acc, total, most, query, keys, values, j, factor, rows, q_len, kv_len, mask, mask_row_step,
                    mask_column_step, CAUSAL, MASK, False, ORDERED, BM, BN,
                )  # fmt: skip
        if CAUSAL or not EVEN or MASK != _NO_MASK:
            for j in tl.range(whole, end, BN, num_stages=STAGES):
                acc, total, most = _fprop_step(
                    acc, total, most, query, keys, values, j, factor, rows, q_len, kv_len, mask, mask_row_step,
                    mask_column_step, CAUSAL, MASK, True, ORDERED, BM, BN,
                )  # fmt: skip
    last = tl.load(v_scale + at_scale) / total
    if MASK != _NO_MASK:
        last = tl.where(total > 0, last, 0.0)
    acc = acc * last[:, None]
    at = out + (head.to(tl.int64) * q_len + first) * D + (tl.arange(0, BM)[:, None] * D + tl.arange(0, D)[None, :])
    tl.store(at, acc.to(out.dtype.element_ty), mask=rows[:, None] < q_len)
    tl.store(lse + head.to(tl.int64) * q_len + rows, (most + tl.log2(total) - _P_LOG) * _LN_2, mask=rows < q_len)


@dataclass(frozen=True, kw_only=True)
class _Config:
    """How a forward is tiled and launched."""

    block_m: int = 128
    block_n: int = 128
    warps: int = 8
    stages: int = 2
    specialized: bool = False
    ordered: bool = True
    together: int = 1


def _config(head_dim: int, causal: bool, even: bool, has_mask: bool) -> _Config:
    """The quickest of those tried on an H100 (docs/performance.md)."""
    if has_mask or head_dim == 256:
        return _Config(block_n=64)
    return _Config()


def supports(
    *, head_dim: int, kv_len: int | torch.SymInt, causal: bool, has_mask: bool, dropout: float, dtype: torch.dtype,
    device: torch.device,
) -> bool:  # fmt: skip
    """Whether `forward` and `backward` can run such an attention, of operands of this dtype on this device."""
    if dropout or head_dim not in HEAD_DIMS or dtype not in (torch.bfloat16, torch.float16):
        return False
    return device.type == "cuda" and (not torch.cuda.is_available() or is_hopper(device))


def key_order(keys: int, device: torch.device | None = None) -> Tensor:
    """The key [keys] that stands in each place of a transposed v, `keys` a multiple of 16.

    Hopper's FP8 multiplication wants four neighbouring columns of P in a thread, where the one before leaves two pairs
    8 columns apart. With keys in this order they are neighbours. (FlashAttention-3, section 3.3.)
    """
    order = torch.arange(keys, device=device).view(-1, 2, 4, 2)
    return order.transpose(1, 2).flatten()


def quantize_heads(x: Tensor, groups: int, transposed: bool, *, ordered: bool = True) -> tuple[Tensor, Tensor]:
    """x [B, H, S, D] in e4m3 with one scale for each `groups` heads: the payload, and the scales' inverse [B, H / groups].

    The payload is [B, H, S, D]; with `transposed` [B, H, D, Sp], Sp being S padded with zeros to a multiple of 16, and
    its keys in `key_order`. A scale is 448 / amax, NaN ignored; 1 where the amax is not above 1e-12 or infinite.
    The last dimension of x is dense.
    """
    batches, heads, length, head_dim = x.shape
    padded = triton.cdiv(length, _KEYS) * _KEYS if transposed else length
    shape = (batches, heads, head_dim, padded) if transposed else (batches, heads, length, head_dim)
    data = torch.empty(shape, dtype=torch.float8_e4m3fn, device=x.device)
    scale_inv = torch.empty((batches, heads // groups), dtype=torch.float32, device=x.device)
    amax = torch.zeros((batches, heads // groups), dtype=torch.float32, device=x.device)
    steps, rows = 8, 4096 // head_dim
    grid = (triton.cdiv(length, rows * steps) * (batches * heads),)
    wrap_triton(head_amax_kernel)[grid](
        x, amax, heads, groups, length, *x.stride()[:3], steps, rows, head_dim, num_warps=4
    )
    rows = 64 if transposed else 8192 // head_dim
    grid = (triton.cdiv(padded, rows) * (batches * heads),)
    wrap_triton(head_cast_kernel)[grid](
        x, data, scale_inv, amax, heads, groups, length, padded, *x.stride()[:3], transposed, ordered,
        _E4M3_MAX, _LEAST_AMAX, rows, head_dim, num_warps=4,
    )  # fmt: skip
    return data, scale_inv


def forward(
    q: Tensor, k: Tensor, v: Tensor, q_scale_inv: Tensor, k_scale_inv: Tensor, v_scale_inv: Tensor, *,
    causal: bool, scale: float, out_dtype: torch.dtype, mask: Tensor | None = None, config: _Config | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """softmax(q k^T * scale + mask) v of e4m3 operands: o [B, H, Sq, D] and the log-sum-exp [B, H, Sq] in float32.

    q [B, H, Sq, D], k [B, Hkv, Sk, D] and v [B, Hkv, D, Sp] (see `quantize_heads`) are contiguous. `causal` lets query i
    see keys up to i; `mask` broadcasts to [B, H, Sq, Sk] and is boolean, True where a key is seen, or added. A row that
    sees nothing gives zeros, and -inf. P is rounded to e4m3 times 256; what it is divided by is the sum of what
    it was before. Raises ValueError for a scale that is not positive.
    """
    if not scale > 0:
        raise ValueError(f"attention in FP8 needs a positive softmax scale, not {scale}")
    batches, heads, q_len, head_dim = q.shape
    kv_heads, kv_len, v_len = k.shape[1], k.shape[2], v.shape[3]
    if config is None:
        even = statically_known_true(kv_len % 128 == 0)
        config = _config(head_dim, causal, even, mask is not None)
    even = statically_known_true(kv_len % config.block_n == 0)
    out = torch.empty((batches, heads, q_len, head_dim), dtype=out_dtype, device=q.device)
    lse = torch.empty((batches, heads, q_len), dtype=torch.float32, device=q.device)
    kind, mask, mask_steps = _mask_arguments(mask, q, kv_len)
    grid = (triton.cdiv(q_len, config.block_m) * (batches * heads),)
    with triton_workspace(q.device):
        wrap_triton(fprop_kernel)[grid](
            q, k, v, out, lse, q_scale_inv, k_scale_inv, v_scale_inv, mask, scale * _LOG2_E.value, heads, kv_heads,
            batches * heads, q_len, kv_len, v_len, *mask_steps, q_scale_inv.ndim > 1, causal, even, kind,
            config.ordered, config.specialized, config.stages, config.together, config.block_m, config.block_n,
            head_dim, num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip
    return out, lse


def _mask_arguments(mask: Tensor | None, q: Tensor, kv_len: Any) -> tuple[int, Tensor, tuple[Any, ...]]:
    """The kind of a mask, the mask and its strides; in the place of none, q."""
    if mask is None:
        return _NO_MASK.value, q, (0, 0, 0, 0)
    kind = _BOOL_MASK if mask.dtype == torch.bool else _ADDED_MASK
    mask = mask.expand(*q.shape[:3], kv_len)
    return kind.value, mask, mask.stride()


_WRITTEN = {
    head_amax_kernel: ["amax"],
    head_cast_kernel: ["data", "scale_inv"],
    fprop_kernel: ["out", "lse"],
}


def written(arguments: Mapping[str, Any]) -> list[str]:
    """The names of the arguments that a launch of a kernel of this file writes."""
    return next(names for names in _WRITTEN.values() if all(name in arguments for name in names))


for _kernel in _WRITTEN:
    declare_written(_kernel, written)
