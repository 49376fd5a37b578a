"""Gives the products of a bound graph the tensors to which they add what a probe measures of their operands.

    linear = fxquant.linear(x, w, b, "input=mxfp8_e4m3 ...")
    # becomes, in a copy of the graph with two more inputs for each product
    linear = fxquant.linear_stateful(x, w, b, None, .., "input=...", None, None, forward, backward, plan)

Copies of the bodies of activation checkpoints get them as operands. The graph that runs where nothing is measured is
another one, which no probe has touched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import fx

from fxquant.compat.private import copy_sources, mark_static, name_source, share_memory_budget
from fxquant.compat.values import on_fakes
from fxquant.formats import AttentionSpec, LinearSpec
from fxquant.kernels.operator import traits_of
from fxquant.passes.graph.meta import EXAMPLE_VALUE, MODULE_TYPE
from fxquant.passes.graph.names import fxquant_op
from fxquant.passes.insert.bind_state import checkpoints, copy_bodies
from fxquant.probes import IN_REGION, WIDTH, Observed, Request, Unmeasured

_STATE = 5
"""The arguments of a stateful operator between its operands and its spec."""

_OPERANDS = 3

_PRODUCTS = tuple(f"{name}{end}" for name in ("linear", "grouped_linear", "attention") for end in ("", "_stateful"))


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    """Returns a copy of a captured graph, and of its checkpoints' bodies, that can be compiled by itself."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(gm.graph, copies))
    copy = fx.GraphModule(gm, graph)
    copy.meta = dict(gm.meta)
    copy_sources(gm, copy, copies)
    copy_bodies(copy)
    return copy


def add_observers(
    gm: fx.GraphModule, request: Request, shared: bool
) -> tuple[fx.GraphModule, list[Observed], list[Unmeasured]]:
    """Returns a copy of `gm` that takes two tensors for each product that is measured, what these are, and what is not.

    A graph that other modules run too is measured as a whole, whatever the layers of these are called.
    """
    gm = copied(gm)
    places = _Places(gm, request, shared)
    places.bind(gm, {})
    gm.recompile()
    return gm, places.observed, places.unmeasured


class _Places:
    """The products of a graph that are measured, and the inputs that it gets for them."""

    def __init__(self, gm: fx.GraphModule, request: Request, shared: bool) -> None:
        self.top, self.request, self.shared = gm, request, shared
        self.last = gm.graph.find_nodes(op="placeholder")[-1:]
        self.values = [node.meta.get(EXAMPLE_VALUE) for node in gm.graph.nodes]
        self.numbers: Counter[str] = Counter()
        self.observed: list[Observed] = []
        self.unmeasured: list[Unmeasured] = []

    def bind(self, gm: fx.GraphModule, outer: dict[fx.Node, fx.Node]) -> list[tuple[fx.Node, fx.Node]]:
        """Has the products of a graph measured; returns, of a body, its new inputs beside those of the whole graph."""
        inputs: list[tuple[fx.Node, fx.Node]] = []
        bodies = {call: body for body, call in checkpoints(gm)}
        self._close(gm, bodies.values())
        for node in list(gm.graph.nodes):
            if node in bodies:
                for whole, inner in self.bind(bodies[node], outer):
                    self._pass(gm, node, whole, inner, inputs)
                bodies[node].recompile()
            elif fxquant_op(node) in _PRODUCTS:
                inputs += self._measure(gm, node)
        return inputs

    def _measure(self, gm: fx.GraphModule, node: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
        attention = str(fxquant_op(node)).startswith("attention")
        stateful = fxquant_op(node).endswith("_stateful")
        count = _OPERANDS + attention  # the tensors that the steps of an attention take are an argument
        operands, rest = node.args[:count], node.args[count:]
        state, (text, *stored) = (rest[:_STATE], rest[_STATE:]) if stateful else ((None,) * _STATE, rest)
        spec = AttentionSpec.parse(str(text)) if attention else LinearSpec.parse(str(text))
        number = self.numbers[spec.name]
        self.numbers[spec.name] += 1
        if not self.shared and not self.request.wants(spec.name):
            return []
        plan, unmeasured = self.request.plan("dpa" if attention else node.meta[MODULE_TYPE], spec.name)
        if not plan.tensors:
            return []
        self.unmeasured += unmeasured
        halves = {"forward": plan.forward(), "backward": plan.backward()}
        whole = [self._input(half, len(slots)) for half, slots in halves.items()]
        inner = [node if gm is self.top else _inner(gm, node) for node in whole]
        if not stateful:
            target = traits_of(node).stateful
            assert target is not None
            node.target = target.target
        stored = [] if attention else [*stored, None, None][:2]
        node.args = (*operands, *state, text, *stored, *inner, str(plan))
        self.observed.append(Observed(spec.name, number, spec, str(plan)))
        return [] if gm is self.top else list(zip(whole, inner, strict=True))

    def _close(self, gm: fx.GraphModule, entered: Iterable[fx.GraphModule]) -> None:
        """Notes the products of regions and branches, which are graphs of their own that get no inputs."""
        closed = [body for body in gm.children() if isinstance(body, fx.GraphModule) and body not in {*entered}]
        graphs = [graph for body in closed for graph in body.modules() if isinstance(graph, fx.GraphModule)]
        for node in (node for graph in graphs for node in graph.graph.nodes if fxquant_op(node) in _PRODUCTS):
            attention = str(fxquant_op(node)).startswith("attention")
            text = next(arg for arg in node.args if isinstance(arg, str))
            name = (AttentionSpec if attention else LinearSpec).parse(text).name
            module_type = "dpa" if attention else node.meta[MODULE_TYPE]
            self.unmeasured += self.request.closed(module_type, name, IN_REGION)

    def _input(self, half: str, slots: int) -> fx.Node:
        """Adds an input of the whole graph for so many vectors of a forward or backward."""
        name = f"fxquant_probe_{len(self.observed)}_{half}"
        with self.top.graph.inserting_after(self.last[-1]) if self.last else self.top.graph.inserting_before():
            node = self.top.graph.placeholder(name)
        self.last = [node]
        name_source(node, node.name)
        mark_static(node)
        with on_fakes(self.values):
            node.meta[EXAMPLE_VALUE] = torch.empty(slots, WIDTH, dtype=torch.float64, device=self.device())
        share_memory_budget(self.top, [node])
        return node

    def device(self) -> torch.device:
        """The device of the graph."""
        devices = [value.device for value in self.values if isinstance(value, torch.Tensor)]
        return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))

    def _pass(
        self, gm: fx.GraphModule, call: fx.Node, whole: fx.Node, inner: fx.Node, inputs: list[tuple[fx.Node, fx.Node]]
    ) -> None:
        """Passes an input of the whole graph to a body that is called in `gm`, which may itself be one."""
        if gm is self.top:
            call.args = (*call.args, whole)
            return
        passed = _inner(gm, whole)
        call.args = (*call.args, passed)
        inputs.append((whole, passed))


def _inner(gm: fx.GraphModule, like: fx.Node) -> fx.Node:
    """Adds an input to a body, that stands for one of the whole graph."""
    with gm.graph.inserting_after(gm.graph.find_nodes(op="placeholder")[-1]):
        node = gm.graph.placeholder(like.name)
    node.meta = dict(like.meta)
    return node
