"""Gathers of tensors that are only multiplied: every rank quantizes its rows, and the payloads are gathered.

    whole = cat(split(wait_tensor(all_gather_into_tensor(x, 2, "tp")), ..), 1)           # x [B, S / 2, K]
    row = fxquant.quantize(view(whole, [B * S, K]), "mxfp8_e4m3", "rowwise")
    # becomes
    part = fxquant.quantize(view(x, [B * S / 2, K]), "mxfp8_e4m3", "rowwise")
    row = [in_order(wait_tensor(all_gather_into_tensor(p, 2, "tp"))) for p in part]      # payload, and scales

A row, or a block of rows that no border between ranks cuts, is quantized to the same bytes wherever that is done. A
scale of the whole tensor is made of the largest amax of all ranks; one payload, transposed, then serves both ways.
The gradient of a bias, a sum over rows, becomes a sum of the ranks' sums.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.compat.private import fuses_gathers, is_recomputed, recompute_as, tree_leaves
from fxquant.formats import QuantSpec
from fxquant.kernels.operator import Side
from fxquant.passes.graph.builder import Builder, put_in_places
from fxquant.passes.graph.considered import allowed
from fxquant.passes.graph.match import readers
from fxquant.passes.graph.names import ALIASES, RESHAPES, is_fxquant
from fxquant.passes.graph.values import val
from fxquant.passes.joint.sides import sides_of
from fxquant.passes.settings import Settings

_aten, _fxquant, _collective = torch.ops.aten, torch.ops.fxquant, torch.ops._c10d_functional
_VIEWS = RESHAPES | ALIASES


@dataclass
class _Gather:
    """A gather of a tensor [*, part, *, K] from `ranks` along `axis`, what reads it, and what has taken its place."""

    node: fx.Node
    axis: int
    users: list[fx.Node]
    parts: dict[Any, list[fx.Node]] = field(default_factory=dict)
    calls: dict[Any, fx.Node] = field(default_factory=dict)

    @property
    def x(self) -> Any:
        return self.node.args[0]

    @property
    def shape(self) -> Sequence[int]:
        return tuple(val(self.x).shape)

    @property
    def ranks(self) -> Any:
        return self.node.args[1]

    @property
    def run(self) -> int:
        """The number of rows of one rank that stand one after the other in the whole tensor."""
        return prod(self.shape[self.axis : -1])

    @property
    def sides(self) -> list[Side]:
        return [side for user in self.users for side in sides_of(user)]


def gather_payloads(graph: fx.Graph, settings: Settings) -> int:
    """Rewrites a graph in place; returns how many gathers of payloads there are in the place of one."""
    count = 0
    for node in graph.find_nodes(op="call_function", target=_collective.all_gather_into_tensor.default):
        gather = _read(node)
        if gather is not None and gather.sides:
            quantization = next(user for user in gather.users if sides_of(user))
            if allowed(quantization, "gather_payloads", _obstacle(gather)):
                _rewrite(gather)
                count += 1
    graph.lint()
    return count


def _read(node: fx.Node) -> _Gather | None:
    """Returns a gather along an axis in front of the last, as torch writes it."""
    if len(node.users) != 1 or (wait := next(iter(node.users))).target is not _collective.wait_tensor.default:
        return None
    whole, axis = wait, 0
    split = next(iter(wait.users), None)
    if len(wait.users) == 1 and split is not None and split.target is _aten.split.Tensor:
        pieces: Any = sorted(split.users, key=lambda item: str(item.args[1]).zfill(9))
        joined = {user for piece in pieces for user in piece.users}
        cat = next(iter(joined), None)
        if len(joined) != 1 or cat is None or cat.target is not _aten.cat.default or cat.args[0] != pieces:
            return None
        axis = dict(enumerate(cat.args)).get(1, 0)
        whole, axis = cat, axis % val(cat).ndim
    if val(whole).ndim < 2 or axis >= val(whole).ndim - 1:
        return None
    return _Gather(node, axis, sorted(set(readers(whole, _VIEWS))))


def _obstacle(gather: _Gather) -> str:
    """Returns why payloads are not gathered."""
    if fuses_gathers():
        return "torch fuses gathers with the products behind them (asynchronous tensor parallelism)"
    if not all(sides_of(user) or is_fxquant(user, "amax") or _sums_rows(user) for user in gather.users):
        return "something else reads what is gathered"
    if not all(isinstance(size, int) for size in gather.shape):
        return "its sizes are dynamic"
    size, length = prod(gather.shape[:-1]) * gather.ranks, gather.shape[-1]
    by_rows = (user for user in gather.users if not is_fxquant(user, "amax"))
    if any(list(val(user.args[0]).shape) != [size, length] for user in by_rows):
        return "it is not quantized row by row"
    specs = dict.fromkeys((side.direction, QuantSpec.parse(side.spec)) for side in gather.sides)
    reason = next(filter(None, (_uncut(gather, *side) for side in specs)), "")
    if reason:
        return reason
    bits = [_bits(*side, specs) for side in specs]
    again = is_recomputed(gather.node)  # each pass gathers for itself
    payload, tensor = max(bits) if again else sum(bits), 8 * val(gather.x).dtype.itemsize
    directions = "both directions" if len(specs) > 1 else "its payload"
    return "" if payload < tensor else f"{directions} take {payload:.4g} bits an element, the tensor {tensor}"


def _sums_rows(node: fx.Node) -> bool:
    return node.target is _aten.sum.dim_IntList and [*node.args[1:]] == [[0]]


def _uncut(gather: _Gather, direction: str, spec: QuantSpec) -> str:
    """Returns why a rank cannot quantize its rows by themselves in a direction."""
    if spec.stochastic:
        return "it is rounded at random, by each rank for itself"
    rows = spec.row.alignment if direction == "columnwise" else max(spec.row.block[0], 1)
    if direction == "columnwise":
        rows = max(rows, spec.row.block[0], spec.row.block[1])
    if gather.run % rows:
        return f"{direction} blocks of {rows} rows cross the borders of parts of {gather.run}"
    return ""


def _bits(direction: str, spec: QuantSpec, specs: dict[tuple[str, QuantSpec], None]) -> float:
    """Returns the bits of an element that a direction adds to what is gathered."""
    if direction == "columnwise" and spec.row.family == "per_tensor" and ("rowwise", spec) in specs:
        return 0
    return 8 * spec.row.bytes_per_element


def _rewrite(gather: _Gather) -> None:
    """Gives every reader its result, and erases the gather."""
    for user in gather.users:
        builder = Builder(user, gather.calls)
        local = builder.call(_aten.reshape.default, gather.x, [prod(gather.shape[:-1]), gather.shape[-1]])
        source = user.args[0]
        if not sides_of(user):
            summed = _sums_rows(user)
            part = builder.call(user.target, local, *user.args[1:])  # type: ignore[arg-type]
            user.replace_all_uses_with(_reduced(builder, gather, part, "sum" if summed else "max"))
            user.graph.erase_node(user)
        else:
            results = [part for side in sides_of(user) for part in _payload(builder, gather, local, side)]
            put_in_places(results, user)
        _erase(source)
    for node in gather.calls.values():  # scales are saved: all passes have those of the first
        if is_recomputed(gather.node) and _is_large(node):
            recompute_as(node, gather.node)


def _is_large(node: fx.Node) -> bool:
    return any(isinstance(x, Tensor) and (x.numel() > 1 or x.ndim > 1) for x in tree_leaves(val(node)))


def _erase(node: Any) -> None:
    """Erases a node that nothing reads any more, and what was computed for it alone, up to the gather."""
    if not isinstance(node, fx.Node) or node.users or node.op != "call_function":
        return
    sources = node.all_input_nodes
    is_gather = node.target is _collective.all_gather_into_tensor.default
    node.graph.erase_node(node)
    for source in () if is_gather else sources:
        _erase(source)


def _reduced(builder: Builder, gather: _Gather, part: fx.Node, how: str) -> fx.Node:
    """Adds the sum, or the largest, of what the ranks have."""
    reduction = builder.call(_collective.all_reduce.default, part, how, gather.node.args[2])
    return builder.call(_collective.wait_tensor.default, reduction)


def _payload(builder: Builder, gather: _Gather, local: fx.Node, side: Side) -> list[fx.Node]:
    """Returns the parts of one direction of the whole tensor."""
    key = (side.direction, side.spec, side.state)
    if key in gather.parts:
        return gather.parts[key]
    spec, state = QuantSpec.parse(side.spec), side.state
    if state is None and (spec.scaled == "tensor" or _spans_ranks(spec, side.direction)):
        state = _state(builder, gather, local, side)
    if spec.row.family == "per_tensor" and side.direction == "columnwise":
        data, scale = _payload(builder, gather, local, Side("rowwise", side.spec, side.state))
        turned = builder.call(_aten.permute.default, data, [1, 0])
        length = prod(gather.shape[:-1]) * gather.ranks
        columns = builder.call(_aten.slice.Tensor, turned, 0, 0, gather.shape[-1])
        assert length % spec.row.alignment == 0
        parts = [builder.call(_aten.clone.default, columns, memory_format=torch.contiguous_format), scale]
    else:
        arguments = [] if state is None else [state]
        quantized = builder.call(_fxquant.quantize.default, local, side.spec, side.direction, *arguments)
        count = len(quantized.meta[builder.key])
        items = [builder.call(operator.getitem, quantized, index) for index in range(count)]
        common = (2 if spec.row.has_global_amax else 1) if _spans_ranks(spec, side.direction) else None
        parts = [
            item if index == common else _gathered(builder, gather, item, side.direction)
            for index, item in enumerate(items)
        ]
    gather.parts[key] = parts
    return parts


def _state(builder: Builder, gather: _Gather, local: fx.Node, side: Side) -> fx.Node:
    """Adds what a scale of the whole tensor is made of."""
    spec = QuantSpec.parse(side.spec)
    if spec.row.family == "per_tensor":
        largest = _reduced(builder, gather, builder.call(_fxquant.amax.default, local), "max")
        return builder.call(_fxquant.scale_from_amax.default, largest, side.spec)
    largest = _reduced(
        builder, gather, builder.call(_fxquant.amaxes_of.default, local, side.spec, side.direction), "max"
    )
    if spec.row.family == "nvfp4":
        return largest
    return builder.call(_fxquant.scale_from_amax.default, largest, side.spec)


def _spans_ranks(spec: QuantSpec, direction: str) -> bool:
    """Returns True for scales of columns, which go through the rows of all ranks."""
    return direction == "columnwise" and spec.scaled == "row"


def _gathered(builder: Builder, gather: _Gather, part: fx.Node, direction: str) -> fx.Node:
    """Adds the gather of a payload or of its scales, in the order that they have in the whole tensor."""
    value: Tensor = val(part)
    if value.ndim < 2:
        return part  # of the whole tensor
    rows, axis = prod(gather.shape[:-1]), 0 if direction == "rowwise" else 1
    runs, entries = rows // gather.run, value.shape[axis] * gather.run // rows
    narrow = value.dtype.itemsize == 1
    sent = builder.call(_aten.view.dtype, part, torch.uint8) if narrow else part
    gathered = builder.call(_collective.all_gather_into_tensor.default, sent, gather.ranks, gather.node.args[2])
    whole = builder.call(_collective.wait_tensor.default, gathered)
    other = value.shape[1 - axis]
    if axis == 0:
        shape, order = [gather.ranks, runs, entries, other], [1, 0, 2, 3]
        final = [value.shape[0] * gather.ranks, other]
    else:
        shape, order = [gather.ranks, other, runs, entries], [1, 2, 0, 3]
        final = [other, value.shape[1] * gather.ranks]
    if axis or runs > 1:
        whole = builder.call(_aten.permute.default, builder.call(_aten.reshape.default, whole, shape), order)
        whole = builder.call(_aten.reshape.default, whole, final)
    return builder.call(_aten.view.dtype, whole, value.dtype) if narrow else whole
