"""Weights that are stored quantized, in the graphs that take them: the dtype in which their products read them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from fxquant.formats import LinearSpec
from fxquant.kernels.operator import traits_of
from fxquant.passes.graph.values import maybe_value
from fxquant.weights import QuantizedWeight


def dtype_read(weight: fx.Node) -> torch.dtype | None:
    """The dtype to which products cast a weight, by autocast or a cast in the graph; None where none multiplies it.

    A master is rounded to it before it is quantized, as a plain parameter would be.
    """
    return next(_dtypes(weight), None)


def _dtypes(weight: fx.Node) -> Iterator[torch.dtype]:
    for user in weight.users:
        if traits_of(user).stored_weights or traits_of(user).stateful is not None:
            spec = LinearSpec.parse(next(arg for arg in reversed(user.args) if isinstance(arg, str)))
            value = maybe_value(weight)
            yield getattr(torch, spec.autocast) if spec.autocast else value.dtype
        elif isinstance(maybe_value(user), QuantizedWeight):
            yield from _dtypes(user)
        else:
            for inner in _passed(weight, user):
                yield from _dtypes(inner)


def _passed(weight: fx.Node, call: fx.Node) -> Iterator[fx.Node]:
    """Gives the inputs of the bodies that an operator runs, such as a checkpoint, in which a weight arrives."""
    bodies = [node for node in call.all_input_nodes if isinstance(maybe_value(node), fx.GraphModule)]
    operands = [arg for arg in call.args if isinstance(arg, fx.Node) and arg not in bodies]
    for body in bodies:
        inputs = maybe_value(body).graph.find_nodes(op="placeholder")
        if len(inputs) == len(operands):
            yield from (inner for inner, operand in zip(inputs, operands, strict=True) if operand is weight)
