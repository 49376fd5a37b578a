"""Gives a graph with delayed scaling or stochastic rounding the tensors of its state.

    linear = fxquant.linear(x, w, b, "input=per_tensor_e4m3(slot=0) ...")
    # becomes, in a copy of the graph with more inputs
    new_scale, new_history = ...        # first of all: the operations of `fxquant.state.update`
    scale.copy_(new_scale); history.copy_(new_history); ...
    linear = fxquant.linear_stateful(x, w, b, new_scale, forward_amax, backward_amax, latest_step, random, "input=...")

Copies of the bodies of activation checkpoints get the same tensors as operands. A graph that is no step of training
reads scales and random numbers, and writes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.compat.private import (
    copy_sources,
    mark_static,
    name_source,
    share_memory_budget,
    tag_activation_checkpoint,
)
from fxquant.compat.values import on_fakes
from fxquant.formats import AttentionSpec, LinearSpec
from fxquant.kernels.operator import traits_of
from fxquant.passes.graph.meta import EXAMPLE_VALUE
from fxquant.passes.graph.names import fxquant_op, is_fxquant
from fxquant.quantizers import DelayedScalingRequest
from fxquant.state import Slots, State, update

_STATE = ("scale", "forward_amax", "backward_amax", "step", "random")
"""The arguments that stateful operators take in front of their specs, in order."""

Inputs = dict[str, fx.Node]
"""The nodes that stand for the state in one graph, by name and in the order of `_STATE`; none for an absent one."""


def stateful_graphs(gm: fx.GraphModule) -> set[fx.Graph]:
    """Returns the graphs that state can reach: this one and the bodies of its checkpoints."""
    return {gm.graph}.union(*(stateful_graphs(body) for body, _ in checkpoints(gm)))


def checkpoints(gm: fx.GraphModule) -> list[tuple[fx.GraphModule, fx.Node]]:
    """Returns the bodies of activation checkpoints, and the nodes that call them."""
    calls = [n for n in gm.graph.nodes if n.target is tag_activation_checkpoint]
    return [(getattr(gm, str(n.args[0].target)), n) for n in calls]


def copy_bodies(gm: fx.GraphModule) -> None:
    """Gives a graph bodies of checkpoints of its own, for the graph that it is a copy of may be bound again."""
    for body, call in checkpoints(gm):
        graph = fx.Graph()
        graph.output(graph.graph_copy(body.graph, {}))
        copy = fx.GraphModule(body, graph)
        copy.meta = dict(body.meta)
        setattr(gm, str(call.args[0].target), copy)  # type: ignore[union-attr]
        copy_bodies(copy)


def _uses_state(node: fx.Node) -> bool:
    if is_fxquant(node, "attention"):
        return AttentionSpec.parse(str(node.args[-1])).uses_state
    if fxquant_op(node) not in ("linear", "grouped_linear"):
        return False
    spec = LinearSpec.parse(str(node.args[3]))
    return any(
        op.rowwise.is_delayed or op.columnwise.is_delayed or op.is_stochastic
        for op in (spec.input, spec.weight, spec.grad_output)
    )


def bind_state(
    gm: fx.GraphModule, slots: Slots, states: Sequence[State], *, training: bool, group: str | None
) -> tuple[fx.GraphModule, list[Tensor]]:
    """Returns a copy of `gm` that takes the tensors of its states behind its own inputs, and these tensors."""
    tensors = {name: tensor for state in states for name, tensor in state.tensors().items()}
    if slots.request is not None:
        tensors["fp8_max"] = slots.fp8_max(tensors["scale"].device)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    inputs: dict[str, fx.Node] = {}
    for node in gm.graph.nodes:
        if node.op != "placeholder" and not inputs:
            inputs = {name: _input(graph, name) for name in tensors}
            bound = Inputs()
            if slots.request is not None:
                bound = _update(graph, inputs, slots.request, training, group)
            if slots.rounded:
                bound["random"] = _next_step(graph, inputs["random"], training)
        copies[node] = graph.node_copy(node, copies.__getitem__)
    bound_gm = fx.GraphModule(gm, graph)
    bound_gm.meta = dict(gm.meta)
    copy_sources(gm, bound_gm, copies)
    copy_bodies(bound_gm)
    _bind(bound_gm, bound)
    added = [node for node in graph.nodes if node not in set(copies.values())]
    _add_values(added, dict(zip(inputs.values(), tensors.values(), strict=True)), gm)
    bound_gm.recompile()
    return bound_gm, list(tensors.values())


def _add_values(added: Sequence[fx.Node], tensors: Mapping[fx.Node, Tensor], gm: fx.GraphModule) -> None:
    """Gives the added nodes example values: torch caches no graph in which a method has none."""
    with on_fakes([node.meta.get(EXAMPLE_VALUE) for node in gm.graph.nodes]):
        for node in added:
            if node.op == "placeholder":
                like = tensors[node]
                value: Any = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
            else:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta[EXAMPLE_VALUE])
                call: Any = getattr(torch.Tensor, node.target) if isinstance(node.target, str) else node.target
                value = call(*args, **kwargs)
            node.meta[EXAMPLE_VALUE] = value
    share_memory_budget(gm, added)


def _input(graph: fx.Graph, name: str) -> fx.Node:
    node = graph.placeholder(f"fxquant_{name}")
    name_source(node, f"fxquant_{name}")
    mark_static(node)
    return node


def _update(
    graph: fx.Graph, inputs: Inputs, request: DelayedScalingRequest, training: bool, group: str | None
) -> Inputs:
    """Adds the update of delayed scaling, which training writes back. Returns the state that operators take.

    Only training reduces over the ranks of `group`, since others may not run this forward: else the scales are those of
    the latest step, which all ranks have in common.
    """
    if group is not None and not training:
        return {"scale": inputs["scale"]}
    tracer = fx.proxy.GraphAppendingTracer(graph)
    on_proxies: Any = update
    new_scale, new_history = on_proxies({name: fx.Proxy(node, tracer) for name, node in inputs.items()}, request, group)
    scale = new_scale.node
    if not training:
        return {"scale": scale}
    step = graph.call_function(torch.add, (inputs["step"], 1))
    for name, value in (
        ("scale", scale),
        ("history", new_history.node),
        ("forward_amax", graph.call_function(torch.zeros_like, (inputs["forward_amax"],))),
        ("step", step),
    ):
        graph.call_function(torch.ops.aten.copy_.default, (inputs[name], value))
    amaxes = {name: inputs[name] for name in ("forward_amax", "backward_amax")}
    return {"scale": scale, **amaxes, "step": inputs["latest_step"]}


def _next_step(graph: fx.Graph, random: fx.Node, training: bool) -> fx.Node:
    """Returns the seed and step of this run of the graph, which training writes back."""
    if not training:
        return random
    seed, step = (graph.call_function(torch.narrow, (random, 0, i, 1)) for i in range(2))
    following = graph.call_function(torch.cat, ((seed, graph.call_function(torch.add, (step, 1))),))
    graph.call_function(torch.ops.aten.copy_.default, (random, following))
    return following


def _bind(gm: fx.GraphModule, state: Inputs) -> None:
    """Gives the state to every operator that uses it in a graph and in the bodies of its checkpoints."""
    for node in list(gm.graph.nodes):
        if _uses_state(node):
            *operands, spec = node.args
            stateful = traits_of(node).stateful
            assert stateful is not None
            node.target = stateful.target
            node.args = (*operands, *map(state.get, _STATE), spec)
    for body, call in checkpoints(gm):
        if any(_uses_state(node) for graph in stateful_graphs(body) for node in graph.nodes):
            last, inner = body.graph.find_nodes(op="placeholder")[-1], Inputs()
            for name in state:
                with body.graph.inserting_after(last):
                    last = inner[name] = body.graph.placeholder(f"fxquant_{name}")
            _bind(body, inner)
            body.recompile()
            call.args = (*call.args, *state.values())
