"""The places of groups: in a ragged operand, whose groups follow each other, and in one that pads each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxquant.compat.values import statically_known_true

Dim = int | torch.SymInt


def padded_rows(rows: Dim, groups: Dim, alignment: int) -> Dim:
    """Mp: the rows of a buffer that holds `groups` groups of `rows` rows altogether, each padded to the alignment."""
    return (rows + groups * (alignment - 1)) // alignment * alignment


def padded_ends(offs: Tensor, alignment: int) -> Tensor:
    """The ends [G] of the groups in that buffer, in the dtype of `offs`."""
    sizes = offs - starts(offs)
    return ((sizes + (alignment - 1)) // alignment * alignment).cumsum(0).to(offs.dtype)


def starts(ends: Tensor) -> Tensor:
    """The starts [G] of groups that follow each other."""
    return torch.nn.functional.pad(ends[:-1], (1, 0))


def group_of(ends: Tensor, count: Dim, step: int = 1) -> Tensor:
    """The group [count] that position i * step belongs to; G behind the last end."""
    return torch.searchsorted(ends, positions(count, ends) * step, right=True)


def positions(count: Dim, ends: Tensor) -> Tensor:
    """The places 0, 1, ... in the dtype of `ends`."""
    size: Any = count
    return torch.arange(size, dtype=ends.dtype, device=ends.device)


def moved(x: Tensor, ends: Tensor, places: Tensor, count: Dim, axis: int) -> Tensor:
    """Groups of rows (axis 0) or columns (1) of x, which end at `ends`, moved to where they end at `places`.

    There are `count` of them afterwards, and zeros where none is; a group may have less room than before.
    """
    place = positions(count, ends)
    group = group_of(places, count).clamp(max=ends.shape[0] - 1)
    within = place - starts(places)[group]
    taken = within < (ends - starts(ends))[group]
    raw = x.view(torch.uint8) if x.itemsize == 1 else x
    if not statically_known_true(x.shape[axis] > 0):
        raw = torch.nn.functional.pad(raw, (0, 1) if axis else (0, 0, 0, 1))
    source = (within + starts(ends)[group]).clamp(min=0, max=raw.shape[axis] - 1).long()
    return torch.where(taken.unsqueeze(1 - axis), raw.index_select(axis, source), 0).view(x.dtype)
