"""Passes in the log: names, times, and the graph after each."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from torch import fx

from fxquant.compat.private import lazy_format_graph_code

log = logging.getLogger(__name__)


def run_pass(name: str, run: Callable[[fx.Graph], int], graph: fx.Graph) -> int:
    """Runs one pass and logs how many nodes it changed, how long it took, and with DEBUG the graph after it."""
    start = time.perf_counter()
    changed = run(graph)
    log.info("%s: %d nodes in %.1f ms", name, changed, (time.perf_counter() - start) * 1e3)
    if changed and graph.owning_module is not None:
        log.debug("%s", lazy_format_graph_code(f"fxquant {name}", graph.owning_module))
    return changed
