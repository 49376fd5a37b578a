"""`fxquant::linear`: one linear layer whose three GEMMs are quantized as its spec says.

The operator is CompositeImplicitAutograd: AOTAutograd traces through it, and the joint graph shows the quantize and
GEMM nodes of the forward and of the backward, each direction by itself, for the partitioner to place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxquant.compat.device import no_autocast
from fxquant.formats import LinearSpec, OperandSpec
from fxquant.kernels import custom
from fxquant.kernels.cast.ops import amax, quantize_operand, shared_spec
from fxquant.kernels.linear.ops import scaled_mm
from fxquant.kernels.operator import TRACED, Traits, operator
from fxquant.kernels.state.step import STATELESS, StepState


@dataclass(frozen=True)
class Payloads:
    """The parts of a weight that was quantized before, by direction; None where it was not."""

    rowwise: list[Tensor] | None = None
    columnwise: list[Tensor] | None = None


def _gemm(
    a: Tensor, a_spec: OperandSpec, a_direction: str, b: Tensor, b_spec: OperandSpec, b_direction: str,
    bias: Tensor | None, out_dtype: torch.dtype, fast_accum: bool, state: StepState,
    b_parts: list[Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """a x b^T with the contracted axis of each last, after both are quantized in their direction, unless b was."""
    a_parts, a_side = quantize_operand(a, a_spec, a_direction, state)
    if b_parts is None:
        b_parts, b_side = quantize_operand(b, b_spec, b_direction, state)
    else:
        b_side = shared_spec(b_spec.columnwise if b_direction == "columnwise" else b_spec.rowwise)
    if a_side.key or b_side.key:
        return custom.gemm(a_parts, a_side, b_parts, b_side, bias, out_dtype)
    if a_side.is_identity:
        left, right = a_parts[0], b_parts[0]
        dtype = torch.promote_types(left.dtype, right.dtype)
        if bias is not None:
            return torch.nn.functional.linear(left.to(dtype), right.to(dtype), bias.to(dtype)).to(out_dtype)
        return torch.matmul(left.to(dtype), right.to(dtype).mT).to(out_dtype)
    return scaled_mm(a_parts, b_parts, str(a_side), str(b_side), bias, out_dtype, fast_accum)


def needed(ctx: Any, input: Tensor, weight: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Of the two, what the gradient of the other takes: what no gradient takes may be written into, as in torch."""
    of_input, of_weight = ctx.needs_input_grad[:2]
    return input if of_weight else None, weight if of_input else None


class _Linear(torch.autograd.Function):
    """input [*batch, M, K] x weight [*batch, N, K]^T + bias [N], all of one dtype."""

    @staticmethod
    def forward(
        input: Tensor, weight: Tensor, bias: Tensor | None, spec_text: str, state: StepState, known: Payloads
    ) -> Tensor:
        spec = LinearSpec.parse(spec_text)
        state.record_forward(spec.input.rowwise, amax, input)
        state.record_forward(spec.weight.rowwise, amax, weight)
        return _gemm(
            input, spec.input, "rowwise", weight, spec.weight, "rowwise", bias, input.dtype, True, state, known.rowwise
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        input, weight, _, ctx.spec_text, ctx.state, ctx.known = inputs
        ctx.dtype = input.dtype
        ctx.save_for_backward(*needed(ctx, input, weight))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_output,) = grads
        input, weight = ctx.saved_tensors
        spec = LinearSpec.parse(ctx.spec_text)
        state: StepState = ctx.state
        grad_input = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            state.record_backward(spec.grad_output.rowwise, amax, grad_output)
        if ctx.needs_input_grad[0]:
            grad_input = _gemm(
                grad_output, spec.grad_output, "rowwise", weight, spec.weight, "columnwise", None, ctx.dtype, False,
                state, ctx.known.columnwise,
            )  # fmt: skip
        if ctx.needs_input_grad[1]:
            grad_weight = _gemm(
                grad_output, spec.grad_output, "columnwise", input, spec.input, "columnwise", None, ctx.dtype, False,
                state,
            )  # fmt: skip
        if ctx.needs_input_grad[2]:
            grad_bias = grad_output.sum(tuple(range(grad_output.ndim - 1)))
        return grad_input, grad_weight, grad_bias, None, None, None


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None, spec: str, state: StepState, known: Payloads) -> Tensor:
    autocast = LinearSpec.parse(spec).autocast
    dtype = getattr(torch, autocast) if autocast else torch.promote_types(input.dtype, weight.dtype)
    input, weight = input.to(dtype), weight.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    with no_autocast(input.device):
        if weight.ndim > 2:
            return _Linear.apply(input, weight, bias, spec, state, known)  # type: ignore[no-any-return,no-untyped-call]
        rows = input.reshape(-1, input.shape[-1]) if input.shape[-1] else input.flatten(0, -2)
        output = _Linear.apply(rows, weight, bias, spec, state, known)  # type: ignore[no-untyped-call]
        return output.reshape(*input.shape[:-1], weight.shape[0])  # type: ignore[no-any-return]


STATEFUL = (
    "Tensor? scale, Tensor(a!)? forward_amax, Tensor(b!)? backward_amax, Tensor? step, Tensor? random, str spec,"
    " Tensor[]? weight_rowwise=None, Tensor[]? weight_columnwise=None) -> Tensor"
)
"""The end of the schema of an operator that takes the state of a graph: torch infers no optional lists."""


@operator(
    key=TRACED, traits=Traits(stored_weights=True), schema=f"(Tensor input, Tensor weight, Tensor? bias, {STATEFUL}"
)
def linear_stateful(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    forward_amax: Tensor | None,
    backward_amax: Tensor | None,
    step: Tensor | None,
    random: Tensor | None,
    spec: str,
    weight_rowwise: list[Tensor] | None = None,
    weight_columnwise: list[Tensor] | None = None,
) -> Tensor:
    """`linear` with operands whose specs name slots or random streams of the `StepState`.

    A weight whose parts are given is not quantized again, and gets its gradient all the same.
    """
    state = StepState(scale, forward_amax, backward_amax, step, random)
    return _linear(input, weight, bias, spec, state, Payloads(weight_rowwise, weight_columnwise))


@operator(key=TRACED, traits=Traits(stateful=linear_stateful))
def linear(input: Tensor, weight: Tensor, bias: Tensor | None, spec: str) -> Tensor:
    """input [*, K] x weight [N, K]^T + bias [N]; or, batched, input [*batch, M, K] x weight [*batch, N, K]^T.

    The autocast dtype of the spec is applied here, since no autocast rule knows this operator.
    """
    return _linear(input, weight, bias, spec, STATELESS, Payloads())
