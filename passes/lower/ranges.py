"""Ranges: products under names for a profiler, so that a trace reads as the model does. With the option `ranges` alone.

    before   c = fxquant::scaled_mm(a, b, ...)            # for the gradient of mlp.down's weight
    after    c = fxquant_kernels::scaled_mm_in_range("mlp.down wgrad", True, a, b, ...)

The operator runs the same kernel inside of a range of the profiler, alone: Inductor fuses nothing into it.
"""

from __future__ import annotations

import inspect
import operator
from typing import Any

from torch import fx

from fxquant.kernels.operator import OPERATORS, operator_of
from fxquant.passes.graph.match import behind_views
from fxquant.passes.graph.meta import EAGER_INPUTS, GEMM, layer_of
from fxquant.passes.graph.names import fxquant_op
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


def mark_gemms(graph: fx.Graph, settings: Settings) -> int:
    """Notes which of a layer's GEMMs a product is, for `name_products`; returns how many it noted."""
    products = [node for node in graph.nodes if fxquant_op(node) in _PRODUCTS] if settings.ranges else []
    for node in products:
        node.meta[GEMM] = _PRODUCTS[fxquant_op(node)] or _gemm(node)
    return len(products)


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
        name = f"{layer_of(node) or '<model>'} {node.meta.get(GEMM, '')}".strip()
        node.target, node.args = called.in_range, (name, best, *node.args)
        if EAGER_INPUTS in node.meta:
            inputs, keywords = node.meta[EAGER_INPUTS]
            node.meta[EAGER_INPUTS] = (name, best, *inputs), keywords
    return len(products)


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
