"""Scales that only tensor cores read are written in the order in which they read them.

    data, scale = fxquant.quantize(x, "mxfp8_e4m3", "rowwise")                                  # scale [M, K / 32]
    y = fxquant.scaled_mm([data, scale], w, "mxfp8_e4m3", ...)
    # becomes, on compute capability 10
    data, scale = fxquant.quantize(x, "mxfp8_e4m3(swizzled)", "rowwise")                        # in tiles of 128 x 4
    y = fxquant.scaled_mm([data, scale], w, "mxfp8_e4m3(swizzled)", ...)

Scales that come from elsewhere, gathered, stored or dispatched, are brought into that order in front of their GEMM.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import fx

from fxquant.compat.values import on_fakes
from fxquant.formats import QuantSpec
from fxquant.kernels.cast.swizzle import padded_sizes
from fxquant.kernels.linear.choice import GemmKernel
from fxquant.kernels.operator import operator_of
from fxquant.passes.graph.meta import VAL
from fxquant.passes.graph.names import is_fxquant
from fxquant.passes.graph.values import val
from fxquant.passes.settings import Settings

_TENSOR_CORES = (GemmKernel.MXFP8, GemmKernel.NVFP4)


def swizzle_scales(graph: fx.Graph, settings: Settings) -> int:
    """Rewrites a graph in place, joint or of one direction; returns how many quantizations write such scales."""
    native = {node: _is_native(node, settings) for node in graph.nodes if is_fxquant(node, "scaled_mm")}
    count = 0
    for node in graph.nodes if any(native.values()) else ():
        if not is_fxquant(node, "quantize") or QuantSpec.parse(node.args[1]).swizzled:
            continue
        scales = [item for item in node.users if item.target is operator.getitem and item.args[1] == 1]
        if scales and all(_reads_scale(user, scale, native) for scale in scales for user in scale.users):
            _swizzle(node, scales)
            count += 1
    return count


def _is_native(node: fx.Node, settings: Settings) -> bool:
    called = operator_of(node.target)
    assert called is not None
    facts = called.facts_of(*fx.node.map_arg(node.args, val))
    return called.choose(replace(facts, launches=not settings.portable)).kernel in _TENSOR_CORES


def _reads_scale(user: fx.Node, scale: fx.Node, native: dict[fx.Node, bool]) -> bool:
    """Returns True for a GEMM on tensor cores, and for a dequantization, which knows every order."""
    if is_fxquant(user, "dequantize"):
        return True
    return native.get(user, False) and all(scale not in parts[:1] + parts[2:] for parts in _operands(user))


def _operands(node: fx.Node) -> Iterator[list[Any]]:
    operands: Any = node.args[: 1 if is_fxquant(node, "dequantize") else 2]
    yield from map(list, operands)


def _swizzle(node: fx.Node, scales: list[fx.Node]) -> None:
    """Has a quantization write its scales in tiles, and tells those that read them."""
    old = val(scales[0])
    *batch, rows, columns = old.shape
    with on_fakes(old):
        new = old.new_empty([*batch, *padded_sizes(rows, columns)])
    node.meta[VAL] = [new if i == 1 else part for i, part in enumerate(val(node))]
    node.args = (node.args[0], _swizzled(node.args[1]), *node.args[2:])
    for scale in scales:
        scale.meta[VAL] = new
        for user in list(scale.users):
            count = len(list(_operands(user)))
            specs = [
                _swizzled(spec) if scale in parts else spec
                for parts, spec in zip(_operands(user), user.args[count : 2 * count], strict=True)
            ]
            user.args = (*user.args[:count], *specs, *user.args[2 * count :])


def _swizzled(spec: Any) -> str:
    return str(replace(QuantSpec.parse(spec), swizzled=True))
