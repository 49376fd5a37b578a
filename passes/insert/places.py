"""Notes of nodes which matmuls of their captured graph they compute, for what is said of them behind autograd."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from fxquant.passes.find.facts import Match
from fxquant.passes.graph.meta import stands_at


def mark_places(matches: Iterable[Match], first_site: int) -> None:
    """Notes of each resolved node, and of what autograd makes of it, where its matmuls stand in the captured graph."""
    places: dict[fx.Node, tuple[int, ...]] = {}
    for match in matches:
        whole = match.attention is not None and match.attention.spec is not None
        node = match.attention.node if match.attention is not None and whole else match.node
        its = tuple(resolved.decisions[0].site - first_site for resolved in match.resolved if resolved.decisions)
        places[node] = places.get(node, ()) + its
    for node, its in places.items():
        stands_at(node, its)
