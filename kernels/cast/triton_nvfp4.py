# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,misc"
"""Triton kernels that quantize a matrix x [M, K] to NVFP4 in one or both directions from one read.

The bytes are those of `fxquant.kernels.cast.reference.quantize`, scales in the order of tensor cores where a spec says
so: blocks of 16 or tiles of 16x16, the Hadamard transform, stochastic rounding. The global amax is taken in an earlier
pass, of the transformed tensor too where a direction is transformed.

Inductor copies the source of what a kernel calls under the name it is called by: import these by their own names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from fxquant.compat.patches import writes
from fxquant.formats import QuantSpec
from fxquant.kernels.cast import reference
from fxquant.kernels.cast.amax import largest as largest_of
from fxquant.kernels.cast.codes import magnitude
from fxquant.kernels.cast.swizzle import padded_sizes
from fxquant.kernels.cast.triton_cast import exchanged, is_by_columns
from fxquant.kernels.cast.triton_scales import swizzled_place

_TILE, _WARPS = 64, 4
_RANDOM = 3
"""The length of the state of stochastic rounding, behind which a global amax may stand."""
_MOST = tl.constexpr(torch.finfo(torch.float32).max)
_SIXTH = tl.constexpr(1 / 6)
_NEGATIVE = tl.constexpr(0xD7E8)
"""Bit i is set where the sign vector of the transform is -1."""
AT_TILED, AT_RHT, AT_SIGNS, AT_STOCHASTIC, AT_STREAM, AT_NAN, AT_SWIZZLED = (tl.constexpr(i) for i in range(7))
"""The places in SIDE of what describes a side.

TILED: scales of tiles of 16x16. SIGNS: those of the transform RHT. NAN: blocks with NaN are NaN as a whole. SWIZZLED:
scales lie in the order of `fxquant.kernels.cast.swizzle`.
"""


@triton.jit
def butterfly(y, DISTANCE: tl.constexpr):
    """Returns sums and differences of elements so far apart, in the places of the first and the second of them."""
    R: tl.constexpr = y.shape[0]
    C: tl.constexpr = y.shape[1]
    pairs = tl.permute(tl.reshape(y, (R, C // (2 * DISTANCE), 2, DISTANCE)), (0, 1, 3, 2))
    a, b = tl.split(pairs)
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (R, C))


@triton.jit
def transformed(t, SIGNS: tl.constexpr):
    """`reference.hadamard` of the rows of a tile."""
    C: tl.constexpr = t.shape[1]
    if SIGNS:
        minus = (tl.full((C,), _NEGATIVE, tl.int32) >> (tl.arange(0, C) % 16)) & 1
        t = t * (0.25 - 0.5 * minus.to(tl.float32))[None, :]
    else:
        t = t * 0.25
    t = butterfly(butterfly(butterfly(butterfly(t, 8), 4), 2), 1)
    return t.to(tl.bfloat16).to(tl.float32)


@triton.jit
def random_bytes(state, first_row, first_column, R: tl.constexpr, C: tl.constexpr, STREAM: tl.constexpr):
    """`philox.random_bytes` for the elements of a tile, as int32."""
    zero = tl.zeros((R, C // 16), tl.int32)
    place = zero + (first_column // 16 + tl.arange(0, C // 16))[None, :]
    row = zero + (first_row + tl.arange(0, R))[:, None]
    stream = zero + (2 * tl.load(state + 2) + STREAM).to(tl.int32)
    step = zero + tl.load(state + 1).to(tl.int32)
    a, b, c, d = tl.philox(tl.load(state), place, row, stream, step)
    words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (R, C // 4, 1))
    shifts = (tl.arange(0, 4) * 8).to(tl.uint32)[None, None, :]
    return tl.reshape((words >> shifts) & 0xFF, (R, C)).to(tl.int32)


@triton.jit
def negative(y):
    """Returns 1 for values from -0.0 down, 0 for NaN too."""
    return (y.to(tl.int32, bitcast=True) <= -0x800000).to(tl.int32)


@triton.jit
def e2m1_codes(y):
    """`reference.encode_e2m1`."""
    m = tl.abs(y)
    below = (m <= 0.25).to(tl.int32) + (m < 0.75).to(tl.int32) + (m <= 1.25).to(tl.int32) + (m < 1.75).to(tl.int32)
    below += (m <= 2.5).to(tl.int32) + (m < 3.5).to(tl.int32) + (m <= 5.0).to(tl.int32)
    return (7 - below) | (negative(y) << 3)


@triton.jit
def e2m1_codes_stochastic(y, byte):
    """`reference.encode_e2m1_stochastic`."""
    m = tl.abs(y)
    step = tl.where(m < 2, 0.5 / 256, tl.where(m < 4, 1 / 256, 2 / 256))
    total = m + byte.to(tl.float32) * step
    below = (total < 0.5).to(tl.int32) + (total < 1).to(tl.int32) + (total < 1.5).to(tl.int32)
    below += (total < 2).to(tl.int32) + (total < 3).to(tl.int32) + (total < 4).to(tl.int32) + (total < 6).to(tl.int32)
    return (7 - below) | (negative(y) << 3)


@triton.jit
def cast_side(
    t, first_row, first_column, rows, padded, row_bytes, global_amax, state, random_row, random_column, data, scale,
    scale_rows, scale_columns, scale_step, SIDE: tl.constexpr,
):  # fmt: skip
    """Casts a tile t [R, C], its contracted axis last, of an operand [rows, padded], and stores payload and scales.

    A row of the payload is `row_bytes` behind the last, one of `scale_columns` scales `scale_step`, if they are not
    swizzled. The random numbers are those of a place.
    """
    R: tl.constexpr = t.shape[0]
    C: tl.constexpr = t.shape[1]
    if SIDE[AT_RHT]:
        t = transformed(t, SIDE[AT_SIGNS])
    blocks = tl.reshape(t, (R, C // 16, 16))
    amax = tl.max(magnitude(blocks), axis=2)
    if SIDE[AT_TILED]:
        tiles = tl.max(tl.reshape(amax, (R // 16, 16, C // 16)), axis=1, keep_dims=True)
        amax = tl.reshape(tl.broadcast_to(tiles, (R // 16, 16, C // 16)), (R, C // 16))
    largest = tl.load(global_amax)
    encode = tl.div_rn(2688.0, largest)
    encode = tl.where(encode > _MOST, _MOST, encode)
    encode = tl.where((largest > 0) & (encode > 0), encode, 1.0)
    stored = tl.minimum(amax * (encode * _SIXTH), 448.0).to(tl.float8e4nv)
    if SIDE[AT_NAN]:
        has_nan = tl.max((blocks != blocks).to(tl.int32), axis=2) > 0
        stored = tl.where(has_nan, float("nan"), stored.to(tl.float32)).to(tl.float8e4nv)
    factor = tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), stored.to(tl.float32) * tl.div_rn(1.0, encode))
    factor = tl.where(factor > _MOST, _MOST, factor)
    y = tl.reshape(blocks * tl.expand_dims(factor, 2), (R, C))
    if SIDE[AT_STOCHASTIC]:
        codes = e2m1_codes_stochastic(y, random_bytes(state, random_row, random_column, R, C, SIDE[AT_STREAM]))
    else:
        codes = e2m1_codes(y)
    low, high = tl.split(tl.reshape(codes, (R, C // 2, 2)))
    row = first_row + tl.arange(0, R)[:, None]
    pair = first_column // 2 + tl.arange(0, C // 2)[None, :]
    data += first_row.to(tl.int64) * row_bytes  # a tile's own places fit 32 bits
    place = tl.arange(0, R)[:, None] * row_bytes + pair
    tl.store(data + place, (low | (high << 4)).to(tl.uint8), mask=(row < rows) & (2 * pair < padded))
    block = first_column // 16 + tl.arange(0, C // 16)[None, :]
    bits = stored.to(tl.uint8, bitcast=True)
    if SIDE[AT_SWIZZLED]:
        bits = tl.where((row < rows) & (16 * block < padded), bits, 0)
        place = swizzled_place(row, block, scale_columns)
    else:
        place = row.to(tl.int64) * scale_step + block
    bytes_of = scale.to(tl.pointer_type(tl.uint8), bitcast=True)
    tl.store(bytes_of + place, bits, mask=(row < scale_rows) & (block < scale_columns))


@triton.jit
def load_square(x, first_row, first_column, M, K, x_step, TILE: tl.constexpr):
    """Returns a square tile of x [M, K], zero where there is nothing, as float32."""
    row = first_row + tl.arange(0, TILE)[:, None]
    column = first_column + tl.arange(0, TILE)[None, :]
    inside = (row < M) & (column < K)
    return tl.load(x + row.to(tl.int64) * x_step + column, mask=inside, other=0.0).to(tl.float32)


@writes(row_data="ROW", row_scale="ROW", column_data="COLUMN", column_scale="COLUMN")
@triton.jit
def nvfp4_kernel(
    x, row_amax, row_state, row_data, row_scale, column_amax, column_state, column_data, column_scale, M, K, x_step,
    tiles_across, padded_M, padded_K, row_scale_rows, row_scale_columns, column_scale_rows, column_scale_columns,
    ROW: tl.constexpr, COLUMN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Casts one square tile of x [M, K]; ROW and COLUMN describe the sides, None for one that is not wanted."""
    first_row = (tl.program_id(0) // tiles_across) * TILE
    first_column = (tl.program_id(0) % tiles_across) * TILE
    t = load_square(x, first_row, first_column, M, K, x_step, TILE)
    if ROW is not None:
        cast_side(
            t, first_row, first_column, M, padded_K, padded_K // 2, row_amax, row_state, first_row, first_column,
            row_data, row_scale, row_scale_rows, row_scale_columns, row_scale_columns, ROW,
        )  # fmt: skip
    if COLUMN is not None:
        cast_side(
            tl.trans(t), first_column, first_row, K, padded_M, padded_M // 2, column_amax, column_state, first_column,
            first_row, column_data, column_scale, column_scale_rows, column_scale_columns, column_scale_columns, COLUMN,
        )  # fmt: skip


@writes("out")
@triton.jit
def transformed_amax_kernel(
    x, out, M, K, x_step, tiles_across, COLUMN: tl.constexpr, SIGNS: tl.constexpr, TILE: tl.constexpr
):
    """Stores the largest magnitude, NaN ignored, of each tile of x, transformed along its rows, or columns."""
    program = tl.program_id(0)
    t = load_square(x, (program // tiles_across) * TILE, (program % tiles_across) * TILE, M, K, x_step, TILE)
    if COLUMN:
        t = tl.trans(t)
    tl.store(out + program, tl.max(tl.max(magnitude(transformed(t, SIGNS)), axis=1), axis=0))


def side_constants(spec: QuantSpec) -> tuple[Any, ...]:
    """Returns SIDE of the kernels, in the order of `AT_TILED` on."""
    tiled = spec.row.block[0] > 1
    return tiled, spec.rht, spec.random_signs, spec.stochastic, spec.stream % 2, spec.nonfinite, spec.swizzled


@dataclass(frozen=True)
class Side:
    """One direction of a cast: its outputs, its global amax and its state."""

    data: Tensor
    scale: Tensor
    amax: Tensor
    state: Tensor
    constants: tuple[Any, ...] | None = None

    @property
    def parts(self) -> list[Tensor]:
        return [] if self.constants is None else [self.data, self.scale, self.amax]


def quantize(
    x: Tensor, row: QuantSpec | None, column: QuantSpec | None, row_state: Tensor | None = None,
    column_state: Tensor | None = None, amax: Callable[[Tensor], Tensor] = reference.amax,
) -> list[Tensor]:  # fmt: skip
    """Returns the parts of `reference.quantize` of x [M, K] rowwise, then of x.mT columnwise; None leaves one out.

    The states are those of `reference.quantize`. `amax` takes the amax [1] of a tensor. x is not empty.
    """
    if is_by_columns(x):
        return exchanged(quantize(x.mT, column, row, column_state, row_state, amax), 0 if column is None else 3)
    x = x if x.stride(-1) == 1 else x.contiguous()
    plain: list[Tensor] = []  # both directions share the amax of the tensor as it is

    def largest(spec: QuantSpec, columnwise: bool) -> Tensor:
        if spec.rht:
            return _transformed_amax(x, spec, columnwise)
        plain[:] = plain or [amax(x)]
        return plain[0]

    unread = torch.empty(1, dtype=torch.float32, device=x.device)
    nothing = Side(unread, unread, unread, unread)
    sides = [
        nothing if spec is None else _make_side(x.mT if columnwise else x, spec, state, largest, columnwise, unread)
        for spec, state, columnwise in ((row, row_state, False), (column, column_state, True))
    ]
    size_m, size_k = x.shape
    rows, columns = size_m, size_k
    if any(spec is not None and spec.swizzled for spec in (row, column)):  # tiles of scales are written whole
        rows, columns = padded_sizes(size_m, 0)[0], padded_sizes(size_k, 0)[0]
    across = triton.cdiv(columns, _TILE)
    rowwise, columnwise = sides
    units = [2 * side.data.shape[-1] for side in sides]
    wrap_triton(nvfp4_kernel)[(triton.cdiv(rows, _TILE) * across,)](
        x, rowwise.amax, rowwise.state, rowwise.data, rowwise.scale, columnwise.amax, columnwise.state, columnwise.data,
        columnwise.scale, size_m, size_k, x.stride(0), across, units[1], units[0], rowwise.scale.shape[0],
        rowwise.scale.shape[-1], columnwise.scale.shape[0], columnwise.scale.shape[-1], rowwise.constants,
        columnwise.constants, _TILE, num_warps=_WARPS,
    )  # fmt: skip
    return [*rowwise.parts, *columnwise.parts]


def _transformed_amax(x: Tensor, spec: QuantSpec, columnwise: bool) -> Tensor:
    """The amax [1] of the operand as the transform leaves it."""
    size_m, size_k = x.shape
    across = triton.cdiv(size_k, _TILE)
    tiles = triton.cdiv(size_m, _TILE) * across
    out = torch.empty(tiles, dtype=torch.float32, device=x.device)
    wrap_triton(transformed_amax_kernel)[(tiles,)](
        x, out, size_m, size_k, x.stride(0), across, columnwise, spec.random_signs, _TILE, num_warps=_WARPS
    )
    return largest_of(out)


def _make_side(
    x: Tensor, spec: QuantSpec, state: Tensor | None, largest: Callable[[QuantSpec, bool], Tensor], columnwise: bool,
    unread: Tensor,
) -> Side:  # fmt: skip
    """Makes the outputs and arguments of one direction of x, its contracted axis last."""
    rows, length = x.shape
    blocks = triton.cdiv(length, 16)
    data = torch.empty((rows, 8 * blocks), dtype=torch.uint8, device=x.device)
    sizes = padded_sizes(rows, blocks) if spec.swizzled else (rows, blocks)
    scale = torch.empty(sizes, dtype=torch.float8_e4m3fn, device=x.device)
    if not spec.stochastic:
        amax = largest(spec, columnwise) if state is None else state.clone()
        return Side(data, scale, amax, unread, side_constants(spec))
    assert state is not None
    if state.shape[0] > _RANDOM:
        amax = state.narrow(0, _RANDOM, 1).to(torch.int32).view(torch.float32)
    else:
        amax = largest(spec, columnwise)
    return Side(data, scale, amax, state, side_constants(spec))
