"""Gives every call of a region its own body, and calls whose bodies became equal one again.

    y = invoke_subgraph(subgraph_0, "subgraph_0", x, w0)      # the region `blocks.0`
    z = invoke_subgraph(subgraph_0, "subgraph_0", y, w1)      # the same code for `blocks.1`
    # becomes
    y = invoke_subgraph(subgraph_0, "subgraph_0", x, w0)
    z = invoke_subgraph(subgraph_0_1, "subgraph_0_1", y, w1)  # under the names of `blocks.1`

Dynamo captures `torch.compiler.nested_compile_region` once for all modules whose code is the same, but a recipe answers
for each of them, and each has its rows in the report. Where all got the same answers they share a body again, which is
then compiled once.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator

from torch import fx

from fxquant.passes.graph.meta import FORWARD_MODULE_STACK, LAYER, MODULE_STACK
from fxquant.passes.graph.names import higher_order_op


def split_regions(gm: fx.GraphModule, layer_of: Callable[[fx.Node], str]) -> int:
    """Copies the bodies that several calls share, in place; returns how many. `layer_of` names the layer of a node."""
    split = _Split(layer_of, {str(call.args[1]) for call, _ in _all_calls(gm)})
    split.calls_of(gm)
    return split.count


class _Split:
    def __init__(self, layer_of: Callable[[fx.Node], str], taken: set[str]) -> None:
        self.count = 0
        self._layer_of = layer_of
        self._taken = taken  # identifiers, by which torch keeps what it has made of a body
        self._first: dict[int, str] = {}  # the layer of the first call of each body

    def calls_of(self, gm: fx.GraphModule) -> None:
        for call, body in _calls(gm):
            layer = self._layer_of(call)
            if id(body) in self._first:
                copied = _copy(body)
                self._rename(copied, self._first[id(body)], layer)
                self._call(gm, call, copied)
                body = copied
            self._first[id(body)] = layer
            self.calls_of(body)

    def _rename(self, body: fx.GraphModule, before: str, after: str) -> None:
        """Gives the layers of a region, which were those of the module `before`, the names in another."""
        if before == after:
            return
        for node in body.graph.nodes:
            name = self._layer_of(node)
            if name == before or name.startswith(f"{before}.") or not before:
                inside = name.removeprefix(before).strip(".")
                node.meta = {key: value for key, value in node.meta.items() if key not in _STACKS}
                node.meta[LAYER] = ".".join(filter(None, (after, inside)))

    def _call(self, gm: fx.GraphModule, call: fx.Node, body: fx.GraphModule) -> None:
        """Has a call run another body, under a name of its own."""
        attribute, identifier = call.args[:2]
        assert isinstance(attribute, fx.Node)
        numbered = (f"{identifier}_{number}" for number in itertools.count(1))
        name = next(name for name in numbered if name not in self._taken and not hasattr(gm, name))
        self._taken.add(name)
        body.meta.setdefault(_ORIGIN, identifier)
        gm.add_submodule(name, body)
        with gm.graph.inserting_before(call):
            mine = gm.graph.get_attr(name)
        mine.meta = {key: body if isinstance(x, fx.GraphModule) else x for key, x in attribute.meta.items()}
        call.args = (mine, name, *call.args[2:])
        if not attribute.users:
            gm.graph.erase_node(attribute)
        self.count += 1


def share_regions(gm: fx.GraphModule) -> None:
    """Has calls of bodies that are copies of one, and still equal, share the first of them, in place."""
    first: dict[tuple[str, str], fx.Node] = {}
    for call, body in _calls(gm):
        share_regions(body)
        origin = str(body.meta.get(_ORIGIN, call.args[1]))
        earlier, attribute = first.setdefault((origin, _text(body)), call), call.args[0]
        if earlier.args[1] == call.args[1]:
            continue
        assert isinstance(attribute, fx.Node)
        call.args = (*earlier.args[:2], *call.args[2:])
        gm.graph.erase_node(attribute)
        gm.delete_submodule(str(attribute.target))
    gm.recompile()


_ORIGIN = "fxquant_region"
"""The key in a body's meta for the identifier of the one that it is a copy of."""


def _calls(gm: fx.GraphModule) -> Iterator[tuple[fx.Node, fx.GraphModule]]:
    for node in list(gm.graph.nodes):
        if higher_order_op(node) == "invoke_subgraph" and isinstance(node.args[0], fx.Node):
            body = getattr(gm, str(node.args[0].target), None)
            if isinstance(body, fx.GraphModule):
                yield node, body


def _all_calls(gm: fx.GraphModule) -> Iterator[tuple[fx.Node, fx.GraphModule]]:
    """Yields the calls in a graph and in the bodies of all its operators."""
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            yield from _calls(module)


def _copy(body: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.graph_copy(body.graph, {}))
    copied = fx.GraphModule(body, graph)
    copied.meta = dict(body.meta)
    return copied


_STACKS = (MODULE_STACK, FORWARD_MODULE_STACK)


def _text(body: fx.GraphModule) -> str:
    """The code of a body and of those inside it, without the names of layers, which end an operator's settings."""
    return "\n".join([_NAME.sub("", body.code), *(_text(inner) for _, inner in _calls(body))])


_NAME = re.compile(r"\bname=[^'\"]*(?=['\"])")
