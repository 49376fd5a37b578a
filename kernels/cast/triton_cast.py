# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,misc"
"""Triton kernels that quantize a matrix x [M, K] in one or both directions from one read.

FP8 with scales per tensor, per row, in blocks of 128, and MX blocks of 32; the bytes are those of
`fxquant.kernels.cast.reference.quantize`. A tile is read once, and its payload written as it lies (rowwise) and
transposed (columnwise), so that either GEMM operand has its contracted axis dense. What a block's amax decides needs no
other pass; an amax per row or column is taken in an earlier one, for both directions at once; an amax per tensor is
left to Inductor, which takes it where the tensor is produced.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from fxquant.compat.patches import declare_written
from fxquant.formats import MX_MODES, QuantSpec
from fxquant.kernels.cast import reference, triton_producers
from fxquant.kernels.cast.codes import INTERPRETED, TORCHAO_BELOW, TORCHAO_FLOOR, codes
from fxquant.kernels.cast.producers import PRODUCERS
from fxquant.kernels.cast.triton_producers import load_pair, load_tile

_NONE, _GIVEN, _PER_TENSOR, _PER_ROW, _BLOCK, _MX = (tl.constexpr(i) for i in range(6))
"""How a side is scaled: not wanted, by a multiplier, from an amax of the tensor or of each row, or in blocks."""
_UNRECORDED, _RECORD, _SINCE = (tl.constexpr(i) for i in range(3))
"""Amaxes are not taken, or as in `delayed.record`, or as in `delayed.record_since`."""
_KINDS = {"per_tensor": _PER_TENSOR, "per_row": _PER_ROW, "block": _BLOCK, "mxfp8": _MX}
_RCEIL, _FLOOR, _CEIL, _EVEN = (tl.constexpr(i) for i in range(4))
assert MX_MODES == ("rceil", "floor", "ceil", "even")
_KIND, _P, _Q, _FMAX, _LOG, _MANTISSA, _MODE, _LARGEST, _EPS, _POW2, _BELOW, _MOST = (
    tl.constexpr(i) for i in range(12)
)
"""What a kernel is told about a side, by its place in SIDE; blocks are of P rows and Q columns of the tile."""
_AMAX_LAYOUT, _AMAX_LAYOUT_OF_PRODUCERS = (16, 2, 8), (8, 2, 4)
"""Steps down, warps below each other and rows of a thread in the kernel of amaxes."""


@triton.jit
def _quotient(m):
    """1.75 / m rounded to nearest, for m in [1, 2), without the branches of a division that takes every operand.

    A reciprocal refined once, and a quotient once with the remainder, are those of the rounded division (Markstein,
    1990); they give its bits for all 2^23 values of m.
    """
    if INTERPRETED:
        return tl.div_rn(tl.full(m.shape, 1.75, tl.float32), m)
    y = tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=r,r", [m], dtype=tl.float32, is_pure=True, pack=1
    )  # fmt: skip
    y = tl.fma(tl.fma(-m, y, 1.0), y, y)
    q = 1.75 * y
    return tl.fma(tl.fma(-q, m, 1.75), y, q)


@triton.jit
def _multiplier(amax, SIDE: tl.constexpr):
    """`reference.multiplier_from_amax`. torchao's float64 quotient rounds to the same float32 as this one.

    (Double rounding is innocuous for a division when the wider format has 2p + 2 bits: Figueroa, 1995.)
    """
    LOG: tl.constexpr = SIDE[_LOG]
    LARGEST: tl.constexpr = SIDE[_LARGEST]
    EPS: tl.constexpr = SIDE[_EPS]
    POW2: tl.constexpr = SIDE[_POW2]
    BELOW: tl.constexpr = SIDE[_BELOW]
    MOST: tl.constexpr = SIDE[_MOST]
    tl.static_assert(SIDE[_FMAX] == 1.75 * 2**LOG)
    if EPS > 0:
        amax = tl.where(amax < EPS, EPS, amax)
    bits = amax.to(tl.int32, bitcast=True)
    if POW2:  # the exponent of 1.75 / m, which rounding does not change
        quotient = (127 - (((bits & 0x7FFFFF) + 0x1FFFFF) >> 23)) << 23
    else:
        quotient = _quotient(((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True))
        quotient = quotient.to(tl.int32, bitcast=True)
    exponent = (LOG + 127) - (bits >> 23)
    scale = (quotient + (exponent << 23)).to(tl.float32, bitcast=True)
    if BELOW > 0:  # torchao's
        most = tl.full(amax.shape, MOST, tl.float32)
        if POW2:
            most = (most.to(tl.int32, bitcast=True) & -0x800000).to(tl.float32, bitcast=True)
        scale = tl.where(amax < BELOW, most, scale)
        scale = tl.where(amax < float("inf"), scale, 0.0)
    else:
        largest = tl.full(amax.shape, LARGEST, tl.float32)
        if POW2:
            largest = (largest.to(tl.int32, bitcast=True) & -0x800000).to(tl.float32, bitcast=True)
        # an exponent of 128 is infinity; of subnormal amaxes, whose quotient is infinite, it is no less
        scale = tl.where((quotient >> 23) + exponent > 254, largest, scale)
        scale = tl.where((amax > 0) & (amax < float("inf")), scale, 1.0)
    return scale


@triton.jit
def _power(exponent):
    """2^(exponent - 127) in float32, for exponents from 0 to 254."""
    return tl.maximum(exponent << 23, 0x00400000).to(tl.float32, bitcast=True)


@triton.jit
def _inverse(factor, SIDE: tl.constexpr):
    """What dequantization multiplies by: 1 / factor."""
    if SIDE[_POW2] and SIDE[_BELOW] == 0:
        return _power(254 - (factor.to(tl.int32, bitcast=True) >> 23))
    return tl.div_rn(1.0, factor)


@triton.jit
def _e8m0(amax, SIDE: tl.constexpr):
    """`reference.e8m0_from_amax`."""
    MODE: tl.constexpr = SIDE[_MODE]
    if MODE == _RCEIL:
        bits = (amax * (1.0 / SIDE[_FMAX])).to(tl.int32, bitcast=True)
        code = tl.where(bits <= 0x00400000, 0, tl.minimum((bits + 0x7FFFFF) >> 23, 254))
    else:
        bits = amax.to(tl.int32, bitcast=True)
        if MODE == _CEIL:
            bits = bits + 0x7FFFFF
        elif MODE == _EVEN:
            bits = bits + (1 << (22 - SIDE[_MANTISSA]))
        code = tl.maximum((bits >> 23) - SIDE[_LOG], 0)
    return code


@triton.jit
def _axis(SIZE: tl.constexpr, AXIS: tl.constexpr, RANK: tl.constexpr = 5):
    """0, 1, ... along an axis of a tensor. (Through a reshape Triton would not see what is contiguous.)"""
    i = tl.arange(0, SIZE)
    for axis in tl.static_range(RANK):
        if axis != AXIS:
            i = tl.expand_dims(i, axis)
    return i


@triton.jit
def _four(x, N: tl.constexpr, LAYOUT: tl.constexpr):
    """[LK, LM, WK, WM, 4 N] as the first, second, third and fourth of every four neighbours."""
    even, odd = tl.split(tl.reshape(x, (LAYOUT[0], LAYOUT[1], LAYOUT[2], LAYOUT[3], N, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _amax(x, P: tl.constexpr, Q: tl.constexpr, LAYOUT: tl.constexpr):
    """The amaxes, NaN ignored, of blocks of P rows and Q columns; an axis keeps what it has in blocks."""
    LK: tl.constexpr = LAYOUT[0]
    LM: tl.constexpr = LAYOUT[1]
    WK: tl.constexpr = LAYOUT[2]
    WM: tl.constexpr = LAYOUT[3]
    R: tl.constexpr = LAYOUT[4]
    tl.static_assert((P <= R * LM) | (P == R * LM * WM))
    tl.static_assert((Q <= 4 * LK) | (Q == 4 * LK * WK))
    amax = tl.abs(x)
    if P > 1:
        amax = tl.max(amax, axis=4, keep_dims=True)
    if Q >= 4 * LK:
        amax = tl.max(amax, axis=0, keep_dims=True)
    elif Q > 4:
        amax = tl.max(tl.reshape(amax, (4 * LK // Q, Q // 4, LM, WK, WM, amax.shape[4])), axis=1)
    if P >= R * LM:
        amax = tl.max(amax, axis=1, keep_dims=True)
    elif P > R:
        amax = tl.max(tl.reshape(amax, (amax.shape[0], LM * R // P, P // R, WK, WM, 1)), axis=2)
    if P > R * LM:
        amax = tl.max(amax, axis=3, keep_dims=True)
    if Q > 4 * LK:
        amax = tl.max(amax, axis=2, keep_dims=True)
    return tl.maximum(amax, 0.0)  # of NaN alone


@triton.jit
def _spread(v, LAYOUT: tl.constexpr):
    """What blocks have, for the threads of a warp that share them, where these are not all beside each other."""
    LK: tl.constexpr = LAYOUT[0]
    LM: tl.constexpr = LAYOUT[1]
    A: tl.constexpr = v.shape[0]
    B: tl.constexpr = v.shape[1]
    C: tl.constexpr = v.shape[2]
    D: tl.constexpr = v.shape[3]
    E: tl.constexpr = v.shape[4]
    if A > 1 and A < LK:
        v = tl.reshape(tl.broadcast_to(tl.expand_dims(v, 1), (A, LK // A, B, C, D, E)), (LK, B, C, D, E))
    if B > 1 and B < LM:
        F: tl.constexpr = v.shape[0]
        v = tl.reshape(tl.broadcast_to(tl.expand_dims(v, 2), (F, B, LM // B, C, D, E)), (F, LM, C, D, E))
    return v


@triton.jit
def _block_scale(amax, SIDE: tl.constexpr):
    """What elements of blocks with these amaxes are multiplied by, and the scales to store."""
    if SIDE[_KIND] == _MX:
        code = _e8m0(amax, SIDE)
        factor, stored = _power(254 - code), code.to(tl.uint8)
    else:
        factor = _multiplier(amax, SIDE)
        stored = _inverse(factor, SIDE)
    return factor, stored


@triton.jit
def _store_scales(
    v, scale, first_row, first_column, rows, columns, row_step, column_step, DOWN: tl.constexpr, ACROSS: tl.constexpr
):  # fmt: skip
    """Stores scales v [LK, LM, WK, WM, R, 2, 2], the last axes for four columns, from a row and a column on.

    Each stands in DOWN rows and ACROSS columns.
    """
    A: tl.constexpr = v.shape[3] * v.shape[1] * v.shape[4]
    B: tl.constexpr = v.shape[2] * v.shape[0] * v.shape[5] * v.shape[6]
    if A * DOWN * B * ACROSS == 1:  # as a tensor of one, Triton computes it from the whole tile in each thread
        row, column, v = first_row, first_column, tl.max(v)
    else:
        v = tl.reshape(tl.permute(v, (3, 1, 4, 2, 0, 5, 6)), (A, 1, B, 1))
        v = tl.reshape(tl.broadcast_to(v, (A, DOWN, B, ACROSS)), (A * DOWN, B * ACROSS))
        row = first_row + tl.arange(0, A * DOWN)[:, None]
        column = first_column + tl.arange(0, B * ACROSS)[None, :]
    place = row.to(tl.int64) * row_step + column.to(tl.int64) * column_step
    tl.store(scale + place, v, mask=(row < rows) & (column < columns))


@triton.jit
def _line_factor(amax, scale, at, length, first, SIDE: tl.constexpr):
    """What the lines `at` of an axis of `length` are multiplied by; the `first` tile stores their scales."""
    inside = at < length
    factor = _multiplier(tl.load(amax + at, mask=inside, other=1.0), SIDE)
    if first:
        tl.store(scale + at, _inverse(factor, SIDE), mask=inside)
    return factor


@triton.jit
def _factors(
    parts, arg, scale, rows, columns, row_step, column_step, first_row, first_column, down, across, M, K,
    COLUMN: tl.constexpr, SIDE: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """What the four parts of a tile are multiplied by for one side, whose scales it stores.

    `scale` has `rows` x `columns` of them in tile order. `arg` holds what the scales are made of, if not of the tile.
    """
    KIND: tl.constexpr = SIDE[_KIND]
    P: tl.constexpr = SIDE[_P]
    Q: tl.constexpr = SIDE[_Q]
    if KIND == _GIVEN or KIND == _PER_TENSOR:
        f = tl.load(arg)
        if KIND == _PER_TENSOR:
            f = _multiplier(f, SIDE)
        if (first_row == 0) & (first_column == 0):
            tl.store(scale, tl.div_rn(1.0, f))
        factors = (f, f, f, f)
    elif KIND == _PER_ROW and COLUMN:
        factors = ()
        for j in tl.static_range(4):
            factors += (_line_factor(arg, scale, first_column + across + j, K, first_row == 0, SIDE),)
    elif KIND == _PER_ROW:
        f = _line_factor(arg, scale, first_row + down, M, first_column == 0, SIDE)
        factors = (f, f, f, f)
    else:
        if Q > 1:
            a, b, c, d = parts
            amax = tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))
            factor, stored = _block_scale(_amax(amax, P, Q, LAYOUT), SIDE)
            f = _spread(factor, LAYOUT)
            factors = (f, f, f, f)
            stored = tl.expand_dims(tl.expand_dims(stored, 5), 6)
        else:
            factors = ()
            scales = ()
            for j in tl.static_range(4):
                factor, stored = _block_scale(_amax(parts[j], P, Q, LAYOUT), SIDE)
                factors += (_spread(factor, LAYOUT),)
                scales += (stored,)
            stored = tl.join(tl.join(scales[0], scales[2]), tl.join(scales[1], scales[3]))
        # a 32x32 tile's code stands in each of its rows, of the side's own orientation
        DOWN: tl.constexpr = P if KIND == _MX and Q > 1 and not COLUMN else 1
        ACROSS: tl.constexpr = Q if KIND == _MX and P > 1 and COLUMN else 1
        row, column = first_row // P * DOWN, first_column // Q * ACROSS
        _store_scales(stored, scale, row, column, rows, columns, row_step, column_step, DOWN, ACROSS)
    return factors


@triton.jit
def cast_kernel(
    x, in1, in2, in3, in4, recorded, step, row_data, row_scale, row_arg, column_data, column_scale, column_arg,
    M, K, column_units, row_units, x_step, row_scale_size, column_scale_size,
    row_scale_rows, row_scale_columns, row_scale_step, row_scale_column_step,
    column_scale_rows, column_scale_columns, column_scale_step, column_scale_column_step,
    ROW_KIND: tl.constexpr, ROW_P: tl.constexpr, ROW_Q: tl.constexpr, ROW_FMAX: tl.constexpr, ROW_LOG: tl.constexpr,
    ROW_MANTISSA: tl.constexpr, ROW_MODE: tl.constexpr, ROW_LARGEST: tl.constexpr, ROW_EPS: tl.constexpr,
    ROW_POW2: tl.constexpr, ROW_TORCHAO_BELOW: tl.constexpr, ROW_TORCHAO_MOST: tl.constexpr,
    COLUMN_KIND: tl.constexpr, COLUMN_P: tl.constexpr, COLUMN_Q: tl.constexpr, COLUMN_FMAX: tl.constexpr,
    COLUMN_LOG: tl.constexpr, COLUMN_MANTISSA: tl.constexpr, COLUMN_MODE: tl.constexpr,
    COLUMN_LARGEST: tl.constexpr, COLUMN_EPS: tl.constexpr, COLUMN_POW2: tl.constexpr,
    COLUMN_TORCHAO_BELOW: tl.constexpr, COLUMN_TORCHAO_MOST: tl.constexpr,
    PRODUCER: tl.constexpr, S: tl.constexpr, D: tl.constexpr, RESULTS: tl.constexpr, AT_ONCE: tl.constexpr,
    RECORD: tl.constexpr, RECORD_FIRST: tl.constexpr, RECORD_NEXT: tl.constexpr,
    LK: tl.constexpr, LM: tl.constexpr, WK: tl.constexpr, WM: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """One tile of x [M, K], of R * LM * WM rows and 4 * LK * WK columns.

    A thread has R rows of four columns. In a warp LK threads stand side by side and LM one below the other; WK and WM
    warps likewise. A tile is a tensor [LK, LM, WK, WM, R] for each of the four columns: in that order the layouts
    that Triton gives to loads and stores are all the same one, so that a payload is transposed in registers, and an
    amax of R rows is taken in them.

    A PRODUCER makes what is cast from x and more inputs. The outputs of two RESULTS lie one behind the other; a
    program makes both AT_ONCE, or the next one makes the second and finds the inputs in the cache. RECORD takes the
    amax of each, NaN ignored, into `recorded`: that of the first from RECORD_FIRST on, the next RECORD_NEXT further.
    What is there is as in `delayed.record`, or with _SINCE as in `delayed.record_since`.

    The scales of a side are given in tile order, rows along M. Payloads are padded to `row_units` and `column_units`
    of 16 bytes, a factor that the compiler sees in the alignment of stores.
    """
    LAYOUT: tl.constexpr = (LK, LM, WK, WM, R)
    ROW: tl.constexpr = (
        ROW_KIND, ROW_P, ROW_Q, ROW_FMAX, ROW_LOG, ROW_MANTISSA, ROW_MODE, ROW_LARGEST, ROW_EPS, ROW_POW2,
        ROW_TORCHAO_BELOW, ROW_TORCHAO_MOST,
    )  # fmt: skip
    COLUMN: tl.constexpr = (
        COLUMN_KIND, COLUMN_P, COLUMN_Q, COLUMN_FMAX, COLUMN_LOG, COLUMN_MANTISSA, COLUMN_MODE, COLUMN_LARGEST,
        COLUMN_EPS, COLUMN_POW2, COLUMN_TORCHAO_BELOW, COLUMN_TORCHAO_MOST,
    )  # fmt: skip
    padded_M = column_units * 16
    padded_K = row_units * 16
    program, first_result = tl.program_id(0), 0
    if RESULTS == 2 and not AT_ONCE:
        program, first_result = program // 2, program % 2
    tiles_across = tl.cdiv(padded_K, 4 * LK * WK)
    first_row = (program // tiles_across) * (R * LM * WM)
    first_column = (program % tiles_across) * (4 * LK * WK)
    first_down = (_axis(WM, 3) * LM + _axis(LM, 1)) * R
    down = first_down + _axis(R, 4)
    across = (_axis(WK, 2) * LK + _axis(LK, 0)) * 4
    down_6, across_6 = tl.expand_dims(down, 5), tl.expand_dims(across, 5) + _axis(4, 5, 6)
    if AT_ONCE:
        tiles = load_pair(x, in1, in2, x_step, first_row, first_column, down_6, across_6, M, K, PRODUCER)
    else:
        tiles = (
            load_tile(
                x, in1, in2, in3, in4, x_step, first_row, first_column, down_6, across_6, M, K, first_result, PRODUCER,
                S, D,
            ),
        )  # fmt: skip
    for i in tl.static_range(2 if AT_ONCE else 1):
        result = first_result + i
        parts = _four(tiles[i].to(tl.float32), R, LAYOUT)
        if RECORD:
            a, b, c, d = parts
            largest = tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))
            bits = tl.maximum(tl.max(largest), 0.0).to(tl.int32, bitcast=True)
            place = RECORD_FIRST + result * RECORD_NEXT
            if RECORD == _SINCE:
                tl.atomic_max(recorded + place, (tl.load(step) << 32) + bits.to(tl.int64), sem="relaxed")
            else:
                tl.atomic_max(recorded.to(tl.pointer_type(tl.int32), bitcast=True) + place, bits, sem="relaxed")
        if ROW_KIND != _NONE:
            factors = _factors(
                parts, row_arg + result * (M if ROW_KIND == _PER_ROW else 1), row_scale + result * row_scale_size,
                row_scale_rows, row_scale_columns, row_scale_step, row_scale_column_step, first_row, first_column, down,
                across, M, K, False, ROW, LAYOUT,
            )  # fmt: skip
            a, b, c, d = parts
            words = codes(a * factors[0], b * factors[1], c * factors[2], d * factors[3], ROW_MANTISSA == 2)
            out = row_data.to(tl.pointer_type(tl.uint32), bitcast=True)
            out += ((first_row.to(tl.int64) + result * M) * padded_K + first_column) // 4
            # a word for each thread: told that they are contiguous, Triton would exchange them between threads first
            place = tl.max_contiguous(down * (padded_K // 4) + across // 4, [1, 1, 1, 1, 1])
            tl.store(out + place, words, mask=(first_row + down < M) & (first_column + across < padded_K))
        if COLUMN_KIND != _NONE:
            factors = _factors(
                parts, column_arg + result * (K if COLUMN_KIND == _PER_ROW else 1),
                column_scale + result * column_scale_size, column_scale_rows, column_scale_columns, column_scale_step,
                column_scale_column_step, first_row, first_column, down, across, M, K, True, COLUMN, LAYOUT,
            )  # fmt: skip
            out = column_data.to(tl.pointer_type(tl.uint32), bitcast=True)
            out += ((first_column.to(tl.int64) + result * K) * padded_M + first_row) // 4
            for j in tl.static_range(4):
                a, b, c, d = _four(parts[j] * factors[j], R // 4, LAYOUT)
                words = codes(a, b, c, d, COLUMN_MANTISSA == 2)
                place = (across + j) * (padded_M // 4) + first_down // 4 + _axis(R // 4, 4)
                mask = (first_column + across + j < K) & (first_row + first_down < padded_M)
                tl.store(out + place, words, mask=mask)


@triton.jit
def amax_kernel(
    x, in1, in2, in3, in4, row_amax, column_amax, M, K, x_step, ROW: tl.constexpr, COLUMN: tl.constexpr,
    STEPS: tl.constexpr, PRODUCER: tl.constexpr, S: tl.constexpr, D: tl.constexpr, RESULTS: tl.constexpr,
    W: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """The amaxes of the rows and of the columns of x [M, K], NaN ignored, into zeroed float32 buffers.

    Or those of what a PRODUCER makes, as in `cast_kernel`.

    Goes down STEPS tiles of W * R rows, R for each of W warps, and 256 columns, eight for each thread. Magnitudes are
    ordered as their bits are.
    """
    tiles_across = tl.cdiv(K, 256)
    first_row = (tl.program_id(0) // tiles_across) * (W * R * STEPS)
    first_column = (tl.program_id(0) % tiles_across) * 256
    down = _axis(W, 1, 4) * R + _axis(R, 2, 4)
    across = _axis(32, 0, 4) * 8 + _axis(8, 3, 4)
    largest = tl.zeros((32, W, 1, 8), tl.float32)
    largest_of_second = tl.zeros((32, W, 1, 8), tl.float32)
    for step in range(STEPS):
        row = first_row + step * (W * R)
        if RESULTS == 2:
            first, second = load_pair(x, in1, in2, x_step, row, first_column, down, across, M, K, PRODUCER)
            tile, other = tl.abs(first.to(tl.float32)), tl.abs(second.to(tl.float32))
        else:
            tile = load_tile(x, in1, in2, in3, in4, x_step, row, first_column, down, across, M, K, 0, PRODUCER, S, D)
            tile = tl.abs(tile)
        if ROW:
            _raise_rows(tile, row_amax, row, down, M)
            if RESULTS == 2:
                _raise_rows(other, row_amax + M, row, down, M)
        if COLUMN:
            largest = tl.maximum(largest, tl.max(tile, axis=2, keep_dims=True))
            if RESULTS == 2:
                largest_of_second = tl.maximum(largest_of_second, tl.max(other, axis=2, keep_dims=True))
    if COLUMN:
        _raise_columns(largest, column_amax, first_column, across, K)
        if RESULTS == 2:
            _raise_columns(largest_of_second, column_amax + K, first_column, across, K)


@triton.jit
def _raise_rows(tile, row_amax, row, down, M):
    amax = tl.max(tl.max(tile, axis=3, keep_dims=True), axis=0, keep_dims=True)
    bits = tl.maximum(amax, 0.0).to(tl.int32, bitcast=True)
    out = row_amax.to(tl.pointer_type(tl.int32), bitcast=True) + row
    tl.atomic_max(out + down, bits, mask=row + down < M, sem="relaxed")


@triton.jit
def _raise_columns(largest, column_amax, first_column, across, K):
    bits = tl.max(largest, axis=1, keep_dims=True).to(tl.int32, bitcast=True)
    out = column_amax.to(tl.pointer_type(tl.int32), bitcast=True) + first_column
    tl.atomic_max(out + across, bits, mask=first_column + across < K, sem="relaxed")


@triton.jit
def take_amaxes(
    x, row_amax, column_amax, group, first, end, first_column, K, x_step, ROW: tl.constexpr, COLUMN: tl.constexpr,
    GROUP: tl.constexpr, STRIP: tl.constexpr, W: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Adds a strip of 256 columns to the amaxes of rows [M] and of the columns of groups [G, K], NaN ignored.

    With GROUP alone to those of groups, [G], in the place of the latter.

    Goes down in tiles of W * R rows, R for each of W warps, eight columns for each thread, as `amax_kernel` does.
    """
    down = _axis(W, 1, 4) * R + _axis(R, 2, 4)
    across = _axis(32, 0, 4) * 8 + _axis(8, 3, 4)
    in_k = first_column + across < K
    largest = tl.zeros((32, W, 1, 8), tl.float32)
    for step in range(STRIP // (W * R)):
        row = first + step * (W * R)
        source = x + (row.to(tl.int64) * x_step + first_column)
        tile = tl.load(source + (down * x_step + across), mask=(row + down < end) & in_k, other=0.0)
        tile = tl.abs(tile.to(tl.float32))
        if ROW:
            _raise_rows(tile, row_amax, row, down, end)
        if COLUMN or GROUP:
            largest = tl.maximum(largest, tl.max(tile, axis=2, keep_dims=True))
    if GROUP:
        bits = tl.maximum(tl.max(largest), 0.0).to(tl.int32, bitcast=True)
        tl.atomic_max(column_amax.to(tl.pointer_type(tl.int32), bitcast=True) + group, bits, sem="relaxed")
    if COLUMN:
        bits = tl.maximum(tl.max(largest, axis=1, keep_dims=True), 0.0).to(tl.int32, bitcast=True)
        out = column_amax.to(tl.pointer_type(tl.int32), bitcast=True) + (group.to(tl.int64) * K + first_column)
        tl.atomic_max(out + across, bits, mask=in_k, sem="relaxed")


@triton.jit
def cast_rows(
    x, row_data, row_scale, column_amax, group, first, last, K, row_units, x_step, SIDE: tl.constexpr,
    COLUMN: tl.constexpr, STEPS: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Quantizes rows of x [M, K], of one group, by their amaxes, and with COLUMN adds them to those of columns [G, K].

    NaN is ignored. Each is read once, R at a time in STEPS, eight columns for each thread of W warps side by side: all
    columns, and the next rows are asked for before these are scaled.
    """
    padded_K = row_units * 16
    thread = _axis(W, 1, 4) * 32 + _axis(32, 0, 4)
    down, across, words_across = _axis(R, 2, 4), thread * 8 + _axis(8, 3, 4), thread * 2 + _axis(2, 3, 4)
    in_k, words_in_k = across < K, 4 * words_across < padded_K
    source = x + first.to(tl.int64) * x_step + (down * x_step + across)
    out = row_data.to(tl.pointer_type(tl.uint32), bitcast=True) + first.to(tl.int64) * (padded_K // 4)
    out += down * (padded_K // 4) + words_across
    largest = tl.zeros((32, W, 1, 8), tl.float32)
    tile = tl.load(source, mask=(first + down < last) & in_k, other=0.0)
    for step in range(STEPS):
        row = first + step * R
        source += R * x_step
        following = tl.load(source, mask=(row + R + down < last) & in_k, other=0.0)
        values = tile.to(tl.float32)
        size = tl.abs(values)
        amax = tl.max(tl.max(tl.max(size, axis=3, keep_dims=True), axis=0, keep_dims=True), axis=1, keep_dims=True)
        factor = _multiplier(tl.maximum(amax, 0.0), SIDE)
        inside = row + down < last
        tl.store(row_scale + row + down, _inverse(factor, SIDE), mask=inside)
        even, odd = tl.split(tl.reshape(values * factor, (32, W, R, 2, 2, 2)))
        a, c = tl.split(even)
        b, d = tl.split(odd)
        tl.store(out, codes(a, b, c, d, SIDE[_MANTISSA] == 2), mask=inside & words_in_k)
        out += R * (padded_K // 4)
        if COLUMN:
            largest = tl.maximum(largest, tl.max(size, axis=2, keep_dims=True))
        tile = following
    if COLUMN:
        bits = tl.maximum(largest, 0.0).to(tl.int32, bitcast=True)
        bits = tl.reshape(tl.permute(bits, (1, 0, 2, 3)), (W * 256,))
        column = tl.max_contiguous(tl.arange(0, W * 256), 1)  # threads of a warp side by side, not eight columns each
        to = column_amax.to(tl.pointer_type(tl.int32), bitcast=True) + group.to(tl.int64) * K
        tl.atomic_max(to + column, bits, mask=column < K, sem="relaxed")


@triton.jit
def cast_tile(
    x, row_data, row_scale, row_arg, column_data, column_scale, column_arg, G, column_units, K, row_units, x_step,
    row_scale_group, row_scale_rows, row_scale_columns, row_scale_step, row_scale_column_step, column_scale_group,
    column_scale_columns, column_scale_step, column_scale_column_step, group, local, start, end, padded_start,
    padded_end, first_column, ROW: tl.constexpr, COLUMN: tl.constexpr, BATCH: tl.constexpr, IN_STEP: tl.constexpr,
    LAYOUT: tl.constexpr,
):  # fmt: skip
    """Quantizes the tile at the row `local` of a group, whose place is as `triton_grouped_cast.strip_of` gives it.

    IN_STEP that row may be before the group's first, which it is in one tile of each column.

    Tiles, their layout, scales and units are those of `cast_kernel`. A group's scales, and what they come
    from, are `*_scale_group` apart.
    """
    LK: tl.constexpr = LAYOUT[0]
    LM: tl.constexpr = LAYOUT[1]
    WK: tl.constexpr = LAYOUT[2]
    WM: tl.constexpr = LAYOUT[3]
    R: tl.constexpr = LAYOUT[4]
    padded_M = column_units * 16
    padded_K = row_units * 16
    padded_size = padded_end - padded_start
    first_row = start + local
    first_down = (_axis(WM, 3) * LM + _axis(LM, 1)) * R
    down = first_down + _axis(R, 4)
    across = (_axis(WK, 2) * LK + _axis(LK, 0)) * 4
    down_6, across_6 = tl.expand_dims(down, 5), tl.expand_dims(across, 5) + _axis(4, 5, 6)
    left = end - first_row
    wide_row = first_row.to(tl.int64)
    source = x + (wide_row * x_step + first_column)
    inside = (down_6 < left) & (first_column + across_6 < K)
    if IN_STEP:
        inside &= down_6 >= -local
    tile = tl.load(source + (down_6 * x_step + across_6), mask=inside, other=0.0).to(tl.float32)
    parts = _four(tile, R, LAYOUT)
    known = tl.minimum(group, G - 1).to(tl.int64)
    once = tl.maximum(local, 0) + (group == G).to(tl.int32)  # the padding behind the groups has no scales of its own
    if ROW[_KIND] != _NONE:
        row_at = 0
        row_left = left
        row_scale += known * row_scale_group
        if ROW[_KIND] == _GIVEN:
            row_at = once
            row_arg += known
        elif ROW[_P] > 1:
            row_at = local
            row_left = row_scale_rows
        elif ROW[_KIND] == _PER_ROW:
            row_arg += wide_row
            row_scale += wide_row
        else:
            row_scale += wide_row * row_scale_step
        factors = _factors(
            parts, row_arg, row_scale, row_left, row_scale_columns, row_scale_step, row_scale_column_step, row_at,
            first_column, down, across, left, K, False, ROW, LAYOUT,
        )  # fmt: skip
        a, b, c, d = parts
        words = codes(a * factors[0], b * factors[1], c * factors[2], d * factors[3], ROW[_MANTISSA] == 2)
        out = row_data.to(tl.pointer_type(tl.uint32), bitcast=True)
        out += (wide_row * padded_K + first_column) // 4
        place = tl.max_contiguous(down * (padded_K // 4) + across // 4, [1, 1, 1, 1, 1])
        in_group = (down < left) & (down >= -local) if IN_STEP else down < left
        tl.store(out + place, words, mask=in_group & (first_column + across < padded_K))
    if COLUMN[_KIND] != _NONE:
        column_at = once
        blocks_left = 0
        column_scale += known * column_scale_group
        if COLUMN[_KIND] == _BLOCK or COLUMN[_KIND] == _MX:
            column_at = 0
            blocks_left = (padded_size - local) // COLUMN[_P]  # those behind are of the next group
            column_scale += ((padded_start + local) // COLUMN[_P]).to(tl.int64) * column_scale_step
        else:
            column_arg += known * column_scale_group
        factors = _factors(
            parts, column_arg, column_scale, blocks_left, column_scale_columns, column_scale_step,
            column_scale_column_step, column_at, first_column, down, across, left, K, True, COLUMN, LAYOUT,
        )  # fmt: skip
        column = first_column.to(tl.int64)
        if BATCH:
            column += known * K
        first = tl.multiple_of(padded_start + local, 16)
        out = column_data.to(tl.pointer_type(tl.uint32), bitcast=True)
        out += (column * padded_M + first) // 4
        for j in tl.static_range(4):
            a, b, c, d = _four(parts[j] * factors[j], R // 4, LAYOUT)
            words = codes(a, b, c, d, COLUMN[_MANTISSA] == 2)
            place = (across + j) * (padded_M // 4) + first_down // 4 + _axis(R // 4, 4)
            mask = (first_column + across + j < K) & (local + first_down < padded_size)
            if IN_STEP:
                mask &= first_down >= -local
            tl.store(out + place, words, mask=mask)


@dataclass(frozen=True)
class Record:
    """Where the amaxes [results] of what a cast makes go: float32, or int64 with the `step` [1] that writes them."""

    amaxes: Tensor
    step: Tensor | None = None
    from_last: bool = False
    """Whether the amax of the first result goes to the last entry."""

    def constants(self, results: int) -> tuple[int, int, int]:
        """What the kernel is told: RECORD, RECORD_FIRST and RECORD_NEXT."""
        apart = self.amaxes.stride(0)
        kind = _RECORD.value if self.step is None else _SINCE.value
        return (kind, (results - 1) * apart, -apart) if self.from_last else (kind, 0, apart)


@dataclass(frozen=True)
class _Side:
    """One direction of a cast: its outputs, and what the kernel is told."""

    data: Tensor
    scale: Tensor
    """As it lies in memory."""
    arg: Tensor
    constants: tuple[Any, ...]
    scale_shape: tuple[Any, Any] = (0, 0)
    """Scales along M and along K."""
    scale_steps: tuple[Any, Any] = (0, 0)
    """Their strides."""
    transposed: bool = False
    """Whether the scales lie transposed."""
    results: int = 1
    """How many tensors are cast; theirs lie one behind the other. 0: a direction that is not wanted."""

    @property
    def scale_size(self) -> Any:
        """Scales of one result."""
        return self.scale.shape[0] * self.scale.stride(0) // self.results if self.results else 0

    def parts(self, result: int) -> list[Tensor]:
        if self.results < 2:
            return [self.data, self.scale.t() if self.transposed else self.scale] if self.results else []
        rows, scale_rows = self.data.shape[0] // self.results, self.scale.shape[0] // self.results
        data = self.data.narrow(0, result * rows, rows)
        scale = self.scale.narrow(0, result * scale_rows, scale_rows)
        if scale_rows == 1:  # Inductor's GEMMs take no part of a tensor for a scale, and cuBLAS none that is unaligned
            scale = scale.clone()
        return [data, scale.t() if self.transposed else scale]


def quantize(
    x: Tensor, row: QuantSpec | None, column: QuantSpec | None, row_scale: Tensor | None = None,
    column_scale: Tensor | None = None, amax: Callable[[Tensor], Tensor] = reference.amax,
) -> list[Tensor]:  # fmt: skip
    """The parts of `reference.quantize` of x [M, K] rowwise and then of x.mT columnwise; None leaves a direction out.

    `row_scale` and `column_scale` [1] are multipliers to use in the place of the tensor's own (per-tensor formats).
    `amax` takes the amax [1] of a tensor. x is not empty, and float32, bfloat16 or float16. Block scales of 1x128 lie
    transposed in memory, as cuBLAS wants them, and those of MX too.
    """
    if x.stride(-1) != 1:
        if x.stride(-2) == 1:  # a matrix stored by columns: the same with the directions exchanged
            swapped = quantize(x.mT, column, row, column_scale, row_scale, amax)
            count = 0 if column is None else 2
            return [*swapped[count:], *swapped[:count]]
        x = x.contiguous()
    unread = _unread(x)
    row_amax, column_amax = _line_amaxes((x,), None, row, column, unread)
    tensor_amax = None
    if any(s is not None and s.row.family == "per_tensor" and g is None
           for s, g in ((row, row_scale), (column, column_scale))):  # fmt: skip
        tensor_amax = amax(x)
    shape = x.shape[0], x.shape[1]
    left = _make_side(x, shape, row, row_scale, tensor_amax, row_amax, unread, columnwise=False)
    right = _make_side(x, shape, column, column_scale, tensor_amax, column_amax, unread, columnwise=True)
    _launch((x,), None, row, column, left, right, None, unread)
    return [*left.parts(0), *right.parts(0)]


def produce(
    name: str, inputs: Sequence[Tensor], row: QuantSpec | None, column: QuantSpec | None,
    row_scales: Sequence[Tensor | None], column_scales: Sequence[Tensor | None], record: bool | Record,
) -> list[Tensor]:  # fmt: skip
    """What `quantize` gives for each result of a producer, which is not written itself, then with `record` its amax.

    Where `record` says where amaxes go, they are not returned.

    The inputs are dense, none is empty, and all matrices have one dtype. Amaxes that scales are made of are taken in a
    pass of its own, with the same arithmetic.
    """
    x, results = inputs[0], PRODUCERS[name].results
    shape = PRODUCERS[name].shape(x)
    unread = _unread(x)
    recorded, tensor_amax = record if isinstance(record, Record) else None, None
    own = [spec for spec, given in ((row, row_scales), (column, column_scales)) if spec is not None and None in given]
    if record is True:
        recorded = Record(torch.zeros(results, dtype=torch.float32, device=x.device))
    if any(spec.row.family == "per_tensor" for spec in own) and results == 2:
        tensor_amax = triton_producers.pair_amax(name, inputs)
    elif any(spec.row.family == "per_tensor" for spec in own):
        tensor_amax = torch.zeros(results, dtype=torch.float32, device=x.device)
        nothing = _make_side(x, shape, None, None, None, unread, unread, columnwise=False)
        _launch(inputs, name, None, None, nothing, nothing, Record(tensor_amax), unread)
    row_amax, column_amax = _line_amaxes(inputs, name, row, column, unread)
    row_scale = _in_one(row_scales)
    column_scale = row_scale if all(map(operator.is_, row_scales, column_scales)) else _in_one(column_scales)
    left = _make_side(x, shape, row, row_scale, tensor_amax, row_amax, unread, columnwise=False, results=results)
    right = _make_side(
        x, shape, column, column_scale, tensor_amax, column_amax, unread, columnwise=True, results=results
    )
    _launch(inputs, name, row, column, left, right, recorded, unread)
    parts = []
    # both directions then have one scale, of which another part of a tensor would be one more copy
    one_scale = row == column and row_scale is column_scale and left.scale.shape == (results,)
    for result in range(results):
        of_row, of_column = left.parts(result), right.parts(result)
        parts += [*of_row, of_column[0], of_row[1]] if one_scale else [*of_row, *of_column]
        parts += [recorded.amaxes.narrow(0, result, 1)] if record is True and recorded is not None else []
    return parts


def _in_one(scales: Sequence[Tensor | None]) -> Tensor | None:
    """The multipliers [1] of all results as one tensor."""
    given = [scale for scale in scales if scale is not None]
    return torch.cat(given) if len(given) > 1 else given[0] if given else None


def _launch(
    inputs: Sequence[Tensor], producer: str | None, row: QuantSpec | None, column: QuantSpec | None, left: _Side,
    right: _Side, record: Record | None, unread: Tensor,
) -> None:  # fmt: skip
    """Casts what is made of the inputs."""
    x = inputs[0]
    results = 1 if producer is None else PRODUCERS[producer].results
    size_m, size_k = x.shape if producer is None else PRODUCERS[producer].shape(x)
    column_units = _cdiv(right.data.shape[-1] if column is not None else size_m, 16)
    row_units = _cdiv(left.data.shape[-1] if row is not None else size_k, 16)
    lanes_k, lanes_m, warps_k, warps_m, thread_rows = layout = tile_layout(row, column)
    # scales of blocks, or of lines, take the registers that a second result would
    at_once = results > 1 and all(spec.row.family == "per_tensor" for spec in (row, column) if spec is not None)
    tiles = _cdiv(16 * column_units, thread_rows * lanes_m * warps_m) * _cdiv(16 * row_units, 4 * lanes_k * warps_k)
    grid = (tiles if at_once else tiles * results,)
    recorded, step, constants = unread, unread, (_UNRECORDED.value, 0, 0)
    if record is not None:
        recorded, step = record.amaxes, unread if record.step is None else record.step
        constants = record.constants(results)
    wrap_triton(cast_kernel)[grid](
        *triton_producers.filled(inputs, unread), recorded, step, left.data, left.scale, left.arg, right.data,
        right.scale, right.arg, size_m, size_k, column_units, row_units, x.stride(0), left.scale_size, right.scale_size,
        *left.scale_shape, *left.scale_steps, *right.scale_shape, *right.scale_steps,
        *left.constants, *right.constants, *triton_producers.kind(producer, x), results, at_once,
        *constants, *layout, num_warps=warps_k * warps_m,
    )  # fmt: skip


def _unread(x: Tensor) -> Tensor:
    """What stands for arguments that a kernel does not read: of x itself Inductor would write a copy for each."""
    return torch.empty(1, dtype=torch.float32, device=x.device)


def _cdiv(size: Any, by: int) -> Any:
    return (size + by - 1) // by


def tile_layout(row: QuantSpec | None, column: QuantSpec | None) -> tuple[int, int, int, int, int]:
    """Threads across and down, warps across and down, and rows of a thread (16 or 8).

    The quickest of those tried (docs/performance.md).
    """
    families = {spec.row.family for spec in (row, column) if spec is not None}
    if "block" in families:
        return 16, 2, 2, 4, 16
    return (8, 4, 4, 2, 8) if "mxfp8" in families else (16, 2, 2, 2, 16)


def _line_amaxes(
    inputs: Sequence[Tensor], producer: str | None, row: QuantSpec | None, column: QuantSpec | None, unread: Tensor
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The amaxes [M] of rows and [K] of columns, of all results, where a direction is scaled by them."""
    x = inputs[0]
    results = 1 if producer is None else PRODUCERS[producer].results
    by_row, by_column = (s is not None and s.row.family == "per_row" for s in (row, column))
    if not by_row and not by_column:
        return unread, unread
    size_m, size_k = x.shape if producer is None else PRODUCERS[producer].shape(x)
    row_amax = torch.zeros(results * size_m if by_row else 1, dtype=torch.float32, device=x.device)
    column_amax = torch.zeros(results * size_k if by_column else 1, dtype=torch.float32, device=x.device)
    steps, warps, rows = _AMAX_LAYOUT if triton_producers.reads(producer) else _AMAX_LAYOUT_OF_PRODUCERS
    grid = (_cdiv(size_m, steps * warps * rows) * _cdiv(size_k, 256),)
    wrap_triton(amax_kernel)[grid](
        *triton_producers.filled(inputs, unread), row_amax, column_amax, size_m, size_k, x.stride(0), by_row, by_column,
        steps, *triton_producers.kind(producer, x), results, warps, rows, num_warps=warps,
    )  # fmt: skip
    return row_amax, column_amax


def _make_side(
    x: Tensor, shape: tuple[Any, Any], spec: QuantSpec | None, given: Tensor | None, tensor_amax: Tensor | None,
    line_amax: Tensor, unread: Tensor, *, columnwise: bool, results: int = 1,
) -> _Side:  # fmt: skip
    """Outputs and arguments of one direction of matrices of a shape, made of x."""
    if spec is None:
        return _Side(unread, unread, unread, side_constants(None, x.dtype), results=0)
    row = spec.row
    element = row.element
    assert element is not None and row.scale_dtype is not None
    rows, length = shape[::-1] if columnwise else shape
    padded = _cdiv(length, row.alignment) * row.alignment
    data = torch.empty((results * rows, padded), dtype=element.dtype, device=x.device)
    constants = side_constants(spec, x.dtype, columnwise=columnwise, given=given is not None)
    block_rows, block_columns = row.block
    if row.family == "per_tensor":
        arg = given if given is not None else tensor_amax
        assert arg is not None
        scale = torch.empty(results, dtype=torch.float32, device=x.device)
        return _Side(data, scale, arg, constants, results=results)
    if row.family == "per_row":
        scale = torch.empty((results * rows, 1), dtype=torch.float32, device=x.device)
        return _Side(data, scale, line_amax, constants, results=results)
    repeated = row.family == "mxfp8"
    scale_rows = rows if repeated or block_rows == 1 else _cdiv(rows, block_rows)
    scale_columns = padded // block_columns
    dtype = torch.uint8 if repeated else torch.float32
    # what lies beside each other in a tile lies so in memory: sectors shared with other tiles cost more than payloads
    transposed = repeated or block_rows == 1
    shape = (results * scale_columns, scale_rows) if transposed else (results * scale_rows, scale_columns)
    scale = torch.empty(shape, dtype=dtype, device=x.device)
    steps = (1, scale_rows) if transposed else (scale_columns, 1)
    if columnwise:
        return _Side(data, scale, unread, constants, (scale_columns, scale_rows), steps[::-1], transposed, results)
    return _Side(data, scale, unread, constants, (scale_rows, scale_columns), steps, transposed, results)


def side_constants(
    spec: QuantSpec | None, dtype: torch.dtype, *, columnwise: bool = False, given: bool = False
) -> tuple[Any, ...]:
    """What a kernel is told of the scaling of one side of an x of this dtype; None for a side that is not wanted.

    `given` says that the multiplier of a tensor is, and not its amax.
    """
    if spec is None:
        return (_NONE.value, 1, 1, 1.0, 0, 0, 0, 1.0, 0.0, False, 0.0, 0.0)
    element = spec.row.element
    assert element is not None
    kind = _GIVEN if given else _KINDS[spec.row.family]
    block_rows, block_columns = spec.row.block
    p, q = (block_columns, block_rows) if columnwise else (block_rows, block_columns)
    largest = torch.finfo(dtype if spec.row.family == "block" else torch.float32).max
    below, most = (TORCHAO_BELOW, element.max / TORCHAO_FLOOR) if spec.torchao else (0.0, 0.0)
    return (
        kind.value, max(p, 1), max(q, 1), element.max, int(math.log2(element.max)), element.mantissa_bits,
        MX_MODES.index(spec.mode), largest, spec.eps, spec.pow2, below, most,
    )  # fmt: skip


def written(arguments: Mapping[str, Any]) -> list[str]:
    """The names of the arguments that a launch of a kernel of this file writes."""
    names = []
    for side in ("row", "column"):
        if arguments.get(f"{side.upper()}_KIND", arguments.get(side.upper())):
            names += [name for name in (f"{side}_data", f"{side}_scale", f"{side}_amax") if name in arguments]
    return [*names, "recorded"] if arguments.get("RECORD") else names


declare_written(cast_kernel, written)
declare_written(amax_kernel, written)
