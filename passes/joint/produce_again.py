"""Payloads that a kernel makes of tensors which the backward keeps anyway are made there once more, and not saved.

    h = norm(x, rstd, w)                                                            # in the forward
    row = fxquant.quantize(h, "per_tensor_e4m3", "rowwise", scale)
    column = fxquant.quantize(h, "per_tensor_e4m3", "columnwise", scale)            # of the backward, and saved
    # becomes, on the joint graph for CUDA
    row = fxquant.produce_quantize([x, rstd, w], "rms_norm rowwise=per_tensor_e4m3", [scale], [None], False)
    column = fxquant.produce_quantize([x, rstd, w], "rms_norm columnwise=per_tensor_e4m3", [None], [scale], False)

where the second runs in the backward, by the arithmetic of the first, so that both have the bits that one kernel for
both directions writes. The norm of a residual stream, whose backward keeps x and rstd, then costs one more read of x,
and so does the output of an attention, which lies in memory and is kept for that.

Left as they are: scales of lines, whose amaxes would be taken twice. Products of several large tensors (SiLU times a
factor), which it takes a read of each to make again, and GELU are made again with ``save="less"``, and where parameters
are float32 and autocast rounds them: beside these, their gradients and a residual stream in float32, memory is scarcer.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxquant.compat.device import capability
from fxquant.compat.private import prefer_recompute
from fxquant.compat.values import statically_known_true, upper_bound
from fxquant.formats import QuantSpec
from fxquant.kernels.cast.choice import supports
from fxquant.kernels.cast.producers import IDENTITY, JOINED_HEADS, PRODUCERS, CastSpec
from fxquant.kernels.linear.few_rows import MOST_TOKENS
from fxquant.passes.graph.builder import Builder, call_key, erase_unused, put_in_place, put_in_places
from fxquant.passes.graph.match import behind_views, readers
from fxquant.passes.graph.meta import RECOMPUTE
from fxquant.passes.graph.names import RESHAPES, SLICES, VIEWS, calls, is_fxquant
from fxquant.passes.graph.values import val
from fxquant.passes.joint.produced import NARROW, match_producer
from fxquant.passes.joint.scales import nodes_of_backward
from fxquant.passes.joint.sides import in_memory, is_for_backward, measures
from fxquant.passes.settings import Settings

_FAMILIES = ("per_tensor", "block", "mxfp8")
"""The formats whose scales are given, or made of what one kernel reads for a block."""


def produce_again(graph: fx.Graph, settings: Settings) -> int:
    """Rewrites a joint graph in place; returns how many quantizations the backward makes again."""
    # what is made again is Inductor's to make
    if settings.exact_recompute or settings.save not in ("quantized", "less"):
        return 0
    of_backward = nodes_of_backward(graph)
    at_a_price = settings.save == "less" or _rounds_parameters(graph)
    by_root: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in graph.find_nodes(op="call_function", target=torch.ops.fxquant.quantize.default):
        if _is_ours(node, settings):
            by_root[behind_views(node.args[0], RESHAPES)].append(node)
    count = 0
    for root, nodes in by_root.items():
        columns = [node for node in nodes if node.args[2] == "columnwise" and is_for_backward(node, of_backward)]
        if not columns or _is_checkpointed(root):
            continue
        if in_memory(root):
            if _is_kept(root, of_backward) and behind_views(root).op == "call_function":
                count += sum(map(_mark, columns))
        elif (maker := _made(root, nodes, of_backward, at_a_price)) is not None:
            views: list[Any] = [node.args[0] for node in nodes]
            count += maker.write([node for node in nodes if node not in columns], columns)
            erase_unused([*dict.fromkeys(views), root])
    graph.lint()
    return count


def _rounds_parameters(graph: fx.Graph) -> bool:
    """Returns True if a graph takes float32 matrices that it rounds only to quantize them, as weights in autocast."""
    return any(
        any(is_fxquant(reader, "quantize") for reader in readers(node))
        for node in graph.find_nodes(op="call_function", target=torch.ops.prims.convert_element_type.default)
        if behind_views(node.args[0]).op == "placeholder" and val(node.args[0]).dtype == torch.float32
    )


def _is_checkpointed(node: fx.Node) -> bool:
    """Returns True for a node that an activation checkpoint, or a policy of one, has a word about."""
    return RECOMPUTE in node.meta


def _is_ours(node: fx.Node, settings: Settings) -> bool:
    """Returns True for a quantization that Triton's casts know, of a matrix of more than a few rows."""
    x = val(node.args[0])
    if x.device.type != settings.device or x.ndim != 2 or x.dtype not in NARROW:
        return False
    row = QuantSpec.parse(str(node.args[1]))
    if row.row.family not in _FAMILIES or not supports(row):
        return False
    if row.row.family == "per_tensor" and len(node.args) < 4:
        return False
    some = upper_bound(x.shape[0]) > MOST_TOKENS and not any(statically_known_true(size == 0) for size in x.shape)
    return some and (x.device.type != "cuda" or capability(x.device) >= (8, 9))


def _is_kept(node: fx.Node, of_backward: set[fx.Node]) -> bool:
    """Returns True if the backward reads a tensor anyway, for something else than a product."""
    queue, seen = [behind_views(node)], set[fx.Node]()
    for source in queue:  # which grows
        for reader in readers(source, VIEWS):
            if reader in of_backward and not is_fxquant(reader):
                return True
            if reader not in seen and torch.Tag.pointwise in getattr(reader.target, "tags", ()):
                seen.add(reader)
                queue.append(reader)
    return False


def _mark(node: fx.Node) -> int:
    """Has the backward make a quantization again."""
    for part in (node, *node.users):
        prefer_recompute(part)
    return 1


@dataclass(frozen=True)
class _Made:
    """The producer that makes a tensor, of inputs that the backward keeps, and the amaxes of it that are recorded."""

    producer: str
    inputs: Sequence[fx.Node]
    recorded: Sequence[fx.Node]

    def write(self, rows: Sequence[fx.Node], columns: Sequence[fx.Node]) -> int:
        """Puts kernels of the producer in the places of quantizations; returns how many are made again."""
        produced_by: dict[Any, dict[int, fx.Node]] = {}
        recorded = self.recorded
        for node in (*rows, *columns):
            key = (*node.args[1:3], *map(_what, node.args[3:]))
            if key not in produced_by:
                produced_by[key], recorded = self._produce(node, recorded), ()
                produced: Any = produced_by[key][0].args[0]
                for view in produced.all_input_nodes:
                    if calls(view, RESHAPES):  # which the partitioner may save beside what it is a view of
                        prefer_recompute(view)
                if node in columns:
                    _mark(produced)
            put_in_places(produced_by[key], node)
        return len(columns)

    def _produce(self, node: fx.Node, recorded: Sequence[fx.Node]) -> dict[int, fx.Node]:
        """Adds the kernel that makes and quantizes the tensor in one direction; returns its parts by their place."""
        _, spec, direction, *state = node.args
        order = {node: i for i, node in enumerate(node.graph.nodes)}
        anchor = min((node, *recorded), key=order.__getitem__)
        for source in filter(None, state):
            _bring(source, anchor, order)  # type: ignore[arg-type]
        builder, kinds = Builder(anchor), PRODUCERS[self.producer].inputs
        inputs = [_shaped(builder, x, kind, node.args[0]) for x, kind in zip(self.inputs, kinds, strict=True)]
        by_direction: dict[str, Any] = {"rowwise": None, "columnwise": None, str(direction): QuantSpec.parse(str(spec))}
        states = [state if side == direction and state else [None] for side in by_direction]
        text = str(CastSpec(self.producer, **by_direction))
        produced = builder.call(torch.ops.fxquant.produce_quantize.default, inputs, text, *states, bool(recorded))
        parts = {i: builder.call(operator.getitem, produced, i) for i in range(len(val(produced)))}
        for amax in recorded:
            put_in_place(parts[len(parts) - 1], amax)
        return parts


def _made(root: fx.Node, nodes: Sequence[fx.Node], of_backward: set[fx.Node], at_a_price: bool) -> _Made | None:
    """Returns how a producer makes a tensor that is only quantized, of tensors that the backward keeps.

    It reads one large tensor, and takes no longer than that; any producer will do `at_a_price`.
    """
    users = [reader for reader in readers(root) if not measures(reader)]
    amaxes = [user for user in users if is_fxquant(user, "amax")]
    if len(nodes) + len(amaxes) != len(users):
        return None
    rows, length = val(nodes[0].args[0]).shape
    for name, producer in PRODUCERS.items():
        free = producer.matrices == 1 and not producer.slow
        if producer is IDENTITY or producer.parts or not (free or at_a_price):
            continue
        inputs = match_producer(producer, root, rows, length)
        large = [x for x, kind in zip(inputs or (), producer.inputs, strict=False) if kind in ("matrix", "heads")]
        if inputs is not None and all(_is_kept(x, of_backward) for x in large):
            for amax in amaxes if producer is JOINED_HEADS else ():  # of the same elements, which are in memory
                amax.args = inputs
            return _Made(name, inputs, [amax for amax in amaxes if _is_recorded(amax)])
    return None


def _shaped(builder: Builder, x: fx.Node, kind: str, matrix: Any) -> fx.Node:
    """Returns an input of a producer in its shape, that of a matrix which is quantized or of a vector for it."""
    rows, length = val(matrix).shape
    shape = {"matrix": [rows, length], "row": [rows, 1], "column": [length]}.get(kind)
    if shape is None or (
        val(x).ndim == len(shape) and all(map(statically_known_true, map(operator.eq, val(x).shape, shape)))
    ):
        return x
    if calls(matrix, RESHAPES):  # whose sizes are nodes where they are symbolic
        rows, length = matrix.args[1]
    shape = {"matrix": [rows, length], "row": [rows, 1], "column": [length]}[kind]
    return builder.call(torch.ops.aten.reshape.default, x, shape)


def _bring(source: fx.Node, anchor: fx.Node, order: dict[fx.Node, int]) -> None:
    """Moves a node, and all it is computed of, in front of another, which has no part in it."""
    if order[source] > order[anchor]:
        for other in source.all_input_nodes:
            _bring(other, anchor, order)
        anchor.prepend(source)
        order[source] = order[anchor]


def _is_recorded(amax: fx.Node) -> bool:
    """Returns True for an amax that goes into a state alone, and into no scale of its own tensor."""
    return all(is_fxquant(user, "record", "record_since") for user in amax.users)


def _what(state: Any) -> Any:
    """Returns a key that is equal for equal entries of one state, which each linear takes by itself."""
    return call_key(state.target, state.args, state.kwargs) if calls(state, SLICES) else state
