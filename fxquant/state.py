"""The state of a compiled graph, as a few tensors: the memory of delayed scaling and of stochastic rounding.

Delayed scaling keeps scales and amax histories of all slots of a graph, stacked. The forward graph begins by taking in
the amaxes of the step before (`update`), and each quantization then records its own. Forward and backward write
different tensors, since AOTAutograd lets a graph input change in only one of them; a step number tells which of the
backward's amaxes are new.

Stochastic rounding keeps a seed and the number of the step, from which `fxquant.kernels.cast.philox` makes all random
bits.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from fxquant.compat.inside.ranks import largest_now, rank
from fxquant.compat.private import largest_over_ranks
from fxquant.errors import RecipeError
from fxquant.kernels.state import reference as delayed
from fxquant.quantizers import DelayedScalingRequest

SlotKey = tuple[str, str, int]
"""(layer, operand, which of the layer's products)."""

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
    """Scales [n], amax history [N, n] and the amaxes of the running step, for the n slots at `addresses`.

    `forward_amax` [n] is float32; `step` [n] counts forwards, the same number for each slot; `backward_amax` [n] has
    the step that wrote an amax in its upper half and the bits of the amax, float32, in its lower one, both int64. A
    graph takes `step` twice: its forward counts it up, and its backward reads the step of the latest forward, which is
    not always its own.

    Kernels write slots that lie 16 bytes apart: all are aligned, and a kernel is the same for all of them.
    """

    names: ClassVar[tuple[str, ...]] = ("scale", "amax_history")
    """The values of a slot, as they are saved."""

    def __init__(self, addresses: Sequence[str], length: int, device: torch.device) -> None:
        n = len(addresses)
        self.addresses, self.current = tuple(addresses), False
        self.group: str | None = None  # the process group over which amaxes are taken
        self.reduced = True  # unless the recipe wants those of each rank
        self.scale = torch.ones(n, device=device)
        self.history = torch.zeros(length, n, device=device)
        self.forward_amax = torch.zeros(n, 4, device=device)[:, 0]
        self.backward_amax = torch.full((n, 2), _NEVER, device=device)[:, 0]
        self.step = torch.zeros(n, 2, dtype=torch.int64, device=device)[:, 0]

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that a compiled graph takes besides its own inputs, by name."""
        names = ("scale", "history", "forward_amax", "backward_amax", "step")
        return {name: getattr(self, name) for name in names} | {"latest_step": self.step}

    @torch.no_grad()
    def read(self, *, over_ranks: bool = False) -> dict[str, Tensor]:
        """Copies of `scale` [n] and `amax_history` [N, n], whose row 0 is not part of `scale` yet.

        Row 0 is of this rank, or the largest `over_ranks`, as the next step will take it: then all ranks have to call.
        """
        history = self.history.clone()
        last = delayed.recorded(self.forward_amax, self.backward_amax, self.step)
        if over_ranks and self.group is not None:
            last = largest_now(last, self.group)
        history[0] = delayed.counted(last)
        return {"scale": self.scale.clone(), "amax_history": history}

    @torch.no_grad()
    def write(self, values: Mapping[str, Tensor], columns: Sequence[int]) -> None:
        """Copies values, as `read` gives them, into the slots `columns`.

        A history of another length is cut, or filled with zeros at its old end. Amaxes in it that are not finite, which
        TransformerEngine keeps, do not count.
        """
        at = torch.tensor(columns, device=self.scale.device)
        history = delayed.counted(values["amax_history"].to(self.history))
        kept = min(len(history), len(self.history)) - 1
        rows = self.history.new_zeros(len(self.history), len(columns))
        if kept:
            rows[-kept:] = history[-kept:]
        self.scale[at] = values["scale"].to(self.scale)
        self.history[:, at] = rows
        self.forward_amax[at] = history[0]
        self.backward_amax[at] = _NEVER

    @torch.no_grad()
    def reset(self) -> None:
        """Makes it what it was before any step."""
        self.current = False
        self.scale.fill_(1.0)
        self.backward_amax.fill_(_NEVER)
        for tensor in (self.history, self.forward_amax, self.step):
            tensor.zero_()


def signed(number: int) -> int:
    """The number modulo 2^64 as an int64 holds it."""
    return (number + 2**63) % 2**64 - 2**63


class RandomState:
    """Seed and step of stochastic rounding: `random`, int64 [2]. A forward of training advances the step.

    A graph numbers its operands; the seed that it takes is the saved one and a number that its operands' addresses, or
    other `marks` of them, give, so that graphs differ, and none depends on which was compiled first. Each rank adds a
    number of its own too, so that their errors average out: the saved state of one rank is that of all.
    """

    names: ClassVar[tuple[str, ...]] = ("random",)
    """The values of an operand, as they are saved."""

    def __init__(
        self, addresses: Sequence[str], seed: int, device: torch.device, marks: Sequence[str] | None = None
    ) -> None:
        self.addresses, self.current = tuple(addresses), False
        self.group: str | None = None
        of_graph = zlib.crc32("\n".join(marks or addresses).encode()) * _GOLDEN_RATIO
        self._added = signed(of_graph + rank() * _OF_RANKS)
        self.random = torch.tensor([signed(seed + self._added), 0], dtype=torch.int64, device=device)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that a compiled graph takes besides its own inputs, by name."""
        return {"random": self.random}

    @torch.no_grad()
    def read(self, *, over_ranks: bool = False) -> dict[str, Tensor]:
        """Copies of `random`, int64 [2, n]: seed and number of steps so far, the same for all operands and ranks."""
        random = self.random.clone()
        random[0] -= self._added
        return {"random": random.unsqueeze(-1).expand(2, len(self.addresses))}

    @torch.no_grad()
    def write(self, values: Mapping[str, Tensor], columns: Sequence[int]) -> None:
        """Goes on with seed and steps of the first of the operands `columns`."""
        if columns:
            self.random.copy_(values["random"][:, 0])
            self.random[0] += self._added

    @torch.no_grad()
    def reset(self) -> None:
        """Makes it what it was before any step, with a seed of now."""
        self.current = False
        self.random.copy_(torch.tensor([signed(torch.initial_seed() + self._added), 0]))


State = DelayedState | RandomState


def address(key: SlotKey) -> str:
    """The name of a slot: ``layers.0.up.input``, and ``layers.0.experts.weight.2`` where a layer has several."""
    layer, operand, number = key
    return ".".join(filter(None, (layer, operand, str(number) if number else "")))


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
