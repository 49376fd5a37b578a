"""Triton GEMMs of FP8 elements for groups of rows: scales in blocks of 128, or per tensor and row behind the product.

The offsets are read by the kernels. Programs stay on their multiprocessor and take tile after tile, so that the loads
of one run during the store of another. Tiles are loaded and stored through TMA descriptors of a shape that ends where
a group does.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,import-untyped"
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from fxquant.compat.device import triton_workspace
from fxquant.compat.patches import writes
from fxquant.compat.values import statically_known_true

_MULTIPROCESSORS = 132
"""Multiprocessors of an H100, one for each program that stays."""
_ENTRIES = 64
"""Tiles of rows that a program of `tiles_kernel` looks up."""


@writes("tiles", "count")
@triton.jit
def tiles_kernel(offs, tiles, count, G, GROUPS: tl.constexpr, BM: tl.constexpr, ENTRIES: tl.constexpr):
    """Stores in `tiles` the group, the first row and the group's end of each tile of BM rows, which has one group.

    `count` becomes the number of tiles. GROUPS is a power of two, no less than G.
    """
    g = tl.arange(0, GROUPS)
    ends = tl.load(offs + g, mask=g < G, other=0)
    starts = tl.load(offs + g - 1, mask=(g > 0) & (g < G), other=0)
    of_group = tl.where(g < G, (ends - starts + BM - 1) // BM, 0)
    through = tl.cumsum(of_group, 0)
    if tl.program_id(0) == 0:
        tl.store(count, tl.sum(of_group, 0))
    tile = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    group = tl.sum((through[None, :] <= tile[:, None]).to(tl.int32), 1)
    in_group = g[None, :] == group[:, None]
    start = tl.sum(tl.where(in_group, (starts - (through - of_group) * BM)[None, :], 0), 1)
    end = tl.sum(tl.where(in_group, ends[None, :], 0), 1)
    place = tiles + 4 * tile
    tl.store(place, group)
    tl.store(place + 1, start + tile * BM)
    tl.store(place + 2, end)


@triton.jit
def _halves(x, BM: tl.constexpr, BN: tl.constexpr, HALVES: tl.constexpr):
    """Returns the first and the last BN columns of x [BM, HALVES * BN]."""
    if HALVES == 2:
        first, last = tl.split(tl.permute(tl.reshape(x, (BM, 2, BN)), (0, 2, 1)))
    else:
        first, last = x, x
    return first, last


@writes("out")
@triton.jit
def rows_kernel(
    a, b, a_scale, b_scale, tiles, count, offs, out, M, N, K, G, a_scale_step, a_scale_column_step, b_scale_group,
    b_scale_step, BLOCK: tl.constexpr, FAST: tl.constexpr, ALIGNED: tl.constexpr, PROGRAMS: tl.constexpr,
    FLATTEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Computes out [M, N] = a [M, K] x b [G, N, K] of its row's group, transposed; zeros behind the last group.

    A tile has BM rows and HALVES (1 or 2) times BN columns. BLOCK is the number of b's rows that share a scale for 128
    of K, 1 or 128; 0 takes a's scales [M] and b's [G, N]. ALIGNED says that rows of the result start at multiples of 16
    bytes.
    """
    a_blocks = tl.make_tensor_descriptor(a, [M, K], [K, 1], [BM, BK])
    b_blocks = tl.make_tensor_descriptor(b, [G * N, K], [K, 1], [HALVES * BN if FAST else BN, BK])
    if ALIGNED:  # rows M - end behind those of the result, and as many before them: what is behind a group is outside
        result = tl.make_tensor_descriptor(out - tl.cast(M, tl.int64) * N, [M + 1, M, N], [N, N, 1], [1, BM, BN])
    across = tl.cdiv(N, HALVES * BN)
    total = tl.load(count) * across
    for tile in tl.range(tl.program_id(0), total, PROGRAMS, flatten=FLATTEN):
        entry = tiles + 4 * (tile // across)
        group, first_m, end = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        first_n = (tile % across) * (HALVES * BN)
        m = first_m + tl.arange(0, BM)
        row = group * N + first_n
        if FAST:
            acc = tl.zeros((BM, HALVES * BN), tl.float32)
            for step in range(0, tl.cdiv(K, BK)):
                x = a_blocks.load([first_m, step * BK])
                w = b_blocks.load([row, step * BK])
                acc = tl.dot(x, w.T, acc)
            first, last = _halves(acc, BM, BN, HALVES)
        else:
            first = tl.zeros((BM, BN), tl.float32)
            last = tl.zeros((BM, BN), tl.float32)
            steps = tl.cdiv(K, BK)
            if BLOCK > 0:  # a scale is asked for a step before it is used
                weights = b_scale + group.to(tl.int64) * b_scale_group
                scales = a_scale + m * a_scale_step
                of_a = tl.load(scales, mask=m < M, other=0.0)
                if BLOCK == BN:
                    at = weights + (first_n // BLOCK) * b_scale_step
                    of_w = tl.load(at)
                    if HALVES == 2:
                        of_v = tl.load(at + b_scale_step, mask=first_n + BN < N, other=0.0)
            for step in range(0, steps):
                x = a_blocks.load([first_m, step * BK])
                w = b_blocks.load([row, step * BK])
                if HALVES == 2:
                    v = b_blocks.load([row + BN, step * BK])
                if BLOCK == 0:
                    first += tl.dot(x, w.T)
                    if HALVES == 2:
                        last += tl.dot(x, v.T)
                else:
                    following = tl.minimum(step + 1, steps - 1)
                    next_a = tl.load(scales + following * a_scale_column_step, mask=m < M, other=0.0)
                    if BLOCK == BN:
                        next_w = tl.load(at + following)
                        if HALVES == 2:
                            next_v = tl.load(at + b_scale_step + following, mask=first_n + BN < N, other=0.0)
                        first += tl.dot(x, w.T) * (of_a * of_w)[:, None]
                        of_w = next_w
                        if HALVES == 2:
                            last += tl.dot(x, v.T) * (of_a * of_v)[:, None]
                            of_v = next_v
                    else:
                        n = first_n + tl.arange(0, BN)
                        of_w = tl.load(weights + n // BLOCK * b_scale_step + step, mask=n < N, other=0.0)
                        first += tl.dot(x, w.T) * of_a[:, None] * of_w[None, :]
                        if HALVES == 2:
                            behind = (n + BN) // BLOCK
                            of_v = tl.load(weights + behind * b_scale_step + step, mask=n + BN < N, other=0.0)
                            last += tl.dot(x, v.T) * of_a[:, None] * of_v[None, :]
                    of_a = next_a
        n = first_n + tl.arange(0, BN)
        if BLOCK == 0:
            of_a = tl.load(a_scale + m, mask=m < end, other=0.0)[:, None]
            by_column = b_scale + group.to(tl.int64) * N + n
            first = first * of_a * tl.load(by_column, mask=n < N, other=0.0)[None, :]
            if HALVES == 2:
                last = last * of_a * tl.load(by_column + BN, mask=n + BN < N, other=0.0)[None, :]
        if ALIGNED:
            below = M - end + first_m
            result.store([end, below, first_n], first.to(out.dtype.element_ty).reshape(1, BM, BN))
            if HALVES == 2:
                result.store([end, below, first_n + BN], last.to(out.dtype.element_ty).reshape(1, BM, BN))
        else:
            place = out + (m[:, None].to(tl.int64) * N + n[None, :])
            in_m = (m < end)[:, None]
            tl.store(place, first.to(out.dtype.element_ty), mask=in_m & (n < N)[None, :])
            if HALVES == 2:
                tl.store(place + BN, last.to(out.dtype.element_ty), mask=in_m & (n + BN < N)[None, :])
    n = tl.arange(0, 1024)
    for row in range(tl.load(offs + G - 1) + tl.program_id(0), M, PROGRAMS):
        start = (tl.zeros((1,), tl.int64) + row) * N
        for step in range(0, tl.cdiv(N, 1024)):
            at = step * 1024 + n
            tl.store(out + (start + at), tl.zeros((1024,), out.dtype.element_ty), mask=at < N)


@writes("out")
@triton.jit
def columns_kernel(
    a, b, a_scale, b_scale, offs, out, M, N, K, G, a_scale_step, a_scale_column_step, b_scale_step,
    b_scale_column_step, BLOCK: tl.constexpr, FAST: tl.constexpr, ALIGNED: tl.constexpr, PROGRAMS: tl.constexpr,
    FLATTEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Computes out [G, N, K] = a [N, M] x b [K, M], transposed, over the columns of each group; zeros for an empty one.

    A tile has BM of N and HALVES (1 or 2) times BN of K. Groups start and end at multiples of 16. With BLOCK they do so
    at multiples of 128, and the scales are those of 128 columns, [N, M / 128] and [K, M / 128], else [G, N] and [G, K].
    """
    # columns M - end behind those of an operand, and as many before them: what is behind a group is outside, and zero
    a_blocks = tl.make_tensor_descriptor(a - M, [M // 16 + 1, N, M], [16, M, 1], [1, BM, BK])
    b_blocks = tl.make_tensor_descriptor(b - M, [M // 16 + 1, K, M], [16, M, 1], [1, HALVES * BN if FAST else BN, BK])
    if ALIGNED:
        result = tl.make_tensor_descriptor(out, [G, N, K], [tl.cast(N, tl.int64) * K, K, 1], [1, BM, BN])
    across = tl.cdiv(K, HALVES * BN)
    per_group = tl.cdiv(N, BM) * across
    for tile in tl.range(tl.program_id(0), G * per_group, PROGRAMS, flatten=FLATTEN):
        group = tile // per_group
        first_n = (tile % per_group) // across * BM
        first_k = (tile % across) * (HALVES * BN)
        start = tl.load(offs + group - 1, mask=group > 0, other=0)
        end = tl.load(offs + group)
        n, k = first_n + tl.arange(0, BM), first_k + tl.arange(0, BN)
        if FAST:
            acc = tl.zeros((BM, HALVES * BN), tl.float32)
            for step in range(0, tl.cdiv(end - start, BK)):
                at = M - end + start + step * BK
                x = a_blocks.load([end // 16, first_n, at]).reshape(BM, BK)
                y = b_blocks.load([end // 16, first_k, at]).reshape(HALVES * BN, BK)
                acc = tl.dot(x, y.T, acc)
            first, last = _halves(acc, BM, BN, HALVES)
        else:
            first = tl.zeros((BM, BN), tl.float32)
            last = tl.zeros((BM, BN), tl.float32)
            steps = tl.cdiv(end - start, BK)
            if BLOCK > 0:  # a scale is asked for a step before it is used
                of_n = a_scale + n * a_scale_step + start // BK * a_scale_column_step
                of_k = b_scale + k * b_scale_step + start // BK * b_scale_column_step
                held_n, held_k = tl.where(start < end, N, 0), tl.where(start < end, K, 0)
                in_n, in_k, in_l = n < held_n, k < held_k, k + BN < held_k
                of_a = tl.load(of_n, mask=in_n, other=0.0)
                of_b = tl.load(of_k, mask=in_k, other=0.0)
                if HALVES == 2:
                    of_c = tl.load(of_k + BN * b_scale_step, mask=in_l, other=0.0)
            for step in range(0, steps):
                at = M - end + start + step * BK
                x = a_blocks.load([end // 16, first_n, at]).reshape(BM, BK)
                y = b_blocks.load([end // 16, first_k, at]).reshape(BN, BK)
                if HALVES == 2:
                    z = b_blocks.load([end // 16, first_k + BN, at]).reshape(BN, BK)
                if BLOCK == 0:
                    first += tl.dot(x, y.T)
                    if HALVES == 2:
                        last += tl.dot(x, z.T)
                else:
                    following = tl.minimum(step + 1, steps - 1)
                    next_a = tl.load(of_n + following * a_scale_column_step, mask=in_n, other=0.0)
                    next_b = tl.load(of_k + following * b_scale_column_step, mask=in_k, other=0.0)
                    if HALVES == 2:
                        behind = of_k + (following * b_scale_column_step + BN * b_scale_step)
                        next_c = tl.load(behind, mask=in_l, other=0.0)
                    first += tl.dot(x, y.T) * of_a[:, None] * of_b[None, :]
                    if HALVES == 2:
                        last += tl.dot(x, z.T) * of_a[:, None] * of_c[None, :]
                        of_c = next_c
                    of_a, of_b = next_a, next_b
        if BLOCK == 0:
            of_a = tl.load(a_scale + group * N + n, mask=n < N, other=0.0)[:, None]
            by_column = b_scale + group * K + k
            first = first * of_a * tl.load(by_column, mask=k < K, other=0.0)[None, :]
            if HALVES == 2:
                last = last * of_a * tl.load(by_column + BN, mask=k + BN < K, other=0.0)[None, :]
        if ALIGNED:
            result.store([group, first_n, first_k], first.to(out.dtype.element_ty).reshape(1, BM, BN))
            if HALVES == 2:
                result.store([group, first_n, first_k + BN], last.to(out.dtype.element_ty).reshape(1, BM, BN))
        else:
            place = out + ((group.to(tl.int64) * N + n[:, None]) * K + k[None, :])
            in_n = (n < N)[:, None]
            tl.store(place, first.to(out.dtype.element_ty), mask=in_n & (k < K)[None, :])
            if HALVES == 2:
                tl.store(place + BN, last.to(out.dtype.element_ty), mask=in_n & (k + BN < K)[None, :])


@dataclass(frozen=True)
class Config:
    """The tiles [m, halves * n] and steps of a GEMM, its warps and stages; with `flatten` loads run past a tile."""

    m: int = 128
    n: int = 128
    k: int = 128
    halves: int = 2
    warps: int = 8
    stages: int = 4
    flatten: bool = True
    programs: int = _MULTIPROCESSORS


_FAST = Config()
_SLOW = Config(stages=3)
_BLOCKS = Config(halves=1)
_SHORT_COLUMNS = Config(m=64, halves=1, warps=4, programs=2 * _MULTIPROCESSORS, flatten=False)
"""For blocks in groups of 1024 columns or fewer on average: a tile ends while another runs its steps."""


def _config(block: int, fast_accum: bool, dtype: torch.dtype, short: bool = False) -> Config:
    if block:
        return _SHORT_COLUMNS if short else _BLOCKS
    return _FAST if fast_accum and dtype.itemsize == 2 else _SLOW  # of a stage less: the result stands in its place


def grouped_rows(
    a: Sequence[Tensor], b: Sequence[Tensor], offs: Tensor, block: int, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    """Returns a [M, K] x b [G, N, K]^T by groups of rows, FP8, in `out_dtype`; rows of no group are zero.

    Their float32 scales are for `block` 0 [M, 1] and [G, N]; for 1 or 128, with K in multiples of 128, [M, K/128], of
    any strides, and [G, N or N/128, K/128] (rounded up). K is a multiple of 16.
    """
    (a_data, a_scale), (b_data, b_scale) = a, b
    rows, inner = a_data.shape
    groups, features = b_data.shape[:2]
    config = _config(block, fast_accum, out_dtype)
    out = torch.empty((rows, features), dtype=out_dtype, device=a_data.device)
    tiles, count = tiles_of(offs, rows, config.m)
    with triton_workspace(a_data.device):
        wrap_triton(rows_kernel)[(config.programs,)](
            a_data, b_data, a_scale, b_scale, tiles, count, offs, out, rows, features, inner, groups, *a_scale.stride(),
            b_scale.stride(0), b_scale.stride(1), block, fast_accum and not block, _aligned(features, out_dtype),
            config.programs, config.flatten, config.m, config.n, config.k, config.halves, num_warps=config.warps,
            num_stages=config.stages,
        )  # fmt: skip
    return out


def tiles_of(offs: Tensor, rows: Any, height: int) -> tuple[Tensor, Tensor]:
    """Returns the tiles of so many rows of groups, as `tiles_kernel` stores them, and their number."""
    groups = offs.shape[0]
    most = triton.cdiv(triton.cdiv(rows, height) + groups, _ENTRIES)
    tiles = torch.empty((most * _ENTRIES, 4), dtype=torch.int32, device=offs.device)
    count = torch.empty(1, dtype=torch.int32, device=offs.device)
    enough = triton.next_power_of_2(groups)
    wrap_triton(tiles_kernel)[(most,)](offs, tiles, count, groups, enough, height, _ENTRIES, num_warps=4)
    return tiles, count


def grouped_columns(
    a: Sequence[Tensor], b: Sequence[Tensor], offs: Tensor, block: int, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    """Returns a [N, M] x b [K, M]^T over the columns of each group, FP8, as [G, N, K] of `out_dtype`; `offs` end them.

    M and the ends are multiples of 16. The scales are for `block` 0 [G, N] and [G, K]; for 1, with groups that start
    and end at multiples of 128, [N, M/128] and [K, M/128], of any strides.
    """
    (a_data, a_scale), (b_data, b_scale) = a, b
    groups, outputs, inputs = offs.shape[0], a_data.shape[0], b_data.shape[0]
    short = statically_known_true(a_data.shape[1] <= 1024 * groups)
    config = _config(block, fast_accum, out_dtype, short)
    out = torch.empty((groups, outputs, inputs), dtype=out_dtype, device=a_data.device)
    with triton_workspace(a_data.device):
        wrap_triton(columns_kernel)[(config.programs,)](
            a_data, b_data, a_scale, b_scale, offs, out, a_data.shape[1], outputs, inputs, groups, *a_scale.stride(),
            *b_scale.stride(), block, fast_accum and not block, _aligned(inputs, out_dtype), config.programs,
            config.flatten, config.m, config.n, config.k, config.halves, num_warps=config.warps,
            num_stages=config.stages,
        )  # fmt: skip
    return out


def _aligned(features: Any, dtype: torch.dtype) -> bool:
    """Returns True if rows of a result start at multiples of 16 bytes, which TMA wants."""
    return statically_known_true(features * dtype.itemsize % 16 == 0)
