"""Watches the first calls of a compiled model for what runs outside of its graphs, where only torch.compile is called.

A backend hears of a call when a graph of it runs for the first time. A dispatch mode sees what else runs from there to
the end of the call, and then the whole of the next one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

from fxquant.backend.blocks import names_in
from fxquant.backend.notices import tell_uncaptured
from fxquant.backend.record import Records
from fxquant.backend.uncaptured import Uncaptured, is_watching
from fxquant.compat.inside.frames import compiled_call
from fxquant.compat.private import no_mode_is_on


def watch_first_calls(records: Records, names: Callable[[], Mapping[str, str]], *, twice: bool) -> None:
    """Watches the rest of the call in which a graph of the records begins to run, and, if `twice`, the next call.

    It does so once for everything that torch.compile gave; `names` gives the paths of modules by their ids.
    """
    call = compiled_call()
    if call is None or records.first_seen or call.key in records.watched:
        return
    records.watched.add(call.key)
    before: list[Uncaptured] = []

    @contextlib.contextmanager
    def watching() -> Iterator[None]:
        seen = Uncaptured({**names_in(call.module), **names()}, call.module)
        with seen.watching():
            yield
        for earlier in before:
            records.uncaptured.remove(earlier)
            seen.breaks = [*dict.fromkeys([*earlier.breaks, *seen.breaks])]  # torch does not break again what it kept
        before[:] = [seen]
        records.uncaptured.append(seen)
        tell_uncaptured(records, seen)

    if no_mode_is_on() and not is_watching():  # a mode that is on could go off before this one
        rest = contextlib.ExitStack()
        rest.enter_context(watching())
        call.at_end(rest.close)  # also of a call that fails: what has run until then has run
    if twice:
        call.around_next(watching)
