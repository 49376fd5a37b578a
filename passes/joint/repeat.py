"""What the backward of a joint graph computes again instead of reading what the forward has saved.

``quantized`` saves activations as they are multiplied in the backward, 8 bits or fewer an element. ``least`` lets the
backward quantize them again where that takes nothing but tensors that are saved anyway, and multiply again for the sum
of an attention's output and what it is added to.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor, fx

from fxquant.compat.private import compiles_backwards, must_recompute, save_without_version
from fxquant.compat.values import statically_known_true, upper_bound
from fxquant.kernels.linear.few_rows import MOST_TOKENS
from fxquant.passes.graph.match import behind_views, readers
from fxquant.passes.graph.names import VIEWS, is_fxquant
from fxquant.passes.graph.values import val
from fxquant.passes.joint.scales import nodes_of_backward
from fxquant.passes.settings import Settings


def mark_recompute(graph: fx.Graph, settings: Settings) -> int:
    """Marks what the backward computes again; returns how many nodes.

    Dequantized heads come from payloads, which take half as much; and an attention's output is saved in one order.
    """
    marked = {node for node in graph.nodes if is_fxquant(node, "dequantize_heads") or _lays_out_attention(node)}
    if settings.save == "least":
        marked.update(*products_to_repeat(graph).values())
    for node in marked:
        must_recompute(node)
    return len(marked)


def allow_later_writes(graph: fx.Graph, settings: Settings) -> int:
    """Has inputs that the backward changes saved without their version; returns how many.

    Otherwise a graph that is retained could not go backward again.
    """
    written = [] if compiles_backwards() else written_by_backward(graph)
    for node in written:
        save_without_version(node)
    return len(written)


def written_by_backward(graph: fx.Graph) -> list[fx.Node]:
    """The inputs of a joint graph that its backward changes: what delayed scaling records of gradients."""
    of_backward = nodes_of_backward(graph)
    writes = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    return [node.args[0] for node in writes if node in of_backward and node.args[0].op == "placeholder"]


def products_to_repeat(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """The products of a joint graph that are only added to something; each with all that is computed again with it.

    A product of K features takes K operations for each byte of it. So it is one that gives at least half as many as it
    takes, which the second product of a feed-forward network does not, and whose input is kept by others: of a decoder
    block the projection of attention's output, whose sum with the block's input need not be saved then. What it is
    added to is no such sum itself, or a backward would begin with all of them. Few rows have kernels that quantize as
    they read.
    """
    of_backward = nodes_of_backward(graph)
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


__all__ = ["allow_later_writes", "mark_recompute", "products_to_repeat", "written_by_backward"]
