"""A linear that wants the result of an attention quantized takes the payload that the attention has.

    o = fxquant.dequantize_heads([data, scale], "per_tensor_e4m3", 1, False, [S, D], bf16)      # [B, H, S, D]
    row = fxquant.quantize(view(transpose(o, 1, 2), [B * S, H * D]), "per_tensor_e4m3", "rowwise")
    # becomes
    row = [view(transpose(data, 1, 2), [B * S, H * D]), scale]

and for `columnwise` the same bytes transposed. This goes for the output of an attention and the linear behind it, and
in the backward for the gradients of its operands and the linears in front of it.

A second quantization would give the same payload: each value is a few bits times one scale, and the rounding of what
is between (2^-9 in bfloat16) is far less than half a step of FP8. Its scale would be that of the rounded amax; the one
that is kept is exact. Of scales that are powers of two the second may be half the first, with elements twice as large.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxquant.compat.private import prefer_recompute
from fxquant.compat.values import statically_known_true
from fxquant.formats import QuantSpec
from fxquant.passes.graph.builder import Builder, erase_unused, put_in_places
from fxquant.passes.graph.considered import allowed
from fxquant.passes.graph.names import SAME_ELEMENTS, calls, is_fxquant
from fxquant.passes.graph.values import val
from fxquant.passes.settings import Settings

_aten = torch.ops.aten


def reuse_attention_payload(graph: fx.Graph, settings: Settings) -> int:
    """Rewrites a graph in place, joint or of one direction; returns how many quantizations went away."""
    count = 0
    for node in list(graph.nodes):
        if is_fxquant(node, "quantize") and len(node.args) == 3:
            moves, source = _behind(node.args[0])
            if source is not None and allowed(node, "reuse_attention_payload", _difference(node, source, moves[-1])):
                _share(node, source, moves)
                count += 1
    graph.lint()
    return count


def _difference(node: fx.Node, source: fx.Node, matrix: fx.Node) -> str:
    """Returns why a quantization of a matrix is not that of an attention; empty if it is."""
    if source.args[1] != node.args[1]:
        return f"the attention beside it quantizes to {source.args[1]}"
    return "" if val(source).dtype == val(matrix).dtype else "it is cast to another dtype on the way"


def _behind(node: Any) -> tuple[list[fx.Node], fx.Node | None]:
    """Returns the moves from a dequantization of heads to a node, and that dequantization if there is one."""
    moves: list[fx.Node] = []
    while calls(node, SAME_ELEMENTS):
        moves.insert(0, node)
        node = node.args[0]
    if not moves or not isinstance(node, fx.Node) or not is_fxquant(node, "dequantize_heads") or node.args[3]:
        return moves, None
    row, last = QuantSpec.parse(str(node.args[1])).row, val(moves[-1]).shape[-1]
    return moves, node if row.family == "per_tensor" and statically_known_true(last % row.alignment == 0) else None


def _share(node: fx.Node, source: fx.Node, moves: list[fx.Node]) -> None:
    """Replaces a quantization by the parts of the dequantized tensor, moved as that was."""
    builder = Builder(node)
    data, scale = source.all_input_nodes[:2]
    spec, dtype = QuantSpec.parse(str(node.args[1])), val(data).dtype

    def add(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        added = builder.call(target, *args, **kwargs)
        added.meta |= {key: node.meta[key] for key in ("ac_graph_id",) if key in node.meta}
        prefer_recompute(added)  # of what the attention saves: nothing else is saved for the linear
        return added

    # as bytes: no kernel has to know the format, and none of Triton's own FP8 stores is transposed
    payload = add(_aten.view.dtype, data, torch.uint8)
    width = val(source).shape[-1]
    if val(payload).shape[-1] != width:
        payload = add(_aten.slice.Tensor, payload, -1, 0, width)
    for move in moves:
        payload = add(move.target, payload, *move.args[1:], **move.kwargs)
    if node.args[2] == "columnwise":
        payload = add(torch.ops.fxquant.transpose_codes.default, payload, spec.row.alignment)
    elif not val(payload).is_contiguous():
        payload = add(_aten.clone.default, payload, memory_format=torch.contiguous_format)
    parts = (add(_aten.view.dtype, payload, dtype), scale)
    put_in_places(parts, node)
    erase_unused(moves)
