# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Triton kernels that quantize groups of rows in one or both directions from one read.

The bytes are those of `fxquant.kernels.grouped_reference.quantize`. A tile is read once, and starts with its group:
columnwise payloads and blocks are laid out in the padded rows, rowwise ones where the rows are. The tile that a program
has is looked up in tables that hold any split, since offsets are known on the device alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from fxquant.compat import declare_written
from fxquant.formats import MX_MODES, QuantSpec
from fxquant.kernels import grouped_reference, reference, triton_cast
from fxquant.kernels.triton_codes import TORCHAO_BELOW, TORCHAO_FLOOR, four, in_words, magnitude, multiplier, word

_NONE, _GIVEN, _PER_ROW, _BLOCK, _MX = (tl.constexpr(i) for i in range(5))
"""How a side is scaled: not wanted, by a multiplier for each group, from the amax of each row, or in blocks."""
_KINDS = {"per_tensor": _GIVEN, "per_row": _PER_ROW, "block": _BLOCK, "mxfp8": _MX}
_RCEIL, _FLOOR, _CEIL, _EVEN = (tl.constexpr(i) for i in range(4))
assert MX_MODES == ("rceil", "floor", "ceil", "even")
_STRIP = 128
"""Rows that the tables count in."""


@triton.jit
def _e8m0(amax, FMAX: tl.constexpr, LOG: tl.constexpr, MANTISSA: tl.constexpr, MODE: tl.constexpr):
    """`reference.e8m0_from_amax`."""
    if MODE == _RCEIL:
        bits = (amax * (1.0 / FMAX)).to(tl.int32, bitcast=True)
        code = tl.where(bits <= 0x00400000, 0, tl.minimum((bits + 0x7FFFFF) >> 23, 254))
    else:
        bits = amax.to(tl.int32, bitcast=True)
        if MODE == _CEIL:
            bits = bits + 0x7FFFFF
        elif MODE == _EVEN:
            bits = bits + (1 << (22 - MANTISSA))
        code = tl.maximum((bits >> 23) - LOG, 0)
    return code


@triton.jit
def _block_amax(x, P: tl.constexpr, Q: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """The amaxes of blocks of P rows and Q columns: [BM / P, BN / Q]."""
    amax = magnitude(x)
    if Q > 1:
        amax = tl.max(tl.reshape(amax, (BM, BN // Q, Q)), axis=2)
    if P > 1:
        amax = tl.max(tl.reshape(amax, (BM // P, P, BN // Q)), axis=1)
    return amax


@triton.jit
def _scaled(x, factor, P: tl.constexpr, Q: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """x [BM, BN] times factor [BM / P, BN / Q] of its blocks."""
    if P == 1:
        y = tl.reshape(tl.reshape(x, (BM, BN // Q, Q)) * tl.expand_dims(factor, 2), (BM, BN))
    elif Q == 1:
        y = tl.reshape(tl.reshape(x, (BM // P, P, BN)) * tl.expand_dims(factor, 1), (BM, BN))
    else:  # the tile is one block
        y = x * factor
    return y


@triton.jit
def _side(
    x, arg, scale, rows, columns, row_step, column_step, first_row, first_column, length, COLUMN: tl.constexpr,
    KIND: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, FMAX: tl.constexpr, LOG: tl.constexpr,
    MANTISSA: tl.constexpr, MODE: tl.constexpr, LARGEST: tl.constexpr, EPS: tl.constexpr, POW2: tl.constexpr,
    TORCHAO_BELOW: tl.constexpr, TORCHAO_MOST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Scales the tile x for one side and stores its scales: `scale` has `rows` x `columns` of them in tile order.

    `length` is that of `arg`, the amaxes per row (or column) of x.
    """
    if KIND == _GIVEN:
        one = tl.load(arg)
        if (first_row == 0) & (first_column == 0):
            tl.store(scale, tl.div_rn(1.0, one))
        y = x * one
    elif KIND == _PER_ROW:
        if COLUMN:
            at = first_column + tl.arange(0, BN)
            first = first_row
        else:
            at = first_row + tl.arange(0, BM)
            first = first_column
        factor = multiplier(
            tl.load(arg + at, mask=at < length, other=1.0), FMAX, LARGEST, EPS, POW2, TORCHAO_BELOW, TORCHAO_MOST
        )
        if first == 0:
            tl.store(scale + at, tl.div_rn(1.0, factor), mask=at < length)
        y = x * tl.expand_dims(factor, 0 if COLUMN else 1)
    else:
        amax = _block_amax(x, P, Q, BM, BN)
        if KIND == _BLOCK:
            factor = multiplier(amax, FMAX, LARGEST, EPS, POW2, TORCHAO_BELOW, TORCHAO_MOST)
            stored = tl.div_rn(1.0, factor)
            at_row = first_row // P + tl.arange(0, BM // P)
            at_column = first_column // Q + tl.arange(0, BN // Q)
        else:
            code = _e8m0(amax, FMAX, LOG, MANTISSA, MODE)
            factor = tl.maximum((254 - code) << 23, 0x00400000).to(tl.float32, bitcast=True)
            stored = code.to(tl.uint8)
            at_row = first_row // P + tl.arange(0, BM // P)
            at_column = first_column // Q + tl.arange(0, BN // Q)
        place = at_row[:, None].to(tl.int64) * row_step + at_column[None, :].to(tl.int64) * column_step
        tl.store(scale + place, stored, mask=(at_row[:, None] < rows) & (at_column[None, :] < columns))
        y = _scaled(x, factor, P, Q, BM, BN)
    return y


@triton.jit
def _group(strip, strip_group, first_strips, starts, ends, padded_ends, G, rows, padded_rows, STRIP: tl.constexpr,
           BATCH: tl.constexpr):  # fmt: skip
    """Of a strip: its group, its first row in the group, the group's first row and end, and first and end padded."""
    if BATCH:
        per_group = tl.cdiv(padded_rows, STRIP)
        group = strip // per_group
        local = (strip % per_group) * STRIP
        start = group * rows
        end = start + rows
        padded_start = 0
        padded_end = padded_rows
    else:
        group = tl.load(strip_group + strip)
        here = group <= G
        local = (strip - tl.load(first_strips + group, mask=here, other=0)) * STRIP
        start = tl.load(starts + group, mask=here, other=0)
        end = tl.load(ends + group, mask=here, other=0)
        padded_start = tl.load(padded_ends + group - 1, mask=here & (group > 0), other=0)
        padded_end = tl.load(padded_ends + group, mask=here, other=0)
    return group, local, start, end, padded_start, padded_end


@triton.jit
def grouped_amax_kernel(
    x, row_amax, column_amax, strip_group, first_strips, starts, ends, padded_ends, G, rows, padded_rows, K, x_step,
    ROW: tl.constexpr, COLUMN: tl.constexpr, BATCH: tl.constexpr, STRIP: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """The amaxes of the rows [M], and of the columns of each group [G, K], NaN ignored, into zeroed float32 buffers."""
    tiles = tl.cdiv(K, BN)
    group, local, start, end, _, _ = _group(
        tl.program_id(0) // tiles, strip_group, first_strips, starts, ends, padded_ends, G, rows, padded_rows, STRIP,
        BATCH,
    )  # fmt: skip
    first = start + local
    if first >= end:
        return
    k = (tl.program_id(0) % tiles) * BN + tl.arange(0, BN)
    largest = tl.zeros((BM, BN), tl.float32)
    for step in range(STRIP // BM):
        m = first + step * BM + tl.arange(0, BM)
        inside = (m[:, None] < end) & (k[None, :] < K)
        tile = tl.load(x + (m[:, None].to(tl.int64) * x_step + k[None, :]), mask=inside, other=0.0)
        size = magnitude(tile.to(tl.float32))
        if ROW:
            bits = tl.max(size, axis=1).to(tl.int32, bitcast=True)
            tl.atomic_max(row_amax.to(tl.pointer_type(tl.int32), bitcast=True) + m, bits, mask=m < end, sem="relaxed")
        if COLUMN:
            largest = tl.maximum(largest, size)
    if COLUMN:
        bits = tl.max(largest, axis=0).to(tl.int32, bitcast=True)
        place = column_amax.to(tl.pointer_type(tl.int32), bitcast=True) + (group.to(tl.int64) * K + k)
        tl.atomic_max(place, bits, mask=k < K, sem="relaxed")


@triton.jit
def grouped_cast_kernel(
    x, row_data, row_scale, row_arg, column_data, column_scale, column_arg,
    strip_group, first_strips, starts, ends, padded_ends, G, rows, padded_rows, K, padded_K, x_step,
    column_step, column_group, row_scale_group, row_scale_rows, row_scale_columns, row_scale_step,
    row_scale_column_step, column_scale_group, column_scale_columns, column_scale_step,
    column_scale_column_step,
    ROW_KIND: tl.constexpr, ROW_P: tl.constexpr, ROW_Q: tl.constexpr, ROW_FMAX: tl.constexpr, ROW_LOG: tl.constexpr,
    ROW_MANTISSA: tl.constexpr, ROW_MODE: tl.constexpr, ROW_LARGEST: tl.constexpr, ROW_EPS: tl.constexpr,
    ROW_POW2: tl.constexpr, ROW_TORCHAO_BELOW: tl.constexpr, ROW_TORCHAO_MOST: tl.constexpr,
    COLUMN_KIND: tl.constexpr, COLUMN_P: tl.constexpr, COLUMN_Q: tl.constexpr, COLUMN_FMAX: tl.constexpr,
    COLUMN_LOG: tl.constexpr, COLUMN_MANTISSA: tl.constexpr, COLUMN_MODE: tl.constexpr,
    COLUMN_LARGEST: tl.constexpr, COLUMN_EPS: tl.constexpr, COLUMN_POW2: tl.constexpr,
    COLUMN_TORCHAO_BELOW: tl.constexpr, COLUMN_TORCHAO_MOST: tl.constexpr,
    SAME: tl.constexpr, BATCH: tl.constexpr, STRIP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One tile [BM, BN] of x [M, K], of which G groups of rows, and then the padding behind them, are quantized.

    The scales of a side are given in tile order, rows along M. A group's, and what they come from, are `*_scale_group`
    apart. With SAME both sides have the same multiplier for every element, and one payload serves both. Payloads are
    stored and transposed as words of four codes.
    """
    tiles = tl.cdiv(padded_K, BN)
    program = tl.num_programs(0) - 1 - tl.program_id(0)  # what the kernel of amaxes has read last is still in the cache
    row_tile = program // tiles
    group, local, start, end, padded_start, padded_end = _group(
        row_tile // (STRIP // BM), strip_group, first_strips, starts, ends, padded_ends, G, rows, padded_rows, STRIP,
        BATCH,
    )  # fmt: skip
    local += (row_tile % (STRIP // BM)) * BM
    padded_size = padded_end - padded_start
    if (group > G) | ((local >= padded_size) & (local > 0)):
        return
    first_row = start + local
    first_column = (program % tiles) * BN
    m = first_row + tl.arange(0, BM)
    k = first_column + tl.arange(0, BN)
    inside = (m[:, None] < end) & (k[None, :] < K)
    down, across = tl.arange(0, BM), tl.arange(0, BN)
    down_quads, across_quads = tl.arange(0, BM // 4), tl.arange(0, BN // 4)
    source = x + (first_row.to(tl.int64) * x_step + first_column)
    tile = tl.load(source + (down[:, None] * x_step + across[None, :]), mask=inside, other=0.0).to(tl.float32)
    known = tl.minimum(group, G - 1).to(tl.int64)
    once = local + (group == G).to(tl.int32)  # the padding behind the groups has no scales of its own
    if ROW_KIND != _NONE:
        row_at = first_row
        row_end = end
        if ROW_KIND == _GIVEN:
            row_at = once
            row_arg += known
        elif ROW_P > 1:
            row_at = local
            row_end = row_scale_rows
        y = _side(
            tile, row_arg, row_scale + known * row_scale_group, row_end, row_scale_columns, row_scale_step,
            row_scale_column_step, row_at, first_column, end, False, ROW_KIND, ROW_P, ROW_Q, ROW_FMAX, ROW_LOG,
            ROW_MANTISSA, ROW_MODE, ROW_LARGEST, ROW_EPS, ROW_POW2, ROW_TORCHAO_BELOW, ROW_TORCHAO_MOST, BM, BN,
        )  # fmt: skip
        words = in_words(y, ROW_MANTISSA == 2, BM, BN)
        out = row_data.to(tl.pointer_type(tl.uint32), bitcast=True)
        out += (first_row.to(tl.int64) * padded_K + first_column) // 4
        mask = (m[:, None] < end) & ((first_column + 4 * across_quads)[None, :] < padded_K)
        tl.store(out + (down[:, None] * (padded_K // 4) + across_quads[None, :]), words, mask=mask)
    if COLUMN_KIND != _NONE:
        column_at = once
        column_end = padded_end // COLUMN_P  # blocks behind are those of the next group
        if COLUMN_KIND == _BLOCK or COLUMN_KIND == _MX:
            column_at = padded_start + local
        else:
            column_arg += known * column_scale_group
        z = _side(
            tile, column_arg, column_scale + known * column_scale_group, column_end, column_scale_columns,
            column_scale_step, column_scale_column_step, column_at, first_column, K, True, COLUMN_KIND, COLUMN_P,
            COLUMN_Q, COLUMN_FMAX, COLUMN_LOG, COLUMN_MANTISSA, COLUMN_MODE, COLUMN_LARGEST, COLUMN_EPS, COLUMN_POW2,
            COLUMN_TORCHAO_BELOW, COLUMN_TORCHAO_MOST, BM, BN,
        )  # fmt: skip
        if not SAME:
            words = in_words(z, COLUMN_MANTISSA == 2, BM, BN)
        out = column_data.to(tl.pointer_type(tl.uint32), bitcast=True)
        out += (known * column_group + first_column.to(tl.int64) * column_step + padded_start + local) // 4
        a, b, c, d = four(tl.trans(words), BN // 4, BM // 4)
        for i in tl.static_range(4):
            k = 4 * across_quads + i
            mask = ((first_column + k)[:, None] < K) & ((local + 4 * down_quads)[None, :] < padded_size)
            tl.store(out + (k[:, None] * (column_step // 4) + down_quads[None, :]), word(a, b, c, d, 8 * i), mask=mask)


@triton.jit
def clear_kernel(cleared, offs, G, rows, size, WEIGHTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Zeros where a grouped GEMM wrote nothing: rows of `size` behind the last group, or [size] of an empty group.

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
class _Tables:
    """Where each strip's rows are: see `_group`."""

    strip_group: Tensor
    first_strips: Tensor
    starts: Tensor
    ends: Tensor
    padded_ends: Tensor
    strips: Any

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        return self.strip_group, self.first_strips, self.starts, self.ends, self.padded_ends


def _tables(offs: Tensor, padded_rows: Any, alignment: int) -> _Tables:
    """Every group has a strip, if only for its scales; what is behind the last group comes as one more."""
    groups = offs.shape[0]
    starts = torch.nn.functional.pad(offs, (1, 0))  # of the padding too
    ends = torch.cat([offs, offs[-1:]])
    padded = grouped_reference.padded_ends(offs, alignment)
    padded = torch.nn.functional.pad(padded, (0, 1), value=padded_rows)
    sizes = padded - torch.nn.functional.pad(padded[:-1], (1, 0))
    last = ((sizes + (_STRIP - 1)) // _STRIP).clamp(min=1).cumsum(0).to(torch.int32)
    strips = padded_rows // _STRIP + groups + 2
    group = torch.searchsorted(last, torch.arange(strips, dtype=torch.int32, device=offs.device), right=True)
    return _Tables(
        strip_group=group.to(torch.int32), first_strips=torch.nn.functional.pad(last[:-1], (1, 0)), starts=starts,
        ends=ends, padded_ends=padded, strips=strips,
    )  # fmt: skip


def supported(x: Tensor, offs: Tensor | None, row: QuantSpec | None, column: QuantSpec | None) -> bool:
    """Whether the kernels make this quantization."""
    for spec in filter(None, (row, column)):
        if not triton_cast.supports(spec) or (offs is not None and spec.row.block[0] > 1):
            return False
        if spec.row.family == "mxfp8" and spec.row.block[0] > 1:
            return False
    return x.dtype != torch.float64 and x.ndim == (2 if offs is not None else 3)


def quantize(
    x: Tensor, offs: Tensor | None, row: QuantSpec | None, column: QuantSpec | None, row_state: Tensor | None = None,
    column_state: Tensor | None = None, group_amax: Any = grouped_reference.group_amax,
) -> list[Tensor]:  # fmt: skip
    """The parts of `grouped_reference.quantize` rowwise and then columnwise; None leaves a direction out.

    `row_state` and `column_state` [G] are multipliers to use in the place of the groups' own (per-tensor formats).
    x is float32, bfloat16 or float16.
    """
    if offs is None and x.stride(-1) != 1 and x.stride(-2) == 1:  # the same with the directions exchanged
        swapped = quantize(x.mT, None, column, row, column_state, row_state, group_amax)
        count = 0 if column is None else 2
        return [*swapped[count:], *swapped[:count]]
    x = x.contiguous()
    unread = torch.empty(1, dtype=torch.float32, device=x.device)  # as in triton_cast
    batch = offs is None
    alignment = 16 if column is None else column.row.alignment
    inner = x.shape[-1]
    if offs is None:
        groups, rows = x.shape[:2]
        size = _up(rows, alignment)
        strips = groups * _cdiv(size, _STRIP)
        tables: tuple[Tensor, ...] = (unread,) * 5
    else:
        groups, rows, offs = offs.shape[0], x.shape[0], offs.to(torch.int32)
        size = grouped_reference.padded_rows(rows, groups, alignment)
        made = _tables(offs, size, alignment)
        tables, strips = made.arguments, made.strips
    x_step = x.stride(-2)
    row_amax, column_amax = unread, unread
    by_row, by_column = (spec is not None and spec.row.family == "per_row" for spec in (row, column))
    sizes = (groups, rows, size, inner, x_step)
    if by_row or by_column:
        every = groups * rows if batch else rows
        row_amax = torch.zeros(every if by_row else 1, dtype=torch.float32, device=x.device)
        column_amax = torch.zeros((groups, inner) if by_column else (1, 1), dtype=torch.float32, device=x.device)
        wrap_triton(grouped_amax_kernel)[(strips * _cdiv(inner, 256),)](
            x, row_amax, column_amax, *tables, *sizes, by_row, by_column, batch, _STRIP, 16, 256, num_warps=2
        )
    own: Tensor | None = None

    def multiplier(spec: QuantSpec, state: Tensor | None) -> Tensor:
        nonlocal own
        if state is not None:
            return state
        own = group_amax(x, offs) if own is None else own
        return reference.multiplier_from_amax(own, spec)

    left = _side_of(x, offs, row, row_amax, multiplier, row_state, size, columnwise=False)
    right = _side_of(x, offs, column, column_amax, multiplier, column_state, size, columnwise=True)
    same = row is not None and row == column and row.row.family == "per_tensor" and row_state is column_state
    blocks = any(spec is not None and spec.row.family == "block" for spec in (row, column))
    both = row is not None and column is not None
    tile_m, tile_n, warps = (128, 128, 8 if both else 4) if blocks else (32, 128, 4) if both else (64, 64, 4)
    padded_inner = left.data.shape[-1] if row is not None else inner
    wrap_triton(grouped_cast_kernel)[(strips * (_STRIP // tile_m) * _cdiv(padded_inner, tile_n),)](
        x, left.data, left.scale, left.arg, right.data, right.scale, right.arg, *tables, *sizes[:3], inner,
        padded_inner, x_step, size, inner * size if batch else 0, *left.steps, right.steps[0], *right.steps[2:],
        *left.constants, *right.constants, same, batch, _STRIP, tile_m, tile_n, num_warps=warps,
    )  # fmt: skip
    return [*left.parts, *right.parts]


@dataclass(frozen=True)
class _Side:
    """One direction: its outputs, and what the kernel is told."""

    data: Tensor
    scale: Tensor
    arg: Tensor
    steps: tuple[Any, ...]
    """From one group's scales to the next, how many along rows and columns, and their strides."""
    constants: tuple[Any, ...]
    parts: list[Tensor]


def _side_of(
    x: Tensor, offs: Tensor | None, spec: QuantSpec | None, amax: Tensor, multiplier: Any, state: Tensor | None,
    padded_rows: Any, *, columnwise: bool,
) -> _Side:  # fmt: skip
    if spec is None:
        constants = (_NONE.value, 1, 1, 1.0, 0, 0, 0, 1.0, 0.0, False, 0.0, 0.0)
        return _Side(amax, amax, amax, (0, 0, 0, 0, 0), constants, [])
    row, inner = spec.row, x.shape[-1]
    assert row.element is not None
    batch = [x.shape[0]] if offs is None else []
    groups = x.shape[0] if offs is None else offs.shape[0]
    lines, length = (inner, padded_rows) if columnwise else (x.shape[-2], _up(inner, row.alignment))
    data = torch.empty([*batch, lines, length], dtype=row.element.dtype, device=x.device)
    constants = _constants(spec, x.dtype, columnwise=columnwise)
    new = torch.empty
    if row.family == "per_tensor":
        scale = new((groups,), dtype=torch.float32, device=x.device)
        return _Side(data, scale, multiplier(spec, state), (1, 0, 0, 0, 0), constants, [data, scale])
    if row.family == "per_row":
        ragged = [groups, lines] if columnwise else [lines, 1]
        scale = new([*batch, lines, 1] if batch else ragged, dtype=torch.float32, device=x.device)
        return _Side(data, scale, amax, (lines if columnwise else 0, 0, 0, 0, 0), constants, [data, scale])
    scale_rows, scale_columns = _cdiv(lines, row.block[0]), length // row.block[1]
    dtype = torch.uint8 if row.family == "mxfp8" else torch.float32
    scale = new([*batch, scale_rows, scale_columns], dtype=dtype, device=x.device)
    apart = scale_rows * scale_columns
    if columnwise:
        steps = (apart if batch else 0, scale_columns, scale_rows, 1, scale_columns)
    else:  # rows of their own are counted from the first of all
        steps = (apart if batch and row.block[0] > 1 else 0, scale_rows, scale_columns, scale_columns, 1)
    return _Side(data, scale, amax, steps, constants, [data, scale])


def _constants(spec: QuantSpec, dtype: torch.dtype, *, columnwise: bool) -> tuple[Any, ...]:
    """What a kernel is told of the scaling of one side of an x of this dtype."""
    row = spec.row
    assert row.element is not None
    block_rows, block_columns = row.block
    p, q = (block_columns, block_rows) if columnwise else (block_rows, block_columns)
    largest = torch.finfo(dtype if row.family == "block" else torch.float32).max
    below, most = (TORCHAO_BELOW, row.element.max / TORCHAO_FLOOR) if spec.torchao else (0.0, 0.0)
    return (
        _KINDS[row.family].value, max(p, 1), max(q, 1), row.element.max, int(math.log2(row.element.max)),
        row.element.mantissa_bits, MX_MODES.index(spec.mode), largest, spec.eps, spec.pow2, below, most,
    )  # fmt: skip


def written(arguments: Mapping[str, Any]) -> list[str]:
    """The names of the arguments that a launch of a kernel that quantizes or clears writes."""
    return ["cleared"] if "cleared" in arguments else triton_cast.written(arguments)


def clear(out: Tensor, offs: Tensor) -> Tensor:
    """`out`, fresh from a grouped GEMM, with zeros in rows of no group ([M, N]) or for empty groups ([G, N, K])."""
    weights = out.ndim == 3
    rows, size = (out.shape[0], out.shape[1] * out.shape[2]) if weights else out.shape
    count, block = (32, 1024) if weights else (64, 256)
    programs = rows * _cdiv(size, count * block) if weights else _cdiv(rows, count) * _cdiv(size, block)
    wrap_triton(clear_kernel)[(programs,)](out, offs, offs.shape[0], rows, size, weights, count, block, num_warps=4)
    return out


def _cdiv(size: Any, by: int) -> Any:
    return (size + by - 1) // by


def _up(size: Any, to: int) -> Any:
    return _cdiv(size, to) * to


for _kernel in (grouped_amax_kernel, grouped_cast_kernel, clear_kernel):
    declare_written(_kernel, written)
