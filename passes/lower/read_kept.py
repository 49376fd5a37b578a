"""Read kept: the kernels of a backward read what a forward keeps in FP8 as it is kept.

    gate, up = (fxquant.dequantize([data, scale], "block_1x128_e4m3", "rowwise", ...) for ...)
    parts = fxquant.produce_quantize([gate, up], "silu_mul columnwise=per_tensor_e4m3", ...)
    # becomes
    parts = fxquant.produce_quantize([gate_data, up_data, gate_scale, up_scale], "silu_mul_kept columnwise=...", ...)

What was restored for them alone is not written: a kernel reads one byte an element, where one wrote two and another
read them. Left as they are: scales of lines, whose kernel of amaxes reads wider tiles.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from fxquant.compat.values import statically_known_true
from fxquant.kernels.cast.producers import KEPT, CastSpec, of_kept
from fxquant.passes.graph.builder import Builder, erase_unused
from fxquant.passes.graph.names import RESHAPES, calls, is_fxquant
from fxquant.passes.graph.values import val
from fxquant.passes.settings import Settings

_aten = torch.ops.aten
_BLOCK = 128


def read_kept(graph: fx.Graph, settings: Settings) -> int:
    """Rewrites `graph` in place; returns how many operators read kept tensors."""
    count = 0
    for node in list(graph.nodes):
        if is_fxquant(node, "produce_quantize", "produce_quantize_into"):
            count += _rewrite(node)
    return count


def _rewrite(node: fx.Node) -> bool:
    inputs: Any = node.args[0]
    cast = CastSpec.parse(str(node.args[1]))
    producer = of_kept(cast.name)
    specs = [spec for spec in (cast.rowwise, cast.columnwise) if spec is not None]
    if producer is None or any(spec.row.family == "per_row" for spec in specs):
        return False
    restored: list[Any] = [_restored(x) for x in inputs[: producer.kept]]
    if not all(restored):
        return False
    builder = Builder(node)
    payloads, scales = zip(*(map(partial(_matrix, builder), source.args[0]) for source in restored), strict=True)
    read = [*payloads, *inputs[producer.kept :], *scales]
    node.args = (read, str(replace(cast, name=producer.name)), *node.args[2:])
    erase_unused(inputs[: producer.kept])
    return True


def _matrix(builder: Builder, part: fx.Node) -> fx.Node:
    """Returns a payload, or its scales, as a matrix with as many columns."""
    value = val(part)
    return part if value.ndim == 2 else builder.call(_aten.reshape.default, part, [-1, value.shape[-1]])


def _restored(x: fx.Node) -> fx.Node | None:
    """Returns the dequantization that a matrix [M, K] is, K a multiple of 128, seen through what leaves the order."""
    matrix = val(x)
    if matrix.dtype != torch.bfloat16 or not statically_known_true(matrix.shape[1] % _BLOCK == 0):
        return None
    while calls(x, RESHAPES) or _is_in_order(x):
        x = x.args[0]  # type: ignore[assignment]
    if not is_fxquant(x, "dequantize") or x.args[1] != KEPT or x.args[2] != "rowwise":
        return None
    data = val(x.args[0][0])  # type: ignore[index]
    whole = data.ndim >= 2 and statically_known_true(data.shape[-1] == matrix.shape[1])
    return x if whole and statically_known_true(operator.eq(data.numel(), matrix.numel())) else None


def _is_in_order(x: fx.Node) -> bool:
    """Returns True for a permutation that leaves every axis where it is."""
    return x.target is _aten.permute.default and list(x.args[1]) == sorted(x.args[1])  # type: ignore[arg-type]
