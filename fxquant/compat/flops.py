"""Changes to how torch counts the FLOPs of attention in which several queries share a key."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils import flop_counter

from fxquant.compat.patch import Patch, apply

Shape = Sequence[Any]


def _refuses_groups() -> bool:
    q, k = (1, 4, 2, 8), (1, 2, 2, 8)
    try:
        inspect.unwrap(flop_counter.sdpa_flop_count)(q, k, k)
    except AssertionError:
        return True
    return False


def _in_groups(*shapes: Shape) -> bool:
    *_, query, key, _ = shapes
    return bool(query[1] != key[1])


def _count(count: Callable[..., int], *shapes: Shape) -> int:
    """Counts with a key and a value for each query, which is what is multiplied."""
    *_, query, key, value = shapes
    wide = [(*shape[:1], query[1], *shape[2:]) for shape in (key, value)]
    return count(*shapes[:-2], *wide)


_DEFECT = "A count of FLOPs fails an assertion at an attention whose keys have fewer heads than its queries."
FORWARD, BACKWARD = (
    Patch(
        "torch.utils.flop_counter", function, defect=_DEFECT, upstream="none found", fixed_in=(2, 13),
        still_needed=_refuses_groups, change=_count, acts=_in_groups,
    )
    for function in ("sdpa_flop_count", "sdpa_backward_flop_count")
)  # fmt: skip


def count_groups() -> None:
    """Lets torch count the FLOPs of attention in groups, if this version does not."""
    for patch in (FORWARD, BACKWARD):
        apply(patch)
