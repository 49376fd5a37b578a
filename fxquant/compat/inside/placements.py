"""Tensors that are spread over the ranks of a mesh (DTensors): the part that a rank holds, as graphs write it.

A placement is text here, one letter a dimension of the mesh: ``S1`` for a part of axis 1, ``R`` for the whole tensor,
``P`` for an addend of it. So nothing of torch.distributed stands in a graph, and the mesh comes from the tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def is_spread(value: object) -> bool:
    """Returns True for a DTensor."""
    if not is_traceable_wrapper_subclass(value):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)


def local_part_of(value: Any) -> Any:
    """Returns what this rank holds of a DTensor, as it is and outside of autograd; another value itself."""
    return value._local_tensor if is_spread(value) else value


def placements_text(value: Any) -> str | None:
    """Returns the placements of a DTensor as text; None if one is of a kind that has no letter."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    letters = []
    for placement in value.placements:
        if type(placement) is Shard:
            letters.append(f"S{placement.dim % value.ndim}")
        elif type(placement) is Replicate:
            letters.append("R")
        elif type(placement) is Partial and placement.reduce_op == "sum":
            letters.append("P")
        else:
            return None
    return " ".join(letters)


def held_part(x: Any) -> Any:
    """Returns the tensor in which this rank holds its part of a DTensor; anything else stays."""
    return x._local_tensor if is_spread(x) else x


def _parsed(text: str) -> list[Any]:
    from torch.distributed.tensor import Partial, Replicate, Shard

    simple = {"R": Replicate, "P": Partial}
    return [simple[item]() if item in simple else Shard(int(item[1:])) for item in text.split()]


class _Addend(torch.autograd.Function):
    """A tensor that all ranks have, as one of `count` equal addends, whose gradient is that of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int) -> Tensor:
        return x / count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def local_part(x: Any, placements: str, gradient: str) -> Tensor:
    """Returns what this rank holds of a DTensor under these placements; its gradient has those of `gradient`.

    Of a tensor that every rank has, ``P`` gives an equal addend.
    """
    wanted = placements.split()
    whole = " ".join("R" if item == "P" else item for item in wanted)
    if placements_text(x) != whole:
        x = x.redistribute(placements=_parsed(whole))
    local = x.to_local(grad_placements=_parsed(gradient))
    count = math.prod(x.device_mesh.size(dim) for dim, item in enumerate(wanted) if item == "P")
    return _Addend.apply(local, count) if count > 1 else local  # type: ignore[no-untyped-call, no-any-return]


def spread_out(local: Tensor, like: Any, placements: str, shape: Sequence[int] | None = None) -> Tensor:
    """Returns the DTensor on the mesh of `like` of which this rank holds `local`.

    `shape` is the whole one, where the ranks may hold parts of different sizes.
    """
    from torch.distributed.tensor import DTensor

    sizes: dict[str, Any] = {}
    if shape is not None:
        strides, step = [1] * len(shape), 1
        for axis in sorted(range(len(shape)), key=lambda axis: (local.stride(axis), -axis)):
            strides[axis], step = step, step * shape[axis]
        sizes = {"shape": torch.Size(shape), "stride": tuple(strides)}
    return DTensor.from_local(local, like.device_mesh, _parsed(placements), run_check=False, **sizes)


def mesh_names(value: Any) -> list[str]:
    """Returns a name for every dimension of the mesh of a DTensor."""
    mesh = value.device_mesh
    return [*(mesh.mesh_dim_names or (f"dimension {dim}" for dim in range(mesh.ndim)))]


def mesh_sizes(value: Any) -> list[int]:
    """Returns the number of ranks along every dimension of the mesh of a DTensor."""
    return [value.device_mesh.size(dim) for dim in range(value.device_mesh.ndim)]


def mesh_groups(value: Any) -> list[str]:
    """Returns the name of the process group along every dimension of the mesh of a DTensor."""
    mesh = value.device_mesh
    return [str(mesh.get_group(dim).group_name) for dim in range(mesh.ndim)]
