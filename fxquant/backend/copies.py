"""Copies of modules that were compiled in place, which are compiled too.

torch leaves the compiled call out of every copy of a module. A mark among the attributes of the module is copied with
the others, and compiles the copy like the module. A backend that was not given the module sees it in its first call:
until then the module gets its mark as it is copied.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from torch import nn

from fxquant.backend.blocks import path_in
from fxquant.compat.inside.copied import MARK, Mark, mark_when_copied
from fxquant.compat.inside.frames import backends_of, call_by, call_in_place, compiled_alike
from fxquant.errors import UnquantizedWarning, tell

if TYPE_CHECKING:
    from fxquant.backend.controls import Controls


class InPlace(ABC):
    """A call of ours in the place of a module's."""

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    @abstractmethod
    def of_copy(self, copied: nn.Module) -> InPlace:
        """The call of a copy of the module."""


class Given:
    """A backend of ours, as torch.compile is given it."""

    def note_copy(self, module: nn.Module, copied: nn.Module) -> None:
        """Notes that a module was copied that this compiles in place and has not met."""


def mark(module: nn.Module, controls: Controls) -> None:
    """Lets deep copies of a module be compiled as it is, if it is compiled in place by then."""
    vars(module)[MARK] = _Mark(module, controls)


class _Mark(Mark):
    """The mark by which a copy of a module is compiled by the same backend, a deep one with its recipe and state."""

    def __init__(self, module: nn.Module, controls: Controls) -> None:
        self._module, self._controls = weakref.ref(module), weakref.ref(controls)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Mark | None:
        module, controls = self._module(), self._controls()
        copied = memo.get(id(module))
        if module is None or controls is None or not isinstance(copied, nn.Module):  # of a shallow copy
            return None
        call = _call(module, controls)
        if call is not None:
            call_by(copied, _alike(call, copied))
            # names and state are those in the outermost module that is copied
            around = (home for home in controls.homes() if id(home) in memo and path_in(home, module) is not None)
            home = next(around, module)
            controls.note_copy(home, memo[id(home)])
        return _Mark(copied, controls)

    def of_shallow(self, copied: nn.Module) -> Mark | None:
        module, controls = self._module(), self._controls()
        if module is copied:  # a deep copy has its own already
            return self
        call = None if module is None or controls is None else _call(module, controls)
        if call is None or controls is None:
            return None
        call_by(copied, _alike(call, copied))
        return _Mark(copied, controls)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        module, controls = self._module(), self._controls()
        if module is not None and controls is not None and _call(module, controls) is not None:
            _tell_pickled(module)
        return type(None), ()


class _FirstMark(Mark):
    """The mark of a module that no backend has met; it lasts for one copy, which is compiled as the module is."""

    def __init__(self, module: nn.Module, backend: Given) -> None:
        self._module, self._backend = module, backend

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        copied = memo.get(id(self._module))
        if isinstance(copied, nn.Module):
            call_by(copied, compiled_alike(call_in_place(self._module), copied))
            self._backend.note_copy(self._module, copied)

    def of_shallow(self, copied: nn.Module) -> None:
        call_by(copied, compiled_alike(call_in_place(self._module), copied))

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        _tell_pickled(self._module)
        return type(None), ()


def mark_copies() -> None:
    """Lets modules be marked as they are copied, if one of our backends compiles them in place."""
    mark_when_copied(_first_mark)


def _first_mark(module: nn.Module) -> _FirstMark | None:
    ours = (backend for backend in backends_of(call_in_place(module)) if isinstance(backend, Given))
    return next((_FirstMark(module, backend) for backend in ours), None)


def _tell_pickled(module: nn.Module) -> None:
    tell(
        f"{type(module).__name__} is compiled in place, which torch leaves out of what it pickles: what is loaded runs "
        "unquantized until it is compiled",
        UnquantizedWarning,
    )


def _alike(call: Any, copied: nn.Module) -> Any:
    return call.of_copy(copied) if isinstance(call, InPlace) else compiled_alike(call, copied)


def _call(module: nn.Module, controls: Controls) -> Any:
    """The function that these controls have compiled in the place of a module's calls; None if they have not."""
    call = call_in_place(module)
    ours = isinstance(call, InPlace) or any(map(controls.are_of, backends_of(call)))
    return call if ours else None
