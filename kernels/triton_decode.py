# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Triton kernels for few tokens on Hopper: y [M, N] = x [M, K] w [N, K]^T with FP8 weights, M up to 64.

Reading the weight takes all the time. One token is quantized by each program of a matrix-vector product as it reads it.
More are quantized by a kernel of their own, and multiplied on tensor cores: the weight is the operand whose rows fill
their 64, the tokens, padded to 16, 32 or 64, are the other.

The bytes are those of `fxquant.kernels.reference.quantize`.
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
from fxquant.kernels.triton_codes import TORCHAO_BELOW, TORCHAO_FLOOR, magnitude, multiplier

MOST_TOKENS = 64
"""Rows of x up to which reading the weight takes longer than anything else."""
_MULTIPROCESSORS = 132
"""Of an H100: no fewer programs than that should read the weight."""
_LONGEST_ROW = 32768
"""Of a weight, for the matrix-vector product: what a program holds in registers."""
_TENSOR, _ROW, _BLOCK = (tl.constexpr(i) for i in range(3))
"""What shares a scale."""
_KINDS = {"per_tensor": _TENSOR, "per_row": _ROW, "block": _BLOCK}
_PAYLOAD, _GIVEN, _OWN = (tl.constexpr(i) for i in range(3))
"""x is FP8 already; is multiplied by a given number; takes its own amax."""
_Rule = tuple[float, float, float, bool, float, float]


@triton.jit
def gemm_kernel(
    x, x_scale, w, w_scale, bias, y, M, N, K, x_step, x_scale_step, x_scale_column_step,
    X_KIND: tl.constexpr, W_KIND: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, SPLIT: tl.constexpr,
    STEPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """A tile y [BM, BN] of y [M, N]; with SPLIT what STEPS blocks of K add to it, y being [splits, M, N].

    x [M, K] is a payload, its rows `x_step` apart. w [N, K] is contiguous, with K a multiple of 16 and, where scales
    are of blocks, of BK = 128.
    """
    first_n = tl.program_id(0) * BN
    n = first_n + tl.arange(0, BN)
    m = tl.arange(0, BM)
    k = tl.arange(0, BK)
    first = tl.program_id(1) * (STEPS * BK)
    w_tile = w + first_n.to(tl.int64) * K + first
    down = (tl.minimum(n, N - 1) - first_n) * K
    acc = tl.zeros((BN, BM), tl.float32)
    if X_KIND == _BLOCK:  # a scale is asked for a step before it is used
        w_scale += first_n // 128 * (K // 128)
        scale = tl.load(x_scale + m * x_scale_step + first // 128 * x_scale_column_step, mask=m < M, other=0.0)
        scale *= tl.load(w_scale + first // 128)
    for step in tl.range(0, STEPS):
        at = first + step * BK
        if EVEN:
            weights = tl.load(w_tile + step * BK + (down[:, None] + k[None, :]), eviction_policy="evict_first")
            tokens = tl.load(x + m[:, None] * x_step + (at + k)[None, :], mask=m[:, None] < M, other=0.0)
        else:
            inside = (at + k)[None, :] < K
            weights = tl.load(
                w_tile + step * BK + (down[:, None] + k[None, :]), mask=inside, other=0.0, eviction_policy="evict_first"
            )
            tokens = tl.load(x + m[:, None] * x_step + (at + k)[None, :], mask=(m[:, None] < M) & inside, other=0.0)
        if X_KIND == _BLOCK:
            following = tl.minimum(at + BK, K - BK) // 128
            next_scale = tl.load(x_scale + m * x_scale_step + following * x_scale_column_step, mask=m < M, other=0.0)
            next_scale *= tl.load(w_scale + following)
            acc += tl.dot(weights, tl.trans(tokens)) * scale[None, :]
            scale = next_scale
        else:
            acc = tl.dot(weights, tl.trans(tokens), acc)
    if X_KIND == _TENSOR:
        acc = acc * tl.load(x_scale)
    elif X_KIND == _ROW:
        acc = acc * tl.load(x_scale + m * x_scale_step, mask=m < M, other=0.0)[None, :]
    if W_KIND == _TENSOR:
        acc = acc * tl.load(w_scale)
    elif W_KIND == _ROW:
        acc = acc * tl.load(w_scale + n, mask=n < N, other=0.0)[:, None]
    if HAS_BIAS:
        acc = acc + tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    place = m[:, None] * N + n[None, :]
    if SPLIT:
        place += tl.program_id(1) * M * N
    tl.store(y + place, tl.trans(acc).to(y.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


@triton.jit
def amax_kernel(x, part, x_length, x_step, BK: tl.constexpr):
    """The amaxes of pieces of BK elements of rows of x [M, x_length]: part [M, x_length / BK], in any order."""
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    values = tl.load(x + tl.program_id(0) * x_step + k, mask=k < x_length, other=0.0).to(tl.float32)
    tl.store(part + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), tl.max(magnitude(values), axis=0))


@triton.jit
def quantize_kernel(
    x, arg, data, scale, x_length, K, x_step, parts,
    KIND: tl.constexpr, SOURCE: tl.constexpr, FMAX: tl.constexpr, LARGEST: tl.constexpr, EPS: tl.constexpr,
    POW2: tl.constexpr, TORCHAO_BELOW: tl.constexpr, TORCHAO_MOST: tl.constexpr, PARTS: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """Quantizes BK elements of a row of x [M, x_length] into data [M, K], padded with zeros; BK is from K on for _ROW.

    `arg` is the multiplier given, or the tensor's amax as that of `parts` numbers.
    """
    m, piece = tl.program_id(0), tl.program_id(1)
    k = piece * BK + tl.arange(0, BK)
    values = tl.load(x + m * x_step + k, mask=k < x_length, other=0.0).to(tl.float32)
    if KIND == _BLOCK:
        groups = tl.reshape(values, (BK // 128, 128))
        amax = tl.max(magnitude(groups), axis=1)
        factor = multiplier(amax, FMAX, LARGEST, EPS, POW2, TORCHAO_BELOW, TORCHAO_MOST)
        values = tl.reshape(groups * factor[:, None], (BK,))
        block = piece * (BK // 128) + tl.arange(0, BK // 128)
        tl.store(scale + m * (K // 128) + block, tl.div_rn(1.0, factor), mask=block < K // 128)
    else:
        if SOURCE == _GIVEN:
            factor = tl.load(arg)
        else:
            if KIND == _ROW:
                amax = tl.max(magnitude(values), axis=0)
            else:
                i = tl.arange(0, PARTS)
                amax = tl.max(tl.load(arg + i, mask=i < parts, other=0.0), axis=0)
            factor = multiplier(amax, FMAX, LARGEST, EPS, POW2, TORCHAO_BELOW, TORCHAO_MOST)
        values = values * factor
        if KIND == _ROW or (m + piece == 0):
            tl.store(scale + m, tl.div_rn(1.0, factor))
    tl.store(data + m * K + k, values.to(data.dtype.element_ty), mask=k < K)


@triton.jit
def gemv_kernel(
    x, x_arg, w, w_scale, bias, y, N, K, x_length, x_scale_column_step,
    X_KIND: tl.constexpr, X_SOURCE: tl.constexpr, W_KIND: tl.constexpr, FMAX: tl.constexpr, LARGEST: tl.constexpr,
    EPS: tl.constexpr, POW2: tl.constexpr, TORCHAO_BELOW: tl.constexpr, TORCHAO_MOST: tl.constexpr,
    HAS_BIAS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """BN elements of y [N] from whole rows of the weight, without tensor cores; BK is a power of two from K on.

    x [x_length] is a payload with its scale, or to be quantized by a multiplier given or by its own amaxes.
    """
    first_n = tl.program_id(0) * BN
    n = first_n + tl.arange(0, BN)
    k = tl.arange(0, BK)
    w_tile = w + first_n.to(tl.int64) * K
    down = (tl.minimum(n, N - 1) - first_n) * K
    weights = tl.load(
        w_tile + (down[:, None] + k[None, :]), mask=(k < K)[None, :], other=0.0, eviction_policy="evict_first"
    )
    tokens = tl.load(x + k, mask=k < x_length, other=0.0).to(tl.float32)
    if X_KIND == _BLOCK:
        block = tl.arange(0, BK // 128)
        groups = tl.reshape(tokens, (BK // 128, 128))
        if X_SOURCE == _PAYLOAD:
            scale = tl.load(x_arg + block * x_scale_column_step, mask=block < K // 128, other=0.0)
        else:
            amax = tl.max(magnitude(groups), axis=1)
            factor = multiplier(amax, FMAX, LARGEST, EPS, POW2, TORCHAO_BELOW, TORCHAO_MOST)
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
            factor = multiplier(amax, FMAX, LARGEST, EPS, POW2, TORCHAO_BELOW, TORCHAO_MOST)
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
    tl.store(y + n, out.to(y.dtype.element_ty), mask=n < N)


def supports(a: Sequence[Tensor], a_spec: QuantSpec, b: Sequence[Tensor], b_spec: QuantSpec) -> bool:
    """Whether `scaled_mm` takes these operands: a matrix of 1 to 64 rows, static sizes, e4m3, scales per tensor, per
    row, or 1x128 x 128x128."""
    if not _knows(a[0], a_spec) or b_spec.row.family not in _KINDS or b[0].dtype != torch.float8_e4m3fn:
        return False
    blocks = a_spec.row.block, b_spec.row.block
    if "block" in (a_spec.row.family, b_spec.row.family) and blocks != ((1, 128), (128, 128)):
        return False
    return all(isinstance(size, int) and size > 0 for size in b[0].shape)


def quantizes(x: Tensor, spec: QuantSpec) -> bool:
    """Whether `quantize` takes x: a matrix of 2 to 64 rows, and scales that `scaled_mm` takes."""
    return _knows(x, spec) and x.shape[0] > 1


def quantizes_rows(x: Tensor, spec: QuantSpec) -> bool:
    """Whether `quantize` takes x, of any number of rows that fit into a program each and have a scale each."""
    element = spec.row.element if spec.row.family == "per_row" else None
    if element is None or element.dtype != torch.float8_e4m3fn or x.ndim != 2 or x.dtype == torch.float64:
        return False
    rows, length = x.shape
    return (
        isinstance(rows, int) and isinstance(length, int) and 0 < length <= _LONGEST_ROW and 0 < rows * length < 2**31
    )


def quantizes_itself(x: Tensor) -> bool:
    """Whether `scaled_mm` takes x not yet quantized: one row, and not too long."""
    return x.shape[0] == 1 and x.shape[1] <= _LONGEST_ROW


def _knows(x: Tensor, spec: QuantSpec) -> bool:
    row = spec.row
    if row.family not in _KINDS or row.element is None or row.element.dtype != torch.float8_e4m3fn:
        return False
    if x.ndim != 2 or x.dtype == torch.float64 or (row.family == "block" and row.block != (1, 128)):
        return False
    rows, length = x.shape
    return isinstance(rows, int) and isinstance(length, int) and 0 < rows <= MOST_TOKENS and length > 0


def scaled_mm(
    a: Sequence[Tensor], a_spec: QuantSpec, b: Sequence[Tensor], b_spec: QuantSpec, bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """`reference.scaled_mm` of a [M, K] and b [N, K], where `supports` says so, accumulated as `_scaled_mm` does fast.

    `a` is payload and scale; or, where `quantizes_itself`, the tensor alone or with its multiplier [1] (per tensor).
    """
    x, (w, w_scale) = a[0], b
    size_m, (size_n, size_k) = x.shape[0], w.shape
    x_kind, w_kind = _KINDS[a_spec.row.family].value, _KINDS[b_spec.row.family].value
    w_scale = w_scale.contiguous()
    if size_m == 1 and size_k <= _LONGEST_ROW:
        x = x.contiguous()
        source = _PAYLOAD if x.dtype == w.dtype else _OWN if len(a) == 1 else _GIVEN
        y = torch.empty((1, size_n), dtype=out_dtype, device=x.device)
        block_k = max(triton.next_power_of_2(size_k), 128)
        block_n, warps = 4 if block_k <= 16384 else 2, min(max(block_k // 1024, 4), 16)
        wrap_triton(gemv_kernel)[(triton.cdiv(size_n, block_n),)](
            x, a[-1], w, w_scale, w_scale if bias is None else bias, y, size_n, size_k, x.shape[1], a[-1].stride(-1),
            x_kind, source.value, w_kind, *_rule(a_spec, x.dtype), bias is not None, block_n, block_k, num_warps=warps,
        )  # fmt: skip
        return y
    block_m, block_n, block_k = max(16, triton.next_power_of_2(size_m)), 128, 128
    tiles, k_steps = triton.cdiv(size_n, block_n), triton.cdiv(size_k, block_k)
    split = max(1, min(_MULTIPROCESSORS // tiles, k_steps // 4))
    steps = triton.cdiv(k_steps, split)
    split = triton.cdiv(k_steps, steps)
    shape = (size_m, size_n) if split == 1 else (split, size_m, size_n)
    y = torch.empty(shape, dtype=out_dtype if split == 1 else torch.float32, device=x.device)
    scale = a[1]
    scale_steps = (scale.stride(0), scale.stride(-1)) if scale.ndim == 2 else (0, 0)
    has_bias = bias is not None and split == 1
    wrap_triton(gemm_kernel)[(tiles, split)](
        x, scale, w, w_scale, bias if has_bias else w_scale, y, size_m, size_n, size_k, x.stride(0), *scale_steps,
        x_kind, w_kind, has_bias, size_k % (block_k * split) == 0, split > 1, steps, block_m, block_n,
        block_k, num_warps=8 if x_kind == _BLOCK.value and block_m == 64 else 4, num_stages=5,
    )  # fmt: skip
    if split == 1:
        return y
    y = y.sum(0)
    return (y if bias is None else y + bias.float()).to(out_dtype)


def quantize(x: Tensor, spec: QuantSpec, multiplier: Tensor | None = None) -> list[Tensor]:
    """`reference.quantize` of x [M, K], where `quantizes` says so."""
    if x.stride(1) != 1:
        x = x.contiguous()
    size_m, length = x.shape
    size_k = triton.cdiv(length, spec.row.alignment) * spec.row.alignment
    kind = _KINDS[spec.row.family]
    piece = 2048 if kind is not _ROW else triton.next_power_of_2(size_k)
    pieces = triton.cdiv(size_k, piece)
    shape = {_TENSOR: (1,), _ROW: (size_m, 1), _BLOCK: (size_m, size_k // 128)}[kind]
    data = torch.empty((size_m, size_k), dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(shape, dtype=torch.float32, device=x.device)
    argument, parts = x if multiplier is None else multiplier, 0
    if kind is _TENSOR and multiplier is None:
        parts = size_m * pieces
        argument = torch.empty(parts, dtype=torch.float32, device=x.device)
        wrap_triton(amax_kernel)[(size_m, pieces)](x, argument, length, x.stride(0), piece, num_warps=4)
    wrap_triton(quantize_kernel)[(size_m, pieces)](
        x, argument, data, scale, length, size_k, x.stride(0), parts, kind.value,
        (_OWN if multiplier is None else _GIVEN).value, *_rule(spec, x.dtype), triton.next_power_of_2(max(parts, 1)),
        piece, num_warps=8 if kind is _ROW else 4,
    )  # fmt: skip
    return [data, scale]


def _rule(spec: QuantSpec, dtype: torch.dtype) -> _Rule:
    """What `multiplier` wants to know of a format, for tensors of a dtype."""
    assert spec.row.element is not None
    fmax = spec.row.element.max
    largest = torch.finfo(dtype if spec.row.family == "block" else torch.float32).max
    below, most = (TORCHAO_BELOW, fmax / TORCHAO_FLOOR) if spec.torchao else (0.0, 0.0)
    return fmax, largest, spec.eps, spec.pow2, below, most


def written(arguments: Mapping[str, Any]) -> list[str]:
    """The names of the arguments that a launch of a kernel of this file writes."""
    if "y" in arguments:
        return ["y"]
    return ["data", "scale"] if "data" in arguments else ["part"]


for _kernel in (gemm_kernel, gemv_kernel, quantize_kernel, amax_kernel):
    declare_written(_kernel, written)
