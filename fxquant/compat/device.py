"""Devices: their capability and name, and how kernels are launched on them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from fxquant.compat.private import inductor_config


def capability(device: torch.device) -> tuple[int, int]:
    """Returns the compute capability of a CUDA device, (0, 0) for others; without a driver, the first with FP8."""
    if device.type != "cuda":
        return 0, 0
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (8, 9)


def card_name(device: torch.device) -> str:
    """Returns the name of a CUDA device, or the type of another; without a driver ``cuda``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" and torch.cuda.is_available() else device.type


def is_hopper(device: torch.device) -> bool:
    """Returns True if a CUDA device has compute capability 9.x."""
    return capability(device)[0] == 9


@functools.cache
def triton_version() -> str:
    """Returns the version of Triton, empty where it is not installed."""
    try:
        import triton
    except ImportError:
        return ""
    return str(triton.__version__)


def knows_gluon() -> bool:
    """Returns True if Triton has the Gluon that a kernel here is written in; each version of Triton changes Gluon."""
    return triton_version().startswith("3.6.")


def launches_early(device: torch.device) -> bool:
    """Returns True if Inductor launches a kernel that can wait while the one before it runs: on Hopper, from Python.

    With `enable_pdl` Inductor launches its own kernels so; these assume that the kernel before them began when its
    predecessor had ended, so no other kernel may be launched early.
    """
    return is_hopper(device) and not inductor_config.triton.enable_pdl and not inductor_config.cpp_wrapper


def no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Returns a scope without autocast; for meta tensors, which autocast leaves alone, an empty scope."""
    casts = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if casts else nullcontext()


@contextmanager
def triton_workspace(device: torch.device) -> Iterator[None]:
    """Gives memory for their TMA descriptors to kernels that are launched eagerly in this scope."""
    from triton.runtime._allocation import _allocator

    token = _allocator.set(lambda size, *_: torch.empty(size, dtype=torch.int8, device=device))
    try:
        yield
    finally:
        _allocator.reset(token)


def kept_random_state() -> AbstractContextManager[None]:
    """Returns a scope behind which the random states of the CPU and of CUDA devices in use are as they were."""
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.random.fork_rng(devices=list(range(torch.cuda.device_count() if used else 0)))


def multiprocessors(device: torch.device) -> int:
    """Returns the number of multiprocessors of a CUDA device; without a driver that of an H100."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return 132
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
