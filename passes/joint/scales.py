"""The scales and amaxes of a joint graph: each is made once, in the forward, and saved for the backward.

    row = fxquant.quantize(w, "per_tensor_e4m3", "rowwise")          # in the forward
    column = fxquant.quantize(w, "per_tensor_e4m3", "columnwise")    # in the backward
    # becomes, on the joint graph
    scale = fxquant.scale_from_amax(fxquant.amax(w), "per_tensor_e4m3")    # once, and saved
    row = fxquant.quantize(w, "per_tensor_e4m3", "rowwise", scale)
    column = fxquant.quantize(w, "per_tensor_e4m3", "columnwise", scale)

and of experts' weights that are scaled by row and, in the backward, by column:

    *row, amax = fxquant.split_quantize_and_amax(w, "per_row_e4m3")         # one read gives the amaxes of both
    column = fxquant.split_quantize(w, None, "per_row_e4m3", "columnwise", amax)

Whatever a quantization takes besides its tensor, a scale or random numbers' seed and step, is saved and never computed
again, so that a tensor which the backward quantizes again gets the bits that the forward gave it. So is what comes from
state that the forward changes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.compat.patches import must_save
from fxquant.compat.values import on_fakes
from fxquant.formats import QuantSpec
from fxquant.kernels.operator import traits_of
from fxquant.passes.graph.builder import Builder
from fxquant.passes.graph.match import readers
from fxquant.passes.graph.meta import VAL, inherited
from fxquant.passes.graph.names import VIEWS, is_fxquant
from fxquant.passes.graph.values import val
from fxquant.passes.joint.sides import in_memory
from fxquant.passes.settings import Settings

_WRITES = (torch.ops.aten.copy_.default, torch.ops.aten.copy.default)
"""The second where torch writes an input behind the graph, which returns its new value."""


def save_scales(graph: fx.Graph, settings: Settings) -> int:
    """Gives quantizations of one tensor in a joint graph one scale; returns how many got it."""
    of_backward = nodes_of_backward(graph)
    scales: dict[Any, fx.Node] = {}
    count = 0
    for node in list(graph.nodes):
        traits = traits_of(node)
        if traits.both is None:
            continue
        spec, _, *state = node.args[traits.operands :]
        if not state and node not in of_backward and QuantSpec.parse(str(spec)).row.family == "per_tensor":
            key = (node.target, *node.args[: traits.operands], spec)
            if key not in scales:
                scales[key] = scale_of(node, spec)
            state = [scales[key]]
            node.args = (*node.args, *state)
            count += 1
        for value in state:
            source = _unviewed(value)
            if source.op == "call_function" and node not in of_backward:
                must_save(source)
    for node in _of_overwritten_inputs(graph, of_backward):
        must_save(node)
    graph.lint()
    return count


def _of_overwritten_inputs(graph: fx.Graph, of_backward: set[fx.Node]) -> Iterator[fx.Node]:
    """Yields what the forward computes of inputs, such as a step, that it changes before the backward runs."""
    writes = [node for node in graph.nodes if node.target in _WRITES and node not in of_backward]
    written = dict.fromkeys(write.args[0] for write in writes)
    for reader in (user for node in written if node.op == "placeholder" for user in readers(node, VIEWS)):
        if reader.op != "call_function" or reader in of_backward or reader in writes:
            continue
        if isinstance(val(reader), Tensor):
            yield reader
        else:
            yield from (user for user in reader.users if user.target is operator.getitem)


def save_column_amaxes(graph: fx.Graph, settings: Settings) -> int:
    """Takes the amaxes of columns of groups' weights in the forward of a joint graph; returns for how many weights.

    The kernel that scales rows has them for nothing; the backward would read the weight once more for them.
    """
    by_row: dict[fx.Node, fx.Node] = {}
    count = 0
    for node in list(graph.nodes):
        if not is_fxquant(node, "split_quantize") or len(node.args) > 4:
            continue
        x, offs, spec, direction = node.args
        if offs is not None or not in_memory(x) or QuantSpec.parse(str(spec)).row.family != "per_row":
            continue
        if direction == "rowwise":
            by_row.setdefault(x, node)
        elif x in by_row:
            node.args = (*node.args, _column_amax(by_row[x]))
            count += 1
    graph.lint()
    return count


def _column_amax(node: fx.Node) -> fx.Node:
    """Has a rowwise quantization of a batch take the amaxes of columns along. Returns them, its third result, saved."""
    last = 2
    if not is_fxquant(node, "split_quantize_and_amax"):
        x, _, spec, _ = node.args
        node.target = torch.ops.fxquant.split_quantize_and_amax.default
        node.args = (x, spec)
        with on_fakes(val(x)):
            value = val(x).new_empty([val(x).shape[0], val(x).shape[-1]], dtype=torch.float32)
        node.meta = {**node.meta, VAL: [*val(node), value]}
    for item in node.users:
        if item.target is operator.getitem and item.args[1] == last:
            return item
    with node.graph.inserting_after(node):
        item = node.graph.call_function(operator.getitem, (node, last))
    item.meta = inherited(node) | {VAL: val(node)[last]}
    must_save(item)
    return item


def scale_of(node: fx.Node, spec: Any) -> fx.Node:
    """Adds the amax of a node's operands, and the scale that it gives, which is returned."""
    traits, builder = traits_of(node), Builder(node)
    assert traits.amax is not None
    largest = builder.call(traits.amax.target, *node.args[: traits.operands])
    return builder.call(torch.ops.fxquant.scale_from_amax.default, largest, spec)


def _unviewed(node: fx.Node) -> fx.Node:
    """Returns the tensor that a node is a view of: partitioners always compute views again."""
    while node.op == "call_function" and getattr(node.target, "is_view", False) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def nodes_of_backward(graph: fx.Graph) -> set[fx.Node]:
    """Returns the nodes of a joint graph, or of a backward, that depend on the gradients of its results."""
    of_backward: set[fx.Node] = set()
    for node in graph.nodes:
        if (node.op == "placeholder" and "tangents" in str(node.target)) or of_backward & set(node.all_input_nodes):
            of_backward.add(node)
    return of_backward
