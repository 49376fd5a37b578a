"""Triton GEMMs of FP8 elements for groups of rows: scales in blocks of 128, or per tensor and row behind the product.

The offsets are read by the kernels. A grid is as large as any split can need: groups of M rows fill at most
M / BM + G tiles of rows, and tiles that are not needed return at once.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,import-untyped"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fxquant.compat import fake_kernel, operator_library

_library = operator_library("fxquant_kernels", more=True)
for _name in ("grouped_rows", "grouped_columns"):
    _library.define(
        f"{_name}(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, Tensor offs, int block, ScalarType out_dtype,"
        " bool fast_accum) -> Tensor",
        tags=torch.Tag.pt2_compliant_tag,
    )


@triton.jit
def _accumulate(acc, a, b, FAST: tl.constexpr):
    """acc + a x b; the tensor core's own accumulator keeps fewer bits."""
    if FAST:
        acc = tl.dot(a, b, acc)
    else:
        acc += tl.dot(a, b)
    return acc


@triton.jit
def rows_kernel(
    a, b, a_scale, b_scale, offs, out, M, N, K, G, a_step, b_step, a_scale_step, b_scale_group, b_scale_step,
    BLOCK: tl.constexpr, FAST: tl.constexpr, GROUPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """out [M, N] = a [M, K] x b [G, N, K] of its row's group, transposed; rows behind the last group become zeros.

    BLOCK is the number of b's rows that share a scale for 128 of K, 1 or 128; 0 takes a's scales [M] and b's [G, N].
    GROUPS is a power of two above G: the rows of no group are one more.
    """
    columns = tl.cdiv(N, BN)
    tile = tl.program_id(0) // columns
    first_n = (tl.program_id(0) % columns) * BN
    g = tl.arange(0, GROUPS)
    ends = tl.where(g < G, tl.load(offs + g, mask=g < G, other=0), M)
    starts = tl.where(g > G, M, tl.load(offs + g - 1, mask=(g > 0) & (g <= G), other=0))
    tiles = (ends - starts + BM - 1) // BM
    through = tl.cumsum(tiles, 0)
    group = tl.sum((through <= tile).to(tl.int32), 0)
    if group > G:
        return
    own = g == group
    start = tl.sum(tl.where(own, starts, 0), 0) + (tile - tl.sum(tl.where(own, through - tiles, 0), 0)) * BM
    m = start + tl.arange(0, BM)
    n = first_n + tl.arange(0, BN)
    k = tl.arange(0, BK)
    in_m = m < tl.sum(tl.where(own, ends, 0), 0)
    in_n = n < N
    acc = tl.zeros((BM, BN), tl.float32)
    if group < G:
        left = a + (m[:, None].to(tl.int64) * a_step + k[None, :])
        right = b + (group.to(tl.int64) * N * b_step + (n[None, :] * b_step + k[:, None]))
        weights = b_scale + group.to(tl.int64) * b_scale_group
        if BLOCK > 0:
            for step in range(0, tl.cdiv(K, BK)):
                x = tl.load(left + step * BK, mask=in_m[:, None], other=0.0)
                w = tl.load(right + step * BK, mask=in_n[None, :], other=0.0)
                of_a = tl.load(a_scale + m * a_scale_step + step, mask=in_m, other=0.0)
                if BLOCK >= BN:
                    of_b = tl.load(weights + (first_n // BLOCK) * b_scale_step + step)
                    acc += tl.dot(x, w) * (of_a * of_b)[:, None]
                else:
                    of_b = tl.load(weights + (n // BLOCK) * b_scale_step + step, mask=in_n, other=0.0)
                    acc += tl.dot(x, w) * of_a[:, None] * of_b[None, :]
        else:
            for step in range(0, tl.cdiv(K, BK)):
                in_k = k < K - step * BK
                x = tl.load(left + step * BK, mask=in_m[:, None] & in_k[None, :], other=0.0)
                w = tl.load(right + step * BK, mask=in_n[None, :] & in_k[:, None], other=0.0)
                acc = _accumulate(acc, x, w, FAST)
            of_a = tl.load(a_scale + m, mask=in_m, other=0.0)
            acc = acc * of_a[:, None] * tl.load(weights + n, mask=in_n, other=0.0)[None, :]
    place = out + (m[:, None].to(tl.int64) * N + n[None, :])
    tl.store(place, acc.to(out.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


@triton.jit
def columns_kernel(
    a, b, a_scale, b_scale, offs, out, N, K, a_step, b_step, a_scale_step, b_scale_step, BLOCK: tl.constexpr,
    FAST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out [G, N, K] = a [N, M] x b [K, M], transposed, over the columns of each group; zeros for an empty one.

    Groups start and end at multiples of 16. With BLOCK they do so at multiples of 128, and the scales are those of 128
    columns, [N, M / 128] and [K, M / 128], else [G, N] and [G, K].
    """
    across = tl.cdiv(K, BN)
    per_group = tl.cdiv(N, BM) * across
    group = tl.program_id(0) // per_group
    tile = tl.program_id(0) % per_group
    n = (tile // across) * BM + tl.arange(0, BM)
    k = (tile % across) * BN + tl.arange(0, BN)
    m = tl.arange(0, BK)
    in_n, in_k = n < N, k < K
    start = tl.multiple_of(tl.load(offs + group - 1, mask=group > 0, other=0), 16)
    size = tl.multiple_of(tl.load(offs + group) - start, 16)
    left = a + (n[:, None].to(tl.int64) * a_step + (start + m)[None, :])
    right = b + (k[None, :].to(tl.int64) * b_step + (start + m)[:, None])
    acc = tl.zeros((BM, BN), tl.float32)
    if BLOCK > 0:
        for step in range(0, tl.cdiv(size, BK)):
            block = start // BK + step
            x = tl.load(left + step * BK, mask=in_n[:, None], other=0.0)
            y = tl.load(right + step * BK, mask=in_k[None, :], other=0.0)
            of_a = tl.load(a_scale + n * a_scale_step + block, mask=in_n, other=0.0)
            of_b = tl.load(b_scale + k * b_scale_step + block, mask=in_k, other=0.0)
            acc += tl.dot(x, y) * of_a[:, None] * of_b[None, :]
    else:
        for step in range(0, tl.cdiv(size, BK)):
            in_m = m < size - step * BK
            x = tl.load(left + step * BK, mask=in_n[:, None] & in_m[None, :], other=0.0)
            y = tl.load(right + step * BK, mask=in_k[None, :] & in_m[:, None], other=0.0)
            acc = _accumulate(acc, x, y, FAST)
        of_a = tl.load(a_scale + group * N + n, mask=in_n, other=0.0)
        of_b = tl.load(b_scale + group * K + k, mask=in_k, other=0.0)
        acc = acc * of_a[:, None] * of_b[None, :]
    place = out + ((group.to(tl.int64) * N + n[:, None]) * K + k[None, :])
    tl.store(place, acc.to(out.dtype.element_ty), mask=in_n[:, None] & in_k[None, :])


_TILE = {"BM": 128, "BN": 128, "BK": 128, "num_warps": 8, "num_stages": 4}
"""Two accumulators of 128x128 fit the registers of 8 warps; larger tiles spill."""


def _rows(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, offs: Tensor, block: int, out_dtype: torch.dtype,
    fast_accum: bool,
) -> Tensor:  # fmt: skip
    rows, inner = a.shape
    groups, features = b.shape[:2]
    out = torch.empty((rows, features), dtype=out_dtype, device=a.device)
    grid = ((triton.cdiv(rows, _TILE["BM"]) + groups + 1) * triton.cdiv(features, _TILE["BN"]),)
    launch: Any = rows_kernel[grid]
    with torch.cuda.device_of(a):  # type: ignore[no-untyped-call]
        launch(
            a, b, a_scale, b_scale, offs, out, rows, features, inner, groups, a.stride(0), b.stride(1),
            a_scale.stride(0), b_scale.stride(0), b_scale.stride(1), block, fast_accum,
            triton.next_power_of_2(groups + 1), **_TILE,
        )  # fmt: skip
    return out


def _columns(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, offs: Tensor, block: int, out_dtype: torch.dtype,
    fast_accum: bool,
) -> Tensor:  # fmt: skip
    groups, outputs, inputs = offs.shape[0], a.shape[0], b.shape[0]
    out = torch.empty((groups, outputs, inputs), dtype=out_dtype, device=a.device)
    grid = (groups * triton.cdiv(outputs, _TILE["BM"]) * triton.cdiv(inputs, _TILE["BN"]),)
    launch: Any = columns_kernel[grid]
    with torch.cuda.device_of(a):  # type: ignore[no-untyped-call]
        launch(
            a, b, a_scale, b_scale, offs, out, outputs, inputs, a.stride(0), b.stride(0), a_scale.stride(0),
            b_scale.stride(0), block, fast_accum, **_TILE,
        )  # fmt: skip
    return out


_library.impl("grouped_rows", _rows, "CompositeExplicitAutograd")
_library.impl("grouped_columns", _columns, "CompositeExplicitAutograd")


@fake_kernel(_library, "grouped_rows")
def _rows_fake(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, offs: Tensor, block: int, out_dtype: torch.dtype,
    fast_accum: bool,
) -> Tensor:  # fmt: skip
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


@fake_kernel(_library, "grouped_columns")
def _columns_fake(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, offs: Tensor, block: int, out_dtype: torch.dtype,
    fast_accum: bool,
) -> Tensor:  # fmt: skip
    return a.new_empty((offs.shape[0], a.shape[0], b.shape[0]), dtype=out_dtype)


def grouped_rows(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, offs: Tensor, block: int, out_dtype: torch.dtype,
    fast_accum: bool,
) -> Tensor:  # fmt: skip
    """a [M, K] x b [G, N, K]^T by groups of rows, FP8, in `out_dtype`; rows of no group are zero.

    `block` 0: a_scale [M, 1], b_scale [G, N]. 1 or 128, with K in multiples of 128: a_scale [M, K/128] and b_scale
    [G, N or N/128, K/128] (rounded up). Scales are float32.
    """
    return torch.ops.fxquant_kernels.grouped_rows(  # type: ignore[no-any-return]
        a, b, a_scale, b_scale, offs, block, out_dtype, fast_accum
    )


def grouped_columns(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, offs: Tensor, block: int, out_dtype: torch.dtype,
    fast_accum: bool,
) -> Tensor:  # fmt: skip
    """a [N, M] x b [K, M]^T over the columns of each group, FP8, to [G, N, K] of `out_dtype`; `offs` are their ends.

    `block` 0: scales [G, N] and [G, K]. 1, with groups that start and end at multiples of 128: [N, M/128], [K, M/128].
    """
    return torch.ops.fxquant_kernels.grouped_columns(  # type: ignore[no-any-return]
        a, b, a_scale, b_scale, offs, block, out_dtype, fast_accum
    )


__all__ = ["grouped_columns", "grouped_rows"]
