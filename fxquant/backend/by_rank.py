"""Delayed scaling whose amaxes are of one rank alone, in files that all ranks write into one.

    {"up.input.scale@rank0": .., "up.input.amax_history@rank0": .., "up.input.scale@rank1": .., ..}

Of equal keys `torch.distributed.checkpoint` saves those of one rank, so what differs by rank has the rank in its key.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from fxquant.compat.inside.ranks import rank, world
from fxquant.errors import FxQuantWarning, tell

_OF_RANK = re.compile(r"(.+)@rank(\d+)")


def marked(state: Mapping[str, Tensor], of_rank: Collection[str]) -> dict[str, Tensor]:
    """Returns a state with this rank's number in the keys of what other ranks have values of their own for."""
    return {f"{key}@rank{rank()}" if key in of_rank else key: value for key, value in state.items()}


def of_this_rank(saved: object) -> object:
    """Returns a state for this rank: its own values, or the largest amaxes where other numbers of ranks saved them.

    What is no dict, and keys without a rank, are returned as they are.
    """
    if not isinstance(saved, Mapping):
        return saved
    by_key: dict[str, dict[int, object]] = {}
    state: dict[object, object] = {}
    for key, value in saved.items():
        match = _OF_RANK.fullmatch(str(key))
        if match is None:
            state[key] = value
        else:
            by_key.setdefault(match[1], {})[int(match[2])] = value
    for key, values in by_key.items():
        exact = rank() in values and len(values) in (1, world())  # distributed checkpoints give those of this rank
        state[key] = values[rank()] if exact else _joined(key, values)
        if not exact and key == next(iter(by_key)):
            tell(
                f"the quantization state was saved by rank, for the ranks {', '.join(map(str, values))}, and this is "
                f"rank {rank()} of {world()}: the largest of their amaxes count here",
                FxQuantWarning,
            )
    return state


def _joined(key: str, values: Mapping[int, object]) -> object:
    """Returns the smallest scale or the largest amaxes of ranks; what cannot be compared is left to be refused."""
    first, *others = values.values()
    for value in others:
        if not isinstance(value, Tensor) or not isinstance(first, Tensor) or value.shape != first.shape:
            return value
    stacked = torch.stack([value for value in values.values() if isinstance(value, Tensor)])
    return stacked.amin(0) if key.endswith(".scale") else stacked.amax(0)
