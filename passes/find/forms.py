"""The forms a matmul can take in a captured graph, and the one way to put another subgraph in its place.

To add a form: write a function that binds the operator's arguments and calls `contract` (see products.py), and give it
a row in `FORMS`; functions that Dynamo captures stand in `FUNCTIONS` too.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from fxquant.compat.private import OpOverload, OpOverloadPacket, flex_attention_op, torch_grouped_mm
from fxquant.decisions import SkipReason
from fxquant.passes.find import convolutions, grouped, products
from fxquant.passes.find.attention.flex import Flex
from fxquant.passes.find.attention.fused import ScaledDotProduct
from fxquant.passes.find.facts import Match
from fxquant.passes.find.mha import multi_head
from fxquant.passes.find.opaque import refused
from fxquant.passes.find.site import Arguments, Site
from fxquant.passes.graph.builder import Builder, erase_unused, put_in_place
from fxquant.passes.graph.names import op_name

Form = Callable[..., Match | Arguments | None]

FORMS: dict[str, Form] = {
    "linear": products.linear,
    **dict.fromkeys("matmul imatmul __matmul__ linalg_matmul mm bmm mv dot vdot".split(), products.matmul),
    "__rmatmul__": products.rmatmul,
    "inner": products.inner,
    "linalg_vecdot": products.vecdot,
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
    **dict.fromkeys(("chain_matmul", "linalg_multi_dot"), products.chain_matmul),
    "bilinear": products.bilinear,
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), convolutions.Conv),
    "convolution": convolutions.convolution,
    **dict.fromkeys((f"conv_transpose{axes}d" for axes in (1, 2, 3)), convolutions.conv_transpose),
    **dict.fromkeys(("_grouped_mm", "transformers::grouped_mm_fallback"), grouped.grouped_mm),
    "scaled_dot_product_attention": ScaledDotProduct,
    "flex_attention": Flex,
    "multi_head_attention_forward": multi_head,
}
"""The forms by the names of functions, methods and ATen operators, custom ones with their namespace."""

FUNCTIONS: frozenset[Any] = frozenset((
    F.linear, operator.matmul, operator.imatmul, torch.matmul, torch.linalg.matmul, torch.mm, torch.bmm, torch.mv,
    torch.dot, torch.vdot, torch.linalg.vecdot, torch.inner, torch.addmm, torch.addbmm, torch.baddbmm, torch.addmv,
    torch.addmv_, torch.einsum, torch.tensordot, torch.chain_matmul, torch.linalg.multi_dot, torch.bilinear,
    torch.conv1d, torch.conv2d, torch.conv3d, torch.convolution, torch.conv_transpose1d, torch.conv_transpose2d,
    torch.conv_transpose3d, torch_grouped_mm, F.scaled_dot_product_attention, flex_attention_op,
    F.multi_head_attention_forward,
))  # fmt: skip
"""The functions that Dynamo captures: a function of a user's own may have the name of a form."""

_KEYWORDS = {
    "mm": {"mat2": "other"},
    "bmm": {"mat2": "other"},
    "mv": {"vec": "other"},
    "dot": {"tensor": "other"},
    "addbmm": {"batch1": "mat1", "batch2": "mat2"},
    "addbmm_": {"batch1": "mat1", "batch2": "mat2"},
}
"""Keywords of operators, with the names that their forms have for them where these differ."""


def form_name(node: fx.Node) -> str:
    """Returns the name of a node's form in `FORMS`, or a name that is not there."""
    if node.op not in ("call_function", "call_method"):  # an input may have any name
        return ""
    named = isinstance(node.target, (str, OpOverload, OpOverloadPacket)) or node.target in FUNCTIONS
    return op_name(node) if named else ""


def arguments_of(node: fx.Node, form: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns a node's arguments, with the keywords of its form."""
    names = _KEYWORDS.get(form, {})
    return node.args, {names.get(key, key): value for key, value in node.kwargs.items()}


def read_form(site: Site, form: str, tensors: Sequence[fx.Node]) -> Match | None:
    """Describes a node, which reads these tensors, by its form, or says that its arguments are not ones of the form."""
    args, kwargs = arguments_of(site.node, form)
    try:
        bound = inspect.signature(FORMS[form]).bind(site, *args, **kwargs)
        if "out" in kwargs:  # forms that take further factors by name do not refuse it
            raise TypeError("got an unexpected keyword argument 'out'")
    except TypeError as error:
        lhs, rhs, skip = tensors[0], tensors[-1], (SkipReason.UNSUPPORTED_FORM, str(error))
        return refused(site, "matmul", lhs, rhs, site.is_weight(rhs), skip)
    match = FORMS[form](*bound.args, **bound.kwargs)
    return match.match() if isinstance(match, Arguments) else match


def apply_match(match: Match, gemm: Callable[..., fx.Node]) -> fx.Node:
    """Rewrites a match: `gemm(builder, index, lhs, rhs, bias)` adds each product. Returns the node of its result."""
    assert match.emit is not None, match
    node, builder = match.node, Builder(match.node)
    result = match.emit(builder, partial(gemm, builder))
    inputs = node.all_input_nodes
    put_in_place(result, node)
    erase_unused(inputs)  # such as the weights that were gathered for each row
    return result
