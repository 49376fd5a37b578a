"""ProgramState: the parameters, buffers and constants of an exported program, as its passes read and change them."""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec, OutputKind, TensorArgument

from fxquant.compat.private import OpOverload
from fxquant.compat.values import FakeTensorMode, fake_mode_of, storage_key
from fxquant.passes.graph.bodies import Bodies
from fxquant.passes.graph.meta import VAL
from fxquant.passes.graph.names import SAME_VALUES, calls, is_fxquant, op_name, writes, written_arguments

Value = tuple[Tensor, frozenset[fx.Node]]
Values = dict[fx.Node, Value | None]
_STATE = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


class ProgramState:
    """The state of one program, with the placeholder of each tensor."""

    def __init__(
        self, bodies: Bodies, signature: ExportGraphSignature, state: Mapping[str, Any], constants: Mapping[str, Any]
    ) -> None:
        self.bodies = bodies
        self.inputs: list[InputSpec] = list(signature.input_specs)
        self.state, self.constants = dict(state), dict(constants)
        self.placeholders = {node.name: node for node in bodies.top.graph.find_nodes(op="placeholder")}
        self._specs = {spec.arg.name: spec for spec in self.inputs if spec.kind in _STATE}
        written = (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION)
        self._changing = {spec.target for spec in signature.output_specs if spec.kind in written}
        self.lifted: set[fx.Node] = set()
        """The placeholders of constants that were in the graphs."""
        self._rewritten: set[fx.Node] = set()
        for gm in bodies.modules:
            for node in gm.graph.nodes:
                for target in written_arguments(node):
                    self._rewritten |= set(_viewed(target))
                    self._changing |= {self._specs[root.name].target for root in self.roots(target)}

    def name(self, placeholder: fx.Node) -> str:
        """The name in the program's state of the tensor that a placeholder stands for."""
        return str(self._specs[placeholder.name].target)

    def roots(self, node: fx.Node) -> set[fx.Node]:
        """The state placeholders of the outermost graph whose memory a node may show."""
        if node.op == "placeholder":
            if node.graph is self.bodies.top.graph:
                return {node} if node.name in self._specs else set()
            return {root for passed in self.bodies.passed(node) for root in self.roots(passed)}
        if not calls(node, SAME_VALUES) or not isinstance(node.args[0], fx.Node):
            return set()
        return self.roots(node.args[0])

    def value(self, node: fx.Node) -> Value | None:
        """The tensor that a node always has, and the state it is made from; None if it depends on an input."""
        values: Values = {}
        todo = [node]
        while todo:
            last = todo[-1]
            sources = self._sources(last)
            if any(source in values and values[source] is None for source in sources):
                values[last] = None
            missing = next((source for source in sources if source not in values), None)
            if last not in values and missing is not None:
                todo.append(missing)
                continue
            if last not in values:
                values[last] = self._value(last, values)
            todo.pop()
        return values[node]

    def values(self, nodes: Iterable[fx.Node]) -> Values:
        """`value` of several nodes, none of which depends on an input; shared sources are computed once."""
        wanted = dict.fromkeys(nodes)
        needed: dict[fx.Node, None] = {}  # a node behind its sources
        todo = list(wanted)[::-1]
        while todo:
            missing = [source for source in self._sources(todo[-1]) if source not in needed]
            todo += missing
            if not missing:
                needed[todo.pop()] = None
        uses = Counter(source for node in needed for source in self._sources(node))
        values: Values = {}
        for node in needed:
            values[node] = self._value(node, values)
            for source in self._sources(node):
                uses[source] -= 1
                if not uses[source] and source not in wanted:
                    del values[source]
        return {node: values[node] for node in wanted}

    def constant_nodes(self) -> set[fx.Node]:
        """The nodes that depend on no input, though they may differ from call to call."""
        constants: set[fx.Node] = set()
        for gm in self.bodies.modules:
            for node in gm.graph.nodes:
                if self.roots(node) if node.op == "placeholder" else constants.issuperset(node.all_input_nodes):
                    constants.add(node)
        return constants

    def obstacles(self, node: fx.Node) -> list[str]:
        """The reasons why a constant node has no value."""
        reasons: dict[str, None] = {}
        seen, todo = set(), [node]
        while todo:
            node = todo.pop()
            if node not in seen:
                seen.add(node)
                if node.op == "placeholder":
                    written = node.name in self._specs and self._specs[node.name].target in self._changing
                    reason = f"the program writes to {self.name(node)}" if written else ""
                else:
                    reason = obstacle(node)
                reasons |= dict.fromkeys(filter(None, [reason]))
                todo += node.all_input_nodes
        return list(reasons)

    def _sources(self, node: fx.Node) -> list[fx.Node]:
        """The nodes that a value is computed from."""
        if node.op == "placeholder":
            return [] if node.graph is self.bodies.top.graph else self.bodies.passed(node)
        return [] if obstacle(node) or node in self._rewritten else node.all_input_nodes

    def _value(self, node: fx.Node, computed: Values) -> Value | None:
        """The value of a node whose sources have one."""
        if node.op == "placeholder":
            if node.graph is not self.bodies.top.graph:
                passed = [computed[source] for source in dict.fromkeys(self.bodies.passed(node))]
                return passed[0] if len(passed) == 1 else None
            spec = self._specs.get(node.name)
            if spec is None or spec.target in self._changing:
                return None
            tensor = self._tensor(node)
            if tensor is None or fake_mode_of(tensor) is not None:
                return None
            return tensor.detach(), frozenset() if node in self.lifted else frozenset((node,))
        if obstacle(node) or node in self._rewritten:
            return None
        values = {source: computed[source] for source in node.all_input_nodes}
        if any(value is None for value in values.values()):
            return None
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n][0])  # type: ignore[index]
        with torch.no_grad():
            result = node.target(*args, **kwargs)  # type: ignore[operator]
        parts = result if isinstance(result, (tuple, list)) else [result]
        if not all(isinstance(part, Tensor) for part in parts):
            return None
        return result, frozenset().union(*(value[1] for value in values.values() if value is not None))

    def lift_constants(self) -> None:
        """Turns tensors that the graphs hold themselves into buffers of the program."""
        for gm in self.bodies.modules:
            for node in gm.graph.find_nodes(op="get_attr"):
                tensor = getattr(gm, str(node.target), None)
                if isinstance(tensor, Tensor) and self.bodies.can_reach(gm.graph):
                    alike = (n for n in self.lifted if (t := self.tensor(n)).dtype == tensor.dtype and t.equal(tensor))
                    placeholder = next(alike, None) or self.add(str(node.target), tensor)
                    self.lifted.add(placeholder)
                    node.replace_all_uses_with(self.bodies.reach(gm.graph, placeholder))
                    gm.graph.erase_node(node)
                    delattr(gm, str(node.target))

    def add(self, name: str, tensor: Tensor) -> fx.Node:
        """Adds a buffer under `name`, or a name like it that is free; returns its placeholder."""
        free, count = name, 0
        while free in self.state or free in self.constants:
            count += 1
            free = f"{name}_{count}"
        graph = self.bodies.top.graph
        place = sum(spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.TOKEN) for spec in self.inputs)
        begin = next(node for node in graph.nodes if node.op != "placeholder")
        before = graph.find_nodes(op="placeholder")[place] if place < len(self.inputs) else begin
        with graph.inserting_before(before):
            node = graph.placeholder(f"b_{free.replace('.', '_')}")
        node.target = node.name  # the graph made it unlike those of other tensors; the argument is called by the target
        node.meta[VAL] = self._mode.from_tensor(tensor, static_shapes=True)
        spec = InputSpec(InputKind.BUFFER, TensorArgument(node.name), free, persistent=True)
        self.inputs.insert(place, spec)
        self._specs[node.name] = spec
        self.placeholders[node.name] = node
        self.state[free] = tensor
        return node

    @functools.cached_property
    def _mode(self) -> FakeTensorMode:
        mode = fake_mode_of([node.meta.get(VAL) for node in self.bodies.top.graph.nodes])
        assert mode is not None
        return mode

    def freeze(self) -> None:
        """Has no parameter ask for a gradient. Values stay shared with the program that they come from."""
        frozen: dict[int, torch.nn.Parameter] = {}
        for name, tensor in self.state.items():
            if isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad:
                plain = torch.nn.Parameter(tensor.detach(), requires_grad=False)
                self.state[name] = frozen.setdefault(id(tensor), plain)

    def drop_unused(self, replaced: set[fx.Node]) -> None:
        """Removes the `replaced` tensors that nothing reads any more, under all their names."""
        storages = {storage_key(tensor) for node in replaced if (tensor := self._tensor(node)) is not None}
        for node in list(self.placeholders.values()):
            tensor = self._tensor(node) if node.name in self._specs else None
            if node.users or tensor is None or storage_key(tensor) not in storages:
                continue
            spec = self._specs.pop(node.name)
            self.inputs.remove(spec)
            del self.placeholders[node.name]
            node.graph.erase_node(node)
            self.state.pop(str(spec.target), None)
            self.constants.pop(str(spec.target), None)

    def tensor(self, placeholder: fx.Node) -> Tensor:
        """The tensor that a placeholder stands for."""
        tensor = self._tensor(placeholder)
        assert tensor is not None, placeholder
        return tensor

    def _tensor(self, node: fx.Node) -> Tensor | None:
        name = str(self._specs[node.name].target)
        tensor = self.state.get(name, self.constants.get(name))
        return tensor if isinstance(tensor, Tensor) else None


def obstacle(node: fx.Node) -> str:
    """Returns why an operator cannot be computed beforehand, of its inputs alone; empty if it can."""
    target = node.target
    if target is operator.getitem:
        return ""
    if not isinstance(target, OpOverload) or is_fxquant(node):
        return f"{op_name(node) or node.target} cannot be computed beforehand"
    if writes(node):
        return f"{op_name(node)} writes in place"
    if torch.Tag.nondeterministic_seeded in target.tags:
        return f"{op_name(node)} draws random numbers"
    if not node.all_input_nodes and "empty" in op_name(node):
        return f"{op_name(node)} has no values"
    return ""


def _viewed(node: fx.Node) -> Iterator[fx.Node]:
    """Yields a node and the nodes that it may be a view of."""
    yield node
    while calls(node, SAME_VALUES) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
        yield node
