# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,misc"
"""`reference.statistics` as Triton kernels: one read of an operand and of its quantized form, of any size.

Programs go over tiles and keep sums of pieces, of which each gives a row; one program adds the rows up. Squares are
taken of pieces over a power of two below their amax, so that float32 has room for them, and added in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fxquant.compat.device import multiprocessors
from fxquant.kernels.probe.reference import BEYOND, COLUMNS, EXPONENTS
from fxquant.kernels.probe.triton_tiles import NVFP4, Form, factors, finite, inverted, original, quantized, transformed

_BEYOND = tl.constexpr(BEYOND)
ROW = tl.constexpr(32)
"""The length of the row of a program: the vector without its exponents, and nothing behind it."""
(
    AT_ELEMENTS, AT_ZEROS, AT_UNDERFLOW, AT_SATURATED, AT_SUBNORMAL, AT_NONFINITE, AT_OVERFLOW, AT_SIGNAL, AT_NOISE,
    AT_FOURTH, AT_RELATIVE, AT_SCALES, AT_AMAX, AT_WORST, AT_EXPONENTS,
) = (
    tl.constexpr(COLUMNS.index(name))
    for name in (
        "elements", "zeros", "underflow", "saturated", "subnormal", "nonfinite", "overflow", "signal", "noise",
        "fourth", "relative", "scales", "amax", "worst", f"exponent_{EXPONENTS[0]}",
    )
)  # fmt: skip
_PER_PROCESSOR = 8
"""The programs for each multiprocessor."""
_BINS = tl.constexpr(len(EXPONENTS))
_FIRST = tl.constexpr(EXPONENTS[0])


@triton.jit
def _total(x):
    return tl.sum(tl.sum(x, axis=1), axis=0)


@triton.jit
def _largest(x):
    return tl.max(tl.max(x, axis=1), axis=0)


@triton.jit
def measure_kernel(
    x, data, scale, extra, out, batches, rows, columns, reach, width, scales, x_batch, x_row, x_column, d_batch, d_row,
    d_column, s_batch, s_row, g_batch, g_row, unit, largest, normal, KIND: tl.constexpr, R: tl.constexpr,
    P: tl.constexpr, W: tl.constexpr, DOWN: tl.constexpr, HIGH: tl.constexpr, RHT: tl.constexpr, SIGNS: tl.constexpr,
    VALUES: tl.constexpr, CODES: tl.constexpr, BLOCKS: tl.constexpr, EVEN: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Stores what a program finds in every n-th tile of x [batches, rows, columns] and of its quantized form.

    `reach` columns are compared, of a transformed operand those of its padding too. A block that may be the worst has
    DOWN rows of a piece. Tiles that are EVEN cover x and nothing else; zeros beside it are counted too. `scales` are
    counted STEP at a time.
    """
    down, across = tl.cdiv(rows, R), tl.cdiv(reach, P * W)
    zeros = tl.zeros((R, P), tl.int32)
    nonfinite, underflow, overflow, saturated, subnormal = zeros, zeros, zeros, zeros, zeros
    signal, noise = tl.zeros((R, P), tl.float64), tl.zeros((R, P), tl.float64)
    fourth, relative = signal, signal
    amax = tl.zeros((R, P), tl.float32)
    worst = tl.full((R // DOWN, P), -1.0, tl.float32)
    worst_tile = tl.zeros((R // DOWN, P), tl.int32)
    for tile in range(tl.program_id(0), batches * down * across, tl.num_programs(0)):
        batch = (tile // (down * across)).to(tl.int64)
        row = (tile // across % down).to(tl.int64) * R + tl.arange(0, R)
        column = tile % across * (P * W)
        t = original(x, batch, row, column, rows, columns, x_batch, x_row, x_column, P, W, EVEN)
        q, code = quantized(
            data, scale, extra, batch, row, column, rows, width, d_batch, d_row, d_column, s_batch, s_row, g_batch,
            g_row, unit, KIND, P, W, HIGH, EVEN,
        )  # fmt: skip
        if EVEN == 0:
            at = column + (tl.arange(0, P) * W)[:, None] + tl.arange(0, W)[None, :]
            q = tl.where((row < rows)[:, None, None] & (at < reach)[None, :, :], q, 0.0)
        size = tl.max(tl.abs(t), axis=2)  # NaN ignored
        amax = tl.maximum(amax, size)
        zero = t == 0
        if RHT:
            if VALUES:
                counts = tl.sum(tl.where(zero, 1, tl.where(finite(t), 0, 1 << 8)), axis=2)
                zeros += counts & 255
                nonfinite += counts >> 8
            t = transformed(t, SIGNS)
            zero = t == 0
            size = tl.max(tl.abs(t), axis=2)
        error = t - q
        ok = finite(error)  # of two numbers, which lie near each other
        if VALUES:
            counts = tl.where(zero, 1, tl.where(ok & (q == 0), 1 << 16, 0))
            counts = tl.sum(counts + tl.where(ok, 0, tl.where(finite(t), 1 << 24, 1 << 8)), axis=2)
            if RHT == 0:
                zeros += counts & 255
                nonfinite += (counts >> 8) & 255
            underflow += (counts >> 16) & 255
            overflow += (counts >> 24) & 255
        if CODES:
            counts = tl.where((tl.abs(code) >= largest) & (tl.abs(t) > tl.abs(q) * _BEYOND), 1, 0)
            counts = tl.sum(counts + tl.where((code != 0) & (tl.abs(code) < normal), 1 << 16, 0), axis=2)
            saturated += counts & 0xFFFF
            subnormal += counts >> 16
        if VALUES or BLOCKS:
            size = tl.where(size < float("inf"), size, 1.0).to(tl.int32, bitcast=True) & 0x7F800000
            size = tl.minimum(tl.maximum(size, 0x00800000), 0x7E800000)
            inverse = (0x7F000000 - size).to(tl.float32, bitcast=True)[:, :, None]
            part = tl.where(ok, t, 0.0) * inverse
            lost = tl.where(ok, error, 0.0) * inverse
            square = part * part
            of_signal, of_noise = tl.sum(square, axis=2), tl.sum(lost * lost, axis=2)
            power = size.to(tl.float32, bitcast=True).to(tl.float64)
            power = power * power
            if VALUES:
                signal += of_signal.to(tl.float64) * power
                noise += of_noise.to(tl.float64) * power
                fourth += tl.sum(square * square, axis=2).to(tl.float64) * (power * power)
                share = tl.where(part == 0, 0.0, tl.minimum(tl.abs(lost) * inverted(tl.abs(part)), 1.0))
                relative += tl.sum(share, axis=2).to(tl.float64)
            if BLOCKS:
                if DOWN > 1:
                    signals = tl.sum(tl.reshape(of_signal.to(tl.float64) * power, (R // DOWN, DOWN, P)), axis=1)
                    noises = tl.sum(tl.reshape(of_noise.to(tl.float64) * power, (R // DOWN, DOWN, P)), axis=1)
                    ratio = tl.where(signals > 0, noises / tl.where(signals > 0, signals, 1.0), -1.0).to(tl.float32)
                else:
                    ratio = tl.where(of_signal > 0, of_noise / tl.where(of_signal > 0, of_signal, 1.0), -1.0)
                worst_tile = tl.where(ratio > worst, tile, worst_tile)
                worst = tl.maximum(ratio, worst)
    out += tl.program_id(0) * ROW
    tl.store(out + AT_ELEMENTS, 0.0)
    tl.store(out + AT_ZEROS, _total(zeros).to(tl.float64))
    tl.store(out + AT_NONFINITE, _total(nonfinite).to(tl.float64))
    tl.store(out + AT_UNDERFLOW, _total(underflow).to(tl.float64))
    tl.store(out + AT_OVERFLOW, _total(overflow).to(tl.float64))
    tl.store(out + AT_SATURATED, _total(saturated).to(tl.float64))
    tl.store(out + AT_SUBNORMAL, _total(subnormal).to(tl.float64))
    tl.store(out + AT_SIGNAL, _total(signal))
    tl.store(out + AT_NOISE, _total(noise))
    tl.store(out + AT_FOURTH, _total(fourth))
    tl.store(out + AT_RELATIVE, _total(relative))
    tl.store(out + AT_AMAX, tl.maximum(_largest(amax), 0.0).to(tl.float64))
    _measure_scales(scale, extra, out, scales, g_row, s_row, unit, KIND, STEP)
    pieces = tl.cdiv(reach, W)
    block = (worst_tile // across).to(tl.int64)
    line = block // down * rows + block % down * R + (tl.arange(0, R // DOWN) * DOWN)[:, None]
    place = line * pieces + worst_tile % across * P + tl.arange(0, P)[None, :]
    most = _largest(worst)
    first = -_largest(tl.where(worst == most, -place, -0x7FFFFFFFFFFFFFFF))
    tl.store(out + AT_WORST, most.to(tl.float64))
    tl.store(out + AT_WORST + 1, tl.where(most >= 0, first // pieces, 0).to(tl.float64))
    tl.store(out + AT_WORST + 2, tl.where(most >= 0, first % pieces * W, 0).to(tl.float64))


@triton.jit
def _measure_scales(scale, extra, out, scales, g_row, s_row, unit, KIND: tl.constexpr, STEP: tl.constexpr):
    """Stores the number, the sum, the largest and the least of the factors, in a program's share of them."""
    count, total = tl.zeros((STEP,), tl.int32), tl.zeros((STEP,), tl.float64)
    most, least = tl.zeros((STEP,), tl.float32), tl.full((STEP,), float("-inf"), tl.float32)
    for first in range(tl.program_id(0) * STEP, scales, tl.num_programs(0) * STEP):
        place = first + tl.arange(0, STEP)
        of_amax = place // s_row * g_row if KIND == NVFP4 else place
        factor = factors(scale, extra, place, of_amax, place < scales, unit, KIND)
        counted = (factor > 0) & finite(factor)
        count += counted.to(tl.int32)
        total += tl.where(counted, factor, 0.0).to(tl.float64)
        most = tl.maximum(most, tl.where(counted, factor, 0.0))
        least = tl.maximum(least, tl.where(counted, -factor, float("-inf")))
    tl.store(out + AT_SCALES, tl.sum(count, axis=0).to(tl.float64))
    tl.store(out + AT_SCALES + 1, tl.sum(total, axis=0))
    tl.store(out + AT_AMAX + 1, tl.max(most, axis=0).to(tl.float64))
    tl.store(out + AT_AMAX + 2, tl.max(least, axis=0).to(tl.float64))


@triton.jit
def exponents_kernel(
    x, out, batches, rows, columns, x_batch, x_row, x_column, FIRST: tl.constexpr, BINS: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Stores how many numbers of every n-th tile of x have each exponent, those that are zero or no number apart."""
    down, across = tl.cdiv(rows, R), tl.cdiv(columns, C)
    counts, apart = tl.zeros((BINS,), tl.int32), tl.zeros((R, 1), tl.int32)
    for tile in range(tl.program_id(0), batches * down * across, tl.num_programs(0)):
        batch = (tile // (down * across)).to(tl.int64)
        row = (tile // across % down).to(tl.int64) * R + tl.arange(0, R)
        t = original(x, batch, row, tile % across * C, rows, columns, x_batch, x_row, x_column, 1, C, EVEN)
        counted = (t != 0) & finite(t)
        exponent = ((t.to(tl.int32, bitcast=True) >> 23) & 255) - 127 - FIRST
        exponent = tl.where(counted, tl.minimum(tl.maximum(exponent, 0), BINS - 1), 0)
        counts += tl.histogram(tl.reshape(exponent, (R * C,)), BINS)
        apart += tl.sum((counted == 0).to(tl.int32), axis=2)
    bins = tl.arange(0, BINS)
    counts -= tl.where(bins == 0, _total(apart), 0)
    tl.store(out + tl.program_id(0) * BINS + bins, counts)


@triton.jit
def collect_kernel(
    partial, counted, out, elements, beside, programs, counters, UNKNOWN: tl.constexpr, STEP: tl.constexpr
):  # fmt: skip
    """Adds up the rows of programs, and stores the vector of an operand; UNKNOWN codes count as NaN.

    The zeros that are not of the operand, but `beside` it in tiles, do not count.
    """
    at = tl.arange(0, ROW)
    lane = tl.arange(0, STEP)
    totals = tl.zeros((STEP, ROW), tl.float64)  # of lanes, which are added once behind the loop
    mosts = tl.full((STEP, ROW), float("-inf"), tl.float64)
    worst, line, column = (
        tl.full((STEP,), -1.0, tl.float64),
        tl.zeros((STEP,), tl.float64),
        tl.zeros((STEP,), tl.float64),
    )
    for first in range(0, programs, STEP):
        inside = first + lane < programs
        rows = tl.load(partial + (first + lane)[:, None] * ROW + at[None, :], mask=inside[:, None], other=0.0)
        totals += rows
        mosts = tl.maximum(mosts, tl.where(inside[:, None], rows, float("-inf")))
        place = partial + (first + lane) * ROW + AT_WORST
        ratio = tl.load(place, mask=inside, other=-1.0)
        of_line = tl.load(place + 1, mask=inside, other=0.0)
        of_column = tl.load(place + 2, mask=inside, other=0.0)
        before = (of_line < line) | ((of_line == line) & (of_column < column))
        take = (ratio > worst) | ((ratio == worst) & (ratio >= 0) & before)
        worst, line, column = (
            tl.where(take, ratio, worst),
            tl.where(take, of_line, line),
            tl.where(take, of_column, column),
        )
    total, most = tl.sum(totals, axis=0), tl.max(mosts, axis=0)
    largest = tl.max(worst, axis=0)
    lines = tl.min(tl.where(worst == largest, line, float("inf")), axis=0)
    columns = tl.min(tl.where((worst == largest) & (line == lines), column, float("inf")), axis=0)
    total = tl.where(at == AT_ELEMENTS, tl.where(at >= 0, elements, 0).to(tl.float64), total)
    total -= tl.where(at == AT_ZEROS, beside, 0).to(tl.float64)
    total = tl.where((at > AT_SCALES + 1) & (at < AT_AMAX), 0.0, total)  # of products
    if UNKNOWN:
        total = tl.where((at == AT_SATURATED) | (at == AT_SUBNORMAL), float("nan"), total)
    total = tl.where(at >= AT_AMAX, most, total)
    total = tl.where(at == AT_WORST, largest, total)
    total = tl.where(at == AT_WORST + 1, lines, total)
    total = tl.where(at == AT_WORST + 2, columns, total)
    tl.store(out + at, total, mask=at < AT_EXPONENTS)
    bins = tl.arange(0, _BINS)
    counts = tl.zeros((STEP, _BINS), tl.int64)
    for first in range(0, counters, STEP):
        inside = first + lane < counters
        rows = tl.load(counted + (first + lane)[:, None] * _BINS + bins[None, :], mask=inside[:, None], other=0)
        counts += rows.to(tl.int64)
    tl.store(out + AT_EXPONENTS + bins, tl.sum(counts, axis=0).to(tl.float64))


def measure(
    x: Tensor, form: Form, block: tuple[int, int], groups: Sequence[str], ends: tuple[float, float] | None,
    scales: int, transform: bool | None, uninside: bool,
) -> Tensor:  # fmt: skip
    """The vector [COLUMNS] of an operand x [B, R, C] and of its quantized form: its groups.

    `block` are the rows and columns of a block that may be the worst; codes are compared with `ends`, the largest and
    the smallest normal number, or not at all. So many `scales` are counted. A `transform` has random signs, or none.
    """
    batches, rows, columns = x.shape
    high, wide = block
    r, p, warps = _tile(high, wide)
    reach = columns if transform is None else form.width
    tiles = batches * triton.cdiv(rows, r) * triton.cdiv(reach, p * wide)
    even = reach == columns == form.width and rows % r == 0 and columns % (p * wide) == 0
    beside = tiles * r * p * wide - x.numel() if "values" in groups else 0
    programs = _programs(x, tiles)
    partial = torch.empty((programs, ROW.value), dtype=torch.float64, device=x.device)
    largest, normal = ends or (math.inf, 0.0)
    measure_kernel[(programs,)](
        x, form.data, form.scale, form.extra, partial, batches, rows, columns, reach, form.width, scales, *x.stride(),
        *form.strides, form.unit, largest, normal, form.kind, r, p, wide, high, form.high, transform is not None,
        bool(transform), "values" in groups, ends is not None, "blocks" in groups, even, 1024, num_warps=warps,
    )  # fmt: skip
    counters, counted = 0, partial
    if "exponents" in groups:
        t = x if x.stride(-1) <= x.stride(-2) else x.mT
        counters = _programs(x, batches * triton.cdiv(t.shape[1], 32) * triton.cdiv(t.shape[2], 128))
        counted = torch.empty((counters, _BINS.value), dtype=torch.int32, device=x.device)
        even = t.shape[1] % 32 == 0 and t.shape[2] % 128 == 0
        exponents_kernel[(counters,)](t, counted, *t.shape, *t.stride(), _FIRST, _BINS, 32, 128, even, num_warps=4)
    out = torch.empty(len(COLUMNS), dtype=torch.float64, device=x.device)
    collect_kernel[(1,)](partial, counted, out, x.numel(), beside, programs, counters, uninside, 128, num_warps=16)
    return out


def _tile(high: int, wide: int) -> tuple[int, int, int]:
    """Rows, pieces and warps of a tile of whole blocks."""
    if high * wide > 2048:
        return high, 1, 16
    rows = max(high, 32 if wide <= 64 else 16)
    return rows, max(1, 2048 // (rows * wide)), 4


def _programs(x: Tensor, tiles: int) -> int:
    """The number of programs that go over so many tiles."""
    return max(1, min(tiles, _PER_PROCESSOR * multiprocessors(x.device)))
