"""Functions of torch for a subclass of Tensor."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

no_torch_function = torch._C._disabled_torch_function_impl
"""Leaves functions to the dispatcher, where a subclass sees operators alone."""


def written(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Gives the tensors among the arguments of an operator that it writes into."""
    schema = operator._schema
    if not schema.is_mutable:
        return
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def is_allocated(tensor: Tensor) -> bool:
    """Returns True if a tensor has memory, which FSDP takes from what it gathers."""
    return tensor.numel() == 0 or tensor.untyped_storage().size() > 0


def writes(tensor: Tensor) -> int:
    """Returns how often a tensor was written in place, as far as torch counts: not those made in inference mode."""
    return 0 if tensor.is_inference() else int(tensor._version)


def set_apply(layer: nn.Module, kind: type[Tensor]) -> None:
    """Lets `layer.to(..)` and the like leave a weight of a subclass alone where nothing changes, and replace it where
    torch cannot exchange it in place: a compiled graph knows it."""
    layer._apply = functools.partial(_apply, layer, kind)  # type: ignore[method-assign]


def _apply(layer: nn.Module, kind: type[Tensor], run: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    weight = layer._parameters.get("weight")
    if not isinstance(weight, kind):
        return type(layer)._apply(layer, run, recurse)  # type: ignore[no-any-return,no-untyped-call]
    parameter: Any = weight
    layer._parameters["weight"] = None  # which the module passes by
    try:
        type(layer)._apply(layer, run, recurse)  # type: ignore[no-untyped-call]
        parameter = _applied(parameter, run)
    finally:
        layer._parameters["weight"] = parameter
    return layer


def _applied(weight: nn.Parameter, run: Callable[[Tensor], Tensor]) -> nn.Parameter:
    """The parameter behind a function: itself, unless it cannot be exchanged for the result."""
    became = getattr(weight, "_became", None)
    if became is not None:  # of another layer that has it too
        return became  # type: ignore[no-any-return]
    with torch.no_grad():
        grad, result = weight.grad, run(weight)
        if result is weight:
            return weight
        new = nn.Parameter(result, requires_grad=weight.requires_grad)
        weight.grad = None
        try:
            torch.utils.swap_tensors(weight, new)  # type: ignore[no-untyped-call]
        except RuntimeError:
            weight._became = new  # type: ignore[attr-defined]
        else:
            new = weight
        new.grad = None if grad is None else run(grad)
    return new
