# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,misc,union-attr"
"""Triton kernels that quantize groups of rows to NVFP4 in one or both directions from one read.

The bytes are those of `fxquant.kernels.grouped.reference.quantize`, the tiles those of
`fxquant.kernels.cast.triton_nvfp4`, each of one group, which the table of strips of
`fxquant.kernels.grouped.triton_cast` finds. Of ragged operands with scales for tensor cores what stands behind the last
group is not written: nothing reads it.

Inductor copies the source of what a kernel calls under the name it is called by: import these by their own names.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from fxquant.compat.patches import writes
from fxquant.formats import QuantSpec
from fxquant.kernels.cast.codes import magnitude
from fxquant.kernels.cast.triton_nvfp4 import AT_SWIZZLED, Side, cast_side, load_square, side_constants, transformed
from fxquant.kernels.grouped import reference as grouped_reference
from fxquant.kernels.grouped.ops import fake_groups
from fxquant.kernels.grouped.triton_cast import FIELDS, Place, strip_of

_TILE, _STRIP, _WARPS = 64, 128, 8


@writes(row_data="ROW", row_scale="ROW", column_data="COLUMN", column_scale="COLUMN")
@triton.jit
def grouped_nvfp4_kernel(
    x, row_amax, row_state, row_data, row_scale, column_amax, column_state, column_data, column_scale, strips, G, rows,
    padded_rows, K, x_step, tiles_across, row_bytes, column_bytes, row_scale_columns, column_scale_columns,
    ROW: tl.constexpr, COLUMN: tl.constexpr, BATCH: tl.constexpr, STRIP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Casts one square tile of a group of x [M, K]; ROW and COLUMN describe the sides, None for one not wanted.

    `row_bytes` and `column_bytes` are those of a payload's row. Plain scales have `*_scale_columns`.
    """
    row_tile = tl.program_id(0) // tiles_across
    first_column = (tl.program_id(0) % tiles_across) * TILE
    strip = row_tile // (STRIP // TILE)
    group, local, start, end, padded_start, _, first_strip = strip_of(strip, strips, rows, padded_rows, STRIP, BATCH)
    local += (row_tile % (STRIP // TILE)) * TILE
    size = end - start
    if (group >= G) | (size <= 0):
        return
    t = load_square(x, start + local, first_column, end, K, x_step, TILE)
    wide_start = start.to(tl.int64)
    if ROW is not None:
        data = row_data + wide_start * row_bytes
        if ROW[AT_SWIZZLED]:
            scale = row_scale + first_strip.to(tl.int64) * (STRIP * row_scale_columns)
            scale_rows = tl.cdiv(size, STRIP) * STRIP
        else:
            scale = row_scale + wide_start * row_scale_columns
            scale_rows = size
        cast_side(
            t, local, first_column, size, 2 * row_bytes, row_bytes, row_amax + group, row_state, start + local,
            first_column, data, scale, scale_rows, row_scale_columns, row_scale_columns, ROW,
        )  # fmt: skip
    if COLUMN is not None:
        padded = (size + 15) // 16 * 16
        first_unit = padded_start
        data = column_data
        first_line = group * K if BATCH else 0  # random numbers are those of all matrices' rows
        if BATCH:
            data = column_data + first_line.to(tl.int64) * column_bytes
        if COLUMN[AT_SWIZZLED]:
            blocks = tl.cdiv(size, 64) * 4
            lines = tl.cdiv(K, 128) * 128
            if BATCH:
                first_tile = group * tl.cdiv(rows, 64)
            else:
                first_unit = tl.load(strips + FIELDS * strip + 7)
                first_tile = tl.load(strips + FIELDS * strip + 8)
                padded = (size + 31) // 32 * 32
            scale = column_scale + first_tile.to(tl.int64) * (lines * 4)
        else:
            blocks = padded // 16
            lines = K
            scale = column_scale + padded_start // 16
            if BATCH:
                scale = column_scale + first_line.to(tl.int64) * column_scale_columns
        cast_side(
            tl.trans(t), first_column, local, K, padded, column_bytes, column_amax + group, column_state,
            first_line + first_column, padded_start + local, data + first_unit // 2, scale, lines, blocks,
            column_scale_columns, COLUMN,
        )  # fmt: skip


@writes("out")
@triton.jit
def grouped_transformed_amax_kernel(
    x, out, strips, G, rows, padded_rows, K, x_step, tiles_across, COLUMN: tl.constexpr, SIGNS: tl.constexpr,
    BATCH: tl.constexpr, STRIP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Takes the amaxes of groups, transformed along their rows, or columns, into zeroed float32 [G]."""
    row_tile = tl.program_id(0) // tiles_across
    first_column = (tl.program_id(0) % tiles_across) * TILE
    group, local, start, end, _, _, _ = strip_of(row_tile // (STRIP // TILE), strips, rows, padded_rows, STRIP, BATCH)
    local += (row_tile % (STRIP // TILE)) * TILE
    if (group >= G) | (local >= end - start):
        return
    t = load_square(x, start + local, first_column, end, K, x_step, TILE)
    if COLUMN:
        t = tl.trans(t)
    largest = tl.max(tl.max(magnitude(transformed(t, SIGNS)), axis=1), axis=0)
    tl.atomic_max(
        out.to(tl.pointer_type(tl.int32), bitcast=True) + group, largest.to(tl.int32, bitcast=True), sem="relaxed"
    )


def quantize(
    x: Tensor, offs: Tensor | None, row: QuantSpec | None, column: QuantSpec | None, row_state: Tensor | None = None,
    column_state: Tensor | None = None, group_amax: Any = grouped_reference.group_amax,
) -> list[Tensor]:  # fmt: skip
    """Returns the parts of `grouped_reference.quantize` rowwise and then columnwise; None leaves a direction out.

    The states are those of stochastic rounding [3]. `group_amax` takes the amaxes of groups. x has no empty axis.
    """
    if offs is None and x.stride(-1) != 1 and x.stride(-2) == 1:  # the same with the directions exchanged
        swapped = quantize(x.mT, None, column, row, column_state, row_state, group_amax)
        count = 0 if column is None else 3
        return [*swapped[count:], *swapped[:count]]
    x, inner = x.contiguous(), x.shape[-1]
    place = Place.of(x, offs, every=False)
    swizzled = any(spec is not None and spec.swizzled for spec in (row, column))
    across = triton.cdiv(triton.cdiv(inner, 128) * 128 if swizzled else inner, _TILE)
    plain: list[Tensor] = []  # both directions share the amaxes of groups as they are

    def largest(spec: QuantSpec, columnwise: bool) -> Tensor:
        if spec.rht:
            return _transformed_amax(x, place, spec, columnwise)
        plain[:] = plain or [group_amax(x, offs)]
        return plain[0]

    nothing = Side(place.unread, place.unread, place.unread, place.unread)
    sides = []
    for spec, state, direction in ((row, row_state, "rowwise"), (column, column_state, "columnwise")):
        if spec is None:
            sides.append(nothing)
            continue
        data, scale, _ = fake_groups(x, offs, spec, direction)
        amax = largest(spec, direction == "columnwise")
        sides.append(Side(data, scale, amax, place.unread if state is None else state, side_constants(spec)))
    rowwise, columnwise = sides
    wrap_triton(grouped_nvfp4_kernel)[(place.count * (_STRIP // _TILE) * across,)](
        x, rowwise.amax, rowwise.state, rowwise.data, rowwise.scale, columnwise.amax, columnwise.state, columnwise.data,
        columnwise.scale, place.strips, place.groups, place.rows, place.padded_rows, inner, x.stride(-2), across,
        rowwise.data.shape[-1], columnwise.data.shape[-1], rowwise.scale.shape[-1], columnwise.scale.shape[-1],
        rowwise.constants, columnwise.constants, place.batch, _STRIP, _TILE, num_warps=_WARPS,
    )  # fmt: skip
    return [*rowwise.parts, *columnwise.parts]


def _transformed_amax(x: Tensor, place: Place, spec: QuantSpec, columnwise: bool) -> Tensor:
    """The amaxes [G] of the operand's groups as the transform leaves them."""
    inner = x.shape[-1]
    across = triton.cdiv(inner, _TILE)
    out = torch.zeros((place.groups,), dtype=torch.float32, device=x.device)
    wrap_triton(grouped_transformed_amax_kernel)[(place.count * (_STRIP // _TILE) * across,)](
        x, out, place.strips, place.groups, place.rows, place.padded_rows, inner, x.stride(-2), across, columnwise,
        spec.random_signs, place.batch, _STRIP, _TILE, num_warps=_WARPS,
    )  # fmt: skip
    return out
