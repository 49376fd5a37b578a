# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Triton casts of attention's operands to FP8 with a scale per tensor, head or 128 positions of a head.

Names: B batches, H heads, of which each `groups` share a scale, S positions, D head size. Scales are what
dequantization multiplies by: float32 [1], [B, H / groups] or [B, H / groups, ceil(S / 128)].
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from fxquant.compat.patches import writes
from fxquant.kernels.attention.choice import Scaling
from fxquant.kernels.attention.scores import filled
from fxquant.kernels.cast.codes import four, in_words, magnitude, raise_amax, word

TENSOR, HEAD, BLOCK = (tl.constexpr(i) for i in range(3))
KINDS: dict[str, int] = {"tensor": 0, "head": 1, "block": 2}
"""The numbers of the scalings in kernels."""
BLOCK_LEN = tl.constexpr(128)
_KEYS = 16
"""Keys of a transposed v are padded to a multiple of this, and of every 16 their order is 0 1 8 9, 2 3 10 11,
4 5 12 13, 6 7 14 15: Hopper's FP8 multiplication wants four neighbouring columns of P in a thread, where the product
that computes P leaves two pairs 8 columns apart. (FlashAttention-3, section 3.3.)"""
_LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
_LEAST_AMAX = 1e-12
"""The least amax, at or below which the scale is 1, except for a scale of the whole tensor."""
_MOST_MULTIPLIER = torch.finfo(torch.float32).max
_STEPS = 4


@triton.jit
def _head_tile(x, first, length, row_step, ROWS: tl.constexpr, D: tl.constexpr):
    """Loads ROWS rows of a head from `first` on in float32, zeros past the end."""
    row = first + tl.arange(0, ROWS)
    at = row[:, None].to(tl.int64) * row_step + tl.arange(0, D)[None, :]
    return tl.load(x + at, mask=row[:, None] < length, other=0.0).to(tl.float32)


@triton.jit
def _tile_amax(tile):
    """Returns the amax of a tile, NaN ignored."""
    return tl.max(tl.max(magnitude(tile), axis=1), axis=0)


@triton.jit
def _head_amax(x, first, length, row_step, STEPS: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr):
    """Returns the bits of the amax, NaN ignored, of STEPS times ROWS rows of a head: they order magnitudes.

    Without masks more loads are on their way at a time.
    """
    largest = tl.zeros((ROWS, D), tl.float32)
    if first + STEPS * ROWS <= length:
        row = first + tl.arange(0, ROWS)
        source = x + (row[:, None].to(tl.int64) * row_step + tl.arange(0, D)[None, :])
        for _ in tl.static_range(STEPS):
            largest = tl.maximum(largest, magnitude(tl.load(source).to(tl.float32)))
            source += tl.cast(row_step, tl.int64) * ROWS
    else:
        for step in range(STEPS):
            largest = tl.maximum(largest, magnitude(_head_tile(x, first + step * ROWS, length, row_step, ROWS, D)))
    return tl.max(tl.max(largest, axis=1), axis=0).to(tl.int32, bitcast=True)


@triton.jit
def _head_store(
    tile, out, first, scale, length, padded, E5M2: tl.constexpr, TRANSPOSED: tl.constexpr, ROWS: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """Casts and stores ROWS rows of a head. Bytes are put together as words of four."""
    words = in_words(tile * scale, E5M2, ROWS, D)
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
        rows = tl.arange(0, ROWS)
        at = rows[:, None] * (D // 4) + tl.arange(0, D // 4)[None, :]
        tl.store(out + at, words, mask=(first + rows)[:, None] < length)


@triton.jit
def _head_scale(amax, RULE: tl.constexpr):
    """Returns the multiplier for an amax; RULE is (the largest of FP8, the least amax that counts, the most)."""
    scale = tl.minimum(tl.div_rn(RULE[0], amax), RULE[2])
    return tl.where((amax > RULE[1]) & (amax < float("inf")), scale, 1.0)


@triton.jit
def _scale_for(source, at, GIVEN: tl.constexpr, RULE: tl.constexpr):
    """Returns the multiplier: the one at `source` if it is GIVEN, or that of an amax there, in bits."""
    if GIVEN:
        scale = tl.load(source)
    else:
        scale = _head_scale(tl.load(source + at).to(tl.float32, bitcast=True), RULE)
    return scale


@writes("amax")
@triton.jit
def head_amax_kernel(
    x, amax, heads, groups, length, batch_step, head_step, row_step,
    STEPS: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Takes the bits of the amaxes of each `groups` heads of x [B, H, S, D] into zeroed int32 [B, H / groups]."""
    blocks = tl.cdiv(length, ROWS * STEPS)
    head = tl.program_id(0) // blocks
    first = (tl.program_id(0) % blocks) * (ROWS * STEPS)
    source = x + (head // heads).to(tl.int64) * batch_step + (head % heads).to(tl.int64) * head_step
    tl.atomic_max(amax + head // groups, _head_amax(source, first, length, row_step, STEPS, ROWS, D), sem="relaxed")


@writes("data", "scale_inv", recorded="RECORD")
@triton.jit
def head_cast_kernel(
    x, data, scale_inv, scaled_by, recorded, heads, groups, length, padded, batch_step, head_step, row_step,
    GIVEN: tl.constexpr, RECORD: tl.constexpr, E5M2: tl.constexpr, TRANSPOSED: tl.constexpr, RULE: tl.constexpr,
    ROWS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Casts x [B, H, S, D] times the largest of FP8 / amax, a number in bits, to FP8 [B, H, S, D] or [B, H, D, padded].

    It begins at the end, which the L2 cache still holds from when the amaxes were taken. With GIVEN `scaled_by` is the
    multiplier of all heads, float32 [1], and with RECORD the amax is taken into float32 [1].
    """
    blocks = tl.cdiv(padded, ROWS)
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    head = index // blocks
    first = (index % blocks) * ROWS
    scale = _scale_for(scaled_by, head // groups, GIVEN, RULE)
    if (first == 0) & (head % groups == 0):
        tl.store(scale_inv + head // groups, tl.div_rn(1.0, scale))
    source = x + (head // heads).to(tl.int64) * batch_step + (head % heads).to(tl.int64) * head_step
    tile = _head_tile(source, first, length, row_step, ROWS, D)
    if RECORD:
        raise_amax(recorded, _tile_amax(tile))
    _head_store(tile, data + head.to(tl.int64) * padded * D, first, scale, length, padded, E5M2, TRANSPOSED, ROWS, D)


@triton.jit
def _block_cast(
    x, data, scale_inv, kv_head, block, kv_heads, length, padded, batch_step, head_step, row_step, GROUPS: tl.constexpr,
    TRANSPOSED: tl.constexpr, RULE: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Casts 128 positions of the GROUPS heads that share a scale, and stores it. More than one are read twice."""
    ROWS: tl.constexpr = BLOCK_LEN
    first = block * ROWS
    batch, within = kv_head // kv_heads, kv_head % kv_heads
    source = x + batch.to(tl.int64) * batch_step + (within * GROUPS).to(tl.int64) * head_step
    out = data + (kv_head * GROUPS).to(tl.int64) * padded * D
    tile = _head_tile(source, first, length, row_step, ROWS, D)
    amax = _tile_amax(tile)
    other = source
    for _ in range(1, GROUPS):
        other += head_step
        amax = tl.maximum(amax, _tile_amax(_head_tile(other, first, length, row_step, ROWS, D)))
    scale = _head_scale(amax, RULE)
    tl.store(scale_inv + kv_head * tl.cdiv(length, ROWS) + block, tl.div_rn(1.0, scale))
    _head_store(tile, out, first, scale, length, padded, False, TRANSPOSED, ROWS, D)
    for _ in range(1, GROUPS):
        source += head_step
        out += tl.cast(padded, tl.int64) * D
        tile = _head_tile(source, first, length, row_step, ROWS, D)
        _head_store(tile, out, first, scale, length, padded, False, TRANSPOSED, ROWS, D)


@writes("data", "scale_inv")
@triton.jit
def block_cast_kernel(
    x, data, scale_inv, kv_heads, length, padded, batch_step, head_step, row_step, GROUPS: tl.constexpr,
    TRANSPOSED: tl.constexpr, RULE: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Casts x [B, H, S, D] to e4m3 with a scale for 128 positions of GROUPS heads, kv_heads times: one read."""
    blocks = tl.cdiv(length, BLOCK_LEN)
    _block_cast(
        x, data, scale_inv, tl.program_id(0) // blocks, tl.program_id(0) % blocks, kv_heads, length, padded,
        batch_step, head_step, row_step, GROUPS, TRANSPOSED, RULE, D,
    )  # fmt: skip


@writes("amax")
@triton.jit
def qkv_amax_kernel(
    q, k, v, amax, heads, kv_heads, batches, q_len, kv_len, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch,
    v_head, v_row, SCALING: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Takes the bits of the amaxes of q, k and v into zeroed int32 [3, B, kv_heads] or [3]."""
    q_blocks, kv_blocks = tl.cdiv(q_len, ROWS * STEPS), tl.cdiv(kv_len, ROWS * STEPS)
    all_kv = batches * kv_heads
    index = tl.program_id(0) - q_blocks * (batches * heads)
    is_q, is_v = index < 0, index >= kv_blocks * all_kv
    index = tl.where(is_q, tl.program_id(0), tl.where(is_v, index - kv_blocks * all_kv, index))
    x = tl.where(is_q, q, tl.where(is_v, v, k))
    batch_step = tl.where(is_q, q_batch, tl.where(is_v, v_batch, k_batch)).to(tl.int64)
    head_step = tl.where(is_q, q_head, tl.where(is_v, v_head, k_head)).to(tl.int64)
    row_step = tl.where(is_q, q_row, tl.where(is_v, v_row, k_row))
    blocks, length = tl.where(is_q, q_blocks, kv_blocks), tl.where(is_q, q_len, kv_len)
    all_heads = tl.where(is_q, heads, kv_heads)
    head, first = index // blocks, (index % blocks) * (ROWS * STEPS)
    at = tl.where(is_q, 0, tl.where(is_v, 2, 1))
    if SCALING == HEAD:
        at = at * all_kv + head // (all_heads // kv_heads)
    source = x + (head // all_heads).to(tl.int64) * batch_step + (head % all_heads).to(tl.int64) * head_step
    tl.atomic_max(amax + at, _head_amax(source, first, length, row_step, STEPS, ROWS, D), sem="relaxed")


@triton.jit
def _cast_values(
    v, v8, v_scale, scaled_by, recorded, index, kv_heads, batches, kv_len, v_len, v_batch, v_head, v_row,
    SCALING: tl.constexpr, GIVEN: tl.constexpr, RECORD: tl.constexpr, RULE: tl.constexpr, ROWS: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """Casts and transposes v in `qkv_cast_kernel`."""
    blocks = tl.cdiv(v_len, ROWS)
    head, first = index // blocks, (index % blocks) * ROWS
    at, place = 2, 0
    if SCALING == HEAD:
        at, place = 2 * batches * kv_heads + head, head
    scale = _scale_for(scaled_by, at, GIVEN, RULE)
    tl.store(v_scale + place, tl.div_rn(1.0, scale), mask=first == 0)
    source = v + (head // kv_heads).to(tl.int64) * v_batch + (head % kv_heads).to(tl.int64) * v_head
    tile = _head_tile(source, first, kv_len, v_row, ROWS, D)
    if RECORD:
        raise_amax(recorded, _tile_amax(tile))
    _head_store(tile, v8 + head.to(tl.int64) * v_len * D, first, scale, kv_len, v_len, False, True, ROWS, D)


@writes("q8", "k8", "v8", "q_scale", "k_scale", "v_scale", recorded="RECORD")
@triton.jit
def qkv_cast_kernel(
    q, k, v, q8, k8, v8, q_scale, k_scale, v_scale, scaled_by, recorded, heads, kv_heads, batches, q_len, kv_len, v_len,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, SCALING: tl.constexpr, GIVEN: tl.constexpr,
    RECORD: tl.constexpr, RULE: tl.constexpr, ROWS: tl.constexpr, V_ROWS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Casts q, k and v to e4m3, v transposed, in one launch; the end, GIVEN and RECORD as in `head_cast_kernel`."""
    q_blocks, kv_blocks = tl.cdiv(q_len, ROWS), tl.cdiv(kv_len, ROWS)
    all_q, all_kv = batches * heads, batches * kv_heads
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    plain = q_blocks * all_q + kv_blocks * all_kv
    if index < plain:
        is_q = index < q_blocks * all_q
        index = tl.where(is_q, index, index - q_blocks * all_q)
        blocks, length = tl.where(is_q, q_blocks, kv_blocks), tl.where(is_q, q_len, kv_len)
        all_heads = tl.where(is_q, heads, kv_heads)
        head, first = index // blocks, (index % blocks) * ROWS
        kv_head = head // (all_heads // kv_heads)
        at = tl.where(is_q, 0, 1)
        place = 0
        if SCALING == HEAD:
            at = at * all_kv + kv_head
            place = kv_head
        scale = _scale_for(scaled_by, at, GIVEN, RULE)
        tl.store(tl.where(is_q, q_scale, k_scale) + place, tl.div_rn(1.0, scale), mask=first == 0)
        source = tl.where(is_q, q, k) + (head // all_heads).to(tl.int64) * tl.where(is_q, q_batch, k_batch).to(tl.int64)
        source += (head % all_heads).to(tl.int64) * tl.where(is_q, q_head, k_head).to(tl.int64)
        tile = _head_tile(source, first, length, tl.where(is_q, q_row, k_row), ROWS, D)
        if RECORD:
            raise_amax(recorded, _tile_amax(tile))
        out = tl.where(is_q, q8, k8) + head.to(tl.int64) * length * D
        _head_store(tile, out, first, scale, length, length, False, False, ROWS, D)
    else:
        _cast_values(
            v, v8, v_scale, scaled_by, recorded, index - plain, kv_heads, batches, kv_len, v_len, v_batch, v_head,
            v_row, SCALING, GIVEN, RECORD, RULE, V_ROWS, D,
        )  # fmt: skip


@writes("q8", "k8", "v8", "q_scale", "k_scale", "v_scale")
@triton.jit
def qkv_block_cast_kernel(
    q, k, v, q8, k8, v8, q_scale, k_scale, v_scale, kv_heads, batches, q_len, kv_len, v_len, q_batch, q_head, q_row,
    k_batch, k_head, k_row, v_batch, v_head, v_row, GROUPS: tl.constexpr, RULE: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Casts q, k and v to e4m3 with a scale for 128 positions, v transposed: one read, one launch."""
    q_blocks, kv_blocks = tl.cdiv(q_len, BLOCK_LEN), tl.cdiv(kv_len, BLOCK_LEN)
    index, all_kv = tl.program_id(0), batches * kv_heads
    if index < q_blocks * all_kv:
        _block_cast(
            q, q8, q_scale, index // q_blocks, index % q_blocks, kv_heads, q_len, q_len, q_batch, q_head, q_row,
            GROUPS, False, RULE, D,
        )  # fmt: skip
    elif index < q_blocks * all_kv + kv_blocks * all_kv:
        index -= q_blocks * all_kv
        _block_cast(
            k, k8, k_scale, index // kv_blocks, index % kv_blocks, kv_heads, kv_len, kv_len, k_batch, k_head, k_row,
            1, False, RULE, D,
        )  # fmt: skip
    else:
        index -= q_blocks * all_kv + kv_blocks * all_kv
        _block_cast(
            v, v8, v_scale, index // kv_blocks, index % kv_blocks, kv_heads, kv_len, v_len, v_batch, v_head, v_row,
            1, True, RULE, D,
        )  # fmt: skip


@triton.jit
def scale_place(head, first, length, SCALING: tl.constexpr):
    """Returns the place of the scale of a position of a head."""
    at = head * 0
    if SCALING == HEAD:
        at = head
    elif SCALING == BLOCK:
        at = head * tl.cdiv(length, BLOCK_LEN) + first // BLOCK_LEN
    return at


def _least(scaling: Scaling) -> float:
    return 0.0 if scaling == "tensor" else _LEAST_AMAX


def _padded(length: Any) -> Any:
    return triton.cdiv(length, _KEYS) * _KEYS


def _scales(batches: Any, heads: Any, length: Any, scaling: Scaling, device: torch.device) -> Tensor:
    shapes: dict[str, tuple[Any, ...]] = {
        "tensor": (1,),
        "head": (batches, heads),
        "block": (batches, heads, triton.cdiv(length, BLOCK_LEN.value)),
    }
    return torch.empty(shapes[scaling], dtype=torch.float32, device=device)


def quantize_heads(
    x: Tensor, groups: int, transposed: bool, scaling: Literal["head", "block"] = "head", *,
    dtype: torch.dtype = torch.float8_e4m3fn, multiplier: Tensor | None = None, recorded: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Quantizes x [B, H, S, D] with one scale for each `groups` heads, or their 128 positions: FP8 and the scales.

    The payload is [B, H, S, D]; with `transposed` [B, H, D, Sp], Sp being S padded with zeros to a multiple of 16, and
    its keys in an order of their own (`_KEYS`). What is multiplied by is the largest of `dtype` over the amax, NaN
    ignored; 1 where the amax is not above 1e-12 or infinite. The last dimension of x is dense.

    A `multiplier`, float32 [1], is taken for all heads instead, and then x is read once; the amax of x is taken into
    `recorded`, float32 [1], if that is given, too. Scales of 128 positions are e4m3, and their own.
    """
    batches, heads, length = x.shape[:3]
    head_dim = int(x.shape[3])  # a constant of the kernels
    padded = _padded(length) if transposed else length
    shape = (batches, heads, head_dim, padded) if transposed else (batches, heads, length, head_dim)
    data = torch.empty(shape, dtype=dtype, device=x.device)
    scale_inv = _scales(batches, heads // groups, length, scaling, x.device)
    rule = (_LARGEST[dtype], _LEAST_AMAX, _MOST_MULTIPLIER)
    if scaling == "block":
        grid = (triton.cdiv(length, BLOCK_LEN.value) * (batches * (heads // groups)),)
        wrap_triton(block_cast_kernel)[grid](
            x, data, scale_inv, heads // groups, length, padded, *x.stride()[:3], groups, transposed, rule,
            head_dim, num_warps=head_dim // 16,
        )  # fmt: skip
        return data, scale_inv
    scaled_by = multiplier
    if scaled_by is None:
        scaled_by = torch.zeros((batches, heads // groups), dtype=torch.int32, device=x.device)
        rows = 4096 // head_dim
        grid = (triton.cdiv(length, rows * _STEPS) * (batches * heads),)
        wrap_triton(head_amax_kernel)[grid](
            x, scaled_by, heads, groups, length, *x.stride()[:3], _STEPS, rows, head_dim, num_warps=4
        )
    rows = 64 if transposed else 8192 // head_dim
    grid = (triton.cdiv(padded, rows) * (batches * heads),)
    wrap_triton(head_cast_kernel)[grid](
        x, data, scale_inv, scaled_by, *filled(recorded, device=x.device), heads, groups, length, padded,
        *x.stride()[:3], multiplier is not None, recorded is not None, dtype == torch.float8_e5m2, transposed, rule,
        rows, head_dim, num_warps=8,
    )  # fmt: skip
    return data, scale_inv


def quantize_qkv(
    q: Tensor, k: Tensor, v: Tensor, scaling: Scaling, multiplier: Tensor | None = None, recorded: Tensor | None = None
) -> list[Tensor]:
    """Returns [q8, q_scale, k8, k_scale, v8, v_scale] of q [B, H, Sq, D], k and v [B, Hkv, Sk, D]; v8 is transposed.

    As `quantize_heads` of each, whose query heads share the scale of their key head, with the amaxes of all in one
    launch and their casts in another; scales of blocks need one launch. The last dimensions are dense.

    Of scaling ``tensor`` a `multiplier` for all three, float32 [1], may be given, for which one launch casts, with one
    read; the largest of the amaxes is taken into `recorded`, float32 [1], if that is given as well.
    """
    batches, heads, q_len = q.shape[:3]
    head_dim = int(q.shape[3])  # a constant of the kernels
    kv_heads, kv_len = k.shape[1], k.shape[2]
    v_len = _padded(kv_len)
    shapes = ((batches, heads, q_len, head_dim), (batches, kv_heads, kv_len, head_dim))
    data = [
        torch.empty(shape, dtype=torch.float8_e4m3fn, device=q.device)
        for shape in (*shapes, (batches, kv_heads, head_dim, v_len))
    ]
    scales = [_scales(batches, kv_heads, length, scaling, q.device) for length in (q_len, kv_len, kv_len)]
    steps = [step for x in (q, k, v) for step in x.stride()[:3]]
    rule = (_LARGEST[torch.float8_e4m3fn], _least(scaling), _MOST_MULTIPLIER)
    if scaling == "block":
        grid = ((triton.cdiv(q_len, BLOCK_LEN.value) + 2 * triton.cdiv(kv_len, BLOCK_LEN.value)) * batches * kv_heads,)
        wrap_triton(qkv_block_cast_kernel)[grid](
            q, k, v, *data, *scales, kv_heads, batches, q_len, kv_len, v_len, *steps, int(heads // kv_heads),
            rule, head_dim, num_warps=head_dim // 16,
        )  # fmt: skip
    else:
        scaled_by = multiplier
        if scaled_by is None:
            number = 3 if scaling == "tensor" else 3 * batches * kv_heads
            scaled_by = torch.zeros(number, dtype=torch.int32, device=q.device)
            rows = 4096 // head_dim
            grid = (programs(batches, heads, kv_heads, (q_len, kv_len, kv_len), (rows * _STEPS,) * 3),)
            wrap_triton(qkv_amax_kernel)[grid](
                q, k, v, scaled_by, heads, kv_heads, batches, q_len, kv_len, *steps, KINDS[scaling], _STEPS, rows,
                head_dim, num_warps=4,
            )  # fmt: skip
        rows, v_rows = 8192 // head_dim, min(64, 8192 // head_dim)
        grid = (programs(batches, heads, kv_heads, (q_len, kv_len, v_len), (rows, rows, v_rows)),)
        wrap_triton(qkv_cast_kernel)[grid](
            q, k, v, *data, *scales, scaled_by, *filled(recorded, device=q.device), heads, kv_heads, batches, q_len,
            kv_len, v_len, *steps, KINDS[scaling], multiplier is not None, recorded is not None, rule, rows, v_rows,
            head_dim, num_warps=8,
        )  # fmt: skip
    return [part for pair in zip(data, scales, strict=True) for part in pair]


def programs(batches: Any, heads: Any, kv_heads: Any, lengths: tuple[Any, ...], rows: tuple[int, ...]) -> Any:
    """Returns the number of programs of q, k and v together."""
    blocks = [triton.cdiv(length, count) for length, count in zip(lengths, rows, strict=True)]
    return batches * (heads * blocks[0] + kv_heads * (blocks[1] + blocks[2]))
