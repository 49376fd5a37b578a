"""The meaning of quantize, dequantize and GEMM, in plain torch operations.

Every kernel is held to these bytes. The functions are also what runs where no kernel does: they trace (fake tensors,
symbolic shapes, `torch.compile`), and give the same bytes eagerly and compiled by Inductor.

An operand is [*batch, R, C] with the contracted axis last; Cp is C padded with zeros to a multiple of the format's
alignment. Columnwise quantization of x [M, K] is `quantize(x.mT, spec)`. Arithmetic is float32, rounded to nearest
even after every operation, with subnormals kept. An amax ignores NaN elements, and NaN elements stay NaN.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fxquant.compat.values import statically_known_true
from fxquant.errors import RecipeError
from fxquant.formats import Element, QuantSpec, check_parts, check_state, is_mixed
from fxquant.kernels.cast import philox
from fxquant.kernels.cast.swizzle import swizzle, unswizzle

_FLT_MAX = torch.finfo(torch.float32).max
_E4M3_MAX, _E2M1_MAX = 448.0, 6.0
_FP8_LARGEST = {"e4m3": 0x7E, "e5m2": 0x7B}
"""The code of each 8-bit element's largest finite value."""
_RHT_NEGATIVE = 0xD7E8
"""Bit i is set where the sign vector of the randomized Hadamard transform is -1."""
_NOT_MANTISSA = -0x800000
"""The bits of a float32 that are not mantissa, as an int32."""
_RANDOM = 3
"""The length of the state of stochastic rounding."""
_SMALLEST_POWER = 0x00400000
"""The bits of 2^-127, the one power of two that an E8M0 scale or its inverse reaches as a subnormal."""


def quantize(
    x: Tensor, spec: QuantSpec, state: Tensor | None = None, global_amax: Tensor | None = None,
    words: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """Quantizes x [*batch, R, C] (float32, bfloat16, float16; float64 is rounded to float32) along its last axis.

    Returns [data, scale], for NVFP4 [data, scale, global_amax]. `data` is [*batch, R, Cp] in the element's dtype, for
    NVFP4 uint8 [*batch, R, Cp/2] with element 2i in the low nibble. `scale` is what dequantization multiplies by:

    ===============  ====================================================================================
    per_tensor       float32 [1]
    per_row          float32 [*batch, R, 1]
    block_1x128      float32 [*batch, R, Cp/128]
    block_128x128    float32 [*batch, ceil(R/128), Cp/128]; tiles at the edge use the elements that exist
    mxfp8, mxfp8_2d  uint8 E8M0 codes [*batch, R, Cp/32]; a 32x32 tile's code stands in each of its rows
    nvfp4, nvfp4_2d  float8_e4m3fn [*batch, R, Cp/16], likewise; global_amax is float32 [1], with `row_scaled`
                     [*batch, R, 1]
    ===============  ====================================================================================

    `state` is what the spec takes from the state of its graph: for a delayed scale float32 [1], by which elements are
    multiplied; for stochastic rounding int64 [3], seed, step and the operand's number (see `philox.random_bytes`),
    behind which the bits of a global amax may stand; for other NVFP4 a global amax from calibration or from all ranks,
    float32 [1]. For a part of x to have its own, a multiplier (per_tensor, per_row) broadcasts against x, and a global
    amax (NVFP4) against the amaxes of its blocks. `words` are the random ones that the state stands for, if they are
    there already.
    """
    check_state(state, spec)
    if spec.swizzled:
        data, scale, *rest = quantize(x, replace(spec, swizzled=False), state, global_amax, words)
        return [data, swizzle(scale), *rest]
    row = spec.row
    if x.dtype == torch.float64:
        x = x.float()
    x = _pad(x, -1, row.alignment)
    if spec.rht:
        x = hadamard(x, random_signs=spec.random_signs)
    if row.family == "nvfp4":
        if not spec.stochastic:
            return quantize_nvfp4(x, spec, None, global_amax if state is None else state.clone())
        if state is None:
            raise RecipeError(f"{spec} rounds stochastically: it needs the seed and step of a graph's state")
        state = state.to(x.device)
        if state.shape[0] > _RANDOM:
            global_amax = state.narrow(0, _RANDOM, 1).to(torch.int32).view(torch.float32)
        words = philox.random_words(x.shape, state.narrow(0, 0, _RANDOM), spec.stream) if words is None else words
        return quantize_nvfp4(x, spec, philox.bytes_of(words), global_amax)
    if row.family == "mxfp8":
        return _quantize_mxfp8(x, spec)
    return _quantize_float32_scale(x, spec, state)


def amax(x: Tensor, axis: int | None = None) -> Tensor:
    """The largest magnitude, NaN ignored, of a tensor (float32 [1]) or along an axis; 0 where there is nothing."""
    return _amax(x, axis)


def magnitude(x: Tensor) -> Tensor:
    """The magnitudes of elements, 0 for NaN."""
    return torch.where(x == x, x.abs(), 0.0)


def largest(x: Tensor, spec: QuantSpec) -> Tensor:
    """The amaxes of x [*batch, R, C], its contracted axis last, that scales of the whole tensor or of rows are made of.

    float32 [1], or [*batch, R, 1] for scales of rows.
    """
    if spec.rht:
        x = hadamard(_pad(x, -1, spec.row.alignment), random_signs=spec.random_signs)
    return _amax(x, -1).unsqueeze(-1) if spec.scaled == "row" else _amax(x)


def beside_random(random: Tensor, global_amax: Tensor) -> Tensor:
    """The state of stochastic rounding [3] with a global amax [1] behind it."""
    return torch.cat((random, global_amax.view(torch.int32).to(random)))


def dequantize(parts: Sequence[Tensor], spec: QuantSpec) -> Tensor:
    """The float32 values [*batch, R, Cp] that the parts returned by `quantize` stand for; an identity's [*batch, R, C].

    With `spec.rht` they are values of the transformed operand.
    """
    if spec.is_identity:
        return parts[0].float()
    check_parts(parts, spec)
    row = spec.row
    data, scale = parts[0], parts[1]
    if spec.swizzled:
        scale = unswizzle(scale, data.shape[-2], data.shape[-1] * row.packed // row.block[1])
    if row.family in ("per_tensor", "per_row"):
        return data.float() * scale
    if row.family == "nvfp4":
        values = decode_e2m1(torch.stack((data & 15, data >> 4), -1).flatten(-2))
        factor = scale.float() * parts[2] * (1 / (spec.e4m3_max * _E2M1_MAX))
    elif row.family == "mxfp8":
        values, factor = data.float(), decode_e8m0(scale)
    else:
        values, factor = data.float(), repeat_rows(scale, row.block[0], data.shape[-2])
    return (in_blocks(values, row.block[1]) * factor.unsqueeze(-1)).flatten(-2)


def scaled_mm(
    a: Sequence[Tensor], a_spec: QuantSpec, b: Sequence[Tensor], b_spec: QuantSpec, bias: Tensor | None,
    out_dtype: torch.dtype, values: Callable[[Sequence[Tensor], QuantSpec], Tensor] = dequantize,
) -> Tensor:  # fmt: skip
    """a [*batch, M, K] x b [*batch, N, K] transposed, + bias [N], gives [*batch, M, N] of `out_dtype`.

    Dequantized operands (`values`), float32 products, sums and bias, one rounding to `out_dtype`.
    """
    left, right = multiplicands(values(a, a_spec), a_spec, values(b, b_spec), b_spec)
    out = left @ right.mT
    if bias is not None:
        out = out + bias.float()
    return out.to(out_dtype)


def multiplicands(left: Tensor, a_spec: QuantSpec, right: Tensor, b_spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """The values of two operands of a GEMM as they are multiplied.

    Those of a mixed pair have one length, and the transform that one of them went through is undone.
    """
    if not is_mixed(a_spec, b_spec):
        return left, right
    left, right = (plain_basis(x, spec) for x, spec in ((left, a_spec), (right, b_spec)))
    # every alignment divides the longer ones, so that no size has to be compared
    if a_spec.row.alignment <= b_spec.row.alignment:
        return left, right.narrow(-1, 0, left.shape[-1])
    return left.narrow(-1, 0, right.shape[-1]), right


def plain_basis(values: Tensor, spec: QuantSpec) -> Tensor:
    """Values [*, C] of an operand without the Hadamard transform of its spec, which is orthogonal."""
    if not spec.rht:
        return values
    blocks = in_blocks(values, 16)
    eye = torch.eye(16, dtype=torch.float32, device=values.device)
    return (blocks @ hadamard(eye, random_signs=spec.random_signs).mT).flatten(-2)


def multiplier_from_amax(amax: Tensor, spec: QuantSpec, largest: float = _FLT_MAX) -> Tensor:
    """The multiplier of elements for a float32 amax of any shape: it maps amax to the format's maximum.

    An infinite quotient becomes `largest`; an amax that is zero, infinite or NaN gives 1. (TransformerEngine's
    rule, as its CUDA kernels have it; with `spec.torchao` the formula of torchao's float8 linear.) With
    `spec.nonfinite` an infinite amax gives NaN.
    """
    assert spec.row.element is not None
    if spec.torchao:
        scale = torch.full_like(amax, spec.row.element.max, dtype=torch.float64) / amax.double().clamp(min=1e-12)
        scale = scale.float()
    else:
        if spec.eps:
            amax = torch.where(amax < spec.eps, spec.eps, amax)
        scale = multiplier_to(spec.row.element.max, amax, largest)
    if spec.pow2:
        scale = (scale.view(torch.int32) & _NOT_MANTISSA).view(torch.float32)
    return torch.where(amax == math.inf, math.nan, scale) if spec.nonfinite else scale


def multiplier_to(maximum: float, amax: Tensor, largest: float = _FLT_MAX) -> Tensor:
    """maximum / amax in float32; `largest` where that is infinite, 1 for an amax that is zero, infinite or NaN."""
    # a tensor divided by a tensor: eager torch computes `scalar / tensor` as scalar * reciprocal(tensor)
    scale = torch.full_like(amax, maximum) / amax
    scale = torch.where(scale == math.inf, largest, scale)
    return torch.where((amax > 0) & (amax < math.inf), scale, 1.0)


def e8m0_from_amax(amax: Tensor, spec: QuantSpec) -> Tensor:
    """The E8M0 code, as int32, of the scale of blocks with these float32 amaxes."""
    assert spec.row.element is not None
    return e8m0_code(amax, spec.row.element, spec.mode)


def e8m0_code(amax: Tensor, element: Element, mode: str) -> Tensor:
    """The E8M0 code, as int32, of the scale that maps float32 amaxes into an element's range.

    ``rceil`` rounds the exponent of amax / maximum up (TransformerEngine, cuBLAS); ``floor`` is the OCP MX v1.0
    section 6.3 conversion; ``ceil`` and ``even`` are torchao's variants of it.
    """
    if mode == "rceil":
        return e8m0_round_up(amax * (1 / element.max))
    bits = amax.view(torch.int32)
    if mode == "ceil":
        bits = bits + 0x7FFFFF
    elif mode == "even":
        bits = bits + (1 << (22 - element.mantissa_bits))
    return ((bits >> 23) - int(math.log2(element.max))).clamp(min=0)


def e8m0_round_up(v: Tensor) -> Tensor:
    """The E8M0 codes, as int32, of the least powers of two that are not below float32 values v >= 0."""
    bits = v.view(torch.int32)
    # subnormals up to 2^-127 keep the code of 2^-127; infinity is clamped to the largest finite code
    return torch.where(bits <= _SMALLEST_POWER, 0, ((bits + 0x7FFFFF) >> 23).clamp(max=254))


def e8m0_reciprocal(code: Tensor) -> Tensor:
    """2^(127 - code) in float32 for E8M0 codes from 0 to 254, as int32."""
    return ((254 - code) << 23).clamp(min=_SMALLEST_POWER).view(torch.float32)


def decode_e8m0(code: Tensor) -> Tensor:
    """2^(code - 127) in float32 for uint8 E8M0 codes; 255 is NaN (OCP MX v1.0 section 5.4.1)."""
    power = (code.int() << 23).clamp(min=_SMALLEST_POWER).view(torch.float32)
    return torch.where(code == 255, math.nan, power)


def cast_fp8(y: Tensor, element: Element) -> Tensor:
    """float32 to an 8-bit element: saturating (infinities too), nearest even, every NaN as 0x7F."""
    code = y.clamp(-element.max, element.max).to(element.dtype).view(torch.uint8)
    return torch.where(code & 0x7F > _FP8_LARGEST[element.name], 0x7F, code).view(element.dtype)


def encode_e2m1(y: Tensor) -> Tensor:
    """E2M1 codes, one per byte, of float32 values: saturating, nearest even, bit 3 the sign (also of zero), NaN 7.

    (OCP MX v1.0 section 5.3.3.)
    """
    magnitude = y.abs()
    # written so that NaN, for which every comparison is false, gets 7
    below = (magnitude <= 0.25).to(torch.uint8) + (magnitude < 0.75) + (magnitude <= 1.25) + (magnitude < 1.75)
    below = below + (magnitude <= 2.5) + (magnitude < 3.5) + (magnitude <= 5.0)
    return (7 - below) | _sign_bit(y)


def encode_e2m1_stochastic(y: Tensor, byte: Tensor) -> Tensor:
    """E2M1 codes of float32 values, rounded up with a probability that grows with the distance from the grid below.

    `byte` in [0, 256) decides: byte/256 of a grid step is added to the magnitude, in float32, and the sum is rounded
    down. Saturating; bit 3 is the sign, NaN 7. (TransformerEngine's software rule for cvt.rs, numerics: NVFP4.)
    """
    magnitude = y.abs()
    step = torch.where(magnitude < 2, 0.5 / 256, torch.where(magnitude < 4, 1 / 256, 2 / 256))
    sum = magnitude + byte.float() * step
    below = (sum < 0.5).to(torch.uint8) + (sum < 1) + (sum < 1.5) + (sum < 2) + (sum < 3) + (sum < 4) + (sum < 6)
    return (7 - below) | _sign_bit(y)


def _sign_bit(y: Tensor) -> Tensor:
    return is_negative(y).to(torch.uint8) << 3


def is_negative(y: Tensor) -> Tensor:
    """True for float32 values from -0.0 down, without NaN."""
    return y.view(torch.int32) <= _NOT_MANTISSA  # as integers


def decode_e2m1(code: Tensor) -> Tensor:
    """The float32 values of E2M1 codes (0 to 15, one per byte)."""
    magnitude = (code & 7).int()
    values = torch.where(magnitude < 2, magnitude * 0.5, ((magnitude + 252) << 22).view(torch.float32))
    return values * torch.where(code > 7, -1.0, 1.0)  # Triton's negation makes +0 of 0


def hadamard(x: Tensor, *, random_signs: bool = True) -> Tensor:
    """Transforms groups of 16 along the last axis of x [..., 16n] by H16 diag(s) / 4; float32 holding bfloat16 values.

    H16 is the Sylvester matrix, s a fixed sign vector (all ones without `random_signs`). Sums are taken as
    butterflies over distances 8, 4, 2, 1 in float32 and rounded to bfloat16 once. (TransformerEngine's RHT, NVFP4.)
    """
    lane = torch.arange(16, dtype=torch.int32, device=x.device)
    negative = (_RHT_NEGATIVE if random_signs else 0) >> lane & 1
    y = in_blocks(x.float(), 16) * (0.25 - 0.5 * negative)
    y = torch.unflatten(y, -1, (4, 4))
    for axis in (-2, -1):
        a, b, c, d = y.unbind(axis)
        a, b, c, d = a + c, b + d, a - c, b - d
        y = torch.stack((a + b, a - b, c + d, c - d), axis)
    y = y.flatten(-2)
    return round_to_bfloat16(y).flatten(-2)


def round_to_bfloat16(y: Tensor) -> Tensor:
    """float32 values rounded to bfloat16's, nearest even, NaN kept; what is rounded already stays.

    By integer arithmetic, since Inductor drops a cast to bfloat16 that is followed by one to float32.
    """
    bits = y.view(torch.int32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & -0x10000
    return torch.where(y == y, rounded.view(torch.float32), y)


def _quantize_float32_scale(x: Tensor, spec: QuantSpec, multiplier: Tensor | None) -> list[Tensor]:
    """Per tensor, per row and in blocks of 128."""
    row = spec.row
    assert row.element is not None
    if row.family == "block":
        amax = block_amax(x, row.block)
        multiplier = multiplier_from_amax(amax, spec, torch.finfo(x.dtype).max)
        factor = repeat_rows(multiplier, row.block[0], x.shape[-2])
        y = (in_blocks(x.float(), row.block[1]) * factor.unsqueeze(-1)).flatten(-2)
    else:
        if multiplier is None:
            amax = _amax(x) if row.family == "per_tensor" else _amax(x, -1).unsqueeze(-1)
            multiplier = multiplier_from_amax(amax, spec)
            y = x.float() * multiplier
        else:
            y = times_given(x, multiplier, spec)
    return [cast_fp8(y, row.element), reciprocal(multiplier)]


def times_given(x: Tensor, multiplier: Tensor, spec: QuantSpec) -> Tensor:
    """x times a multiplier that is not from its own amax: with `spec.nonfinite` NaN where x is infinite."""
    y = x.float()
    return (torch.where(y.abs() == math.inf, math.nan, y) if spec.nonfinite else y) * multiplier


def _quantize_mxfp8(x: Tensor, spec: QuantSpec) -> list[Tensor]:
    row = spec.row
    assert row.element is not None
    code = e8m0_from_amax(block_amax(x, row.block), spec)
    code = repeat_rows(code, row.block[0], x.shape[-2])
    y = in_blocks(x.float(), row.block[1]) * e8m0_reciprocal(code).unsqueeze(-1)
    return [cast_fp8(y, row.element).flatten(-2), code.to(torch.uint8)]


def quantize_nvfp4(
    x: Tensor, spec: QuantSpec, random_bytes: Tensor | None = None, global_amax: Tensor | None = None
) -> list[Tensor]:
    """Two levels: an E4M3 scale per block under one float32 scale that maps the tensor's amax, or a row's, to 448 * 6.

    x [*batch, R, Cp] is padded, and transformed if it is to be. With a byte for each element, rounds stochastically.
    """
    row = spec.row
    blocks = in_blocks(x.float(), row.block[1])
    amax = block_amax(x, row.block)
    if global_amax is None:
        global_amax = _amax(amax, -1).unsqueeze(-1) if spec.row_scaled else _amax(amax)
    encode, decode = nvfp4_global_scale(global_amax, spec.e4m3_max)
    if spec.four_over_six:
        scale = four_over_six(blocks, amax, global_amax, spec)[0]
    else:
        scale = (amax * (encode * (1 / _E2M1_MAX))).clamp(max=_E4M3_MAX).to(torch.float8_e4m3fn)
    scale = repeat_rows(scale, row.block[0], x.shape[-2])
    if spec.nonfinite:
        scale = torch.where((blocks != blocks).any(-1), math.nan, scale.float()).to(scale.dtype)
    decode = _repeat_tiles(decode, row.block[0], x.shape[-2])
    y = (blocks * _nvfp4_factor(scale, decode)).flatten(-2)
    code = encode_e2m1(y) if random_bytes is None else encode_e2m1_stochastic(y, random_bytes)
    return [code[..., ::2] | (code[..., 1::2] << 4), scale, global_amax]


def four_over_six(blocks: Tensor, amax: Tensor, global_amax: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """The E4M3 scales of blocks with these amaxes [*batch, ceil(R / rows), Cp / 16], and where the amax maps to 4.

    A block's largest element maps to 6, or to 4 where that gives the smaller sum of errors (strictly), over a row's
    16 elements in their order, over the rows of a tile in pairs 8, 4, 2 and 1 apart.
    `blocks` is [*batch, R, Cp / 16, 16]. (TransformerEngine's 4over6, numerics: NVFP4.)
    """
    rows = spec.row.block[0]
    encode, decode = nvfp4_global_scale(global_amax, spec.e4m3_max)
    base = amax / _divisor(_E2M1_MAX, amax) * encode
    decode, global_amax = (_repeat_tiles(t, rows, blocks.shape[-3]) for t in (decode, global_amax))
    scales, errors = [], []
    for factor in (1.0, 1.5):
        scale = (base * factor).clamp(max=_E4M3_MAX).to(torch.float8_e4m3fn)
        scales.append(scale)
        scale = repeat_rows(scale, rows, blocks.shape[-3])
        values = decode_e2m1(encode_e2m1(blocks * _nvfp4_factor(scale, decode))) * scale.float().unsqueeze(-1)
        size = _divisor(spec.e4m3_max * _E2M1_MAX, global_amax)
        difference = values * global_amax.unsqueeze(-1) / size.unsqueeze(-1) - blocks
        if spec.four_over_six == "mae":
            error = difference.abs()
        else:  # the square rounded to float32 before it is added, where a GPU would fuse the two
            error = (difference.double() * difference.double()).float()
        total, *others = error.unbind(-1)
        for other in others:
            total = total + other
        if rows > 1:
            total = _pad(total, -2, rows)
            total = torch.unflatten(total, -2, (total.shape[-2] // rows, rows))
            while total.shape[-2] > 1:
                half = total.shape[-2] // 2
                total = total.narrow(-2, 0, half) + total.narrow(-2, half, half)
            total = total.squeeze(-2)
        errors.append(total)
    to_four = errors[1] < errors[0]
    return torch.where(to_four, scales[1].view(torch.uint8), scales[0].view(torch.uint8)).view(
        torch.float8_e4m3fn
    ), to_four


_DIVISORS = (_E2M1_MAX, _E4M3_MAX * _E2M1_MAX, 256 * _E2M1_MAX)
_DIVISOR_BITS = {value: struct.unpack("i", struct.pack("f", value))[0] for value in _DIVISORS}


def _divisor(value: float, like: Tensor) -> Tensor:
    """A float32 divisor in the shape of a tensor: in the place of a number, whose inverse Inductor multiplies with."""
    spread: Tensor = (like.view(torch.int32) & 0) | _DIVISOR_BITS[value]
    return spread.view(torch.float32)


def _repeat_tiles(x: Tensor, times: int, rows: int | torch.SymInt) -> Tensor:
    """`repeat_rows` of what tiles of rows have one of; what the whole tensor has one of stays."""
    return x if x.ndim < 2 or statically_known_true(x.shape[-2] == 1) else repeat_rows(x, times, rows)


def _nvfp4_factor(scale: Tensor, decode: Tensor) -> Tensor:
    """The multipliers of the elements of blocks: [*scales, 1]."""
    # a block whose scale is 0 gets the largest factor: zeros stay zero, what underflowed saturates
    return reciprocal(scale.float() * decode).clamp(max=_FLT_MAX).unsqueeze(-1)


def nvfp4_global_scale(global_amax: Tensor, e4m3_max: float = _E4M3_MAX) -> tuple[Tensor, Tensor]:
    """NVFP4's tensor-level scale for a float32 amax of any shape, and its reciprocal; 1 for 0 and infinity."""
    encode = (torch.full_like(global_amax, e4m3_max * _E2M1_MAX) / global_amax).clamp(max=_FLT_MAX)
    encode = torch.where((global_amax > 0) & (encode > 0), encode, 1.0)
    return encode, reciprocal(encode)


def reciprocal(x: Tensor) -> Tensor:
    """1 / x as a division of tensors: Inductor's Triton code rounds that correctly, its `reciprocal` does not."""
    return torch.ones_like(x) / x


def _amax(x: Tensor, axis: int | None = None) -> Tensor:
    """Largest magnitude, without NaN, in float32: over everything as [1], or over one axis. 0 where nothing is."""
    largest = magnitude(x)
    if axis is None and largest.ndim > 1 and statically_known_true(largest.shape[-1] > 0):
        largest = largest.amax(-1)  # a norm or an activation that makes x reduces or loops over this axis too
    size = largest.numel() if axis is None else largest.shape[axis]
    # an exported program takes empty batches although its symbols are believed to be 2 or more
    reliable = isinstance(size, int) or axis is not None
    if not (reliable and statically_known_true(size > 0)):
        largest = torch.nn.functional.pad(largest.flatten() if axis is None else largest, (0, 1))
    return (largest.amax().reshape(1) if axis is None else largest.amax(axis)).float()


def block_amax(x: Tensor, block: tuple[int, int]) -> Tensor:
    """The amaxes of x [*batch, R, Cp] in blocks: float32 [*batch, ceil(R / rows), Cp / columns]."""
    amax = _amax(in_blocks(x, block[1]), -1)
    if block[0] == 1:
        return amax
    amax = _pad(amax, -2, block[0])
    return torch.unflatten(amax, -2, (amax.shape[-2] // block[0], block[0])).amax(-2)


def in_blocks(x: Tensor, columns: int) -> Tensor:
    """x [..., C] as [..., C / columns, columns]."""
    return torch.unflatten(x, -1, (x.shape[-1] // columns, columns))


def repeat_rows(x: Tensor, times: int, rows: int | torch.SymInt) -> Tensor:
    """Repeats every row of x [*batch, R, C] and keeps the first `rows` of them."""
    if times == 1:
        return x
    x = x.unsqueeze(-2).expand(*x.shape[:-1], times, x.shape[-1]).flatten(-3, -2)
    return x if statically_known_true(x.shape[-2] == rows) else x.narrow(-2, 0, rows)


def _pad(x: Tensor, axis: int, multiple: int) -> Tensor:
    """Pads an axis (-1 or -2) with zeros to a multiple."""
    size = x.shape[axis]
    if statically_known_true(size % multiple == 0):
        return x
    amount = (size + multiple - 1) // multiple * multiple - size
    return torch.nn.functional.pad(x, (0, amount) if axis == -1 else (0, 0, 0, amount))
