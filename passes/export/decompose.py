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

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.compat.private import OpOverload, OpOverloadPacket
from fxquant.kernels import custom
from fxquant.passes.graph.builder import Builder, call_key, put_in_place
from fxquant.passes.graph.meta import PART
from fxquant.passes.graph.names import COMPOSITES, PICKS, VIEWS, higher_order_op, is_fxquant, op_name, writes
from fxquant.passes.graph.trace import inline, trace
from fxquant.passes.graph.values import value_of

_SHARED = VIEWS | PICKS
"""Operators of which two equal ones are the same memory anyway."""

_FUNCTION_MODULES = ("torch", "torch.functional", "torch.nn.functional", "torch._C._nn")


def decompose_composites(graph: fx.Graph, *, linears: bool) -> int:
    """Rewrites one graph in place; returns how many nodes were opened. `linears` opens `fxquant::linear` too."""
    calls: dict[Any, fx.Node] = {}
    count = 0
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if _is_function(node) or (linears and is_fxquant(node, *COMPOSITES)):
            _open(node, calls)
            count += 1
        elif _writes(node):
            calls.clear()  # what was read before may have changed
        elif isinstance(node.target, OpOverload) and op_name(node) in _SHARED:
            earlier = calls.setdefault(call_key(node.target, node.args, node.kwargs), node)
            if earlier is not node:
                node.replace_all_uses_with(earlier)
                graph.erase_node(node)
    return count


def _is_function(node: fx.Node) -> bool:
    """Returns True if a node calls a Python function on tensors."""
    target = node.target
    module = getattr(target, "__module__", None) or ""
    is_operator = isinstance(target, (OpOverload, OpOverloadPacket)) or module == "_operator"
    builtin = type(target).__name__ in ("builtin_function_or_method", "method_descriptor")
    return not is_operator and (builtin or module in _FUNCTION_MODULES) and isinstance(value_of(node), Tensor)


def _writes(node: fx.Node) -> bool:
    """Returns True if a node may change a tensor that it is given."""
    return writes(node) or higher_order_op(node) != ""


def _open(node: fx.Node, calls: dict[Any, fx.Node]) -> None:
    target: Callable[..., Any] = node.target  # type: ignore[assignment]

    def run(*args: Any, **kwargs: Any) -> Any:
        with custom.recorded() as operands:
            return target(*args, **kwargs), operands

    with torch.no_grad():
        traced = trace(run, *fx.node.map_arg((node.args, node.kwargs), value_of), guarded=False)
        parts = _take_parts(traced.graph)
        traced.graph.eliminate_dead_code()
        result, copies = inline(Builder(node, calls), traced)
    for part, place in parts.items():
        if part.op == "call_function":
            copies[part].meta[PART] = place
    put_in_place(result, node)


def _take_parts(graph: fx.Graph) -> dict[fx.Node, int]:
    """Removes the operand parts from a graph's outputs. Returns the place of each part in its operand."""
    (output,) = graph.find_nodes(op="output")
    result, operands = output.args[0]
    output.args = (result,)
    return {part: i for parts in operands for i, part in enumerate(parts)}
