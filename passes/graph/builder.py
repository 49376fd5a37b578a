"""Nodes added to a graph of either dialect, put in the place of others, and removed."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx

from fxquant.compat.values import fake_mode_of, on_fakes
from fxquant.passes.graph.meta import EXAMPLE_VALUE, VAL, inherited
from fxquant.passes.graph.values import value_of


class Builder:
    """Adds nodes in front of `anchor`, each with its value in the dialect of the anchor and with its origin.

    `calls` maps keys of `call_key` to nodes that are used again for equal calls; new nodes are added to it.
    """

    def __init__(self, anchor: fx.Node, calls: dict[Any, fx.Node] | None = None) -> None:
        self.anchor = anchor
        self.graph = anchor.graph
        self.calls = calls
        self.key = EXAMPLE_VALUE if EXAMPLE_VALUE in anchor.meta else VAL

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Adds a `call_function` node, or returns an equal one of `calls`."""
        key = None if self.calls is None else call_key(target, args, kwargs)
        if self.calls is not None and key in self.calls:
            return self.calls[key]
        fake_args, fake_kwargs = fx.node.map_arg((args, kwargs), value_of)
        with on_fakes(self.anchor.meta.get(self.key), fake_args, fake_kwargs):
            value = target(*fake_args, **fake_kwargs)
        node = self.with_value(value, target, args, kwargs)
        if self.calls is not None:
            self.calls[key] = node
        return node

    def with_value(self, value: Any, target: Callable[..., Any], args: Any, kwargs: Any) -> fx.Node:
        """Adds a `call_function` node whose value is known."""
        with self.graph.inserting_before(self.anchor):
            node = self.graph.call_function(target, args, kwargs)
        node.meta = inherited(self.anchor)
        node.meta[self.key] = value
        return node

    def constant(self, tensor: Tensor) -> fx.Node:
        """Adds a tensor that the graph's module holds in front of all computation, or returns an equal one."""
        owner = self.graph.owning_module
        assert owner is not None
        for node in self.graph.find_nodes(op="get_attr"):
            held: Any = getattr(owner, str(node.target), None)
            same = isinstance(held, Tensor) and (held.dtype, held.device) == (tensor.dtype, tensor.device)
            if same and torch.equal(held, tensor):
                return cast(fx.Node, node)
        name = next(name for i in itertools.count() if not hasattr(owner, name := f"constant_{i}"))
        owner.register_buffer(name, tensor)
        with self.graph.inserting_before(next(node for node in self.graph.nodes if node.op != "placeholder")):
            constant = self.graph.get_attr(name)
        mode = fake_mode_of(self.anchor.meta.get(self.key))
        constant.meta[self.key] = tensor if mode is None else mode.from_tensor(tensor, static_shapes=True)
        return constant

    def size(self, node: fx.Node, axis: int) -> int | fx.Node:
        """The size of an axis: a number where it is static, else a node that computes it."""
        size = value_of(node).shape[axis]
        return size if isinstance(size, int) else self.call(torch.ops.aten.sym_size.int, node, axis)


def call_key(target: Any, args: Any, kwargs: Any) -> Any:
    """Returns a key that is equal for equal calls."""

    def key(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return tuple(map(key, value))
        if isinstance(value, dict):
            return tuple((name, key(item)) for name, item in value.items())
        return value if isinstance(value, fx.Node) else (type(value), value)

    return target, key(args), key(kwargs)


def put_in_place(result: fx.Node, node: fx.Node) -> None:
    """Puts a result in the place of a node, which goes away, with the entries of its meta that the result has not."""
    for key, value in node.meta.items():
        if key not in (VAL, EXAMPLE_VALUE):
            result.meta.setdefault(key, value)
    node.replace_all_uses_with(result)
    node.graph.erase_node(node)


def put_in_places(results: Sequence[Any] | Mapping[int, Any], node: fx.Node) -> None:
    """Puts results in the places of the items of a node, by their index; the node and its items go away."""
    for item in list(node.users):
        assert item.target is operator.getitem, item.format_node()
        item.replace_all_uses_with(results[item.args[1]])  # type: ignore[index]
        node.graph.erase_node(item)
    node.graph.erase_node(node)


def erase_unused(nodes: Iterable[fx.Node], keep: Collection[fx.Node] = ()) -> None:
    """Erases those of the nodes that nothing reads any more, and what was computed for them alone."""
    queue, gone = list(nodes), set(keep)
    while queue:
        node = queue.pop()
        if node.op == "call_function" and node not in gone and not node.users and not node.is_impure():
            gone.add(node)
            queue += node.all_input_nodes
            node.graph.erase_node(node)
