"""The state of a graph as its quantized operators read and write it in one step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fxquant.compat.private import largest_over_ranks
from fxquant.formats import QuantSpec
from fxquant.kernels.state.ops import record, record_since


@dataclass(frozen=True)
class StepState:
    """The tensors of a graph's state that its operators share; see `fxquant.state`.

    `scale` [n] (delayed scaling) and `random` [2] (stochastic rounding) are read. `forward_amax` [n] and
    `backward_amax` [n] are written, where they are given: amaxes of this step, the second with the latest `step` [n]
    when they were written.
    """

    scale: Tensor | None = None
    forward_amax: Tensor | None = None
    backward_amax: Tensor | None = None
    step: Tensor | None = None
    random: Tensor | None = None

    def of(self, spec: QuantSpec, groups: int | torch.SymInt = 1) -> Tensor | None:
        """The state of a quantization: its delayed scales, one of each group, or seed, step and its number [3]."""
        if spec.is_delayed:
            assert self.scale is not None, spec
            return self.scale.narrow(0, spec.slot, groups)
        if spec.stochastic and self.random is not None:
            return torch.nn.functional.pad(self.random, (0, 1), value=spec.stream // 2)
        return None

    def records_forward(self, spec: QuantSpec) -> bool:
        """Returns True if the amaxes of such an operand of the forward are wanted."""
        return spec.is_delayed and self.forward_amax is not None

    def record_forward(self, spec: QuantSpec, measure: Callable[..., Tensor], *operand: Tensor | None) -> None:
        """Takes the amaxes of an operand, one of each group, into the slots from its own on, where they are wanted."""
        if spec.is_delayed and self.forward_amax is not None:
            self.forward_amax.copy_(record(self.forward_amax, [_largest(spec, measure(*operand))], [spec.slot]))

    def record_backward(self, spec: QuantSpec, measure: Callable[..., Tensor], *operand: Tensor | None) -> None:
        """`record_forward` for a gradient: over all backwards since the last update."""
        if spec.is_delayed and self.backward_amax is not None:
            assert self.step is not None
            largest = [_largest(spec, measure(*operand))]
            self.backward_amax.copy_(record_since(self.backward_amax, self.step, largest, [spec.slot]))


def _largest(spec: QuantSpec, amaxes: Tensor) -> Tensor:
    return largest_over_ranks(amaxes, spec.over)


STATELESS = StepState()
"""The state of a graph that has none."""
