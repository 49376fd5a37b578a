"""A change to the sizes of slices that torch computes without holding a graph to the sizes of its example."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.fx.experimental._config as symbolic_config
from torch._subclasses import fake_impls
from torch.fx.experimental.symbolic_shapes import guard_or_false

from fxquant.compat.patch import Patch


def _within(compute: Callable[[Any, Any], Any], size: Any, index: Any) -> Any:
    """Returns where a slice begins or ends, as an expression of the size where it is not known to lie within it."""
    place = compute(size, index)
    if place is None and guard_or_false(index >= 0):
        return torch.sym_min(index, size)  # type: ignore[no-untyped-call]
    if place is None and guard_or_false(index < 0):
        return torch.sym_max(index + size, 0)  # type: ignore[no-untyped-call]
    return place


def _forgets_bounds() -> bool:
    return "sym_min" not in inspect.getsource(inspect.unwrap(fake_impls._compute_slice_index))


SLICES = Patch(
    "torch._subclasses.fake_impls",
    "_compute_slice_index",
    defect="A slice that ends at a multiple of a step, n // 16 * 16, gets a new size of which nothing is known, where "
    "no guard may be made that the end is n at most.",
    upstream="none found",
    fixed_in=(2, 13),
    still_needed=_forgets_bounds,
    change=_within,
    acts=lambda size, index: symbolic_config.backed_size_oblivious,
)
