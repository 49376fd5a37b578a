"""The quantization of a weight outside of a graph, by the kernels that a graph would choose."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxquant.compat.memory import is_fake
from fxquant.formats import OperandSpec, QuantSpec
from fxquant.kernels.cast.ops import dequantize_operand, parts_spec, quantize, quantize_operand
from fxquant.roles import Direction


def side(spec: OperandSpec, direction: Direction | str) -> QuantSpec:
    """The spec of the parts of one direction."""
    return parts_spec(spec.columnwise if Direction(direction) is Direction.COLUMNWISE else spec.rowwise)


def quantized(
    values: Tensor, spec: OperandSpec, direction: Direction | str, rowwise: Sequence[Tensor] = ()
) -> list[Tensor]:
    """The parts of one direction of a matrix; its `rowwise` ones need not be made again for what derives from them."""
    direction, values = Direction(direction), values.detach()
    if direction is Direction.COLUMNWISE and spec.from_rowwise:
        row = list(rowwise) or quantized(values, spec, Direction.ROWWISE)
        values = dequantize_operand(row, str(side(spec, Direction.ROWWISE)), "rowwise", values.shape, values.dtype)
        spec = OperandSpec(spec.rowwise, spec.columnwise)
    chosen = side(spec, direction)
    with torch.no_grad():
        if values.is_cuda and not is_fake(values) and not chosen.key and not chosen.is_identity:
            return [part.contiguous() for part in quantize.best(values, str(chosen), str(direction), None)]
        return [part.contiguous() for part in quantize_operand(values, spec, str(direction))[0]]
