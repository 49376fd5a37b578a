# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Triton kernels for few tokens on Hopper: y [M, N] = x [M, K] w [N, K]^T with FP8 weights, M up to 64.

Reading the weight takes all the time. One token is quantized by each program of a matrix-vector product as it reads it.
More are quantized by a kernel of their own, and multiplied on tensor cores: the weight is the operand whose rows fill
their 64, the tokens, padded to 16, 32 or 64, are the other.

Kernels that are told so may be launched `EARLY`, while the one before them still runs (programmatic dependent launch).
Each lets the next one in as it starts (`amax_kernel` once it has waited), and waits for the end of the one before it
until it reads or writes anything; a GEMM asks for the beginning of its weight first. So their launches take hardly any
time.

The bytes are those of `fxquant.kernels.cast.reference.quantize`. A kernel is given no tensor twice, nor one in the
place of arguments that it does not read: Inductor would write a copy of it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from fxquant.compat.patches import writes
from fxquant.compat.values import upper_bound
from fxquant.formats import QuantSpec
from fxquant.kernels.cast.codes import INTERPRETED, magnitude, multiplier, multiplier_rule
from fxquant.kernels.linear.few_rows import EPILOGUES, MULTIPROCESSORS, Tiles, is_one_row

_TENSOR, _ROW, _BLOCK = (tl.constexpr(i) for i in range(3))
"""The kinds of scales: of a tensor, of each row, of blocks."""
_PIECE = 2048
"""Elements of a row that a program takes, where no more have a scale in common."""
_KINDS = {"per_tensor": _TENSOR, "per_row": _ROW, "block": _BLOCK}
_AHEAD = {_TENSOR.value: 8 << 20, _ROW.value: 4 << 20, _BLOCK.value: 8 << 20}
"""Bytes of a weight to bring into L2 while its GEMM's activation is quantized: as many as memory can read then."""
_PAYLOAD, _GIVEN, _OWN = (tl.constexpr(i) for i in range(3))
"""The sources of x: FP8 already, a tensor with its multiplier, a tensor that is scaled by its own amax."""
_NONE, _ADD, _SILU_MUL, _GELU, _GELU_TANH = (tl.constexpr(i) for i in range(5))
_EPILOGUES = dict(zip(EPILOGUES, (_ADD, _SILU_MUL, _GELU, _GELU_TANH), strict=True))
_SQRT_HALF, _SQRT_2_PI, _CUBE = (tl.constexpr(c) for c in (0.7071067811865476, 0.7978845608028654, 0.044715))


@triton.jit
def epilogue(y, other, EPILOGUE: tl.constexpr):
    """Applies an EPILOGUE to the rounded result y of a GEMM, in float32; `other` has its shape, and may be unread."""
    if EPILOGUE == _ADD:
        y = y + other
    elif EPILOGUE == _SILU_MUL:
        y = other / (1.0 + tl.exp(-other)) * y
    elif EPILOGUE == _GELU:
        y = y * 0.5 * (tl.erf(y * _SQRT_HALF) + 1.0)
    else:
        tl.static_assert(EPILOGUE == _GELU_TANH)
        y = y / (1.0 + tl.exp(-(y + y * _CUBE * y * y) * (2.0 * _SQRT_2_PI)))
    return y


@triton.jit
def store(y, other, place, out, inside, EPILOGUE: tl.constexpr):
    """Stores the rounded result `out` of a GEMM at a `place` of y, after an EPILOGUE that may read `other` there."""
    if EPILOGUE != _NONE:
        more = tl.load(other + place, mask=inside & (EPILOGUE <= _SILU_MUL), other=0.0).to(tl.float32)
        out = epilogue(out.to(tl.float32), more, EPILOGUE).to(y.dtype.element_ty)
    tl.store(y + place, out, mask=inside)


@triton.jit
def tiles_of(x, w_step, down, m, M, K, at, x_length, x_step, BK: tl.constexpr, EVEN: tl.constexpr):
    """Loads BK columns from `at` on of a program's rows of the weight, `down` from `w_step`, and of the M rows of x."""
    k = tl.arange(0, BK)
    columns = (at + k)[None, :]
    w_step += down[:, None] + k[None, :]
    x += m[:, None] * x_step + columns
    if EVEN:
        weights = tl.load(w_step, eviction_policy="evict_first")
        tokens = tl.load(x, mask=m[:, None] < M, other=0.0)
    else:
        weights = tl.load(w_step, mask=columns < K, other=0.0, eviction_policy="evict_first")
        tokens = tl.load(x, mask=(m[:, None] < M) & (columns < x_length), other=0.0)
    return weights, tokens


@triton.jit
def block_product(x, w_step, down, m, M, K, at, x_length, x_step, EVEN: tl.constexpr):
    """Returns the product of 128 columns from `at` on, with a scale for each row of x and one for the weight's."""
    weights, tokens = tiles_of(x, w_step, down, m, M, K, at, x_length, x_step, 128, EVEN)
    return tl.dot(weights, tl.trans(tokens))


@triton.jit
def block_scales(x_scale, w_scale, m, M, K, at, x_scale_step, x_scale_column_step):
    """Loads the scales of the 128 columns from `at` on, or of the last: of M rows of x, and that of the weight's."""
    block = tl.minimum(at, K - 128) // 128
    of_x = tl.load(x_scale + m * x_scale_step + block * x_scale_column_step, mask=m < M, other=0.0)
    return of_x, tl.load(w_scale + block)


@triton.jit
def prefetch_tile(w, N, K, first_n, first_k, BN: tl.constexpr):
    """Asks for the first two lines of each of a program's BN rows of w [N, K] to be brought into L2."""
    i = tl.arange(0, BN * 2)
    n = tl.minimum(first_n + i // 2, N - 1)
    address = w + n.to(tl.int64) * K + tl.minimum(first_k + i % 2 * 128, K - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )


@writes("y")
@triton.jit
def gemm_kernel(
    x, x_arg, w, w_scale, bias, other, y, M, N, K, x_length, x_step, x_scale_step, x_scale_column_step, parts,
    X_KIND: tl.constexpr, X_SOURCE: tl.constexpr, W_KIND: tl.constexpr, RULE: tl.constexpr,
    PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, EPILOGUE: tl.constexpr, EVEN: tl.constexpr, SPLIT: tl.constexpr,
    STEPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Computes a tile [BM, BN] of y [M, N]; with SPLIT the part of it from STEPS blocks of K, y being [splits, M, N].

    x [M, x_length] is a payload or, with scales per tensor, to be multiplied by a number given or by that of its amax,
    the largest of `parts` numbers; its rows are `x_step` apart. w [N, K] is contiguous, with K a multiple of 16 and,
    where scales are of blocks, of 128; BK is then twice that.
    """
    first_n = tl.program_id(0) * BN
    n = first_n + tl.arange(0, BN)
    m = tl.arange(0, BM)
    first = tl.program_id(1) * (STEPS * BK)
    w_tile = w + first_n.to(tl.int64) * K + first
    down = (tl.minimum(n, N - 1) - first_n) * K
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        prefetch_tile(w, N, K, first_n, first, BN)
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros((BN, BM), tl.float32)
    if X_SOURCE == _GIVEN:
        factor = tl.load(x_arg)
    elif X_SOURCE == _OWN:
        i = tl.arange(0, PARTS)
        amax = tl.max(tl.load(x_arg + i, mask=i < parts, other=0.0), axis=0)
        factor = multiplier(amax, RULE)
    elif X_KIND == _TENSOR:  # asked for here, a scale comes while the products are made
        of_x = tl.load(x_arg)
    elif X_KIND == _ROW:
        of_x = tl.load(x_arg + m * x_scale_step, mask=m < M, other=0.0)[None, :]
    if W_KIND == _TENSOR:
        of_w = tl.load(w_scale)
    elif W_KIND == _ROW:
        of_w = tl.load(w_scale + n, mask=n < N, other=0.0)[:, None]
    if X_KIND == _BLOCK:  # scales are asked for as soon as the ones before them are used
        tl.static_assert(BK == 256)
        w_scale += first_n // 128 * (K // 128)
        even_x, even_w = block_scales(x_arg, w_scale, m, M, K, first, x_scale_step, x_scale_column_step)
        odd_x, odd_w = block_scales(x_arg, w_scale, m, M, K, first + 128, x_scale_step, x_scale_column_step)
    for step in tl.range(0, STEPS):
        at = first + step * BK
        w_step = w_tile + step * BK
        if X_KIND == _BLOCK:
            product = block_product(x, w_step, down, m, M, K, at, x_length, x_step, EVEN)
            acc += product * (even_x * even_w)[None, :]
            even_x, even_w = block_scales(x_arg, w_scale, m, M, K, at + BK, x_scale_step, x_scale_column_step)
            product = block_product(x, w_step + 128, down, m, M, K, at + 128, x_length, x_step, EVEN)
            acc += product * (odd_x * odd_w)[None, :]
            odd_x, odd_w = block_scales(x_arg, w_scale, m, M, K, at + BK + 128, x_scale_step, x_scale_column_step)
        else:
            weights, tokens = tiles_of(x, w_step, down, m, M, K, at, x_length, x_step, BK, EVEN)
            if X_SOURCE != _PAYLOAD:
                tokens = (tokens.to(tl.float32) * factor).to(w.dtype.element_ty)
            acc = tl.dot(weights, tl.trans(tokens), acc)
    if X_SOURCE != _PAYLOAD:
        acc = acc * tl.div_rn(1.0, factor)
    elif X_KIND != _BLOCK:
        acc = acc * of_x
    if W_KIND != _BLOCK:
        acc = acc * of_w
    if HAS_BIAS:
        acc = acc + tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    place = m[:, None] * N + n[None, :]
    inside = (m[:, None] < M) & (n[None, :] < N)
    if SPLIT:
        place += tl.program_id(1) * M * N
    store(y, other, place, tl.trans(acc).to(y.dtype.element_ty), inside, EPILOGUE)


@triton.jit
def prefetch(w, N, K, first, programs, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """Asks for the first COLUMNS bytes of a share of the rows of w [N, K] to be brought into L2.

    That of the program `first` along the first axis and its own along the second, ROWS at a time, one a thread.
    """
    share = tl.cdiv(N, programs * tl.num_programs(1))
    begin = (first * tl.num_programs(1) + tl.program_id(1)) * share
    for start in range(0, share, ROWS):
        n = tl.minimum(begin + start + tl.arange(0, ROWS), N - 1)
        for column in tl.static_range(0, COLUMNS, 128):
            address = w + n.to(tl.int64) * K + column
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
            )


@triton.jit
def piece_amax(x, part, x_length, x_step, BK: tl.constexpr):
    """Stores the amax of a program's BK elements of a row."""
    m, piece = tl.program_id(0), tl.program_id(1)
    k = piece * BK + tl.arange(0, BK)
    values = tl.load(x + m * x_step + k, mask=k < x_length, other=0.0).to(tl.float32)
    tl.store(part + m * tl.num_programs(1) + piece, tl.max(magnitude(values), axis=0))


@writes("part")
@triton.jit
def amax_kernel(
    x, part, ahead, M, x_length, x_step, ahead_rows, ahead_step, BK: tl.constexpr, AHEAD: tl.constexpr,
    THREADS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Stores the amaxes of pieces of BK elements of rows of x [M, x_length]: part [M, x_length / BK], in any order.

    The rest is as in `quantize_kernel`. What comes next is let in once the wait is over: as this starts, the cast and
    the GEMM behind it came in at once, and layers took one of two times, half a microsecond apart.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if AHEAD == 0:
        piece_amax(x, part, x_length, x_step, BK)
    elif tl.program_id(0) < M:
        piece_amax(x, part, x_length, x_step, BK)
    elif not INTERPRETED:
        prefetch(ahead, ahead_rows, ahead_step, tl.program_id(0) - M, tl.num_programs(0) - M, AHEAD, THREADS)


@triton.jit
def quantize_piece(
    x, arg, data, scale, M, x_length, K, x_step, parts, KIND: tl.constexpr, SOURCE: tl.constexpr, RULE: tl.constexpr,
    PARTS: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Quantizes a program's BK elements of a row."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    m, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    k = piece * BK + tl.arange(0, BK)
    values = tl.load(x + m * x_step + k, mask=k < x_length, other=0.0).to(tl.float32)
    if KIND == _BLOCK:
        groups = tl.reshape(values, (BK // 128, 128))
        amax = tl.max(magnitude(groups), axis=1)
        factor = multiplier(amax, RULE)
        values = tl.reshape(groups * factor[:, None], (BK,))
        block = piece * (BK // 128) + tl.arange(0, BK // 128)
        tl.store(scale + block * M + m, tl.div_rn(1.0, factor), mask=block < K // 128)
    else:
        if SOURCE == _GIVEN:
            factor = tl.load(arg)
        else:
            if KIND == _ROW:
                amax = tl.max(magnitude(values), axis=0)
            else:
                i = tl.arange(0, PARTS)
                amax = tl.max(tl.load(arg + i, mask=i < parts, other=0.0), axis=0)
            factor = multiplier(amax, RULE)
        values = values * factor
        if KIND == _ROW or (m + piece == 0):
            tl.store(scale + m, tl.div_rn(1.0, factor))
    tl.store(data + m * K + k, values.to(data.dtype.element_ty), mask=k < K)


@writes("data", "scale")
@triton.jit
def quantize_kernel(
    x, arg, data, scale, ahead, M, x_length, K, x_step, parts, ahead_rows, ahead_step,
    KIND: tl.constexpr, SOURCE: tl.constexpr, RULE: tl.constexpr, PARTS: tl.constexpr, BK: tl.constexpr,
    AHEAD: tl.constexpr, THREADS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Quantizes pieces of BK elements of rows of x [M, x_length] into data [M, K], padded with zeros; BK >= K for _ROW.

    `arg` is the multiplier given, or the tensor's amax as that of `parts` numbers. `ahead` is the weight that is read
    next: programs beyond the M rows bring its first AHEAD columns into the L2 cache. Scales of blocks are transposed,
    [K / 128, M], so that the GEMM reads those of a step side by side.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    if AHEAD == 0:
        quantize_piece(x, arg, data, scale, M, x_length, K, x_step, parts, KIND, SOURCE, RULE, PARTS, BK, EARLY)
    elif tl.program_id(0) < M:
        quantize_piece(x, arg, data, scale, M, x_length, K, x_step, parts, KIND, SOURCE, RULE, PARTS, BK, EARLY)
    elif not INTERPRETED:
        prefetch(ahead, ahead_rows, ahead_step, tl.program_id(0) - M, tl.num_programs(0) - M, AHEAD, THREADS)


@triton.jit
def whole_rows(x, w, N, K, x_length, BN: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr):
    """Returns the numbers of this program's BN rows of the weight, their elements, and those of x [x_length]."""
    first_n = tl.program_id(0) * BN
    n = first_n + tl.arange(0, BN)
    k = tl.arange(0, BK)
    w_tile = w + first_n.to(tl.int64) * K
    down = (tl.minimum(n, N - 1) - first_n) * K
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    weights = tl.load(
        w_tile + (down[:, None] + k[None, :]), mask=(k < K)[None, :], other=0.0, eviction_policy="evict_first"
    )
    return n, weights, tl.load(x + k, mask=k < x_length, other=0.0).to(tl.float32)


@writes("y")
@triton.jit
def gemv_kernel(
    x, x_arg, w, w_scale, bias, other, y, N, K, x_length, x_scale_column_step,
    X_KIND: tl.constexpr, X_SOURCE: tl.constexpr, W_KIND: tl.constexpr, RULE: tl.constexpr,
    HAS_BIAS: tl.constexpr, EPILOGUE: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Computes BN elements of y [N] from whole rows of the weight without tensor cores; BK is a power of two from K on.

    x [x_length] is a payload with its scale, or to be quantized by a multiplier given or by its own amaxes.
    """
    first_n = tl.program_id(0) * BN
    n, weights, tokens = whole_rows(x, w, N, K, x_length, BN, BK, EARLY)
    if X_KIND == _BLOCK:
        block = tl.arange(0, BK // 128)
        groups = tl.reshape(tokens, (BK // 128, 128))
        if X_SOURCE == _PAYLOAD:
            scale = tl.load(x_arg + block * x_scale_column_step, mask=block < K // 128, other=0.0)
        else:
            amax = tl.max(magnitude(groups), axis=1)
            factor = multiplier(amax, RULE)
            groups = (groups * factor[:, None]).to(w.dtype.element_ty).to(tl.float32)
            scale = tl.div_rn(1.0, factor)
        scale *= tl.load(w_scale + first_n // 128 * (K // 128) + block, mask=block < K // 128, other=0.0)
        tokens = tl.reshape(groups * scale[:, None], (BK,))
    elif X_SOURCE == _PAYLOAD:
        scale = tl.load(x_arg)
    else:
        if X_SOURCE == _GIVEN:
            factor = tl.load(x_arg)
        else:
            amax = tl.max(magnitude(tokens), axis=0)
            factor = multiplier(amax, RULE)
        tokens = (tokens * factor).to(w.dtype.element_ty).to(tl.float32)
        scale = tl.div_rn(1.0, factor)
    out = tl.sum(weights.to(tl.float32) * tokens[None, :], axis=1)
    if X_KIND != _BLOCK:
        out = out * scale
    if W_KIND == _TENSOR:
        out = out * tl.load(w_scale)
    elif W_KIND == _ROW:
        out = out * tl.load(w_scale + n, mask=n < N, other=0.0)
    if HAS_BIAS:
        out = out + tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    store(y, other, n, out.to(y.dtype.element_ty), n < N, EPILOGUE)


def scaled_mm(
    a: Sequence[Tensor], a_spec: QuantSpec, b: Sequence[Tensor], b_spec: QuantSpec, bias: Tensor | None,
    out_dtype: torch.dtype, epilogue: str | None = None, other: Tensor | None = None, early: bool = False,
) -> Tensor:  # fmt: skip
    """`reference.scaled_mm` of a [M, K] and b [N, K], where `few_rows.supports` them, summed as `_scaled_mm` does fast.

    `a` is payload and scale; or, where `few_rows.quantizes_itself`, the tensor, alone or with its multiplier [1].
    The result, rounded to `out_dtype`, goes through one of `EPILOGUES`, of which the first two read `other` [M, N].
    A kernel that is `early` waits for the one before it, so that it may be launched while that runs (on Hopper).
    """
    x, (w, w_scale) = a[0], b
    size_m, (size_n, size_k) = x.shape[0], w.shape
    x_kind, w_kind = _KINDS[a_spec.row.family].value, _KINDS[b_spec.row.family].value
    w_scale = w_scale.contiguous()
    unread = functools.partial(torch.empty, 1, dtype=torch.float32, device=x.device)
    source = (_PAYLOAD if x.dtype == w.dtype else _OWN if len(a) == 1 else _GIVEN).value
    more = _NONE.value if epilogue is None else _EPILOGUES[epilogue].value
    other = unread() if other is None else other.contiguous()
    if is_one_row(size_m, size_k):
        x = x.contiguous()
        y = torch.empty((1, size_n), dtype=out_dtype, device=x.device)
        block_k = max(triton.next_power_of_2(size_k), 128)
        block_n, warps = 4 if block_k <= 16384 else 2, min(max(block_k // 1024, 4), 16)
        scale = a[1] if len(a) > 1 else unread()
        wrap_triton(gemv_kernel)[(triton.cdiv(size_n, block_n),)](
            x, scale, w, w_scale, unread() if bias is None else bias.contiguous(), other, y, size_n, size_k, x.shape[1],
            scale.stride(-1), x_kind, source, w_kind, multiplier_rule(a_spec, x.dtype), bias is not None, more,
            block_n, block_k, early, num_warps=warps,
        )  # fmt: skip
        return y
    tiles = Tiles.of(upper_bound(size_m), casts=source != _PAYLOAD.value)
    columns, (split, steps) = triton.cdiv(size_n, tiles.n), tiles.steps(size_n, size_k)
    if source != _PAYLOAD.value and x.stride(1) != 1:
        x = x.contiguous()
    scale, parts, most_parts = (a[1], 0, 1) if len(a) > 1 else _amaxes(x, w, a_spec, early)
    y = torch.empty(
        (size_m, size_n) if split == 1 else (split, size_m, size_n),
        dtype=out_dtype if split == 1 else torch.float32, device=x.device,
    )  # fmt: skip
    scale_steps = (scale.stride(0), scale.stride(-1)) if scale.ndim == 2 else (0, 0)
    given_bias = None if bias is None or split > 1 else bias.contiguous()
    even = size_k % (tiles.k * split) == 0 and x.shape[1] == size_k
    wrap_triton(gemm_kernel)[(columns, split)](
        x, scale, w, w_scale, unread() if given_bias is None else given_bias, other, y, size_m, size_n, size_k,
        x.shape[1], x.stride(0), *scale_steps, parts, x_kind, source, w_kind, multiplier_rule(a_spec, x.dtype),
        triton.next_power_of_2(most_parts), given_bias is not None, more if split == 1 else _NONE.value, even,
        split > 1, steps, tiles.m, tiles.n, tiles.k, early, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    if split == 1:
        return y
    assert epilogue is None, "partial sums are added by another kernel"
    y = y.sum(0)
    return (y if bias is None else y + bias.float()).to(out_dtype)


def quantize(
    x: Tensor, spec: QuantSpec, multiplier: Tensor | None = None, ahead: Tensor | None = None, early: bool = False
) -> list[Tensor]:
    """`reference.quantize` of x [M, K], where `few_rows.quantizes` says so.

    `ahead` is the weight [N, K] that a GEMM reads next: the memory, otherwise idle, brings its beginning into L2. A
    GEMM that is launched `early`, as the kernels here then may be, does better to do so itself.
    """
    if x.stride(1) != 1:
        x = x.contiguous()
    size_m, length = x.shape
    size_k = triton.cdiv(length, spec.row.alignment) * spec.row.alignment
    kind = _KINDS[spec.row.family]
    piece = _PIECE if kind is not _ROW else triton.next_power_of_2(size_k)
    pieces = triton.cdiv(size_k, piece)
    shape = {_TENSOR: (1,), _ROW: (size_m, 1), _BLOCK: (size_k // 128, size_m)}[kind]
    data = torch.empty((size_m, size_k), dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(shape, dtype=torch.float32, device=x.device)
    unread = functools.partial(torch.empty, 1, dtype=torch.float32, device=x.device)
    argument, parts, most_parts = unread() if multiplier is None else multiplier, 0, 1
    if kind is _TENSOR and multiplier is None:
        argument, parts, most_parts = _amaxes(x, ahead, spec, early)
        ahead = None
    coming, programs = _ahead(ahead, upper_bound(size_m), kind.value, pieces)
    warps = 8 if kind is _ROW else 4
    wrap_triton(quantize_kernel)[(size_m + programs, pieces)](
        x, argument, data, scale, unread() if ahead is None else ahead, size_m, length, size_k, x.stride(0), parts,
        *coming[:2], kind.value, (_OWN if multiplier is None else _GIVEN).value, multiplier_rule(spec, x.dtype),
        triton.next_power_of_2(most_parts), piece, coming[2], 32 * warps, early, num_warps=warps,
    )  # fmt: skip
    return [data, scale.t() if kind is _BLOCK else scale]


def _amaxes(x: Tensor, ahead: Tensor | None, spec: QuantSpec, early: bool) -> tuple[Tensor, Any, int]:
    """Returns the amaxes of pieces of x [M, K], dense in rows, their number, and the most that it can be."""
    size_m, length = x.shape
    pieces = triton.cdiv(length, _PIECE)
    part = torch.empty(size_m * pieces, dtype=torch.float32, device=x.device)
    coming, programs = _ahead(ahead, upper_bound(size_m), _KINDS[spec.row.family].value, pieces)
    weight = torch.empty(1, dtype=torch.float32, device=x.device) if ahead is None else ahead
    wrap_triton(amax_kernel)[(size_m + programs, pieces)](
        x, part, weight, size_m, length, x.stride(0), *coming[:2], _PIECE, coming[2], 128, early, num_warps=4
    )
    return part, size_m * pieces, upper_bound(size_m) * pieces


def _ahead(weight: Tensor | None, rows: int, kind: int, pieces: int) -> tuple[tuple[int, int, int], int]:
    """Returns the part of a weight to bring into L2 for `rows` tokens: rows, bytes from one to the next, bytes of each.

    The number of programs follows, for each of `pieces`. The part is whole lines, some megabytes in all. A GEMM that is
    split over K begins with the first bytes of each part.
    """
    if weight is None:
        return (0, 0, 0), 0
    size_n, size_k = weight.shape
    split, _ = Tiles.of(rows, casts=False).steps(size_n, size_k)
    parts, step = (size_n * split, size_k // split) if size_k % split == 0 else (size_n, size_k)
    columns = min(_AHEAD[kind] // parts, step, 1024)
    if columns < 128:
        return (0, 0, 0), 0
    return (parts, step, 1 << columns.bit_length() - 1), triton.cdiv(MULTIPROCESSORS, pieces)
