"""Predicts the operands of linears that an attention beside them quantizes.

It reads the rewritten graph, before autograd, and marks the decisions; passes/joint/reuse.py does it, after autograd.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from torch import fx

from fxquant.compat.values import statically_known_true
from fxquant.decisions import Decision
from fxquant.formats import AttentionSpec, LinearSpec, OperandSpec, QuantSpec
from fxquant.passes.graph.meta import SITE
from fxquant.passes.graph.names import SAME_ELEMENTS, calls, is_fxquant
from fxquant.passes.graph.values import value_of
from fxquant.roles import Direction

_Operand = tuple[int, str, Direction]
"""The site of a linear, one of its tensor types and a direction."""


def predict_reuse(graphs: Iterable[fx.GraphModule], decisions: Sequence[Decision]) -> list[Decision]:
    """Returns the decisions; those of operands that are not quantized again are `shared`, with a detail."""
    shared = dict(pair for gm in graphs for pair in _shared(gm.graph))
    marked = []
    for d in decisions:
        name = shared.get((d.site, d.role.tensor_type, d.direction))
        if name is not None and d.quantizer is not None:
            tensor = "output" if d.role.tensor_type == "input" else "gradient"
            turned = ", transposed" if d.direction is Direction.COLUMNWISE else ""
            d = replace(d, shared=True, detail=f"as attention {name or '<model>'} quantized its {tensor}{turned}")
        marked.append(d)
    return marked


def _shared(graph: fx.Graph) -> Iterator[tuple[_Operand, str]]:
    """Yields the shared operands, with the name of the attention that quantizes them."""
    for node in graph.nodes:
        if is_fxquant(node, "linear"):
            source = node.args[0]
            while (moved := _moved(source)) is not None:
                source = moved
            if is_fxquant(source, "attention"):
                attention = AttentionSpec.parse(source.args[4])
                yield from _sides(node, "input", attention.o, attention.name, node.args[0], source)
        elif is_fxquant(node, "attention"):
            attention = AttentionSpec.parse(node.args[4])
            for operand in node.args[:3]:
                user, source = node, operand
                while _readers(source) == [user] and (moved := _moved(source)) is not None:
                    user, source = source, moved
                if is_fxquant(source, "linear") and _readers(source) == [user]:
                    yield from _sides(source, "grad_output", attention.dqkv, attention.name, source, node)


def _moved(node: fx.Node) -> fx.Node | None:
    """Returns the node whose elements this one only moves; None where it does anything else."""
    return node.args[0] if calls(node, SAME_ELEMENTS) and isinstance(node.args[0], fx.Node) else None


def _readers(node: fx.Node) -> list[fx.Node]:
    """Returns the users of a node but those that the rewriting left unused."""
    return [user for user in node.users if user.users or user.op == "output" or user.is_impure()]


def _sides(
    linear: fx.Node, tensor_type: str, spec: QuantSpec, name: str, matrix: fx.Node, attention: fx.Node
) -> Iterator[tuple[_Operand, str]]:
    """Yields the directions in which a linear quantizes as the attention does, which is `spec`."""
    operand: OperandSpec = getattr(LinearSpec.parse(str(linear.args[3])), tensor_type)
    alike = len({value_of(node).dtype for node in (linear, matrix, attention)}) == 1
    if spec.row.family != "per_tensor" or spec.is_delayed or not alike:
        return
    if statically_known_true(value_of(matrix).shape[-1] % spec.row.alignment == 0):
        if operand.rowwise == spec:
            yield (linear.meta[SITE], tensor_type, Direction.ROWWISE), name
        if operand.columnwise == spec and not operand.from_rowwise:
            yield (linear.meta[SITE], tensor_type, Direction.COLUMNWISE), name
