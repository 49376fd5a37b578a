"""Equal products of a training step, which torch computes once, so that a report counts them once.

`a(x) + a(x)` multiplies once in its forward, and once for each gradient: the partitioner merges equal operators of a
joint graph, and so does `compute_once`. In inference nothing is merged. What a checkpoint computes again is no merge:
a node that the partitioner has written anew, as random operators of checkpoints are, has no equal one that remains.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from torch import fx

from fxquant.decisions import ComputedOnce
from fxquant.passes.graph.meta import places_of
from fxquant.passes.joint.gemms import gemms_of
from fxquant.roles import Gemm


class Product(NamedTuple):
    """A product of a joint graph: the places of its matmuls, which GEMM it is, and a number that equal ones share."""

    places: tuple[int, ...]
    gemm: str
    number: int


Products = Mapping[str, Product]
"""Products by the names of their nodes."""


def products_of(graph: fx.Graph) -> Products:
    """The products of a joint graph that belong to matmuls of the captured one."""
    gemms = {node: gemm for node, gemm in gemms_of(graph).items() if places_of(node)}
    numbers = _numbers(graph) if gemms else {}
    return {node.name: Product(places_of(node), gemm, numbers[node]) for node, gemm in gemms.items()}


def merged(before: Products, cut: Products, remaining: Collection[str]) -> Iterator[ComputedOnce]:
    """Yields what went away: of the products `before` the joint passes and when the graph was `cut`.

    `remaining` has the names of all nodes of both halves. What passes have replaced does not count.
    """
    now, then = (Counter(product.places for product in products.values()) for products in (cut, before))
    gone = [product for name, product in before.items() if name not in cut]
    lost = Counter(product.places for product in gone)
    gone = [product for product in gone if lost[product.places] == then[product.places] - now[product.places]]
    survivors = [product for name, product in cut.items() if name in remaining]
    numbers = {product.number for product in survivors}
    gone += [product for name, product in cut.items() if name not in remaining and product.number in numbers]
    run = {(product.places, product.gemm) for product in survivors}
    for places, gemm in dict.fromkeys((product.places, product.gemm) for product in gone):
        if (places, gemm) not in run:
            yield from (ComputedOnce(place=place, gemm=one) for place in places for one in _gemms(gemm))


def _numbers(graph: fx.Graph) -> dict[fx.Node, int]:
    """A number for each node, which nodes share if they call one operator with equal arguments."""
    numbers: dict[fx.Node, int] = {}
    by_call: dict[object, int] = {}
    for node in graph.nodes:
        inputs = fx.map_arg((node.args, node.kwargs), lambda source: f"%{numbers[source]}")
        call = (node.target, str(inputs)) if node.op == "call_function" else node
        numbers[node] = by_call.setdefault(call, len(by_call))
    return numbers


def _gemms(text: str) -> tuple[Gemm, ...]:
    if text.endswith("backward"):
        return Gemm.DGRAD, Gemm.WGRAD
    return (Gemm.FPROP,) if text == "attention" else (Gemm(text),)
