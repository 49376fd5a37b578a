"""Tokens on their way to experts of other ranks: each rank quantizes its own, and payloads are exchanged.

    there = wait_tensor(all_to_all_single(x, [r0, r1], [s0, s1], "ep"))                # x [N, K]
    rows = index(there, [places])
    row = fxquant.split_quantize(rows, ends, "mxfp8_e4m3", "rowwise")
    column = fxquant.split_quantize(rows, ends, "mxfp8_e4m3", "columnwise")
    # becomes, under the option quantized_dispatch
    part = fxquant.quantize(x, "mxfp8_e4m3", "rowwise")
    row = [index(wait_tensor(all_to_all_single(p, [r0, r1], [s0, s1], "ep")), [places]) for p in part]
    rows = fxquant.split_dequantize(row, ends, "mxfp8_e4m3", K, bfloat16)
    column = fxquant.split_quantize(rows, ends, "mxfp8_e4m3", "columnwise")

A row that has its scales for itself is quantized to the same bytes wherever that is done. Columns cross the rows of
all ranks, so those of the weight's gradient are quantized from what has arrived, which rounds them twice. In the
backward the gradients of experts' outputs travel the same way.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.compat.values import statically_known_true
from fxquant.decisions import SentQuantized
from fxquant.formats import QuantSpec
from fxquant.kernels.operator import Side
from fxquant.passes.graph.builder import Builder, put_in_places
from fxquant.passes.graph.considered import allowed, sent_quantized
from fxquant.passes.graph.match import readers
from fxquant.passes.graph.meta import CUSTOM, layer_of
from fxquant.passes.graph.names import (
    ALIASES,
    COPIES,
    DETACHES,
    RESHAPES,
    SAME_ELEMENTS,
    SLICES,
    SPLITS,
    argument_named,
    calls,
    is_fxquant,
    op_name,
)
from fxquant.passes.graph.values import val
from fxquant.passes.joint.scales import nodes_of_backward
from fxquant.passes.settings import Settings

_aten, _fxquant, _collective = torch.ops.aten, torch.ops.fxquant, torch.ops._c10d_functional
_NAME = "dispatch_payloads"
_NEW = (_aten.new_zeros.default, _aten.new_ones.default, _aten.new_empty.default, _aten.new_full.default)
"""Operators that take dtype and device of a tensor."""
_SAME = ALIASES | DETACHES | COPIES
_ALONG_AN_AXIS = SLICES | SPLITS | {"select", "index_select", "cat"}


@dataclass
class _Exchange:
    """An exchange of x [*, K] between ranks, and what becomes of it.

    `moved` are the nodes that hold its rows, each with the dtypes that they were cast to on the way. `quantized` are
    those that quantize them, `sizes` those that ask for their number or device, `others` all that read them besides.
    """

    node: fx.Node
    moved: dict[fx.Node, tuple[torch.dtype, ...]] = field(default_factory=dict)
    quantized: list[fx.Node] = field(default_factory=list)
    sizes: list[fx.Node] = field(default_factory=list)
    others: list[fx.Node] = field(default_factory=list)

    @property
    def x(self) -> Any:
        return self.node.args[0]

    @property
    def length(self) -> Any:
        return val(self.x).shape[-1]

    @property
    def by_row(self) -> list[fx.Node]:
        return [node for node in self.quantized if _side(node).direction == "rowwise"]

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes that all rows are cast to before they are quantized."""
        return self.moved[_rows(self.quantized[0])]


def dispatch_payloads(graph: fx.Graph, settings: Settings) -> int:
    """Rewrites a graph in place; returns how many exchanges of payloads there are in the place of one."""
    count = 0
    exchanges = graph.find_nodes(op="call_function", target=_collective.all_to_all_single.default)
    for node in exchanges if settings.quantized_dispatch else ():
        if val(node).ndim < 2 or not val(node).is_floating_point():
            continue
        exchange = _read(node)
        behind = (reader for other in exchange.others for reader in readers(other, SAME_ELEMENTS) if _quantizes(reader))
        first = next(iter(exchange.quantized), None) or next(behind, None)
        if first is not None and allowed(first, _NAME, _obstacle(exchange)):
            _told(exchange)
            _rewrite(exchange)
            count += 1
    graph.lint()
    return count


def _read(node: fx.Node) -> _Exchange:
    """Follows what is exchanged to all that reads it."""
    exchange = _Exchange(node, {node: ()})
    places = {other: place for place, other in enumerate(node.graph.nodes)}
    waiting = [node]
    while waiting:
        source = waiting.pop()
        for user in source.users:
            if _moves_rows(user, source, exchange.length):
                cast: Any = [user.kwargs["dtype"]] if _is_cast(user) else []
                dtypes = (*exchange.moved[source], *cast)
                if user not in exchange.moved:
                    exchange.moved[user] = dtypes
                    waiting.append(user)
                elif exchange.moved[user] != dtypes:
                    exchange.others.append(user)
            elif _quantizes(user) and user.args[0] is source:
                exchange.quantized.append(user)
            elif user.target in _NEW:
                exchange.sizes.append(user)
            elif user.target is _aten.sym_size.int and user.args[1] != val(source).ndim - 1:
                exchange.sizes.append(user)
            else:
                exchange.others.append(user)
    exchange.moved = dict(sorted(exchange.moved.items(), key=lambda item: places[item[0]]))
    for nodes in (exchange.quantized, exchange.sizes, exchange.others):
        nodes[:] = sorted(dict.fromkeys(nodes), key=places.__getitem__)
    return exchange


def _moves_rows(node: fx.Node, source: fx.Node, length: Any) -> bool:
    """Returns True if rows [*, length] of a tensor go to other places, as they are; they may be cast."""
    if node.target is _collective.wait_tensor.default or calls(node, _SAME) or _is_cast(node):
        return True
    if node.target is operator.getitem:
        return calls(source, SPLITS)
    args: Any = node.args
    value = val(source)
    if not isinstance(value, Tensor):
        return False
    last = value.ndim - 1
    if node.target is _aten.index.Tensor:
        return args[0] is source and _by_number(args[1], last)
    if node.target is _aten.index_put.default:
        added = len(args) > 3 and args[3]
        fits = args[0] is not source and args[2] is source and value.shape[-1] == val(node).shape[-1]
        return fits and not added and _by_number(args[1], val(node).ndim - 1)
    if calls(node, RESHAPES):
        sizes = isinstance(args[1], (list, tuple)) and val(node).ndim > 1
        return sizes and statically_known_true(val(node).shape[-1] == length)
    if node.target is _aten.permute.default:
        return bool(args[1][-1] % value.ndim == last)
    if node.target is _aten.transpose.int:
        return last not in [axis % value.ndim for axis in args[1:]]
    if node.target is _aten.constant_pad_nd.default:
        behind = len(args[1]) == 4 and list(args[1][:3]) == [0, 0, 0] and not any(args[2:])
        return behind and value.ndim == 2 and statically_known_true(val(args[1][3]) >= 0)
    axis = _axis(node)
    alike = all(val(other).dtype == value.dtype and val(other).ndim == value.ndim for other in _beside(node))
    return axis is not None and axis % value.ndim != last and alike


def _axis(node: fx.Node) -> int | None:
    """Returns the axis along which an operator takes or joins ranges, None for another operator."""
    axis: int | None = argument_named(node, "dim", 0) if calls(node, _ALONG_AN_AXIS) else None
    return axis


def _by_number(indices: Any, last: int) -> bool:
    """Returns True for indices by number, of other axes than the last."""
    return len(indices) <= last and all(i is None or val(i).dtype in (torch.int64, torch.int32) for i in indices)


def _quantizes(node: fx.Node) -> bool:
    return is_fxquant(node, "quantize", "split_quantize")


def _rows(quantization: fx.Node) -> Any:
    return quantization.args[0]


def _is_cast(node: fx.Node) -> bool:
    return node.target is _aten._to_copy.default and isinstance(node.kwargs.get("dtype"), torch.dtype)


def _side(node: fx.Node) -> Side:
    args: Any = node.args
    spec, direction, *state = args[2 if is_fxquant(node, "split_quantize") else 1 :]
    return Side(direction, spec, next(iter(state), None))


def _obstacle(exchange: _Exchange) -> str:
    """Returns why payloads are not exchanged."""
    if exchange.others:
        return f"{op_name(exchange.others[0])} reads what is exchanged besides"
    if any(exchange.moved[_rows(node)] != exchange.dtypes for node in exchange.quantized):
        return "it is quantized from several dtypes"
    sides = [_side(node) for node in exchange.by_row]
    specs = dict.fromkeys(side.spec for side in sides)
    if not specs:
        return "no product takes it quantized by rows"
    if len(specs) > 1:
        return f"products take it in {len(specs)} formats: {', '.join(specs)}"
    spec = QuantSpec.parse(next(iter(specs)))
    if spec.stochastic:
        return "it is rounded at random, by each rank for itself"
    if spec.key or spec.scaled == "tensor" or spec.row.block[0] > 1 or any(side.state is not None for side in sides):
        return f"{spec.format} has a scale for several rows, which come from all ranks"
    if not isinstance(exchange.length, int):
        return "its width is dynamic"
    payload, tensor = _bits(exchange, spec), 8 * val(exchange.x).dtype.itemsize
    return "" if payload < tensor else f"its payload takes {payload:.4g} bits an element, the tensor {tensor}"


def _bits(exchange: _Exchange, spec: QuantSpec) -> float:
    length: int = exchange.length
    return 8 * spec.stored_bytes(1, length) / length


def _told(exchange: _Exchange) -> None:
    """Says which layers take what is exchanged."""
    quantization, dtype = exchange.by_row[0], val(exchange.x).dtype
    spec = _side(quantization).spec
    layers = dict.fromkeys(layer_of(node) for node in exchange.quantized)
    operand = "grad_output" if quantization in nodes_of_backward(quantization.graph) else "input"
    outcome = SentQuantized(
        layers=tuple(layers), operand=operand, spec=spec, bits=_bits(exchange, QuantSpec.parse(spec)),
        instead=8 * dtype.itemsize, dequantized=len(exchange.by_row) < len(exchange.quantized),
    )  # fmt: skip
    sent_quantized(quantization.graph, outcome)


def _rewrite(exchange: _Exchange) -> None:
    """Exchanges payload and scales, moves them as the rows were, and gives them to all that quantized rows."""
    first = exchange.by_row[0]
    spec = _side(first).spec
    parts = {exchange.node: _exchanged(exchange, first)}
    for node in exchange.moved:
        if node is not exchange.node:
            parts[node] = _moved(exchange, node, parts)
    for node in exchange.sizes:
        source: Any = node.args[0]
        if node.target in _NEW:
            node.args = (parts[source][0], *node.args[1:])
            node.kwargs = {**node.kwargs, "dtype": val(node).dtype}
            continue
        node.replace_all_uses_with(Builder(node).call(_aten.sym_size.int, parts[source][0], node.args[1]))
        node.graph.erase_node(node)
    shared: dict[Any, fx.Node] = {}
    for node in exchange.quantized:
        builder = Builder(node, shared)
        typed = _typed(builder, parts[_rows(node)], QuantSpec.parse(spec))
        if _side(node).direction == "rowwise":
            put_in_places(typed, node)
        else:
            node.args = (_values(builder, node, typed, spec), *node.args[1:])
    for node in reversed(exchange.moved):
        node.graph.erase_node(node)


def _exchanged(exchange: _Exchange, quantization: fx.Node) -> list[fx.Node]:
    """Adds the quantization of a rank's own rows, and the exchange of its parts."""
    builder = Builder(exchange.node)
    parts = _quantized(builder, exchange.x, exchange.dtypes, quantization)
    rest = exchange.node.args[1:]
    return [builder.call(_collective.all_to_all_single.default, part, *rest) for part in parts]


def _quantized(builder: Builder, rows: fx.Node, dtypes: Sequence[torch.dtype], quantization: fx.Node) -> list[fx.Node]:
    """Adds the parts [*, columns] of rows [*, K], as bytes where an element is no more than one."""
    shape = [builder.size(rows, axis) for axis in range(val(rows).ndim - 1)]
    length = val(rows).shape[-1]
    for dtype in dtypes:
        rows = builder.call(_aten._to_copy.default, rows, dtype=dtype)
    if len(shape) != 1:
        rows = builder.call(_aten.reshape.default, rows, [-1, length])
    quantized = builder.call(_fxquant.quantize.default, rows, _side(quantization).spec, "rowwise")
    if CUSTOM in quantization.meta:
        quantized.meta[CUSTOM] = quantization.meta[CUSTOM]
    parts = []
    for index, value in enumerate(val(quantized)):
        part = builder.call(operator.getitem, quantized, index)
        if value.dtype.itemsize == 1 and value.dtype != torch.uint8:
            part = builder.call(_aten.view.dtype, part, torch.uint8)
        if len(shape) != 1:
            part = builder.call(_aten.reshape.default, part, [*shape, value.shape[-1]])
        parts.append(part)
    return parts


def _moved(exchange: _Exchange, node: fx.Node, parts: dict[fx.Node, list[fx.Node]]) -> list[fx.Node]:
    """Adds a move of rows for each of their parts; what stands beside them is quantized where it is."""
    builder, quantization = Builder(node), exchange.by_row[0]
    source = next(source for source in node.all_input_nodes if source in parts)
    if _is_cast(node):
        return parts[source]
    target: Any = node.target
    args: Any = node.args
    if calls(node, RESHAPES):
        widths = [val(part).shape[-1] for part in parts[source]]
        shapes = [[*args[1][:-1], width] for width in widths]
        return [builder.call(_aten.reshape.default, *both) for both in zip(parts[source], shapes, strict=True)]
    rest = exchange.dtypes[len(exchange.moved[node]) :]
    if target is _aten.constant_pad_nd.default:
        size = [args[1][3], exchange.length]
        zeros = builder.call(_aten.new_zeros.default, parts[source][0], size, dtype=val(node).dtype)
        behind = _quantized(builder, zeros, rest, quantization)
        return [builder.call(_aten.cat.default, [*both]) for both in zip(parts[source], behind, strict=True)]
    beside = {other: _quantized(builder, other, rest, quantization) for other in _beside(node) if other not in parts}
    results = []
    for index in range(len(parts[source])):

        def swapped(argument: fx.Node, index: int = index) -> fx.Node:
            return (parts.get(argument) or beside.get(argument) or {index: argument})[index]

        arguments: Any = fx.node.map_arg(args, swapped)
        results.append(builder.call(target, *arguments, **node.kwargs))
    return results


def _beside(node: fx.Node) -> list[fx.Node]:
    """Returns the tensors whose rows an operator puts together."""
    args: Any = node.args
    if node.target is _aten.cat.default:
        return [*args[0]]
    return [args[0]] if node.target is _aten.index_put.default else []


def _typed(builder: Builder, parts: list[fx.Node], spec: QuantSpec) -> list[fx.Node]:
    """Adds what has the parts' own dtypes."""
    typed = []
    for part, dtype in zip(parts, spec.row.dtypes, strict=False):
        typed.append(part if val(part).dtype == dtype else builder.call(_aten.view.dtype, part, dtype))
    return typed


def _values(builder: Builder, quantization: fx.Node, parts: list[fx.Node], spec: str) -> fx.Node:
    """Adds the values of rows that have arrived."""
    rows = val(_rows(quantization))
    dtype, length = rows.dtype, rows.shape[-1]
    if is_fxquant(quantization, "split_quantize"):
        offs = quantization.args[1]
        return builder.call(_fxquant.split_dequantize.default, parts, offs, spec, length, dtype)
    size = [builder.size(parts[0], 0), length]
    return builder.call(_fxquant.dequantize.default, parts, spec, "rowwise", size, dtype)
