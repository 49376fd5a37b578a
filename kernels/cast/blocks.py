"""Quantization in blocks of any size, of any element under any scale, in plain torch operations that are traced.

An operand is [*batch, R, C] with the contracted axis last and C a multiple of the format's alignment; arithmetic is as
in `fxquant.kernels.cast.reference`. Codes are those of the OCP MX specification v1.0, section 5.3: sign and magnitude,
two's complement for int8. Elements of 4 and 6 bits are packed along C without gaps, the first in the lowest bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fxquant.formats import SCALES, Element, Format
from fxquant.kernels.cast.reference import (
    amax,
    block_amax,
    cast_fp8,
    decode_e8m0,
    e8m0_code,
    e8m0_reciprocal,
    in_blocks,
    is_negative,
    multiplier_to,
    reciprocal,
    repeat_rows,
    round_to_bfloat16,
)

_FLT_MAX = torch.finfo(torch.float32).max
_E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max
_BIAS = 127
"""The bias of float32's exponents."""

_NAN_SCALE = 255
"""The code of NaN in E8M0."""


def quantize(x: Tensor, row: Format, mode: str, random: Tensor | None = None) -> list[Tensor]:
    """Quantizes x along its last axis; returns [data, scale], for scales in e4m3 [data, scale, global_amax].

    `data` is [*batch, R, bytes], `scale` [*batch, R / rows, C / columns], and what dequantization multiplies by. With a
    byte for each element, `random`, elements are rounded up or down at random. The scale of a block in which something
    is not finite is NaN.
    """
    element = row.element
    assert element is not None
    rows, columns = _sizes(row, x)
    amaxes = block_amax(x, (rows, columns))
    whole: list[Tensor] = []
    if row.scale_dtype == SCALES["e8m0"]:
        code = e8m0_code(amaxes, element, mode)
        multiplier, scale = e8m0_reciprocal(code), code.to(torch.uint8)
    elif row.scale_dtype == SCALES["e4m3"]:
        whole = [amax(amaxes)]
        encode, decode = _global_scale(whole[0], element)
        scale = (amaxes * (encode * (1 / element.max))).clamp(max=_E4M3_MAX).to(torch.float8_e4m3fn)
        multiplier = reciprocal(scale.float() * decode).clamp(max=_FLT_MAX)
    else:
        multiplier = multiplier_to(element.max, amaxes, _FLT_MAX if 0 in row.block else torch.finfo(x.dtype).max)
        scale = reciprocal(multiplier)
        if row.scale_dtype == SCALES["bfloat16"]:
            scale = round_to_bfloat16(scale)
            multiplier, scale = reciprocal(scale).clamp(max=_FLT_MAX), scale.to(torch.bfloat16)
    finite = block_amax(torch.where(x.abs() < math.inf, 0.0, 1.0), (rows, columns)) == 0
    scale = _where(finite, scale)
    factor = repeat_rows(multiplier, rows, x.shape[-2]).unsqueeze(-1)
    y = (in_blocks(x.float(), columns) * factor).flatten(-2)
    return [_stored(y, element, random), scale, *whole]


def dequantize(parts: Sequence[Tensor], row: Format) -> Tensor:
    """The float32 values [*batch, R, C] that the parts returned by `quantize` stand for."""
    element = row.element
    assert element is not None
    values = element_values(parts[0], element)
    rows, columns = _sizes(row, values)
    if row.scale_dtype == SCALES["e8m0"]:
        factor = decode_e8m0(parts[1])
    elif row.scale_dtype == SCALES["e4m3"]:
        factor = parts[1].float() * parts[2] * (1 / (_E4M3_MAX * element.max))
    else:
        factor = parts[1].float()
    factor = repeat_rows(factor, rows, values.shape[-2]).unsqueeze(-1)
    return (in_blocks(values, columns) * factor).flatten(-2)


def encode(y: Tensor, element: Element, random: Tensor | None = None) -> Tensor:
    """The codes of float32 values as int32, sign and magnitude: saturating, nearest even, NaN as the largest number.

    With a byte for each, `random`, byte/256 of a step of the grid is added to the magnitude, and the sum rounded down.
    """
    magnitude = torch.where(y == y, y.abs(), element.max).clamp(max=element.max)  # whose code no rounding exceeds
    least = _lowest(element) + _BIAS
    exponent = (magnitude.view(torch.int32) >> 23).clamp(min=least)
    steps = magnitude * ((element.mantissa_bits + 2 * _BIAS - exponent) << 23).view(torch.float32)
    steps = torch.round(steps) if random is None else torch.floor(steps + random.float() * (1 / 256))
    code = steps.int() + ((exponent - least) << element.mantissa_bits)
    return code | is_negative(y).int() << (element.bits - 1)


def decode(code: Tensor, element: Element) -> Tensor:
    """The float32 values of codes in sign and magnitude, int32."""
    largest = (1 << (element.bits - 1)) - 1
    magnitude = code & largest
    exponent = (magnitude >> element.mantissa_bits).clamp(min=1) - 1
    # behind the first binade, whose steps subnormals have too, the leading one stands in no bit
    steps = magnitude - (exponent << element.mantissa_bits)
    power = (exponent + (_lowest(element) - element.mantissa_bits + _BIAS)) << 23
    return steps * power.view(torch.float32) * torch.where(code > largest, -1.0, 1.0)


def pack(code: Tensor, bits: int) -> Tensor:
    """Bytes [..., C * bits / 8] of codes [..., C] of so many bits, the first in the lowest bits."""
    count = 8 // math.gcd(8, bits)
    word = _word(in_blocks(code, count), bits)
    size = count * bits // 8
    if size == 1:
        return word.to(torch.uint8)
    return torch.stack([(word >> (8 * i) & 255).to(torch.uint8) for i in range(size)], -1).flatten(-2)


def unpack(data: Tensor, bits: int) -> Tensor:
    """The codes, as int32, of the bytes that `pack` gave."""
    count = 8 // math.gcd(8, bits)
    size = count * bits // 8
    word = data.int() if size == 1 else _word(in_blocks(data.int(), size), 8)
    return torch.stack([word >> (bits * i) & ((1 << bits) - 1) for i in range(count)], -1).flatten(-2)


def _word(parts: Tensor, bits: int) -> Tensor:
    """The int32 words [...] of parts [..., n] of so many bits, the first in the lowest bits."""
    first, *rest = parts.unbind(-1)
    for i, part in enumerate(rest, 1):
        first = first | part << (bits * i)
    return first


def _sizes(row: Format, x: Tensor) -> tuple[int, int]:
    """The rows and columns of a block of an operand; 0 in a format is the whole axis."""
    rows = row.block[0] or torch.sym_max(x.shape[-2], 1)  # type: ignore[no-untyped-call]
    columns = row.block[1] or torch.sym_max(x.shape[-1], 1)  # type: ignore[no-untyped-call]
    return rows, columns


def _lowest(element: Element) -> int:
    """The exponent of the smallest normal number."""
    return int(math.log2(element.smallest_normal))


def _global_scale(global_amax: Tensor, element: Element) -> tuple[Tensor, Tensor]:
    """The scale of the whole tensor and its reciprocal, as NVFP4 has them; 1 for an amax of 0 and infinity."""
    scale = (torch.full_like(global_amax, _E4M3_MAX * element.max) / global_amax).clamp(max=_FLT_MAX)
    scale = torch.where((global_amax > 0) & (scale > 0), scale, 1.0)
    return scale, reciprocal(scale)


def _where(finite: Tensor, scale: Tensor) -> Tensor:
    """The scales, NaN where a block is not finite."""
    if scale.dtype == torch.uint8:
        return torch.where(finite, scale, _NAN_SCALE)
    if scale.dtype == torch.float8_e4m3fn:
        return torch.where(finite, scale.view(torch.uint8), 0x7F).view(torch.float8_e4m3fn)
    return torch.where(finite, scale, math.nan)


def _stored(y: Tensor, element: Element, random: Tensor | None) -> Tensor:
    """The elements of scaled values as they are stored."""
    if element.has_nan:
        if random is None:
            return cast_fp8(y, element)
        code = torch.where(y == y, encode(y, element, random), 0x7F)
        return code.to(torch.uint8).view(element.dtype)
    if element.dtype == torch.int8 and random is None:  # in two's complement a sign needs no code of its own
        steps = torch.where(y == y, y, element.max).clamp(-element.max, element.max) * 2.0**element.mantissa_bits
        return torch.round(steps).to(torch.int8)
    code = encode(y, element, random)
    if element.dtype == torch.int8:
        return torch.where(code > 127, 128 - code, code).to(torch.int8)
    return pack(code, element.bits)


def element_values(data: Tensor, element: Element) -> Tensor:
    """The float32 values of stored elements."""
    if element.dtype == torch.int8:
        return data.float() * 2.0**-element.mantissa_bits
    return data.float() if element.has_nan else decode(unpack(data, element.bits), element)
