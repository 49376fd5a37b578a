"""Annotate: gives an exported program's graphs the example values that the analysis of a captured graph reads.

An exported graph keeps fake tensors under ``val``, and whether a tensor is a parameter or gets a gradient only in the
program's signature. Here every node gets an ``example_value`` besides, which says both; `strip` takes them away again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial

import torch
from torch import Tensor, fx

from fxquant.compat.private import OpOverload, tree_map_only
from fxquant.compat.values import fake_mode_of, on_fakes
from fxquant.passes.find.weights import find_weight
from fxquant.passes.graph.bodies import Bodies
from fxquant.passes.graph.meta import EXAMPLE_VALUE, HELD, LAYER, MODULE_STACK, PROJECTION, VAL
from fxquant.passes.graph.names import higher_order_op, op_name


def annotate(bodies: Bodies, parameters: Mapping[str, str], held: Collection[str], *, trained: bool) -> None:
    """Annotates every graph.

    `parameters` are the names of parameters by those of their placeholders, `held` the placeholders of other tensors
    that no call changes. With `trained`, gradients flow from those
    that want one. A node keeps the layer of the parameter that it reads, for where it was captured without its modules,
    as inside a conditional.
    """
    grads: set[fx.Node] = set()
    for gm in bodies.modules:
        for node in gm.graph.nodes:
            if VAL not in node.meta:
                continue
            is_input = gm is bodies.top and node.op == "placeholder"
            if trained and _gets_grad(node, is_input, bodies, grads):
                grads.add(node)
            is_parameter = is_input and node.name in parameters
            if is_input and node.name in held:
                node.meta[HELD] = True
            node.meta[EXAMPLE_VALUE] = tree_map_only(
                Tensor, partial(_annotated, is_parameter=is_parameter, grad=node in grads), node.meta[VAL]
            )
    for gm in bodies.modules:
        outer = _outer(gm.graph, bodies)
        for node in gm.graph.nodes:
            if node.op == "call_function":
                _name(node, outer, parameters)


def _outer(graph: fx.Graph, bodies: Bodies) -> dict[fx.Node, fx.Node]:
    """Returns the nodes that callers pass for the placeholders of a graph, and for those of the callers."""
    outer: dict[fx.Node, fx.Node] = {}
    nodes = graph.find_nodes(op="placeholder")
    while nodes:
        inner = [node for node in nodes if node.op == "placeholder" and node not in outer]
        outer |= {node: passed[0] for node in inner if (passed := bodies.passed(node))}
        nodes = [outer[node] for node in inner if node in outer]
    return outer


def _name(node: fx.Node, outer: Mapping[fx.Node, fx.Node], parameters: Mapping[str, str]) -> None:
    weights = [find_weight(source, outer) for source in reversed(node.all_input_nodes) if source.op != "get_attr"]
    read = [parameters[w.parameter.name] for w in weights if w is not None and w.parameter.name in parameters]
    if not read:
        return
    node.meta[LAYER] = read[0].rpartition(".")[0]
    path, module = next(reversed((node.meta.get(MODULE_STACK) or {}).values()), ("", None))
    weight = next((name for name in read if name.endswith("weight")), "")
    if weight and str(module).endswith("MultiheadAttention"):  # its forward reads the weights of its projections itself
        node.meta[LAYER] = path
        node.meta[PROJECTION] = weight.removeprefix(f"{path}.").replace(".", "_").removesuffix("_weight")


def _gets_grad(node: fx.Node, is_input: bool, bodies: Bodies, grads: set[fx.Node]) -> bool:
    value = node.meta[VAL]
    if isinstance(value, Tensor) and not value.is_floating_point():
        return False
    if is_input:
        return isinstance(value, Tensor) and value.requires_grad
    if node.op == "placeholder":
        calls = bodies.callers.get(node.graph, [])
        return not any(_stops_grad(call.node) for call in calls) and not grads.isdisjoint(bodies.passed(node))
    if _stops_grad(node):
        return False
    if isinstance(node.target, OpOverload) and op_name(node) == "detach":
        return False
    return not grads.isdisjoint(node.all_input_nodes)


def _stops_grad(node: fx.Node) -> bool:
    return higher_order_op(node) == "wrap_with_set_grad_enabled" and node.args[0] is False


def _annotated(value: Tensor, is_parameter: bool, grad: bool) -> Tensor:
    if fake_mode_of(value) is None:
        return value
    with on_fakes(value):
        copy = value.detach()
        wants = grad and (copy.is_floating_point() or copy.is_complex())
        return torch.nn.Parameter(copy, requires_grad=wants) if is_parameter else copy.requires_grad_(wants)


def strip(bodies: Bodies) -> None:
    """Keeps what later passes and `torch.export` read of an example value, as ``val``, and removes the rest."""
    for gm in bodies.modules:
        for node in gm.graph.nodes:
            node.meta.pop(HELD, None)
            node.meta.pop(LAYER, None)
            node.meta.pop(PROJECTION, None)
            if EXAMPLE_VALUE not in node.meta:
                continue
            value = node.meta.pop(EXAMPLE_VALUE)
            if VAL not in node.meta:
                with on_fakes(value):
                    node.meta[VAL] = tree_map_only(Tensor, Tensor.detach, value)
