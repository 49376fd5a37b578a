"""Watches calls under the stance of torch that compiles nothing for new inputs: what has no graph then runs as it is.

torch asks the guards of the graphs that a frame has, runs the frame as it is if none holds, and says nothing. So a
frame was missed if its guards were asked, and no graph ran before those of another frame, or before the call ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from types import CodeType

from fxquant.backend.notices import tell_missed
from fxquant.backend.record import Records
from fxquant.compat.inside.frames import compiled_call


class Missed(threading.local):
    """The frames of the call that runs on this thread whose guards torch asks; `runs` counts graphs of this thread."""

    def __init__(self, runs: Callable[[], int]) -> None:
        self._runs = runs
        self._asked: tuple[CodeType | None, int] | None = None
        self._missed = False
        self._watching = False

    def ask(self, records: Records, code: CodeType | None) -> None:
        """Notes that torch asks the guards of a graph of this code, under that stance."""
        if not self._watching:
            call = None if records.told_plain else compiled_call()
            if call is None:
                return
            self._watching, self._missed, self._asked = True, False, None
            call.at_end(partial(self._over, records, self._runs()))
        self._look(code)
        self._asked = code, self._runs()

    def _look(self, code: CodeType | None) -> None:
        """Tells frames apart by their code: a frame has one graph or several, all of which are asked."""
        if self._asked is not None and self._asked[0] is not code:
            self._missed |= self._asked[1] == self._runs()

    def _over(self, records: Records, before: int) -> None:
        self._look(None)
        self._watching = False
        if self._missed:
            tell_missed(records, whole=self._runs() == before)
