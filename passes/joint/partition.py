"""Partition: what the forward saves for the backward, and what the two share. Then torch's partitioner does the cut.

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
again, so that a tensor which the backward quantizes again gets the bits that the forward gave it.

``quantized`` saves activations as they are multiplied in the backward, 8 bits or fewer an element. ``least`` lets the
backward quantize them again where that takes nothing but tensors that are saved anyway, and multiply again for the sum
of an attention's output and what it is added to.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.compat.patches import recomputable
from fxquant.compat.private import (
    CustomPartitionerFn,
    compiles_backwards,
    get_hash_for_files,
    min_cut_rematerialization_partition,
    must_recompute,
    must_save,
    save_without_version,
)
from fxquant.compat.values import statically_known_true, upper_bound
from fxquant.formats import QuantSpec
from fxquant.kernels.linear.few_rows import MOST_TOKENS
from fxquant.passes.graph.log import run_pass
from fxquant.passes.graph.match import behind_views, readers
from fxquant.passes.graph.names import VIEWS, is_fxquant
from fxquant.passes.graph.values import val
from fxquant.passes.joint.reuse import share_quantized
from fxquant.passes.joint.sides import in_memory

SAVE = ("quantized", "least")
"""What may be asked to be saved."""

_AMAX = {"quantize": "amax", "split_quantize": "split_amax"}
"""The operators that quantize, and those that take the amaxes of the same operands."""


class Partition(CustomPartitionerFn):
    """The partitioner of a training graph; `inner` (torch's min-cut unless given) is asked last."""

    def __init__(self, save: str = "quantized", inner: Any = None) -> None:
        self.save = save
        self.inner = inner

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        run_pass("share_quantized", share_quantized, gm.graph)
        run_pass("partition", share_scales, gm.graph)
        run_pass("partition", share_column_amaxes, gm.graph)
        for node in gm.graph.nodes:
            if is_fxquant(node, "dequantize_heads") or _lays_out_attention(node):
                must_recompute(node)  # of payloads, which take half as much, or of what is saved in another order
        for node in self.repeated(gm.graph):
            must_recompute(node)
        for node in [] if compiles_backwards() else written_by_backward(gm.graph):
            save_without_version(node)  # or a graph that is retained could not go backward again
        gm.recompile()
        again = [getattr(torch.ops.fxquant, name) for name in _AMAX] if self.save == "least" else []
        with recomputable(again) if again else contextlib.nullcontext():
            return (self.inner or min_cut_rematerialization_partition)(gm, joint_inputs, **kwargs)

    def repeated(self, graph: fx.Graph) -> list[fx.Node]:
        """What the backward computes again at the cost of a product."""
        return [*itertools.chain(*products_to_repeat(graph).values())] if self.save == "least" else []

    def uuid(self) -> Any:
        inner = None if self.inner is None else self.inner.uuid()
        if self.inner is not None and inner is None:
            return None
        return get_hash_for_files((__file__,), repr((self.save, inner, compiles_backwards())))


def written_by_backward(graph: fx.Graph) -> list[fx.Node]:
    """The inputs of a joint graph that its backward changes: what delayed scaling records of gradients."""
    of_backward = _of_backward(graph)
    writes = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    return [node.args[0] for node in writes if node in of_backward and node.args[0].op == "placeholder"]


def share_scales(graph: fx.Graph) -> int:
    """Rewrites a joint graph in place; returns how many quantizations got their tensor's one scale."""
    of_backward = _of_backward(graph)
    scales: dict[Any, fx.Node] = {}
    count = 0
    for node in list(graph.nodes):
        name = next((name for name in _AMAX if is_fxquant(node, name)), None)
        if name is None:
            continue
        operands = 2 if name == "split_quantize" else 1
        spec, _, *state = node.args[operands:]
        if not state and node not in of_backward and QuantSpec.parse(str(spec)).row.family == "per_tensor":
            key = (name, *node.args[:operands], spec)
            if key not in scales:
                scales[key] = scale_of(node, _AMAX[name], operands, spec)
            state = [scales[key]]
            node.args = (*node.args, *state)
            count += 1
        for value in state:
            source = _unviewed(value)
            if source.op == "call_function" and node not in of_backward:
                must_save(source)
    graph.lint()
    return count


def products_to_repeat(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """The products of a joint graph that are only added to something; each with all that is computed again with it.

    A product of K features takes K operations for each byte of it. So it is one that gives at least half as many as it
    takes, which the second product of a feed-forward network does not, and whose input is kept by others: of a decoder
    block the projection of attention's output, whose sum with the block's input need not be saved then. What it is
    added to is no such sum itself, or a backward would begin with all of them. Few rows have kernels that quantize as
    they read.
    """
    of_backward = _of_backward(graph)
    sums: set[fx.Node] = set()
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.find_nodes(op="call_function", target=torch.ops.fxquant.scaled_mm.default):
        (rows, given), made = val(node.args[0][0]).shape, val(node).shape[-1]
        if node in of_backward or not statically_known_true(given <= 2 * made) or upper_bound(rows) <= MOST_TOKENS:
            continue
        added = [reader for reader in readers(node) if reader not in of_backward]
        terms = {behind_views(term) for each in added for term in each.all_input_nodes}
        if not added or any(each.target is not torch.ops.aten.add.Tensor for each in added) or terms & sums:
            continue
        between: list[fx.Node] = []
        if all(_is_kept(part, of_backward, between) for part in node.args[0]):
            found[node] = [node, *_followed(added, of_backward), *between]
            sums.update(added)
    return found


def _is_kept(node: fx.Node, of_backward: set[fx.Node], between: list[fx.Node]) -> bool:
    """Whether the backward reads a tensor other than to quantize it, or can make it of such tensors and small ones.

    Adds what makes it of those to `between`.
    """
    node = behind_views(node)
    if node.op == "placeholder" or is_fxquant(node, "scale_from_amax"):
        return True
    if any(reader in of_backward and not is_fxquant(reader) for reader in readers(node, VIEWS)):
        return True
    quantized = is_fxquant(node, "quantize")  # and its state is saved
    made = quantized or node.target in (operator.getitem, torch.ops.aten.clone.default) or _is_elementwise(node)
    between.append(node)
    sources = node.all_input_nodes[:1] if quantized else node.all_input_nodes
    return made and all(_is_kept(source, of_backward, between) for source in sources)


def _followed(sums: Sequence[fx.Node], of_backward: set[fx.Node]) -> list[fx.Node]:
    """Sums and what a forward makes of them element by element with what is small, as a norm does.

    torch would save the last of many such operations rather than compute all of them again.
    """
    made, size = list(sums), val(sums[0]).numel()
    for node in made:  # which grows
        for reader in node.users:
            known = [val(each) for each in reader.all_input_nodes if each not in made]
            small = all(isinstance(x, Tensor) and statically_known_true(8 * x.numel() <= size) for x in known)
            if small and _is_elementwise(reader) and reader not in of_backward and reader not in made:
                made.append(reader)
    return made


def _is_elementwise(node: fx.Node) -> bool:
    """Whether an operator computes each element by itself, and the same when it is computed again."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


def _of_backward(graph: fx.Graph) -> set[fx.Node]:
    """The nodes of a joint graph that the gradients of its results go into."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if (node.op == "placeholder" and "tangents" in str(node.target)) or found & set(node.all_input_nodes):
            found.add(node)
    return found


def share_column_amaxes(graph: fx.Graph) -> int:
    """Rewrites a joint graph in place; returns how many weights of groups have the amaxes of their columns taken early.

    The kernel that scales rows has them for nothing, and the backward would read a weight once more for them.
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
    """The third result of a rowwise quantization of a batch, which takes amaxes along from now on; it is saved."""
    graph, last = node.graph, 2
    if not is_fxquant(node, "split_quantize_and_amax"):
        x, _, spec, _ = node.args
        node.target = torch.ops.fxquant.split_quantize_and_amax.default
        node.args = (x, spec)
        value = val(x).new_empty([val(x).shape[0], val(x).shape[-1]], dtype=torch.float32)
        node.meta = {**node.meta, "val": [*val(node), value]}
    for item in node.users:
        if item.target is operator.getitem and item.args[1] == last:
            return item
    with graph.inserting_after(node):
        item = graph.call_function(operator.getitem, (node, last))
    item.meta = {key: kept for key, kept in node.meta.items() if key not in _OF_THE_NODE} | {"val": val(node)[last]}
    must_save(item)
    return item


def _lays_out_attention(node: fx.Node) -> bool:
    """Whether a node copies an attention's output into the order that a linear wants, which does not quantize it."""
    if node.target is not torch.ops.aten.clone.default:
        return False
    source = behind_views(node.args[0])
    if isinstance(source, fx.Node) and source.target is operator.getitem:
        source = source.args[0]
    of_attention = isinstance(source, fx.Node) and any(
        is_fxquant(source, name) for name in ("dequantize_heads", "attention_forward")
    )
    return of_attention and not any(is_fxquant(reader) for reader in readers(node, VIEWS))


def scale_of(node: fx.Node, amax: str, operands: int, spec: Any) -> fx.Node:
    """Adds the amax of what a node quantizes, and the scale that it gives."""
    graph = node.graph
    tensors = node.args[:operands]
    groups = val(node)[1].shape
    value = val(tensors[0]).new_empty(groups, dtype=torch.float32)
    with graph.inserting_before(node):
        largest = graph.call_function(getattr(torch.ops.fxquant, amax).default, tensors)
        scale = graph.call_function(torch.ops.fxquant.scale_from_amax.default, (largest, spec))
    for made in (largest, scale):
        made.meta = {key: item for key, item in node.meta.items() if key not in _OF_THE_NODE} | {"val": value}
    return scale


_OF_THE_NODE = ("val", "tensor_meta", "recompute", "ac_graph_id", "eager_input_vals")
"""What of a node's meta does not hold for others of the same origin."""


def _unviewed(node: fx.Node) -> fx.Node:
    """The tensor that a node is a view of: partitioners always make views again."""
    while node.op == "call_function" and getattr(node.target, "is_view", False) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


__all__ = ["SAVE", "Partition", "products_to_repeat", "scale_of", "share_scales", "written_by_backward"]
