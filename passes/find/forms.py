"""The forms a matmul can take in a captured graph, and the one way to put another subgraph in its place.

To add a form: write a function that binds the operator's arguments and calls `contract` (see products.py), and give it
a row in `FORMS`, and in `FUNCTIONS` where Dynamo captures a function that is not a method of the same name.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from fxquant.compat.private import OpOverload, OpOverloadPacket, flex_attention_op, torch_grouped_mm
from fxquant.passes.find import convolutions, grouped, products
from fxquant.passes.find.attention.flex import Flex
from fxquant.passes.find.attention.fused import ScaledDotProduct
from fxquant.passes.find.facts import Match
from fxquant.passes.find.mha import multi_head
from fxquant.passes.find.site import Arguments
from fxquant.passes.graph.builder import Builder, erase_unused, put_in_place
from fxquant.passes.graph.names import op_name

Form = Callable[..., Match | Arguments | None]

FORMS: dict[str, Form] = {
    "linear": products.linear,
    "matmul": products.matmul,
    "__matmul__": products.matmul,
    "linalg_matmul": products.matmul,
    "mm": products.matmul,
    "bmm": products.matmul,
    "mv": products.matmul,
    "dot": products.matmul,
    "vdot": products.matmul,
    "inner": products.inner,
    "addmm": products.addmm,
    "addbmm": products.addmm,
    "baddbmm": products.baddbmm,
    "addmv": products.addmv,
    "addmm_": partial(products.addmm, in_place=True),
    "addbmm_": partial(products.addmm, in_place=True),
    "baddbmm_": partial(products.baddbmm, in_place=True),
    "addmv_": partial(products.addmv, in_place=True),
    "einsum": products.einsum,
    "tensordot": products.tensordot,
    "chain_matmul": products.chain_matmul,
    "linalg_multi_dot": products.chain_matmul,
    "bilinear": products.bilinear,
    "conv1d": convolutions.Conv,
    "conv2d": convolutions.Conv,
    "conv3d": convolutions.Conv,
    "convolution": convolutions.Convolution,
    "conv_transpose1d": convolutions.conv_transpose,
    "conv_transpose2d": convolutions.conv_transpose,
    "conv_transpose3d": convolutions.conv_transpose,
    "_grouped_mm": grouped.grouped_mm,
    "transformers::grouped_mm_fallback": grouped.grouped_mm,
    "scaled_dot_product_attention": ScaledDotProduct,
    "flex_attention": Flex,
    "multi_head_attention_forward": multi_head,
}
"""The forms by the names of methods and ATen operators, custom ones with their namespace."""

FUNCTIONS: dict[Callable[..., Any], str] = {
    F.linear: "linear",
    operator.matmul: "matmul",
    operator.imatmul: "matmul",
    torch.matmul: "matmul",
    torch.linalg.matmul: "matmul",
    torch.mm: "mm",
    torch.bmm: "bmm",
    torch.mv: "mv",
    torch.dot: "dot",
    torch.vdot: "vdot",
    torch.inner: "inner",
    torch.addmm: "addmm",
    torch.addbmm: "addbmm",
    torch.baddbmm: "baddbmm",
    torch.addmv: "addmv",
    torch.einsum: "einsum",
    torch.tensordot: "tensordot",
    torch.chain_matmul: "chain_matmul",
    torch.linalg.multi_dot: "linalg_multi_dot",
    torch.bilinear: "bilinear",
    torch.conv1d: "conv1d",
    torch.conv2d: "conv2d",
    torch.conv3d: "conv3d",
    torch.conv_transpose1d: "conv_transpose1d",
    torch.conv_transpose2d: "conv_transpose2d",
    torch.conv_transpose3d: "conv_transpose3d",
    torch_grouped_mm: "_grouped_mm",
    F.scaled_dot_product_attention: "scaled_dot_product_attention",
    flex_attention_op: "flex_attention",
    F.multi_head_attention_forward: "multi_head_attention_forward",
}
"""The functions that Dynamo captures, with the names of their forms."""


KEYWORDS = {
    "mm": {"mat2": "other"},
    "bmm": {"mat2": "other"},
    "mv": {"vec": "other"},
    "dot": {"tensor": "other"},
    "addbmm": {"batch1": "mat1", "batch2": "mat2"},
    "addbmm_": {"batch1": "mat1", "batch2": "mat2"},
}
"""Keywords of operators, with the names that their forms have for them where these differ."""


def form_name(node: fx.Node) -> str:
    """The name of a node's form in `FORMS`, or another name."""
    target = node.target
    by_name = isinstance(target, (str, OpOverload, OpOverloadPacket))
    return op_name(node) if by_name else FUNCTIONS.get(target, "")  # type: ignore[arg-type]


def arguments_of(node: fx.Node, form: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A node's arguments, with the keywords of its form."""
    names = KEYWORDS.get(form, {})
    return node.args, {names.get(key, key): value for key, value in node.kwargs.items()}


def apply_match(match: Match, gemm: Callable[..., fx.Node]) -> fx.Node:
    """Rewrites a match: `gemm(builder, index, lhs, rhs, bias)` adds each product. Returns what replaces its node."""
    assert match.emit is not None, match
    node, builder = match.node, Builder(match.node)
    result = match.emit(builder, partial(gemm, builder))
    inputs = node.all_input_nodes
    put_in_place(result, node)
    erase_unused(inputs)  # such as the weights that were gathered for each row
    return result


__all__ = ["FORMS", "FUNCTIONS", "KEYWORDS", "Form", "apply_match", "arguments_of", "form_name"]
