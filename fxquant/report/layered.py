"""A small layout of directed graphs in layers: longest paths, barycentres against crossings, then room."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, NamedTuple, TypeVar

Key = TypeVar("Key", bound=Hashable)
_SWEEPS = 6


@dataclass(frozen=True)
class Layout(Generic[Key]):
    """The middle of each node in columns and its layer, and the points of each edge in the same units.

    Columns are numbers, of which neighbours in a layer have a difference of at least 1; the least is 0.
    """

    places: dict[Key, tuple[float, int]]
    edges: dict[tuple[Key, Key], list[tuple[float, int]]]
    columns: float
    layers: int


class _Bend(NamedTuple):
    """The place where a long edge passes a layer."""

    edge: int
    layer: int


def arrange(nodes: Sequence[Key], edges: Sequence[tuple[Key, Key]]) -> Layout[Key]:
    """Places nodes, in the order of which edges mostly run, so that edges go down.

    An edge that would close a cycle does not count for layers, and is drawn upwards.
    """
    edges = [edge for edge in dict.fromkeys(edges) if edge[0] != edge[1]]
    layer = _layers(nodes, _without_cycles(nodes, edges))
    count = 1 + max(layer.values(), default=-1)
    rows: list[list[Key | _Bend]] = [[] for _ in range(count)]
    for node in nodes:
        rows[layer[node]].append(node)
    paths: list[list[Key | _Bend]] = []
    for number, (start, end) in enumerate(edges):
        step = 1 if layer[start] < layer[end] else -1
        bends = [_Bend(number, at) for at in range(layer[start] + step, layer[end], step)]
        for bend in bends:
            rows[bend.layer].append(bend)
        paths.append([start, *bends, end])
    neighbours: dict[Key | _Bend, list[Key | _Bend]] = {item: [] for row in rows for item in row}
    for path in paths:
        for a, b in pairwise(path):
            neighbours[a].append(b)
            neighbours[b].append(a)
    column = _columns(rows, neighbours)
    least = min(column.values(), default=0.0)
    at = {item: (column[item] - least, number) for number, row in enumerate(rows) for item in row}
    return Layout(
        {node: at[node] for node in nodes},
        {edge: [at[item] for item in path] for edge, path in zip(edges, paths, strict=True)},
        max(column.values(), default=0.0) - least,
        count,
    )


def _without_cycles(nodes: Sequence[Key], edges: Sequence[tuple[Key, Key]]) -> dict[Key, list[Key]]:
    """The nodes behind each one, without edges that lead back."""
    after: dict[Key, list[Key]] = {node: [] for node in nodes}
    for start, end in edges:
        after[start].append(end)
    kept: dict[Key, list[Key]] = {node: [] for node in nodes}
    state: dict[Key, int] = {}

    def visit(node: Key) -> None:
        state[node] = 1
        for end in after[node]:
            if state.get(end) != 1:
                kept[node].append(end)
            if end not in state:
                visit(end)
        state[node] = 2

    for node in nodes:
        if node not in state:
            visit(node)
    return kept


def _layers(nodes: Sequence[Key], after: Mapping[Key, Sequence[Key]]) -> dict[Key, int]:
    """The length of the longest path to each node; what nothing leads to stands right above what it leads to."""
    entered = dict.fromkeys(nodes, 0)
    for ends in after.values():
        for end in ends:
            entered[end] += 1
    sources = {node for node, count in entered.items() if not count}
    ready, layer = [node for node in nodes if node in sources], dict.fromkeys(nodes, 0)
    for node in ready:
        for end in after[node]:
            layer[end] = max(layer[end], layer[node] + 1)
            entered[end] -= 1
            if not entered[end]:
                ready.append(end)
    for node in sources:
        layer[node] = min((layer[end] - 1 for end in after[node]), default=layer[node])
    return layer


def _columns(
    rows: Sequence[list[Key | _Bend]], neighbours: Mapping[Key | _Bend, Sequence[Key | _Bend]]
) -> dict[Key | _Bend, float]:
    """Orders each row by the mean column of its neighbours, downwards and upwards, then gives everything its column."""
    column: dict[Key | _Bend, float] = {item: float(i) for row in rows for i, item in enumerate(row)}
    for sweep in range(_SWEEPS):
        order = rows if sweep % 2 == 0 else rows[::-1]
        for row in order:
            means = {item: _mean(column, neighbours[item], column[item]) for item in row}
            row.sort(key=means.__getitem__)
            column.update(_apart(row, means))
    return column


def _mean(column: Mapping[Key, float], items: Sequence[Key], otherwise: float) -> float:
    return sum(column[item] for item in items) / len(items) if items else otherwise


def _apart(row: Sequence[Key | _Bend], wanted: Mapping[Key | _Bend, float]) -> dict[Key | _Bend, float]:
    """The columns nearest to the wanted ones with room between them; a bend needs half a column.

    Items that push each other stand together around the mean of what they want.
    """
    blocks: list[tuple[list[Key | _Bend], float]] = []  # items, and the column of the first
    for item in row:
        blocks.append(([item], wanted[item]))
        while len(blocks) > 1:
            (before, start), (items, first) = blocks[-2:]
            if start + _width(before) + _between(before[-1], items[0]) <= first:
                break
            joined = [*before, *items]
            offsets = _offsets(joined)
            middle = sum(wanted[item] - offset for item, offset in zip(joined, offsets, strict=True)) / len(joined)
            blocks[-2:] = [(joined, middle)]
    return {
        item: start + offset for items, start in blocks for item, offset in zip(items, _offsets(items), strict=True)
    }


def _between(left: Key | _Bend, right: Key | _Bend) -> float:
    bends = isinstance(left, _Bend) + isinstance(right, _Bend)
    return (1.0, 0.62, 0.12)[bends]


def _offsets(items: Sequence[Key | _Bend]) -> list[float]:
    offsets = [0.0]
    for left, right in pairwise(items):
        offsets.append(offsets[-1] + _between(left, right))
    return offsets


def _width(items: Sequence[Key | _Bend]) -> float:
    return _offsets(items)[-1]
