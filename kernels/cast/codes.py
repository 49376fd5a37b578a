# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Code that the Triton kernels share: multipliers from amaxes, and FP8 codes as words of four.

Inductor copies the source of what a kernel calls under the name it is called by: import these by their own names.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fxquant.formats import QuantSpec

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
TORCHAO_FLOOR = 1e-12
TORCHAO_BELOW = torch.nextafter(torch.tensor(TORCHAO_FLOOR), torch.tensor(1.0)).item()
"""The least float32 that is not below torchao's least amax."""


@triton.jit
def magnitude(x):
    """|x|, 0 for NaN: an amax is the largest of these."""
    return tl.where(x == x, tl.abs(x), 0.0)


@triton.jit
def raise_amax(place, amax):
    """Takes an amax into the float32 at `place`: magnitudes are ordered as their bits are."""
    bits, largest = amax.to(tl.int32, bitcast=True), place.to(tl.pointer_type(tl.int32), bitcast=True)
    tl.atomic_max(largest, bits, mask=bits > tl.load(largest), sem="relaxed")


@triton.jit
def multiplier(amax, RULE: tl.constexpr):
    """`reference.multiplier_from_amax` by the RULE of `multiplier_rule`.

    torchao's float64 quotient rounds to the same float32 as this one. (Double rounding is innocuous for a division when
    the wider format has 2p + 2 bits: Figueroa, 1995.)
    """
    FMAX: tl.constexpr = RULE[0]
    LARGEST: tl.constexpr = RULE[1]
    EPS: tl.constexpr = RULE[2]
    POW2: tl.constexpr = RULE[3]
    BELOW: tl.constexpr = RULE[4]
    MOST: tl.constexpr = RULE[5]
    if EPS > 0:
        amax = tl.where(amax < EPS, EPS, amax)
    scale = tl.div_rn(tl.full(amax.shape, FMAX, tl.float32), amax)
    if BELOW > 0:
        scale = tl.where(amax < BELOW, MOST, scale)
    else:
        scale = tl.where(scale == float("inf"), LARGEST, scale)
        scale = tl.where((amax > 0) & (amax < float("inf")), scale, 1.0)
    if POW2:
        scale = (scale.to(tl.int32, bitcast=True) & -0x800000).to(tl.float32, bitcast=True)
    return scale


def multiplier_rule(spec: QuantSpec, dtype: torch.dtype) -> tuple[float, float, float, bool, float, float]:
    """Returns FMAX, LARGEST, EPS, POW2, BELOW and MOST of a format, for tensors of a dtype."""
    assert spec.row.element is not None
    fmax = spec.row.element.max
    largest = torch.finfo(dtype if spec.row.family == "block" else torch.float32).max
    below, most = (TORCHAO_BELOW, fmax / TORCHAO_FLOOR) if spec.torchao else (0.0, 0.0)
    return fmax, largest, spec.eps, spec.pow2, below, most


@triton.jit
def scaled(x, factor, SHOWN: tl.constexpr):
    """Returns x times a factor; SHOWN, NaN where x is infinite, as `reference.times_given`."""
    if SHOWN:  # before the product, so that both directions share it
        x = tl.where(tl.abs(x) == float("inf"), float("nan"), x)
    return x * factor


@triton.jit
def codes(a, b, c, d, E5M2: tl.constexpr):
    """Casts four float32 tensors to FP8, saturating, as the bytes of uint32, a's the lowest.

    Hopper's instruction makes two codes at a time. Spelled out, since bytes taken apart and put together again, as
    Triton does for a tile that is transposed, come out corrupted (Triton issue 11111).
    """
    if INTERPRETED:
        dtype: tl.constexpr = tl.float8e5 if E5M2 else tl.float8e4nv
        words = a.to(dtype).to(tl.uint8, bitcast=True).to(tl.uint32)
        words |= b.to(dtype).to(tl.uint8, bitcast=True).to(tl.uint32) << 8
        words |= c.to(dtype).to(tl.uint8, bitcast=True).to(tl.uint32) << 16
        words |= d.to(dtype).to(tl.uint8, bitcast=True).to(tl.uint32) << 24
    elif E5M2:
        words = tl.inline_asm_elementwise(
            """{ .reg .b16 low, high;
            cvt.rn.satfinite.e5m2x2.f32 low, $2, $1; cvt.rn.satfinite.e5m2x2.f32 high, $4, $3;
            mov.b32 $0, {low, high}; }""",
            "=r,r,r,r,r", [a, b, c, d], dtype=tl.uint32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        words = tl.inline_asm_elementwise(
            """{ .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high}; }""",
            "=r,r,r,r,r", [a, b, c, d], dtype=tl.uint32, is_pure=True, pack=1,
        )  # fmt: skip
    return words


@triton.jit
def four(x, ROWS: tl.constexpr, QUADS: tl.constexpr):
    """Splits [ROWS, 4 QUADS] into the first, second, third and fourth of every four neighbours in a row."""
    even, odd = tl.split(tl.reshape(x, (ROWS, QUADS, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def word(a, b, c, d, SHIFT: tl.constexpr):
    """Returns the bytes at bit SHIFT of four uint32 tensors as a word with a's lowest."""
    low = ((a >> SHIFT) & 0xFF) | (((b >> SHIFT) & 0xFF) << 8)
    return low | (((c >> SHIFT) & 0xFF) << 16) | (((d >> SHIFT) & 0xFF) << 24)


@triton.jit
def in_words(y, E5M2: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Casts float32 [BM, BN] to FP8, saturating, four of a row in a uint32: [BM, BN / 4]."""
    a, b, c, d = four(y, BM, BN // 4)
    return codes(a, b, c, d, E5M2)
