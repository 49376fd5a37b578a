"""The one door to torch's private modules, and the one place that asks for its version.

- `private`: private names of torch, and functions that stand for private ones.
- `patches`: changes to torch, and the compilations that need them.
- `device`: capability and name of devices, launches.
- `memory`: what can be seen of writes into a tensor's memory.
- `values`: fake tensors and symbolic sizes.
"""

from __future__ import annotations

import torch

OLDEST_TORCH = (2, 11)


def torch_version() -> tuple[int, int]:
    """Returns (major, minor) of the torch in use."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)
