"""Delayed scaling: scales from the amaxes of earlier steps, as a pure function of the state.

One column of the state belongs to one operand (a slot). All functions are elementwise over slots, so one small kernel
updates every slot of a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_FLT_MAX = torch.finfo(torch.float32).max
_BITS = 0x7FFFFFFF
"""The bits of a magnitude."""

AmaxAlgorithm = str | Callable[[Tensor], Tensor]
ScaleAlgorithm = Callable[[Tensor, Tensor, Tensor, object], Tensor]


def recorded(forward_amax: Tensor, backward_amax: Tensor, step: Tensor) -> Tensor:
    """The amaxes [n] recorded since the last update, 0 where there is none; see `fxquant.state.DelayedState`."""
    new = (backward_amax & _BITS).to(torch.int32).view(torch.float32)
    return torch.fmax(forward_amax, torch.where(backward_amax >> 32 >= step, new, 0))


def counted(last: Tensor) -> Tensor:
    """The amaxes `last` [n] of a step without those that are not finite: for their slots it is as if none was recorded.

    A loss scale that is too large makes gradients infinite, and `GradScaler` skips such a step. In the history its
    amax would keep the scale until it falls out of the window: 1024 steps by default. TransformerEngine lets it in.
    """
    return torch.where(last < torch.inf, last, 0.0)


def update(
    scale: Tensor, history: Tensor, last: Tensor, fp8_max: Tensor, *, margin: float, algorithm: str
) -> tuple[Tensor, Tensor]:
    """The next (scale [n], history [N, n]) from the amaxes `last` [n] of the step that ended.

    `fp8_max` [n] is each slot's largest value. A slot with `last` 0 keeps its scale and its history; otherwise `last`
    becomes the newest entry, row N-1, and the oldest counted one falls off. `algorithm` ``max`` takes the largest of
    the window, NaN ignored, ``most_recent`` takes `last`. A zero, infinite or NaN amax keeps the scale.
    (TransformerEngine's fused delayed-scaling update; numerics: delayed scaling.)
    """
    window = torch.cat((history[1:], last.unsqueeze(0)))
    rolled = torch.cat((torch.zeros_like(history[:1]), window[1:]))
    recorded = last != 0
    amax = last if algorithm == "most_recent" else torch.where(window == window, window, 0).amax(0)
    amax = torch.where(recorded, amax, 0)
    return _next_scale(scale, amax, fp8_max * 2.0**-margin), torch.where(recorded, rolled, _unstaged(history))


def update_with(
    scale: Tensor,
    history: Tensor,
    last: Tensor,
    fp8_max: Tensor,
    *,
    margin: float,
    algorithm: AmaxAlgorithm,
    scale_algorithm: ScaleAlgorithm | None,
    recipe: object,
) -> tuple[Tensor, Tensor]:
    """`update` by a user's functions: `algorithm(history) -> amax` and `scale_algorithm(amax, scale, fp8_max, recipe)`.

    The history always rolls, and a NaN in it counts. (TransformerEngine's unfused update.)
    """
    staged = torch.cat((last.unsqueeze(0), history[1:]))
    if callable(algorithm):
        amax = algorithm(staged)
    else:
        amax = last if algorithm == "most_recent" else staged.amax(0)
    if scale_algorithm is not None:
        following = scale_algorithm(amax, scale, fp8_max, recipe)
    else:
        following = _next_scale(scale, amax, fp8_max) / 2.0**margin
        following = torch.where((amax > 0) & (amax < torch.inf), following, scale)
    return following, torch.cat((torch.zeros_like(history[:1]), staged.roll(-1, 0)[1:]))


def record(amaxes: Tensor, new: Sequence[Tensor], slots: Sequence[int]) -> Tensor:
    """`amaxes` [n] with each of the `new` ones, [k] for k slots from one of `slots` on, taken in: the larger counts."""
    values = _by_slot(new, slots, amaxes.shape[0])
    return torch.where(values == _NONE, amaxes, torch.maximum(amaxes, values))


def take(entry: Tensor, amax: Tensor) -> None:
    """Takes an amax [1] into one entry [1] of the amaxes of a forward, in place: the larger counts."""
    entry.copy_(record(entry, [amax], [0]))


def record_since(amaxes: Tensor, step: Tensor, new: Sequence[Tensor], slots: Sequence[int]) -> Tensor:
    """`record` for `amaxes` [n] of `DelayedState.backward_amax`: what was written before `step` [n] is forgotten.

    Magnitudes are ordered as their bits are, and those of a later step are larger numbers.
    """
    values = _by_slot(new, slots, amaxes.shape[0])
    written = (step << 32) + (values.view(torch.int32).to(torch.int64) & _BITS)
    return torch.where(values == _NONE, amaxes, torch.maximum(amaxes, written))


_NONE = -1.0
"""No amax."""

_AT_ONCE = 8
"""How many tensors Inductor's kernels concatenate at once, at most."""


def _by_slot(new: Sequence[Tensor], slots: Sequence[int], n: int) -> Tensor:
    """Amaxes as a vector [n], float32, `_NONE` where there is none."""
    largest: dict[int, Tensor] = {}
    for amax, slot in zip(new, slots, strict=True):
        largest[slot] = torch.maximum(largest[slot], amax) if slot in largest else amax
    parts, end = [], 0
    for slot, amax in sorted(largest.items()):
        assert slot >= end, "slots overlap"
        parts += [amax.new_full((slot - end,), _NONE, dtype=torch.float32)] if slot > end else []
        parts.append(amax.float())
        end = slot + amax.shape[0]
    if end < n:
        parts.append(new[0].new_full((n - end,), _NONE, dtype=torch.float32))
    while len(parts) > 1:
        parts = [torch.cat(parts[i : i + _AT_ONCE]) for i in range(0, len(parts), _AT_ONCE)]
    return parts[0]


def _next_scale(scale: Tensor, amax: Tensor, largest: Tensor) -> Tensor:
    quotient = (largest / amax).clamp(max=_FLT_MAX)
    return torch.where((amax > 0) & (amax < torch.inf), quotient, scale)


def _unstaged(history: Tensor) -> Tensor:
    """The history without what was staged in row 0."""
    return torch.cat((torch.zeros_like(history[:1]), history[1:]))
