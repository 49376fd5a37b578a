"""Tensors that a forward keeps for its backward besides payloads are kept in FP8, by the option `save="fp8"`.

    forward: h = norm(x); return y, x                                    # x [B, S, K] in bfloat16, saved
    backward: def backward(x, tangents): ...
    # becomes, of both halves of a graph
    forward: data, scale = fxquant.quantize_kept(aten.view(x, [-1, K])); return y, aten.view(data, [B, S, K]), ...
    backward: def backward(data, scale, tangents):
                  x = fxquant.dequantize([data, scale], "block_1x128_e4m3", "rowwise", [S, K], bfloat16)

That is what norms, activations and attention have saved. The backward computes with what these bytes stand for, also
the payloads of weight gradients, so gradients lose a little. Kept as they are: inputs and parameters, results that the
caller gets, sums in float32 (of norms, and an attention's), what stands behind the last product of a model, as a loss
keeps it, and rows of fewer than 128 elements.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.compat.values import size_hint, statically_known_true
from fxquant.decisions import KeptInFp8
from fxquant.kernels.cast.producers import KEPT
from fxquant.passes.graph.builder import Builder
from fxquant.passes.graph.match import behind_views
from fxquant.passes.graph.meta import VAL, inherited, layer_of
from fxquant.passes.graph.names import SAME_VALUES, calls, fxquant_op, is_fxquant, op_name
from fxquant.passes.graph.values import maybe_value, val
from fxquant.passes.joint.produced import NARROW

_aten = torch.ops.aten
_BLOCK = 128
_PRODUCTS = frozenset((
    "mm", "addmm", "bmm", "baddbmm", "convolution", "_grouped_mm", "_scaled_mm",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_efficient_attention",
))  # fmt: skip
_OF_FXQUANT = ("scaled_mm", "grouped_scaled_mm", "attention_forward")
"""Operators that multiply, in front of which a tensor is an activation."""


def keep_fp8(forward: fx.Graph, backward: fx.Graph, outputs: int) -> list[KeptInFp8]:
    """Rewrites both halves of a graph in place, whose forward has so many results; returns what is kept in FP8."""
    results: Any = list(forward.output_node().args[0])  # type: ignore[arg-type]
    returned = {behind_views(node) for node in results[:outputs] if isinstance(node, fx.Node)}
    inputs = {node.name: node for node in backward.find_nodes(op="placeholder")}
    multiplied = _before_products(forward)
    kept, written = [], list(results[:outputs])
    for node in results[outputs:]:
        place = inputs.get(node.name) if isinstance(node, fx.Node) else None
        taken = place is not None and behind_views(node) not in returned and _is_activation(node, multiplied)
        layout = _layout(node) if taken else None
        if layout is None or place is None or not place.users:
            written.append(node)
            continue
        parts = layout.quantize(node)
        layout.restore(place, parts)
        written += parts
        what = f"{_name(node)} {[*val(node).shape]}"
        kept.append(KeptInFp8(layer_of(behind_views(node)), what, sum(map(_bytes, parts)), _bytes(node)))
    forward.output_node().args = (tuple(written),)
    forward.lint()
    backward.lint()
    return kept


def _before_products(graph: fx.Graph) -> set[fx.Node]:
    """Returns the nodes on whose values a product of the graph depends."""
    before: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node in before or _is_product(node):
            before.update(node.all_input_nodes)
    return before


@dataclass(frozen=True)
class _Layout:
    """The order of a dense tensor's axes in memory, and how many of the last in that order are one row of blocks."""

    order: tuple[int, ...]
    joined: int

    def quantize(self, node: fx.Node) -> list[fx.Node]:
        """Adds the quantization of a tensor behind it; returns its parts."""
        builder = Builder(node.next)
        x = builder.call(_aten.permute.default, node, list(self.order))
        sizes = [builder.size(x, axis) for axis in range(len(self.order) - self.joined)]
        matrix = len(self.order) == 2
        if not matrix:
            x = builder.call(_aten.view.default, x, [-1, math.prod(val(x).shape[-self.joined :])])
        kept = builder.call(torch.ops.fxquant.quantize_kept.default, x)
        parts = [builder.call(operator.getitem, kept, i) for i in range(2)]
        shaped = parts
        if not matrix:
            shaped = [builder.call(_aten.view.default, part, [*sizes, val(part).shape[1]]) for part in parts]
        for added in (x, kept, *parts, *shaped):
            added.meta = inherited(node) | {VAL: added.meta[VAL]}
        return shaped

    def restore(self, place: fx.Node, parts: Sequence[fx.Node]) -> None:
        """Puts inputs for the parts of a tensor in the place of its own, dequantized in front of its first reader."""
        graph, value = place.graph, val(place)
        with graph.inserting_before(place):
            inputs = [graph.placeholder(f"{place.name}_{part}") for part in ("fp8", "scale")]
        for node, part in zip(inputs, parts, strict=True):
            node.meta = {**inherited(place), VAL: val(part)}
        order = {node: i for i, node in enumerate(graph.nodes)}
        builder = Builder(min(place.users, key=order.__getitem__))
        shape = [value.shape[axis] for axis in self.order]
        joined = shape[len(shape) - self.joined :]
        sizes = [builder.size(inputs[0], axis) for axis in range(len(shape) - self.joined)]
        size = [sizes[-1], math.prod(joined)]
        x = builder.call(torch.ops.fxquant.dequantize.default, inputs, KEPT, "rowwise", size, value.dtype)
        x = builder.call(_aten.view.default, x, [*sizes, *joined]) if self.joined > 1 else x
        x = builder.call(_aten.permute.default, x, [self.order.index(axis) for axis in range(len(shape))])
        place.replace_all_uses_with(x)
        graph.erase_node(place)


def _layout(node: fx.Node) -> _Layout | None:
    """Returns the layout in which a saved tensor is quantized; None for one that is kept as it is."""
    value = maybe_value(node)
    if not isinstance(value, Tensor) or value.ndim < 2 or not statically_known_true(value.shape[-1] > 1):
        return None
    if value.dtype not in NARROW and not (value.dtype == torch.float32 and _is_no_sum(node)):
        return None
    strides: Any = value.stride()
    order = tuple(sorted(range(value.ndim), key=lambda axis: -size_hint(strides[axis])))
    expected: Any = 1
    joined, length = 0, 1
    for axis in reversed(order):
        size = value.shape[axis]
        if not statically_known_true(size == 1) and not statically_known_true(strides[axis] == expected):
            return None
        expected = expected * size
        if length < _BLOCK and joined < value.ndim - 1:
            if not isinstance(size, int):
                return None
            joined, length = joined + 1, length * size
    return _Layout(order, joined) if length >= _BLOCK else None


def _is_no_sum(node: fx.Node) -> bool:
    """Returns True for what is computed element by element, looked up, or the first result of a product."""
    source: Any = behind_views(node)
    if source.target is operator.getitem:
        return source.args[1] == 0 and _is_product(source.args[0])
    elementwise = torch.Tag.pointwise in getattr(source.target, "tags", ())
    return elementwise or op_name(source) == "embedding" or _is_product(source)


def _is_product(node: fx.Node) -> bool:
    return node.op == "call_function" and (op_name(node) in _PRODUCTS or is_fxquant(node, *_OF_FXQUANT))


def _is_activation(node: fx.Node, multiplied: set[fx.Node]) -> bool:
    """Returns True for what is computed of a graph's inputs on the way to a product; not for a cast parameter."""
    source: Any = behind_views(node)
    if node not in multiplied and source not in multiplied:
        return False
    while calls(source, SAME_VALUES) or getattr(source, "target", None) is torch.ops.prims.convert_element_type.default:
        source = source.args[0]
    return isinstance(source, fx.Node) and source.op == "call_function"


def _name(node: fx.Node) -> str:
    """Returns the name of the operator that gives a tensor, seen through views."""
    source: Any = behind_views(node)
    if source.target is operator.getitem:
        source = source.args[0]
    return fxquant_op(source) or op_name(source)


def _bytes(node: fx.Node) -> int:
    value = val(node)
    return math.prod(map(size_hint, value.shape)) * int(value.dtype.itemsize)
