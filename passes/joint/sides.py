"""Quantizations by direction, and the tensors that lie in memory before them."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fxquant.kernels.operator import Side, traits_of
from fxquant.passes.graph.match import behind_views, readers
from fxquant.passes.graph.names import VIEWS, calls, fxquant_op, is_fxquant
from fxquant.passes.graph.values import val

_aten = torch.ops.aten
EXTERNAL = (
    _aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten._scaled_mm.default,
    _aten._scaled_dot_product_flash_attention.default, _aten._scaled_dot_product_flash_attention_backward.default,
    _aten._scaled_dot_product_cudnn_attention.default, _aten._scaled_dot_product_cudnn_attention_backward.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_efficient_attention_backward.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)  # fmt: skip
"""Operators that no kernel of Inductor's own computes."""


def sides_of(node: fx.Node) -> list[Side]:
    """The directions in which a node quantizes a tensor, its first argument; none if it does not quantize."""
    sides = traits_of(node).sides
    return [] if sides is None else sides(*node.args)


def measures(node: fx.Node) -> bool:
    """Returns True for an operator of probes, or a view that nothing else reads."""
    if calls(node, VIEWS):
        return all(map(measures, readers(node, VIEWS)))
    return fxquant_op(node).startswith("probe_")


def is_for_backward(node: fx.Node, of_backward: set[fx.Node]) -> bool:
    """Returns True for a quantization of what the forward has that the backward alone multiplies.

    A forward that is measured may read it too: for no longer than that.
    """
    users = [user for item in node.users for user in item.users]
    multiplied = [user for user in users if not measures(user)]
    return node not in of_backward and bool(multiplied) and all(user in of_backward for user in multiplied)


def in_memory(x: Any) -> bool:
    """Returns True if a tensor is a graph's input or the result of a GEMM or an attention, seen through views."""
    x = behind_views(x)
    if isinstance(x, fx.Node) and x.target is operator.getitem:
        x = x.args[0]
    if not isinstance(x, fx.Node):
        return False
    if is_fxquant(x, "scaled_mm"):  # with a bias of another dtype something elementwise follows
        return x.args[4] is None or val(x).dtype == torch.bfloat16
    return x.op in ("placeholder", "get_attr") or x.target in EXTERNAL
