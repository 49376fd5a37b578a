"""Graphs at one moment, as text: their nodes, and what a pass has made of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeText:
    """A node of a graph: its `operator` with its `arguments`, and the names of the nodes that it `reads`.

    `values` has dtype and shape of each tensor that it computes, such as ``bf16[64, 128]``, and `specs` the formats
    among its arguments. `note` says what passes have found out of it; `epilogue` names the last of the operators that
    a GEMM could finish its result with, and `reasons` say why passes did not take what they considered.
    """

    name: str
    operator: str
    arguments: str = ""
    reads: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    specs: tuple[str, ...] = ()
    layer: str = ""
    note: str = ""
    epilogue: str = ""
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        values = ", ".join(self.values)
        value = f": ({values})" if len(self.values) > 1 else f": {values}" if values else ""
        call = f"({self.arguments})" if self.arguments else ""
        return f"{self.name}{value} = {self.operator}{call}" + (f"  # {self.note}" if self.note else "")

    @property
    def shape(self) -> str:
        """The shape of its first tensor as text; empty without one."""
        return self.values[0][self.values[0].index("[") :] if self.values and "[" in self.values[0] else ""


Snapshot = tuple[NodeText, ...]
"""The nodes of a graph, and of the bodies inside it, in order."""


class Step(NamedTuple):
    """A graph before and after a pass, the pass's reason to stand there, and the name of its stage.

    `graph` is ``captured``, ``joint``, ``forward`` or ``backward``, with a number behind further ones: ``forward 2``.
    """

    stage: str
    name: str
    because: str
    graph: str
    before: Snapshot
    after: Snapshot

    @property
    def changed(self) -> int:
        """The number of nodes that are new, changed or gone."""
        return 0 if self.before is self.after else sum(mark != KEPT for mark, _ in changes(self.before, self.after))


KEPT, NEW, GONE, CHANGED = " ", "+", "-", "~"
"""The marks of nodes behind a pass."""


def changes(before: Snapshot, after: Snapshot) -> Iterator[tuple[str, NodeText]]:
    """Yields the nodes behind a pass with their marks, and those that are gone where they stood."""
    old = {node.name: node for node in before}
    kept = {node.name for node in after}
    gone: dict[str, list[NodeText]] = {}
    last = ""
    for node in before:
        if node.name in kept:
            last = node.name
        else:
            gone.setdefault(last, []).append(node)
    yield from ((GONE, node) for node in gone.get("", ()))
    for node in after:
        yield (NEW if node.name not in old else KEPT if node == old[node.name] else CHANGED), node
        yield from ((GONE, other) for other in gone.get(node.name, ()))
