"""Copies of modules, from which torch leaves out what was compiled in their place."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import nn

from fxquant.compat.inside.frames import call_in_place
from fxquant.compat.patch import Patch, apply

MARK = "_fxquant_mark"
"""The attribute that is copied with the others of a module, and compiles the copy."""
_marks: list[Callable[[nn.Module], Mark | None]] = []


class Mark(ABC):
    """The value of the attribute."""

    @abstractmethod
    def of_shallow(self, copied: nn.Module) -> Mark | None:
        """Compiles a shallow copy, which got this mark as it is, and returns the copy's own."""


def mark_when_copied(mark: Callable[[nn.Module], Mark | None]) -> None:
    """Lets a function give the mark of a module that is copied or pickled, is compiled in place and has no mark yet."""
    apply(GIVEN)
    apply(TAKEN)
    if mark not in _marks:
        _marks.append(mark)


def _with_mark(reduce: Callable[[nn.Module, Any], Any], module: nn.Module, protocol: Any) -> Any:
    reduced = reduce(module, protocol)
    state = reduced[2] if isinstance(reduced, tuple) and len(reduced) > 2 else None
    if not isinstance(state, dict) or state.get(MARK) is not None:  # that of a class with slots is no dict
        return reduced
    mark = next((mark for mark in (give(module) for give in _marks) if mark is not None), None)
    return reduced if mark is None else (*reduced[:2], {**state, MARK: mark}, *reduced[3:])


def _compile_shallow(set_state: Callable[..., None], module: nn.Module, state: dict[str, Any]) -> None:
    set_state(module, state)
    vars(module)[MARK] = state[MARK].of_shallow(module)


def _drops_what_is_compiled() -> bool:
    layer = nn.Identity()
    layer.compile(backend="eager")
    return call_in_place(copy.deepcopy(layer)) is None


GIVEN = Patch(
    "torch.nn",
    "Module.__reduce_ex__",  # Python 3.10 has no __getstate__
    defect="Copies of a module lose what was compiled in its place.",
    upstream="none found",
    fixed_in=None,
    still_needed=_drops_what_is_compiled,
    change=_with_mark,
    acts=lambda module, _: call_in_place(module) is not None,
)
TAKEN = Patch(
    "torch.nn",
    "Module.__setstate__",
    defect=GIVEN.defect,
    upstream=GIVEN.upstream,
    fixed_in=None,
    still_needed=_drops_what_is_compiled,
    change=_compile_shallow,
    acts=lambda _, state: isinstance(state, dict) and isinstance(state.get(MARK), Mark),
)
