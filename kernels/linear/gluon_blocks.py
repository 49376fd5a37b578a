# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""A GEMM of e4m3 operands with scales of 128 elements along K for Hopper, in Triton's Gluon.

One warp copies tiles of both operands to a ring of buffers in shared memory. Two or three groups of four warps have
64 or 128 rows of a tile each: tensor cores sum 128 products, and CUDA cores add these sums, times their scales, to the
result in float32. While one group does so, tensor cores work for another.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fxquant.kernels.gluon_ring import next_stage
from fxquant.kernels.linear.block_tiles import Config

_ROWS = gl.constexpr(64)
"""Rows that four warps multiply at a time: the fewest that Hopper does."""
_K = gl.constexpr(128)
"""Elements along K that have a scale."""
_FIRST, _SECOND, _THIRD = (gl.constexpr(i) for i in range(3))
_LOADING_REGISTERS = gl.constexpr(24)
_DENSE, _ROWS_OF_GROUPS, _COLUMNS_OF_GROUPS = (gl.constexpr(i) for i in range(3))
"""The kinds of products: of matrices, of rows of groups by the matrix of each, of columns of groups."""


@gluon.jit
def _tile_at(tile, down, across, BAND: gl.constexpr):
    """The place of a tile among `down` x `across`: in bands of BAND tiles down, each from left to right."""
    band = tile // (BAND * across)
    height = gl.minimum(down - band * BAND, BAND)
    within = tile - band * (BAND * across)
    return band * BAND + within % height, within // height


@gluon.jit
def _tiles_down(places, sizes, KIND: gl.constexpr, BM: gl.constexpr):
    """Returns the number of tiles down, those of one group where its columns are multiplied."""
    down = (sizes[0] + BM - 1) // BM
    if KIND == _ROWS_OF_GROUPS:
        down = gl.load(places[1])
    return down


@gluon.jit
def _tile(
    tile, down, across, places, sizes, KIND: gl.constexpr, BAND: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr
):  # fmt: skip
    """A tile: its first row of a, of b and of its part of c, its columns' place, that part, and its blocks along K."""
    table, ends, _ = places
    m, n, steps = sizes
    part = 0
    block = 0
    if KIND == _COLUMNS_OF_GROUPS:
        part = tile // (down * across)
        tile -= part * (down * across)
        start = gl.load(ends + (part - 1), mask=part > 0, other=0)
        block = start // _K
        steps = (gl.load(ends + part) - start + _K - 1) // _K
    i, j = _tile_at(tile, down, across, BAND)
    a_row = i * BM
    b_row = j * BN
    c_row = i * BM
    if KIND == _ROWS_OF_GROUPS:  # the part of c with index e ends with row e, m rows in
        a_row = gl.load(table + 4 * i + 1)
        b_row += gl.load(table + 4 * i) * n
        part = gl.load(table + 4 * i + 2)
        c_row = m - part + a_row
    return a_row, b_row, c_row, j, part, block, steps


@gluon.jit
def _load_tiles(
    a, b, a_scale, b_scale, shared, places, sizes, KIND: gl.constexpr, BY_COLUMN: gl.constexpr, DEEP: gl.constexpr,
    BAND: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, HEIGHT: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """Copies tiles and their scales, as the loading warp."""
    a_tiles, b_tiles, lefts, rights, full, empty, _ = shared
    BM: gl.constexpr = GROUPS * HEIGHT
    BYTES: gl.constexpr = (BM + BN) * _K + (0 if KIND == _ROWS_OF_GROUPS else BM * 4) + (BN * 4 if BY_COLUMN else 0)
    down = _tiles_down(places, sizes, KIND, BM)
    across = (sizes[1] + BN - 1) // BN
    tiles = down * across
    if KIND == _COLUMNS_OF_GROUPS:
        tiles *= places[2]
    stage = 0
    phase = 1  # a barrier that nothing has arrived at yet counts as past its last round
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        a_row, b_row, _c_row, _j, _c_part, block, steps = _tile(tile, down, across, places, sizes, KIND, BAND, BM, BN)
        for k in range(block, block + (steps + steps % 2 if DEEP else steps)):
            mbarrier.wait(empty.index(stage), phase)
            ready = full.index(stage)
            mbarrier.expect(ready, BYTES)
            for group in gl.static_range(GROUPS):
                row = a_row + group * HEIGHT
                place = stage * GROUPS + group
                tma.async_copy_global_to_shared(a, [row, k * _K], ready, a_tiles.index(place))
                if KIND != _ROWS_OF_GROUPS:  # whose rows start anywhere, copies along rows at multiples of 16 bytes
                    tma.async_copy_global_to_shared(a_scale, [k, row], ready, lefts.index(place))
            tma.async_copy_global_to_shared(b, [b_row, k * _K], ready, b_tiles.index(stage))
            if BY_COLUMN:
                tma.async_copy_global_to_shared(b_scale, [k, b_row], ready, rights.index(stage))
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _scaled(total, part, left, right, BY_COLUMN: gl.constexpr):
    """Adds a part, times its scales, to a total."""
    if BY_COLUMN:
        total += part * right[None, :] * left[:, None]
    else:
        total += part * (left * right)[:, None]
    return total


@gluon.jit
def _held(total):
    """A total, at this place: LLVM would move sums down to where they are read, and parts that they read would stay."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [total], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def _begin(shared, stage, phase, part, GROUP: gl.constexpr, GROUPS: gl.constexpr):
    """Begins the product of the first 64 rows of a group, once a stage is full."""
    a_tiles, b_tiles, _, _, full, _, _ = shared
    mbarrier.wait(full.index(stage), phase)
    x = a_tiles.index(stage * GROUPS + GROUP).slice(0, _ROWS)
    return warpgroup_mma(x, b_tiles.index(stage).permute((1, 0)), part, use_acc=False, is_async=True)


@gluon.jit
def _left(shared, place, first: gl.constexpr, HEIGHT: gl.constexpr, LAYOUT: gl.constexpr):
    """Scales of 64 rows of a."""
    return shared[2].index(place).reshape([HEIGHT]).slice(first, _ROWS).load(LAYOUT)


@gluon.jit
def _multiply(
    shared, c, scales, places, sizes, KIND: gl.constexpr, GROUP: gl.constexpr, BY_COLUMN: gl.constexpr,
    DEEP: gl.constexpr, BAND: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, HEIGHT: gl.constexpr,
    BN: gl.constexpr, C_TILES: gl.constexpr,
):  # fmt: skip
    """Multiplies with a group of four warps."""
    a_tiles, b_tiles, _lefts, rights, _full, empty, c_tiles = shared
    BM: gl.constexpr = GROUPS * HEIGHT
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 32])
    ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    COLUMN: gl.constexpr = gl.SliceLayout(0, ACC)
    down = _tiles_down(places, sizes, KIND, BM)
    across = (sizes[1] + BN - 1) // BN
    tiles = down * across
    if KIND == _COLUMNS_OF_GROUPS:
        tiles *= places[2]
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        a_row, b_row, c_row, j, c_part, _block, steps = _tile(tile, down, across, places, sizes, KIND, BAND, BM, BN)
        if not BY_COLUMN:
            gl.static_assert(BN == _K)
            right_at = scales[1] + j * scales[3]
            if KIND == _ROWS_OF_GROUPS:
                right_at += (b_row - j * BN) // sizes[1] * scales[2]
            right = gl.load(right_at)
            right2 = gl.load(right_at + gl.minimum(1, steps - 1))
        if KIND == _ROWS_OF_GROUPS:
            row = a_row + GROUP * HEIGHT + gl.arange(0, _ROWS, ROW)
            left_at = scales[0] + gl.minimum(row, sizes[0] - 1)
            left_next = gl.load(left_at)
            left2_next = gl.load(left_at + gl.minimum(1, steps - 1) * scales[4])
            if HEIGHT == 128:
                lower_at = scales[0] + gl.minimum(row + _ROWS, sizes[0] - 1)
                lower_next = gl.load(lower_at)
        total = gl.full([_ROWS, BN], 0.0, gl.float32, ACC)
        part = gl.full([_ROWS, BN], 0.0, gl.float32, ACC)
        if HEIGHT == 128:
            total2 = gl.full([_ROWS, BN], 0.0, gl.float32, ACC)
        if DEEP:
            gl.static_assert(HEIGHT == 64 and not BY_COLUMN)
            odd = part
            for k in range(0, steps, 2):
                before = stage
                part = _begin(shared, stage, phase, part, GROUP, GROUPS)
                if KIND != _ROWS_OF_GROUPS:
                    left = _left(shared, stage * GROUPS + GROUP, 0, HEIGHT, ROW)
                stage, phase = next_stage(stage, phase, STAGES)
                odd = _begin(shared, stage, phase, odd, GROUP, GROUPS)
                if KIND == _ROWS_OF_GROUPS:
                    left, left2 = left_next, left2_next
                    left_next = gl.load(left_at + gl.minimum(k + 2, steps - 1) * scales[4])
                    left2_next = gl.load(left_at + gl.minimum(k + 3, steps - 1) * scales[4])
                else:
                    left2 = _left(shared, stage * GROUPS + GROUP, 0, HEIGHT, ROW)
                right_now = right
                right2_now = right2
                right = gl.load(right_at + gl.minimum(k + 2, steps - 1))
                right2 = gl.load(right_at + gl.minimum(k + 3, steps - 1))
                part = warpgroup_mma_wait(1, deps=[part])
                mbarrier.arrive(empty.index(before))
                total = _scaled(total, part, left, right_now, BY_COLUMN)
                odd = warpgroup_mma_wait(0, deps=[odd])
                mbarrier.arrive(empty.index(stage))
                total = _scaled(total, odd, left2, right2_now, BY_COLUMN)
                stage, phase = next_stage(stage, phase, STAGES)
        else:
            gl.static_assert(HEIGHT == 128 or not BY_COLUMN)
            for k in range(steps):
                part = _begin(shared, stage, phase, part, GROUP, GROUPS)
                place = stage * GROUPS + GROUP
                if KIND == _ROWS_OF_GROUPS:
                    left = left_next
                    left_next = gl.load(left_at + gl.minimum(k + 1, steps - 1) * scales[4])
                    if HEIGHT == 128:
                        lower = lower_next
                        lower_next = gl.load(lower_at + gl.minimum(k + 1, steps - 1) * scales[4])
                else:
                    left = _left(shared, place, 0, HEIGHT, ROW)
                    if HEIGHT == 128:
                        lower = _left(shared, place, _ROWS, HEIGHT, ROW)
                if BY_COLUMN:
                    right_now = rights.index(stage).reshape([BN]).load(COLUMN)
                else:
                    right_now = right
                    right = right2
                    right2 = gl.load(right_at + gl.minimum(k + 2, steps - 1))
                part = warpgroup_mma_wait(0, deps=[part])
                if HEIGHT == 64:
                    mbarrier.arrive(empty.index(stage))
                total = _scaled(total, part, left, right_now, BY_COLUMN)
                if HEIGHT == 128:
                    total = _held(total)
                    x = a_tiles.index(place).slice(_ROWS, _ROWS)
                    part = warpgroup_mma(x, b_tiles.index(stage).permute((1, 0)), part, use_acc=False, is_async=True)
                    part = warpgroup_mma_wait(0, deps=[part])
                    mbarrier.arrive(empty.index(stage))
                    total2 = _scaled(total2, part, lower, right_now, BY_COLUMN)
                stage, phase = next_stage(stage, phase, STAGES)
        c_row += GROUP * HEIGHT
        c_tile = c_tiles.index(GROUP * C_TILES)
        tma.store_wait(0)
        c_tile.reshape([_ROWS, BN]).store(total.to(c.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(c, [c_part, c_row, j * BN], c_tile)
        if HEIGHT == 128:
            c_tile = c_tiles.index(GROUP * C_TILES + C_TILES - 1)
            if C_TILES == 1:
                tma.store_wait(0)
            c_tile.reshape([_ROWS, BN]).store(total2.to(c.dtype))
            fence_async_shared()
            tma.async_copy_shared_to_global(c, [c_part, c_row + _ROWS, j * BN], c_tile)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["m", "n", "steps", "groups", "b_part_step", "b_row_step", "a_step"])
def block_mm_kernel(
    a, b, c, a_scale, b_scale, table, ends, m, n, steps, groups, b_part_step, b_row_step, a_step,
    KIND: gl.constexpr, BY_COLUMN: gl.constexpr, DEEP: gl.constexpr, BAND: gl.constexpr, GROUPS: gl.constexpr,
    REGISTERS: gl.constexpr, STAGES: gl.constexpr, HEIGHT: gl.constexpr, BN: gl.constexpr, C_TILES: gl.constexpr,
):  # fmt: skip
    """c [M, N] = a [M, K] x b [N, K]^T in tiles of GROUPS x HEIGHT by BN, dealt out to as many programs as there are.

    a, b, c and the scales that run along K first are descriptors, `steps` the blocks along K. Of rows of groups, scales
    of a are a pointer, with `a_step` elements from one block along K to the next.
    """
    a_tiles = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * GROUPS, HEIGHT, _K], a.layout)
    b_tiles = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BN, _K], b.layout)
    lefts = a_tiles
    rights = a_tiles
    if KIND != _ROWS_OF_GROUPS:
        lefts = gl.allocate_shared_memory(gl.float32, [STAGES * GROUPS, 1, HEIGHT], a_scale.layout)
    if BY_COLUMN:
        rights = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BN], b_scale.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    c_tiles = gl.allocate_shared_memory(c.dtype, [GROUPS * C_TILES, 1, _ROWS, BN], c.layout)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=GROUPS)
    fence_async_shared()
    shared = (a_tiles, b_tiles, lefts, rights, full, empty, c_tiles)
    scales = (a_scale, b_scale, b_part_step, b_row_step, a_step)
    places = (table, ends, groups)
    sizes = (m, n, steps)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (shared, c, scales, places, sizes, KIND, _FIRST, BY_COLUMN, DEEP, BAND, GROUPS,
                             STAGES, HEIGHT, BN, C_TILES)),
                (_multiply, (shared, c, scales, places, sizes, KIND, _SECOND, BY_COLUMN, DEEP, BAND, GROUPS,
                             STAGES, HEIGHT, BN, C_TILES)),
                (_load_tiles, (a, b, a_scale, b_scale, shared, places, sizes, KIND, BY_COLUMN, DEEP, BAND, GROUPS,
                               STAGES, HEIGHT, BN)),
            ],
            [4, 1], [REGISTERS, _LOADING_REGISTERS],
        )  # fmt: skip
    else:
        gl.static_assert(GROUPS == 3)
        gl.warp_specialize(
            [
                (_multiply, (shared, c, scales, places, sizes, KIND, _FIRST, BY_COLUMN, DEEP, BAND, GROUPS,
                             STAGES, HEIGHT, BN, C_TILES)),
                (_multiply, (shared, c, scales, places, sizes, KIND, _SECOND, BY_COLUMN, DEEP, BAND, GROUPS,
                             STAGES, HEIGHT, BN, C_TILES)),
                (_multiply, (shared, c, scales, places, sizes, KIND, _THIRD, BY_COLUMN, DEEP, BAND, GROUPS,
                             STAGES, HEIGHT, BN, C_TILES)),
                (_load_tiles, (a, b, a_scale, b_scale, shared, places, sizes, KIND, BY_COLUMN, DEEP, BAND, GROUPS,
                               STAGES, HEIGHT, BN)),
            ],
            [4, 4, 1], [REGISTERS, REGISTERS, _LOADING_REGISTERS],
        )  # fmt: skip


def scaled_mm(a: Sequence[Tensor], b: Sequence[Tensor], tiled: bool, out_dtype: torch.dtype) -> Tensor:
    """Returns a [M, K] x b [N, K]^T in `out_dtype`, of e4m3 elements. Launches at once.

    Their float32 scales are [M, K / 128] and [N, K / 128] or, `tiled`, [N / 128, K / 128], rounded up. N and K are
    multiples of 16.
    """
    (m, k), n = a[0].shape, b[0].shape[0]
    if not (m and n and k):
        return torch.zeros((m, n), dtype=out_dtype, device=a[0].device)
    out = torch.empty((m, n), dtype=out_dtype, device=a[0].device)
    right = [aligned(b[0]), b[1].contiguous()] if tiled else left(b)
    with torch.cuda.device(out.device):
        multiply(left(a), right, out, Config.of((m, n), _processors(out), tiled=tiled), tiled=tiled)
    return out


def left(operand: Sequence[Tensor]) -> list[Tensor]:
    """An operand with scales of 1x128 as the kernel reads it."""
    return [aligned(operand[0]), by_columns(operand[1])]


def aligned(x: Tensor) -> Tensor:
    """The same elements by rows that start at multiples of 16 bytes."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def by_columns(scale: Tensor) -> Tensor:
    """Scales [R, C] as [C, R], with rows that start at multiples of 16 bytes."""
    rows, columns = scale.shape
    if scale.t().is_contiguous() and rows % 4 == 0 and scale.data_ptr() % 16 == 0:  # as casts store them
        return scale.t()
    out = torch.empty((columns, rows + -rows % 4), dtype=scale.dtype, device=scale.device)
    return out.narrow(1, 0, rows).copy_(scale.t())


def multiply(
    a: Sequence[Tensor], b: Sequence[Tensor], out: Tensor, config: Config, *, tiled: bool, launch: bool = True
) -> None:
    """Writes a [M, K] x b [N, K]^T into `out`: `a` as `left` gives it, `b` too or, `tiled`, [N / 128, K / 128]."""
    m, n = out.shape
    tiles = -(-m // config.rows) * -(-n // config.columns)
    _run(
        (a, b), _result(out, out.data_ptr(), [1, m, n], config), (out, out, 1), (m, n),
        (0, b[1].stride(0) if tiled else 0, 0),
        config.options(out.dtype) | {"KIND": _DENSE, "BY_COLUMN": not tiled}, min(tiles, _processors(out)), launch,
    )  # fmt: skip


def rows_of_groups(
    a: Sequence[Tensor], b: Sequence[Tensor], tiles: Sequence[Tensor], out: Tensor, config: Config, *,
    launch: bool = True,
) -> None:  # fmt: skip
    """Writes a [M, K] x b [G, N, K]^T by groups of rows into `out` [M, N]; rows of no group stay as they are.

    `a` is as `left` gives it, scales of b are [G, N / 128, K / 128]. `tiles` are a table and how many of its entries
    are in use: for each tile of the config's rows the group, the first row, where the group ends, and another number.
    """
    m, n = out.shape
    # the part with index e ends with row e - 1 of the result, m rows in: what is written behind it is dropped
    base = out.data_ptr() - m * n * out.element_size()
    _run(
        (a, [b[0].flatten(0, 1), b[1]]), _result(out, base, [m + 1, m, n], config, n),
        (tiles[0], tiles[1], b[0].shape[0]), (m, n), (b[1].stride(0), b[1].stride(1), a[1].stride(0)),
        config.options(out.dtype) | {"KIND": _ROWS_OF_GROUPS, "BY_COLUMN": False}, _processors(out), launch,
    )  # fmt: skip


def columns_of_groups(
    a: Sequence[Tensor], b: Sequence[Tensor], ends: Tensor, out: Tensor, config: Config, *, launch: bool = True
) -> None:
    """Writes a [N, M] x b [K, M]^T over the columns of each group, which end at multiples of 128, into `out` [G, N, K].

    Both operands are as `left` gives them.
    """
    groups, m, n = out.shape
    _run(
        (a, b), _result(out, out.data_ptr(), [groups, m, n], config), (ends, ends, groups), (m, n),
        (0, 0, 0),
        config.options(out.dtype) | {"KIND": _COLUMNS_OF_GROUPS, "BY_COLUMN": True}, _processors(out), launch,
    )  # fmt: skip


def _run(
    operands: Sequence[Sequence[Tensor]], result: TensorDescriptor, places: tuple[Tensor, Tensor, int],
    sizes: tuple[int, int], scale_steps: tuple[int, int, int], options: dict[str, Any], programs: int, launch: bool,
) -> None:  # fmt: skip
    """Launches the kernel, or only compiles it."""
    (a, a_scale), (b, b_scale) = operands
    height, columns = options["HEIGHT"], options["BN"]
    a_scale = a_scale if options["KIND"] == _ROWS_OF_GROUPS.value else _scales(a_scale, height)
    arguments = (
        _operand(a, height), _operand(b, columns), result, a_scale,
        _scales(b_scale, columns) if options["BY_COLUMN"] else b_scale, *places[:2], *sizes, -(-a.shape[1] // 128),
        places[2], *scale_steps,
    )  # fmt: skip
    with nullcontext() if options["BY_COLUMN"] else _assembled_by_the_newer(str(options)):
        if launch:
            block_mm_kernel[(programs,)](*arguments, **options, num_warps=4)
        else:
            block_mm_kernel.warmup(*arguments, **options, num_warps=4, grid=(programs,))


_NEWER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas-blackwell"
"""The newer of the assemblers that Triton ships, which it takes for newer cards.

By that of CUDA 12.9 every other one of a row of FFMAs lets other warps go first, which may have something for tensor
cores: 9% with scales of tiles. With twice as many instructions, those of 1x128 by 1x128, it costs 8%.
"""
_ASSEMBLED: set[str] = set()


@contextmanager
def _assembled_by_the_newer(constants: str) -> Iterator[None]:
    """Has Triton take the newer assembler the first time that constants are met, unless an assembler was asked for."""
    if constants in _ASSEMBLED or "TRITON_PTXAS_PATH" in os.environ or not _NEWER.exists():
        yield
        return
    with knobs.nvidia.scope():
        knobs.nvidia.ptxas = str(_NEWER)
        yield
    _ASSEMBLED.add(constants)


@dataclass(frozen=True)
class _Address:
    """A place in memory as a descriptor asks for it."""

    place: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.place


@functools.cache
def _layout(box: tuple[int, ...], dtype: torch.dtype, swizzled: bool = True) -> gl.NVMMASharedLayout:
    """Returns how a box lies in shared memory: in the order that tensor cores want, or as it comes."""
    if swizzled:
        return gl.NVMMASharedLayout.get_default_for(list(box), _DTYPES[dtype])
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=len(box))


def _operand(x: Tensor, rows: int) -> TensorDescriptor:
    """Returns the descriptor for copies of boxes [rows, 128] of a matrix, zeros past its ends."""
    return TensorDescriptor(x, list(x.shape), [x.shape[1], 1], [rows, 128], _layout((rows, 128), x.dtype))


def _scales(x: Tensor, columns: int) -> TensorDescriptor:
    """Returns the descriptor for copies of scales of so many rows of an operand."""
    step = x.stride(0) if x.shape[0] > 1 else x.shape[1] + -x.shape[1] % 4  # that of a single row says nothing
    return TensorDescriptor(x, list(x.shape), [step, 1], [1, columns], _layout((1, columns), x.dtype, False))


def _result(out: Tensor, base: int, shape: list[int], config: Config, step: int = 0) -> TensorDescriptor:
    """Returns the descriptor for the result in parts, `step` elements apart; nothing is written past their ends."""
    box, strides = [1, 64, config.columns], [step or shape[1] * shape[2], shape[2], 1]
    return TensorDescriptor(_Address(base, out.dtype), shape, strides, box, _layout(tuple(box), out.dtype))


def _processors(out: Tensor) -> int:
    return torch.cuda.get_device_properties(out.device).multi_processor_count


_DTYPES = {
    torch.float8_e4m3fn: gl.float8e4nv, torch.bfloat16: gl.bfloat16, torch.float16: gl.float16,
    torch.float32: gl.float32,
}  # fmt: skip
