"""The choice of what the backward of a joint graph computes again instead of reading what the forward has saved.

``quantized`` saves activations as they are multiplied in the backward, 8 bits or fewer an element. ``least`` lets the
backward quantize them again where that takes nothing but tensors that are saved anyway, and multiply again for the sum
of an attention's output and what it is added to.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor, fx

from fxquant.compat.patches import save_beside_autograd
from fxquant.compat.private import prefer_recompute
from fxquant.compat.values import statically_known_true, upper_bound
from fxquant.kernels.linear.few_rows import MOST_TOKENS
from fxquant.passes.graph.match import behind_views, readers
from fxquant.passes.graph.names import VIEWS, is_fxquant
from fxquant.passes.graph.values import val
from fxquant.passes.joint.scales import nodes_of_backward
from fxquant.passes.joint.sides import measures
from fxquant.passes.settings import Settings

_ROUNDS = (torch.ops.prims.convert_element_type.default, torch.ops.aten._to_copy.default)
_PRODUCTS = ("scaled_mm", "grouped_scaled_mm")
"""Products whose second operand is the weight in the forward."""


def mark_recompute(graph: fx.Graph, settings: Settings) -> int:
    """Marks the nodes that the backward computes again; returns how many.

    Dequantized heads come from payloads, which take half as much; an attention's output is saved in one order; and a
    parameter is rounded again rather than saved, quantized for the backward.
    """
    marked = {node for node in graph.nodes if is_fxquant(node, "dequantize_heads") or _lays_out_attention(node)}
    marked.update(node for node in graph.nodes if rounds_weight(node))
    if settings.save == "least":
        marked.update(*products_to_repeat(graph).values())
    for node in marked:
        prefer_recompute(node)
    return len(marked)


def save_state_itself(graph: fx.Graph, settings: Settings) -> int:
    """Marks the state that the backward records into, to be handed to it as it is; returns how many inputs are marked.

    A tensor that autograd saves may come back as a copy, which hooks have made, and must not be written in between.
    """
    saved = recorded_into(graph)
    for node in saved:
        save_beside_autograd(node)
    return len(saved)


def recorded_into(graph: fx.Graph) -> list[fx.Node]:
    """Returns the inputs of a joint graph that its backward changes, and the step of delayed scaling's records."""
    of_backward = nodes_of_backward(graph)
    writes = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    inputs = [node.args[0] for node in writes if node in of_backward]
    inputs += [node.args[1] for node in graph.nodes if is_fxquant(node, "record_since")]
    return [node for node in dict.fromkeys(inputs) if node.op == "placeholder"]


def products_to_repeat(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Returns the products of a joint graph that are only added to something, each with all that is repeated with it.

    A product of K features costs K operations for each of its bytes. So it has at least half as many output as input
    features, unlike the second product of a feed-forward network, and others keep its input. In a decoder block that is
    the projection of attention's output, whose sum with the block's input then need not be saved. It is not added to
    another such sum, or a backward would begin with all of them. Few rows have kernels that quantize as they read.
    """
    of_backward = nodes_of_backward(graph)
    sums: set[fx.Node] = set()
    repeated: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.find_nodes(op="call_function", target=torch.ops.fxquant.scaled_mm.default):
        (rows, inner), outer = val(node.args[0][0]).shape, val(node).shape[-1]
        if node in of_backward or not statically_known_true(inner <= 2 * outer) or upper_bound(rows) <= MOST_TOKENS:
            continue
        added = [reader for reader in readers(node) if reader not in of_backward]
        terms = {behind_views(term) for reader in added for term in reader.all_input_nodes}
        if not added or any(reader.target is not torch.ops.aten.add.Tensor for reader in added) or terms & sums:
            continue
        between: list[fx.Node] = []
        if all(_is_kept(part, of_backward, between) for part in node.args[0]):
            repeated[node] = [node, *_followed(added, of_backward), *between]
            sums.update(added)
    return repeated


def _is_kept(node: fx.Node, of_backward: set[fx.Node], between: list[fx.Node]) -> bool:
    """Returns True if the backward keeps this tensor anyway, or can recompute it from kept tensors and small ones.

    Adds the nodes that recompute it to `between`.
    """
    node = behind_views(node)
    if node.op == "placeholder" or is_fxquant(node, "scale_from_amax"):
        return True
    if any(reader in of_backward and not is_fxquant(reader) for reader in readers(node, VIEWS)):
        return True
    quantized = is_fxquant(node, "quantize")  # and its state is saved
    cheap = quantized or node.target in (operator.getitem, torch.ops.aten.clone.default) or _is_elementwise(node)
    between.append(node)
    sources = node.all_input_nodes[:1] if quantized else node.all_input_nodes
    return cheap and all(_is_kept(source, of_backward, between) for source in sources)


def _followed(sums: Sequence[fx.Node], of_backward: set[fx.Node]) -> list[fx.Node]:
    """Returns the sums and what the forward computes of them elementwise with small tensors, as a norm does.

    torch would save the last of many such operations rather than compute all of them again.
    """
    followed, size = list(sums), val(sums[0]).numel()
    for node in followed:  # which grows
        for reader in node.users:
            others = [val(x) for x in reader.all_input_nodes if x not in followed]
            small = all(isinstance(x, Tensor) and statically_known_true(8 * x.numel() <= size) for x in others)
            if small and _is_elementwise(reader) and reader not in of_backward and reader not in followed:
                followed.append(reader)
    return followed


def _is_elementwise(node: fx.Node) -> bool:
    """Returns True if an operator computes each element by itself, and the same when it runs again."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


def rounds_weight(node: fx.Node) -> bool:
    """Returns True for a cast of a graph's input to 16 bits, as under autocast, that is the weight of a product.

    The partitioner would not compute it again, since no kernel of Inductor's reads it.
    """
    if node.target not in _ROUNDS or val(node).dtype.itemsize != 2 or behind_views(node.args[0]).op != "placeholder":
        return False
    quantizations = list(readers(node, VIEWS))
    if not all(is_fxquant(reader) or measures(reader) for reader in quantizations):
        return False
    products = [(user, item) for quantized in quantizations for item in quantized.users for user in item.users]
    return any(is_fxquant(user, *_PRODUCTS) and item in user.args[1] for user, item in products)  # type: ignore[operator]


def _lays_out_attention(node: fx.Node) -> bool:
    """Returns True if a node copies an attention's output for a linear that does not quantize it."""
    if node.target is not torch.ops.aten.clone.default:
        return False
    source = behind_views(node.args[0])
    if isinstance(source, fx.Node) and source.target is operator.getitem:
        source = source.args[0]
    of_attention = isinstance(source, fx.Node) and is_fxquant(source, "dequantize_heads", "attention_forward")
    return of_attention and not any(is_fxquant(reader) for reader in readers(node, VIEWS))
