"""Decompose composites: writes out what rewriting put into an exported program, as ATen and fxquant operators.

    linear = torch.ops.fxquant.linear.default(x, w, b, "input=mxfp8_e4m3 weight=mxfp8_e4m3 ...")
    # becomes, for inference
    view = torch.ops.aten.view.default(x, [mul, 64])
    quantize = torch.ops.fxquant.quantize.default(view, "mxfp8_e4m3", "rowwise")
    quantize_1 = torch.ops.fxquant.quantize.default(w, "mxfp8_e4m3", "rowwise")
    scaled_mm = torch.ops.fxquant.scaled_mm.default([...], [...], "mxfp8_e4m3", "mxfp8_e4m3", b, torch.float32, True)

A program may hold operators only, so Python functions such as `torch.permute` are opened in any case. What several
opened calls do to one tensor is done once, and so are equal views, of which a decomposed program has one a call.

A user's own quantizer is there as its torch code, in which `PART` marks what it made: data, scale and so on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.compat.private import (
    OpOverload,
    OpOverloadPacket,
    enable_python_dispatcher,
    make_fx,
    tree_flatten,
    tree_unflatten,
)
from fxquant.compat.values import fake_mode_of
from fxquant.kernels import custom
from fxquant.passes.graph.builder import Builder, put_in_place
from fxquant.passes.graph.meta import PART
from fxquant.passes.graph.names import PICKS, VIEWS, higher_order_op, is_fxquant, op_name, writes
from fxquant.passes.graph.values import value_of

_SHARED = VIEWS | PICKS
"""Operators of which two equal ones are the same memory anyway."""

_FUNCTION_MODULES = ("torch", "torch.functional", "torch.nn.functional", "torch._C._nn")


def decompose_composites(graph: fx.Graph, *, linears: bool) -> int:
    """Rewrites one graph in place; returns how many nodes were opened. `linears` opens `fxquant::linear` too."""
    made: dict[Any, fx.Node] = {}
    count = 0
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if _is_function(node) or (linears and _is_linear(node)):
            _open(node, made)
            count += 1
        elif _writes(node):
            made.clear()  # what was read before may have changed
        elif isinstance(node.target, OpOverload) and op_name(node) in _SHARED:
            earlier = made.setdefault((node.target, _key(node.args), _key(node.kwargs)), node)
            if earlier is not node:
                node.replace_all_uses_with(earlier)
                graph.erase_node(node)
    return count


def _is_linear(node: fx.Node) -> bool:
    return any(is_fxquant(node, name) for name in ("linear", "grouped_linear", "attention"))


def _is_function(node: fx.Node) -> bool:
    """Whether a node calls a Python function on tensors."""
    target = node.target
    module = getattr(target, "__module__", None) or ""
    is_operator = isinstance(target, (OpOverload, OpOverloadPacket)) or module == "_operator"
    own = module in _FUNCTION_MODULES or type(target).__name__ in ("builtin_function_or_method", "method_descriptor")
    return not is_operator and own and isinstance(value_of(node), Tensor)


def _writes(node: fx.Node) -> bool:
    """Returns True if a node may change a tensor that it is given."""
    return writes(node) or higher_order_op(node) != ""


def _open(node: fx.Node, made: dict[Any, fx.Node]) -> None:
    leaves, spec = tree_flatten((node.args, node.kwargs))
    inputs = list(dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, fx.Node)))
    target: Callable[..., Any] = node.target  # type: ignore[assignment]

    def run(*values: Any) -> Any:
        given = dict(zip(inputs, values, strict=True))
        args, kwargs = tree_unflatten([given[x] if isinstance(x, fx.Node) else x for x in leaves], spec)
        with custom.recorded() as made:
            return target(*args, **kwargs), made

    fakes = [value_of(each) for each in inputs]
    mode = fake_mode_of(fakes)
    assert mode is not None, node.format_node()
    with torch.no_grad(), mode, enable_python_dispatcher():
        traced = make_fx(run)(*fakes)
    parts = _take_parts(traced.graph)
    traced.graph.eliminate_dead_code()
    builder = Builder(node)
    copies: dict[fx.Node, Any] = dict(zip(traced.graph.find_nodes(op="placeholder"), inputs, strict=True))
    for inner in traced.graph.nodes:
        if inner.op == "placeholder":
            continue
        if inner.op == "output":
            result = copies[inner.args[0]]
            break
        if inner.op == "get_attr":
            copies[inner] = _constant(node, getattr(traced, str(inner.target)), mode)
            continue
        args, kwargs = fx.node.map_arg((inner.args, inner.kwargs), copies.__getitem__)
        key: Any = (inner.target, _key(args), _key(kwargs))
        if key not in made:
            with torch.no_grad():
                made[key] = builder.call(inner.target, *args, **kwargs)
        copies[inner] = made[key]
        if inner in parts:
            made[key].meta[PART] = parts[inner]
    put_in_place(result, node)


def _take_parts(graph: fx.Graph) -> dict[fx.Node, int]:
    """Leaves of the outputs, a result and the parts of operands, the result; returns the places of the parts."""
    (output,) = graph.find_nodes(op="output")
    result, operands = output.args[0]
    output.args = (result,)
    return {part: i for parts in operands for i, part in enumerate(parts)}


def _constant(anchor: fx.Node, tensor: Tensor, mode: Any) -> fx.Node:
    """A tensor of its own that traced code has, in front of a node; of equal ones there is one a graph."""
    graph, owner = anchor.graph, anchor.graph.owning_module
    assert owner is not None
    node: fx.Node
    for node in graph.find_nodes(op="get_attr"):
        known = getattr(owner, str(node.target), None)
        if isinstance(known, Tensor) and known.dtype == tensor.dtype and torch.equal(known, tensor):
            return node
    name = next(name for i in itertools.count() if not hasattr(owner, name := f"constant_{i}"))
    owner.register_buffer(name, tensor)
    with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
        node = graph.get_attr(name)
    node.meta["example_value"] = mode.from_tensor(tensor, static_shapes=True)
    return node


def _key(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    if isinstance(value, dict):
        return tuple((name, _key(each)) for name, each in value.items())
    return value if isinstance(value, fx.Node) else (type(value), value)


__all__ = ["decompose_composites"]
