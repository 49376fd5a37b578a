"""The operators of delayed scaling's state: amaxes that are taken into it, and its update after a step.

`record` and `record_since` take amaxes in, and `delayed_update` gives the scales and the history of a graph after a
step (`fxquant.kernels.state.reference`). `delayed_advance`, which writes the state in place and returns the scales one
by one, is for lowered graphs.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fxquant.kernels.operator import Reference, operator, runs_beside
from fxquant.kernels.state import reference

record = operator()(reference.record)
record_since = operator()(reference.record_since)


@operator()
def delayed_update(
    scale: Tensor, history: Tensor, forward_amax: Tensor, backward_amax: Tensor, step: Tensor, fp8_max: Tensor,
    margin: float, algorithm: str,
) -> list[Tensor]:  # fmt: skip
    """The scales [n] and the history [N, n] after a step."""
    last = reference.counted(reference.recorded(forward_amax, backward_amax, step))
    return list(reference.update(scale, history, last, fp8_max, margin=margin, algorithm=algorithm))


@delayed_update.implementation(Reference.CUDA, when=runs_beside)
def _triton_update(*state: Any) -> list[Tensor]:
    from fxquant.kernels.state import triton

    return triton.update(*state)


@operator(mutates=["scale", "history", "forward_amax", "step"])
def delayed_advance(
    scale: Tensor, history: Tensor, forward_amax: Tensor, backward_amax: Tensor, step: Tensor, fp8_max: Tensor,
    margin: float, algorithm: str,
) -> list[Tensor]:  # fmt: skip
    """Has the state itself go on to the next step; returns the scales, n tensors [1]."""
    new = delayed_update.meaning(scale, history, forward_amax, backward_amax, step, fp8_max, margin, algorithm)
    scale.copy_(new[0])
    history.copy_(new[1])
    forward_amax.zero_()
    step.add_(1)
    return [new[0].narrow(0, i, 1).clone() for i in range(len(new[0]))]


@delayed_advance.implementation(Reference.CUDA, when=runs_beside)
def _triton_advance(*state: Any) -> list[Tensor]:
    from fxquant.kernels.state import triton

    return triton.advance(*state)
