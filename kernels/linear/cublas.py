"""GEMMs of quantized operands on CUDA: `_scaled_mm` where it takes the scaling, else bfloat16 on exact values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fxquant.compat.private import ScalingType, SwizzleType, torch_scaled_mm
from fxquant.compat.values import statically_known_true
from fxquant.formats import QuantSpec
from fxquant.kernels.cast import reference
from fxquant.kernels.cast.swizzle import swizzle
from fxquant.kernels.linear import choice
from fxquant.kernels.linear.choice import GemmFacts, GemmKernel
from fxquant.kernels.linear.ops import scaled_mm
from fxquant.kernels.operator import Parts


def by_cublas(
    a: Parts, b: Parts, a_spec: str, b_spec: str, bias: Tensor | None, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    """`fxquant::scaled_mm` by the best kernel that is not Triton's."""
    arguments = (a, b, a_spec, b_spec, bias, out_dtype, fast_accum)
    facts = replace(GemmFacts.of(*arguments), triton=False)
    return scaled_mm.run(scaled_mm.choose(facts).kernel)(*arguments)


def _dense(parts: Parts) -> list[Tensor]:
    """The parts of an operand by rows: those of a weight that FSDP2 gathered for the backward lie transposed."""
    return [part.contiguous() for part in parts]


@scaled_mm.implementation(GemmKernel.PER_TENSOR, when=choice.per_tensor)
@scaled_mm.implementation(GemmKernel.PER_ROW, when=choice.per_row)
def _fp8_mm(
    a: Parts, b: Parts, a_spec: str, b_spec: str, bias: Tensor | None, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    (a_data, a_scale), (b_data, b_scale) = a, _dense(b)
    features = b_data.shape[0]
    spare = -features % 16
    if spare:  # _scaled_mm wants both sizes of its right operand in multiples of 16
        b_data = torch.nn.functional.pad(b_data.view(torch.uint8), (0, 0, 0, spare)).view(b_data.dtype)
        if b_scale.numel() > 1 or b_scale.ndim > 1:
            b_scale = torch.nn.functional.pad(b_scale, (0, 0, 0, spare), value=1.0)
    per_row = a_scale.ndim > 1 or b_scale.ndim > 1
    fused_bias = bias if bias is not None and out_dtype == bias.dtype == torch.bfloat16 and not spare else None
    if per_row and out_dtype == torch.bfloat16:
        # one scale for the tensor is the same scale for each of its rows
        left = a_scale if a_scale.ndim > 1 else a_scale.expand(a_data.shape[0], 1).contiguous()
        right = b_scale if b_scale.ndim > 1 else b_scale.expand(b_data.shape[0], 1).contiguous()
        out = torch_scaled_mm(
            a_data, b_data.t(), scale_a=left, scale_b=right.t(), bias=fused_bias, out_dtype=out_dtype,
            use_fast_accum=fast_accum,
        )  # fmt: skip
    elif per_row:
        one = torch.ones([], dtype=torch.float32, device=a_data.device)
        out = torch_scaled_mm(
            a_data, b_data.t(), scale_a=one, scale_b=one, out_dtype=torch.float32, use_fast_accum=fast_accum
        )
        out = out * a_scale * b_scale.reshape(-1)
    else:
        out = torch_scaled_mm(
            a_data, b_data.t(), scale_a=a_scale.reshape([]), scale_b=b_scale.reshape([]), bias=fused_bias,
            out_dtype=out_dtype, use_fast_accum=fast_accum,
        )  # fmt: skip
    out = out[:, :features] if spare else out
    return out.to(out_dtype) if bias is None or fused_bias is not None else (out + bias).to(out_dtype)


@scaled_mm.implementation(GemmKernel.MXFP8, when=choice.mxfp8)
@scaled_mm.implementation(GemmKernel.NVFP4, when=choice.nvfp4)
def _tensor_core_mm(
    a: Parts, b: Parts, a_spec: str, b_spec: str, bias: Tensor | None, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    """A GEMM whose tensor cores read the scales of blocks, which they want in the order of `swizzle`.

    NVFP4's global factors are those of the result, where a row of an operand has one of its own; else torch has them.
    """
    specs = QuantSpec.parse(a_spec), QuantSpec.parse(b_spec)
    features, kind = b[0].shape[0], specs[0].row
    factors = [p[2] / spec.unit_amax for p, spec in zip((a, b), specs, strict=True) if kind.has_global_amax]
    by_row = any(spec.row_scaled for spec in specs)
    block = ScalingType.BlockWise1x16 if kind.has_global_amax else ScalingType.BlockWise1x32
    kinds, swizzles = [block], [SwizzleType.SWIZZLE_32_4_4]
    scales = [[_swizzled(p, spec)] for p, spec in zip((a, b), specs, strict=True)]
    if factors and not by_row:
        scales = [[scale[0], factor] for scale, factor in zip(scales, factors, strict=True)]
        kinds, swizzles = [block, ScalingType.TensorWise], [*swizzles, SwizzleType.NO_SWIZZLE]
    spare = -features % 16
    fuses = bias is not None and out_dtype == bias.dtype == torch.bfloat16 and not spare and not by_row
    last = bias is None or fuses
    out = torch.nn.functional.scaled_mm(
        _payload(a, specs[0]), _payload(b, specs[1], spare).t(), scales[0], kinds, scales[1], kinds, swizzles, swizzles,
        bias if fuses else None, out_dtype if last and not by_row else torch.float32,
    )  # fmt: skip
    out = out.narrow(1, 0, features) if spare else out
    if by_row:
        out = out * factors[0].reshape(-1, 1) * factors[1].reshape(1, -1)
    return (out if last or bias is None else out + bias.float()).to(out_dtype)


def _payload(parts: Parts, spec: QuantSpec, rows: int = 0) -> Tensor:
    """The elements of an operand by rows, with so many `rows` of zeros behind them, whole units of 16 bytes wide."""
    data, element = parts[0].contiguous(), spec.row.element
    assert element is not None
    spare = -data.shape[1] % 16
    if rows or not statically_known_true(spare == 0):
        data = torch.nn.functional.pad(data.view(torch.uint8), (0, spare, 0, rows))
    return data if data.dtype == element.dtype else data.view(element.dtype)


def _swizzled(parts: Parts, spec: QuantSpec) -> Tensor:
    """The scales of an operand in the order of `swizzle`, in the dtype by which torch knows them."""
    dtype = spec.row.scale_dtype
    assert dtype is not None
    scale = parts[1].contiguous()
    return (scale if spec.swizzled else swizzle(scale)).view(dtype)


@scaled_mm.implementation(GemmKernel.TILES, when=choice.tiles)
@scaled_mm.implementation(GemmKernel.BLOCKS, when=choice.blocks)
def _block_mm(
    a: Parts, b: Parts, a_spec: str, b_spec: str, bias: Tensor | None, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    (a_data, a_scale), (b_data, b_scale) = a, _dense(b)
    dtype = torch.bfloat16 if out_dtype == torch.bfloat16 and bias is None else torch.float32
    if statically_known_true(a_data.shape[1] == 0):  # a sum of nothing, which cuBLAS refuses here
        empty = torch.zeros(a_data.shape[0], b_data.shape[0], dtype=out_dtype, device=a_data.device)
        return empty if bias is None else empty + bias.to(out_dtype)
    if QuantSpec.parse(b_spec).row.block[0] == 1:
        b_scale, b_kind = _by_columns(b_scale), ScalingType.BlockWise1x128
    else:  # cuBLAS reads the scales of a row of tiles in fours
        b_scale = torch.nn.functional.pad(b_scale, (0, -b_scale.shape[1] % 4)).t()
        b_kind = ScalingType.BlockWise128x128
    out = torch.ops.aten._scaled_mm_v2(
        a_data, b_data.t(), [_by_columns(a_scale)], [ScalingType.BlockWise1x128.value], [0], [b_scale],
        [b_kind.value], [0], None, dtype,
    )  # fmt: skip
    return (out if bias is None else out + bias.float()).to(out_dtype)  # type: ignore[no-any-return]


def portable_block_mm(
    a: Tensor, b: Tensor, a_scale: Sequence[Tensor], a_kind: Sequence[int], a_swizzle: Sequence[int],
    b_scale: Sequence[Tensor], b_kind: Sequence[int], b_swizzle: Sequence[int], bias: None, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """`_scaled_mm_v2` as `_block_mm` calls it, by an operator that packages can call.

    torch has no C function of `_scaled_mm_v2`, and what calls it instead mistakes one dtype for another. The older
    operator knows blocks by the shapes of their scales, and takes tiles whose rows come in fours: others get columns
    of zeros.
    """
    left, right = a_scale[0], b_scale[0]
    spare = -a.shape[1] % 512 if b_kind[0] == ScalingType.BlockWise128x128.value else 0
    if spare:
        a = torch.nn.functional.pad(a.view(torch.uint8), (0, spare)).view(a.dtype)
        b = torch.nn.functional.pad(b.t().view(torch.uint8), (0, spare)).view(b.dtype).t()
        left = torch.nn.functional.pad(left.t(), (0, 0, 0, spare // 128)).t()
    return torch_scaled_mm(a, b, scale_a=left, scale_b=right, out_dtype=out_dtype)


def _by_columns(scale: Tensor) -> Tensor:
    """The same scales, stored by columns."""
    return scale.t().contiguous().t()


@scaled_mm.implementation(GemmKernel.ONE_SIDED, when=choice.one_sided, fallback=True)
def _one_sided_mm(
    a: Parts, b: Parts, a_spec: str, b_spec: str, bias: Tensor | None, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    """The GEMM of the operand that is not quantized, in its dtype, with the values of the other in that dtype."""
    left_spec, right_spec = QuantSpec.parse(a_spec), QuantSpec.parse(b_spec)
    dtype = a[0].dtype if left_spec.is_identity else b[0].dtype
    values = reference.dequantize(a, left_spec), reference.dequantize(b, right_spec)
    left, right = (x.to(dtype) for x in reference.multiplicands(values[0], left_spec, values[1], right_spec))
    if bias is not None and bias.dtype == dtype:
        return torch.nn.functional.linear(left, right, bias).to(out_dtype)
    out = torch.matmul(left, right.mT)
    return (out if bias is None else out + bias).to(out_dtype)


def _block_values(parts: Parts, spec: QuantSpec) -> Tensor:
    """Elements times their block scales in bfloat16, which holds them."""
    if spec.row.has_global_amax:
        parts = [*parts[:2], torch.full_like(parts[2], spec.unit_amax)]
    return reference.dequantize(parts, spec).to(torch.bfloat16)


def _launched_values(parts: Parts, spec: QuantSpec) -> Tensor:
    """The same: for NVFP4 by a Triton kernel."""
    if spec.row.family != "nvfp4" or spec.swizzled or not statically_known_true(parts[0].numel() > 0):
        return _block_values(parts, spec)
    from fxquant.kernels.cast.triton_values import nvfp4_values

    return nvfp4_values(parts)


@scaled_mm.implementation(GemmKernel.EMULATED, when=choice.emulated, fallback=True)
def _bfloat16_mm(
    a: Parts, b: Parts, a_spec: str, b_spec: str, bias: Tensor | None, out_dtype: torch.dtype, fast_accum: bool,
    values: Callable[[Parts, QuantSpec], Tensor] = _block_values,
) -> Tensor:  # fmt: skip
    """One GEMM of the elements times their block scales (`values`), accumulated in float32.

    NVFP4's global factors come after, and scales of tensors and rows.
    """
    factors: list[Tensor] = []
    sides: list[Tensor] = []
    for parts, spec in ((a, QuantSpec.parse(a_spec)), (b, QuantSpec.parse(b_spec))):
        long = spec.row.family in ("per_tensor", "per_row")
        if long or spec.row.has_global_amax:
            factor = parts[1] if long else parts[2] / spec.unit_amax
            factors.append(factor.mT if sides and factor.ndim > 1 else factor)  # of the right operand: one a column
        if long:
            sides.append(parts[0].to(torch.bfloat16))
            continue
        sides.append(values(parts, spec))
    if len(factors) == 2 and all(factor.ndim == 1 for factor in factors):
        factors = [factors[0] * factors[1]]
    left, right = sides[0], sides[1].mT
    if not factors and bias is None and out_dtype == torch.bfloat16:
        return torch.matmul(left, right)
    multiply = torch.mm if left.ndim == 2 else torch.bmm
    batch = left.shape[:-2]
    if left.ndim > 3:
        left, right = left.flatten(0, -3), right.flatten(0, -3)
    out = multiply(left, right, out_dtype=torch.float32)
    if len(batch) > 1:
        out = out.reshape(*batch, *out.shape[-2:])
    for factor in factors:
        out = out * factor
    if bias is not None:
        out = out + bias.float()
    return out.to(out_dtype)


def emulated_at_once(
    a: Parts, b: Parts, a_spec: str, b_spec: str, bias: Tensor | None, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    """`GemmKernel.EMULATED` in a graph that may have Triton kernels: a launch dequantizes an operand in NVFP4."""
    return _bfloat16_mm(a, b, a_spec, b_spec, bias, out_dtype, fast_accum, _launched_values)
