# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""The Triton kernel that gives the values of attention's quantized operands; names are those of `triton_cast`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from fxquant.compat.patches import writes
from fxquant.kernels.attention.choice import Scaling
from fxquant.kernels.attention.triton_cast import KINDS, programs, scale_place
from fxquant.kernels.cast.codes import word


@triton.jit
def _values_back(
    v8, v_scale, v, index, kv_len, v_len, SCALING: tl.constexpr, CODES: tl.constexpr, ROWS: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """Transposes v back in `qkv_dequantize_kernel`."""
    blocks = tl.cdiv(kv_len, ROWS)
    head, first = index // blocks, (index % blocks) * ROWS
    channel, key = tl.arange(0, D), first + tl.arange(0, ROWS)
    if CODES:
        _codes_back(v8, v, head, first, kv_len, v_len, ROWS, D)
    else:
        scale = tl.load(v_scale + scale_place(head, first, kv_len, SCALING))
        at = head.to(tl.int64) * v_len * D + channel[:, None] * v_len + key[None, :]
        values = tl.load(v8 + at, mask=key[None, :] < v_len, other=0.0).to(tl.float32) * scale
        values = tl.reshape(values.to(v.dtype.element_ty), (D, ROWS // 16, 4, 2, 2))  # back from the order of _KEYS
        values = tl.trans(tl.reshape(tl.permute(values, (0, 1, 3, 2, 4)), (D, ROWS)))
        target = v + head.to(tl.int64) * kv_len * D
        tl.store(target + (key[:, None] * D + channel[None, :]), values, mask=key[:, None] < kv_len)


@triton.jit
def _codes_back(v8, v, head, first, kv_len, v_len, ROWS: tl.constexpr, D: tl.constexpr):
    """Transposes codes back, as words of four: of four channels four keys each become of four keys four channels."""
    source = v8.to(tl.pointer_type(tl.uint32), bitcast=True) + head.to(tl.int64) * (v_len // 4) * D + first // 4
    quads, fours = tl.arange(0, ROWS // 4), tl.arange(0, D // 4)
    at = 4 * fours[:, None] * (v_len // 4) + quads[None, :]
    inside = (first + 4 * quads)[None, :] < v_len
    a = tl.load(source + at, mask=inside, other=0)
    b = tl.load(source + at + v_len // 4, mask=inside, other=0)
    c = tl.load(source + at + 2 * (v_len // 4), mask=inside, other=0)
    d = tl.load(source + at + 3 * (v_len // 4), mask=inside, other=0)
    low = tl.join(word(a, b, c, d, 0), word(a, b, c, d, 16))
    high = tl.join(word(a, b, c, d, 8), word(a, b, c, d, 24))
    words = tl.reshape(tl.join(low, high), (D // 4, ROWS // 16, 4, 2, 2))
    words = tl.reshape(tl.permute(words, (0, 1, 3, 2, 4)), (D // 4, ROWS))  # back from the order of _KEYS
    key = tl.arange(0, ROWS)
    target = v.to(tl.pointer_type(tl.uint32), bitcast=True) + (head.to(tl.int64) * kv_len + first) * (D // 4)
    inside = (first + key)[:, None] < kv_len
    tl.store(target + (key[:, None] * (D // 4) + fours[None, :]), tl.trans(words), mask=inside)


@writes("q", "k", "v")
@triton.jit
def qkv_dequantize_kernel(
    q8, k8, v8, q_scale, k_scale, v_scale, q, k, v, heads, kv_heads, batches, q_len, kv_len, v_len,
    SCALING: tl.constexpr, CODES: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, V_ROWS: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """Stores the values of contiguous e4m3 q8, k8 and transposed v8 as q, k and v [B, H, S, D], in one launch.

    A step of ROWS rows has as many elements for a thread as fill one store of 16 bytes, so that what is loaded lies in
    the threads that store it. CODES: v's codes instead of its values.
    """
    q_blocks, kv_blocks = tl.cdiv(q_len, ROWS * STEPS), tl.cdiv(kv_len, ROWS * STEPS)
    all_q, all_kv = batches * heads, batches * kv_heads
    plain = q_blocks * all_q + kv_blocks * all_kv
    index = tl.program_id(0)
    if index < plain:
        is_q = index < q_blocks * all_q
        index = tl.where(is_q, index, index - q_blocks * all_q)
        blocks, length = tl.where(is_q, q_blocks, kv_blocks), tl.where(is_q, q_len, kv_len)
        head, first = index // blocks, (index % blocks) * (ROWS * STEPS)
        at = scale_place(head // tl.where(is_q, heads // kv_heads, 1), first, length, SCALING)
        scale = tl.load(tl.where(is_q, q_scale, k_scale) + at)
        start = head.to(tl.int64) * length * D + first * D
        source, target = tl.where(is_q, q8, k8) + start, tl.where(is_q, q, k) + start
        for step in tl.static_range(STEPS):
            row = step * ROWS + tl.arange(0, ROWS)
            cell = row[:, None] * D + tl.arange(0, D)[None, :]
            inside = (first + row)[:, None] < length
            values = tl.load(source + cell, mask=inside, other=0.0).to(tl.float32) * scale
            tl.store(target + cell, values.to(q.dtype.element_ty), mask=inside)
    else:
        _values_back(v8, v_scale, v, index - plain, kv_len, v_len, SCALING, CODES, V_ROWS, D)


def dequantize_qkv(
    q: Sequence[Tensor], k: Sequence[Tensor], v: Sequence[Tensor], scaling: Scaling, dtype: torch.dtype,
    v_codes: bool = False,
) -> list[Tensor]:  # fmt: skip
    """Returns q [B, H, Sq, D], k and v [B, Hkv, Sk, D] in a 16-bit dtype from what `quantize_qkv` returns.

    With `v_codes` v's e4m3 codes are given instead of its values.
    """
    (q8, q_scale), (k8, k_scale), (v8, v_scale) = q, k, v
    batches, heads, q_len = q8.shape[:3]
    head_dim = int(q8.shape[3])  # a constant of the kernels
    kv_heads, kv_len = k8.shape[1], k8.shape[2]
    shape = (batches, kv_heads, kv_len, head_dim)
    dtypes = (dtype, dtype, v8.dtype if v_codes else dtype)
    out = [
        torch.empty(size, dtype=kind, device=q8.device)
        for size, kind in zip((tuple(q8.shape), shape, shape), dtypes, strict=True)
    ]
    steps, rows, v_rows = 8, 1024 // head_dim, 64
    grid = (programs(batches, heads, kv_heads, (q_len, kv_len, kv_len), (rows * steps, rows * steps, v_rows)),)
    wrap_triton(qkv_dequantize_kernel)[grid](
        q8, k8, v8, q_scale, k_scale, v_scale, *out, heads, kv_heads, batches, q_len, kv_len, v8.shape[3],
        KINDS[scaling], v_codes, steps, rows, v_rows, head_dim, num_warps=4,
    )  # fmt: skip
    return out
