"""Grouped GEMMs of MXFP8 and NVFP4 on tensor cores that read the scales of blocks, by `scaled_grouped_mm`.

Operands whose scales do not lie in the order that these read (`fxquant.kernels.grouped.swizzle`) are brought into it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxquant.compat.private import ScalingType, SwizzleType, knows_grouped_kinds, torch_scaled_grouped_mm
from fxquant.compat.values import statically_known_true
from fxquant.formats import QuantSpec
from fxquant.kernels.cast.swizzle import swizzle
from fxquant.kernels.grouped import choice
from fxquant.kernels.grouped.fp8 import cleared
from fxquant.kernels.grouped.ops import grouped_scaled_mm
from fxquant.kernels.grouped.swizzle import swizzled, unit_ends
from fxquant.kernels.linear.choice import GemmKernel
from fxquant.kernels.operator import Parts, operator


@operator(namespace="fxquant_kernels")
def scaled_grouped_mm(
    a: Tensor, b: Tensor, a_scales: Sequence[Tensor], b_scales: Sequence[Tensor], offs: Tensor
) -> Tensor:
    """torch's grouped GEMM in bfloat16, which it does not trace before 2.15.

    Scales are those of blocks, in tiles, and behind those of NVFP4 a factor of each group.
    """
    four_bits = len(a_scales) > 1
    kinds = [ScalingType.BlockWise1x16, ScalingType.TensorWise] if four_bits else [ScalingType.BlockWise1x32]
    orders = [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE][: len(kinds)]
    functional: Any = torch.nn.functional
    return functional.scaled_grouped_mm(  # type: ignore[no-any-return]
        a, b, [*a_scales], kinds, [*b_scales], kinds, orders, orders, offs=offs, output_dtype=torch.bfloat16
    )


@scaled_grouped_mm.fake
def _scaled_grouped_mm_fake(
    a: Tensor, b: Tensor, a_scales: Sequence[Tensor], b_scales: Sequence[Tensor], offs: Tensor
) -> Tensor:
    groups = [offs.shape[0]] if b.ndim == 2 else []
    return a.new_empty([*groups, a.shape[0], b.shape[-1]], dtype=torch.bfloat16)


@grouped_scaled_mm.implementation(GemmKernel.GROUPED_MXFP8, when=choice.mxfp8)
@grouped_scaled_mm.implementation(GemmKernel.GROUPED_NVFP4, when=choice.nvfp4)
def _on_tensor_cores(
    a: Parts, b: Parts, offs: Tensor, a_spec: str, b_spec: str, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    offs, specs = offs.to(torch.int32), [QuantSpec.parse(a_spec), QuantSpec.parse(b_spec)]
    weight_gradient, features, row = b[0].ndim == 2, b[0].shape[-2], specs[0].row
    direction = "columnwise" if weight_gradient else "rowwise"
    left = _in_tiles(a, offs, specs[0], direction)
    right = _in_tiles(b, offs if weight_gradient else None, specs[1], direction)
    spare = -features % 16  # rows of the result start at aligned addresses
    element, dtype = row.element, row.scale_dtype
    assert element is not None and dtype is not None
    payloads = [_padded(left[0], 0), _padded(right[0], spare)]
    payloads = [data if data.dtype == element.dtype else data.view(element.dtype) for data in payloads]
    scales = [[parts[1].view(dtype)] for parts in (left, right)]
    if row.has_global_amax:
        scales = [[*scale, p[2] / spec.unit_amax] for scale, p, spec in zip(scales, (a, b), specs, strict=True)]
    ends = unit_ends(offs) if weight_gradient else offs
    out = _multiplied(payloads[0], payloads[1].mT, scales[0], scales[1], ends)
    out = out if statically_known_true(spare == 0) else out.narrow(-1, 0, features)
    return cleared(out, offs).to(out_dtype)


def _in_tiles(parts: Parts, offs: Tensor | None, spec: QuantSpec, direction: str) -> list[Tensor]:
    """Payload and scales of an operand, the latter in tiles: of a batch a row for each matrix."""
    data, scale, *_ = (part.contiguous() for part in parts)
    if offs is None:
        return [data, (scale if spec.swizzled else swizzle(scale)).flatten(1)]
    return [data, scale] if spec.swizzled else swizzled([data, scale], offs, spec, direction)


def _padded(data: Tensor, rows: Any) -> Tensor:
    """A payload in whole units of 16 bytes, with rows of zeros behind."""
    columns = -data.shape[-1] % 16
    if statically_known_true(rows == 0) and statically_known_true(columns == 0):
        return data
    return torch.nn.functional.pad(data.view(torch.uint8), (0, columns, 0, rows)).view(data.dtype)


def _multiplied(a: Tensor, b: Tensor, a_scales: Parts, b_scales: Parts, ends: Tensor) -> Tensor:
    """torch's grouped GEMM, by an operator that it traces: an older one knows MXFP8 by the dtype of scales."""
    if knows_grouped_kinds():
        return scaled_grouped_mm.meaning(a, b, a_scales, b_scales, ends)
    if len(a_scales) > 1:
        return scaled_grouped_mm(a, b, a_scales, b_scales, ends)
    return torch_scaled_grouped_mm(a, b, a_scales[0], b_scales[0], offs=ends, out_dtype=torch.bfloat16)
