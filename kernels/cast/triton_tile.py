# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,misc"
"""The tile of a Triton cast: its axes, the amaxes of its blocks, rows and columns, and the stores of its payloads.

Inductor copies the source of what a kernel calls under the name it is called by: import these by their own names.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fxquant.kernels.cast.codes import codes, scaled


@triton.jit
def axis_range(SIZE: tl.constexpr, AXIS: tl.constexpr, RANK: tl.constexpr = 5):
    """Returns 0, 1, ... along an axis of a tensor. (Through a reshape Triton would not see what is contiguous.)"""
    i = tl.arange(0, SIZE)
    for axis in tl.static_range(RANK):
        if axis != AXIS:
            i = tl.expand_dims(i, axis)
    return i


@triton.jit
def tile_axes(LAYOUT: tl.constexpr):
    """Returns the first row of each thread, all rows, the first of four columns, and all rows and columns as 6 axes."""
    R: tl.constexpr = LAYOUT[4]
    first_down = (axis_range(LAYOUT[3], 3) * LAYOUT[1] + axis_range(LAYOUT[1], 1)) * R
    down = first_down + axis_range(R, 4)
    across = (axis_range(LAYOUT[2], 2) * LAYOUT[0] + axis_range(LAYOUT[0], 0)) * 4
    return first_down, down, across, tl.expand_dims(down, 5), tl.expand_dims(across, 5) + axis_range(4, 5, 6)


@triton.jit
def four_columns(x, N: tl.constexpr, LAYOUT: tl.constexpr):
    """Splits [LK, LM, WK, WM, 4 N] into the first, second, third and fourth of every four neighbours."""
    even, odd = tl.split(tl.reshape(x, (LAYOUT[0], LAYOUT[1], LAYOUT[2], LAYOUT[3], N, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def block_amax(x, P: tl.constexpr, Q: tl.constexpr, LAYOUT: tl.constexpr):
    """Returns the amaxes, NaN ignored, of blocks of P rows and Q columns; an axis keeps what it has in blocks."""
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
def spread(v, LAYOUT: tl.constexpr):
    """Spreads values of blocks over the threads of a warp that share them, where these do not all lie side by side."""
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
def store_rows(parts, factors, data, first, padded_K, down, across, inside, E5M2: tl.constexpr, SHOWN: tl.constexpr):
    """Casts four parts of a tile times their factors and stores them as they lie, from the element `first` on."""
    a, b, c, d = parts
    words = codes(
        scaled(a, factors[0], SHOWN), scaled(b, factors[1], SHOWN), scaled(c, factors[2], SHOWN),
        scaled(d, factors[3], SHOWN), E5M2,
    )  # fmt: skip
    out = data.to(tl.pointer_type(tl.uint32), bitcast=True) + first // 4
    # a word for each thread: told that they are contiguous, Triton would exchange them between threads first
    place = tl.max_contiguous(down * (padded_K // 4) + across // 4, [1, 1, 1, 1, 1])
    tl.store(out + place, words, mask=inside)


@triton.jit
def store_columns(
    parts, factors, data, first, padded_M, first_down, first_column, across, K, inside, E5M2: tl.constexpr,
    SHOWN: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """Casts four parts of a tile times their factors and stores them transposed, from the element `first` on."""
    R: tl.constexpr = LAYOUT[4]
    out = data.to(tl.pointer_type(tl.uint32), bitcast=True) + first // 4
    for j in tl.static_range(4):
        a, b, c, d = four_columns(scaled(parts[j], factors[j], SHOWN), R // 4, LAYOUT)
        place = (across + j) * (padded_M // 4) + first_down // 4 + axis_range(R // 4, 4)
        tl.store(out + place, codes(a, b, c, d, E5M2), mask=(first_column + across + j < K) & inside)


@triton.jit
def raise_rows(tile, row_amax, row, down, M):
    """Takes the amaxes of the rows of a tile of magnitudes into those of all rows [M], as bits."""
    amax = tl.max(tl.max(tile, axis=3, keep_dims=True), axis=0, keep_dims=True)
    bits = tl.maximum(amax, 0.0).to(tl.int32, bitcast=True)
    out = row_amax.to(tl.pointer_type(tl.int32), bitcast=True) + row
    tl.atomic_max(out + down, bits, mask=row + down < M, sem="relaxed")


@triton.jit
def raise_columns(largest, column_amax, first_column, across, K):
    """Takes the largest magnitudes of columns into the amaxes of all columns [K], as bits."""
    bits = tl.max(largest, axis=1, keep_dims=True).to(tl.int32, bitcast=True)
    out = column_amax.to(tl.pointer_type(tl.int32), bitcast=True) + first_column
    tl.atomic_max(out + across, bits, mask=first_column + across < K, sem="relaxed")
