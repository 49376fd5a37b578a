"""Readers of the command line's arguments. Each raises ArgumentTypeError, which names what is wrong."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable


def number(kind: type[int] | type[float], least: float) -> Callable[[str], float]:
    """Returns a reader of arguments that are an int, or a finite float, of at least `least`."""

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = kind(least) - 1
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text!r} is no {'whole ' * (kind is int)}number of at least {least:g}")
        return value

    return read


def path(text: str) -> str:
    """Returns a path, which is not empty."""
    if not text:
        raise argparse.ArgumentTypeError("a path is expected, and this one is empty")
    return text


def regex(text: str) -> str:
    """Returns a regular expression that compiles."""
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from error
    return text
