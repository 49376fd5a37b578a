"""The ranks of torch.distributed: this one's number, the group of all, and pipelines whose stages differ by rank."""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist


def rank() -> int:
    """Returns the number of this process among those of torch.distributed; 0 where it is the only one."""
    return dist.get_rank() if _initialized() else 0


def name_of_all() -> str | None:
    """Returns the name of the group of all ranks; None where this process is the only one."""
    if not _initialized() or dist.get_world_size() == 1:
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


def _initialized() -> bool:
    return dist.is_available() and dist.is_initialized()
