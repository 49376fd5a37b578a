"""Functions of torch for a subclass of Tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
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
