"""Facts that FSDP2 does not tell a tensor that it gathers: the parameter, the pass, how long the result stays.

`fsdp_pre_all_gather` is called by the parameter's `FSDPParam`, on behalf of its `FSDPParamGroup`: both stand on the
stack. The group knows the pass. The parameter has the tensors that the bytes are received into, `all_gather_outputs`;
it makes them once, and this file exchanges them, since a pass may gather other bytes than the one before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, alloc_storage, free_storage
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup


@dataclass(frozen=True)
class Gather:
    """One gather of a parameter.

    `forward` and `backward` say for which pass it is, neither for one that the user asks for. `kept` says that the
    gathered parameter serves the pass behind as well, `repeats` that a backward runs this forward again, `smaller` that
    FSDP shards it over a part of the ranks in between.
    """

    parameter: Any
    group: Any
    forward: bool
    backward: bool
    kept: bool
    repeats: bool
    smaller: bool = False

    @property
    def weights(self) -> list[Any]:
        """The sharded parameters that are gathered at once."""
        return [parameter.sharded_param for parameter in self.group.fsdp_params]

    @property
    def ranks(self) -> int:
        """The number of shards."""
        return int(self.parameter.shard_mesh.size())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameter as its module computes with it."""
        dtype: torch.dtype = self.parameter.param_dtype or self.parameter.orig_dtype
        return dtype

    @property
    def shard_axis(self) -> int:
        """The axis along which the parameter is cut."""
        return int(self.parameter.fsdp_placement.dim)

    @property
    def size(self) -> torch.Size:
        """The size of the whole parameter, on this rank of a tensor-parallel mesh."""
        size: torch.Size = self.parameter._orig_size
        return size

    @property
    def padded_size(self) -> torch.Size:
        """The size of a shard; the last ones may be smaller, or empty."""
        size: torch.Size = self.parameter.padded_sharded_param_size
        return size

    @property
    def device(self) -> torch.device:
        device: torch.device = self.parameter.device
        return device

    def receive_into(self, outputs: Sequence[Tensor]) -> None:
        """Lets the bytes of this gather arrive in these tensors, which FSDP allocates and frees."""
        self.parameter.all_gather_outputs = list(outputs)


def current_gather() -> Gather | None:
    """Returns the gather that has called `fsdp_pre_all_gather`; None if another has."""
    frame, parameter = sys._getframe(1), None
    for _ in range(12):
        owner = frame.f_locals.get("self")
        if isinstance(owner, FSDPParam):
            parameter = owner
        elif isinstance(owner, FSDPParamGroup) and parameter is not None:
            return _gather(parameter, owner)
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


def _gather(parameter: FSDPParam, group: FSDPParamGroup) -> Gather:
    name = group._training_state.name
    forward, backward = name == "FORWARD", name == "PRE_BACKWARD"
    repeats = forward and torch._C._current_graph_task_id() != -1
    if repeats:
        kept = True  # the backward of the checkpoint comes next
    elif forward:
        kept = not group._reshard_after_forward or not group.unshard_in_backward
    else:
        kept = not group.reshard_after_backward
    return Gather(parameter, group, forward, backward, kept, repeats, group._use_post_forward_mesh)


def unallocated(numel: int, ranks: int, device: torch.device) -> Tensor:
    """Returns bytes to receive a gather into, for which FSDP will allocate memory."""
    output = torch.empty(numel * ranks, dtype=torch.uint8, device=device)
    free_storage(output)
    return output


def fill(output: Tensor, source: Tensor) -> None:
    """Allocates a tensor and copies into it what comes from a mesh of one rank, where FSDP copies the first alone."""
    alloc_storage(output)
    with _unsafe_preserve_version_counter(output):
        output.copy_(source)


def over(output: Tensor, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Returns a tensor over the same memory, also while there is none; writes into one are not counted by the other."""
    view = torch.empty(0, dtype=dtype, device=output.device)
    with torch.no_grad():
        return _set(view, output.untyped_storage(), 0, tuple(size), tuple(stride))


_set: Callable[..., Tensor] = Tensor.set_
