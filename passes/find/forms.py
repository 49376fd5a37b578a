"""The forms a matmul can take in a captured graph, and the one way to put another subgraph in its place.

To add a form: write a function that binds the op's arguments and calls `contract` (see forms_products.py), and give it
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
from fxquant.passes.find import products
from fxquant.passes.find.attention import fused as attention
from fxquant.passes.find.attention.flex import flex
from fxquant.passes.find.contraction import Site
from fxquant.passes.find.facts import Gemm2d, Match
from fxquant.passes.graph.builder import Builder, erase_unused, put_in_place
from fxquant.passes.graph.names import op_name

Form = Callable[..., Match | None]

FORMS: dict[str, Form] = {
    "linear": products.linear,
    "matmul": products.matmul,
    "__matmul__": products.matmul,
    "linalg_matmul": products.matmul,
    "mm": products.mm,
    "bmm": products.mm,
    "mv": products.mv,
    "dot": products.dot,
    "vdot": products.dot,
    "inner": products.inner,
    "addmm": products.addmm,
    "addbmm": products.addbmm,
    "baddbmm": products.baddbmm,
    "addmv": products.addmv,
    "addmm_": partial(products.addmm, in_place=True),
    "addbmm_": partial(products.addbmm, in_place=True),
    "baddbmm_": partial(products.baddbmm, in_place=True),
    "addmv_": partial(products.addmv, in_place=True),
    "einsum": products.einsum,
    "tensordot": products.tensordot,
    "chain_matmul": products.chain_matmul,
    "linalg_multi_dot": products.chain_matmul,
    "bilinear": products.bilinear,
    "conv1d": products.conv,
    "conv2d": products.conv,
    "conv3d": products.conv,
    "convolution": products.convolution,
    "conv_transpose1d": products.conv_transpose,
    "conv_transpose2d": products.conv_transpose,
    "conv_transpose3d": products.conv_transpose,
    "_grouped_mm": products.grouped_mm,
    "transformers::grouped_mm_fallback": products.grouped_mm,
    "scaled_dot_product_attention": attention.fused,
    "flex_attention": flex,
    "multi_head_attention_forward": attention.multi_head,
}
"""By name: what methods and ATen ops are called (custom ops with their namespace)."""

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
"""The functions that Dynamo captures, with the name of their form."""


def form_of(node: fx.Node) -> Form | None:
    """The form of a node, if its target has one."""
    target = node.target
    if isinstance(target, (str, OpOverload, OpOverloadPacket)):
        return FORMS.get(op_name(node))
    return FORMS.get(FUNCTIONS.get(target, ""))


def apply_match(match: Match, gemm: Callable[..., fx.Node]) -> fx.Node:
    """Rewrites a match: `gemm(builder, index, lhs, rhs, bias)` adds each product. Returns what replaces its node."""
    assert match.emit is not None, match
    node, builder = match.node, Builder(match.node)
    result = match.emit(builder, partial(gemm, builder))
    inputs = node.all_input_nodes
    put_in_place(result, node)
    erase_unused(inputs)  # such as the weights that were gathered for each row
    return result


__all__ = ["FORMS", "FUNCTIONS", "Form", "Gemm2d", "Site", "apply_match", "form_of"]
