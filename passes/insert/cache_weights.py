"""Lets a graph take its weights quantized, as more inputs next to the parameters themselves.

    linear = fxquant.linear(x, w, b, "input=mxfp8_e4m3 weight=mxfp8_e4m3 ...")
    # becomes, in a copy of the graph with more inputs
    linear = fxquant.linear_stateful(x, w, b, None, None, None, None, None, "input=...", [w_data, w_scale], [...])

Bodies of activation checkpoints get them as operands. Scales that tensor cores read lie in the order in which these
read them (`fxquant.kernels.cast.swizzle`). A weight is left alone if delayed scaling or stochastic rounding
quantize it differently in every step, if more than views lie between the parameter and the product, or if the graph
itself writes into the parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef

from fxquant.compat.device import capability
from fxquant.compat.inside.placements import held_part, is_spread, local_part, placements_text
from fxquant.compat.private import (
    copy_sources,
    is_traceable_wrapper_subclass,
    mark_static,
    name_source,
    tag_activation_checkpoint,
)
from fxquant.compat.values import on_fakes, version
from fxquant.formats import LinearSpec, OperandSpec, QuantSpec
from fxquant.kernels.cast.ops import quantize_operand
from fxquant.kernels.grouped import choice as grouped_gemms
from fxquant.kernels.grouped.ops import quantize_groups
from fxquant.kernels.linear import choice as linear_gemms
from fxquant.kernels.operator import operator_of
from fxquant.passes.graph.meta import EXAMPLE_VALUE
from fxquant.passes.graph.names import SAME_VALUES, calls, fxquant_op
from fxquant.passes.graph.values import value_of

Step = tuple[str, Any, tuple[Any, ...], tuple[tuple[str, Any], ...]]
"""A view on the way from a parameter to a product: the node's op and target, and its other arguments."""


@dataclass(frozen=True)
class Weight:
    """A parameter as products of one recipe read it; `spec` is that of the weight alone."""

    steps: tuple[Step, ...]
    dtype: torch.dtype
    spec: str
    grouped: bool

    def quantize(self, parameter: Tensor, directions: tuple[str, ...]) -> list[list[Tensor]]:
        """Returns the parts of each direction, as `fxquant.kernels.cast.ops.quantize_operand` gives them."""
        value: Any = parameter
        for op, target, args, kwargs in self.steps:
            call = getattr(value, target) if op == "call_method" else target
            value = call(*args, **dict(kwargs)) if op == "call_method" else call(value, *args, **dict(kwargs))
        value = value.to(self.dtype)
        spec = OperandSpec.parse(self.spec)
        if not self.grouped:
            return [quantize_operand(value, spec, direction)[0] for direction in directions]
        value = value.flatten(0, -3) if value.ndim > 3 else value
        return [quantize_groups(value, None, spec, direction)[0] for direction in directions]


@dataclass(frozen=True)
class Taken:
    """One direction of a weight that a graph takes: its place among the inputs, and the first layer that reads it."""

    place: int
    weight: Weight
    direction: str
    layer: str = ""


def cache_weights(gm: fx.GraphModule) -> tuple[fx.GraphModule, list[Taken], list[Tensor]]:
    """Returns a copy of `gm` that takes quantized weights behind its own inputs, what they are, and their examples."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(gm.graph, copies))
    copy = fx.GraphModule(gm, graph)
    copy.meta = dict(gm.meta)
    copy_sources(gm, copy, copies)
    inputs = _Inputs(graph, _written(gm))
    inputs.bind(copy, {})
    copy.recompile()
    return copy, inputs.taken, [value_of(node) for nodes in inputs.nodes.values() for node in nodes]


class _Inputs:
    """The inputs that a graph gets, in the order in which they are asked for; parameters in `written` have none."""

    def __init__(self, graph: fx.Graph, written: set[StorageWeakRef]) -> None:
        self.graph = graph
        self.written = written
        self.before = graph.find_nodes(op="placeholder")
        self.last = self.before[-1] if self.before else None
        self.taken: list[Taken] = []
        self.nodes: dict[tuple[int, Weight, str], list[fx.Node]] = {}

    def bind(self, gm: fx.GraphModule, outer: Mapping[fx.Node, fx.Node]) -> None:
        """Gives every product of a graph its quantized weight. `outer` maps a body's inputs to nodes outside."""
        for node in list(gm.graph.nodes):
            if node.target is tag_activation_checkpoint:
                self._bind_body(gm, node, outer)
                continue
            called = operator_of(node.target)
            stored = called and (called.traits.stateful or called)
            if stored is None or not stored.traits.stored_weights:
                continue
            source = self._weight_of(node, outer)
            if source is None:
                continue
            place, weight, directions = source
            of_node = LinearSpec.parse(_spec_of(node))
            spec, layer = str(replace(of_node, weight=OperandSpec.parse(weight.spec))), of_node.name
            parts = {direction: self._take(Taken(place, weight, direction, layer)) for direction in directions}
            operands = node.args[:-1]
            state = [] if called is stored else [None] * 5
            node.target = stored.target
            node.args = (*operands, *state, spec, parts.get("rowwise"), parts.get("columnwise"))

    def _bind_body(self, gm: fx.GraphModule, call: fx.Node, outer: Mapping[fx.Node, fx.Node]) -> None:
        body = getattr(gm, str(call.args[0].target))  # type: ignore[union-attr]
        placeholders = body.graph.find_nodes(op="placeholder")
        passed = dict(zip(placeholders, call.args[1:], strict=True))
        self.bind(body, {inner: outer.get(node, node) for inner, node in passed.items()})
        # inputs of the whole graph that the body reads become inputs of the body
        foreign = dict.fromkeys(
            n for node in body.graph.nodes for n in node.all_input_nodes if n.graph is not body.graph
        )
        last = placeholders[-1]
        for node in foreign:
            with body.graph.inserting_after(last):
                last = body.graph.placeholder(node.name)
            last.meta = dict(node.meta)
            node.replace_all_uses_with(last, delete_user_cb=lambda user: user.graph is body.graph)
        call.args = (*call.args, *foreign)
        body.recompile()

    def _weight_of(self, node: fx.Node, outer: Mapping[fx.Node, fx.Node]) -> tuple[int, Weight, list[str]] | None:
        """Returns the place of the parameter, how it is read, and the directions that stay from step to step."""
        spec = LinearSpec.parse(_spec_of(node))
        input, source = node.args[:2]
        assert isinstance(input, fx.Node) and isinstance(source, fx.Node)
        dtype = getattr(torch, spec.autocast) if spec.autocast else None
        dtype = dtype or torch.promote_types(value_of(input).dtype, value_of(source).dtype)
        steps: list[Step] = []
        while source.op != "placeholder" or source in outer:
            if source.op == "placeholder":
                source = outer[source]
                continue
            viewed, *others = source.args or (None,)
            alone = source.all_input_nodes == [viewed] and viewed not in (*others, *source.kwargs.values())
            if not calls(source, SAME_VALUES) or not isinstance(viewed, fx.Node) or not alone:
                return None
            steps.insert(0, (source.op, source.target, _frozen(others), tuple(source.kwargs.items())))
            source = viewed
        value = source.meta.get(EXAMPLE_VALUE)
        if source not in self.before or not isinstance(value, torch.nn.Parameter):
            return None
        if is_spread(value) and steps and steps[0][1] is local_part and steps[0][2][0] == placements_text(value):
            value, steps = held_part(value), steps[1:]  # the part that this rank holds, as it is
        if is_traceable_wrapper_subclass(value):
            return None
        if _memory(value) in self.written:
            return None
        sides = {"rowwise": spec.weight.rowwise, "columnwise": spec.weight.columnwise}
        needed = ["rowwise"] + ["columnwise"] * (torch.is_grad_enabled() and value_of(input).requires_grad)
        lasting = [side for side in needed if _lasts(sides[side])]
        if not lasting or (spec.weight.from_rowwise and not _lasts(sides["rowwise"])):
            return None
        grouped = fxquant_op(node).startswith("grouped")
        weight = Weight(tuple(steps), dtype, str(_in_tiles(node, spec, grouped=grouped)), grouped)
        return (self.before.index(source), weight, lasting) if _is_hashable(weight) else None

    def _take(self, taken: Taken) -> list[fx.Node]:
        key = (taken.place, taken.weight, taken.direction)
        if key not in self.nodes:
            value = held_part(value_of(self.before[taken.place]))
            with torch.no_grad(), on_fakes(value):
                (fakes,) = taken.weight.quantize(value, (taken.direction,))
            nodes = []
            for i, fake in enumerate(fakes):
                with self.graph.inserting_after(self.last):
                    name = f"fxquant_weight_{len(self.taken)}_{i}"
                    self.last = self.graph.placeholder(name)
                name_source(self.last, name)
                if not torch.is_grad_enabled():  # weights rarely change: a CUDA graph reads them where they are
                    mark_static(self.last)
                self.last.meta[EXAMPLE_VALUE] = fake
                nodes.append(self.last)
            self.nodes[key] = nodes
            self.taken.append(taken)
        return self.nodes[key]


def _in_tiles(node: fx.Node, spec: LinearSpec, *, grouped: bool) -> OperandSpec:
    """The spec of a weight whose scales lie in the order of tensor cores, where a product's GEMMs read them in it."""
    value, weight = value_of(node.args[1]), spec.weight
    card = capability(value.device)
    ragged = grouped and node.args[2] is not None

    def laid_out(a: QuantSpec, b: QuantSpec, direction: str) -> QuantSpec:
        n, k = value.shape[-2:] if direction == "rowwise" else value.shape[:-3:-1]
        by_matrix = value.ndim == 2 and not grouped and linear_gemms.reads_tiles(a, b, n, k, card)
        reads = by_matrix or (ragged and grouped_gemms.reads_tiles(a, b, card))
        return replace(b, swizzled=True) if _lasts(b) and reads else b

    row = laid_out(spec.input.rowwise, weight.rowwise, "rowwise")
    column = laid_out(spec.grad_output.rowwise, weight.columnwise, "columnwise")
    return OperandSpec(row, column, weight.from_rowwise)


def _spec_of(node: fx.Node) -> str:
    """The spec of a product, the last text among its arguments."""
    return next(arg for arg in reversed(node.args) if isinstance(arg, str))


def _written(gm: fx.GraphModule) -> set[StorageWeakRef]:
    """Returns the memory that a captured graph or a body in it writes into: capturing has counted the writes."""
    graphs = [module.graph for module in gm.modules() if isinstance(module, fx.GraphModule)]
    values = [node.meta.get(EXAMPLE_VALUE) for graph in graphs for node in graph.nodes]
    changed = [x for x in values if isinstance(x, Tensor) and not x.is_inference() and version(x) > 0]
    return {_memory(x) for x in changed if x.layout == torch.strided}


def _memory(x: Tensor) -> StorageWeakRef:
    return StorageWeakRef(x.untyped_storage())  # type: ignore[no-untyped-call]


def _lasts(spec: QuantSpec) -> bool:
    """Returns True if a weight keeps its quantized form as long as it keeps its values, and asks no other rank."""
    return not (spec.is_identity or spec.is_delayed or spec.stochastic or spec.over)


def _is_hashable(value: Any) -> bool:
    """Returns True if a value can be a key: a slice cannot before Python 3.12."""
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value
