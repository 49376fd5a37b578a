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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from fxquant.compat.patches import declare_written
from fxquant.formats import QuantSpec
from fxquant.kernels.cast import reference, triton_producers
from fxquant.kernels.cast.codes import codes
from fxquant.kernels.cast.producers import PRODUCERS
from fxquant.kernels.cast.triton_producers import load_pair, load_tile
from fxquant.kernels.cast.triton_scales import NONE, PER_ROW, side_constants, side_factors
from fxquant.kernels.cast.triton_tile import axis_range, four_columns, raise_columns, raise_rows

_UNRECORDED, _RECORD, _SINCE = (tl.constexpr(i) for i in range(3))
"""Amaxes are not taken, or as in `delayed.record`, or as in `delayed.record_since`."""
_AMAX_LAYOUT, _AMAX_LAYOUT_OF_PRODUCERS = (16, 2, 8), (8, 2, 4)
"""Steps down, warps below each other and rows of a thread in the kernel of amaxes."""


@triton.jit
def cast_kernel(
    x, in1, in2, in3, in4, recorded, step, row_data, row_scale, row_arg, column_data, column_scale, column_arg,
    M, K, column_units, row_units, x_step, row_scale_size, column_scale_size,
    row_scale_rows, row_scale_columns, row_scale_step, row_scale_column_step,
    column_scale_rows, column_scale_columns, column_scale_step, column_scale_column_step,
    ROW_KIND: tl.constexpr, ROW_P: tl.constexpr, ROW_Q: tl.constexpr, ROW_FMAX: tl.constexpr, ROW_LOG: tl.constexpr,
    ROW_MANTISSA: tl.constexpr, ROW_MODE: tl.constexpr, ROW_LARGEST: tl.constexpr, ROW_EPS: tl.constexpr,
    ROW_POW2: tl.constexpr, ROW_TORCHAO_BELOW: tl.constexpr, ROW_TORCHAO_MOST: tl.constexpr,
    COLUMN_KIND: tl.constexpr, COLUMN_P: tl.constexpr, COLUMN_Q: tl.constexpr, COLUMN_FMAX: tl.constexpr,
    COLUMN_LOG: tl.constexpr, COLUMN_MANTISSA: tl.constexpr, COLUMN_MODE: tl.constexpr,
    COLUMN_LARGEST: tl.constexpr, COLUMN_EPS: tl.constexpr, COLUMN_POW2: tl.constexpr,
    COLUMN_TORCHAO_BELOW: tl.constexpr, COLUMN_TORCHAO_MOST: tl.constexpr,
    PRODUCER: tl.constexpr, S: tl.constexpr, D: tl.constexpr, RESULTS: tl.constexpr, AT_ONCE: tl.constexpr,
    RECORD: tl.constexpr, RECORD_FIRST: tl.constexpr, RECORD_NEXT: tl.constexpr,
    LK: tl.constexpr, LM: tl.constexpr, WK: tl.constexpr, WM: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """One tile of x [M, K], of R * LM * WM rows and 4 * LK * WK columns.

    A thread has R rows of four columns. In a warp LK threads stand side by side and LM one below the other; WK and WM
    warps likewise. A tile is a tensor [LK, LM, WK, WM, R] for each of the four columns: in that order the layouts
    that Triton gives to loads and stores are all the same one, so that a payload is transposed in registers, and an
    amax of R rows is taken in them.

    A PRODUCER makes what is cast from x and more inputs. The outputs of two RESULTS lie one behind the other; a
    program makes both AT_ONCE, or the next one makes the second and finds the inputs in the cache. RECORD takes the
    amax of each, NaN ignored, into `recorded`: that of the first from RECORD_FIRST on, the next RECORD_NEXT further.
    What is there is as in `delayed.record`, or with _SINCE as in `delayed.record_since`.

    The scales of a side are given in tile order, rows along M. Payloads are padded to `row_units` and `column_units`
    of 16 bytes, a factor that the compiler sees in the alignment of stores.
    """
    LAYOUT: tl.constexpr = (LK, LM, WK, WM, R)
    ROW: tl.constexpr = (
        ROW_KIND, ROW_P, ROW_Q, ROW_FMAX, ROW_LOG, ROW_MANTISSA, ROW_MODE, ROW_LARGEST, ROW_EPS, ROW_POW2,
        ROW_TORCHAO_BELOW, ROW_TORCHAO_MOST,
    )  # fmt: skip
    COLUMN: tl.constexpr = (
        COLUMN_KIND, COLUMN_P, COLUMN_Q, COLUMN_FMAX, COLUMN_LOG, COLUMN_MANTISSA, COLUMN_MODE, COLUMN_LARGEST,
        COLUMN_EPS, COLUMN_POW2, COLUMN_TORCHAO_BELOW, COLUMN_TORCHAO_MOST,
    )  # fmt: skip
    padded_M = column_units * 16
    padded_K = row_units * 16
    program, first_result = tl.program_id(0), 0
    if RESULTS == 2 and not AT_ONCE:
        program, first_result = program // 2, program % 2
    tiles_across = tl.cdiv(padded_K, 4 * LK * WK)
    first_row = (program // tiles_across) * (R * LM * WM)
    first_column = (program % tiles_across) * (4 * LK * WK)
    first_down = (axis_range(WM, 3) * LM + axis_range(LM, 1)) * R
    down = first_down + axis_range(R, 4)
    across = (axis_range(WK, 2) * LK + axis_range(LK, 0)) * 4
    down_6, across_6 = tl.expand_dims(down, 5), tl.expand_dims(across, 5) + axis_range(4, 5, 6)
    if AT_ONCE:
        tiles = load_pair(x, in1, in2, x_step, first_row, first_column, down_6, across_6, M, K, PRODUCER)
    else:
        tiles = (
            load_tile(
                x, in1, in2, in3, in4, x_step, first_row, first_column, down_6, across_6, M, K, first_result, PRODUCER,
                S, D,
            ),
        )  # fmt: skip
    for i in tl.static_range(2 if AT_ONCE else 1):
        result = first_result + i
        parts = four_columns(tiles[i].to(tl.float32), R, LAYOUT)
        if RECORD:
            a, b, c, d = parts
            largest = tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))
            bits = tl.maximum(tl.max(largest), 0.0).to(tl.int32, bitcast=True)
            place = RECORD_FIRST + result * RECORD_NEXT
            if RECORD == _SINCE:
                tl.atomic_max(recorded + place, (tl.load(step) << 32) + bits.to(tl.int64), sem="relaxed")
            else:
                tl.atomic_max(recorded.to(tl.pointer_type(tl.int32), bitcast=True) + place, bits, sem="relaxed")
        if ROW_KIND != NONE:
            factors = side_factors(
                parts, row_arg + result * (M if ROW_KIND == PER_ROW else 1), row_scale + result * row_scale_size,
                row_scale_rows, row_scale_columns, row_scale_step, row_scale_column_step, first_row, first_column, down,
                across, M, K, False, ROW, LAYOUT,
            )  # fmt: skip
            a, b, c, d = parts
            words = codes(a * factors[0], b * factors[1], c * factors[2], d * factors[3], ROW_MANTISSA == 2)
            out = row_data.to(tl.pointer_type(tl.uint32), bitcast=True)
            out += ((first_row.to(tl.int64) + result * M) * padded_K + first_column) // 4
            # a word for each thread: told that they are contiguous, Triton would exchange them between threads first
            place = tl.max_contiguous(down * (padded_K // 4) + across // 4, [1, 1, 1, 1, 1])
            tl.store(out + place, words, mask=(first_row + down < M) & (first_column + across < padded_K))
        if COLUMN_KIND != NONE:
            factors = side_factors(
                parts, column_arg + result * (K if COLUMN_KIND == PER_ROW else 1),
                column_scale + result * column_scale_size, column_scale_rows, column_scale_columns, column_scale_step,
                column_scale_column_step, first_row, first_column, down, across, M, K, True, COLUMN, LAYOUT,
            )  # fmt: skip
            out = column_data.to(tl.pointer_type(tl.uint32), bitcast=True)
            out += ((first_column.to(tl.int64) + result * K) * padded_M + first_row) // 4
            for j in tl.static_range(4):
                a, b, c, d = four_columns(parts[j] * factors[j], R // 4, LAYOUT)
                words = codes(a, b, c, d, COLUMN_MANTISSA == 2)
                place = (across + j) * (padded_M // 4) + first_down // 4 + axis_range(R // 4, 4)
                mask = (first_column + across + j < K) & (first_row + first_down < padded_M)
                tl.store(out + place, words, mask=mask)


@triton.jit
def amax_kernel(
    x, in1, in2, in3, in4, row_amax, column_amax, M, K, x_step, ROW: tl.constexpr, COLUMN: tl.constexpr,
    STEPS: tl.constexpr, PRODUCER: tl.constexpr, S: tl.constexpr, D: tl.constexpr, RESULTS: tl.constexpr,
    W: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """The amaxes of the rows and of the columns of x [M, K], NaN ignored, into zeroed float32 buffers.

    Or those of what a PRODUCER makes, as in `cast_kernel`.

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
            first, second = load_pair(x, in1, in2, x_step, row, first_column, down, across, M, K, PRODUCER)
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
    """Where the amaxes [results] of what a cast makes go: float32, or int64 with the `step` [1] that writes them."""

    amaxes: Tensor
    step: Tensor | None = None
    from_last: bool = False
    """Whether the amax of the first result goes to the last entry."""

    def constants(self, results: int) -> tuple[int, int, int]:
        """What the kernel is told: RECORD, RECORD_FIRST and RECORD_NEXT."""
        apart = self.amaxes.stride(0)
        kind = _RECORD.value if self.step is None else _SINCE.value
        return (kind, (results - 1) * apart, -apart) if self.from_last else (kind, 0, apart)


@dataclass(frozen=True)
class _Side:
    """One direction of a cast: its outputs, and what the kernel is told."""

    data: Tensor
    scale: Tensor
    """As it lies in memory."""
    arg: Tensor
    constants: tuple[Any, ...]
    scale_shape: tuple[Any, Any] = (0, 0)
    """Scales along M and along K."""
    scale_steps: tuple[Any, Any] = (0, 0)
    """Their strides."""
    transposed: bool = False
    """Whether the scales lie transposed."""
    results: int = 1
    """How many tensors are cast; theirs lie one behind the other. 0: a direction that is not wanted."""

    @property
    def scale_size(self) -> Any:
        """Scales of one result."""
        return self.scale.shape[0] * self.scale.stride(0) // self.results if self.results else 0

    def parts(self, result: int) -> list[Tensor]:
        if self.results < 2:
            return [self.data, self.scale.t() if self.transposed else self.scale] if self.results else []
        rows, scale_rows = self.data.shape[0] // self.results, self.scale.shape[0] // self.results
        data = self.data.narrow(0, result * rows, rows)
        scale = self.scale.narrow(0, result * scale_rows, scale_rows)
        if scale_rows == 1:  # Inductor's GEMMs take no part of a tensor for a scale, and cuBLAS none that is unaligned
            scale = scale.clone()
        return [data, scale.t() if self.transposed else scale]


def quantize(
    x: Tensor, row: QuantSpec | None, column: QuantSpec | None, row_scale: Tensor | None = None,
    column_scale: Tensor | None = None, amax: Callable[[Tensor], Tensor] = reference.amax,
) -> list[Tensor]:  # fmt: skip
    """The parts of `reference.quantize` of x [M, K] rowwise and then of x.mT columnwise; None leaves a direction out.

    `row_scale` and `column_scale` [1] are multipliers to use in the place of the tensor's own (per-tensor formats).
    `amax` takes the amax [1] of a tensor. x is not empty, and float32, bfloat16 or float16. Block scales of 1x128 lie
    transposed in memory, as cuBLAS wants them, and those of MX too.
    """
    if x.stride(-1) != 1:
        if x.stride(-2) == 1:  # a matrix stored by columns: the same with the directions exchanged
            swapped = quantize(x.mT, column, row, column_scale, row_scale, amax)
            count = 0 if column is None else 2
            return [*swapped[count:], *swapped[:count]]
        x = x.contiguous()
    unread = _unread(x)
    row_amax, column_amax = _line_amaxes((x,), None, row, column, unread)
    tensor_amax = None
    if any(s is not None and s.row.family == "per_tensor" and g is None
           for s, g in ((row, row_scale), (column, column_scale))):  # fmt: skip
        tensor_amax = amax(x)
    shape = x.shape[0], x.shape[1]
    left = _make_side(x, shape, row, row_scale, tensor_amax, row_amax, unread, columnwise=False)
    right = _make_side(x, shape, column, column_scale, tensor_amax, column_amax, unread, columnwise=True)
    _launch((x,), None, row, column, left, right, None, unread)
    return [*left.parts(0), *right.parts(0)]


def produce(
    name: str, inputs: Sequence[Tensor], row: QuantSpec | None, column: QuantSpec | None,
    row_scales: Sequence[Tensor | None], column_scales: Sequence[Tensor | None], record: bool | Record,
) -> list[Tensor]:  # fmt: skip
    """What `quantize` gives for each result of a producer, which is not written itself, then with `record` its amax.

    Where `record` says where amaxes go, they are not returned.

    The inputs are dense, none is empty, and all matrices have one dtype. Amaxes that scales are made of are taken in a
    pass of its own, with the same arithmetic.
    """
    x, results = inputs[0], PRODUCERS[name].results
    shape = PRODUCERS[name].shape(x)
    unread = _unread(x)
    recorded, tensor_amax = record if isinstance(record, Record) else None, None
    own = [spec for spec, given in ((row, row_scales), (column, column_scales)) if spec is not None and None in given]
    if record is True:
        recorded = Record(torch.zeros(results, dtype=torch.float32, device=x.device))
    if any(spec.row.family == "per_tensor" for spec in own) and results == 2:
        tensor_amax = triton_producers.pair_amax(name, inputs)
    elif any(spec.row.family == "per_tensor" for spec in own):
        tensor_amax = torch.zeros(results, dtype=torch.float32, device=x.device)
        nothing = _make_side(x, shape, None, None, None, unread, unread, columnwise=False)
        _launch(inputs, name, None, None, nothing, nothing, Record(tensor_amax), unread)
    row_amax, column_amax = _line_amaxes(inputs, name, row, column, unread)
    row_scale = _in_one(row_scales)
    column_scale = row_scale if all(map(operator.is_, row_scales, column_scales)) else _in_one(column_scales)
    left = _make_side(x, shape, row, row_scale, tensor_amax, row_amax, unread, columnwise=False, results=results)
    right = _make_side(
        x, shape, column, column_scale, tensor_amax, column_amax, unread, columnwise=True, results=results
    )
    _launch(inputs, name, row, column, left, right, recorded, unread)
    parts = []
    # both directions then have one scale, of which another part of a tensor would be one more copy
    one_scale = row == column and row_scale is column_scale and left.scale.shape == (results,)
    for result in range(results):
        of_row, of_column = left.parts(result), right.parts(result)
        parts += [*of_row, of_column[0], of_row[1]] if one_scale else [*of_row, *of_column]
        parts += [recorded.amaxes.narrow(0, result, 1)] if record is True and recorded is not None else []
    return parts


def _in_one(scales: Sequence[Tensor | None]) -> Tensor | None:
    """The multipliers [1] of all results as one tensor."""
    given = [scale for scale in scales if scale is not None]
    return torch.cat(given) if len(given) > 1 else given[0] if given else None


def _launch(
    inputs: Sequence[Tensor], producer: str | None, row: QuantSpec | None, column: QuantSpec | None, left: _Side,
    right: _Side, record: Record | None, unread: Tensor,
) -> None:  # fmt: skip
    """Casts what is made of the inputs."""
    x = inputs[0]
    results = 1 if producer is None else PRODUCERS[producer].results
    size_m, size_k = x.shape if producer is None else PRODUCERS[producer].shape(x)
    column_units = _cdiv(right.data.shape[-1] if column is not None else size_m, 16)
    row_units = _cdiv(left.data.shape[-1] if row is not None else size_k, 16)
    lanes_k, lanes_m, warps_k, warps_m, thread_rows = layout = tile_layout(row, column)
    # scales of blocks, or of lines, take the registers that a second result would
    at_once = results > 1 and all(spec.row.family == "per_tensor" for spec in (row, column) if spec is not None)
    tiles = _cdiv(16 * column_units, thread_rows * lanes_m * warps_m) * _cdiv(16 * row_units, 4 * lanes_k * warps_k)
    grid = (tiles if at_once else tiles * results,)
    recorded, step, constants = unread, unread, (_UNRECORDED.value, 0, 0)
    if record is not None:
        recorded, step = record.amaxes, unread if record.step is None else record.step
        constants = record.constants(results)
    wrap_triton(cast_kernel)[grid](
        *triton_producers.filled(inputs, unread), recorded, step, left.data, left.scale, left.arg, right.data,
        right.scale, right.arg, size_m, size_k, column_units, row_units, x.stride(0), left.scale_size, right.scale_size,
        *left.scale_shape, *left.scale_steps, *right.scale_shape, *right.scale_steps,
        *left.constants, *right.constants, *triton_producers.kind(producer, x), results, at_once,
        *constants, *layout, num_warps=warps_k * warps_m,
    )  # fmt: skip


def _unread(x: Tensor) -> Tensor:
    """What stands for arguments that a kernel does not read: of x itself Inductor would write a copy for each."""
    return torch.empty(1, dtype=torch.float32, device=x.device)


def _cdiv(size: Any, by: int) -> Any:
    return (size + by - 1) // by


def tile_layout(row: QuantSpec | None, column: QuantSpec | None) -> tuple[int, int, int, int, int]:
    """Threads across and down, warps across and down, and rows of a thread (16 or 8).

    The quickest of those tried (docs/performance.md).
    """
    families = {spec.row.family for spec in (row, column) if spec is not None}
    if "block" in families:
        return 16, 2, 2, 4, 16
    return (8, 4, 4, 2, 8) if "mxfp8" in families else (16, 2, 2, 2, 16)


def _line_amaxes(
    inputs: Sequence[Tensor], producer: str | None, row: QuantSpec | None, column: QuantSpec | None, unread: Tensor
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The amaxes [M] of rows and [K] of columns, of all results, where a direction is scaled by them."""
    x = inputs[0]
    results = 1 if producer is None else PRODUCERS[producer].results
    by_row, by_column = (s is not None and s.row.family == "per_row" for s in (row, column))
    if not by_row and not by_column:
        return unread, unread
    size_m, size_k = x.shape if producer is None else PRODUCERS[producer].shape(x)
    row_amax = torch.zeros(results * size_m if by_row else 1, dtype=torch.float32, device=x.device)
    column_amax = torch.zeros(results * size_k if by_column else 1, dtype=torch.float32, device=x.device)
    steps, warps, rows = _AMAX_LAYOUT if triton_producers.reads(producer) else _AMAX_LAYOUT_OF_PRODUCERS
    grid = (_cdiv(size_m, steps * warps * rows) * _cdiv(size_k, 256),)
    wrap_triton(amax_kernel)[grid](
        *triton_producers.filled(inputs, unread), row_amax, column_amax, size_m, size_k, x.stride(0), by_row, by_column,
        steps, *triton_producers.kind(producer, x), results, warps, rows, num_warps=warps,
    )  # fmt: skip
    return row_amax, column_amax


def _make_side(
    x: Tensor, shape: tuple[Any, Any], spec: QuantSpec | None, given: Tensor | None, tensor_amax: Tensor | None,
    line_amax: Tensor, unread: Tensor, *, columnwise: bool, results: int = 1,
) -> _Side:  # fmt: skip
    """Outputs and arguments of one direction of matrices of a shape, made of x."""
    if spec is None:
        return _Side(unread, unread, unread, side_constants(None, x.dtype), results=0)
    row = spec.row
    element = row.element
    assert element is not None and row.scale_dtype is not None
    rows, length = shape[::-1] if columnwise else shape
    padded = _cdiv(length, row.alignment) * row.alignment
    data = torch.empty((results * rows, padded), dtype=element.dtype, device=x.device)
    constants = side_constants(spec, x.dtype, columnwise=columnwise, given=given is not None)
    block_rows, block_columns = row.block
    if row.family == "per_tensor":
        arg = given if given is not None else tensor_amax
        assert arg is not None
        scale = torch.empty(results, dtype=torch.float32, device=x.device)
        return _Side(data, scale, arg, constants, results=results)
    if row.family == "per_row":
        scale = torch.empty((results * rows, 1), dtype=torch.float32, device=x.device)
        return _Side(data, scale, line_amax, constants, results=results)
    repeated = row.family == "mxfp8"
    scale_rows = rows if repeated or block_rows == 1 else _cdiv(rows, block_rows)
    scale_columns = padded // block_columns
    dtype = torch.uint8 if repeated else torch.float32
    # what lies beside each other in a tile lies so in memory: sectors shared with other tiles cost more than payloads
    transposed = repeated or block_rows == 1
    shape = (results * scale_columns, scale_rows) if transposed else (results * scale_rows, scale_columns)
    scale = torch.empty(shape, dtype=dtype, device=x.device)
    steps = (1, scale_rows) if transposed else (scale_columns, 1)
    if columnwise:
        return _Side(data, scale, unread, constants, (scale_columns, scale_rows), steps[::-1], transposed, results)
    return _Side(data, scale, unread, constants, (scale_rows, scale_columns), steps, transposed, results)


def written(arguments: Mapping[str, Any]) -> list[str]:
    """The names of the arguments that a launch of a kernel of this file writes."""
    names = []
    for side in ("row", "column"):
        if arguments.get(f"{side.upper()}_KIND", arguments.get(side.upper())):
            names += [name for name in (f"{side}_data", f"{side}_scale", f"{side}_amax") if name in arguments]
    return [*names, "recorded"] if arguments.get("RECORD") else names


declare_written(cast_kernel, written)
declare_written(amax_kernel, written)
