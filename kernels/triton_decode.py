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

_MULTIPROCESSORS = 132
"""Of an H100: no fewer programs than that should read the weight."""
MOST_TOKENS = 64
"""Rows of x up to which reading the weight takes longer than anything else."""
_LONGEST_ROW = 32768
"""What a program holds in registers."""
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
    STEPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """A tile y [BM, BN] of y [M, N]; with SPLIT what STEPS blocks of K add to it, y being [splits, M, N].

    x is [M, x_length], its rows `x_step` apart: a payload, or to be quantized by a multiplier given or in blocks. w
    [N, K] is contiguous, with K a multiple of 16 and, for blocks, of 128.
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
            else:
                payload = (tokens.to(tl.float32) * factor).to(w.dtype.element_ty)
            acc = tl.dot(weights, tl.trans(payload), acc)
    if X_KIND != _BLOCK:
        if X_SOURCE != _PAYLOAD:
            scale = tl.div_rn(1.0, factor)
        elif X_KIND == _TENSOR:
            scale = tl.load(x_arg)
        else:
            scale = tl.load(x_arg + m * x_scale_step, mask=m < M, other=0.0)
        if X_KIND == _TENSOR:
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
    x, data, scale, x_length, K, x_step, FMAX: tl.constexpr, LARGEST: tl.constexpr, EPS: tl.constexpr,
    POW2: tl.constexpr, TORCHAO_BELOW: tl.constexpr, TORCHAO_MOST: tl.constexpr, PDL: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Quantizes a row of x [M, x_length] by its own amax into data [M, K], padded with zeros."""
    if PDL and not _INTERPRETED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    m = tl.program_id(0)
    k = tl.arange(0, BK)
    values = tl.load(x + m * x_step + k, mask=k < x_length, other=0.0).to(tl.float32)
    amax = tl.max(_magnitude(values), axis=0)
    factor = _multiplier(amax, FMAX, LARGEST, EPS, POW2, TORCHAO_BELOW, TORCHAO_MOST)
    tl.store(data + m * K + k, (values * factor).to(data.dtype.element_ty), mask=k < K)
    tl.store(scale + m, tl.div_rn(1.0, factor))


@triton.jit
def part_amax_kernel(x, part, x_length, x_step, PDL: tl.constexpr, BK: tl.constexpr):
    """The amax of BK elements of a row of x [M, x_length]: part [M, x_length / BK]."""
    if PDL and not _INTERPRETED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    values = tl.load(x + tl.program_id(0) * x_step + k, mask=k < x_length, other=0.0).to(tl.float32)
    tl.store(part + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), tl.max(_magnitude(values), axis=0))


@triton.jit
def tensor_kernel(
    x, part, data, scale, x_length, K, x_step, FMAX: tl.constexpr, LARGEST: tl.constexpr, EPS: tl.constexpr,
    POW2: tl.constexpr, TORCHAO_BELOW: tl.constexpr, TORCHAO_MOST: tl.constexpr, PDL: tl.constexpr,
    PARTS: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Quantizes BK elements of a row of x [M, x_length] by the amax of all into data [M, K], padded with zeros."""
    if PDL and not _INTERPRETED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    values = tl.load(x + tl.program_id(0) * x_step + k, mask=k < x_length, other=0.0).to(tl.float32)
    i = tl.arange(0, PARTS)
    parts = tl.load(part + i, mask=i < tl.num_programs(0) * tl.num_programs(1), other=0.0)
    factor = _multiplier(tl.max(parts, axis=0), FMAX, LARGEST, EPS, POW2, TORCHAO_BELOW, TORCHAO_MOST)
    tl.store(data + tl.program_id(0) * K + k, (values * factor).to(data.dtype.element_ty), mask=k < K)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
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
    rule = _rule(a_spec, x.dtype)
    dependent = False
    if x.dtype == w.dtype:
        source, argument = _PAYLOAD, a[1]
    elif len(a) > 1:
        source, argument = _GIVEN, a[1]
    elif a_spec.row.family == "block" or (x.shape[0] == 1 and w.shape[1] <= _LONGEST_ROW):
        source, argument = _OWN, x
    else:
        x, argument = _quantize(x, w.shape[1], a_spec, rule)
        source, dependent = _PAYLOAD, True
    steps = (argument.stride(0), argument.stride(-1)) if source is _PAYLOAD and argument.ndim == 2 else (0, 0)
    (size_m, length), (size_n, size_k) = x.shape, w.shape
    kinds = (_KINDS[a_spec.row.family].value, source.value, _KINDS[b_spec.row.family].value)
    given = (x, argument, w, w_scale.contiguous(), w_scale if bias is None else bias)
    if size_m == 1 and size_k <= _LONGEST_ROW:
        y = torch.empty((1, size_n), dtype=out_dtype, device=x.device)
        block_k = triton.next_power_of_2(size_k)
        block_n, warps = 8 if block_k <= 16384 else 2, min(max(block_k // 1024, 4), 16)
        wrap_triton(gemv_kernel)[(triton.cdiv(size_n, block_n),)](
            *given, y, size_n, size_k, length, x.stride(0), *steps, *kinds, *rule, bias is not None, dependent, 1,
            block_n, block_k, num_warps=warps,
        )  # fmt: skip
        return y
    block_m = max(16, triton.next_power_of_2(size_m))
    block_n = block_k = 128
    tiles, k_steps = triton.cdiv(size_n, block_n), triton.cdiv(size_k, block_k)
    split = max(1, min(_MULTIPROCESSORS // tiles, k_steps // 4))
    shape = (size_m, size_n) if split == 1 else (split, size_m, size_n)
    y = torch.empty(shape, dtype=out_dtype if split == 1 else torch.float32, device=x.device)
    even = size_k % (block_k * split) == 0 and length == size_k
    prefetch = min(512, size_k // split // 16 * 16) if dependent else 0
    wrap_triton(gemm_kernel)[(tiles, split)](
        *given, y, size_m, size_n, size_k, length, x.stride(0), *steps, *kinds, *rule, bias is not None and split == 1,
        even, split > 1, prefetch, dependent, triton.cdiv(k_steps, split), block_m, block_n, block_k, num_warps=4,
        num_stages=4,
    )  # fmt: skip
    if split == 1:
        return y
    y = y.sum(0)
    return (y if bias is None else y + bias.float()).to(out_dtype)


def _rule(spec: QuantSpec, dtype: torch.dtype) -> tuple[float, float, float, bool, float, float]:
    """What `_multiplier` wants to know of a format, for tensors of a dtype."""
    assert spec.row.element is not None
    fmax = spec.row.element.max
    largest = torch.finfo(dtype if spec.row.family == "block" else torch.float32).max
    below, most = (_TORCHAO_BELOW, fmax / _TORCHAO_FLOOR) if spec.torchao else (0.0, 0.0)
    return fmax, largest, spec.eps, spec.pow2, below, most


def _quantize(
    x: Tensor, size_k: int, spec: QuantSpec, rule: tuple[float, float, float, bool, float, float]
) -> tuple[Tensor, Tensor]:
    """Payload and scale of x [M, K], per tensor or per row, by kernels that let the next one start early."""
    size_m, length = x.shape
    data = torch.empty((size_m, size_k), dtype=torch.float8_e4m3fn, device=x.device)
    if spec.row.family == "per_row":
        scale = torch.empty((size_m, 1), dtype=torch.float32, device=x.device)
        wrap_triton(rows_kernel)[(size_m,)](
            x, data, scale, length, size_k, x.stride(0), *rule, True, triton.next_power_of_2(size_k), num_warps=8
        )
        return data, scale
    block = 2048
    chunks = triton.cdiv(size_k, block)
    part = torch.empty(size_m * chunks, dtype=torch.float32, device=x.device)
    scale = torch.empty(1, dtype=torch.float32, device=x.device)
    grid = (size_m, chunks)
    wrap_triton(part_amax_kernel)[grid](x, part, length, x.stride(0), True, block, num_warps=4)
    wrap_triton(tensor_kernel)[grid](
        x, part, data, scale, length, size_k, x.stride(0), *rule, True, triton.next_power_of_2(size_m * chunks), block,
        num_warps=4,
    )  # fmt: skip
    return data, scale


def written(arguments: Mapping[str, Any]) -> list[str]:
    """The names of the arguments that a launch of a kernel of this file writes."""
    if "y" in arguments:
        return ["y"]
    return ["data", "scale"] if "data" in arguments else ["part"]


for _kernel in (gemm_kernel, gemv_kernel, rows_kernel, part_amax_kernel, tensor_kernel):
    declare_written(_kernel, written)
