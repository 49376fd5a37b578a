"""Starts a process for each rank of a benchmark, and lets the ranks agree on what each of them must do alike."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fxquant.bench.rounds import LeftOut, Turns

_TIMEOUT = datetime.timedelta(seconds=120)


def start(argv: Sequence[str], ranks: int) -> int | None:
    """Runs the benchmark in a process for each rank, under torchrun, and returns the exit code.

    None where this process is a rank already, or the only one.
    """
    if "WORLD_SIZE" in os.environ or dist.is_initialized() or ranks == 1:
        return None
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    return subprocess.call([*launcher, f"--nproc-per-node={ranks}", "-m", "fxquant", "bench", *argv])


@contextmanager
def group(device: str) -> Iterator[None]:
    """A scope in which torch.distributed is initialised, as torchrun says, or with this process alone."""
    if dist.is_initialized():
        yield
        return
    backend, place = "gloo", None
    if device == "cuda":
        backend, place = "nccl", torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(place)
    with tempfile.TemporaryDirectory() as folder:
        if "WORLD_SIZE" in os.environ:
            dist.init_process_group(backend, timeout=_TIMEOUT, device_id=place)
        else:
            dist.init_process_group(
                backend, init_method=f"file://{folder}/store", rank=0, world_size=1, timeout=_TIMEOUT, device_id=place
            )
        try:
            yield
        finally:
            dist.destroy_process_group()


def is_first() -> bool:
    """Returns True for the rank that prints and writes."""
    return not dist.is_initialized() or dist.get_rank() == 0


@dataclass(frozen=True)
class TurnsOfRanks(Turns):
    """Turns that all ranks take together; after `end` (of time.monotonic) nothing more is compiled."""

    end: float = float("inf")

    def agreed(self, value: bool) -> bool:
        """True on all ranks if it is on one."""
        said = torch.tensor(int(value), device=self.device)
        dist.all_reduce(said, dist.ReduceOp.MAX)
        return bool(said.item())

    def check_time(self) -> None:
        """Raises LeftOut, on all ranks, where no time is left to compile something more."""
        if self.agreed(time.monotonic() > self.end):
            raise LeftOut("no time was left to compile it (--within)")
