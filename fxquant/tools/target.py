"""The user's model on the command line: what ``package.module:function`` names, and the errors of the user's code."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fxquant.compat.private import failures_unlogged, in_short
from fxquant.errors import FxQuantError


def load(target: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """(model, args, kwargs) from ``package.module:function``.

    The function takes nothing and returns (model, args), (model, kwargs) or (model, args, kwargs). Raises FxQuantError
    for anything else.
    """
    function = attribute(target)
    if not callable(function):
        raise FxQuantError(f"{origin(target)} has no function {target.partition(':')[2]!r}")
    with one_sentence(f"{target}()"):
        made_by_user = function()
    match made_by_user:
        case (model, tuple() | list() as args) if callable(model):
            return model, tuple(args), {}
        case (model, dict() as kwargs) if callable(model):
            return model, (), kwargs
        case (model, tuple() | list() as args, dict() as kwargs) if callable(model):
            return model, tuple(args), kwargs
    raise FxQuantError(f"{target}() must return (model, args), (model, kwargs) or (model, args, kwargs)")


def attribute(target: str) -> Any:
    """The object of ``package.module:name``, None if the module does not have it."""
    module, _, name = target.partition(":")
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise FxQuantError(f"cannot import {module!r}: {error}") from error
    except (Exception, SystemExit) as error:
        raise FxQuantError(f"cannot import {module!r}: {_sentence(error)}") from error


def origin(target: str) -> str:
    """The module of ``package.module:name``."""
    return target.partition(":")[0]


def sources(*targets: str) -> list[str]:
    """The files of the modules that targets name."""
    modules = (sys.modules.get(origin(target)) for target in targets)
    return [path for module in modules if (path := getattr(module, "__file__", None))]


def _sentence(error: Exception | SystemExit) -> str:
    """The kind of an error and what it says, in short."""
    if isinstance(error, SystemExit):
        return f"it ends the process, with the exit code {error.code}"
    text = in_short(error)[:500] if str(error).strip() else ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@contextmanager
def one_sentence(what: str) -> Iterator[None]:
    """A scope of the user's code, whose errors become one sentence; FXQUANT_TRACEBACK=1 shows the whole."""
    if os.environ.get("FXQUANT_TRACEBACK") == "1":
        yield
        return
    try:
        with failures_unlogged():
            yield
    except FxQuantError:
        raise
    except (Exception, SystemExit) as error:
        raise FxQuantError(f"{what} failed: {_sentence(error)} (FXQUANT_TRACEBACK=1 shows where)") from error


def target(text: str) -> str:
    """Returns a text of the form MODULE:FUNCTION. Raises ArgumentTypeError, with a hint, for any other."""
    if path := re.fullmatch(r"(?:\./)?([\w/]+)\.py:(\w+)", text):
        module = path[1].strip("/").replace("/", ".")
        raise argparse.ArgumentTypeError(f"{text!r} names a file: write the module, {module}:{path[2]}")
    if not re.fullmatch(r"[\w.]+:\w+", text):
        dotted = re.fullmatch(r"([\w.]+)\.(\w+)", text)
        hint = f": write {dotted[1]}:{dotted[2]}" if dotted and dotted[2] != "py" else ""
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form package.module:function{hint}")
    return text
