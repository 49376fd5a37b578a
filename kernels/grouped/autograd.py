"""`fxquant::grouped_linear`: one linear layer for each group of rows, whose three GEMMs are quantized as its spec says.

As `fxquant::linear` it is CompositeImplicitAutograd: AOTAutograd traces through it, and forward and backward show the
quantize and GEMM nodes of all groups at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxquant.compat.device import no_autocast
from fxquant.formats import LinearSpec, OperandSpec
from fxquant.kernels.cast.ops import shared_spec
from fxquant.kernels.grouped.high_precision import multiply_groups
from fxquant.kernels.grouped.ops import grouped_scaled_mm, quantize_groups, split_amax
from fxquant.kernels.linear.autograd import STATEFUL, Payloads, needed
from fxquant.kernels.operator import TRACED, Traits, operator
from fxquant.kernels.state.step import STATELESS, StepState


def _gemm(
    a: tuple[Tensor, Tensor | None], a_spec: OperandSpec, a_direction: str,
    b: tuple[Tensor, Tensor | None], b_spec: OperandSpec, b_direction: str,
    offs: Tensor | None, out_dtype: torch.dtype, fast_accum: bool, state: StepState,
    b_parts: list[Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """a x b^T in every group, after both (a tensor and its offsets each) are quantized in their direction.

    Unless the parts of b are given.
    """
    a_parts, a_side = quantize_groups(*a, a_spec, a_direction, state)
    if b_parts is None:
        b_parts, b_side = quantize_groups(*b, b_spec, b_direction, state)
    else:
        b_side = shared_spec(b_spec.columnwise if b_direction == "columnwise" else b_spec.rowwise)
    if a_side.is_identity:
        left, right = a_parts[0], b_parts[0]
        dtype = torch.promote_types(left.dtype, right.dtype)
        return multiply_groups(left.to(dtype), right.to(dtype), offs).to(out_dtype)
    return grouped_scaled_mm(a_parts, b_parts, offs, str(a_side), str(b_side), out_dtype, fast_accum)


class _GroupedLinear(torch.autograd.Function):
    """input [M, K] x weight [G, N, K]^T by the groups of `offs`, or input [G, M, K]; both of one dtype."""

    @staticmethod
    def forward(
        input: Tensor, weight: Tensor, offs: Tensor | None, spec_text: str, state: StepState, known: Payloads
    ) -> Tensor:
        spec = LinearSpec.parse(spec_text)
        state.record_forward(spec.input.rowwise, split_amax, input, offs)
        state.record_forward(spec.weight.rowwise, split_amax, weight, None)
        return _gemm(
            (input, offs), spec.input, "rowwise", (weight, None), spec.weight, "rowwise", offs, input.dtype, True,
            state, known.rowwise,
        )  # fmt: skip

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        input, weight, offs, ctx.spec_text, ctx.state, ctx.known = inputs
        ctx.dtype = input.dtype
        ctx.save_for_backward(*needed(ctx, input, weight), offs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_output,) = grads
        input, weight, offs = ctx.saved_tensors
        spec = LinearSpec.parse(ctx.spec_text)
        state: StepState = ctx.state
        fast = spec.grad_output.rowwise.torchao  # torchao accumulates all three so, and others their outputs alone
        grad_input = grad_weight = None
        if any(ctx.needs_input_grad[:2]):
            state.record_backward(spec.grad_output.rowwise, split_amax, grad_output, offs)
        if ctx.needs_input_grad[0]:
            grad_input = _gemm(
                (grad_output, offs), spec.grad_output, "rowwise", (weight, None), spec.weight, "columnwise", offs,
                ctx.dtype, fast, state, ctx.known.columnwise,
            )  # fmt: skip
        if ctx.needs_input_grad[1]:
            grad_weight = _gemm(
                (grad_output, offs), spec.grad_output, "columnwise", (input, offs), spec.input, "columnwise", offs,
                ctx.dtype, fast, state,
            )  # fmt: skip
        return grad_input, grad_weight, None, None, None, None


def _grouped_linear(
    input: Tensor, weight: Tensor, offs: Tensor | None, spec: str, state: StepState, known: Payloads
) -> Tensor:
    autocast = LinearSpec.parse(spec).autocast
    dtype = getattr(torch, autocast) if autocast else torch.promote_types(input.dtype, weight.dtype)
    input, weight = input.to(dtype), weight.to(dtype)
    batch = weight.shape[:-2]
    with no_autocast(input.device):
        if offs is not None:
            return _GroupedLinear.apply(input, weight, offs, spec, state, known)  # type: ignore[no-any-return,no-untyped-call]
        if len(batch) > 1:
            input, weight = input.flatten(0, -3), weight.flatten(0, -3)
        output = _GroupedLinear.apply(input, weight, None, spec, state, known)  # type: ignore[no-untyped-call]
        return output.unflatten(0, batch) if len(batch) > 1 else output  # type: ignore[no-any-return]


@operator(
    key=TRACED, traits=Traits(stored_weights=True), schema=f"(Tensor input, Tensor weight, Tensor? offs, {STATEFUL}"
)
def grouped_linear_stateful(
    input: Tensor,
    weight: Tensor,
    offs: Tensor | None,
    scale: Tensor | None,
    forward_amax: Tensor | None,
    backward_amax: Tensor | None,
    step: Tensor | None,
    random: Tensor | None,
    spec: str,
    weight_rowwise: list[Tensor] | None = None,
    weight_columnwise: list[Tensor] | None = None,
) -> Tensor:
    """`grouped_linear` whose specs name random streams, or the slot of their first group, of the `StepState`.

    Weights whose parts are given are not quantized again.
    """
    state = StepState(scale, forward_amax, backward_amax, step, random)
    return _grouped_linear(input, weight, offs, spec, state, Payloads(weight_rowwise, weight_columnwise))


@operator(key=TRACED, traits=Traits(stateful=grouped_linear_stateful))
def grouped_linear(input: Tensor, weight: Tensor, offs: Tensor | None, spec: str) -> Tensor:
    """Every group of rows of input [M, K] times its own weight of [G, N, K], transposed: [M, N].

    `offs` (int32 [G], on the device) are the ends of the groups; sizes may be any, zero too. Rows behind the last
    offset give zeros, and neither they nor the zeros get or give gradients. Without `offs` the groups are the batch
    of input [*batch, M, K] and weight [*batch, N, K]. The autocast dtype of the spec is applied here.
    """
    return _grouped_linear(input, weight, offs, spec, STATELESS, Payloads())
