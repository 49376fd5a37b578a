"""The tree of a report: modules nested as in the model, repeated ones once, with the matmuls that run in them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fxquant.cost.work import Estimate
from fxquant.decisions import Decision
from fxquant.report.data import MODEL, Loss, ReportData, by_gemm, ranges, result, role_text
from fxquant.roles import Gemm


@dataclass(kw_only=True, eq=False)
class Leaf:
    """A matmul, or a whole attention, of `layers` that differ only in numbers of their names.

    `label` tells it from others of its layer, `decisions` are the first layer's. `losses` are those of all layers.
    """

    label: str
    layers: list[str]
    decisions: list[Decision]
    estimate: Estimate | None
    losses: list[Loss]

    def products(self) -> dict[tuple[int, Gemm], list[Decision]]:
        """The operands of each GEMM, normally two."""
        return by_gemm(self.decisions)

    @property
    def is_attention(self) -> bool:
        """True for the products of a whole attention."""
        return self.decisions[0].attention is not None

    @property
    def flops(self) -> int:
        """The FLOPs of one of the layers."""
        return sum(operands[0].flops for operands in self.products().values())

    def facts(self) -> Any:
        """Everything in which equal layers agree."""
        operands = tuple(
            (role_text(d), d.gemm, d.direction, d.shape, _numberless(result(d), d.layer), d.part)
            for d in self.decisions
        )
        return self.label, operands, self.estimate


@dataclass(kw_only=True, eq=False)
class Node:
    """A module by its `name` in the module around it, such as ``mlp``, ``{0..31}`` or ``model.layers``; `count` alike.

    What runs in the module itself are `leaves`; `nodes` are the modules in it.
    """

    name: str
    count: int = 1
    nodes: list[Node] = field(default_factory=list)
    leaves: list[Leaf] = field(default_factory=list)

    def facts(self) -> Any:
        """Everything in which equal modules agree."""
        inner = tuple((node.name, node.facts()) for node in self.nodes)
        return inner, tuple(leaf.facts() for leaf in self.leaves)

    def walk(self, path: str = "", count: int = 1) -> Iterator[tuple[str, int, Leaf]]:
        """Yields each leaf with the path of its layer, and how many equal layers there are."""
        here, many = f"{path}.{self.name}".strip("."), count * self.count
        for leaf in self.leaves:
            yield here, many, leaf
        for node in self.nodes:
            yield from node.walk(here, many)


def tree(report: ReportData) -> Node:
    """The model of a report as a tree, in the order of the graph."""
    root = Node(name="")
    by_layer: dict[str, list[Leaf]] = defaultdict(list)
    for leaf in leaves_of(report):
        by_layer[leaf.layers[0]].append(leaf)
    modules = {"": root}
    for layer, leaves in by_layer.items():
        _module(modules, layer).leaves = leaves
    _fold(root)
    _join(root)
    return root


def title(path: str, leaf: Leaf) -> str:
    """The name of a matmul: the path of its layer, with its label where the layer has several."""
    return f"{path or MODEL} {leaf.label}".strip()


def _numberless(text: str, layer: str) -> str:
    """The text, in which paths have no number that the layer's own path has in the same place."""
    own_path = layer.split(".")

    def without(match: re.Match[str]) -> str:
        parts = match[0].split(".")
        same = [i < len(own_path) and part == own_path[i] for i, part in enumerate(parts)]
        return ".".join("{}" if part.isdecimal() and all(same[: i + 1]) else part for i, part in enumerate(parts))

    return re.sub(r"\w+(?:\.\w+)+", without, text)


def leaves_of(report: ReportData) -> list[Leaf]:
    """Every matmul by itself, the products of an attention as one; those of a layer stand together."""
    estimates, names, losses = report.estimates(), report.names(), defaultdict[str, list[Loss]](list)
    for loss in report.losses:
        losses[loss.layer].append(loss)
    groups: dict[int, list[Decision]] = defaultdict(list)
    for decision in report.decisions:
        groups[decision.weighed].append(decision)
    by_layer: dict[str, list[Leaf]] = defaultdict(list)
    for site, decisions in groups.items():
        layer = decisions[0].layer
        label = names[decisions[0].site].removeprefix(layer or MODEL).strip(" .")
        leaf = Leaf(label=label, layers=[layer], decisions=decisions, estimate=estimates.get(site), losses=[])
        leaf.label = "attention" if leaf.is_attention else label
        by_layer[layer].append(leaf)
    for layer, leaves in by_layer.items():
        _number(leaves)
        for is_attention in (True, False):
            alike = [leaf for leaf in leaves if leaf.is_attention == is_attention]
            _give_losses(alike, [loss for loss in losses[layer] if (loss.what == "attention") == is_attention])
    return [leaf for leaves in by_layer.values() for leaf in leaves]


def _number(leaves: Sequence[Leaf]) -> None:
    """Tells the matmuls of a layer apart that have one label."""
    same: dict[str, list[Leaf]] = defaultdict(list)
    for leaf in leaves:
        same[leaf.label].append(leaf)
    for label, alike in same.items():
        for i, leaf in enumerate(alike, 1):
            leaf.label = f"{label} #{i}".strip() if len(alike) > 1 else label


def _give_losses(leaves: Sequence[Leaf], losses: Sequence[Loss]) -> None:
    """Gives each matmul of a layer its loss, in order; all of them to all, where some were not measured."""
    for i, leaf in enumerate(leaves):
        leaf.losses = [losses[i]] if len(losses) == len(leaves) else [*losses]


def _module(modules: dict[str, Node], path: str) -> Node:
    """The node of a module, made with those around it where it is not there yet."""
    if path not in modules:
        outer, _, name = path.rpartition(".")
        modules[path] = Node(name=name)
        _module(modules, outer).nodes.append(modules[path])
    return modules[path]


def _fold(node: Node) -> None:
    """Merges modules of a list that are equal, from the inside out."""
    groups: dict[Any, list[Node]] = {}
    for inner in node.nodes:
        _fold(inner)
        groups.setdefault(("", inner.facts()) if inner.name.isdecimal() else (inner.name, None), []).append(inner)
    node.nodes = [_merged(equal) for equal in groups.values()]


def _merged(nodes: Sequence[Node]) -> Node:
    first = nodes[0]
    if len(nodes) > 1:
        for other in nodes[1:]:
            _add_layers(first, other)
        first.name, first.count = ranges([int(node.name) for node in nodes]), len(nodes)
    return first


def _add_layers(node: Node, other: Node) -> None:
    """Adds the layers of an equal module to those of a node."""
    for leaf, same in zip(node.leaves, other.leaves, strict=True):
        leaf.layers += same.layers
        leaf.losses += same.losses
    for inner, same_inner in zip(node.nodes, other.nodes, strict=True):
        _add_layers(inner, same_inner)


def _join(node: Node) -> None:
    """Writes modules in which there is one module alone, such as ``model`` and ``layers``, as one."""
    for inner in node.nodes:
        while not inner.leaves and len(inner.nodes) == 1:
            only = inner.nodes[0]
            inner.name, inner.count = f"{inner.name}.{only.name}", inner.count * only.count
            inner.nodes, inner.leaves = only.nodes, only.leaves
        _join(inner)
