# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,misc"
"""The tiles of Triton casts of groups: amaxes of a strip, whole rows, and a tile in both directions.

Inductor copies the source of what a kernel calls under the name it is called by: import these by their own names.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fxquant.kernels.cast.codes import codes, scaled
from fxquant.kernels.cast.triton_scales import (
    AT_KIND,
    AT_MANTISSA,
    AT_P,
    AT_SHOWN,
    AT_SWIZZLED,
    BLOCK,
    GIVEN,
    MX,
    PER_ROW,
    side_factors,
    side_inverse,
    side_multiplier,
)
from fxquant.kernels.cast.triton_tile import axis_range, four_columns, raise_rows, store_columns, store_rows, tile_axes


@triton.jit
def take_amaxes(
    x, row_amax, column_amax, group, first, end, first_column, K, x_step, ROW: tl.constexpr, COLUMN: tl.constexpr,
    GROUP: tl.constexpr, STRIP: tl.constexpr, W: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Adds a strip of 256 columns to the amaxes of rows [M] and of the columns of groups [G, K], NaN ignored.

    With GROUP the latter are those of whole groups, [G].

    Goes down in tiles of W * R rows, R for each of W warps, eight columns for each thread, as `amax_kernel` does.
    """
    down = axis_range(W, 1, 4) * R + axis_range(R, 2, 4)
    across = axis_range(32, 0, 4) * 8 + axis_range(8, 3, 4)
    in_k = first_column + across < K
    largest = tl.zeros((32, W, 1, 8), tl.float32)
    for step in range(STRIP // (W * R)):
        row = first + step * (W * R)
        source = x + (row.to(tl.int64) * x_step + first_column)
        tile = tl.load(source + (down * x_step + across), mask=(row + down < end) & in_k, other=0.0)
        tile = tl.abs(tile.to(tl.float32))
        if ROW:
            raise_rows(tile, row_amax, row, down, end)
        if COLUMN:
            largest = tl.maximum(largest, tl.max(tile, axis=2, keep_dims=True))
    if COLUMN and GROUP:
        bits = tl.maximum(tl.max(largest), 0.0).to(tl.int32, bitcast=True)
        tl.atomic_max(column_amax.to(tl.pointer_type(tl.int32), bitcast=True) + group, bits, sem="relaxed")
    elif COLUMN:
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
    thread = axis_range(W, 1, 4) * 32 + axis_range(32, 0, 4)
    down, across, words_across = axis_range(R, 2, 4), thread * 8 + axis_range(8, 3, 4), thread * 2 + axis_range(2, 3, 4)
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
        factor = side_multiplier(tl.maximum(amax, 0.0), SIDE)
        inside = row + down < last
        tl.store(row_scale + row + down, side_inverse(factor, SIDE), mask=inside)
        even, odd = tl.split(tl.reshape(scaled(values, factor, SIDE[AT_SHOWN]), (32, W, R, 2, 2, 2)))
        a, c = tl.split(even)
        b, d = tl.split(odd)
        tl.store(out, codes(a, b, c, d, SIDE[AT_MANTISSA] == 2), mask=inside & words_in_k)
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
    padded_end, first_tile, first_column, ROW: tl.constexpr, COLUMN: tl.constexpr, BATCH: tl.constexpr,
    IN_STEP: tl.constexpr, STRIP: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """Quantizes the tile at the row `local` of a group, whose place is as `triton_cast.strip_of` gives it.

    IN_STEP that row may be before the group's first, which it is in one tile of each column.

    Tiles, their layout, scales and units are those of `cast_kernel`. A group's scales, and what they come
    from, are `*_scale_group` apart. Swizzled ones are in tiles of STRIP rows, of which `first_tile` stand before the
    group: of its rows, or of as many columns of blocks of each 128 of its columns.
    """
    padded_M = column_units * 16
    padded_K = row_units * 16
    padded_size = padded_end - padded_start
    first_row = start + local
    first_down, down, across, down_6, across_6 = tile_axes(LAYOUT)
    rows_left = end - first_row
    wide_row = first_row.to(tl.int64)
    source = x + (wide_row * x_step + first_column)
    inside = (down_6 < rows_left) & (first_column + across_6 < K)
    if IN_STEP:
        inside &= down_6 >= -local
    tile = tl.load(source + (down_6 * x_step + across_6), mask=inside, other=0.0).to(tl.float32)
    parts = four_columns(tile, LAYOUT[4], LAYOUT)
    last_group = tl.minimum(group, G - 1).to(tl.int64)
    once = tl.maximum(local, 0) + (group == G).to(tl.int32)  # the padding behind the groups has no scales of its own
    if ROW is not None:
        row_at = 0
        row_left = rows_left
        row_scale += last_group * row_scale_group
        row_lines = rows_left
        if ROW[AT_KIND] == GIVEN:
            row_at = once
            row_arg += last_group
        elif ROW[AT_SWIZZLED]:
            row_at = local % STRIP
            row_lines = rows_left + row_at
            row_left = tl.where((group < G) & (end > start), STRIP, 0)
            row_scale += (first_tile + local // STRIP).to(tl.int64) * (STRIP * row_scale_columns)
        elif ROW[AT_P] > 1:
            row_at = local
            row_left = row_scale_rows
        elif ROW[AT_KIND] == PER_ROW:
            row_arg += wide_row
            row_scale += wide_row
        else:
            row_scale += wide_row * row_scale_step
        factors = side_factors(
            parts, row_arg, row_scale, (row_left, row_scale_columns, row_scale_step, row_scale_column_step), row_at,
            first_column, down, across, row_lines, K, False, ROW, LAYOUT,
        )  # fmt: skip
        in_group = (down < rows_left) & (down >= -local) if IN_STEP else down < rows_left
        in_group = in_group & (first_column + across < padded_K)
        first = wide_row * padded_K + first_column
        store_rows(
            parts, factors, row_data, first, padded_K, down, across, in_group, ROW[AT_MANTISSA] == 2, ROW[AT_SHOWN]
        )
    if COLUMN is not None:
        column_at = once
        blocks_left = 0
        column_scale += last_group * column_scale_group
        if COLUMN[AT_SWIZZLED]:
            column_at = local % STRIP
            blocks_left = tl.where(group < G, tl.cdiv(padded_size, STRIP) * 4, 0)
            tiles_before = first_tile.to(tl.int64) * (column_scale_columns // 128) + local // STRIP
            column_scale += tiles_before * 512
        elif COLUMN[AT_KIND] == BLOCK or COLUMN[AT_KIND] == MX:
            column_at = 0
            blocks_left = (padded_size - local) // COLUMN[AT_P]  # those behind are of the next group
            column_scale += ((padded_start + local) // COLUMN[AT_P]).to(tl.int64) * column_scale_step
        else:
            column_arg += last_group * column_scale_group
        factors = side_factors(
            parts, column_arg, column_scale,
            (blocks_left, column_scale_columns, column_scale_step, column_scale_column_step), column_at, first_column,
            down, across, rows_left, K, True, COLUMN, LAYOUT,
        )  # fmt: skip
        column = first_column.to(tl.int64)
        if BATCH:
            column += last_group * K
        first = column * padded_M + tl.multiple_of(padded_start + local, 16)
        in_padded = local + first_down < padded_size
        if IN_STEP:
            in_padded &= first_down >= -local
        store_columns(
            parts, factors, column_data, first, padded_M, first_down, first_column, across, K, in_padded,
            COLUMN[AT_MANTISSA] == 2, COLUMN[AT_SHOWN], LAYOUT,
        )  # fmt: skip
