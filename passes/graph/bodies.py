"""The graphs that higher-order operators call, and tensors of the outermost graph passed into them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from fxquant.compat.private import HigherOrderOperator, tree_leaves
from fxquant.passes.graph.meta import EXAMPLE_VALUE, VAL
from fxquant.passes.graph.names import higher_order_op
from fxquant.passes.graph.values import value_of

_LAST_TUPLE = frozenset(("cond", "while_loop", "scan", "map_impl"))
"""Ops whose last argument is a tuple of what their bodies read besides what they iterate over."""

_FLAT = frozenset(("wrap_with_set_grad_enabled", "wrap_with_autocast", "tag_activation_checkpoint", "wrap"))
"""Ops that end in the operands of their one body."""


@dataclass(frozen=True)
class Call:
    """One call of a higher-order op."""

    node: fx.Node
    bodies: tuple[fx.GraphModule, ...]

    @property
    def operands(self) -> list[Any]:
        """The arguments without the bodies; the last of them go to a body's placeholders."""
        graphs = {node for node in self.node.all_input_nodes if isinstance(_value(node), fx.GraphModule)}
        return [leaf for leaf in tree_leaves(self.node.args) if not (isinstance(leaf, fx.Node) and leaf in graphs)]

    @property
    def takes_more(self) -> bool:
        """Returns True if `append` knows where this operator's operands end."""
        name = higher_order_op(self.node)
        return name in _FLAT or (name in _LAST_TUPLE and isinstance(self.node.args[-1], (tuple, list)))

    def append(self, operand: fx.Node) -> None:
        """Passes one more tensor to every body. The placeholders for it are the caller's to add."""
        args = self.node.args
        if higher_order_op(self.node) in _FLAT:
            self.node.args = (*args, operand)
        else:
            last = args[-1]
            assert isinstance(last, (tuple, list))
            self.node.args = (*args[:-1], (*last, operand))

    def _own(self) -> int:
        """Returns how many operands, counted from the end, can be removed."""
        if higher_order_op(self.node) in _LAST_TUPLE:
            last = self.node.args[-1]
            return len(last) if isinstance(last, (tuple, list)) else 0
        return len(self.operands) if higher_order_op(self.node) in _FLAT else 0

    def drop_unused(self) -> int:
        """Removes the operands that no body reads; returns their number."""
        if not self.takes_more:
            return 0
        count = 0
        inputs = [body.graph.find_nodes(op="placeholder") for body in self.bodies]
        for place in range(1, 1 + min(self._own(), *map(len, inputs))):
            columns = [placeholders[-place] for placeholders in inputs]
            if any(column.users for column in columns) or not isinstance(self.operands[-place + count], fx.Node):
                continue
            self._remove(place - count)
            for column in columns:
                column.graph.erase_node(column)
            count += 1
        return count

    def _remove(self, place: int) -> None:
        args = self.node.args
        if higher_order_op(self.node) in _FLAT:
            self.node.args = (*args[: len(args) - place], *args[len(args) - place + 1 :])
        else:
            last: Any = args[-1]
            self.node.args = (*args[:-1], (*last[: len(last) - place], *last[len(last) - place + 1 :]))


class Bodies:
    """Every graph of a program with the calls that lead to it."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.top = gm
        self.modules: list[fx.GraphModule] = []
        self.callers: dict[fx.Graph, list[Call]] = {}
        self._reached: dict[tuple[fx.Graph, fx.Node], fx.Node] = {}
        self._walk(gm)

    def _walk(self, gm: fx.GraphModule) -> None:
        if gm in self.modules:
            return
        self.modules.append(gm)
        for node in gm.graph.nodes:
            if isinstance(node.target, HigherOrderOperator):
                values = map(_value, node.all_input_nodes)
                call = Call(node, tuple(value for value in values if isinstance(value, fx.GraphModule)))
                for body in call.bodies:
                    self.callers.setdefault(body.graph, []).append(call)
                    self._walk(body)

    def drop_unused(self) -> int:
        """Removes the operands that no body reads, of the innermost first; returns their number."""
        calls = list(dict.fromkeys(call for calls in self.callers.values() for call in calls))
        alone = [call for call in calls if all(len(self.callers[body.graph]) == 1 for body in call.bodies)]
        return sum(call.drop_unused() for call in reversed(alone))

    def passed(self, placeholder: fx.Node) -> list[fx.Node]:
        """Returns the nodes that callers pass for a body's placeholder; none if that cannot be told."""
        inputs = placeholder.graph.find_nodes(op="placeholder")
        place = len(inputs) - inputs.index(placeholder)
        passed: list[fx.Node] = []
        for call in self.callers.get(placeholder.graph, []):
            operands = call.operands
            operand = operands[-place] if place <= len(operands) else None
            if not isinstance(operand, fx.Node) or not _alike(value_of(operand), value_of(placeholder)):
                return []
            passed.append(operand)
        return passed

    def can_reach(self, graph: fx.Graph) -> bool:
        """Returns True if a tensor of the outermost graph can be passed into this one."""
        if graph is self.top.graph:
            return True
        calls = self.callers.get(graph, [])
        together = all(self.callers[body.graph] == calls for call in calls for body in call.bodies)
        return bool(calls) and together and all(call.takes_more and self.can_reach(call.node.graph) for call in calls)

    def reach(self, graph: fx.Graph, node: fx.Node) -> fx.Node:
        """Returns the node for `node`, a placeholder of the outermost graph, in a graph that it can reach."""
        if graph is self.top.graph:
            return node
        if (graph, node) not in self._reached:
            for call in self.callers[graph]:
                call.append(self.reach(call.node.graph, node))
                for body in call.bodies:
                    if (body.graph, node) not in self._reached:
                        self._reached[body.graph, node] = _placeholder(body.graph, node)
        return self._reached[graph, node]

    def recompile(self) -> None:
        """Regenerates the code of every graph."""
        for module in self.modules:
            module.recompile()


def _placeholder(graph: fx.Graph, node: fx.Node) -> fx.Node:
    inputs = graph.find_nodes(op="placeholder")
    with graph.inserting_after(inputs[-1]) if inputs else graph.inserting_before(next(iter(graph.nodes))):
        copy = graph.placeholder(node.name)
    copy.meta = dict(node.meta)
    return copy


def _value(node: fx.Node) -> Any:
    return value_of(node) if node.op == "get_attr" or VAL in node.meta or EXAMPLE_VALUE in node.meta else None


def _alike(a: Any, b: Any) -> bool:
    return (
        isinstance(a, Tensor)
        and isinstance(b, Tensor)
        and a.dtype == b.dtype
        and a.ndim == b.ndim
        and all(str(x) == str(y) for x, y in zip(a.shape, b.shape, strict=True))
    )
