# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Triton kernels that quantize a matrix x [M, K] in one or both directions from one read.

FP8 with scales per tensor, per row, in blocks of 128, and MX blocks of 32; the bytes are those of
`fxquant.kernels.reference.quantize`. A tile is read once, and its payload written as it lies (rowwise) and transposed
(columnwise), so that either GEMM operand has its contracted axis dense. What a block's amax decides needs no other
pass; an amax per row or column is taken in an earlier one, for both directions at once; an amax per tensor is left to
Inductor, which takes it where the tensor is produced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from fxquant.compat import declare_written
from fxquant.formats import MX_MODES, QuantSpec
from fxquant.kernels import reference

_NONE, _GIVEN, _PER_TENSOR, _PER_ROW, _BLOCK, _MX = (tl.constexpr(i) for i in range(6))
"""How a side is scaled: not wanted, by a multiplier, from an amax of the tensor or of each row, or in blocks."""
_KINDS = {"per_tensor": _PER_TENSOR, "per_row": _PER_ROW, "block": _BLOCK, "mxfp8": _MX}
_RCEIL, _FLOOR, _CEIL, _EVEN = (tl.constexpr(i) for i in range(4))
assert MX_MODES == ("rceil", "floor", "ceil", "even")
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_TORCHAO_FLOOR = 1e-12
_TORCHAO_BELOW = torch.nextafter(torch.tensor(_TORCHAO_FLOOR), torch.tensor(1.0)).item()
"""The least float32 that is not below torchao's least amax."""


@triton.jit
def _magnitude(x):
    return tl.where(x == x, tl.abs(x), 0.0)


@triton.jit
def _multiplier(amax, FMAX: tl.constexpr, LARGEST: tl.constexpr, EPS: tl.constexpr, POW2: tl.constexpr,
                TORCHAO_BELOW: tl.constexpr, TORCHAO_MOST: tl.constexpr):  # fmt: skip
    """`reference.multiplier_from_amax`. torchao's float64 quotient rounds to the same float32 as this one.

    (Double rounding is innocuous for a division when the wider format has 2p + 2 bits: Figueroa, 1995.)
    """
    if EPS > 0:
        amax = tl.where(amax < EPS, EPS, amax)
    scale = tl.div_rn(tl.full(amax.shape, FMAX, tl.float32), amax)
    if TORCHAO_BELOW > 0:
        scale = tl.where(amax < TORCHAO_BELOW, TORCHAO_MOST, scale)
    else:
        scale = tl.where(scale == float("inf"), LARGEST, scale)
        scale = tl.where((amax > 0) & (amax < float("inf")), scale, 1.0)
    if POW2:
        scale = (scale.to(tl.int32, bitcast=True) & -0x800000).to(tl.float32, bitcast=True)
    return scale


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
def _spread(v, P: tl.constexpr, Q: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """[BM / P, BN / Q] with every element repeated over P rows and Q columns."""
    v = tl.broadcast_to(tl.reshape(v, (BM // P, 1, BN // Q, 1)), (BM // P, P, BN // Q, Q))
    return tl.reshape(v, (BM, BN))


@triton.jit
def _block_amax(x, P: tl.constexpr, Q: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """The amaxes of blocks of P rows and Q columns: [BM / P, BN / Q]."""
    amax = _magnitude(x)
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
    else:
        y = x * _spread(factor, P, Q, BM, BN)
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
    if KIND == _GIVEN or KIND == _PER_TENSOR:
        one = tl.load(arg)
        if KIND == _PER_TENSOR:
            one = _multiplier(one, FMAX, LARGEST, EPS, POW2, TORCHAO_BELOW, TORCHAO_MOST)
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
        factor = _multiplier(
            tl.load(arg + at, mask=at < length, other=1.0), FMAX, LARGEST, EPS, POW2, TORCHAO_BELOW, TORCHAO_MOST
        )
        if first == 0:
            tl.store(scale + at, tl.div_rn(1.0, factor), mask=at < length)
        y = x * tl.expand_dims(factor, 0 if COLUMN else 1)
    else:
        amax = _block_amax(x, P, Q, BM, BN)
        if KIND == _BLOCK:
            factor = _multiplier(amax, FMAX, LARGEST, EPS, POW2, TORCHAO_BELOW, TORCHAO_MOST)
            stored = tl.div_rn(1.0, factor)
            at_row = first_row // P + tl.arange(0, BM // P)
            at_column = first_column // Q + tl.arange(0, BN // Q)
        else:
            code = _e8m0(amax, FMAX, LOG, MANTISSA, MODE)
            factor = tl.maximum((254 - code) << 23, 0x00400000).to(tl.float32, bitcast=True)
            if P > 1 and Q > 1:  # a tile's code stands in each of its rows, of the side's own orientation
                if COLUMN:
                    stored = _spread(code, 1, Q, BM // P, BN).to(tl.uint8)
                    at_row = first_row // P + tl.arange(0, BM // P)
                    at_column = first_column + tl.arange(0, BN)
                else:
                    stored = _spread(code, P, 1, BM, BN // Q).to(tl.uint8)
                    at_row = first_row + tl.arange(0, BM)
                    at_column = first_column // Q + tl.arange(0, BN // Q)
            else:
                stored = code.to(tl.uint8)
                at_row = first_row // P + tl.arange(0, BM // P)
                at_column = first_column // Q + tl.arange(0, BN // Q)
        place = at_row[:, None].to(tl.int64) * row_step + at_column[None, :].to(tl.int64) * column_step
        tl.store(scale + place, stored, mask=(at_row[:, None] < rows) & (at_column[None, :] < columns))
        y = _scaled(x, factor, P, Q, BM, BN)
    return y


@triton.jit
def _four(x, ROWS: tl.constexpr, QUADS: tl.constexpr):
    """[ROWS, 4 QUADS] as the first, second, third and fourth of every four neighbours in a row."""
    even, odd = tl.split(tl.reshape(x, (ROWS, QUADS, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _word(a, b, c, d, SHIFT: tl.constexpr):
    """One byte of each of four uint32 tensors, that at bit SHIFT, as a word with a's lowest."""
    low = ((a >> SHIFT) & 0xFF) | (((b >> SHIFT) & 0xFF) << 8)
    return low | (((c >> SHIFT) & 0xFF) << 16) | (((d >> SHIFT) & 0xFF) << 24)


@triton.jit
def _words(y, E5M2: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """float32 [BM, BN] cast to FP8, saturating, four of a row in a uint32: [BM, BN / 4].

    Hopper's instruction makes two codes at a time. Spelled out, since bytes taken apart and put together again, as
    Triton does for a tile that is transposed, come out corrupted (Triton issue 11111).
    """
    a, b, c, d = _four(y, BM, BN // 4)
    if _INTERPRETED:
        dtype: tl.constexpr = tl.float8e5 if E5M2 else tl.float8e4nv
        a, b = a.to(dtype).to(tl.uint8, bitcast=True), b.to(dtype).to(tl.uint8, bitcast=True)
        c, d = c.to(dtype).to(tl.uint8, bitcast=True), d.to(dtype).to(tl.uint8, bitcast=True)
        words = _word(a.to(tl.uint32), b.to(tl.uint32), c.to(tl.uint32), d.to(tl.uint32), 0)
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
def cast_kernel(
    x, row_data, row_scale, row_arg, column_data, column_scale, column_arg, M, K, padded_M, padded_K, x_step,
    row_scale_rows, row_scale_columns, row_scale_step, row_scale_column_step,
    column_scale_rows, column_scale_columns, column_scale_step, column_scale_column_step,
    ROW_KIND: tl.constexpr, ROW_P: tl.constexpr, ROW_Q: tl.constexpr, ROW_FMAX: tl.constexpr, ROW_LOG: tl.constexpr,
    ROW_MANTISSA: tl.constexpr, ROW_MODE: tl.constexpr, ROW_LARGEST: tl.constexpr, ROW_EPS: tl.constexpr,
    ROW_POW2: tl.constexpr, ROW_TORCHAO_BELOW: tl.constexpr, ROW_TORCHAO_MOST: tl.constexpr,
    COLUMN_KIND: tl.constexpr, COLUMN_P: tl.constexpr, COLUMN_Q: tl.constexpr, COLUMN_FMAX: tl.constexpr,
    COLUMN_LOG: tl.constexpr, COLUMN_MANTISSA: tl.constexpr, COLUMN_MODE: tl.constexpr,
    COLUMN_LARGEST: tl.constexpr, COLUMN_EPS: tl.constexpr, COLUMN_POW2: tl.constexpr,
    COLUMN_TORCHAO_BELOW: tl.constexpr, COLUMN_TORCHAO_MOST: tl.constexpr,
    SAME: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One tile [BM, BN] of x [M, K]. The scales of a side are given in tile order, rows along M.

    With SAME both sides have the same multiplier for every element, and one payload serves both. Payloads are stored
    and transposed as words of four codes, so sizes are padded to multiples of 4 at least.
    """
    tiles = tl.cdiv(padded_K, BN)
    first_row = (tl.program_id(0) // tiles) * BM
    first_column = (tl.program_id(0) % tiles) * BN
    m = first_row + tl.arange(0, BM)
    k = first_column + tl.arange(0, BN)
    inside = (m[:, None] < M) & (k[None, :] < K)
    # offsets within a tile fit 32 bits, and cost half the registers
    down, across = tl.arange(0, BM), tl.arange(0, BN)
    down_quads, across_quads = tl.arange(0, BM // 4), tl.arange(0, BN // 4)
    source = x + (first_row.to(tl.int64) * x_step + first_column)
    tile = tl.load(source + (down[:, None] * x_step + across[None, :]), mask=inside, other=0.0).to(tl.float32)
    if ROW_KIND != _NONE:
        y = _side(
            tile, row_arg, row_scale, row_scale_rows, row_scale_columns, row_scale_step, row_scale_column_step,
            first_row, first_column, M, False, ROW_KIND, ROW_P, ROW_Q, ROW_FMAX, ROW_LOG, ROW_MANTISSA, ROW_MODE,
            ROW_LARGEST, ROW_EPS, ROW_POW2, ROW_TORCHAO_BELOW, ROW_TORCHAO_MOST, BM, BN,
        )  # fmt: skip
        words = _words(y, ROW_MANTISSA == 2, BM, BN)
        out = row_data.to(tl.pointer_type(tl.uint32), bitcast=True)
        out += (first_row.to(tl.int64) * padded_K + first_column) // 4
        mask = (m[:, None] < M) & ((first_column + 4 * across_quads)[None, :] < padded_K)
        tl.store(out + (down[:, None] * (padded_K // 4) + across_quads[None, :]), words, mask=mask)
    if COLUMN_KIND != _NONE:
        z = _side(
            tile, column_arg, column_scale, column_scale_rows, column_scale_columns, column_scale_step,
            column_scale_column_step, first_row, first_column, K, True, COLUMN_KIND, COLUMN_P, COLUMN_Q, COLUMN_FMAX,
            COLUMN_LOG, COLUMN_MANTISSA, COLUMN_MODE, COLUMN_LARGEST, COLUMN_EPS, COLUMN_POW2,
            COLUMN_TORCHAO_BELOW, COLUMN_TORCHAO_MOST, BM, BN,
        )  # fmt: skip
        if not SAME:
            words = _words(z, COLUMN_MANTISSA == 2, BM, BN)
        out = column_data.to(tl.pointer_type(tl.uint32), bitcast=True)
        out += (first_column.to(tl.int64) * padded_M + first_row) // 4
        a, b, c, d = _four(tl.trans(words), BN // 4, BM // 4)
        for i in tl.static_range(4):
            k = 4 * across_quads + i
            mask = ((first_column + k)[:, None] < K) & ((first_row + 4 * down_quads)[None, :] < padded_M)
            tl.store(out + (k[:, None] * (padded_M // 4) + down_quads[None, :]), _word(a, b, c, d, 8 * i), mask=mask)


@triton.jit
def amax_kernel(
    x, row_amax, column_amax, M, K, x_step, ROW: tl.constexpr, COLUMN: tl.constexpr, STEPS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The amaxes of the rows and of the columns of x [M, K], NaN ignored, into zeroed float32 buffers.

    Goes down STEPS tiles [BM, BN]. Magnitudes are ordered as their bits are.
    """
    tiles = tl.cdiv(K, BN)
    first_row = (tl.program_id(0) // tiles) * (BM * STEPS)
    k = (tl.program_id(0) % tiles) * BN + tl.arange(0, BN)
    largest = tl.zeros((BM, BN), tl.float32)
    for step in range(STEPS):
        m = first_row + step * BM + tl.arange(0, BM)
        inside = (m[:, None] < M) & (k[None, :] < K)
        tile = tl.load(x + (m[:, None].to(tl.int64) * x_step + k[None, :]), mask=inside, other=0.0)
        magnitude = _magnitude(tile.to(tl.float32))
        if ROW:
            bits = tl.max(magnitude, axis=1).to(tl.int32, bitcast=True)
            tl.atomic_max(row_amax.to(tl.pointer_type(tl.int32), bitcast=True) + m, bits, mask=m < M, sem="relaxed")
        if COLUMN:
            largest = tl.maximum(largest, magnitude)
    if COLUMN:
        bits = tl.max(largest, axis=0).to(tl.int32, bitcast=True)
        tl.atomic_max(column_amax.to(tl.pointer_type(tl.int32), bitcast=True) + k, bits, mask=k < K, sem="relaxed")


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

    def parts(self) -> list[Tensor]:
        return [self.data, self.scale.t() if self.transposed else self.scale]


def supports(spec: QuantSpec) -> bool:
    """Whether the kernels know a format with its options."""
    row = spec.row
    if row.family not in _KINDS or spec.rht or (spec.torchao and row.family == "block"):
        return False
    return not spec.torchao or not spec.eps


def quantize(
    x: Tensor, row: QuantSpec | None, column: QuantSpec | None, row_scale: Tensor | None = None,
    column_scale: Tensor | None = None, amax: Callable[[Tensor], Tensor] = reference.amax,
) -> list[Tensor]:  # fmt: skip
    """The parts of `reference.quantize` of x [M, K] rowwise and then of x.mT columnwise; None leaves a direction out.

    `row_scale` and `column_scale` [1] are multipliers to use in the place of the tensor's own (per-tensor formats).
    `amax` takes the amax [1] of a tensor. x is not empty, and float32, bfloat16 or float16. Block scales of 1x128 lie
    transposed in memory, as cuBLAS wants them.
    """
    if x.stride(-1) != 1:
        if x.stride(-2) == 1:  # a matrix stored by columns: the same with the directions exchanged
            swapped = quantize(x.mT, column, row, column_scale, row_scale, amax)
            count = 0 if column is None else 2
            return [*swapped[count:], *swapped[:count]]
        x = x.contiguous()
    # stands for what a kernel does not read: of x itself Inductor would write a copy for each argument
    unread = torch.empty(1, dtype=torch.float32, device=x.device)
    row_amax, column_amax = _line_amaxes(x, row, column, unread)
    tensor_amax = None
    if any(s is not None and s.row.family == "per_tensor" and g is None
           for s, g in ((row, row_scale), (column, column_scale))):  # fmt: skip
        tensor_amax = amax(x)
    left = _make_side(x, row, row_scale, tensor_amax, row_amax, unread, columnwise=False)
    right = _make_side(x, column, column_scale, tensor_amax, column_amax, unread, columnwise=True)
    uniform = row is not None and (row.row.family == "per_tensor" or min(row.row.block) > 1)
    same = row is not None and column is not None and row == column and uniform
    same = same and (row_scale is column_scale) if row_scale is not None or column_scale is not None else same
    size_m, size_k = x.shape
    padded_m = right.data.shape[-1] if column is not None else size_m
    padded_k = left.data.shape[-1] if row is not None else size_k
    tile_m, tile_n, warps = _tile(row, column)
    grid = (_cdiv(padded_m, tile_m) * _cdiv(padded_k, tile_n),)
    wrap_triton(cast_kernel)[grid](
        x, left.data, left.scale, left.arg, right.data, right.scale, right.arg, size_m, size_k, padded_m, padded_k,
        x.stride(0), *left.scale_shape, *left.scale_steps, *right.scale_shape, *right.scale_steps,
        *left.constants, *right.constants, same, tile_m, tile_n, num_warps=warps,
    )  # fmt: skip
    return [*([] if row is None else left.parts()), *([] if column is None else right.parts())]


def _cdiv(size: Any, by: int) -> Any:
    return (size + by - 1) // by


def _tile(row: QuantSpec | None, column: QuantSpec | None) -> tuple[int, int, int]:
    """Rows, columns and warps of a tile: the quickest of those tried on an H100 (docs/performance.md)."""
    rows = [spec.row for spec in (row, column) if spec is not None]
    if any(r.family == "block" for r in rows):
        return 128, 128, 4
    if any(r.family == "mxfp8" and r.block[0] == 1 for r in rows):
        return 64, 64, 2
    if any(r.family == "mxfp8" for r in rows):
        return (128, 128, 8) if len(rows) == 2 else (64, 64, 4)
    return (32, 128, 4) if len(rows) == 2 else (64, 64, 4)


def _line_amaxes(x: Tensor, row: QuantSpec | None, column: QuantSpec | None, unread: Tensor) -> tuple[Tensor, Tensor]:
    """The amaxes [M] of rows and [K] of columns, where a direction is scaled by them."""
    by_row, by_column = (s is not None and s.row.family == "per_row" for s in (row, column))
    if not by_row and not by_column:
        return unread, unread
    size_m, size_k = x.shape
    row_amax = torch.zeros(size_m if by_row else 1, dtype=torch.float32, device=x.device)
    column_amax = torch.zeros(size_k if by_column else 1, dtype=torch.float32, device=x.device)
    steps, rows, columns = 8, 16, 256
    grid = (_cdiv(size_m, steps * rows) * _cdiv(size_k, columns),)
    wrap_triton(amax_kernel)[grid](
        x, row_amax, column_amax, size_m, size_k, x.stride(0), by_row, by_column, steps, rows, columns, num_warps=2
    )
    return row_amax, column_amax


def _make_side(
    x: Tensor, spec: QuantSpec | None, given: Tensor | None, tensor_amax: Tensor | None, line_amax: Tensor,
    unread: Tensor, *, columnwise: bool,
) -> _Side:  # fmt: skip
    """Outputs and arguments of one direction."""
    if spec is None:
        return _Side(unread, unread, unread, (_NONE.value, 1, 1, 1.0, 0, 0, 0, 1.0, 0.0, False, 0.0, 0.0))
    row = spec.row
    element = row.element
    assert element is not None and row.scale_dtype is not None
    rows, length = (x.shape[1], x.shape[0]) if columnwise else (x.shape[0], x.shape[1])
    padded = _cdiv(length, row.alignment) * row.alignment
    data = torch.empty((rows, padded), dtype=element.dtype, device=x.device)
    kind = _KINDS[row.family] if given is None else _GIVEN
    block_rows, block_columns = row.block
    p, q = (block_columns, block_rows) if columnwise else (block_rows, block_columns)
    largest = torch.finfo(x.dtype if row.family == "block" else torch.float32).max
    below, most = (_TORCHAO_BELOW, element.max / _TORCHAO_FLOOR) if spec.torchao else (0.0, 0.0)
    constants = (
        kind.value, max(p, 1), max(q, 1), element.max, int(math.log2(element.max)), element.mantissa_bits,
        MX_MODES.index(spec.mode), largest, spec.eps, spec.pow2, below, most,
    )  # fmt: skip
    if row.family == "per_tensor":
        arg = given if given is not None else tensor_amax
        assert arg is not None
        return _Side(data, torch.empty(1, dtype=torch.float32, device=x.device), arg, constants)
    if row.family == "per_row":
        return _Side(data, torch.empty((rows, 1), dtype=torch.float32, device=x.device), line_amax, constants)
    repeated = row.family == "mxfp8"
    scale_rows = rows if repeated or block_rows == 1 else _cdiv(rows, block_rows)
    scale_columns = padded // block_columns
    dtype = torch.uint8 if repeated else torch.float32
    transposed = row.family == "block" and block_rows == 1
    shape = (scale_columns, scale_rows) if transposed else (scale_rows, scale_columns)
    scale = torch.empty(shape, dtype=dtype, device=x.device)
    steps = (1, scale_rows) if transposed else (scale_columns, 1)
    if columnwise:
        return _Side(data, scale, unread, constants, (scale_columns, scale_rows), steps[::-1], transposed)
    return _Side(data, scale, unread, constants, (scale_rows, scale_columns), steps, transposed)


def written(arguments: Mapping[str, Any]) -> list[str]:
    """The names of the arguments that a launch of a kernel of this file writes."""
    names = []
    for side in ("row", "column"):
        if arguments.get(f"{side.upper()}_KIND", arguments.get(side.upper())):
            names += [name for name in (f"{side}_data", f"{side}_scale", f"{side}_amax") if name in arguments]
    return names


declare_written(cast_kernel, written)
declare_written(amax_kernel, written)
