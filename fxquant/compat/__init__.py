"""The one door to torch's private modules, and the one place that asks for its version.

It has four roles, and a folder for what torch does not say:

private  private names of torch, and functions that stand for private ones
patches  changes to torch, each with its issue, its versions and a probe that says if it is needed (all of them stand in
         `PATCHES`); `patch` has what one is, `fakes` those that make compilations shorter, `flops` those of
         counts, `slices` those of sizes
device   capability and name of devices, launches
values   fake tensors and symbolic sizes; `constants` has tensors with data in code that is traced
inside   facts of frames, checkpoints, memory, ranks, gathers: a file for each part of torch
"""

from __future__ import annotations

import torch

OLDEST_TORCH = (2, 11)


def torch_version() -> tuple[int, int]:
    """Returns (major, minor) of the torch in use."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)
