"""Progress on stderr: long work says every few seconds that it goes on, and where it is."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SECONDS = 5.0
"""The time between two lines; shorter work writes nothing."""


@contextmanager
def progress(work: str, state: Callable[[], str]) -> Iterator[None]:
    """Writes ``fxquant: WORK: 15 s, STATE`` to stderr every `SECONDS` of this scope."""
    start, done = time.monotonic(), threading.Event()

    def tell() -> None:
        while not done.wait(SECONDS):
            print(f"fxquant: {work}: {time.monotonic() - start:.0f} s, {state()}", file=sys.stderr, flush=True)

    teller = threading.Thread(target=tell, name=f"fxquant {work}", daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()
