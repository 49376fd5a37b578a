"""The model around a block: trainers that compile blocks by a backend's name give it no model."""

from __future__ import annotations

import gc
from collections.abc import Iterator

from torch import nn


def outermost(module: nn.Module) -> nn.Module:
    """Returns the module that holds `module`, directly or not, and that no other holds.

    Where several hold it, the search ends: a block of two models has no name of its own in one of them.
    """
    seen = {id(module)}
    while True:
        holders = {id(holder): holder for holder in _holders(module)}
        if len(holders) != 1 or not seen.isdisjoint(holders):
            return module
        seen |= holders.keys()
        (module,) = holders.values()


def _holders(module: nn.Module) -> Iterator[nn.Module]:
    """The modules that have a module as a child; nothing but the collector knows them."""
    for children in gc.get_referrers(module):
        if isinstance(children, dict) and any(child is module for child in children.values()):
            for owner in gc.get_referrers(children):
                owners = gc.get_referrers(owner) if isinstance(owner, dict) else [owner]
                for holder in owners:
                    if isinstance(holder, nn.Module) and vars(holder).get("_modules") is children:
                        yield holder
