"""`fxquant::linear`: one linear layer whose three GEMMs are quantized as its spec says.

The operator is CompositeImplicitAutograd: AOTAutograd traces through it, and the joint graph shows the quantize and
GEMM nodes of the forward and of the backward, each direction by itself, for the partitioner to place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxquant.formats import LinearSpec, OperandSpec
from fxquant.kernels.ops import _library, quantize_operand


def _gemm(
    a: Tensor, a_spec: OperandSpec, a_direction: str, b: Tensor, b_spec: OperandSpec, b_direction: str,
    bias: Tensor | None, out_dtype: torch.dtype, fast_accum: bool,
) -> Tensor:  # fmt: skip
    """a x b^T with the contracted axis of each last, after both are quantized in their direction."""
    a_parts, a_side = quantize_operand(a, a_spec, a_direction)
    b_parts, b_side = quantize_operand(b, b_spec, b_direction)
    if a_side.is_identity:
        left, right = a_parts[0], b_parts[0]
        dtype = torch.promote_types(left.dtype, right.dtype)
        if bias is not None:
            return torch.nn.functional.linear(left.to(dtype), right.to(dtype), bias.to(dtype)).to(out_dtype)
        return torch.matmul(left.to(dtype), right.to(dtype).mT).to(out_dtype)
    return torch.ops.fxquant.scaled_mm(  # type: ignore[no-any-return]
        a_parts, b_parts, str(a_side), str(b_side), bias, out_dtype, fast_accum
    )


class _Linear(torch.autograd.Function):
    """input [*batch, M, K] x weight [*batch, N, K]^T + bias [N], all of one dtype."""

    @staticmethod
    def forward(input: Tensor, weight: Tensor, bias: Tensor | None, spec_text: str) -> Tensor:
        spec = LinearSpec.parse(spec_text)
        return _gemm(input, spec.input, "rowwise", weight, spec.weight, "rowwise", bias, input.dtype, True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        input, weight, _, ctx.spec_text = inputs
        ctx.save_for_backward(input, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_output,) = grads
        input, weight = ctx.saved_tensors
        spec = LinearSpec.parse(ctx.spec_text)
        grad_input = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_input = _gemm(
                grad_output, spec.grad_output, "rowwise", weight, spec.weight, "columnwise", None, input.dtype, False
            )
        if ctx.needs_input_grad[1]:
            grad_weight = _gemm(
                grad_output, spec.grad_output, "columnwise", input, spec.input, "columnwise", None, weight.dtype, False
            )
        if ctx.needs_input_grad[2]:
            grad_bias = grad_output.sum(tuple(range(grad_output.ndim - 1)))
        return grad_input, grad_weight, grad_bias, None


def linear(input: Tensor, weight: Tensor, bias: Tensor | None, spec: str) -> Tensor:
    """input [*, K] x weight [N, K]^T + bias [N]; or, batched, input [*batch, M, K] x weight [*batch, N, K]^T.

    The autocast dtype of the spec is applied here, since no autocast rule knows this operator.
    """
    autocast = LinearSpec.parse(spec).autocast
    dtype = getattr(torch, autocast) if autocast else torch.promote_types(input.dtype, weight.dtype)
    input, weight = input.to(dtype), weight.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    with torch.autocast(input.device.type, enabled=False):
        if weight.ndim > 2:
            return _Linear.apply(input, weight, bias, spec)  # type: ignore[no-any-return,no-untyped-call]
        rows = input.reshape(-1, input.shape[-1]) if input.shape[-1] else input.flatten(0, -2)
        output = _Linear.apply(rows, weight, bias, spec)  # type: ignore[no-untyped-call]
        return output.reshape(*input.shape[:-1], weight.shape[0])  # type: ignore[no-any-return]


_library.define(
    "linear(Tensor input, Tensor weight, Tensor? bias, str spec) -> Tensor", tags=torch.Tag.pt2_compliant_tag
)
_library.impl("linear", linear, "CompositeImplicitAutograd")
