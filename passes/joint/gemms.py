"""The GEMM of its layer that each product of a graph is, as autograd and the partitioner have left it."""

from __future__ import annotations

import inspect
import operator
from typing import Any

from torch import fx

from fxquant.compat.private import OpOverload
from fxquant.kernels.operator import operator_of
from fxquant.kernels.torch_in_range import TORCH_PRODUCTS
from fxquant.passes.graph.match import behind_views
from fxquant.passes.graph.names import COPIES, ORDERS, calls, fxquant_op, op_name
from fxquant.passes.graph.values import val
from fxquant.passes.joint.scales import nodes_of_backward
from fxquant.passes.joint.sides import sides_of
from fxquant.roles import Direction, Gemm

PRODUCTS = {
    "scaled_mm": "", "fused_scaled_mm": "", "grouped_scaled_mm": "", "attention_forward": "attention",
    "attention_backward": "attention backward",
}  # fmt: skip
"""The operators of ours that multiply, with the words for those that are no GEMM."""


def gemms_of(graph: fx.Graph) -> dict[fx.Node, str]:
    """The products of a graph: ``fprop``, ``dgrad``, ``wgrad``, ``backward``, ``attention`` or ``attention backward``.

    Each quantization is of one direction yet, by which a product is told from its kin.
    """
    gemms = {node: PRODUCTS[fxquant_op(node)] or _gemm(node) for node in graph.nodes if fxquant_op(node) in PRODUCTS}
    others = torch_products(graph)
    behind = nodes_of_backward(graph) if others else set()
    return gemms | {node: TORCH_PRODUCTS[op_name(node)] or _torch_gemm(node, behind) for node in others}


def torch_products(graph: fx.Graph) -> list[fx.Node]:
    """The products that torch's own operators compute."""
    return [
        node
        for node in graph.nodes
        if isinstance(node.target, OpOverload) and node.target.namespace == "aten" and op_name(node) in TORCH_PRODUCTS
    ]


def _torch_gemm(node: fx.Node, behind: set[fx.Node]) -> str:
    """The GEMM that a product of torch's is: for wgrad it contracts the rows of the gradient, and else its columns."""
    if node not in behind:
        return str(Gemm.FPROP)
    operands = [source for source in node.args if isinstance(source, fx.Node)]
    left, right, *_ = [*operands[op_name(node) in _ADDS :], node, node]
    if op_name(node) not in _MATRICES or (left in behind) == (right in behind):
        return "backward"
    on_left = left in behind
    return str(Gemm.DGRAD if on_left != _transposed(left if on_left else right) else Gemm.WGRAD)


_ADDS = ("addmm", "baddbmm")
_MATRICES = ("mm", "bmm", "_grouped_mm", *_ADDS)


def _transposed(node: fx.Node) -> bool:
    """Returns True if a matrix, or each of a batch, is another one with its axes exchanged."""
    turned = False
    while calls(node, ORDERS | COPIES):
        turned ^= calls(node, ORDERS) and _moves_last_axis(node)
        node = node.args[0]  # type: ignore[assignment]
    return turned


def _moves_last_axis(node: fx.Node) -> bool:
    axes: Any = node.args[1] if calls(node, ("permute",)) else node.args[1:]
    count = val(node).ndim
    numbers = [axis % count for axis in axes]
    return numbers[-1] != count - 1 if calls(node, ("permute",)) else not numbers or count - 1 in numbers


def _gemm(node: fx.Node) -> str:
    """The GEMM that a product is: a backward contracts its gradient rowwise for dgrad, and columnwise for wgrad."""
    called = operator_of(node.target)
    assert called is not None
    arguments = inspect.signature(called.meaning).bind(*node.args, **node.kwargs).arguments
    if arguments.get("fast_accum"):
        return str(Gemm.FPROP)
    direction = _direction(arguments["a"][0])
    return {Direction.ROWWISE: str(Gemm.DGRAD), Direction.COLUMNWISE: str(Gemm.WGRAD)}.get(direction, "backward")


def _direction(part: Any) -> Any:
    """The direction in which the operand of a part was quantized; None where that is not in the graph."""
    source = behind_views(part)
    if source.target is operator.getitem:
        source = source.args[0]
    sides = sides_of(source)
    return Direction(sides[0].direction) if len(sides) == 1 else None
