"""Few rows, as in decoding: GEMMs that read their weight once, and of one row quantize as they read.

    parts = fxquant.quantize(x, spec, "rowwise")
    y = fxquant.scaled_mm(parts, weight, ...)
    # of one row becomes
    y = fxquant.scaled_mm([x], weight, ...)

Only on Hopper, and only where the GEMMs are the sole readers of a quantization. See `fxquant.kernels.triton_decode`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.compat import converts_to_fp8, is_hopper
from fxquant.formats import QuantSpec
from fxquant.kernels import triton_decode
from fxquant.passes.base import behind_views, in_memory, val

_CONVERT = torch.ops.prims.convert_element_type.default


def decodes(node: fx.Node) -> bool:
    """Whether a GEMM is of so few rows that a kernel which reads the weight once is quicker than cuBLAS."""
    given: Any = fx.node.map_arg(node.args, val)
    a, b, a_spec, b_spec, _, _, fast_accum = given
    specs = QuantSpec.parse(a_spec), QuantSpec.parse(b_spec)
    return fast_accum and is_hopper(b[0].device) and triton_decode.supports(a, specs[0], b, specs[1])


def scaled_mm(
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    a_spec: str,
    b_spec: str,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> Tensor:
    """`fxquant::scaled_mm` of few rows by a Triton kernel; `a` may be what `leave_unquantized` gives."""
    return triton_decode.scaled_mm(a, QuantSpec.parse(a_spec), b, QuantSpec.parse(b_spec), bias, out_dtype)


def leave_unquantized(graph: fx.Graph) -> None:
    """Gives GEMMs of one row the tensor itself, with its multiplier where it has one, to quantize as they read it.

    Only where no one else reads the quantized one.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.fxquant.quantize.default):
        x, _, direction, *multiplier = node.args
        gemms = _gemms(node)
        if direction == "rowwise" and gemms and triton_decode.quantizes_itself(val(x)):
            for user in gemms:
                user.args = ([x, *multiplier], *user.args[1:])
            for item in [*node.users, node]:
                graph.erase_node(item)


def _gemms(node: fx.Node) -> set[fx.Node]:
    """The GEMMs that read a quantization, where nothing else does and `decodes` them all."""
    users = {user for item in node.users for user in item.users}
    alone = all(
        user.target is torch.ops.fxquant.scaled_mm.default and user.args[0] == [*node.users] and decodes(user)
        for user in users
    )
    return users if alone else set()


def quantizes_few_rows(node: fx.Node) -> bool:
    """Whether a quantization is left to a Triton kernel.

    Fused by Inductor with what makes its tensor it costs no launch; but an amax of the whole tensor does.
    """
    x, text, direction, *multiplier = node.args
    spec = QuantSpec.parse(str(text))
    if direction != "rowwise" or not is_hopper(val(x).device) or not triton_decode.quantizes(val(x), spec):
        return False
    own_pass = spec.row.family == "per_tensor" and not multiplier
    return bool(_gemms(node)) and (own_pass or not _is_fused(x))


def _is_fused(x: Any) -> bool:
    """Whether Inductor makes a tensor in a kernel of its own, into which it can fuse more."""
    x = behind_views(x)
    tags = getattr(x.target, "tags", ())
    return x.op == "call_function" and (torch.Tag.pointwise in tags or x.target is _CONVERT)


def quantizes_rows_in_memory(node: fx.Node) -> bool:
    """Whether a quantization is of rows that lie in memory, each with a scale: a program reads a row once."""
    x, text, direction, *_ = node.args
    known = direction == "rowwise" and triton_decode.quantizes_rows(val(x), QuantSpec.parse(str(text)))
    return known and in_memory(x) and converts_to_fp8(val(x).device)


def quantize(x: Tensor, spec: str, direction: str, multiplier: Tensor | None = None) -> list[Tensor]:
    """`fxquant::quantize` of few rows by Triton kernels, rowwise."""
    return triton_decode.quantize(x, QuantSpec.parse(spec), multiplier)
