# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,misc"
"""Triton kernels that quantize a matrix x [M, K] in one or both directions from one read.

FP8 with scales per tensor, per row, in blocks of 128, and MX blocks of 32; the bytes are those of
`fxquant.kernels.cast.reference.quantize`. A tile is read once, and its payload written as it lies (rowwise) and
transposed (columnwise), so that either GEMM operand has its contracted axis dense. What a block's amax decides needs no
other pass; an amax per row or column is taken in an earlier one, for both directions at once; an amax per tensor is
left to Inductor, which takes it where the tensor is produced.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from fxquant.compat.patches import writes
from fxquant.compat.values import statically_known_true
from fxquant.formats import QuantSpec
from fxquant.kernels.cast import reference, triton_producers
from fxquant.kernels.cast.producers import named
from fxquant.kernels.cast.swizzle import padded_sizes
from fxquant.kernels.cast.triton_producers import load_pair_of_tile, load_tile
from fxquant.kernels.cast.triton_scales import AT_KIND, AT_MANTISSA, AT_SHOWN, PER_ROW, side_constants, side_factors
from fxquant.kernels.cast.triton_tile import (
    axis_range,
    four_columns,
    raise_columns,
    raise_rows,
    store_columns,
    store_rows,
    tile_axes,
)

_AMAX_LAYOUT, _AMAX_LAYOUT_OF_PRODUCERS = (16, 2, 8), (8, 2, 4)
"""Steps down, warps below each other and rows of a thread in the kernel of amaxes."""


@writes(row_data="ROW", row_scale="ROW", column_data="COLUMN", column_scale="COLUMN", recorded="RECORD")
@triton.jit
def cast_kernel(
    x, in1, in2, in3, in4, recorded, step, row_data, row_scale, row_arg, column_data, column_scale, column_arg, M, K,
    column_units, row_units, x_step, row_scale_size, column_scale_size, row_scale_rows, row_scale_columns,
    row_scale_step, row_scale_column_step, column_scale_rows, column_scale_columns, column_scale_step,
    column_scale_column_step, ROW: tl.constexpr, COLUMN: tl.constexpr, PRODUCER: tl.constexpr, S: tl.constexpr,
    D: tl.constexpr, RESULTS: tl.constexpr, AT_ONCE: tl.constexpr, RECORD: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """Casts one tile of x [M, K], of R * LM * WM rows and 4 * LK * WK columns; LAYOUT is (LK, LM, WK, WM, R).

    A thread has R rows of four columns. In a warp LK threads stand side by side and LM one below the other; WK and WM
    warps likewise. A tile is a tensor [LK, LM, WK, WM, R] for each of the four columns: in that order the layouts
    that Triton gives to loads and stores are all the same one, so that a payload is transposed in registers, and an
    amax of R rows is taken in them.

    A PRODUCER makes what is cast from x and more inputs. The outputs of two RESULTS lie one behind the other; a
    program makes both AT_ONCE, or the next one makes the second and finds the inputs in the cache. RECORD takes the
    amax of each, NaN ignored, into `recorded`, as `Record.constants` says.

    ROW and COLUMN are those of `side_constants`, None for a side that is not wanted. The scales of a side are given in
    tile order, rows along M. Payloads are padded to `row_units` and `column_units` of 16 bytes, a factor that the
    compiler sees in the alignment of stores.
    """
    HEIGHT: tl.constexpr = LAYOUT[1] * LAYOUT[3] * LAYOUT[4]
    WIDTH: tl.constexpr = 4 * LAYOUT[0] * LAYOUT[2]
    padded_M = column_units * 16
    padded_K = row_units * 16
    program, first_result = tl.program_id(0), 0
    if RESULTS == 2 and not AT_ONCE:
        program, first_result = program // 2, program % 2
    tiles_across = tl.cdiv(padded_K, WIDTH)
    first_row = (program // tiles_across) * HEIGHT
    first_column = (program % tiles_across) * WIDTH
    first_down, down, across, down_6, across_6 = tile_axes(LAYOUT)
    if AT_ONCE:
        tiles = load_pair_of_tile(
            x, in1, in2, in3, in4, x_step, first_row, first_column, down_6, across_6, M, K, PRODUCER
        )
    else:
        tiles = (
            load_tile(
                x, in1, in2, in3, in4, x_step, first_row, first_column, down_6, across_6, M, K, first_result, PRODUCER,
                S, D,
            ),
        )  # fmt: skip
    for i in tl.static_range(2 if AT_ONCE else 1):
        result = first_result + i
        parts = four_columns(tiles[i].to(tl.float32), LAYOUT[4], LAYOUT)
        if RECORD is not None:
            a, b, c, d = parts
            largest = tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))
            bits = tl.maximum(tl.max(largest), 0.0).to(tl.int32, bitcast=True)
            place = RECORD[1] + result * RECORD[2]
            if RECORD[0]:
                tl.atomic_max(recorded + place, (tl.load(step) << 32) + bits.to(tl.int64), sem="relaxed")
            else:
                tl.atomic_max(recorded.to(tl.pointer_type(tl.int32), bitcast=True) + place, bits, sem="relaxed")
        if ROW is not None:
            factors = side_factors(
                parts, row_arg + result * (M if ROW[AT_KIND] == PER_ROW else 1), row_scale + result * row_scale_size,
                (row_scale_rows, row_scale_columns, row_scale_step, row_scale_column_step), first_row, first_column,
                down, across, M, K, False, ROW, LAYOUT,
            )  # fmt: skip
            inside = (first_row + down < M) & (first_column + across < padded_K)
            first = (first_row.to(tl.int64) + result * M) * padded_K + first_column
            store_rows(
                parts, factors, row_data, first, padded_K, down, across, inside, ROW[AT_MANTISSA] == 2, ROW[AT_SHOWN]
            )
        if COLUMN is not None:
            factors = side_factors(
                parts, column_arg + result * (K if COLUMN[AT_KIND] == PER_ROW else 1),
                column_scale + result * column_scale_size,
                (column_scale_rows, column_scale_columns, column_scale_step, column_scale_column_step), first_row,
                first_column, down, across, M, K, True, COLUMN, LAYOUT,
            )  # fmt: skip
            first = (first_column.to(tl.int64) + result * K) * padded_M + first_row
            store_columns(
                parts, factors, column_data, first, padded_M, first_down, first_column, across, K,
                first_row + first_down < padded_M, COLUMN[AT_MANTISSA] == 2, COLUMN[AT_SHOWN], LAYOUT,
            )  # fmt: skip


@writes(row_amax="ROW", column_amax="COLUMN")
@triton.jit
def amax_kernel(
    x, in1, in2, in3, in4, row_amax, column_amax, M, K, x_step, ROW: tl.constexpr, COLUMN: tl.constexpr,
    STEPS: tl.constexpr, PRODUCER: tl.constexpr, S: tl.constexpr, D: tl.constexpr, RESULTS: tl.constexpr,
    W: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Takes the amaxes of the rows and of the columns of x [M, K], NaN ignored, into zeroed float32 buffers.

    With a PRODUCER they are those of its results, as in `cast_kernel`.

    Goes down STEPS tiles of W * R rows, R for each of W warps, and 256 columns, eight for each thread. Magnitudes are
    ordered as their bits are.
    """
    tiles_across = tl.cdiv(K, 256)
    first_row = (tl.program_id(0) // tiles_across) * (W * R * STEPS)
    first_column = (tl.program_id(0) % tiles_across) * 256
    down = axis_range(W, 1, 4) * R + axis_range(R, 2, 4)
    across = axis_range(32, 0, 4) * 8 + axis_range(8, 3, 4)
    largest = tl.zeros((32, W, 1, 8), tl.float32)
    largest_of_second = tl.zeros((32, W, 1, 8), tl.float32)
    for step in range(STEPS):
        row = first_row + step * (W * R)
        if RESULTS == 2:
            first, second = load_pair_of_tile(
                x, in1, in2, in3, in4, x_step, row, first_column, down, across, M, K, PRODUCER
            )
            tile, other = tl.abs(first.to(tl.float32)), tl.abs(second.to(tl.float32))
        else:
            tile = load_tile(x, in1, in2, in3, in4, x_step, row, first_column, down, across, M, K, 0, PRODUCER, S, D)
            tile = tl.abs(tile)
        if ROW:
            raise_rows(tile, row_amax, row, down, M)
            if RESULTS == 2:
                raise_rows(other, row_amax + M, row, down, M)
        if COLUMN:
            largest = tl.maximum(largest, tl.max(tile, axis=2, keep_dims=True))
            if RESULTS == 2:
                largest_of_second = tl.maximum(largest_of_second, tl.max(other, axis=2, keep_dims=True))
    if COLUMN:
        raise_columns(largest, column_amax, first_column, across, K)
        if RESULTS == 2:
            raise_columns(largest_of_second, column_amax + K, first_column, across, K)


@dataclass(frozen=True)
class Record:
    """The place of the amaxes [results] of a cast: float32, or int64 with the `step` [1] that writes them."""

    amaxes: Tensor
    step: Tensor | None = None
    from_last: bool = False
    """True if the amax of the first result goes to the last entry."""

    def constants(self, results: int) -> tuple[bool, int, int]:
        """Returns RECORD of the kernel: whether there is a step, the first result's place, the distance of the next."""
        apart, since = self.amaxes.stride(0), self.step is not None
        return (since, (results - 1) * apart, -apart) if self.from_last else (since, 0, apart)


@dataclass(frozen=True)
class _Source:
    """The matrices to cast: a tensor, or the results of a producer of inputs, of which none is written."""

    inputs: Sequence[Tensor]
    producer: str | None
    unread: Tensor
    """An argument that a kernel does not read: of x itself Inductor would write a copy for each."""

    @classmethod
    def of(cls, inputs: Sequence[Tensor], producer: str | None = None) -> _Source:
        return cls(inputs, producer, torch.empty(1, dtype=torch.float32, device=inputs[0].device))

    @property
    def x(self) -> Tensor:
        return self.inputs[0]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of what is cast."""
        return self.x.dtype if self.producer is None else named(self.producer).made(self.x)

    @property
    def results(self) -> int:
        return 1 if self.producer is None else named(self.producer).results

    @property
    def shape(self) -> tuple[Any, Any]:
        """The sizes [M, K] of each result."""
        size_m, size_k = self.x.shape if self.producer is None else named(self.producer).shape(self.x)
        return size_m, size_k

    @property
    def arguments(self) -> list[Tensor]:
        """Returns as many inputs as the kernels take."""
        return [*self.inputs, *[self.unread] * (5 - len(self.inputs))]

    @property
    def constants(self) -> tuple[int, int, int, int]:
        """Returns PRODUCER, S, D and RESULTS of the kernels."""
        return *triton_producers.kind(self.producer, self.x), self.results

    def zeros(self, size: Any) -> Tensor:
        return torch.zeros(size, dtype=torch.float32, device=self.x.device)


@dataclass(frozen=True)
class _Side:
    """One direction of a cast: its outputs and arguments."""

    data: Tensor
    scale: Tensor
    """Its memory as it lies."""
    arg: Tensor
    spec: QuantSpec | None = None
    """None for a direction that is not wanted."""
    constants: tuple[Any, ...] | None = None
    scale_place: tuple[Any, Any, Any, Any] = (0, 0, 0, 0)
    """Scales along M and along K, and their strides."""
    transposed: bool = False
    """True if the scales lie transposed."""
    results: int = 1
    """The number of tensors that are cast; theirs lie one behind the other."""

    @property
    def scale_size(self) -> Any:
        """Scales of one result."""
        return 0 if self.spec is None else self.scale.shape[0] * self.scale.stride(0) // self.results

    def units(self, length: Any) -> Any:
        """Returns the number of 16 bytes in a line of the payload, or of `length` elements where there is none."""
        return triton.cdiv(length if self.spec is None else self.data.shape[-1], 16)

    def parts(self, result: int) -> list[Tensor]:
        if self.spec is None:
            return []
        data, scale = self.data, self.scale
        if self.results > 1:
            rows, scale_rows = data.shape[0] // self.results, scale.shape[0] // self.results
            data, scale = data.narrow(0, result * rows, rows), scale.narrow(0, result * scale_rows, scale_rows)
            # Inductor's GEMMs take no part of a tensor for a scale, cuBLAS none that is unaligned
            if statically_known_true(scale_rows == 1):
                scale = scale.clone()
        return [data, scale.t() if self.transposed else scale]


def is_by_columns(x: Tensor) -> bool:
    """Returns True if a matrix is stored by columns: it is cast as its transpose, with the directions exchanged."""
    return x.stride(-1) != 1 and x.stride(-2) == 1


def exchanged(parts: list[Tensor], columnwise: int) -> list[Tensor]:
    """The parts of a matrix, those by rows first, from those of its transpose, whose first `columnwise` are by rows."""
    return [*parts[columnwise:], *parts[:columnwise]]


def quantize(
    x: Tensor, row: QuantSpec | None, column: QuantSpec | None, row_scale: Tensor | None = None,
    column_scale: Tensor | None = None, amax: Callable[[Tensor], Tensor] = reference.amax,
) -> list[Tensor]:  # fmt: skip
    """Returns the parts of `reference.quantize` of x [M, K] rowwise, then of x.mT columnwise; None leaves one out.

    `row_scale` and `column_scale` [1] are multipliers to use in the place of the tensor's own (per-tensor formats).
    `amax` takes the amax [1] of a tensor. x is not empty, and float32, bfloat16 or float16. Block scales of 1x128 lie
    transposed in memory, as cuBLAS wants them, and those of MX too.
    """
    if is_by_columns(x):
        return exchanged(quantize(x.mT, column, row, column_scale, row_scale, amax), 0 if column is None else 2)
    x = x if x.stride(-1) == 1 else x.contiguous()
    source = _Source.of((x,))
    line_amaxes = _line_amaxes(source, row, column)
    scaled = ((row, row_scale), (column, column_scale))
    by_amax = any(spec is not None and spec.row.family == "per_tensor" and scale is None for spec, scale in scaled)
    tensor_amax = amax(x) if by_amax else None
    rowwise = _make_side(source, row, row_scale, tensor_amax, line_amaxes[0], columnwise=False)
    columnwise = _make_side(source, column, column_scale, tensor_amax, line_amaxes[1], columnwise=True)
    _launch(source, rowwise, columnwise, None)
    return [*rowwise.parts(0), *columnwise.parts(0)]


def produce(
    name: str, inputs: Sequence[Tensor], row: QuantSpec | None, column: QuantSpec | None,
    row_scales: Sequence[Tensor | None], column_scales: Sequence[Tensor | None], record: bool | Record,
) -> list[Tensor]:  # fmt: skip
    """Returns the parts that `quantize` gives for each result of a producer, which is not written itself.

    With `record` its amax follows; where `record` says where amaxes go, they are not returned.

    The inputs are dense, none is empty, and all matrices have one dtype. Amaxes that scales are made of are taken in a
    pass of its own, with the same arithmetic.
    """
    source = _Source.of(inputs, name)
    results, tensor_amax = source.results, None
    recorded = Record(source.zeros(results)) if record is True else record or None
    scaled = ((row, row_scales), (column, column_scales))
    if any(spec is not None and spec.row.family == "per_tensor" and None in scales for spec, scales in scaled):
        if results == 2:
            tensor_amax = triton_producers.pair_amax(name, inputs)
        else:
            tensor_amax = source.zeros(results)
            nothing = _Side(source.unread, source.unread, source.unread)
            _launch(source, nothing, nothing, Record(tensor_amax))
    line_amaxes = _line_amaxes(source, row, column)
    row_scale = _in_one(row_scales)
    column_scale = row_scale if all(map(operator.is_, row_scales, column_scales)) else _in_one(column_scales)
    rowwise = _make_side(source, row, row_scale, tensor_amax, line_amaxes[0], columnwise=False)
    columnwise = _make_side(source, column, column_scale, tensor_amax, line_amaxes[1], columnwise=True)
    _launch(source, rowwise, columnwise, recorded)
    parts = []
    # both directions then have one scale, of which another part of a tensor would be one more copy
    one_scale = row == column and row_scale is column_scale and rowwise.scale.shape == (results,)
    for result in range(results):
        of_row, of_column = rowwise.parts(result), columnwise.parts(result)
        parts += [*of_row, of_column[0], of_row[1]] if one_scale else [*of_row, *of_column]
        parts += [recorded.amaxes.narrow(0, result, 1)] if record is True and recorded is not None else []
    return parts


def _in_one(scales: Sequence[Tensor | None]) -> Tensor | None:
    """Returns the multipliers [1] of all results as one tensor."""
    multipliers = [scale for scale in scales if scale is not None]
    return torch.cat(multipliers) if len(multipliers) > 1 else multipliers[0] if multipliers else None


def _launch(source: _Source, rowwise: _Side, columnwise: _Side, record: Record | None) -> None:
    """Casts the results of a source in the directions that are wanted."""
    size_m, size_k = source.shape
    column_units, row_units = columnwise.units(size_m), rowwise.units(size_k)
    lanes_k, lanes_m, warps_k, warps_m, thread_rows = layout = tile_layout(rowwise.spec, columnwise.spec)
    specs = [spec for spec in (rowwise.spec, columnwise.spec) if spec is not None]
    # scales of blocks, or of lines, take the registers that a second result would
    at_once = source.results > 1 and all(spec.row.family == "per_tensor" for spec in specs)
    rows = 16 * column_units
    if any(spec.swizzled for spec in specs):
        rows = padded_sizes(rows, 0)[0]  # tiles of scales are written whole
    tiles_down = triton.cdiv(rows, thread_rows * lanes_m * warps_m)
    tiles = tiles_down * triton.cdiv(16 * row_units, 4 * lanes_k * warps_k)
    recorded = step = source.unread
    if record is not None:
        recorded, step = record.amaxes, step if record.step is None else record.step
    wrap_triton(cast_kernel)[(tiles if at_once else tiles * source.results,)](
        *source.arguments, recorded, step, rowwise.data, rowwise.scale, rowwise.arg, columnwise.data, columnwise.scale,
        columnwise.arg, size_m, size_k, column_units, row_units, source.x.stride(0), rowwise.scale_size,
        columnwise.scale_size, *rowwise.scale_place, *columnwise.scale_place, rowwise.constants, columnwise.constants,
        *source.constants, at_once, None if record is None else record.constants(source.results), layout,
        num_warps=warps_k * warps_m,
    )  # fmt: skip


def tile_layout(row: QuantSpec | None, column: QuantSpec | None) -> tuple[int, int, int, int, int]:
    """Returns LAYOUT: threads across and down, warps across and down, and rows of a thread (16 or 8).

    The quickest of those tried (docs/measurements/linear.md).
    """
    families = {spec.row.family for spec in (row, column) if spec is not None}
    if column is None and row is not None and row.row.family == "block" and row.row.block[0] == 1:
        return 32, 1, 1, 4, 8  # a block lies in one warp, whose lanes take its amax without the others
    if "block" in families:
        return 16, 2, 2, 4, 16
    return (8, 4, 4, 2, 8) if "mxfp8" in families else (16, 2, 2, 2, 16)


def _line_amaxes(source: _Source, row: QuantSpec | None, column: QuantSpec | None) -> tuple[Tensor, Tensor]:
    """Returns the amaxes [M] of rows and [K] of columns, of all results, where a direction is scaled by them."""
    by_row, by_column = (s is not None and s.row.family == "per_row" for s in (row, column))
    if not by_row and not by_column:
        return source.unread, source.unread
    (size_m, size_k), results = source.shape, source.results
    row_amax, column_amax = (
        source.zeros(results * size_m if by_row else 1),
        source.zeros(results * size_k if by_column else 1),
    )
    steps, warps, rows = _AMAX_LAYOUT if triton_producers.reads(source.producer) else _AMAX_LAYOUT_OF_PRODUCERS
    grid = (triton.cdiv(size_m, steps * warps * rows) * triton.cdiv(size_k, 256),)
    wrap_triton(amax_kernel)[grid](
        *source.arguments, row_amax, column_amax, size_m, size_k, source.x.stride(0), by_row, by_column, steps,
        *source.constants, warps, rows, num_warps=warps,
    )  # fmt: skip
    return row_amax, column_amax


def _make_side(
    source: _Source, spec: QuantSpec | None, multiplier: Tensor | None, tensor_amax: Tensor | None,
    line_amax: Tensor, *, columnwise: bool,
) -> _Side:  # fmt: skip
    """Makes the outputs and arguments of one direction."""
    if spec is None:
        return _Side(source.unread, source.unread, source.unread)
    x, results, row = source.x, source.results, spec.row
    element = row.element
    assert element is not None and row.scale_dtype is not None
    rows, length = source.shape[::-1] if columnwise else source.shape
    padded = triton.cdiv(length, row.alignment) * row.alignment
    data = torch.empty((results * rows, padded), dtype=element.dtype, device=x.device)
    constants = side_constants(spec, source.dtype, columnwise=columnwise, multiplier=multiplier is not None)
    block_rows, block_columns = row.block
    if row.family == "per_tensor":
        arg = multiplier if multiplier is not None else tensor_amax
        assert arg is not None
        scale = torch.empty(results, dtype=torch.float32, device=x.device)
        return _Side(data, scale, arg, spec, constants, results=results)
    if row.family == "per_row":
        scale = torch.empty((results * rows, 1), dtype=torch.float32, device=x.device)
        return _Side(data, scale, line_amax, spec, constants, results=results)
    repeated = row.family == "mxfp8"
    scale_rows = rows if repeated or block_rows == 1 else triton.cdiv(rows, block_rows)
    scale_columns = padded // block_columns
    if spec.swizzled:
        scale_rows, scale_columns = padded_sizes(scale_rows, scale_columns)
        scale = torch.empty((results * scale_rows, scale_columns), dtype=torch.uint8, device=x.device)
        sizes = (scale_columns, scale_rows) if columnwise else (scale_rows, scale_columns)
        return _Side(data, scale, source.unread, spec, constants, (*sizes, 0, 0), False, results)
    # what lies beside each other in a tile lies so in memory: sectors shared with other tiles cost more than payloads
    transposed = repeated or block_rows == 1
    shape = (results * scale_columns, scale_rows) if transposed else (results * scale_rows, scale_columns)
    scale = torch.empty(shape, dtype=torch.uint8 if repeated else torch.float32, device=x.device)
    row_step, column_step = (1, scale_rows) if transposed else (scale_columns, 1)
    place = (scale_rows, scale_columns, row_step, column_step)
    if columnwise:
        place = (scale_columns, scale_rows, column_step, row_step)
    return _Side(data, scale, source.unread, spec, constants, place, transposed, results)
