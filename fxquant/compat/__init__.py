"""The one door to torch's private modules, and the one place that asks for its version.

It has four roles:

- `private`: private names of torch, and functions that stand for private ones.
- `patches`: changes to torch, and the compilations that need them; `patch` has what one is, `fakes` those that make
  compilations shorter.
- `device`: capability and name of devices, launches.
- `values`: fake tensors and symbolic sizes.

What torch does not say is a fifth, with a file for each of its parts:

- `memory`: what can be seen of writes into a tensor's memory.
- `checkpoints`: the activation checkpoints around a call.
- `frames`: the frame that Dynamo compiles, and guards of our own on its graphs.
- `ranks`: the ranks of a process group.
- `fsdp`: the gather that FSDP2 makes of a parameter.
- `subclass`: what a subclass of Tensor needs.
- `recompiles`: why a function is compiled again, and where its graphs break.
- `placements`: the part of a DTensor that a rank holds.
- `trace`: texts for torch's structured trace.
"""

from __future__ import annotations

import torch

OLDEST_TORCH = (2, 11)


def torch_version() -> tuple[int, int]:
    """Returns (major, minor) of the torch in use."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)
