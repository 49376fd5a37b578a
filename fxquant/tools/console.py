"""Numbers that commands take, and the way they print what they found."""

from __future__ import annotations

import argparse
import io
import math
import os
import sys
from collections.abc import Callable


def printed(text: str) -> int:
    """Prints a result; returns 1 where stdout takes none. A reader that has seen enough (``head``) is no failure.

    A letter that stdout does not have is written by its number.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        print(text, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is left in the buffer at exit
        if not isinstance(error, BrokenPipeError):
            print(f"fxquant: error: stdout cannot be written: {error.strerror}", file=sys.stderr)
            return 1
    return 0


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
