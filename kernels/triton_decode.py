# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Triton kernels for few tokens: y [M, N] = x [M, K] w [N, K]^T with FP8 weights, M up to 64.

The weight is read once and takes all the time, so it is the operand whose rows fill the tensor core's 64, and the
tokens, padded to 16, 32 or 64, are the other. x comes as bfloat16 and is quantized on the way, to the bytes of
`fxquant.kernels.reference.quantize`, or as payload and scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from fxquant.compat import declare_written
from fxquant.formats import QuantSpec

MOST_TOKENS = 64
"""Rows of x up to which reading the weight takes longer than anything else."""
_TENSOR, _ROW, _BLOCK = (tl.constexpr(i) for i in range(3))
"""What shares a scale."""
_KINDS = {"per_tensor": _TENSOR, "per_row": _ROW, "block": _BLOCK}
_PAYLOAD, _GIVEN, _OWN = (tl.constexpr(i) for i in range(3))
"""x is FP8 already; is multiplied by a given number; takes its own amax."""
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


_TORCHAO_FLOOR = 1e-12
_TORCHAO_BELOW = torch.nextafter(torch.tensor(_TORCHAO_FLOOR), torch.tensor(1.0)).item()
"""The least float32 that is not below torchao's least amax."""


@triton.jit
def _magnitude(x):
    return tl.where(x == x, tl.abs(x), 0.0)


@triton.jit
def _multiplier(amax, FMAX: tl.constexpr, LARGEST: tl.constexpr, EPS: tl.constexpr, POW2: tl.constexpr,
                TORCHAO_BELOW: tl.constexpr, TORCHAO_MOST: tl.constexpr):  # fmt: skip
    """`reference.multiplier_from_amax`."""
    if EPS > 0:
        amax = tl.where(amax < EPS, EPS, amax)
    scale = tl.div_rn(tl.full(amax.shape, FMAX, tl.float32), amax)
    if TORCHAO_BELOW > 0:
        scale = tl.where(amax < TORCHAO_BELOW, TORCHAO_MOST, scale)
    else:
        scale = tl.where(scale == float("inf"), LARGEST, scale)
        scale = tl.where((amax > 0) & (amax < float("inf")), scale, 1.0)
    if POW2:
        scale = (scale.to(tl.int32, bitcast=True) & -0x800000).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def _prefetch(pointers, SIZE: tl.constexpr):
    """Asks for SIZE bytes from each pointer to be brought into the L2 cache."""
    if not _INTERPRETED:
        size = tl.full(pointers.shape, SIZE, tl.int32)
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;", "=r,l,r", [pointers, size], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def gemm_kernel(
    x, x_arg, w, w_scale, bias, y, M, N, K, x_length, x_step, x_scale_step, x_scale_column_step,
    X_KIND: tl.constexpr, X_SOURCE: tl.constexpr, W_KIND: tl.constexpr, FMAX: tl.constexpr, LARGEST: tl.constexpr,
    EPS: tl.constexpr, POW2: tl.constexpr, TORCHAO_BELOW: tl.constexpr, TORCHAO_MOST: tl.constexpr,
    HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, SPLIT: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
    SWEEP: tl.constexpr, SWEEPS: tl.constexpr, STEPS: tl.constexpr, ONE: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """A tile y [BM, BN], or with SPLIT its part from `steps` blocks of K, unscaled by nothing, in float32.

    x is [M, x_length] in steps of `x_step`; w [N, K] is contiguous with K a multiple of 16.
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.arange(0, BM)
    first = tl.program_id(1) * (STEPS * BK)
    down = tl.minimum(n, N - 1)
    k = tl.arange(0, BK)
    w_tile = w + (tl.program_id(0) * BN).to(tl.int64) * K + first
    down = (down - tl.program_id(0) * BN) * K
    if PREFETCH > 0:
        _prefetch(w_tile + down, PREFETCH)
    if PDL and not _INTERPRETED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if X_SOURCE == _GIVEN:
        factor = tl.load(x_arg)
    elif X_SOURCE == _OWN and X_KIND != _BLOCK:
        if ONE:
            largest = tl.zeros((SWEEP,), tl.float32)
            for i in tl.range(0, SWEEPS):
                column = i * SWEEP + tl.arange(0, SWEEP)
                largest = tl.maximum(
                    largest, _magnitude(tl.load(x + column, mask=column < x_length, other=0.0).to(tl.float32))
                )
            amax = tl.max(largest, axis=0)
        else:
            wide = tl.zeros((BM, SWEEP), tl.float32)
            for i in tl.range(0, SWEEPS):
                column = i * SWEEP + tl.arange(0, SWEEP)
                inside = (m[:, None] < M) & (column[None, :] < x_length)
                tile = tl.load(x + m[:, None] * x_step + column[None, :], mask=inside, other=0.0)
                wide = tl.maximum(wide, _magnitude(tile.to(tl.float32)))
            amax = tl.max(wide, axis=1)
            if X_KIND == _TENSOR:
                amax = tl.max(amax, axis=0)
        factor = _multiplier(amax, FMAX, LARGEST, EPS, POW2, TORCHAO_BELOW, TORCHAO_MOST)
    acc = tl.zeros((BN, BM), tl.float32)
    for step in tl.range(0, STEPS):
        at = first + step * BK
        if EVEN:
            weights = tl.load(w_tile + step * BK + (down[:, None] + k[None, :]), eviction_policy="evict_first")
            tokens = tl.load(x + m[:, None] * x_step + (at + k)[None, :], mask=m[:, None] < M, other=0.0)
        else:
            weights = tl.load(
                w_tile + step * BK + (down[:, None] + k[None, :]), mask=(at + k)[None, :] < K, other=0.0,
                eviction_policy="evict_first",
            )  # fmt: skip
            inside = (m[:, None] < M) & ((at + k)[None, :] < x_length)
            tokens = tl.load(x + m[:, None] * x_step + (at + k)[None, :], mask=inside, other=0.0)
        if X_KIND == _BLOCK:
            block = at // 128
            if X_SOURCE == _PAYLOAD:
                payload = tokens
                scale = tl.load(x_arg + m * x_scale_step + block * x_scale_column_step, mask=m < M, other=0.0)
            else:
                values = tokens.to(tl.float32)
                own = _multiplier(
                    tl.max(_magnitude(values), axis=1), FMAX, LARGEST, EPS, POW2, TORCHAO_BELOW, TORCHAO_MOST
                )
                payload = (values * own[:, None]).to(w.dtype.element_ty)
                scale = tl.div_rn(1.0, own)
            part = tl.dot(weights, tl.trans(payload))
            if W_KIND == _BLOCK:
                scale = scale * tl.load(w_scale + (tl.program_id(0) * BN) // 128 * (K // 128) + block)
            acc += part * scale[None, :]
        else:
            if X_SOURCE == _PAYLOAD:
                payload = tokens
            elif X_KIND == _TENSOR or ONE:
                payload = (tokens.to(tl.float32) * factor).to(w.dtype.element_ty)
            else:
                payload = (tokens.to(tl.float32) * factor[:, None]).to(w.dtype.element_ty)
            acc = tl.dot(weights, tl.trans(payload), acc)
    if X_KIND != _BLOCK:
        if X_SOURCE != _PAYLOAD:
            scale = tl.div_rn(1.0, factor)
        elif X_KIND == _TENSOR:
            scale = tl.load(x_arg)
        else:
            scale = tl.load(x_arg + m * x_scale_step, mask=m < M, other=0.0)
        if X_KIND == _TENSOR or (X_SOURCE == _OWN and ONE):
            acc = acc * scale
        else:
            acc = acc * scale[None, :]
    if W_KIND == _TENSOR:
        acc = acc * tl.load(w_scale)
    elif W_KIND == _ROW:
        acc = acc * tl.load(w_scale + n, mask=n < N, other=0.0)[:, None]
    if HAS_BIAS:
        acc = acc + tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    out = tl.trans(acc)
    place = m[:, None] * N + n[None, :]
    if SPLIT:
        place += tl.program_id(1) * M * N
    tl.store(y + place, out.to(y.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


@triton.jit
def rows_kernel(
    x, data, scale, M, K, x_step, FMAX: tl.constexpr, LARGEST: tl.constexpr, EPS: tl.constexpr, POW2: tl.constexpr,
    TORCHAO_BELOW: tl.constexpr, TORCHAO_MOST: tl.constexpr, PDL: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Quantizes a row of x [M, K], with its own amax."""
    if PDL and not _INTERPRETED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    m = tl.program_id(0)
    k = tl.arange(0, BK)
    values = tl.load(x + m * x_step + k, mask=k < K, other=0.0).to(tl.float32)
    factor = _multiplier(tl.max(_magnitude(values), axis=0), FMAX, LARGEST, EPS, POW2, TORCHAO_BELOW, TORCHAO_MOST)
    tl.store(data + m * K + k, (values * factor).to(data.dtype.element_ty), mask=k < K)
    tl.store(scale + m, tl.div_rn(1.0, factor))


@triton.jit
def amax_kernel(x, part, size, PDL: tl.constexpr, BLOCK: tl.constexpr):
    """The amax of a part of x, of BLOCK elements."""
    if PDL and not _INTERPRETED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(part + tl.program_id(0), tl.max(_magnitude(values), axis=0))


@triton.jit
def tensor_kernel(
    x, part, data, scale, size, parts, FMAX: tl.constexpr, LARGEST: tl.constexpr, EPS: tl.constexpr,
    POW2: tl.constexpr, TORCHAO_BELOW: tl.constexpr, TORCHAO_MOST: tl.constexpr, PDL: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Quantizes BLOCK elements of x by the amax of all, which is that of `part`."""
    if PDL and not _INTERPRETED:
        tl.extra.cuda.gdc_launch_dependents()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32)
    if PDL and not _INTERPRETED:
        tl.extra.cuda.gdc_wait()
    i = tl.arange(0, PARTS)
    amax = tl.max(tl.load(part + i, mask=i < parts, other=0.0), axis=0)
    factor = _multiplier(amax, FMAX, LARGEST, EPS, POW2, TORCHAO_BELOW, TORCHAO_MOST)
    tl.store(data + at, (values * factor).to(data.dtype.element_ty), mask=at < size)
    if tl.program_id(0) == 0:
        tl.store(scale, tl.div_rn(1.0, factor))


@triton.jit
def gemv_kernel(
    x, x_arg, w, w_scale, bias, y, N, K, x_length, x_step, x_scale_step, x_scale_column_step,
    X_KIND: tl.constexpr, X_SOURCE: tl.constexpr, W_KIND: tl.constexpr, FMAX: tl.constexpr, LARGEST: tl.constexpr,
    EPS: tl.constexpr, POW2: tl.constexpr, TORCHAO_BELOW: tl.constexpr, TORCHAO_MOST: tl.constexpr,
    HAS_BIAS: tl.constexpr, PDL: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """BN columns of y [M, N] from whole rows of the weight, without tensor cores; BK is a power of two from K on."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    w_tile = w + (tl.program_id(0) * BN).to(tl.int64) * K
    down = (tl.minimum(n, N - 1) - tl.program_id(0) * BN) * K
    weights = tl.load(
        w_tile + (down[:, None] + k[None, :]), mask=(k < K)[None, :], other=0.0, eviction_policy="evict_first"
    )
    if W_KIND == _TENSOR:
        w_factor = tl.load(w_scale)
    elif W_KIND == _ROW:
        w_factor = tl.load(w_scale + n, mask=n < N, other=0.0)
    else:
        block = tl.arange(0, BK // 128)
        w_factor = tl.load(
            w_scale + (tl.program_id(0) * BN) // 128 * (K // 128) + block, mask=block < K // 128, other=0.0
        )
    if PDL and not _INTERPRETED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if X_SOURCE == _OWN and X_KIND == _TENSOR:
        amax = 0.0
        for m in tl.static_range(M):
            tokens = tl.load(x + m * x_step + k, mask=k < x_length, other=0.0).to(tl.float32)
            amax = tl.maximum(amax, tl.max(_magnitude(tokens), axis=0))
    for m in tl.static_range(M):
        tokens = tl.load(x + m * x_step + k, mask=k < x_length, other=0.0).to(tl.float32)
        if X_KIND == _BLOCK:
            if X_SOURCE == _PAYLOAD:
                factor = tl.load(
                    x_arg + m * x_scale_step + tl.arange(0, BK // 128) * x_scale_column_step,
                    mask=tl.arange(0, BK // 128) < K // 128, other=0.0,
                )  # fmt: skip
                groups = tl.reshape(tokens, (BK // 128, 128))
            else:
                groups = tl.reshape(tokens, (BK // 128, 128))
                own = _multiplier(
                    tl.max(_magnitude(groups), axis=1), FMAX, LARGEST, EPS, POW2, TORCHAO_BELOW, TORCHAO_MOST
                )
                groups = (groups * own[:, None]).to(w.dtype.element_ty).to(tl.float32)
                factor = tl.div_rn(1.0, own)
            if W_KIND == _BLOCK:
                factor = factor * w_factor
            values = tl.reshape(groups * factor[:, None], (BK,))
            scale = 1.0
        else:
            if X_SOURCE == _PAYLOAD:
                values = tokens
                scale = tl.load(x_arg + m * x_scale_step)
            else:
                if X_SOURCE == _GIVEN:
                    factor = tl.load(x_arg)
                elif X_KIND == _TENSOR:
                    factor = _multiplier(amax, FMAX, LARGEST, EPS, POW2, TORCHAO_BELOW, TORCHAO_MOST)
                else:
                    own_amax = tl.max(_magnitude(tokens), axis=0)
                    factor = _multiplier(own_amax, FMAX, LARGEST, EPS, POW2, TORCHAO_BELOW, TORCHAO_MOST)
                values = (tokens * factor).to(w.dtype.element_ty).to(tl.float32)
                scale = tl.div_rn(1.0, factor)
        out = tl.sum(weights.to(tl.float32) * values[None, :], axis=1) * scale
        if W_KIND != _BLOCK:
            out = out * w_factor
        if HAS_BIAS:
            out = out + tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
        tl.store(y + m * N + n, out.to(y.dtype.element_ty), mask=n < N)


def supports(a: Sequence[Tensor], a_spec: QuantSpec, b: Sequence[Tensor], b_spec: QuantSpec) -> bool:
    """Whether `scaled_mm` takes these operands: a matrix of 1 to 64 rows, static sizes, e4m3, scales per tensor, per
    row, or 1x128 x 128x128."""
    left, right = a_spec.row, b_spec.row
    if left.family not in _KINDS or right.family not in _KINDS or a[0].ndim != 2 or b[0].dtype != torch.float8_e4m3fn:
        return False
    if left.element is None or left.element.dtype != torch.float8_e4m3fn:
        return False
    if "block" in (left.family, right.family) and (left.block, right.block) != ((1, 128), (128, 128)):
        return False
    sizes = (*a[0].shape, *b[0].shape)
    return all(isinstance(size, int) for size in sizes) and 0 < sizes[0] <= MOST_TOKENS and 0 not in sizes


def quantizes(x: Tensor, spec: QuantSpec) -> bool:
    """Whether `scaled_mm` had better take x [M, K] unquantized: where its amax costs no pass, or M is one."""
    return x.shape[0] == 1 or spec.row.family == "block"


def scaled_mm(
    a: Sequence[Tensor], a_spec: QuantSpec, b: Sequence[Tensor], b_spec: QuantSpec, bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """`reference.scaled_mm` of a [M, K] and b [N, K], where `supports` says so, accumulated as `_scaled_mm` does fast.

    `a` is payload and scale; or a tensor not yet quantized, alone or with its multiplier [1] (per-tensor formats).
    """
    x, (w, w_scale) = a[0], b
    if x.stride(1) != 1:
        x = x.contiguous()
    (size_m, length), (size_n, size_k) = x.shape, w.shape
    w_scale = w_scale.contiguous()
    x_kind, w_kind = (_KINDS[spec.row.family] for spec in (a_spec, b_spec))
    if x.dtype == w.dtype:
        source, argument = _PAYLOAD, a[1]
    elif len(a) > 1:
        source, argument = _GIVEN, a[1]
    else:
        source, argument = _OWN, x
    assert a_spec.row.element is not None
    fmax = a_spec.row.element.max
    largest = torch.finfo(x.dtype if x_kind is _BLOCK and source is _OWN else torch.float32).max
    below, most = (_TORCHAO_BELOW, fmax / _TORCHAO_FLOOR) if a_spec.torchao else (0.0, 0.0)
    rule = (fmax, largest, a_spec.eps, a_spec.pow2, below, most)
    steps = (argument.stride(0), argument.stride(-1)) if source is _PAYLOAD and argument.ndim == 2 else (0, 0)
    if size_m == 1:
        y = torch.empty((1, size_n), dtype=out_dtype, device=x.device)
        block_k = triton.next_power_of_2(size_k)
        block_n, warps = 8, 4 if block_k <= 4096 else 8
        wrap_triton(gemv_kernel)[(triton.cdiv(size_n, block_n),)](
            x, argument, w, w_scale, w_scale if bias is None else bias, y, size_n, size_k, length, x.stride(0), *steps,
            x_kind.value, source.value, w_kind.value, *rule, bias is not None, False, 1, block_n, block_k,
            num_warps=warps,
        )  # fmt: skip
        return y
    block_m = max(16, triton.next_power_of_2(size_m))
    block_n = block_k = 128
    tiles, k_steps = triton.cdiv(size_n, block_n), triton.cdiv(size_k, block_k)
    split = 1
    shape = (size_m, size_n) if split == 1 else (split, size_m, size_n)
    y = torch.empty(shape, dtype=out_dtype if split == 1 else torch.float32, device=x.device)
    has_bias = bias is not None and split == 1
    even = size_k % (block_k * split) == 0 and length == size_k
    sweep = 512
    wrap_triton(gemm_kernel)[(tiles, split)](
        x, argument, w, w_scale, bias if has_bias else w_scale, y, size_m, size_n, size_k, length, x.stride(0), *steps,
        x_kind.value, source.value, w_kind.value, *rule, has_bias, even, split > 1, 0, False, sweep,
        triton.cdiv(length, sweep), triton.cdiv(k_steps, split), False, block_m, block_n, block_k, num_warps=4,
        num_stages=4,
    )  # fmt: skip
    if split == 1:
        return y
    y = y.sum(0)
    return (y if bias is None else y + bias.float()).to(out_dtype)


def written(arguments: Mapping[str, Any]) -> list[str]:
    """The names of the arguments that a launch of a kernel of this file writes."""
    return ["y"]


declare_written(gemm_kernel, written)
declare_written(gemv_kernel, written)
