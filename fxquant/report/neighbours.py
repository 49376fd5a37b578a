"""The neighbourhood of a layer's products in a graph, as some boxes and the edges between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from fxquant.formats import QuantSpec
from fxquant.passes.graph.names import COPIES, EXPANDS, VIEWS
from fxquant.snapshots import NodeText, Snapshot

MOST_BOXES = 30

_LOOKED_THROUGH = VIEWS | COPIES | EXPANDS | frozenset(("getitem", "wait_tensor"))
_SCALES = frozenset(("fxquant::amax", "fxquant::scale_from_amax", "fxquant::tensor_scale"))
"""Operators that make the scale of a quantization: they are shown as part of it."""
_PRODUCTS = frozenset("mm addmm bmm baddbmm linear matmul convolution convolution_backward _grouped_mm".split()) | {
    f"fxquant::{name}"
    for name in "scaled_mm fused_scaled_mm grouped_scaled_mm attention_forward attention_forward_into "
    "attention_backward linear grouped_linear attention".split()
}
_MOST_IN_A_GROUP = 40


@dataclass(eq=False)
class Unit:
    """Some nodes of a graph that are drawn as one box, and the units that they read.

    `kind` is ``product``, ``cast``, ``input``, ``output``, ``fxquant`` for its other operators, or ``operators``.
    `order` is the place of the first node in the graph.
    """

    kind: str
    nodes: list[NodeText]
    order: int
    reads: dict[Unit, set[str]] = field(default_factory=dict)
    """The directions of what each one gives: ``rowwise`` and ``columnwise`` of a cast, ``""`` of anything else."""
    readers: dict[Unit, None] = field(default_factory=dict)
    epilogue: list[NodeText] = field(default_factory=list)
    """The operators that the GEMM could finish its result with."""

    @property
    def layer(self) -> str:
        return self.nodes[0].layer


def kind_of(node: NodeText) -> str:
    """The kind of box for a node, ``""`` for one that is looked through."""
    if node.operator in ("input", "output"):
        return node.operator
    if node.operator in _PRODUCTS or "_scaled_dot_product" in node.operator:
        return "product"
    if node.operator in _LOOKED_THROUGH or node.operator in _SCALES or node.operator.startswith("attribute "):
        return ""
    if node.operator.startswith("fxquant::"):
        return "cast" if "quantize" in node.operator else "fxquant"
    return "operators"


class Units:
    """A graph as units: neighbouring operators of one layer are one, and views are looked through."""

    def __init__(self, nodes: Snapshot) -> None:
        self.nodes = {node.name: node for node in nodes}
        self.units: list[Unit] = []
        self.of: dict[str, Unit] = {}
        self._before: dict[str, int] = {}
        self._bits = {node.name: 1 << i for i, node in enumerate(nodes)}
        for order, node in enumerate(nodes):
            if kind_of(node):
                self._add(node, order)
        for unit in self.units:
            for source in unit.reads:
                source.readers[unit] = None
        for node in nodes:
            if node.epilogue and node.epilogue in self.of:
                self.of[node.name].epilogue = list(self._between(node.name, node.epilogue))

    def sources(self, node: NodeText) -> Iterator[tuple[str, str]]:
        """Yields the names of the nodes that one reads, seen through views, with the direction of a cast's result."""
        for name in node.reads:
            yield from self._source(name)

    def _source(self, name: str, index: str = "") -> Iterator[tuple[str, str]]:
        node = self.nodes.get(name)
        if node is None or node.operator in _SCALES or node.operator.startswith("attribute "):
            return
        if kind_of(node):
            yield name, _direction(node, index) if kind_of(node) == "cast" else ""
            return
        index = node.arguments.rpartition(", ")[2] if node.operator == "getitem" else index
        yield from self._source(node.reads[0], index) if node.reads else ()

    def _add(self, node: NodeText, order: int) -> None:
        sources = [(name, direction) for name, direction in self.sources(node) if name in self.of]
        above = 0
        for name, _ in sources:
            above |= self._before[name] | self._bits[name]
        self._before[node.name] = above
        kind = kind_of(node)
        joined = self._joined(node, [name for name, _ in sources]) if kind == "operators" else []
        unit = joined[0] if joined else Unit(kind, [], order)
        for other in joined[1:]:
            self._move(other, unit)
        if not joined:
            self.units.append(unit)
        unit.nodes.append(node)
        self.of[node.name] = unit
        for name, direction in sources:
            if self.of[name] is not unit:
                unit.reads.setdefault(self.of[name], set()).add(direction)

    def _move(self, other: Unit, unit: Unit) -> None:
        """Puts what is in one unit into another."""
        self.units.remove(other)
        unit.nodes += other.nodes
        self.of.update((node.name, unit) for node in other.nodes)
        for source, directions in other.reads.items():
            unit.reads.setdefault(source, set()).update(directions)
        for one in self.units:
            if other in one.reads:
                one.reads.setdefault(unit, set()).update(one.reads.pop(other))
        unit.reads.pop(unit, None)
        unit.order = min(unit.order, other.order)

    def _joined(self, node: NodeText, sources: Sequence[str]) -> list[Unit]:
        """Returns the units of a node's sources that it can be one with: of its layer, with no way out and back."""
        joined: list[Unit] = []
        for unit in dict.fromkeys(self.of[name] for name in sources):
            if unit.kind != "operators" or unit.layer != node.layer:
                continue
            together = [*joined, unit]
            inside = {member.name for one in together for member in one.nodes}
            bits = sum(self._bits[name] for name in inside)
            outside = {source for one in together for member in one.nodes for source, _ in self.sources(member)}
            outside |= set(sources)
            back = any(self._before[name] & bits for name in outside - inside if name in self._before)
            if not back and len(inside) < _MOST_IN_A_GROUP:
                joined = together
        return joined

    def _between(self, start: str, end: str) -> Iterator[NodeText]:
        """Yields the nodes on ways from one to another, which is the last."""
        for name, node in self.nodes.items():
            above = self._before.get(name, 0)
            if above & self._bits[start] and (name == end or self._before[end] & self._bits[name]):
                yield node

    def around(self, layer: str) -> list[Unit]:
        """Returns the units around the products of a layer, in the order of the graph; none if it has none here.

        They are the casts of what the products multiply and what makes it, what follows on the products, and who makes
        and reads that; the nearest first, where they are many.
        """
        products = [unit for unit in self.units if unit.kind == "product" and unit.layer == layer]
        chosen = dict.fromkeys(products)
        for passes in (_operands, _results, _casts_of_results, _makers, _takers):
            for unit in passes(list(chosen)):
                if len(chosen) < MOST_BOXES:
                    chosen[unit] = None
        return sorted(chosen, key=lambda unit: unit.order) if products else []


def _operands(units: Sequence[Unit]) -> Iterator[Unit]:
    """Yields the casts in front of products, and what they quantize."""
    waiting = [source for unit in units for source in unit.reads]
    for unit in waiting:
        yield unit
        if unit.kind == "cast":
            waiting += unit.reads


def _results(units: Sequence[Unit]) -> Iterator[Unit]:
    """Yields what reads the results of products."""
    yield from (reader for unit in units if unit.kind == "product" for reader in unit.readers)


def _casts_of_results(units: Sequence[Unit]) -> Iterator[Unit]:
    """Yields the quantizations of what follows on products."""
    behind = [r for unit in units if unit.kind == "product" for r in unit.readers if r.kind != "product"]
    yield from (reader for unit in behind for reader in unit.readers if reader.kind == "cast")


def _makers(units: Sequence[Unit]) -> Iterator[Unit]:
    """Yields what the operators around read."""
    yield from (source for unit in units if unit.kind == "operators" for source in unit.reads)


def _takers(units: Sequence[Unit]) -> Iterator[Unit]:
    """Yields the products that read the casts around."""
    yield from (r for unit in units if unit.kind == "cast" for r in unit.readers if r.kind == "product")


def sides_of(node: NodeText) -> list[tuple[str, str]]:
    """The direction and the format of each half of a quantization."""
    directions = [text for text in node.specs if text in ("rowwise", "columnwise")]
    specs = [text for text in node.specs if text not in directions]
    if "=" in "".join(specs[:1]) and "wise=" in specs[0]:
        return [(d, spec) for d, _, spec in (item.partition("=") for item in specs[0].split()) if spec]
    if "hybrid" in node.operator:
        return list(zip(("rowwise", "columnwise"), specs, strict=False))
    return [(direction, specs[0]) for direction in directions or [""]] if specs else []


def _direction(node: NodeText, index: str) -> str:
    """Returns the direction of one result of a cast, by its place among the results; empty for an amax.

    A producer may have several tensors quantized, each in both directions and with its amax.
    """
    sides = sides_of(node)
    counts = [_parts(spec) for _, spec in sides]
    recorded = node.operator == "fxquant::produce_quantize" and node.arguments.endswith("True")
    if not sides or not index.isdecimal():
        return sides[0][0] if len(sides) == 1 else ""
    place = int(index) % (sum(counts) + recorded)
    return sides[place >= counts[0]][0] if place < sum(counts) else ""


def _parts(spec: str) -> int:
    """Returns the number of tensors that a half of a quantization consists of."""
    row = QuantSpec.parse(spec).row
    return 1 if row.family == "identity" else 3 if row.has_global_amax else 2
