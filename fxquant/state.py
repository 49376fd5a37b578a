"""The state of a compiled graph, as a few tensors: the memory of delayed scaling and of stochastic rounding.

Delayed scaling keeps scales and amax histories of all slots of a graph, stacked. The forward graph begins by taking in
the amaxes of the step before (`update`), and each quantization then records its own. Forward and backward write
different tensors, since AOTAutograd lets a graph input change in only one of them; a step number tells which of the
backward's amaxes are new.

Stochastic rounding keeps a seed and the number of the step, from which `fxquant.kernels.cast.philox` makes all random
bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fxquant.compat.private import largest_over_ranks
from fxquant.compat.ranks import rank
from fxquant.errors import RecipeError
from fxquant.kernels.state import reference as delayed
from fxquant.quantizers import DelayedScalingRequest

SlotKey = tuple[str, str, int]
"""(layer, operand, which of the layer's products)."""

_Place = tuple[str, tuple[SlotKey, ...], int]
"""The owner of a state: its kind, the slots, and the number of the module if several have such slots."""

_GOLDEN_RATIO = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio: its multiples spread evenly."""

_OF_RANKS = 0xD1B54A32D192ED03
"""The distance of the seeds of two ranks: an odd number far from multiples of the other."""

_NEVER = -1 << 32
"""An amax of the backward that no step has written."""


@dataclass
class Slots:
    """The slots that one graph asks for, in order."""

    request: DelayedScalingRequest | None = None
    keys: list[SlotKey] = field(default_factory=list)
    dtypes: list[torch.dtype] = field(default_factory=list)
    rounded: list[SlotKey] = field(default_factory=list)
    """The operands that are rounded stochastically: their numbers are their places here."""

    def add(self, request: DelayedScalingRequest, key: SlotKey, dtype: torch.dtype) -> int:
        """The index of a new slot. Raises RecipeError if the request differs from an earlier one."""
        self.check(request, key)
        self.dtypes.append(dtype)
        return _append(self.keys, key)

    def check(self, request: DelayedScalingRequest, key: SlotKey) -> None:
        """Raises RecipeError if a request differs from an earlier one."""
        self.request = self.request or request
        for name in vars(request):
            if getattr(request, name) != getattr(self.request, name):
                raise RecipeError(
                    f"layer {key[0] or '<model>'!r}, {key[1]}: {name}={getattr(request, name)!r} of its "
                    f"DelayedScalingRequest differs from {getattr(self.request, name)!r} of the requests before it; "
                    "all requests of a model must be equal in every field"
                )

    def renamed(self, names: Mapping[str, str]) -> Slots:
        """The slots of equal layers with other names."""

        def rename(keys: list[SlotKey]) -> list[SlotKey]:
            return [(names.get(layer, layer), operand, number) for layer, operand, number in keys]

        return replace(self, keys=rename(self.keys), rounded=rename(self.rounded))

    def add_rounded(self, key: SlotKey) -> int:
        """The number of a new operand that is rounded stochastically."""
        return _append(self.rounded, key)

    def fp8_max(self, device: torch.device) -> Tensor:
        """The largest value of each slot's element format, float32 [n]."""
        return torch.tensor([torch.finfo(dtype).max for dtype in self.dtypes], device=device)


def _append(keys: list[SlotKey], key: SlotKey) -> int:
    layer, operand, _ = key
    keys.append((layer, operand, sum(k[:2] == (layer, operand) for k in keys)))
    return len(keys) - 1


class DelayedState:
    """Scales [n], amax history [N, n] and the amaxes of the running step, for n slots.

    `forward_amax` [n] is float32; `step` [n] counts forwards, the same number for each slot; `backward_amax` [n] has
    the step that wrote an amax in its upper half and the bits of the amax, float32, in its lower one, both int64. A
    graph takes `step` twice: its forward counts it up, and its backward reads the step of the latest forward, which is
    not always its own.

    Kernels write slots that lie 16 bytes apart: all are aligned, and a kernel is the same for all of them.
    """

    def __init__(self, n: int, length: int, device: torch.device) -> None:
        self.scale = torch.ones(n, device=device)
        self.history = torch.zeros(length, n, device=device)
        self.forward_amax = torch.zeros(n, 4, device=device)[:, 0]
        self.backward_amax = torch.full((n, 2), _NEVER, device=device)[:, 0]
        self.step = torch.zeros(n, 2, dtype=torch.int64, device=device)[:, 0]

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that a compiled graph takes besides its own inputs, by name."""
        names = ("scale", "history", "forward_amax", "backward_amax", "step")
        return {name: getattr(self, name) for name in names} | {"latest_step": self.step}

    def state_dict(self) -> dict[str, Tensor]:
        """Plain tensors: `scale` [n] and `amax_history` [N, n], whose row 0 is not part of `scale` yet."""
        history = self.history.clone()
        history[0] = delayed.counted(delayed.recorded(self.forward_amax, self.backward_amax, self.step))
        return {"scale": self.scale.clone(), "amax_history": history}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copies a saved state into this one. A history of another length is cut, or filled with zeros at its old end.

        Amaxes in it that are not finite, which TransformerEngine keeps, do not count. Raises RecipeError when the
        number of slots differs.
        """
        _check_names(state, ("scale", "amax_history"), "delayed scaling")
        scale, history = state["scale"], delayed.counted(state["amax_history"])
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
        self.backward_amax.fill_(_NEVER)
        self.step.zero_()


def _signed(number: int) -> int:
    """The number modulo 2^64 as an int64 holds it."""
    return (number + 2**63) % 2**64 - 2**63


class RandomState:
    """Seed and step of stochastic rounding: `random`, int64 [2]. A forward of training advances the step.

    Each rank adds a number of its own to the seed, so that their errors average out. The saved seed is without it: the
    state of one rank is that of all, also in a restart with another number of ranks.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._of_rank = _signed(rank() * _OF_RANKS)
        self.random = torch.tensor([_signed(seed + self._of_rank), 0], dtype=torch.int64, device=device)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that a compiled graph takes besides its own inputs, by name."""
        return {"random": self.random}

    def state_dict(self) -> dict[str, Tensor]:
        """A plain tensor: `random`, int64 [2], seed and number of steps so far."""
        random = self.random.clone()
        random[0] -= self._of_rank
        return {"random": random}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copies a saved state into this one."""
        _check_names(state, ("random",), "stochastic rounding")
        self.random.copy_(state["random"])
        self.random[0] += self._of_rank


State = DelayedState | RandomState


def _check_names(state: Mapping[str, Tensor], names: tuple[str, ...], what: str) -> None:
    if set(state) != set(names):
        raise RecipeError(
            f"the saved state holds {', '.join(sorted(state))} where {what} has {', '.join(names)}: it was saved from "
            "another model or recipe"
        )


def update(tensors: Mapping[str, Tensor], request: DelayedScalingRequest, group: str | None) -> tuple[Tensor, Tensor]:
    """The scales and history after the last step, from `tensors` by name; see `fxquant.kernels.state.reference`.

    `group` names the process group whose largest amaxes count.
    """
    scale, history, fp8_max = (tensors[name] for name in ("scale", "history", "fp8_max"))
    recorded = [tensors[name] for name in ("forward_amax", "backward_amax", "step")]
    margin, algorithm = request.margin, request.amax_compute_algo
    by_a_users_function = callable(algorithm) or request.scaling_factor_compute_algo is not None
    if not by_a_users_function and group is None:
        scale_and_history = torch.ops.fxquant.delayed_update.default(
            scale, history, *recorded, fp8_max, float(margin), str(algorithm)
        )
        return scale_and_history[0], scale_and_history[1]
    last = delayed.recorded(*recorded)
    if group is not None:
        last = largest_over_ranks(last, group)
    last = delayed.counted(last)  # a step that is infinite on one rank is skipped on all of them
    if by_a_users_function:
        return delayed.update_with(
            scale, history, last, fp8_max, margin=margin, algorithm=algorithm,
            scale_algorithm=request.scaling_factor_compute_algo, recipe=request,
        )  # fmt: skip
    return delayed.update(scale, history, last, fp8_max, margin=margin, algorithm=str(algorithm))


class StateStore:
    """The states of one compiled model, one of each kind for each set of slots that its graphs ask for.

    Delayed scaling has one for each history length too. The active state of a set of slots is the valid one; another
    takes it over when it becomes active.
    """

    def __init__(self) -> None:
        self._states: dict[tuple[_Place, int, torch.device], State] = {}
        self._active: dict[_Place, State] = {}
        self._pending: dict[int, dict[str, Tensor]] = {}

    def get(self, slots: Slots, device: torch.device, owner: int = 0) -> list[State]:
        """The states that these slots need, made active; delayed scales are those of `owner`, a module's number."""
        states: list[State] = []
        if slots.request is not None:
            n, length = len(slots.keys), slots.request.amax_history_len
            place = ("delayed", tuple(slots.keys), owner)
            states.append(self._get(place, length, device, lambda: DelayedState(n, length, device)))
        if slots.rounded:
            place = ("random", tuple(slots.rounded), 0)
            states.append(self._get(place, 0, device, lambda: RandomState(self._next_seed(), device)))
        return states

    def _get(self, place: _Place, length: int, device: torch.device, make: Callable[[], State]) -> State:
        state = self._states.get((place, length, device))
        if state is None:
            state = self._states[place, length, device] = make()
        if place not in self._active:
            # the first of its kind: a run may go on under another recipe than it began with
            kind = set(state.state_dict())
            waiting = next((i for i in sorted(self._pending) if set(self._pending[i]) == kind), len(self._active))
            if waiting in self._pending:
                state.load_state_dict(self._pending.pop(waiting))
        self.activate(state)
        return state

    def _next_seed(self) -> int:
        """torch's seed for the first graph, and another one for each graph that follows."""
        others = sum(isinstance(state, RandomState) for state in self._states.values())
        return torch.initial_seed() + others * _GOLDEN_RATIO

    def activate(self, state: State) -> None:
        """Makes a state the valid one of its slots; it takes over what the active one has recorded."""
        place = next(key[0] for key, value in self._states.items() if value is state)
        before = self._active.get(place)
        if before is not None and before is not state:
            state.load_state_dict(before.state_dict())
        self._active[place] = state

    def state_dict(self) -> dict[str, Tensor]:
        """The active states as plain tensors, in the order in which their graphs were compiled."""
        return {
            f"{i}.{name}": tensor
            for i, state in enumerate(self._active.values())
            for name, tensor in state.state_dict().items()
        }

    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        """Restores the tensors of `state_dict`; states of graphs that are not compiled yet wait for them.

        Raises RecipeError for other tensors, or those of another model.
        """
        if not isinstance(saved, Mapping):
            raise RecipeError(f"a quantization state is a dict of tensors, not a {type(saved).__name__}")
        by_index: dict[int, dict[str, Tensor]] = {}
        for name, tensor in saved.items():
            index, _, key = name.partition(".")
            if not index.isdecimal():
                raise RecipeError(
                    f"{name!r} is no key of a quantization state, such as '0.scale': "
                    "load what quantization_state_dict() gave, not the model's state_dict"
                )
            by_index.setdefault(int(index), {})[key] = tensor
        states = list(self._active.values())
        if absent := [
            f"{i}.{name}" for i in range(len(states)) if i not in by_index for name in states[i].state_dict()
        ]:
            raise RecipeError(
                f"the saved quantization state has no {', '.join(absent)}, which this model has: it was saved before "
                "the model had run, from another model or recipe, or was lost on the way; saved are "
                f"{', '.join(saved) or 'no tensors at all'}"
            )
        for place, state in by_index.items():
            if place < len(states):
                states[place].load_state_dict(state)
            else:
                self._pending[place] = state
