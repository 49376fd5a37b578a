"""Every key of `node.meta` that the passes read or write, a constant each."""

from __future__ import annotations

from typing import Any

from torch import fx

VAL = "val"
"""The value of a node of an ATen graph: a fake tensor, a symbol, or a tuple of them."""

EXAMPLE_VALUE = "example_value"
"""The value of a node of a captured graph, with what autograd will know of it."""

MODULE_STACK = "nn_module_stack"
"""The modules that a node was called in, outermost first: a path and a type by the module's id."""

FORWARD_MODULE_STACK = "fwd_nn_module_stack"
"""The modules of the forward node that a node of the backward belongs to."""

GRAPH_INPUT = "grapharg"
"""The input of the first call that a placeholder of a captured graph stood for."""

RECOMPUTE = "recompute"
"""The policy of an activation checkpoint for a node."""

STACK_TRACE = "stack_trace"
"""The user's source lines that a node comes from."""

CUSTOM = "custom"
"""A dictionary of annotations that torch keeps through every transformation; `layer_of` reads ours."""

EAGER_INPUTS = "eager_input_vals"
"""The arguments and keywords of an operator as a trace saw them, whose strides Inductor keeps for it."""

OF_A_TRACE = (EAGER_INPUTS, "original_aten")
"""Keys that a trace writes: inputs whose strides Inductor keeps for an operator, and the name that kernels get."""

LAYER = "fxquant_layer"
"""The layer of a node that was captured without its modules."""

HELD = "fxquant_held"
"""True for an input of a program that its modules hold without being a parameter."""

UNPLACED = "fxquant_unplaced"
"""The reason why a product of tensors that are spread over a mesh is not written as one of their local parts."""

PROJECTION = "fxquant_projection"
"""The part of its module that a linear belongs to, such as ``in_proj``."""

SITE = "fxquant_site"
"""The site, as decisions count them, of an inserted operator."""

MODULE_TYPE = "fxquant_module_type"
"""The `module_type` of the roles of an inserted operator."""

GEMM = "fxquant_gemm"
"""The GEMM of its layer that a product is, for the ranges of a profiler."""

PART = "fxquant_part"
"""The place of a tensor among those that a user's own quantizer made."""

CONSIDERED = "fxquant_considered"
"""The reasons why passes did not take what they considered for a node."""

OBSERVER = "fxquant_observer"
"""The number of the observer that calibration puts in front of a node."""

_OF_CUSTOM = "fxquant"
"""The key in `CUSTOM` for the name of the layer that an operator was inserted for."""

_PLACES = "fxquant_places"
"""The key in `CUSTOM` for the places of the matmuls that a node computes, counted in its captured graph."""

_OF_TORCH = ("tensor_meta", "unbacked_bindings", "recompute", "ac_graph_id", "from_node")
_OF_ONE_NODE = frozenset([VAL, EXAMPLE_VALUE, CONSIDERED, *OF_A_TRACE, *_OF_TORCH])


def inherited(node: fx.Node) -> dict[str, Any]:
    """The entries of a node's meta that also hold for others of the same origin."""
    return {key: value for key, value in node.meta.items() if key not in _OF_ONE_NODE}


def layer_of(node: fx.Node) -> str:
    """The name of the layer that a node was inserted for, or of the first of several; empty if there is none."""
    return str(node.meta.get(CUSTOM, {}).get(_OF_CUSTOM, ""))


def for_layer(node: fx.Node, layer: str) -> None:
    """Says of a node, and of what autograd makes of it, which layer it belongs to."""
    node.meta[CUSTOM] = {**node.meta.get(CUSTOM, {}), _OF_CUSTOM: layer}


def places_of(node: fx.Node) -> tuple[int, ...]:
    """The places of the matmuls that a node computes among those of its captured graph; none if it is not known."""
    return tuple(node.meta.get(CUSTOM, {}).get(_PLACES, ()))


def stands_at(node: fx.Node, places: tuple[int, ...]) -> None:
    """Says of a node, and of what autograd makes of it, which matmuls of its captured graph it computes."""
    node.meta[CUSTOM] = {**node.meta.get(CUSTOM, {}), _PLACES: places}


def inserted_for(node: fx.Node, layer: str, site: int) -> None:
    """Says of an operator which layer and which site it was inserted for."""
    for_layer(node, layer)
    node.meta[SITE] = site
