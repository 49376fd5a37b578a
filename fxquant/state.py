"""The state of delayed scaling: scales and amax histories of all slots of a graph, as a few stacked tensors.

The forward graph begins by taking in the amaxes of the step before (`update`), and each quantization then records its
own. What the forward writes and what the backward writes are different tensors, since AOTAutograd lets a graph input
change in only one of them; a step number tells which of the backward's amaxes are new.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fxquant.compat import largest_over_ranks
from fxquant.errors import RecipeError
from fxquant.kernels import delayed
from fxquant.quantizers import DelayedScalingRequest

SlotKey = tuple[str, str, int]
"""(layer, operand, which of the layer's products)."""


@dataclass
class Slots:
    """The slots that one graph asks for, in order."""

    request: DelayedScalingRequest | None = None
    keys: list[SlotKey] = field(default_factory=list)
    dtypes: list[torch.dtype] = field(default_factory=list)

    def add(self, request: DelayedScalingRequest, key: SlotKey, dtype: torch.dtype) -> int:
        """The index of a new slot. Raises RecipeError when the request differs from those before it."""
        if self.request is None:
            self.request = request
        for name in vars(request):
            if getattr(request, name) != getattr(self.request, name):
                raise RecipeError(
                    f"layer {key[0] or '<model>'!r}, {key[1]}: {name}={getattr(request, name)!r} of its "
                    f"DelayedScalingRequest differs from {getattr(self.request, name)!r} of the requests before it; "
                    "all requests of a model must be equal in every field"
                )
        layer, operand, _ = key
        self.keys.append((layer, operand, sum(k[:2] == (layer, operand) for k in self.keys)))
        self.dtypes.append(dtype)
        return len(self.keys) - 1

    def fp8_max(self, device: torch.device) -> Tensor:
        """The largest value of each slot's element format, float32 [n]."""
        return torch.tensor([torch.finfo(dtype).max for dtype in self.dtypes], device=device)


class DelayedState:
    """Scales [n], amax history [N, n] and the amaxes of the running step, for n slots.

    `forward_amax` [n] is float32; `backward_amax` [2, n] holds amaxes and the steps that wrote them, and `step` [1]
    counts forwards, as float64.
    """

    def __init__(self, n: int, length: int, device: torch.device) -> None:
        self.scale = torch.ones(n, device=device)
        self.history = torch.zeros(length, n, device=device)
        self.forward_amax = torch.zeros(n, device=device)
        self.backward_amax = torch.stack((torch.zeros(n), -torch.ones(n))).double().to(device)
        self.step = torch.zeros(1, dtype=torch.float64, device=device)

    def tensors(self) -> dict[str, Tensor]:
        """What a compiled graph takes besides its own inputs, by name."""
        names = ("scale", "history", "forward_amax", "backward_amax", "step")
        return {name: getattr(self, name) for name in names}

    def state_dict(self) -> dict[str, Tensor]:
        """Plain tensors: `scale` [n] and `amax_history` [N, n], whose row 0 is the step that is not yet taken in."""
        history = self.history.clone()
        history[0] = _recorded(self.forward_amax, self.backward_amax, self.step)
        return {"scale": self.scale.clone(), "amax_history": history}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes a state in, in place. A history of another length is cut or filled with zeros at its old end.

        Raises RecipeError when the number of slots differs.
        """
        scale, history = state["scale"], state["amax_history"]
        if scale.shape != self.scale.shape or history.shape[1:] != self.scale.shape:
            raise RecipeError(
                f"the saved delayed-scaling state has {tuple(scale.shape)} scales and this model "
                f"{tuple(self.scale.shape)}: it was saved from another model or recipe"
            )
        self.scale.copy_(scale)
        self.history.zero_()
        kept = min(len(history), len(self.history)) - 1
        if kept:
            self.history[-kept:] = history[-kept:]
        self.forward_amax.copy_(history[0])
        self.backward_amax[0].zero_()
        self.backward_amax[1].fill_(-1)
        self.step.zero_()


def _recorded(forward_amax: Tensor, backward_amax: Tensor, step: Tensor) -> Tensor:
    """The amaxes [n] recorded since the last update, 0 where there is none."""
    new = torch.where(backward_amax[1] >= step, backward_amax[0], 0).float()
    return torch.fmax(forward_amax, new)


def update(
    scale: Tensor,
    history: Tensor,
    forward_amax: Tensor,
    backward_amax: Tensor,
    step: Tensor,
    fp8_max: Tensor,
    request: DelayedScalingRequest,
    group: str | None,
) -> tuple[Tensor, Tensor]:
    """The scales and history after the last step, as a function of the state; see `fxquant.kernels.delayed`.

    `group` names the process group whose largest amaxes count.
    """
    last = _recorded(forward_amax, backward_amax, step)
    if group is not None and request.reduce_amax:
        last = largest_over_ranks(last, group)
    if callable(request.amax_compute_algo) or request.scaling_factor_compute_algo is not None:
        return delayed.update_with(
            scale, history, last, fp8_max, margin=request.margin, algorithm=request.amax_compute_algo,
            scale_algorithm=request.scaling_factor_compute_algo, recipe=request,
        )  # fmt: skip
    return delayed.update(
        scale, history, last, fp8_max, margin=request.margin, algorithm=str(request.amax_compute_algo)
    )


class DelayedStore:
    """The delayed states of one compiled model: for each set of slots that its graphs ask for, one a history length.

    Of the states of one set of slots the active one is the truth; another takes it over when it becomes active.
    """

    def __init__(self) -> None:
        self._states: dict[tuple[tuple[SlotKey, ...], int, torch.device], DelayedState] = {}
        self._active: dict[tuple[SlotKey, ...], DelayedState] = {}
        self._pending: dict[int, dict[str, Tensor]] = {}

    def get(self, slots: Slots, device: torch.device) -> DelayedState:
        """The state of these slots, made active."""
        assert slots.request is not None
        keys, length = tuple(slots.keys), slots.request.amax_history_len
        state = self._states.get((keys, length, device))
        if state is None:
            state = self._states[keys, length, device] = DelayedState(len(keys), length, device)
        if keys not in self._active and len(self._active) in self._pending:
            state.load_state_dict(self._pending.pop(len(self._active)))
        self.activate(state)
        return state

    def activate(self, state: DelayedState) -> None:
        """Makes a state the one that counts for its slots; what another one knew so far comes along."""
        keys = next(key[0] for key, each in self._states.items() if each is state)
        before = self._active.get(keys)
        if before is not None and before is not state:
            state.load_state_dict(before.state_dict())
        self._active[keys] = state

    def state_dict(self) -> dict[str, Tensor]:
        """The active states as plain tensors, in the order in which their graphs were compiled."""
        return {
            f"{i}.{name}": tensor
            for i, state in enumerate(self._active.values())
            for name, tensor in state.state_dict().items()
        }

    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        """Restores what `state_dict` gave; states of graphs that are not compiled yet wait for them."""
        by_index: dict[int, dict[str, Tensor]] = {}
        for name, tensor in saved.items():
            index, _, key = name.partition(".")
            by_index.setdefault(int(index), {})[key] = tensor
        states = list(self._active.values())
        for place, state in by_index.items():
            if place < len(states):
                states[place].load_state_dict(state)
            else:
                self._pending[place] = state


__all__ = ["DelayedState", "DelayedStore", "SlotKey", "Slots", "update"]
