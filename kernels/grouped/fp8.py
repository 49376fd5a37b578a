"""Grouped GEMMs of quantized operands on CUDA: FP8 by `_scaled_grouped_mm` or Triton, else bfloat16.

On Hopper, elements of per-tensor, rowwise and 1x128 scaling are multiplied as FP8. Elsewhere they are multiplied as
bfloat16, which holds them exactly, and scaled behind. Other blocks are dequantized to bfloat16, exactly for scales that
are powers of two, and torch's grouped GEMM rounds the result to bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fxquant.compat.private import torch_scaled_grouped_mm
from fxquant.formats import QuantSpec, is_mixed
from fxquant.kernels.cast import reference
from fxquant.kernels.grouped import choice, gluon_op
from fxquant.kernels.grouped import reference as grouped_reference
from fxquant.kernels.grouped.high_precision import grouped_mm, unmasked_grouped_mm
from fxquant.kernels.grouped.ops import grouped_scaled_mm
from fxquant.kernels.grouped.places import group_of, padded_ends, starts
from fxquant.kernels.grouped.reference import Dense, gemm_operands, in_groups, multiplicands
from fxquant.kernels.linear.choice import GemmKernel
from fxquant.kernels.linear.cublas import by_cublas
from fxquant.kernels.operator import Parts

Multiply = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""`grouped_mm` with an alignment."""


@grouped_scaled_mm.implementation(GemmKernel.GROUPED_PORTABLE, when=choice.portable)
def _portable(
    a: Parts, b: Parts, offs: Tensor | None, a_spec: str, b_spec: str, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    left, right = QuantSpec.parse(a_spec), QuantSpec.parse(b_spec)
    if offs is None:
        return grouped_reference.scaled_mm(a, b, offs, left, right, out_dtype)
    return _sixteen_bits(a, b, offs, left, right, grouped_mm).to(out_dtype)


def _row_scales(a: Parts, b: Parts, offs: Tensor) -> tuple[Tensor, Tensor]:
    """The scales of an FP8 GEMM by row: a's [M] and b's [G, N], or in the gradient of a weight [G, N] and [G, K]."""

    def by_group(parts: Parts) -> Tensor:
        data, scale = parts
        rows = data.shape[-2]
        return scale.reshape(scale.shape[0], -1).expand(scale.shape[0], rows)

    if b[0].ndim == 2:
        return by_group(a), by_group(b)
    scale = a[1]
    if scale.ndim == 1:
        scale = scale[group_of(offs, a[0].shape[0]).clamp(max=offs.shape[0] - 1)]
    return scale.reshape(-1), by_group(b)


@grouped_scaled_mm.implementation(GemmKernel.GROUPED, when=choice.torchs)
def _fp8(
    a: Parts, b: Parts, offs: Tensor, a_spec: str, b_spec: str, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    offs = offs.to(torch.int32)
    a_scale, b_scale = _row_scales(a, b, offs)
    left, right, features = a[0], b[0], b[0].shape[-2]
    spare = -features % 16
    if spare:  # rows of the result start at aligned addresses
        right = torch.nn.functional.pad(right.view(torch.uint8), (0, 0, 0, spare)).view(right.dtype)
        b_scale = torch.nn.functional.pad(b_scale, (0, spare), value=1.0)
    weight_gradient = right.ndim == 2
    ends = padded_ends(offs, QuantSpec.parse(a_spec).row.alignment) if weight_gradient else offs
    if weight_gradient:
        a_scale, b_scale = a_scale.reshape(-1), b_scale.reshape(-1)
    out = torch_scaled_grouped_mm(
        left, right.mT, a_scale.contiguous(), b_scale.contiguous(), offs=ends, out_dtype=torch.bfloat16,
        use_fast_accum=fast_accum,
    )  # fmt: skip
    return cleared(out[..., :features] if spare else out, offs).to(out_dtype)


def _multiplied(a: Tensor, b: Tensor, offs: Tensor, alignment: int) -> Tensor:
    """`grouped_mm` for one device."""
    if a.is_cuda:
        return cleared(unmasked_grouped_mm(a, b, offs, alignment), offs)
    return grouped_mm(a, b, offs, alignment)


def cleared(out: Tensor, offs: Tensor) -> Tensor:
    """The result of a GEMM with zeros where no group has written, which is as the memory was."""
    if out.is_cuda and out.is_contiguous():
        from fxquant.kernels.grouped.triton_cast import clear

        return clear(out, offs)
    if out.ndim == 2:
        return torch.where(in_groups(offs, out.shape[0]), out, 0)
    return torch.where((offs > starts(offs)).reshape(-1, 1, 1), out, 0)


@grouped_scaled_mm.implementation(GemmKernel.GROUPED_WARPS, when=choice.blocks_by_warps)
def _blocks_by_warps(
    a: Parts, b: Parts, offs: Tensor, a_spec: str, b_spec: str, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    ends = padded_ends(offs, QuantSpec.parse(a_spec).row.alignment) if b[0].ndim == 2 else offs
    return gluon_op.grouped_block_mm(a, b, ends, out_dtype)


@grouped_scaled_mm.implementation(GemmKernel.GROUPED_BLOCKS, when=choice.blocks)
@grouped_scaled_mm.implementation(GemmKernel.GROUPED_TRITON, when=choice.rows)
@grouped_scaled_mm.implementation(GemmKernel.GROUPED_FAST, when=choice.fast)
def _triton(
    a: Parts, b: Parts, offs: Tensor, a_spec: str, b_spec: str, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    from fxquant.kernels.grouped import triton_gemm as triton_grouped

    offs, left, right = offs.to(torch.int32), QuantSpec.parse(a_spec), QuantSpec.parse(b_spec)
    weight_gradient = b[0].ndim == 2
    block = right.row.block[0] if right.row.family == "block" else 0
    if block:
        a_scale, b_scale = a[1], b[1]
    else:
        a_scale, b_scale = (scale.contiguous() for scale in _row_scales(a, b, offs))
        a_scale = a_scale if weight_gradient else a_scale.unsqueeze(1)
    if weight_gradient:
        ends = padded_ends(offs, left.row.alignment)
        return triton_grouped.grouped_columns((a[0], a_scale), (b[0], b_scale), ends, block, out_dtype, fast_accum)
    return triton_grouped.grouped_rows((a[0], a_scale), (b[0], b_scale), offs, block, out_dtype, fast_accum)


@grouped_scaled_mm.implementation(GemmKernel.EMULATED, when=choice.emulated, fallback=True)
def _emulated(
    a: Parts, b: Parts, offs: Tensor | None, a_spec: str, b_spec: str, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    left, right = QuantSpec.parse(a_spec), QuantSpec.parse(b_spec)
    if offs is not None:
        return _sixteen_bits(a, b, offs, left, right, _multiplied).to(out_dtype)
    if left.row.family in ("per_tensor", "per_row") and not is_mixed(left, right):
        (a_data, a_scale), (b_data, b_scale) = a, b
        out = torch.bmm(a_data.to(torch.bfloat16), b_data.to(torch.bfloat16).mT, out_dtype=torch.float32)
        return (out * a_scale.reshape(len(a_scale), -1, 1) * b_scale.reshape(len(b_scale), 1, -1)).to(out_dtype)
    (a, left), (b, right), _ = gemm_operands(a, b, None, left, right)
    return by_cublas(a, b, str(left), str(right), None, out_dtype, fast_accum)


def _sixteen_bits(a: Parts, b: Parts, offs: Tensor, a_spec: QuantSpec, b_spec: QuantSpec, multiply: Multiply) -> Tensor:
    if is_mixed(a_spec, b_spec):
        left, right, ends = multiplicands(a, b, offs.to(torch.int32), a_spec, b_spec)
        assert ends is not None
        return multiply(left.to(torch.bfloat16), right.to(torch.bfloat16), ends, 1)
    run = _scaled_after if a_spec.row.family in ("per_tensor", "per_row") else _bfloat16
    return run(a, b, offs.to(torch.int32), a_spec, b_spec, multiply)


def _scaled_after(a: Parts, b: Parts, offs: Tensor, a_spec: QuantSpec, b_spec: QuantSpec, multiply: Multiply) -> Tensor:
    """The GEMM of the elements, and their scales on its result."""
    a_scale, b_scale = _row_scales(a, b, offs)
    weight_gradient = b[0].ndim == 2
    ends = padded_ends(offs, a_spec.row.alignment) if weight_gradient else offs
    out = multiply(a[0].to(torch.bfloat16), b[0].to(torch.bfloat16), ends, a_spec.row.alignment).float()
    if weight_gradient:
        return out * a_scale.unsqueeze(-1) * b_scale.unsqueeze(-2)
    # rows of no group have scales that mean nothing
    group = group_of(offs, out.shape[0]).clamp(max=offs.shape[0] - 1)
    return torch.where(in_groups(offs, out.shape[0]), out * a_scale.unsqueeze(-1) * b_scale[group], 0)


def _bfloat16(a: Parts, b: Parts, offs: Tensor, a_spec: QuantSpec, b_spec: QuantSpec, multiply: Multiply) -> Tensor:
    """One GEMM of the elements times their block scales; NVFP4's global factors come after."""
    factors: list[Tensor] = []
    if a_spec.row.has_global_amax:
        units = [spec.unit_amax for spec in (a_spec, b_spec)]
        factors = [parts[2] / unit for parts, unit in zip((a, b), units, strict=True)]
        a, b = ([*p[:2], torch.full_like(p[2], unit)] for p, unit in zip((a, b), units, strict=True))
    left, right, ends = gemm_operands(a, b, offs, a_spec, b_spec)
    assert ends is not None
    out = multiply(_values(left), _values(right), ends, a_spec.row.alignment)
    if not factors:
        return out
    if b[0].ndim == 2:
        of_a, of_b = (f.reshape(f.shape[0], -1) for f in factors)
        return out.float() * (of_a.unsqueeze(-1) * of_b.unsqueeze(-2))
    group = group_of(offs, out.shape[0]).clamp(max=offs.shape[0] - 1)
    of_a, of_b = factors
    of_a = of_a if a_spec.row_scaled else of_a[group].unsqueeze(1)
    return out.float() * (of_a * of_b.reshape(of_b.shape[0], -1)[group])


def _values(operand: Dense) -> Tensor:
    parts, spec = operand
    return reference.dequantize(parts, spec).to(torch.bfloat16)
