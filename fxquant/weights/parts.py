"""The quantization of a weight outside of a graph, by the kernels that a graph would choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fxquant.compat.device import capability
from fxquant.compat.inside.memory import is_fake
from fxquant.formats import OperandSpec, QuantSpec
from fxquant.kernels.cast import reference
from fxquant.kernels.cast.ops import dequantize_operand, parts_spec, quantize, quantize_operand
from fxquant.kernels.cast.swizzle import swizzle, unswizzle
from fxquant.kernels.operator import Facts
from fxquant.roles import Direction
from fxquant.weights.layer import Quantize


def side(spec: OperandSpec, direction: Direction | str) -> QuantSpec:
    """The spec of the parts of one direction."""
    return parts_spec(spec.columnwise if Direction(direction) is Direction.COLUMNWISE else spec.rowwise)


def quantized(
    values: Tensor, spec: OperandSpec, direction: Direction | str, amaxes: Tensor | None = None,
    row_amaxes: Tensor | None = None, run: Quantize | None = None,
) -> list[Tensor]:  # fmt: skip
    """The parts of one direction of a matrix, dense, by `run` or else kernel by kernel.

    `amaxes` are those that its scales are made of, where they are not the matrix's own, and `row_amaxes` the same of
    the rows, for columns that are made of what the rows stand for. A delayed scale stands in the place of `amaxes`.
    """
    direction, values = Direction(direction), values.detach()
    chosen = side(spec, direction)
    if direction is Direction.COLUMNWISE and spec.from_rowwise:
        values = as_quantized(values, spec, row_amaxes, run)
    with torch.no_grad():
        if chosen.is_identity or chosen.key:
            plain = OperandSpec(spec.rowwise, spec.columnwise)
            return [part.contiguous() for part in quantize_operand(values, plain, str(direction))[0]]
        state = amaxes
        if amaxes is not None and chosen.row.family != "nvfp4" and not chosen.is_delayed:
            state = reference.multiplier_from_amax(amaxes, chosen)
        on_device = values.is_cuda and not is_fake(values) and (state is None or state.numel() == 1)
        if run is None or is_fake(values) or values.is_meta or chosen.stochastic:
            run = quantize.best if on_device else quantize
        return [part.contiguous() for part in run(values, str(chosen), str(direction), state)]


def as_quantized(
    values: Tensor, spec: OperandSpec, amaxes: Tensor | None = None, run: Quantize | None = None
) -> Tensor:
    """The values that the rowwise parts of a matrix stand for."""
    parts = quantized(values, spec, Direction.ROWWISE, amaxes, run=run)
    return dequantize_operand(parts, str(side(spec, Direction.ROWWISE)), "rowwise", values.shape, values.dtype)


def laid_out(spec: OperandSpec, device: torch.device) -> OperandSpec:
    """The spec of a weight that is stored on a device: its scales lie in the order in which tensor cores read them.

    Elsewhere, and in rows that are dequantized for a GEMM in high precision, they lie as they are.
    """
    reads = Facts(capability=capability(device)).reads_block_scales and not spec.columnwise.is_identity

    def of(side: QuantSpec) -> QuantSpec:
        return replace(side, swizzled=reads and side.row.family in ("mxfp8", "nvfp4"))

    return OperandSpec(of(spec.rowwise), of(spec.columnwise), spec.from_rowwise)


def plain_spec(spec: OperandSpec) -> OperandSpec:
    """The spec without the order of scales."""
    row, column = (replace(side, swizzled=False) for side in (spec.rowwise, spec.columnwise))
    return OperandSpec(row, column, spec.from_rowwise)


def in_order(parts: Sequence[Tensor], old: QuantSpec, new: QuantSpec) -> list[Tensor]:
    """The parts of a matrix with its scales in the order of another spec."""
    if old.swizzled == new.swizzled or not parts:
        return list(parts)
    data, scale, *rest = parts
    if new.swizzled:
        return [data, swizzle(scale), *rest]
    return [data, unswizzle(scale, data.shape[0], data.shape[1] * old.row.packed // old.row.block[1]), *rest]


def is_one(spec: OperandSpec, size: Sequence[int]) -> bool:
    """Returns True if the columnwise parts of a matrix are the rowwise ones transposed, so that one has both."""
    row, column = (side(spec, direction) for direction in Direction)
    high, wide = row.row.block
    square = row.row.family in ("per_tensor", "block", "mxfp8", "nvfp4") and high == wide
    if (
        row != column
        or spec.from_rowwise
        or not square
        or row.stochastic
        or row.row_scaled
        or row.rht
        or row.four_over_six
    ):
        return False
    return all(length % max(row.row.alignment, high) == 0 for length in size)


def transposed(parts: Sequence[Tensor], spec: OperandSpec) -> list[Tensor]:
    """The columnwise parts of a matrix whose rowwise ones stand for both directions, scales as they are."""
    of_rows = side(spec, Direction.ROWWISE)
    data, scale, *amax = in_order(parts, of_rows, replace(of_rows, swizzled=False))
    row = of_rows.row
    assert row.element is not None
    if row.element.packed == 1:
        data = data.view(torch.uint8).mT.contiguous().view(data.dtype)
    else:  # two elements a byte, the first in the low half
        codes = torch.stack((data & 15, data >> 4), -1).flatten(-2).mT
        data = (codes[:, ::2] | codes[:, 1::2] << 4).contiguous()
    if row.family == "block":
        scale = scale.mT.contiguous()
    elif row.family != "per_tensor":  # a tile's scale stands in each of its rows
        codes, tile = scale.view(torch.uint8), row.block[0]
        codes = codes[::tile].mT
        scale = codes.unsqueeze(1).expand(-1, tile, -1).flatten(0, 1).contiguous().view(scale.dtype)
    return [data, scale, *amax]
