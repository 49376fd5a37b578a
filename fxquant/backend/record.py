"""A record for every captured graph, which becomes part of a report when the graph runs for the first time.

torch may call a backend and drop what it compiles: when an analysis starts again, when a later part of the frame fails,
or when the compilation itself does, and the frame runs as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fxquant.decisions import Decision, NotFused
from fxquant.roles import QuantizerRole


@dataclass(kw_only=True, eq=False)
class GraphRecord:
    """The decisions for a captured graph, the roles that its recipe was asked for, and the reasons of later passes.

    Its sites are counted from `first_site`. It is part of the report if it `runs`.
    """

    first_site: int = 0
    decisions: Sequence[Decision] = ()
    roles: Sequence[QuantizerRole] = ()
    not_fused: list[NotFused] = field(default_factory=list)
    runs: bool = False
