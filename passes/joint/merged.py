"""Equal products of a training step, which torch computes once, so that a report counts them once.

`a(x) + a(x)` multiplies once in its forward, and once for each gradient: the partitioner merges equal operators of a
joint graph, and so does `compute_once`. In inference nothing is merged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from torch import fx

from fxquant.decisions import ComputedOnce
from fxquant.passes.graph.meta import places_of
from fxquant.passes.joint.gemms import gemms_of
from fxquant.roles import Gemm

Products = Mapping[str, tuple[tuple[int, ...], str]]
"""The products of a joint graph by the names of their nodes: the places of their matmuls, and which GEMM they are."""


def products_of(graph: fx.Graph) -> Products:
    """The products of a joint graph that belong to matmuls of the captured one."""
    return {node.name: (places_of(node), gemm) for node, gemm in gemms_of(graph).items() if places_of(node)}


def merged(before: Products, cut: Products, remaining: Collection[str]) -> Iterator[ComputedOnce]:
    """Yields what went away: of the products `before` the joint passes and when the graph was `cut`.

    `remaining` has the names of all nodes of both halves. What passes have replaced does not count.
    """
    now, then = (Counter(places for places, _ in products.values()) for products in (cut, before))
    gone = [key for name, key in before.items() if name not in cut]
    lost = Counter(places for places, _ in gone)
    gone = [(places, gemm) for places, gemm in gone if lost[places] == then[places] - now[places]]
    gone += [key for name, key in cut.items() if name not in remaining]
    survivors = {key for name, key in cut.items() if name in remaining}
    for places, gemm in dict.fromkeys(gone):
        if (places, gemm) not in survivors:
            yield from (ComputedOnce(place=place, gemm=one) for place in places for one in _gemms(gemm))


def _gemms(text: str) -> tuple[Gemm, ...]:
    if text.endswith("backward"):
        return Gemm.DGRAD, Gemm.WGRAD
    return (Gemm.FPROP,) if text == "attention" else (Gemm(text),)
