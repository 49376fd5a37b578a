"""Errors and warnings that users can meet. Each message names the fault, its place and a remedy."""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from pathlib import Path

import torch


class FxQuantError(RuntimeError):
    """Base of every error that fxquant raises on purpose."""


class RecipeError(FxQuantError, ValueError):
    """A recipe, quantizer or format that cannot work, found before anything runs."""


class OptionError(FxQuantError, ValueError):
    """An option that the backend does not know."""


class SettingError(RecipeError, TypeError):
    """A setting of a recipe or quantizer that it does not have or take, for which Python raises a TypeError."""


class ArgumentError(OptionError, TypeError):
    """An argument that a function does not have or take, for which Python raises a TypeError."""


class ProgramError(FxQuantError, ValueError):
    """An exported program, or a file of one, that cannot be quantized."""


class GraphVerificationError(FxQuantError):
    """A pass left a graph in a state that the next one must not see: a bug in fxquant."""


class FxQuantWarning(UserWarning):
    """Base of every warning of fxquant. Each is given once, and silenced by the filters of `warnings`."""


class UnquantizedWarning(FxQuantWarning):
    """Something ran unquantized that a recipe was given for."""


class UnusedRuleWarning(FxQuantWarning):
    """A part of a recipe matched nothing."""


class NonFiniteWarning(FxQuantWarning):
    """A value or a gradient is NaN or infinite: with ``FXQUANT_VERIFY=1`` the first one is named."""


_NOT_THE_USERS = (
    *(str(Path(file).parent) for file in (__file__, torch.__file__, logging.__file__)),
    contextlib.__file__,
)
"""The folders and files of frames that warnings pass by: a limit of torch's is told from within its logging."""


def tell(message: str, category: type[FxQuantWarning]) -> None:
    """Warns at the innermost line that is neither torch's nor fxquant's.

    A handler that was put on fxquant's own logger gets the message too, unless it writes where warnings are shown, as
    torch's does under TORCH_LOGS=fxquant.
    """
    depth, frame = 1, sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        depth, frame = depth + 1, frame.f_back  # type: ignore[assignment]
    warnings.warn(message, category, stacklevel=1 if frame is None else depth)
    log, shown = logging.getLogger("fxquant"), (sys.stderr, sys.__stderr__)
    for handler in log.handlers if log.isEnabledFor(logging.WARNING) else ():
        if handler.level <= logging.WARNING and getattr(handler, "stream", handler) not in shown:
            handler.handle(log.makeRecord(log.name, logging.WARNING, __file__, 0, "%s", (message,), None))
