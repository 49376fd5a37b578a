"""Scales that only tensor cores read are written in the order in which they read them.

    data, scale = fxquant.quantize(x, "mxfp8_e4m3", "rowwise")                                  # scale [M, K / 32]
    y = fxquant.scaled_mm([data, scale], w, "mxfp8_e4m3", ...)
    # becomes, on compute capability 10
    data, scale = fxquant.quantize(x, "mxfp8_e4m3(swizzled)", "rowwise")                        # in tiles of 128 x 4
    y = fxquant.scaled_mm([data, scale], w, "mxfp8_e4m3(swizzled)", ...)

and so those of groups, with `split_quantize` and `grouped_scaled_mm`. Scales that come from elsewhere, gathered or
dispatched, are brought into that order in front of their GEMM.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import fx

from fxquant.compat.values import on_fakes
from fxquant.formats import QuantSpec
from fxquant.kernels.linear.choice import GemmKernel
from fxquant.kernels.operator import operator_of
from fxquant.passes.graph.meta import VAL
from fxquant.passes.graph.names import is_fxquant
from fxquant.passes.graph.values import val
from fxquant.passes.settings import Settings

_TENSOR_CORES = (GemmKernel.MXFP8, GemmKernel.NVFP4, GemmKernel.GROUPED_MXFP8, GemmKernel.GROUPED_NVFP4)
_QUANTIZE, _DEQUANTIZE = ("quantize", "split_quantize"), ("dequantize", "split_dequantize")


def swizzle_scales(graph: fx.Graph, settings: Settings) -> int:
    """Rewrites a graph in place, joint or of one direction; returns how many quantizations write such scales."""
    gemms = [node for node in graph.nodes if is_fxquant(node, "scaled_mm", "grouped_scaled_mm")]
    native = {node: _is_native(node, settings) for node in gemms}
    count = 0
    for node in graph.nodes if any(native.values()) else ():
        if not is_fxquant(node, *_QUANTIZE) or QuantSpec.parse(_spec_of(node)).swizzled:
            continue
        parts: dict[Any, fx.Node] = {item.args[1]: item for item in node.users}
        if 1 in parts and _are_read(parts, native):
            _swizzle(node, parts)
            count += 1
    return count


def _are_read(parts: dict[Any, fx.Node], native: dict[fx.Node, bool]) -> bool:
    """Returns True if all that reads a scale knows every order, and reads the payload beside it."""
    scale = parts[1]
    payload = parts[0].users if 0 in parts else {}
    return payload.keys() <= scale.users.keys() and all(_reads_scale(user, scale, native) for user in scale.users)


def _is_native(node: fx.Node, settings: Settings) -> bool:
    called = operator_of(node.target)
    assert called is not None
    facts = called.facts_of(*fx.node.map_arg(node.args, val))
    return called.choose(replace(facts, launches=not settings.portable)).kernel in _TENSOR_CORES


def _spec_of(quantization: fx.Node) -> str:
    return next(arg for arg in quantization.args if isinstance(arg, str))


def _reads_scale(user: fx.Node, scale: fx.Node, native: dict[fx.Node, bool]) -> bool:
    """Returns True for a GEMM on tensor cores, and for a dequantization, which knows every order."""
    if is_fxquant(user, *_DEQUANTIZE):
        return True
    return native.get(user, False) and all(scale not in parts[:1] + parts[2:] for parts in _operands(user))


def _operands(node: fx.Node) -> Iterator[list[Any]]:
    operands: Any = node.args[: 1 if is_fxquant(node, *_DEQUANTIZE) else 2]
    yield from map(list, operands)


def _swizzle(node: fx.Node, parts: dict[Any, fx.Node]) -> None:
    """Has a quantization write its scales in tiles, and tells those that read them."""
    _tell(node, [True])
    called = operator_of(node.target)
    assert called is not None
    with on_fakes(val(node)):
        node.meta[VAL] = called(*fx.node.map_arg(node.args, val))
    for i, part in parts.items():
        part.meta[VAL] = node.meta[VAL][i]
    for user in list(parts[1].users):
        _tell(user, [parts[1] in operand for operand in _operands(user)])


def _tell(node: fx.Node, swizzled: list[bool]) -> None:
    """Changes the specs of operands whose scales are swizzled now: they are the first texts of a node."""
    places = [place for place, arg in enumerate(node.args) if isinstance(arg, str)]
    args = list(node.args)
    for place, changes in zip(places, swizzled, strict=False):
        args[place] = _swizzled(args[place]) if changes else args[place]
    node.args = tuple(args)


def _swizzled(spec: Any) -> str:
    return str(replace(QuantSpec.parse(spec), swizzled=True))
