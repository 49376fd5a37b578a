"""Prints what a command found."""

from __future__ import annotations

import io
import os
import sys


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
