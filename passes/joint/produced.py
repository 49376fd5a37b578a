"""Tensors that a producer of `fxquant.kernels.cast.producers` makes, in a graph that Inductor has decomposed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from fxquant.compat.values import statically_known_true
from fxquant.kernels.cast.producers import JOINED_HEADS, PRODUCERS, Producer
from fxquant.passes.graph.axes import order_of
from fxquant.passes.graph.match import behind_views, matches, pattern_of
from fxquant.passes.graph.names import RESHAPES
from fxquant.passes.graph.values import val

_aten = torch.ops.aten
NARROW = (torch.bfloat16, torch.float16)
"""The dtypes of tensors that kernels make and cast."""


def match_producer(producer: Producer, root: fx.Node, rows: Any, length: Any) -> tuple[fx.Node, ...] | None:
    """The inputs of which a producer makes `root`, a tensor of `rows` x `length` elements, if it does."""
    value = val(root)
    if not isinstance(value, Tensor):
        return None
    if producer is JOINED_HEADS:
        return _heads(root, rows, length)
    outputs, names = _pattern(producer, value.dtype)
    matched: dict[fx.Node, fx.Node] = {}
    if not matches(outputs, root, matched):
        return None
    inputs = tuple(matched[name] for name in names)
    for node, kind in zip(inputs, producer.inputs, strict=True):
        x = val(node)
        count = {"matrix": rows * length, "row": rows, "column": length}[kind]
        fits = statically_known_true(x.numel() == count) and x.device == value.device
        last = {"matrix": None, "row": 1, "column": length}[kind]
        fits = fits and (last is None or statically_known_true(x.shape[-1] == last))
        if not fits or (kind == "matrix" and (x.dtype != producer.read(value.dtype) or not x.is_contiguous())):
            return None
    return inputs


def _heads(root: fx.Node, rows: Any, length: Any) -> tuple[fx.Node] | None:
    """The heads [B, H, S, D], dense and of static sizes, of which `root` is the copy that has them side by side."""
    if root.target is not _aten.clone.default:
        return None
    moved = behind_views(root.args[0], RESHAPES)
    if not isinstance(moved, fx.Node) or order_of(moved, 4) != [0, 2, 1, 3]:
        return None
    x = moved.args[0]
    assert isinstance(x, fx.Node)
    heads = val(x)
    static = heads.ndim == 4 and all(isinstance(size, int) for size in heads.shape)
    fits = static and heads.is_contiguous() and heads.numel() < 2**31 and heads.shape[3] % 16 == 0
    return (x,) if fits and JOINED_HEADS.shape(heads) == (rows, length) else None


def _pattern(producer: Producer, dtype: torch.dtype) -> tuple[fx.Node, list[fx.Node]]:
    """A producer of one result as Inductor's graphs show it: its output, and its inputs."""
    read = producer.read(dtype)
    kinds = {"matrix": ((4, 8), read), "row": ((4, 1), torch.float32), "column": ((8,), read)}
    return pattern_of(producer.run, tuple(kinds[kind] for kind in producer.inputs))


def inputs_of(name: str, root: fx.Node) -> tuple[fx.Node, ...] | None:
    """The inputs of which a producer makes `root`, if it does; of 16 bits, with the last axis of `root` for columns."""
    value = val(root)
    if not isinstance(value, Tensor) or value.dtype not in NARROW or value.ndim == 0 or 0 in value.shape:
        return None
    return match_producer(PRODUCERS[name], root, value.numel() // value.shape[-1], value.shape[-1])


def last_operator(name: str) -> Any:
    """Returns the operator that a producer ends in, as Inductor has decomposed it."""
    return _pattern(PRODUCERS[name], torch.bfloat16)[0].target
