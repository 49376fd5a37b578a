# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Triton kernels that quantize groups of rows in one or both directions from one read.

The bytes are those of `fxquant.kernels.grouped.reference.quantize`, the tiles those of
`fxquant.kernels.cast.triton_cast`, each of one group: columnwise payloads and blocks are laid out in the padded rows,
rowwise ones where the rows are. Since offsets are known on the device alone, the rows that a program has are looked up
in a table that a kernel of its own writes, of strips of 128 rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from fxquant.compat.patches import writes
from fxquant.formats import QuantSpec
from fxquant.kernels.cast import reference, triton_cast
from fxquant.kernels.cast.swizzle import padded_sizes
from fxquant.kernels.cast.triton_scales import side_constants
from fxquant.kernels.grouped import reference as grouped_reference
from fxquant.kernels.grouped import swizzle
from fxquant.kernels.grouped.places import padded_rows
from fxquant.kernels.grouped.triton_tile import cast_rows, cast_tile, take_amaxes

_STRIP = 128
"""Rows of a strip."""
_ENTRIES = 16
"""Strips that a program of `strips_kernel` looks up."""
FIELDS = tl.constexpr(9)
"""Numbers that the table has of a strip."""
_COLUMNS_ALONE = 8, 4, 2, 2, 16
"""`triton_cast.tile_layout` of columns of ragged groups: 64 bytes of one together, for they start at any 16."""
_HEIGHT = 32
"""Rows of a program of `whole_rows_kernel`."""
_MOST_WARPS = 32
_ROWS_AT_ONCE, _ROWS_AT_ONCE_OF_MOST = 4, 2
"""The rows of these that threads hold at a time, with fewer warps and with the most."""


@triton.jit
def units_before(size, in_group, UNIT: tl.constexpr):
    """Returns the number of units that groups of these sizes begin, before the group of each strip."""
    units = (size + UNIT - 1) // UNIT
    return tl.sum(tl.where(in_group, (tl.cumsum(units, 0) - units)[None, :], 0), 1)


@writes("strips")
@triton.jit
def strips_kernel(
    offs, strips, G, padded_rows, GROUPS: tl.constexpr, ALIGNMENT: tl.constexpr, EVERY: tl.constexpr,
    IN_STEP: tl.constexpr, STRIP: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Stores the place of each strip's rows for `strip_of`. Groups are padded to the ALIGNMENT.

    Behind it stand, for NVFP4, the elements before the group where all are padded to 32, and the 64 rows before it.

    EVERY group has a strip, if only for its scales; what is behind the last group in `padded_rows` comes as one more.
    IN_STEP they begin at multiples of STRIP in the padded rows, a group's first as far before it. GROUPS is a power of
    two above G.
    """
    g = tl.arange(0, GROUPS)
    ends = tl.load(offs + tl.minimum(g, G - 1))
    starts = tl.load(offs + tl.minimum(g, G) - 1, mask=g > 0, other=0)
    padded = tl.where(g < G, (ends - starts + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT, 0)
    padded = tl.where(g == G, padded_rows - tl.sum(padded, 0), padded)
    padded_ends = tl.cumsum(padded, 0)
    before = (padded_ends - padded) % STRIP if IN_STEP else tl.zeros_like(padded)
    count = tl.where(g <= G, tl.maximum((before + padded + STRIP - 1) // STRIP, 1 if EVERY else 0), 0)
    through = tl.cumsum(count, 0)
    strip = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    group = tl.sum((through[None, :] <= strip[:, None]).to(tl.int32), 1)
    in_group = g[None, :] == group[:, None]
    local = (strip - tl.sum(tl.where(in_group, (through - count)[None, :], 0), 1)) * STRIP
    local -= tl.sum(tl.where(in_group, before[None, :], 0), 1)
    place = strips + FIELDS * strip
    tl.store(place, group)
    tl.store(place + 1, local)
    tl.store(place + 2, tl.sum(tl.where(in_group, starts[None, :], 0), 1))
    tl.store(place + 3, tl.sum(tl.where(in_group, ends[None, :], 0), 1))
    tl.store(place + 4, tl.sum(tl.where(in_group, (padded_ends - padded)[None, :], 0), 1))
    tl.store(place + 5, tl.sum(tl.where(in_group, padded_ends[None, :], 0), 1))
    size = tl.where(g < G, ends - starts, 0)
    tl.store(place + 6, units_before(size, in_group, STRIP))
    tl.store(place + 7, units_before(size, in_group, 32) * 32)
    tl.store(place + 8, units_before(size, in_group, 64))


@triton.jit
def strip_of(strip, strips, rows, padded_rows, STRIP: tl.constexpr, BATCH: tl.constexpr):
    """Returns the group of a strip, its first row there, the group's first row and end, and both as padded.

    And the number of STRIP rows, each group's its own, before those of the group.
    """
    if BATCH:
        per_group = tl.cdiv(padded_rows, STRIP)
        group = strip // per_group
        local = (strip % per_group) * STRIP
        start = group * rows
        end = start + rows
        padded_start = 0
        padded_end = padded_rows
        first_tile = group * per_group
    else:
        entry = strips + FIELDS * strip
        group = tl.load(entry)
        local = tl.load(entry + 1)
        start = tl.load(entry + 2)
        end = tl.load(entry + 3)
        padded_start = tl.load(entry + 4)
        padded_end = tl.load(entry + 5)
        first_tile = tl.load(entry + 6)
    return group, local, start, end, padded_start, padded_end, first_tile


@writes(row_amax="ROW", column_amax="COLUMN")
@triton.jit
def grouped_amax_kernel(
    x, row_amax, column_amax, strips, rows, padded_rows, K, x_step, ROW: tl.constexpr, COLUMN: tl.constexpr,
    GROUP: tl.constexpr, BATCH: tl.constexpr, STRIP: tl.constexpr, W: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Takes the amaxes of rows [M], and of each group's columns [G, K] or of groups [G], into zeroed float32."""
    tiles = tl.cdiv(K, 256)
    group, local, start, end, _, _, _ = strip_of(tl.program_id(0) // tiles, strips, rows, padded_rows, STRIP, BATCH)
    first, last = tl.maximum(start + local, start), tl.minimum(start + local + STRIP, end)
    if first < last:
        take_amaxes(
            x, row_amax, column_amax, group, first, last, (tl.program_id(0) % tiles) * 256, K, x_step, ROW,
            COLUMN, GROUP, STRIP, W, R,
        )  # fmt: skip


@writes(row_data="ROW", row_scale="ROW", column_data="COLUMN", column_scale="COLUMN")
@triton.jit
def grouped_cast_kernel(
    x, row_data, row_scale, row_arg, column_data, column_scale, column_arg, strips, G, rows, column_units, K,
    row_units, x_step, row_scale_group, row_scale_rows, row_scale_columns, row_scale_step, row_scale_column_step,
    column_scale_group, column_scale_columns, column_scale_step, column_scale_column_step,
    ROW: tl.constexpr, COLUMN: tl.constexpr, BATCH: tl.constexpr, IN_STEP: tl.constexpr, BACKWARDS: tl.constexpr,
    WHOLE: tl.constexpr, STRIP: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """Quantizes one tile of x [M, K], of G groups of rows or of the padding behind them.

    WHOLE strips have tiles where a side is swizzled.
    BACKWARDS after a kernel of amaxes: what that has read last is still in the cache.
    """
    HEIGHT: tl.constexpr = LAYOUT[1] * LAYOUT[3] * LAYOUT[4]
    WIDTH: tl.constexpr = 4 * LAYOUT[0] * LAYOUT[2]
    tiles = tl.cdiv(row_units * 16, WIDTH)
    program = tl.program_id(0)
    if BACKWARDS:
        program = tl.num_programs(0) - 1 - program
    row_tile = program // tiles
    group, local, start, end, padded_start, padded_end, first_tile = strip_of(
        row_tile // (STRIP // HEIGHT), strips, rows, column_units * 16, STRIP, BATCH
    )
    local += (row_tile % (STRIP // HEIGHT)) * HEIGHT
    size = padded_end - padded_start
    if WHOLE:  # tiles of scales are written whole
        size = tl.cdiv(size, STRIP) * STRIP
    if (group > G) | ((local >= size) & (local > 0)) | (local + HEIGHT <= 0):
        return
    cast_tile(
        x, row_data, row_scale, row_arg, column_data, column_scale, column_arg, G, column_units, K, row_units, x_step,
        row_scale_group, row_scale_rows, row_scale_columns, row_scale_step, row_scale_column_step, column_scale_group,
        column_scale_columns, column_scale_step, column_scale_column_step, group, local, start, end, padded_start,
        padded_end, first_tile, (program % tiles) * WIDTH, ROW, COLUMN, BATCH, IN_STEP, STRIP, LAYOUT,
    )  # fmt: skip


@writes("row_data", "row_scale", column_amax="COLUMN")
@triton.jit
def whole_rows_kernel(
    x, row_data, row_scale, column_amax, strips, rows, padded_rows, K, row_units, x_step, SIDE: tl.constexpr,
    COLUMN: tl.constexpr, BATCH: tl.constexpr, STRIP: tl.constexpr, HEIGHT: tl.constexpr, R: tl.constexpr,
    W: tl.constexpr,
):  # fmt: skip
    """Quantizes HEIGHT rows of x [M, K] by their amaxes, and with COLUMN takes the amaxes of columns, from one read.

    The latter, of each group, [G, K], go into a zeroed float32 buffer.
    """
    parts: tl.constexpr = STRIP // HEIGHT
    group, local, start, end, _, _, _ = strip_of(tl.program_id(0) // parts, strips, rows, padded_rows, STRIP, BATCH)
    first = start + local + (tl.program_id(0) % parts) * HEIGHT
    last = tl.minimum(end, first + HEIGHT)
    first = tl.maximum(first, start)
    if first < last:
        cast_rows(
            x, row_data, row_scale, column_amax, group, first, last, K, row_units, x_step, SIDE, COLUMN, HEIGHT // R, R,
            W,
        )  # fmt: skip


@writes("cleared")
@triton.jit
def clear_kernel(cleared, offs, G, rows, size, WEIGHTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Stores zeros where a grouped GEMM wrote none: rows of `size` behind the last group, or [size] of an empty group.

    A program has ROWS rows of COLUMNS elements, or as many of a group's.
    """
    if WEIGHTS:
        parts = tl.cdiv(size, ROWS * COLUMNS)
        group = tl.program_id(0) // parts
        if tl.load(offs + group) > tl.load(offs + group - 1, mask=group > 0, other=0):
            return
        first = (tl.program_id(0) % parts) * (ROWS * COLUMNS)
        base = cleared + group.to(tl.int64) * size
        for step in range(ROWS):
            at = first + step * COLUMNS + tl.arange(0, COLUMNS)
            tl.store(base + at, tl.zeros((COLUMNS,), cleared.dtype.element_ty), mask=at < size)
    else:
        tiles = tl.cdiv(size, COLUMNS)
        last = tl.load(offs + G - 1)
        first = (tl.program_id(0) // tiles) * ROWS
        if first + ROWS <= last:
            return
        row = first + tl.arange(0, ROWS)
        at = (tl.program_id(0) % tiles) * COLUMNS + tl.arange(0, COLUMNS)
        place = cleared + (row[:, None].to(tl.int64) * size + at[None, :])
        inside = (row[:, None] >= last) & (row[:, None] < rows) & (at[None, :] < size)
        tl.store(place, tl.zeros((ROWS, COLUMNS), cleared.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class Place:
    """The groups' sizes, and the table of strips, which a batch does without."""

    groups: Any
    rows: Any
    """The rows of all groups, or of each matrix of a batch."""
    padded_rows: Any
    count: Any
    """The number of strips."""
    strips: Tensor
    unread: Tensor
    """An argument that a kernel does not read, as in `cast.triton_cast`."""
    batch: bool

    @classmethod
    def of(
        cls, x: Tensor, offs: Tensor | None, alignment: int = 16, *, in_step: bool = False, every: bool = True
    ) -> Place:
        """`every` and `in_step` are those of `strips_kernel`."""
        unread = torch.empty(1, dtype=torch.float32, device=x.device)
        if offs is None:
            groups, rows = x.shape[:2]
            size = _up(rows, alignment)
            return cls(groups, rows, size, groups * triton.cdiv(size, _STRIP), unread, unread, True)
        groups, rows = offs.shape[0], x.shape[0]
        size = padded_rows(rows, groups, alignment)
        count = size // _STRIP + (groups + 2 if every or alignment % _STRIP else 0)
        programs = triton.cdiv(count, _ENTRIES)
        strips = torch.empty((programs * _ENTRIES, FIELDS.value), dtype=torch.int32, device=x.device)
        wrap_triton(strips_kernel)[(programs,)](
            offs.to(torch.int32), strips, groups, size, triton.next_power_of_2(groups + 1), alignment, every, in_step,
            _STRIP, _ENTRIES, num_warps=4,
        )  # fmt: skip
        return cls(groups, rows, size, count, strips, unread, False)


def _take(
    x: Tensor, place: Place, row_amax: Tensor | None, column_amax: Tensor | None, *, by_group: bool = False
) -> None:
    """Takes the amaxes of rows, and of columns or groups, into zeroed buffers; None leaves them out."""
    by_row, by_column = row_amax is not None, column_amax is not None
    row_amax, column_amax = (place.unread if amax is None else amax for amax in (row_amax, column_amax))
    warps, height = 2, 8
    wrap_triton(grouped_amax_kernel)[(place.count * triton.cdiv(x.shape[-1], 256),)](
        x, row_amax, column_amax, place.strips, place.rows, place.padded_rows, x.shape[-1], x.stride(-2),
        by_row, by_column, by_group, place.batch, _STRIP, warps, height, num_warps=warps,
    )  # fmt: skip


def group_amax(x: Tensor, offs: Tensor | None) -> Tensor:
    """`grouped_reference.group_amax`: float32 [G], from one read."""
    x = x.contiguous()
    place = Place.of(x, offs)
    amax = _zeros(x, place.groups)
    _take(x, place, None, amax, by_group=True)
    return amax


def quantize(
    x: Tensor, offs: Tensor | None, row: QuantSpec | None, column: QuantSpec | None, row_state: Tensor | None = None,
    column_state: Tensor | None = None, group_amax: Any = grouped_reference.group_amax,
) -> list[Tensor]:  # fmt: skip
    """Returns the parts of `grouped_reference.quantize` rowwise and then columnwise; None leaves a direction out.

    `row_state` and `column_state` [G] are multipliers to use in the place of the groups' own (per-tensor formats), or
    of a batch that is scaled by column [G, K] what `quantize_and_amax` gave.
    x is float32, bfloat16 or float16. Block scales of 1x128 lie transposed in memory (of a batch each matrix's).
    """
    if offs is None and x.stride(-1) != 1 and x.stride(-2) == 1:  # the same with the directions exchanged
        swapped = quantize(x.mT, None, column, row, column_state, row_state, group_amax)
        count = 0 if column is None else 2
        return [*swapped[count:], *swapped[:count]]
    x, inner = x.contiguous(), x.shape[-1]
    alignment = 16 if column is None else column.row.alignment
    by_row, by_column = (spec is not None and spec.row.family == "per_row" for spec in (row, column))
    families = {spec.row.family for spec in (row, column) if spec is not None}
    of_lines = {"per_tensor", "per_row"}
    in_step = column is not None and families <= of_lines and (not by_row or _in_one_read(inner))
    place = Place.of(x, offs, alignment, in_step=in_step, every=bool(families & of_lines))
    row_amax = None
    new_amax = _zeros(x, place.groups, inner) if by_column and column_state is None else None
    row_parts: list[Tensor] = []
    if by_row and _in_one_read(inner):
        assert row is not None
        row_parts = _whole_rows(x, row, place, new_amax)
        if column is None:
            return row_parts
        row = None
    elif by_row or new_amax is not None:
        if by_row:
            row_amax = _zeros(x, place.groups * place.rows if place.batch else place.rows)
        _take(x, place, row_amax, new_amax)
    amax_of_groups: Tensor | None = None

    def argument(spec: QuantSpec | None, state: Tensor | None, amax: Tensor | None) -> Tensor | None:
        """Returns the multipliers of groups, or the amaxes of lines."""
        nonlocal amax_of_groups
        if spec is None or spec.row.family != "per_tensor":
            return amax
        if state is not None:
            return state
        amax_of_groups = group_amax(x, offs) if amax_of_groups is None else amax_of_groups
        return reference.multiplier_from_amax(amax_of_groups, spec)

    rowwise = _side_of(x, place, row, argument(row, row_state, row_amax), columnwise=False)
    column_amax = column_state if by_column and column_state is not None else new_amax
    columnwise = _side_of(x, place, column, argument(column, column_state, column_amax), columnwise=True)
    columns_alone = row is None and in_step and not place.batch
    layout = _COLUMNS_ALONE if columns_alone else triton_cast.tile_layout(row, column)
    lanes_k, lanes_m, warps_k, warps_m, thread_rows = layout
    row_units = triton.cdiv(rowwise.data.shape[-1] if row is not None else inner, 16)
    whole = any(spec is not None and spec.swizzled for spec in (row, column))
    tiles_down = place.count * (_STRIP // (thread_rows * lanes_m * warps_m))
    wrap_triton(grouped_cast_kernel)[(tiles_down * triton.cdiv(16 * row_units, 4 * lanes_k * warps_k),)](
        x, rowwise.data, rowwise.scale, rowwise.arg, columnwise.data, columnwise.scale, columnwise.arg, place.strips,
        place.groups, place.rows, place.padded_rows // 16, inner, row_units, x.stride(-2), *rowwise.steps,
        columnwise.steps[0], *columnwise.steps[2:], rowwise.constants, columnwise.constants, place.batch,
        in_step and not place.batch, by_row or new_amax is not None, whole, _STRIP, layout, num_warps=warps_k * warps_m,
    )  # fmt: skip
    return [*row_parts, *rowwise.parts, *columnwise.parts]


def quantize_and_amax(x: Tensor, spec: QuantSpec) -> list[Tensor]:
    """Returns a batch x [G, R, C] quantized by row, and its columns' amaxes [G, C], which `quantize` takes as state."""
    inner = x.shape[-1]
    if x.stride(-1) == 1 and _in_one_read(inner):
        x = x.contiguous()
        amax = _zeros(x, x.shape[0], inner)
        return [*_whole_rows(x, spec, Place.of(x, None), amax), amax]
    if x.stride(-1) != 1 and x.stride(-2) == 1:
        stored = x.mT.contiguous()
        groups, rows, length = stored.shape
        amax, stored_amax = _zeros(x, groups, rows), _zeros(x, groups, length)
        _take(stored, Place.of(stored, None), amax, stored_amax)
        return [*quantize(stored, None, None, spec, None, stored_amax), amax]
    x = x.contiguous()
    amax = _zeros(x, x.shape[0], inner)
    _take(x, Place.of(x, None), None, amax)
    return [*quantize(x, None, spec, None), amax]


def _zeros(x: Tensor, *shape: Any) -> Tensor:
    return torch.zeros(shape, dtype=torch.float32, device=x.device)


def _in_one_read(inner: Any) -> bool:
    """Returns True if the threads of a program hold whole rows, whose length must be a number."""
    return isinstance(inner, int) and inner <= 256 * _MOST_WARPS


def _whole_rows(x: Tensor, spec: QuantSpec, place: Place, column_amax: Tensor | None) -> list[Tensor]:
    """Quantizes x by row; the amaxes of columns [G, C] are taken along where there is a buffer for them."""
    assert spec.row.element is not None
    *lines, inner = x.shape
    units = triton.cdiv(inner, 16)
    data = torch.empty([*lines, 16 * units], dtype=spec.row.element.dtype, device=x.device)
    scale = torch.empty([*lines, 1], dtype=torch.float32, device=x.device)
    warps = triton.next_power_of_2(triton.cdiv(inner, 256))
    wrap_triton(whole_rows_kernel)[(place.count * (_STRIP // _HEIGHT),)](
        x, data, scale, place.unread if column_amax is None else column_amax, place.strips, place.rows,
        place.padded_rows, inner, units, x.stride(-2), side_constants(spec, x.dtype), column_amax is not None,
        place.batch, _STRIP, _HEIGHT, _ROWS_AT_ONCE if warps < _MOST_WARPS else _ROWS_AT_ONCE_OF_MOST, warps,
        num_warps=warps,
    )  # fmt: skip
    return [data, scale]


@dataclass(frozen=True)
class _Side:
    """One direction: its outputs and arguments."""

    data: Tensor
    scale: Tensor
    arg: Tensor
    steps: tuple[Any, ...] = (0, 0, 0, 0, 0)
    """The distance of one group's scales to the next, the numbers of scales along rows and columns, their strides."""
    constants: tuple[Any, ...] | None = None

    @property
    def parts(self) -> list[Tensor]:
        return [] if self.constants is None else [self.data, self.scale]


def _side_of(x: Tensor, place: Place, spec: QuantSpec | None, arg: Tensor | None, *, columnwise: bool) -> _Side:
    """Makes the outputs and arguments of one direction."""
    arg = place.unread if arg is None else arg
    if spec is None:
        return _Side(place.unread, place.unread, arg)
    row, inner = spec.row, x.shape[-1]
    assert row.element is not None
    batch = [x.shape[0]] if place.batch else []
    lines, length = (inner, place.padded_rows) if columnwise else (x.shape[-2], _up(inner, row.alignment))
    data = torch.empty([*batch, lines, length], dtype=row.element.dtype, device=x.device)
    constants = side_constants(spec, x.dtype, columnwise=columnwise, multiplier=row.family == "per_tensor")
    if row.family == "per_tensor":
        scale = torch.empty((place.groups,), dtype=torch.float32, device=x.device)
        return _Side(data, scale, arg, (1, 0, 0, 0, 0), constants)
    if row.family == "per_row":
        ragged = [place.groups, lines] if columnwise else [lines, 1]
        scale = torch.empty([*batch, lines, 1] if batch else ragged, dtype=torch.float32, device=x.device)
        return _Side(data, scale, arg, (lines if columnwise else 0, 0, 0, 0, 0), constants)
    if spec.swizzled:
        return _Side(data, *_swizzled_scale(x, place, spec, lines, length, columnwise), constants)
    scale_rows = lines if row.family == "mxfp8" else triton.cdiv(lines, row.block[0])
    scale_columns = length // row.block[1]
    dtype = torch.uint8 if row.family == "mxfp8" else torch.float32
    apart = scale_rows * scale_columns
    if row.family == "block" and row.block[0] == 1 and not batch:
        scale = torch.empty((scale_columns, scale_rows), dtype=dtype, device=x.device).t()
        steps = (1, scale_rows)
    else:
        scale = torch.empty([*batch, scale_rows, scale_columns], dtype=dtype, device=x.device)
        steps = (scale_columns, 1)
    if columnwise:
        counts = (apart if batch else 0, scale_columns, scale_rows, *steps[::-1])
    else:  # rows of their own are counted from the first of all
        counts = (apart if batch and row.block[0] > 1 else 0, scale_rows, scale_columns, *steps)
    return _Side(data, scale, arg, counts, constants)


def _swizzled_scale(
    x: Tensor, place: Place, spec: QuantSpec, lines: Any, length: Any, columnwise: bool
) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """Returns memory for scales in tiles, an argument that is not read, and the steps of a `_Side`."""
    block = spec.row.block[1]
    if place.batch:
        sizes = [x.shape[0], *padded_sizes(lines, length // block)]
    elif columnwise:
        sizes = swizzle.sizes(lines, x.shape[0], place.groups, spec, "columnwise")[1]
    else:
        sizes = swizzle.sizes(lines, length, place.groups, spec, "rowwise")[1]
    scale = torch.empty(sizes, dtype=torch.uint8, device=x.device)
    down, across = sizes[-2:]
    return scale, place.unread, (0, down, down, 0, 0) if columnwise else (0, 0, across, 0, 0)


def clear(out: Tensor, offs: Tensor) -> Tensor:
    """`out`, fresh from a grouped GEMM, with zeros in rows of no group ([M, N]) or for empty groups ([G, N, K])."""
    weights = out.ndim == 3
    rows, size = (out.shape[0], out.shape[1] * out.shape[2]) if weights else out.shape
    count, block = (32, 1024) if weights else (64, 256)
    across = triton.cdiv(size, count * block if weights else block)
    programs = (rows if weights else triton.cdiv(rows, count)) * across
    wrap_triton(clear_kernel)[(programs,)](out, offs, offs.shape[0], rows, size, weights, count, block, num_warps=4)
    return out


def _up(size: Any, to: int) -> Any:
    return triton.cdiv(size, to) * to
