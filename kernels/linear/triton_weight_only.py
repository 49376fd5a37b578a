# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Triton kernels for few rows of 16-bit x on Hopper: y [M, N] = x [M, K] w [N, K]^T, of which w alone is quantized.

Reading the weight takes all the time, if decoding it takes no more. So warps share K, each with a product of its own,
and these are added at the end: no warp decodes what another has. Tensor cores multiply x by the weight's elements,
NVFP4's by elements times block scales, which bfloat16 and float16 hold exactly. Scales of tensors and rows come after
the sums. By an FP8 weight one row is a matrix-vector product in float32, without tensor cores. More rows than a warp
has registers for are multiplied by groups of warps (`wide_kernel`).

Kernels may be launched `EARLY`, as those of `fxquant.kernels.linear.triton_few_rows`, which says when, and have its
epilogues.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from fxquant.compat.patches import writes
from fxquant.compat.values import statically_known_true, upper_bound
from fxquant.formats import QuantSpec
from fxquant.kernels.cast.codes import INTERPRETED
from fxquant.kernels.linear.few_rows import EPILOGUES
from fxquant.kernels.linear.triton_few_rows import prefetch_tile, store, whole_rows
from fxquant.kernels.linear.weight_only import Tiles, Wide, is_packed, is_vector

_EPILOGUES = {name: i + 1 for i, name in enumerate(EPILOGUES)}
"""The numbers of `fxquant.kernels.linear.triton_few_rows.epilogue`."""
_BF16_SCALE = tl.constexpr(2.0**119)
"""The factor that takes a block scale to where bfloat16 holds all its products with 2^-126 times an element."""
_BF16_LEAST, _FP16_LEAST = tl.constexpr(2.0**-126), tl.constexpr(2.0**-14)
"""The factors of an element whose bits stand where exponent and mantissa meet."""
_BF16_LEFT, _FP16_LEFT = tl.constexpr(2.0**7), tl.constexpr(2.0**14)
"""The factors that are missing from what `nvfp4_values` returns."""


@triton.jit
def fp8_values(x, BF16: tl.constexpr):
    """Converts e4m3 to bfloat16 or float16, exactly, NaN kept.

    Through float32, since Hopper converts float16 to bfloat16 at a quarter of that rate.
    """
    if INTERPRETED:
        values = x.to(tl.float32).to(tl.bfloat16 if BF16 else tl.float16)
    elif BF16:
        values = tl.inline_asm_elementwise(
            """{ .reg .b16 low, high, a, b, c, d; .reg .b32 p, q; .reg .f32 e, f, g, h;
            mov.b32 {low, high}, $2; cvt.rn.f16x2.e4m3x2 p, low; cvt.rn.f16x2.e4m3x2 q, high;
            mov.b32 {a, b}, p; cvt.f32.f16 e, a; cvt.f32.f16 f, b; cvt.rn.bf16x2.f32 $0, f, e;
            mov.b32 {c, d}, q; cvt.f32.f16 g, c; cvt.f32.f16 h, d; cvt.rn.bf16x2.f32 $1, h, g; }""",
            "=r,=r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        values = x.to(tl.float16)
    return values


@triton.jit
def nvfp4_values(words, scale, BF16: tl.constexpr):
    """Returns the elements in the low and in the high nibbles of bytes, times their scales.

    A nibble's magnitude is put where exponent and mantissa meet: the value of those bits is the element times 2^-126
    (2^-14 in float16), subnormal for 0.5, which the multiplication by a scale makes normal again. In bfloat16 `scale`
    has a factor 2^119 already: the results are 2^-7 of what they stand for, in float16 2^-14. They are exact.
    """
    if INTERPRETED:
        factor = scale.to(tl.float32) * (_BF16_LEAST if BF16 else _FP16_LEAST)
        low = (nibble_value(words & 15) * factor).to(scale.dtype)
        high = (nibble_value(words >> 4) * factor).to(scale.dtype)
    elif BF16:  # no bit of the products by 2^6 + 2^12 and 2^2 + 2^8 meets another
        low, high = tl.inline_asm_elementwise(
            """{ .reg .b32 p, q, r;
            prmt.b32 p, $4, 0, 0x4140; prmt.b32 q, $4, 0, 0x4342;
            and.b32 r, p, 0x000F000F; mul.lo.u32 r, r, 0x1040; and.b32 r, r, 0x81C081C0; mul.rn.bf16x2 $0, r, $5;
            and.b32 r, q, 0x000F000F; mul.lo.u32 r, r, 0x1040; and.b32 r, r, 0x81C081C0; mul.rn.bf16x2 $1, r, $6;
            and.b32 r, p, 0x00F000F0; mul.lo.u32 r, r, 0x0104; and.b32 r, r, 0x81C081C0; mul.rn.bf16x2 $2, r, $5;
            and.b32 r, q, 0x00F000F0; mul.lo.u32 r, r, 0x0104; and.b32 r, r, 0x81C081C0; mul.rn.bf16x2 $3, r, $6;
            }""",
            "=r,=r,=r,=r,r,r,r", [words, scale], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        low, high = tl.inline_asm_elementwise(
            """{ .reg .b32 p, q, r, s;
            prmt.b32 p, $4, 0, 0x4140; prmt.b32 q, $4, 0, 0x4342;
            shl.b32 r, p, 9; and.b32 r, r, 0x0E000E00; shl.b32 s, p, 12; and.b32 s, s, 0x80008000;
            or.b32 r, r, s; mul.rn.f16x2 $0, r, $5;
            shl.b32 r, q, 9; and.b32 r, r, 0x0E000E00; shl.b32 s, q, 12; and.b32 s, s, 0x80008000;
            or.b32 r, r, s; mul.rn.f16x2 $1, r, $6;
            shl.b32 r, p, 5; and.b32 r, r, 0x0E000E00; shl.b32 s, p, 8; and.b32 s, s, 0x80008000;
            or.b32 r, r, s; mul.rn.f16x2 $2, r, $5;
            shl.b32 r, q, 5; and.b32 r, r, 0x0E000E00; shl.b32 s, q, 8; and.b32 s, s, 0x80008000;
            or.b32 r, r, s; mul.rn.f16x2 $3, r, $6;
            }""",
            "=r,=r,=r,=r,r,r,r", [words, scale], dtype=(tl.float16, tl.float16), is_pure=True, pack=4,
        )  # fmt: skip
    return low, high


@triton.jit
def block_scale(scale, BF16: tl.constexpr):
    """Returns the scale of a block as `nvfp4_values` takes it."""
    if BF16:
        scale = (scale.to(tl.float32) * _BF16_SCALE).to(tl.bfloat16)
    else:
        scale = scale.to(tl.float16)
    return scale


@triton.jit
def nibble_value(code):
    """Returns the float32 values of E2M1 codes, one a byte."""
    magnitude = (code & 7).to(tl.int32)
    value = tl.where(magnitude < 2, magnitude * 0.5, ((magnitude + 252) << 22).to(tl.float32, bitcast=True))
    return tl.where(code > 7, -value, value)


@triton.jit
def terms(w_scale, bias, n, N, BY_ROW: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Loads the scales of rows of the weight, or that of its tensor, and their biases: [BN, 1].

    They are asked for before the weight: behind it each layer would wait for them.
    """
    inside = n < N
    scale = tl.load(w_scale + n, mask=inside, other=0.0) if BY_ROW else tl.load(w_scale + n * 0)
    added = tl.load(bias + n, mask=inside, other=0.0).to(tl.float32) if HAS_BIAS else scale * 0
    return scale[:, None], added[:, None]


@writes("y")
@triton.jit
def gemm_kernel(
    x, w, blocks, w_scale, bias, other, y, M, N, K, blocks_K, x_length, x_step,
    FACTOR: tl.constexpr, PACKED: tl.constexpr, BY_ROW: tl.constexpr, HAS_BIAS: tl.constexpr, EPILOGUE: tl.constexpr,
    EVEN: tl.constexpr, SPLIT: tl.constexpr, STEPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUPS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Computes a tile [BM, BN] of y [M, N]; with SPLIT the part of it from STEPS blocks of K, y being [splits, M, N].

    w [N, K] has K bytes a row, of which GROUPS warps take BK each in a step. It is e4m3 or, PACKED, two elements a byte
    with a scale for 8 bytes in `blocks` [N, blocks_K]; x [M, x_length], its rows `x_step` apart, is then read in words
    of two elements, in which all of its sizes count. Sums are multiplied by FACTOR and the weight's scales of its
    tensor or rows.
    """
    first_n = tl.program_id(0) * BN
    n = first_n + tl.arange(0, BN)
    m = tl.arange(0, BM)
    first = tl.program_id(1) * (STEPS * BK * GROUPS)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        prefetch_tile(w, N, K, first_n, first, BN)
        tl.extra.cuda.gdc_wait()
    group = tl.arange(0, GROUPS)[:, None, None]
    k = group * BK + tl.arange(0, BK)[None, None, :]
    down = (tl.minimum(n, N - 1) - first_n)[None, :, None]
    w_tile = w + first_n.to(tl.int64) * K + (down * K + k)
    inside = m[None, :, None] < M
    scale_of_row, added = terms(w_scale, bias, n, N, BY_ROW, HAS_BIAS)
    acc = tl.zeros((GROUPS, BN, BM), tl.float32)
    BF16: tl.constexpr = x.dtype.element_ty == tl.bfloat16
    if PACKED:
        x_tile = x.to(tl.pointer_type(tl.uint32), bitcast=True) + m[None, :, None] * x_step + k
        block = group * (BK // 8) + tl.arange(0, BK // 8)[None, None, :]
        block_tile = blocks + first_n.to(tl.int64) * blocks_K + (down * blocks_K + block)
    else:
        x_tile = x + m[None, :, None] * x_step + k
    ZERO: tl.constexpr = 0 if PACKED else 0.0
    for step in tl.range(0, STEPS):
        at = first + step * (BK * GROUPS)
        if EVEN:
            weights = tl.load(w_tile + at, eviction_policy="evict_first")
            tokens = tl.load(x_tile + at, mask=inside, other=ZERO)
        else:
            weights = tl.load(w_tile + at, mask=at + k < K, other=ZERO, eviction_policy="evict_first")
            tokens = tl.load(x_tile + at, mask=inside & (at + k < x_length), other=ZERO)
        if PACKED:
            if EVEN:
                scale = tl.load(block_tile + at // 8, eviction_policy="evict_first")
            else:
                scale = tl.load(
                    block_tile + at // 8, mask=at // 8 + block < blocks_K, other=0.0, eviction_policy="evict_first"
                )
            scale = block_scale(scale, BF16)
            scale = tl.broadcast_to(tl.expand_dims(scale, 3), (GROUPS, BN, BK // 8, 8))
            low, high = nvfp4_values(weights, tl.reshape(scale, (GROUPS, BN, BK)), BF16)
            even = (tokens & 0xFFFF).to(tl.uint16).to(x.dtype.element_ty, bitcast=True)
            odd = (tokens >> 16).to(tl.uint16).to(x.dtype.element_ty, bitcast=True)
            acc = tl.dot(low, tl.permute(even, (0, 2, 1)), acc)
            acc = tl.dot(high, tl.permute(odd, (0, 2, 1)), acc)
        else:
            acc = tl.dot(fp8_values(weights, BF16), tl.permute(tokens, (0, 2, 1)), acc)
    left = (_BF16_LEFT if BF16 else _FP16_LEFT) if PACKED else 1.0
    out = tl.sum(acc, axis=0) * (scale_of_row * (FACTOR * left))
    if HAS_BIAS:
        out = out + added
    place = m[:, None] * N + n[None, :]
    stored = (m[:, None] < M) & (n[None, :] < N)
    if SPLIT:
        place += tl.program_id(1) * M * N
    store(y, other, place, tl.trans(out).to(y.dtype.element_ty), stored, EPILOGUE)


@writes("y")
@triton.jit
def wide_kernel(
    x, odd, w, blocks, w_scale, bias, y, M, N, K, blocks_K, x_length, x_step,
    FACTOR: tl.constexpr, PACKED: tl.constexpr, BY_ROW: tl.constexpr, HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr, SPLIT: tl.constexpr, STEPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Computes a tile as `gemm_kernel` does, of more rows of x, with all warps: of w [N, K] they take BK bytes a step.

    PACKED, x [M, x_length] has the elements of even places and `odd` those of odd places.
    """
    first_n = tl.program_id(0) * BN
    n = first_n + tl.arange(0, BN)
    m = tl.arange(0, BM)[:, None]
    first = tl.program_id(1) * (STEPS * BK)
    k = tl.arange(0, BK)[None, :]
    down = (tl.minimum(n, N - 1) - first_n)[:, None]
    w_tile = w + first_n.to(tl.int64) * K + (down * K + k)
    x_tile = m * x_step + k
    scale_of_row, added = terms(w_scale, bias, n, N, BY_ROW, HAS_BIAS)
    acc = tl.zeros((BN, BM), tl.float32)
    BF16: tl.constexpr = x.dtype.element_ty == tl.bfloat16
    if PACKED:
        block = tl.arange(0, BK // 8)[None, :]
        block_tile = blocks + first_n.to(tl.int64) * blocks_K + (down * blocks_K + block)
    ZERO: tl.constexpr = 0 if PACKED else 0.0
    for step in tl.range(0, STEPS):
        at = first + step * BK
        inside = m < M if EVEN else (m < M) & (at + k < x_length)
        tokens = tl.load(x + x_tile + at, mask=inside, other=0.0)
        if EVEN:
            weights = tl.load(w_tile + at)
        else:
            weights = tl.load(w_tile + at, mask=at + k < K, other=ZERO)
        if PACKED:
            tokens_odd = tl.load(odd + x_tile + at, mask=inside, other=0.0)
            if EVEN:
                scale = tl.load(block_tile + at // 8)
            else:
                scale = tl.load(block_tile + at // 8, mask=at // 8 + block < blocks_K, other=0.0)
            scale = block_scale(scale, BF16)
            scale = tl.broadcast_to(tl.expand_dims(scale, 2), (BN, BK // 8, 8))
            low, high = nvfp4_values(weights, tl.reshape(scale, (BN, BK)), BF16)
            acc = tl.dot(low, tl.trans(tokens), acc)
            acc = tl.dot(high, tl.trans(tokens_odd), acc)
        else:
            acc = tl.dot(fp8_values(weights, BF16), tl.trans(tokens), acc)
    left = (_BF16_LEFT if BF16 else _FP16_LEFT) if PACKED else 1.0
    out = acc * (scale_of_row * (FACTOR * left))
    if HAS_BIAS:
        out = out + added
    place = m * N + n[None, :]
    if SPLIT:
        place += tl.program_id(1) * M * N
    tl.store(y + place, tl.trans(out).to(y.dtype.element_ty), mask=(m < M) & (n[None, :] < N))


@writes("y")
@triton.jit
def vector_kernel(
    x, w, w_scale, bias, other, y, N, K, x_length, BY_ROW: tl.constexpr, HAS_BIAS: tl.constexpr, EPILOGUE: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Computes BN elements of y [N] from whole rows of an e4m3 weight, in float32; BK is a power of two from K on."""
    n, weights, tokens = whole_rows(x, w, N, K, x_length, BN, BK, EARLY)
    scale_of_row, added = terms(w_scale, bias, n, N, BY_ROW, HAS_BIAS)
    out = tl.sum(weights.to(tl.float32) * tokens[None, :], axis=1)[:, None] * scale_of_row
    if HAS_BIAS:
        out = out + added
    store(y, other, n[:, None], out.to(y.dtype.element_ty), (n < N)[:, None], EPILOGUE)


def scaled_mm(
    x: Tensor, b: Sequence[Tensor], b_spec: QuantSpec, bias: Tensor | None, out_dtype: torch.dtype,
    epilogue: str | None = None, other: Tensor | None = None, early: bool = False,
) -> Tensor:  # fmt: skip
    """`reference.scaled_mm` of x [M, K], bfloat16 or float16, and b [N, K], where `weight_only.supports` its format.

    The result, rounded to `out_dtype`, goes through one of `EPILOGUES`, of which the first two read `other` [M, N].
    A kernel that is `early` waits for the one before it, so that it may be launched while that runs (on Hopper).
    """
    w, packed = b[0].contiguous(), is_packed(b_spec)
    size_m, (size_n, row_bytes) = x.shape[0], w.shape
    w_scale = b[-1].contiguous()
    by_row, more = w_scale.ndim > 1, 0 if epilogue is None else _EPILOGUES[epilogue]

    def unread() -> Tensor:
        return torch.empty(1, dtype=torch.float32, device=x.device)

    other = unread() if other is None else other.contiguous()
    if is_vector(size_m, row_bytes, b_spec):
        y = torch.empty((1, size_n), dtype=out_dtype, device=x.device)
        block_k = max(triton.next_power_of_2(row_bytes), 128)
        block_n, warps = 4 if block_k <= 16384 else 2, min(max(block_k // 1024, 4), 16)
        wrap_triton(vector_kernel)[(triton.cdiv(size_n, block_n),)](
            x.contiguous(), w, w_scale, unread() if bias is None else bias.contiguous(), other, y, size_n, row_bytes,
            x.shape[1], by_row, bias is not None, more, block_n, block_k, early, num_warps=warps,
        )  # fmt: skip
        return y
    words = 2 if packed else 1
    x = _readable(x, words)
    tiles = Tiles.of(upper_bound(size_m), size_n, b_spec)
    split, steps = tiles.steps(size_n, row_bytes)
    y = torch.empty(
        (size_m, size_n) if split == 1 else (split, size_m, size_n),
        dtype=out_dtype if split == 1 else torch.float32, device=x.device,
    )  # fmt: skip
    added = None if bias is None or split > 1 else bias.contiguous()
    blocks = b[1].contiguous() if packed else unread()
    even = row_bytes % (tiles.k * tiles.warps * split) == 0 and x.shape[1] == row_bytes * words
    wrap_triton(gemm_kernel)[(triton.cdiv(size_n, tiles.n), split)](
        x, w, blocks, w_scale, unread() if added is None else added, other, y, size_m, size_n, row_bytes,
        blocks.shape[-1], x.shape[1] // words, x.stride(0) // words, 1 / b_spec.unit_amax if packed else 1.0, packed,
        by_row, added is not None, more if split == 1 else 0, even, split > 1, steps, tiles.m, tiles.n, tiles.k,
        tiles.warps, early, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    if split == 1:
        return y
    assert epilogue is None, "partial sums are added by another kernel"
    return _added(y, bias, out_dtype)


def wide_mm(
    x: Tensor, b: Sequence[Tensor], b_spec: QuantSpec, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:  # fmt: skip
    """`scaled_mm` of up to `weight_only.MOST_ROWS` rows, in tiles of all of them."""
    w, packed = b[0].contiguous(), is_packed(b_spec)
    size_m, (size_n, row_bytes) = x.shape[0], w.shape
    w_scale, words = b[-1].contiguous(), 2 if packed else 1
    x, odd = _halves(x) if packed else (_readable(x, 1),) * 2
    tiles = Wide.of(upper_bound(size_m))
    split, steps = tiles.steps(size_n, row_bytes * words)
    size = (size_m, size_n) if split == 1 else (split, size_m, size_n)
    y = torch.empty(size, dtype=out_dtype if split == 1 else torch.float32, device=x.device)
    added = None if bias is None or split > 1 else bias.contiguous()
    blocks, step = b[1].contiguous() if packed else w_scale, tiles.k // words
    even = row_bytes % (step * split) == 0 and x.shape[1] == row_bytes
    wrap_triton(wide_kernel)[(triton.cdiv(size_n, tiles.n), split)](
        x, odd, w, blocks, w_scale, w_scale if added is None else added, y, size_m, size_n, row_bytes,
        blocks.shape[-1] if packed else 0, x.shape[1], x.stride(0), 1 / b_spec.unit_amax if packed else 1.0, packed,
        w_scale.ndim > 1, added is not None, even, split > 1, steps, tiles.m, tiles.n, step,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return y if split == 1 else _added(y, bias, out_dtype)


def _added(y: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Returns the sum of the parts of K in y [splits, M, N], with the bias."""
    y = y.sum(0)
    return (y if bias is None else y + bias.float()).to(out_dtype)


def _halves(x: Tensor) -> Sequence[Tensor]:
    """Returns the elements of x [M, K] at even places and those at odd places, each [M, K / 2], 0 behind the last."""
    x = torch.nn.functional.pad(x, (0, 1)) if x.shape[1] % 2 else x
    even, odd = x.unflatten(1, (-1, 2)).permute(2, 0, 1).clone(memory_format=torch.contiguous_format).unbind()
    return even, odd


def _readable(x: Tensor, words: int) -> Tensor:
    """Returns x with its rows dense; in words of two elements also even and aligned, as a view of others may not be."""
    if words == 2 and x.shape[1] % 2:
        return torch.nn.functional.pad(x, (0, 1))
    aligned = statically_known_true(x.storage_offset() % words == 0) and statically_known_true(x.stride(0) % words == 0)
    if x.stride(1) == 1 and aligned:
        return x
    return x.clone(memory_format=torch.contiguous_format)
