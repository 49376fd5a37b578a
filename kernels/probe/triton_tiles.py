# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,misc"
"""Tiles of an operand and of its quantized form, as the kernels of probes read them, of any layout and format.

A tile is [R, P, W]: rows, and pieces of W columns that lie in one block of the format. Numbers are float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from fxquant.kernels.cast.codes import INTERPRETED

GIVEN, CODED, PER_TENSOR, PER_ROW, BLOCK, MX, NVFP4 = (tl.constexpr(i) for i in range(7))
"""The kinds of quantized forms: values, values beside codes, or codes of 8 or 4 bits under scales."""
NEGATIVE = tl.constexpr(0xD7E8)
"""Bit i is set where the sign vector of the Hadamard transform is -1."""
_INFINITY = tl.constexpr(float("inf"))


@triton.jit
def finite(x):
    """True for numbers: neither NaN nor infinite."""
    return tl.abs(x) < _INFINITY


@triton.jit
def inverted(x):
    """1 / x, to the last bit or two."""
    if INTERPRETED:
        return 1.0 / x
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def butterfly(y, DISTANCE: tl.constexpr):
    """Sums and differences of elements of the last axis so far apart, in the places of the first and the second."""
    R: tl.constexpr = y.shape[0]
    P: tl.constexpr = y.shape[1]
    pairs = tl.permute(tl.reshape(y, (R, P, 8 // DISTANCE, 2, DISTANCE)), (0, 1, 2, 4, 3))
    a, b = tl.split(pairs)
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 2, 4, 3)), (R, P, 16))


@triton.jit
def signs(SIGNS: tl.constexpr):
    """The sign vector of the transform, over 4: float32 [1, 1, 16]."""
    lane = tl.arange(0, 16)
    minus = ((tl.full((16,), NEGATIVE, tl.int32) >> lane) & 1) * (1 if SIGNS else 0)
    return (0.25 - 0.5 * minus.to(tl.float32))[None, None, :]


@triton.jit
def transformed(x, SIGNS: tl.constexpr):
    """`reference.hadamard` of a tile of pieces of 16."""
    x = butterfly(butterfly(butterfly(butterfly(x * signs(SIGNS), 8), 4), 2), 1)
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def plain_basis(q, SIGNS: tl.constexpr):
    """`reference.plain_basis` of a tile of pieces of 16."""
    return butterfly(butterfly(butterfly(butterfly(q, 8), 4), 2), 1) * signs(SIGNS)


@triton.jit
def decoded_e8m0(code):
    """`reference.decode_e8m0` of codes as int32."""
    power = tl.maximum(code << 23, 0x00400000).to(tl.float32, bitcast=True)
    return tl.where(code == 255, float("nan"), power)


@triton.jit
def decoded_e2m1(code):
    """`reference.decode_e2m1` of codes as int32."""
    m = code & 7
    value = tl.where(m < 2, m.to(tl.float32) * 0.5, ((m + 252) << 22).to(tl.float32, bitcast=True))
    return tl.where(code > 7, -value, value)


@triton.jit
def factors(scale, extra, place, amax_place, mask, unit, KIND: tl.constexpr):
    """The factors of dequantization at some places of the scales, 0 where nothing is."""
    if KIND == MX:
        factor = decoded_e8m0(tl.load(scale + place, mask=mask, other=0).to(tl.int32))
    elif KIND == NVFP4:
        factor = tl.load(scale + place, mask=mask, other=0.0).to(tl.float32)
        factor = factor * tl.load(extra + amax_place, mask=mask, other=0.0) * unit
    else:
        factor = tl.load(scale + place, mask=mask, other=0.0).to(tl.float32)
    return tl.where(mask, factor, 0.0)


@triton.jit
def quantized(
    data, scale, extra, batch, row, column, rows, width, d_batch, d_row, d_column, s_batch, s_row, g_batch, g_row, unit,
    KIND: tl.constexpr, P: tl.constexpr, W: tl.constexpr, HIGH: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The values and the codes of a tile whose rows are `row` [R], int64, and whose first column is `column`.

    `width` columns are stored. HIGH rows share a scale. Codes are zero outside, which a tile that is EVEN is not.
    """
    R: tl.constexpr = row.shape[0]
    inside = row < rows
    piece = column // W + tl.arange(0, P)
    if KIND == NVFP4:
        at = column // 2 + (tl.arange(0, P) * (W // 2))[:, None] + tl.arange(0, W // 2)[None, :]
        stored = width // 2
    else:
        at = column + (tl.arange(0, P) * W)[:, None] + tl.arange(0, W)[None, :]
        stored = width
    place = (batch * d_batch + row * d_row)[:, None, None] + (at.to(tl.int64) * d_column)[None, :, :]
    mask = inside[:, None, None] & (at < stored)[None, :, :]
    if EVEN:
        payload = tl.load(data + place)
    elif KIND == NVFP4:
        payload = tl.load(data + place, mask=mask, other=0)
    else:
        payload = tl.load(data + place, mask=mask, other=0.0)
    if KIND == NVFP4:
        byte = payload.to(tl.int32)
        code = tl.reshape(tl.join(decoded_e2m1(byte & 15), decoded_e2m1(byte >> 4)), (R, P, W))
    else:
        code = payload.to(tl.float32)
    q = code
    if KIND == CODED:
        code = tl.load(extra + place, mask=mask, other=0.0)
    elif KIND == PER_TENSOR:
        q = code * tl.load(scale)
    elif KIND != GIVEN:
        if KIND == PER_ROW:
            places = (batch * s_batch + row * s_row)[:, None] + tl.zeros((1, P), tl.int64)
        else:
            places = (batch * s_batch + row // HIGH * s_row)[:, None] + piece[None, :]
        amax_places = (batch * g_batch + row * g_row)[:, None] + tl.zeros((1, P), tl.int64)
        inside_scales = inside[:, None] & (piece * W < width)[None, :]
        q = code * factors(scale, extra, places, amax_places, inside_scales, unit, KIND)[:, :, None]
    return q, code


@triton.jit
def original(
    x, batch, row, column, rows, columns, x_batch, x_row, x_column, P: tl.constexpr, W: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """The elements of a tile as they are, zero outside of the operand, which a tile that is EVEN is not."""
    at = column + (tl.arange(0, P) * W)[:, None] + tl.arange(0, W)[None, :]
    place = (batch * x_batch + row * x_row)[:, None, None] + (at.to(tl.int64) * x_column)[None, :, :]
    if EVEN:
        t = tl.load(x + place)
    else:
        t = tl.load(x + place, mask=(row < rows)[:, None, None] & (at < columns)[None, :, :], other=0.0)
    return t.to(tl.float32)


@dataclass(frozen=True)
class Form:
    """A quantized form as the kernels read it: strides are of batch and row (and column, of the data)."""

    kind: int
    data: Tensor
    scale: Tensor
    extra: Tensor
    d: tuple[int, int, int]
    s: tuple[int, int] = (0, 0)
    g: tuple[int, int] = (0, 0)
    high: int = 1
    wide: int = 32
    unit: float = 1.0

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides of data, scale and amax, in the order of the kernels' arguments."""
        return (*self.d, *self.s, *self.g)

    @property
    def width(self) -> int:
        """The columns that are stored, with padding."""
        return self.data.shape[-1] * (2 if self.kind == NVFP4.value else 1)
