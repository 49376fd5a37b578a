"""The ranks of torch.distributed: this one's number, the group of all, and pipelines whose stages differ by rank."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fxquant.errors import FxQuantWarning, tell

_LATE = 10
"""Seconds after which the others are late."""


def rank() -> int:
    """Returns the number of this process among those of torch.distributed; 0 where it is the only one."""
    return dist.get_rank() if _initialized() else 0


def world() -> int:
    """Returns the number of processes of torch.distributed; 1 where this is the only one."""
    return dist.get_world_size() if _initialized() else 1


def differs_by_rank(reduced: bool, group: str | None) -> bool:
    """Returns True for what is `reduced` over a process group without some of the ranks, or over none."""
    return world() > 1 and (not reduced or (group is not None and _group(group).size() < world()))


def _group(name: str) -> dist.ProcessGroup:
    from torch.distributed import distributed_c10d

    return vars(distributed_c10d)["_resolve_process_group"](name)  # type: ignore[no-any-return]


def name_of_all() -> str | None:
    """Returns the name of the group of all ranks; None where this process is the only one."""
    if world() == 1:
        return None
    group: Any = dist.group.WORLD
    return str(group.group_name)


def in_pipeline_stage() -> bool:
    """Returns True in a call by a stage of `torch.distributed.pipelining`, whose ranks run other layers."""
    stages = sys.modules.get("torch.distributed.pipelining.stage")
    frame = sys._getframe() if stages is not None else None
    while frame is not None:
        if frame.f_code.co_filename == getattr(stages, "__file__", None):
            return True
        frame = frame.f_back
    return False


def gather_objects(value: Any) -> list[Any]:
    """Returns the values of all ranks, all of which have to call this."""
    if world() == 1:
        return [value]
    values: list[Any] = [None] * world()
    dist.all_gather_object(values, value)
    return values


def _initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def largest_now(x: Tensor, group: str) -> Tensor:
    """Returns the elementwise maximum of `x` over the ranks of a process group, all of which have to call this.

    Says once that it waits, if others are late.
    """
    largest = x.clone()
    work: Any = dist.all_reduce(largest, dist.ReduceOp.MAX, group=_group(group), async_op=True)
    told = time.monotonic() + _LATE
    while not work.is_completed():
        time.sleep(0.001)
        if time.monotonic() > told:
            told = float("inf")
            tell(
                "the quantization state waits for other ranks: state_dict() takes the largest amaxes of all, so every "
                "rank has to call it, also where one writes the file",
                FxQuantWarning,
            )
    work.wait()
    return largest
