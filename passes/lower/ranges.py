"""Ranges: products under names for a profiler, so that a trace reads as the model does. With the option `ranges` alone.

    before   c = fxquant::scaled_mm(a, b, ...)            # for the gradient of mlp.down's weight
             d = aten::mm(x, head)                        # the head stays in high precision
    after    c = fxquant_kernels::scaled_mm_in_range("mlp.down wgrad", True, a, b, ...)
             d = fxquant_kernels::aten_mm_default_in_range("head fprop", x, head)

The operators run the same kernels inside of a range of the profiler, alone: Inductor fuses nothing into them.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from fxquant.kernels.operator import OPERATORS, operator_of
from fxquant.kernels.torch_in_range import register_torch_ranges, torch_in_range
from fxquant.passes.graph.meta import EAGER_INPUTS, GEMM, layer_of
from fxquant.passes.graph.names import fxquant_op
from fxquant.passes.joint.gemms import PRODUCTS, gemms_of, torch_products
from fxquant.passes.settings import Settings


def register_ranges() -> None:
    """Registers the operators of ranges, which a graph from Inductor's cache calls."""
    for name in PRODUCTS:
        assert OPERATORS[name].in_range is not None
    register_torch_ranges()


def mark_gemms(graph: fx.Graph, settings: Settings) -> int:
    """Notes which of a layer's GEMMs a product is, for `name_products`; returns how many it noted."""
    products = gemms_of(graph) if settings.ranges else {}
    for node, gemm in products.items():
        node.meta[GEMM] = gemm
    return len(products)


def name_products(graph: fx.Graph, settings: Settings) -> int:
    """Puts the kernels of products in ranges; returns how many there are."""
    return _name(graph, settings, best=True)


def name_meanings(graph: fx.Graph, settings: Settings) -> int:
    """Puts products in ranges that run as their meaning; returns how many there are."""
    return _name(graph, settings, best=False)


def _name(graph: fx.Graph, settings: Settings, *, best: bool) -> int:
    products = [node for node in graph.nodes if fxquant_op(node) in PRODUCTS] if settings.ranges else []
    for node in products:
        called = operator_of(node.target)
        assert called is not None
        _put_in_range(node, called.in_range, best)
    others = torch_products(graph) if settings.ranges else []
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
