"""The GEMMs of quantized operands, alone and with what reads their result."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxquant.formats import QuantSpec, check_parts
from fxquant.kernels.cast import reference
from fxquant.kernels.cast.pieces import dequantized
from fxquant.kernels.linear import choice, gluon_op
from fxquant.kernels.linear.choice import GemmFacts, GemmKernel
from fxquant.kernels.linear.epilogues import ACTIVATIONS
from fxquant.kernels.operator import Parts, operator, runs_beside


@operator(reference=GemmKernel.REFERENCE)
def scaled_mm(
    a: Parts, b: Parts, a_spec: str, b_spec: str, bias: Tensor | None, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    """a [*, M, K] x b [*, N, K]^T + bias [N] in `out_dtype`."""
    return reference.scaled_mm(a, QuantSpec.parse(a_spec), b, QuantSpec.parse(b_spec), bias, out_dtype)


@scaled_mm.in_pieces
def _scaled_mm_in_pieces(
    a: Parts, b: Parts, a_spec: str, b_spec: str, bias: Tensor | None, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    specs = QuantSpec.parse(a_spec), QuantSpec.parse(b_spec)
    return reference.scaled_mm(a, specs[0], b, specs[1], bias, out_dtype, dequantized)


@scaled_mm.fake
def _scaled_mm_fake(
    a: Parts, b: Parts, a_spec: str, b_spec: str, bias: object, out_dtype: torch.dtype, _: bool
) -> Tensor:
    check_parts(a, QuantSpec.parse(a_spec))
    check_parts(b, QuantSpec.parse(b_spec))
    return a[0].new_empty([*a[0].shape[:-1], b[0].shape[-2]], dtype=out_dtype)


scaled_mm.facts(GemmFacts.of)


@scaled_mm.implementation(GemmKernel.FEW_ROWS, when=choice.few_rows)
def _few_rows(
    a: Parts, b: Parts, a_spec: str, b_spec: str, bias: Tensor | None, out_dtype: torch.dtype, fast_accum: bool,
    epilogue: str | None = None, other: Tensor | None = None, early: bool = False,
) -> Tensor:  # fmt: skip
    """A GEMM that reads its weight once, with what `fxquant.passes.lower.few_rows` has it take over."""
    from fxquant.kernels.linear import triton_few_rows

    specs = QuantSpec.parse(a_spec), QuantSpec.parse(b_spec)
    return triton_few_rows.scaled_mm(a, specs[0], b, specs[1], bias, out_dtype, epilogue, other, early)


@scaled_mm.implementation(GemmKernel.WEIGHT_ONLY_DIRECT, when=choice.weight_only_direct)
def _weight_only_direct(
    a: Parts, b: Parts, a_spec: str, b_spec: str, bias: Tensor | None, out_dtype: torch.dtype, fast_accum: bool,
    epilogue: str | None = None, other: Tensor | None = None, early: bool = False,
) -> Tensor:  # fmt: skip
    """The same of an operand that is not quantized, by a weight that is dequantized on its way into registers."""
    return gluon_op.scaled_mm(a[0], b, b_spec, bias, out_dtype, epilogue, other, early)


@scaled_mm.implementation(GemmKernel.WEIGHT_ONLY, when=choice.weight_only)
def _weight_only(
    a: Parts, b: Parts, a_spec: str, b_spec: str, bias: Tensor | None, out_dtype: torch.dtype, fast_accum: bool,
    epilogue: str | None = None, other: Tensor | None = None, early: bool = False,
) -> Tensor:  # fmt: skip
    """The same by a kernel of Triton's own, which packages hold as well."""
    from fxquant.kernels.linear import triton_weight_only

    return triton_weight_only.scaled_mm(a[0], b, QuantSpec.parse(b_spec), bias, out_dtype, epilogue, other, early)


@scaled_mm.implementation(GemmKernel.WEIGHT_ONLY_WIDE, when=choice.weight_only_wide)
def _weight_only_wide(
    a: Parts, b: Parts, a_spec: str, b_spec: str, bias: Tensor | None, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    """The same for more rows; nothing is joined to it."""
    from fxquant.kernels.linear import triton_weight_only

    return triton_weight_only.wide_mm(a[0], b, QuantSpec.parse(b_spec), bias, out_dtype)


@scaled_mm.implementation(GemmKernel.BLOCKS_WARPS, when=choice.blocks_by_warps)
@scaled_mm.implementation(GemmKernel.TILES_WARPS, when=choice.tiles_by_warps)
def _blocks_by_warps(
    a: Parts, b: Parts, a_spec: str, b_spec: str, bias: Tensor | None, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    """A GEMM of elements with scales of 128 along K whose warps have different work."""
    tiled = QuantSpec.parse(b_spec).row.block[0] != 1
    out = gluon_op.block_mm(a, b, tiled, out_dtype if bias is None else torch.float32)
    return out if bias is None else (out + bias.float()).to(out_dtype)


@operator()
def fused_scaled_mm(
    a: Parts, b: Parts, a_spec: str, b_spec: str, bias: Tensor | None, out_dtype: torch.dtype, fast_accum: bool,
    activation: str, residual: Tensor | None, record: bool,
) -> list[Tensor]:  # fmt: skip
    """activation(a x b^T + bias) + residual, and the amax of that to `record` it."""
    y = scaled_mm.meaning(a, b, a_spec, b_spec, bias, out_dtype, fast_accum)
    y = ACTIVATIONS[activation](y) if activation else y
    y = y if residual is None else y + residual
    return [y, reference.amax(y)] if record else [y]


@fused_scaled_mm.fake
def _fused_scaled_mm_fake(*args: Any) -> list[Tensor]:
    y = _scaled_mm_fake(*args[:7])
    return [y, y.new_empty([1], dtype=torch.float32)] if args[-1] else [y]


@fused_scaled_mm.implementation(GemmKernel.TRITON, when=runs_beside)
def _fused(
    a: Parts, b: Parts, a_spec: str, b_spec: str, bias: Tensor | None, out_dtype: torch.dtype, fast_accum: bool,
    activation: str, residual: Tensor | None, record: bool,
) -> list[Tensor]:  # fmt: skip
    from fxquant.kernels.linear import triton_gemm

    return triton_gemm.scaled_mm(
        a, QuantSpec.parse(a_spec), b, QuantSpec.parse(b_spec), bias, out_dtype, fast_accum, activation=activation,
        residual=residual, record=record,
    )  # fmt: skip
