"""The quantization of a weight outside of a graph, by the kernels that a graph would choose."""

from __future__ import annotations

import torch
from torch import Tensor

from fxquant.compat.memory import is_fake
from fxquant.formats import OperandSpec, QuantSpec
from fxquant.kernels.cast import reference
from fxquant.kernels.cast.ops import dequantize_operand, parts_spec, quantize, quantize_operand
from fxquant.roles import Direction


def side(spec: OperandSpec, direction: Direction | str) -> QuantSpec:
    """The spec of the parts of one direction."""
    return parts_spec(spec.columnwise if Direction(direction) is Direction.COLUMNWISE else spec.rowwise)


def quantized(
    values: Tensor, spec: OperandSpec, direction: Direction | str, amaxes: Tensor | None = None,
    row_amaxes: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """The parts of one direction of a matrix, dense.

    `amaxes` are those that its scales are made of, where they are not the matrix's own, and `row_amaxes` the same of
    the rows, for columns that are made of what the rows stand for.
    """
    direction, values = Direction(direction), values.detach()
    chosen = side(spec, direction)
    if direction is Direction.COLUMNWISE and spec.from_rowwise:
        values = as_quantized(values, spec, row_amaxes)
    with torch.no_grad():
        if chosen.is_identity or chosen.key:
            plain = OperandSpec(spec.rowwise, spec.columnwise)
            return [part.contiguous() for part in quantize_operand(values, plain, str(direction))[0]]
        state = amaxes
        if amaxes is not None and chosen.row.family != "nvfp4":
            state = reference.multiplier_from_amax(amaxes, chosen)
        on_device = values.is_cuda and not is_fake(values) and (state is None or state.numel() == 1)
        run = quantize.best if on_device else quantize
        return [part.contiguous() for part in run(values, str(chosen), str(direction), state)]


def as_quantized(values: Tensor, spec: OperandSpec, amaxes: Tensor | None = None) -> Tensor:
    """The values that the rowwise parts of a matrix stand for."""
    parts = quantized(values, spec, Direction.ROWWISE, amaxes)
    return dequantize_operand(parts, str(side(spec, Direction.ROWWISE)), "rowwise", values.shape, values.dtype)
