"""Delayed scaling of weights that are gathered quantized: the scale that the graph behind the gather is going to take.

A graph begins with the update of its scales, and a weight is gathered before that. So the update of the weight's slot
is made here, on copies. The state is the graph's, from its first run on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fxquant.compat.inside.placements import local_part_of
from fxquant.quantizers import DelayedScalingRequest
from fxquant.state import DelayedState, update


class DelayedScale:
    """The delayed scale of one weight; `used` is the one of its last gather for a forward."""

    def __init__(self, request: DelayedScalingRequest) -> None:
        self._request = request
        self._state: DelayedState | None = None
        self._slot = 0
        self._loaded: Mapping[str, Tensor] | None = None
        self.used: Tensor | None = None

    def read_from(self, state: DelayedState, slot: int) -> None:
        """Takes scales from a slot of a graph's state from now on."""
        self._state, self._slot, self._loaded = state, slot, None

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Begins with saved values, unless a graph has the state already, which has them too then."""
        self._loaded = values if self._state is None else None

    @torch.no_grad()
    def following(self, device: torch.device) -> Tensor:
        """The scale [1] of the next step of training.

        A forward without gradients takes it too: its amaxes are agreed on by all ranks, unlike those of activations.
        """
        state, slot = self._state, self._slot
        if state is None:
            state = DelayedState(["weight"], self._request.amax_history_len, device)
            if self._loaded is not None:
                state.write({name: value.unsqueeze(-1) for name, value in self._loaded.items()}, [0])
        tensors = {name: tensor.narrow(-1, slot, 1) for name, tensor in state.tensors().items()}
        dtype = self._request.fp8_format.dtype("weight")
        tensors["fp8_max"] = torch.tensor([torch.finfo(dtype).max], device=device)
        scale, _ = update(tensors, self._request, None)
        return scale.clone()


def load_scales(module: nn.Module, values: Mapping[str, Mapping[str, Any]]) -> None:
    """Gives the weights of a module the saved values of their slots, by address."""
    for name, part in module.named_modules():
        layer = getattr(local_part_of(getattr(part, "weight", None)), "layer", None)
        saved, delayed = values.get(f"{name}.weight"), getattr(layer, "delayed", None)
        if saved is not None and isinstance(delayed, DelayedScale):
            delayed.load(saved)
