"""The operators of a quantized program in ONNX: QuantizeLinear, DequantizeLinear and MatMul.

    quantize = torch.ops.fxquant.quantize.default(x, "per_tensor_e4m3", "rowwise", multiplier)
    # becomes
    quantize = onnx::QuantizeLinear(x, 1 / multiplier, output_dtype=FLOAT8E4M3FN)

Scales are float32 throughout, with an axis for those of rows and a block size for those of blocks. A power of two is
exact there, codes of E8M0 included; by another scale ONNX divides where fxquant multiplies by its reciprocal, and an
element on the edge between two codes may get the other one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fxquant.errors import ProgramError
from fxquant.formats import QuantSpec
from fxquant.kernels.cast.reference import multiplicands
from fxquant.kernels.operator import Parts

OPSET = 21
"""The first version of ONNX's operators with scales for blocks."""

_FLOAT32, _FLOAT8 = 1, {torch.float8_e4m3fn: 17, torch.float8_e5m2: 19}
"""ONNX's numbers of data types."""


def quantize(x: Tensor, spec: str, direction: str, state: Tensor | None = None) -> list[Tensor]:
    """`fxquant::quantize`, rowwise, of an activation; `state` is a static multiplier. The scales are float32."""
    parsed = _known(spec)
    row, element = parsed.row, parsed.row.element
    assert element is not None
    if direction != "rowwise":
        raise ProgramError(f"ONNX gets programs for inference, and this one quantizes {spec} {direction}")
    x = x.float()
    spare = -x.shape[-1] % row.alignment
    x = torch.nn.functional.pad(x, (0, spare)) if spare else x
    if row.family == "per_tensor":
        amax = x.abs().max() if state is None else None
    else:
        columns = row.block[1] or x.shape[-1]
        blocks = torch.unflatten(x.abs(), -1, (x.shape[-1] // columns, columns)).amax(-1)
        if row.block[0] > 1:
            raise ProgramError(f"ONNX has no blocks of several rows, such as the activations of {spec} have")
        amax = blocks
    scale = _scale(amax, parsed) if amax is not None else state.reciprocal().reshape(())  # type: ignore[union-attr]
    attributes = {**_attributes(parsed), "output_dtype": _FLOAT8[element.dtype]}
    data = _by_rows("QuantizeLinear", x, scale, parsed, element.dtype, attributes)
    return [data, scale]


def scaled_mm(
    a: Parts, b: Parts, a_spec: str, b_spec: str, bias: Tensor | None, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    """`fxquant::scaled_mm`: both operands dequantized to float32, and their product."""
    specs = QuantSpec.parse(a_spec), QuantSpec.parse(b_spec)
    left, right = multiplicands(dequantize(a, a_spec), specs[0], dequantize(b, b_spec), specs[1])
    out = left @ right.mT
    return (out if bias is None else out + bias.float()).to(out_dtype)


def dequantize(parts: Parts, spec: str) -> Tensor:
    """The values, float32, of a payload and its scales: those of `quantize` above, or of a folded weight."""
    if QuantSpec.parse(spec).is_identity:
        return parts[0].float()
    parsed = _known(spec)
    data, scale = parts[0], parts[1]
    if scale.dtype == torch.uint8:  # E8M0
        scale = (scale.float() - 127).exp2()
    if parsed.row.family == "block" and scale.shape[-2] != data.shape[-2]:  # a tile's in each of its rows
        scale = scale.repeat_interleave(parsed.row.block[0], -2)[..., : data.shape[-2], :]
    scale = scale.reshape(()) if parsed.row.family == "per_tensor" else scale
    return _by_rows("DequantizeLinear", data, scale, parsed, torch.float32, _attributes(parsed))


MEANINGS: dict[str, Callable[..., Any]] = {"quantize": quantize, "scaled_mm": scaled_mm}
"""The functions by the names of the operators of fxquant that they replace."""


def _known(spec: str) -> QuantSpec:
    parsed = QuantSpec.parse(spec)
    if parsed.key or parsed.row.family not in ("per_tensor", "per_row", "block", "mxfp8"):
        name = "a quantizer of your own" if parsed.key else parsed.format
        raise ProgramError(
            f"ONNX has no operator for {name}: export the unquantized program, or one quantized by current_scaling, "
            "rowwise, float8_blockwise or mxfp8"
        )
    return parsed


def _attributes(spec: QuantSpec) -> dict[str, Any]:
    if spec.row.family == "per_tensor":
        return {}
    return {"axis": 0} if spec.row.family == "per_row" else {"axis": 1, "block_size": spec.row.block[1]}


def _by_rows(
    op: str, x: Tensor, scale: Tensor, spec: QuantSpec, dtype: torch.dtype, attributes: dict[str, Any]
) -> Tensor:
    """The operator on a matrix of all rows: an axis counts from the front there."""
    from torch.onnx.ops import symbolic

    shape = x.shape
    if spec.row.family == "per_row":
        scale = scale.reshape(-1)
    if spec.row.family != "per_tensor" and len(shape) != 2:
        x = x.reshape(-1, shape[-1])
        scale = scale.reshape(-1, scale.shape[-1]) if scale.ndim > 1 else scale
    result = symbolic(op, (x, scale), attributes, dtype=dtype, shape=x.shape, version=OPSET)
    return result.reshape(shape) if len(shape) != result.ndim else result


def _scale(amax: Tensor, spec: QuantSpec) -> Tensor:
    """The divisor of elements, in operators that ONNX has: none of them sees the bits of a float."""
    element = spec.row.element
    assert element is not None
    if spec.row.family == "mxfp8":
        if spec.mode != "rceil":
            raise ProgramError(f"ONNX gets MXFP8 with scales rounded up alone, not {spec}")
        return _power_of_two(amax / element.max, up=True).clamp(2.0**-127, 2.0**127)
    amax = amax.clamp(min=1e-12) if spec.torchao else amax.clamp(min=spec.eps) if spec.eps else amax
    multiplier = torch.where(amax > 0, element.max / amax, 1.0)
    return (_power_of_two(multiplier, up=False) if spec.pow2 else multiplier).reciprocal()


def _power_of_two(x: Tensor, *, up: bool) -> Tensor:
    """x rounded to a power of two; the logarithm may be off by one near a power, and is put right."""
    log = x.log2()
    power = (log.ceil() if up else log.floor()).exp2()
    if up:
        power = torch.where(power < x, power * 2, power)
        return torch.where(power * 0.5 >= x, power * 0.5, power)
    power = torch.where(power > x, power * 0.5, power)
    return torch.where(power * 2 <= x, power * 2, power)
