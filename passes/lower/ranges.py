"""Ranges: products under names for a profiler, so that a trace reads as the model does. With the option `ranges` alone.

    before   c = fxquant::scaled_mm(a, b, ...)            # for the gradient of mlp.down's weight
             d = aten::mm(x, head)                        # the head stays in high precision
    after    c = fxquant_kernels::scaled_mm_in_range("mlp.down wgrad", True, a, b, ...)
             d = fxquant_kernels::aten_mm_default_in_range("head fprop", x, head)

The operators run the same kernels inside of a range of the profiler, alone: Inductor fuses nothing into them.
"""

from __future__ import annotations

import inspect
import operator
from typing import Any

from torch import fx

from fxquant.compat.private import OpOverload
from fxquant.kernels.operator import OPERATORS, operator_of
from fxquant.kernels.torch_in_range import TORCH_PRODUCTS, register_torch_ranges, torch_in_range
from fxquant.passes.graph.match import behind_views
from fxquant.passes.graph.meta import EAGER_INPUTS, GEMM, layer_of
from fxquant.passes.graph.names import COPIES, ORDERS, calls, fxquant_op, op_name
from fxquant.passes.graph.values import val
from fxquant.passes.joint.sides import sides_of
from fxquant.passes.settings import Settings
from fxquant.roles import Direction, Gemm

_PRODUCTS = {
    "scaled_mm": "", "fused_scaled_mm": "", "grouped_scaled_mm": "", "attention_forward": "attention",
    "attention_backward": "attention backward",
}  # fmt: skip
"""The operators that become ranges, with the words for those that are no GEMM."""


def register_ranges() -> None:
    """Registers the operators of ranges, which a graph from Inductor's cache calls."""
    for name in _PRODUCTS:
        assert OPERATORS[name].in_range is not None
    register_torch_ranges()


def mark_gemms(graph: fx.Graph, settings: Settings) -> int:
    """Notes which of a layer's GEMMs a product is, for `name_products`; returns how many it noted."""
    products = [node for node in graph.nodes if fxquant_op(node) in _PRODUCTS] if settings.ranges else []
    for node in products:
        node.meta[GEMM] = _PRODUCTS[fxquant_op(node)] or _gemm(node)
    others = _torch_products(graph) if settings.ranges else []
    behind = _behind_gradients(graph) if others else set()
    for node in others:
        node.meta[GEMM] = TORCH_PRODUCTS[op_name(node)] or _torch_gemm(node, behind)
    return len(products) + len(others)


def name_products(graph: fx.Graph, settings: Settings) -> int:
    """Puts the kernels of products in ranges; returns how many there are."""
    return _name(graph, settings, best=True)


def name_meanings(graph: fx.Graph, settings: Settings) -> int:
    """Puts products in ranges that run as their meaning; returns how many there are."""
    return _name(graph, settings, best=False)


def _name(graph: fx.Graph, settings: Settings, *, best: bool) -> int:
    products = [node for node in graph.nodes if fxquant_op(node) in _PRODUCTS] if settings.ranges else []
    for node in products:
        called = operator_of(node.target)
        assert called is not None
        _put_in_range(node, called.in_range, best)
    others = _torch_products(graph) if settings.ranges else []
    for node in others:
        _put_in_range(node, torch_in_range(node.target))
    return len(products) + len(others)


def _put_in_range(node: fx.Node, target: Any, *more: bool) -> None:
    """Has a node call an operator behind the name of its range, and `more`."""
    name = f"{layer_of(node) or '<model>'} {node.meta.get(GEMM, '')}".strip()
    node.target, node.args = target, (name, *more, *node.args)
    if EAGER_INPUTS in node.meta:
        inputs, keywords = node.meta[EAGER_INPUTS]
        node.meta[EAGER_INPUTS] = (name, *more, *inputs), keywords


def _torch_products(graph: fx.Graph) -> list[fx.Node]:
    """The products that torch's own operators compute."""
    return [
        node
        for node in graph.nodes
        if isinstance(node.target, OpOverload) and node.target.namespace == "aten" and op_name(node) in TORCH_PRODUCTS
    ]


def _behind_gradients(graph: fx.Graph) -> set[fx.Node]:
    """The nodes of a backward that are computed from a gradient of its outputs."""
    behind: set[fx.Node] = set()
    for node in graph.nodes:
        is_gradient = node.op == "placeholder" and node.name.startswith("tangents")
        if is_gradient or not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
    return behind


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
