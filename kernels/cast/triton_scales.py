# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,misc"
"""The scales of a side of a Triton cast, row or column: made of amaxes, stored, and spread over its tile.

Inductor copies the source of what a kernel calls under the name it is called by: import these by their own names.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from fxquant.formats import MX_MODES, QuantSpec
from fxquant.kernels.cast.codes import INTERPRETED, TORCHAO_BELOW, TORCHAO_FLOOR
from fxquant.kernels.cast.triton_tile import block_amax, spread

GIVEN, PER_TENSOR, PER_ROW, BLOCK, MX = (tl.constexpr(i) for i in range(5))
"""The kinds of scales: a multiplier, from an amax of the tensor or of each row, or in blocks."""
_KINDS = {"per_tensor": PER_TENSOR, "per_row": PER_ROW, "block": BLOCK, "mxfp8": MX}
_RCEIL, _FLOOR, _CEIL, _EVEN = (tl.constexpr(i) for i in range(4))
assert MX_MODES == ("rceil", "floor", "ceil", "even")
AT_KIND, AT_P, AT_Q, AT_FMAX, AT_LOG, AT_MANTISSA, AT_MODE = (tl.constexpr(i) for i in range(7))
AT_LARGEST, AT_EPS, AT_POW2, AT_BELOW, AT_MOST, AT_NAN, AT_SHOWN = (tl.constexpr(i) for i in range(7, 14))
AT_SWIZZLED = tl.constexpr(14)
"""The places in SIDE of the numbers that describe a side; its blocks have P rows and Q columns of the tile.

NAN: an infinite amax gives a scale of NaN. SHOWN: infinite elements are NaN, under a scale that is not of their amax.
SWIZZLED: scales lie in the order of `fxquant.kernels.cast.swizzle`.
"""


@triton.jit
def _quotient(m):
    """1.75 / m rounded to nearest, for m in [1, 2), without the branches of a division that takes every operand.

    A reciprocal refined once, and a quotient once with the remainder, are those of the rounded division (Markstein,
    1990); they give its bits for all 2^23 values of m.
    """
    if INTERPRETED:
        return tl.div_rn(tl.full(m.shape, 1.75, tl.float32), m)
    y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [m], tl.float32, is_pure=True, pack=1)
    y = tl.fma(tl.fma(-m, y, 1.0), y, y)
    q = 1.75 * y
    return tl.fma(tl.fma(-q, m, 1.75), y, q)


@triton.jit
def side_multiplier(amax, SIDE: tl.constexpr):
    """`reference.multiplier_from_amax`. torchao's float64 quotient rounds to the same float32 as this one.

    (Double rounding is innocuous for a division when the wider format has 2p + 2 bits: Figueroa, 1995.)
    """
    LOG: tl.constexpr = SIDE[AT_LOG]
    LARGEST: tl.constexpr = SIDE[AT_LARGEST]
    EPS: tl.constexpr = SIDE[AT_EPS]
    POW2: tl.constexpr = SIDE[AT_POW2]
    BELOW: tl.constexpr = SIDE[AT_BELOW]
    MOST: tl.constexpr = SIDE[AT_MOST]
    tl.static_assert(SIDE[AT_FMAX] == 1.75 * 2**LOG)
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
    if SIDE[AT_NAN]:
        scale = tl.where(amax == float("inf"), float("nan"), scale)
    return scale


@triton.jit
def _power(exponent):
    """2^(exponent - 127) in float32, for exponents from 0 to 254."""
    return tl.maximum(exponent << 23, 0x00400000).to(tl.float32, bitcast=True)


@triton.jit
def side_inverse(factor, SIDE: tl.constexpr):
    """Returns the factor of dequantization, 1 / factor."""
    if SIDE[AT_POW2] and SIDE[AT_BELOW] == 0:
        inverse = _power(254 - (factor.to(tl.int32, bitcast=True) >> 23))
        if SIDE[AT_NAN]:
            inverse = tl.where(factor == factor, inverse, float("nan"))
    else:
        inverse = tl.div_rn(1.0, factor)
    return inverse


@triton.jit
def _e8m0(amax, SIDE: tl.constexpr):
    """`reference.e8m0_from_amax`."""
    MODE: tl.constexpr = SIDE[AT_MODE]
    if MODE == _RCEIL:
        bits = (amax * (1.0 / SIDE[AT_FMAX])).to(tl.int32, bitcast=True)
        code = tl.where(bits <= 0x00400000, 0, tl.minimum((bits + 0x7FFFFF) >> 23, 254))
    else:
        bits = amax.to(tl.int32, bitcast=True)
        if MODE == _CEIL:
            bits = bits + 0x7FFFFF
        elif MODE == _EVEN:
            bits = bits + (1 << (22 - SIDE[AT_MANTISSA]))
        code = tl.maximum((bits >> 23) - SIDE[AT_LOG], 0)
    return code


@triton.jit
def _block_scale(amax, SIDE: tl.constexpr):
    """Returns the multipliers of blocks with these amaxes, and the scales to store."""
    if SIDE[AT_KIND] == MX:
        code = _e8m0(amax, SIDE)
        factor, stored = _power(254 - code), code.to(tl.uint8)
    else:
        factor = side_multiplier(amax, SIDE)
        stored = side_inverse(factor, SIDE)
    return factor, stored


@triton.jit
def swizzled_place(row, column, columns):
    """Returns where the scale of a row and a column of blocks lies, of so many columns; each may be a tensor."""
    tile = (row // 128).to(tl.int64) * (columns // 4) + column // 4
    return tile * 512 + (row % 32) * 16 + (row // 32) % 4 * 4 + column % 4


@triton.jit
def _store_scales(
    v, scale, first_row, first_column, rows, columns, row_step, column_step, lines, DOWN: tl.constexpr,
    ACROSS: tl.constexpr, SWIZZLED: tl.constexpr, COLUMN: tl.constexpr,
):  # fmt: skip
    """Stores scales v [LK, LM, WK, WM, R, 2, 2], the last axes for four columns, from a row and a column on.

    Each stands in DOWN rows and ACROSS columns. SWIZZLED ones are zero behind the `lines` of the operand, which are
    those of the tile's columns for COLUMN.
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
    if SWIZZLED:
        if COLUMN:
            place = swizzled_place(column, row, rows)
            v = tl.where(column < lines, v, 0)
        else:
            place = swizzled_place(row, column, columns)
            v = tl.where(row < lines, v, 0)
    else:
        place = row.to(tl.int64) * row_step + column.to(tl.int64) * column_step
    tl.store(scale + place, v, mask=(row < rows) & (column < columns))


@triton.jit
def _line_factor(amax, scale, at, length, first, SIDE: tl.constexpr):
    """Returns the multipliers of the lines `at` of an axis of `length`; the `first` tile stores their scales."""
    inside = at < length
    factor = side_multiplier(tl.load(amax + at, mask=inside, other=1.0), SIDE)
    if first:
        tl.store(scale + at, side_inverse(factor, SIDE), mask=inside)
    return factor


@triton.jit
def side_factors(
    parts, arg, scale, scale_place, first_row, first_column, down, across, M, K, COLUMN: tl.constexpr,
    SIDE: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """Returns the multipliers of the four parts of a tile for one side, and stores the side's scales.

    `scale_place` has the numbers of scales along rows and columns, in tile order, and their strides. `arg` holds the
    multiplier, or the amaxes of the tensor or of its lines.
    """
    KIND: tl.constexpr = SIDE[AT_KIND]
    P: tl.constexpr = SIDE[AT_P]
    Q: tl.constexpr = SIDE[AT_Q]
    if KIND == GIVEN or KIND == PER_TENSOR:
        f = tl.load(arg)
        if KIND == PER_TENSOR:
            f = side_multiplier(f, SIDE)
        if (first_row == 0) & (first_column == 0):
            tl.store(scale, tl.div_rn(1.0, f))
        factors = (f, f, f, f)
    elif KIND == PER_ROW and COLUMN:
        factors = ()
        for j in tl.static_range(4):
            factors += (_line_factor(arg, scale, first_column + across + j, K, first_row == 0, SIDE),)
    elif KIND == PER_ROW:
        f = _line_factor(arg, scale, first_row + down, M, first_column == 0, SIDE)
        factors = (f, f, f, f)
    else:
        if Q > 1:
            a, b, c, d = parts
            amax = tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))
            factor, stored = _block_scale(block_amax(amax, P, Q, LAYOUT), SIDE)
            f = spread(factor, LAYOUT)
            factors = (f, f, f, f)
            stored = tl.expand_dims(tl.expand_dims(stored, 5), 6)
        else:
            factors = ()
            scales = ()
            for j in tl.static_range(4):
                factor, stored = _block_scale(block_amax(parts[j], P, Q, LAYOUT), SIDE)
                factors += (spread(factor, LAYOUT),)
                scales += (stored,)
            stored = tl.join(tl.join(scales[0], scales[2]), tl.join(scales[1], scales[3]))
        # a 32x32 tile's code stands in each of its rows, of the side's own orientation
        DOWN: tl.constexpr = P if KIND == MX and Q > 1 and not COLUMN else 1
        ACROSS: tl.constexpr = Q if KIND == MX and P > 1 and COLUMN else 1
        rows, columns, row_step, column_step = scale_place
        row, column = first_row // P * DOWN, first_column // Q * ACROSS
        _store_scales(
            stored, scale, row, column, rows, columns, row_step, column_step, K if COLUMN else M, DOWN, ACROSS,
            SIDE[AT_SWIZZLED], COLUMN,
        )  # fmt: skip
    return factors


def side_constants(
    spec: QuantSpec, dtype: torch.dtype, *, columnwise: bool = False, multiplier: bool = False
) -> tuple[Any, ...]:
    """Returns the numbers that describe the scaling of one side of an x of this dtype, in the order of `AT_KIND` on.

    `multiplier` says that the kernel gets that of a tensor, and not its amax.
    """
    element = spec.row.element
    assert element is not None
    kind = GIVEN if multiplier else _KINDS[spec.row.family]
    block_rows, block_columns = spec.row.block
    p, q = (block_columns, block_rows) if columnwise else (block_rows, block_columns)
    largest = torch.finfo(dtype if spec.row.family == "block" else torch.float32).max
    below, most = (TORCHAO_BELOW, element.max / TORCHAO_FLOOR) if spec.torchao else (0.0, 0.0)
    return (
        kind.value, max(p, 1), max(q, 1), element.max, int(math.log2(element.max)), element.mantissa_bits,
        MX_MODES.index(spec.mode), largest, spec.eps, spec.pow2, below, most,
        spec.nonfinite, spec.nonfinite and spec.is_delayed, spec.swizzled,
    )  # fmt: skip
