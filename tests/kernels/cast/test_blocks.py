"""Blocks of any size: the codes of every element, packing, scales, and the formats that this package has otherwise."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import hypothesis.strategies as st
import pytest
import torch
from bits import same
from hypothesis import given, settings
from torch import Tensor

from fxquant.formats import CUSTOM, ELEMENTS, FORMATS, SCALES, Element, Format, QuantSpec
from fxquant.kernels.cast import blocks, reference
from fxquant.quantizers.blocks import block_format

LARGEST = {"e2m1": 6.0, "e2m3": 7.5, "e3m2": 28.0, "int8": 127 / 64, "e4m3": 448.0, "e5m2": 57344.0}
BIAS = {"e2m1": 1, "e2m3": 1, "e3m2": 3, "e4m3": 7, "e5m2": 15}
elements = pytest.mark.parametrize("element", [ELEMENTS[name] for name in LARGEST], ids=LARGEST)


def value_of(code: int, element: Element) -> Fraction:
    """The value of a code in sign and magnitude, as sections 5.3.1 to 5.3.4 of OCP MX v1.0 have it."""
    sign, magnitude = (-1) ** (code >> (element.bits - 1)), code & ((1 << (element.bits - 1)) - 1)
    if element.name == "int8":
        return sign * Fraction(magnitude, 64)
    exponent, mantissa = divmod(magnitude, 2**element.mantissa_bits)
    bias, fraction = BIAS[element.name], Fraction(mantissa, 2**element.mantissa_bits)
    if exponent == 0:
        return sign * fraction * Fraction(2) ** (1 - bias)
    return sign * (1 + fraction) * Fraction(2) ** (exponent - bias)


def grid(element: Element) -> list[Fraction]:
    """The values of all codes that are numbers, from 0 up."""
    largest = {"e4m3": 0x7E, "e5m2": 0x7B}.get(element.name, 2 ** (element.bits - 1) - 1)
    return [value_of(code, element) for code in range(largest + 1)]


@elements
def test_every_code_has_its_value_and_every_value_its_code(element: Element) -> None:
    sign, values = 1 << (element.bits - 1), grid(element)
    assert float(values[-1]) == LARGEST[element.name] == element.max
    if element.bits < 8 or element.name == "int8":
        assert len(values) == sign, "there is neither NaN nor infinity"
    codes = torch.tensor([*range(len(values)), *(code | sign for code in range(len(values)))], dtype=torch.int32)
    numbers = blocks.decode(codes, element)
    assert numbers.tolist() == [float(value_of(code, element)) for code in codes.tolist()]
    assert same(blocks.encode(numbers, element), codes), "zero has both signs"
    if element.has_nan:
        assert same(codes.to(torch.uint8).view(element.dtype).float(), numbers), "as torch has them"


@elements
def test_values_between_go_to_the_nearest_ties_to_even(element: Element) -> None:
    values = grid(element)
    shares = (Fraction(1, 1 << 12), Fraction(1, 3), Fraction(1, 2), Fraction(2, 3), 1 - Fraction(1, 1 << 12))
    for code, (low, high) in enumerate(pairwise(values)):
        y = torch.tensor([float(low + share * (high - low)) for share in shares])
        middle = code + code % 2
        wanted = [code, code, middle, code + 1, code + 1]
        assert blocks.encode(y, element).tolist() == wanted, float(low)
        assert blocks.decode(blocks.encode(-y, element), element).tolist() == [-float(values[i]) for i in wanted]
    beyond = torch.tensor([element.max * 1.01, 3e38, math.inf, math.nan])
    assert blocks.encode(beyond, element).tolist() == [len(values) - 1] * 4


@elements
@given(number=st.floats(width=32, allow_nan=False, allow_infinity=False), byte=st.integers(0, 255))
@settings(max_examples=100, deadline=None)
def test_a_random_byte_chooses_among_the_neighbours(element: Element, number: float, byte: int) -> None:
    y = torch.tensor([number])
    code = blocks.encode(y, element, torch.tensor([byte]))
    magnitude, values = min(abs(Fraction(number)), Fraction(element.max)), grid(element)
    got = abs(Fraction(blocks.decode(code, element).item()))
    below = max(v for v in values if v <= magnitude)
    above = min((v for v in values if v > magnitude), default=below)
    assert got in (below, above)
    if above > below:
        share = (magnitude - below) / (above - below)
        close = Fraction(1, 1 << 16)  # the sum of both is rounded to float32
        assert got == below or share + Fraction(byte, 256) >= 1 - close
        assert got == above or share + Fraction(byte, 256) < 1 + close


@elements
def test_cast_of_fp8_is_the_same(element: Element) -> None:
    if element.has_nan:
        y = torch.randn(4096) * torch.logspace(-6, 6, 4096)
        assert same(blocks.encode(y, element).to(torch.uint8), reference.cast_fp8(y, element).view(torch.uint8))


@pytest.mark.parametrize("bits", [4, 6])
def test_codes_are_packed_without_gaps(bits: int) -> None:
    codes = torch.arange(1 << bits, dtype=torch.int32).flip(0).reshape(2, -1)
    data = blocks.pack(codes, bits)
    assert data.dtype == torch.uint8 and 8 * data.numel() == bits * codes.numel()
    assert same(blocks.unpack(data, bits), codes)
    whole = int.from_bytes(bytes(data[0].tolist()), "little")
    assert whole == sum(code << (bits * i) for i, code in enumerate(codes[0].tolist()))


BUILT_IN = [row for row in FORMATS.values() if row.element is not None]


@pytest.mark.parametrize("row", BUILT_IN, ids=[row.name for row in BUILT_IN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_formats_of_this_package_are_the_same_values(row: Format, dtype: torch.dtype) -> None:
    scale = next(name for name, kind in SCALES.items() if kind == row.scale_dtype)
    assert block_format(row.element.name, row.block, scale) == row
    x = (torch.randn(70, 256) * torch.logspace(-9, 4, 256)).to(dtype)
    x[:, 40:80], x[3, 7] = 0, -0.0
    for mode in ("rceil", "floor", "ceil", "even") if scale == "e8m0" else ("rceil",):
        spec = QuantSpec(format=row.name, mode=mode)
        wanted = reference.dequantize(reference.quantize(x, spec), spec)
        assert same(blocks.dequantize(blocks.quantize(x, row, mode), row), wanted), mode


def own(element: str, block: tuple[int, int], scale: str) -> Format:
    row = block_format(element, block, scale)
    assert row.family == CUSTOM.family
    return row


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("element", ["e2m1", "e2m3", "e3m2", "int8", "e4m3"])
@given(
    block=st.tuples(st.integers(0, 5), st.sampled_from([0, 3, 16, 48])), rows=st.integers(0, 9),
    seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=10, deadline=None)
def test_a_block_is_near_its_values(element: str, scale: str, block: tuple[int, int], rows: int, seed: int) -> None:
    row = block_format(element, block, scale)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 2 * row.alignment, generator=generator)
    parts = blocks.quantize(x, row, "rceil")
    values = blocks.dequantize(parts, row)
    assert parts[1].dtype == row.scale_dtype or (scale, parts[1].dtype) == ("e8m0", torch.uint8)
    assert values.shape == x.shape
    largest = x.abs().amax().item() if rows else 0.0
    # the scale may be twice as large as needed, and is itself rounded, down too: what is largest then saturates
    rounded = {"e4m3": 2.0**-4, "bfloat16": 2.0**-8}.get(scale, 2.0**-20)
    assert ((values - x).abs() <= largest * (2.0 ** -ELEMENTS[element].mantissa_bits + rounded)).all()


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("element", LARGEST)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_makes_its_block_nan(element: str, scale: str, value: float) -> None:
    row = own(element, (1, 24), scale)
    x = torch.randn(2, 48)
    x[0, 30] = value
    values = blocks.dequantize(blocks.quantize(x, row, "rceil"), row)
    assert values[0, 24:].isnan().all()
    if scale != "e4m3" or math.isnan(value):  # one amax is that of the whole tensor
        assert same(values.isnan(), torch.tensor([[False] * 24 + [True] * 24, [False] * 48]))


def mean_of(x: Tensor, row: Format, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    total = torch.zeros_like(x)
    for _ in range(count):
        random = torch.randint(256, x.shape, generator=generator)
        total += blocks.dequantize(blocks.quantize(x, row, "rceil", random), row)
    return total / count


@pytest.mark.parametrize("element", LARGEST)
def test_the_mean_of_stochastic_rounding_is_the_value(element: str) -> None:
    row, x = block_format(element, (1, 24), "float32"), torch.rand(4, 48) + 0.5
    nearest = blocks.dequantize(blocks.quantize(x, row, "rceil"), row)
    step = 2.0 ** -ELEMENTS[element].mantissa_bits
    error = (mean_of(x, row, 400) - x).abs().max().item()
    assert error < 0.2 * step + 0.004 and error < (nearest - x).abs().max().item() + 0.1 * step
