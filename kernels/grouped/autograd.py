"""`fxquant::grouped_linear`: one linear layer for each group of rows, whose three GEMMs are quantized as its spec says.

The quantize and GEMM nodes that forward and backward show are of all groups at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxquant.formats import LinearSpec
from fxquant.kernels.grouped.high_precision import multiply_groups
from fxquant.kernels.grouped.ops import grouped_scaled_mm, quantize_groups, split_amax
from fxquant.kernels.linear.autograd import STATEFUL, Context, Gemms, Quantized, observer, run_linear
from fxquant.kernels.operator import TRACED, Traits, operator
from fxquant.kernels.state.step import STATELESS, StepState


def _multiply(
    left: Quantized, right: Quantized, offs: Tensor | None, bias: None, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    (a, a_spec), (b, b_spec) = left, right
    if a_spec.is_identity and b_spec.is_identity:
        dtype = torch.promote_types(a[0].dtype, b[0].dtype)
        return multiply_groups(a[0].to(dtype), b[0].to(dtype), offs).to(out_dtype)
    fast = fast_accum or a_spec.torchao  # torchao accumulates all three so, and others their outputs alone
    return grouped_scaled_mm(a, b, offs, str(a_spec), str(b_spec), out_dtype, fast)


GROUPS = Gemms(quantize=quantize_groups, amax=split_amax, multiply=_multiply, one_batch=True)


@operator(
    key=TRACED, traits=Traits(stored_weights=True), schema=f"(Tensor input, Tensor weight, Tensor? offs, {STATEFUL}"
)
def grouped_linear_stateful(
    input: Tensor, weight: Tensor, offs: Tensor | None, scale: Tensor | None, forward_amax: Tensor | None,
    backward_amax: Tensor | None, step: Tensor | None, random: Tensor | None, spec: str,
    weight_rowwise: list[Tensor] | None = None, weight_columnwise: list[Tensor] | None = None,
    probe_forward: Tensor | None = None, probe_backward: Tensor | None = None, probe: str = "",
) -> Tensor:  # fmt: skip
    """`grouped_linear` whose specs name random streams, or the slot of their first group, of the `StepState`.

    Weights whose parts are given are not quantized again.
    """
    state = StepState(scale, forward_amax, backward_amax, step, random)
    measuring = observer(probe_forward, probe_backward, probe, grouped=True)
    context = Context(GROUPS, LinearSpec.parse(spec), state, weight_rowwise, weight_columnwise, measuring)
    return run_linear(input, weight, None, offs, context)


@operator(key=TRACED, traits=Traits(stateful=grouped_linear_stateful))
def grouped_linear(input: Tensor, weight: Tensor, offs: Tensor | None, spec: str) -> Tensor:
    """Every group of rows of input [M, K] times its own weight of [G, N, K], transposed: [M, N].

    `offs` (int32 [G], on the device) are the ends of the groups; sizes may be any, zero too. Rows behind the last
    offset give zeros, and neither they nor the zeros get or give gradients. Without `offs` the groups are the batch
    of input [*batch, M, K] and weight [*batch, N, K]. The autocast dtype of the spec is applied here.
    """
    return run_linear(input, weight, None, offs, Context(GROUPS, LinearSpec.parse(spec), STATELESS))
