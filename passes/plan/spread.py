"""The ranks that hold parts of the operands of a product, and those of them that have a scale in common.

A product that `localize` wrote reads parts of tensors that are spread over a mesh, and gives one. Where a format has a
scale for the whole tensor, or for whole rows, its amax is the largest of all ranks that hold parts of that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from fxquant.compat.inside.placements import (
    local_part,
    mesh_groups,
    mesh_names,
    mesh_sizes,
    placements_text,
    spread_out,
)
from fxquant.formats import QuantSpec
from fxquant.passes.find.facts import Contraction, Label, Match
from fxquant.passes.graph.names import op_name
from fxquant.passes.graph.values import value_of
from fxquant.roles import Direction

_CONTRACTED = {
    ("input", Direction.ROWWISE): "inner",
    ("input", Direction.COLUMNWISE): "rows",
    ("weight", Direction.ROWWISE): "inner",
    ("weight", Direction.COLUMNWISE): "columns",
    ("grad_output", Direction.ROWWISE): "columns",
    ("grad_output", Direction.COLUMNWISE): "rows",
}
"""The axes of a product along which a direction of an operand is contracted."""


@dataclass(frozen=True)
class Part:
    """A dimension of a mesh whose ranks hold parts of an operand: of one of the `axes` of its product."""

    axes: str
    name: str
    group: str


Spread = Mapping[str, Sequence[Part]]
"""The parts of the operands of a product; none of one that every rank has."""


def spread_of(match: Match) -> Spread:
    """Returns how the operands of a product of local parts are spread; nothing for other products."""
    if match.contraction is None:
        return {}
    left, right = match.contraction.left, match.contraction.right
    out = next((user for user in match.node.users if user.target is spread_out), None)
    operands = (("input", left.node, left.labels), ("weight", right.node, right.labels))
    parts = {operand: [*_parts(node, labels, match.contraction)] for operand, node, labels in operands}
    if out is not None:
        parts["grad_output"] = [*_placed(out, str(out.args[2]), match.contraction.out, match.contraction)]
    return {operand: some for operand, some in parts.items() if some}


def tensor_of(node: fx.Node) -> fx.Node:
    """Returns the tensor that a part is, where it was made a DTensor just for a product; else the node itself.

    Several layers that read one tensor spread it each for itself.
    """
    spread = node.args[0] if node.target is local_part else None
    if not isinstance(spread, fx.Node) or not op_name(spread).endswith("from_local"):
        return node
    tensor, text = spread.args[0], placements_text(value_of(spread))
    return tensor if isinstance(tensor, fx.Node) and text == node.args[1] else node


def _parts(node: fx.Node, labels: Sequence[Label], contraction: Contraction) -> Iterator[Part]:
    if node.target is local_part and isinstance(whole := node.args[0], fx.Node):
        yield from _placed(whole, str(node.args[1]), labels, contraction)


def _placed(whole: fx.Node, text: str, labels: Sequence[Label], contraction: Contraction) -> Iterator[Part]:
    value = value_of(whole)
    of_mesh = zip(text.split(), mesh_names(value), mesh_sizes(value), mesh_groups(value), strict=True)
    for item, name, ranks, group in of_mesh:
        if item.startswith("S") and ranks > 1:
            label = labels[int(item[1:])]
            kinds = (kind for kind in ("rows", "columns", "inner") if label in getattr(contraction, kind))
            yield Part(next(kinds, "batch"), name, group)


def shared_by(spread: Spread, operand: str, direction: Direction, spec: QuantSpec) -> list[Part]:
    """Returns the parts whose ranks have a scale of a direction of an operand in common."""
    if spec.key or spec.is_identity:
        return []
    parts = spread.get(operand, ())
    if spec.scaled == "row":
        return [part for part in parts if part.axes == _CONTRACTED[operand, direction]]
    return [*parts] if spec.scaled else []
