"""The model around a block: trainers that compile blocks by a backend's name give it no model."""

from __future__ import annotations

import gc
from collections import defaultdict

from torch import nn


def outermost(module: nn.Module) -> nn.Module:
    """Returns the module that holds `module`, directly or not, and that no other holds.

    Where several hold it, the search ends: a block of two models has no name of its own in one of them.
    """
    holders, seen = _holders(), {id(module)}
    while True:
        around = holders[id(module)]
        if len(around) != 1 or not seen.isdisjoint(around):
            return module
        seen |= around.keys()
        (module,) = around.values()


def _holders() -> dict[int, dict[int, nn.Module]]:
    """The modules that have a module as a child, by the ids of the child and of the holder.

    Nothing but the collector knows them. It is asked once for all modules: who refers to a block, to the block around
    it and so on takes a walk over all objects each.
    """
    holders: dict[int, dict[int, nn.Module]] = defaultdict(dict)
    for holder in gc.get_objects():
        if issubclass(type(holder), nn.Module):
            for child in vars(holder).get("_modules", {}).values():
                holders[id(child)][id(holder)] = holder
    return holders
