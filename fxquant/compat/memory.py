"""Writes into a tensor's memory, as far as they can be seen.

A tensor counts the writes through itself and its views (`_version`). Three more kinds are seen here: other memory in
the tensor's place, tensors and arrays in the same memory with a count of their own or none, and those that come and go
through `.data`, whose property takes note of them (`DATA`) while a memory is watched.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.convert_frame import compile_lock as compile_lock
from torch._subclasses.fake_tensor import FakeTensor

from fxquant.compat.patch import Patch, apply
from fxquant.compat.values import storage_key, version

_asked: dict[int, int] = {}
"""How often `.data` was asked for or assigned, for each memory that is watched."""


class Memory:
    """The memory of a tensor at one moment, kept alive by the tensor alone; `gone` is called when it is freed."""

    def __init__(self, tensor: Tensor, gone: Callable[[], object]) -> None:
        apply(DATA)
        key = storage_key(tensor)

        def freed(_: object) -> None:
            _asked.pop(key, None)
            gone()

        self._storage = weakref.ref(tensor.untyped_storage(), freed)
        self._state = _state(tensor, _asked.setdefault(key, 0))

    def unchanged(self, tensor: Tensor) -> bool:
        """Returns True if the tensor lies in this memory as it did, and nothing that can be seen was written there."""
        storage = tensor.untyped_storage()
        return self._storage() is storage and self._state == _state(tensor, _asked.get(storage._cdata))


def _state(tensor: Tensor, asked: int | None) -> tuple[Any, ...]:
    return version(tensor), asked, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def unseen_writes(tensor: Tensor) -> str | None:
    """Returns why something could write into a tensor's memory without a trace; None if the memory is its own."""
    if tensor.is_inference():
        return "was made under inference_mode, where no writes are counted"
    storage = tensor.untyped_storage()
    if _holders(storage) != _lone_holders():
        return "shares its memory with other tensors"
    if not storage.resizable() or (tensor.device.type == "cpu" and storage.is_shared()):
        return "shares its memory with an array, a file or another process"
    return None


def _holders(storage: torch.UntypedStorage) -> int:
    """Returns how many hold a memory: tensors, and the storage that was asked for."""
    return int(torch._C._storage_Use_Count(storage._cdata))


@functools.cache
def _lone_holders() -> int:
    lone = torch.empty(1, device="cpu")
    return _holders(lone.untyped_storage())


def is_fake(tensor: Tensor) -> bool:
    """Returns True for a tensor without values that stands for another while graphs are made."""
    return isinstance(tensor, FakeTensor)


def is_captured(tensor: Tensor) -> bool:
    """Returns True if what is computed of a tensor now is recorded into a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def stream_of(tensor: Tensor) -> int | None:
    """Returns the stream on which a tensor of a GPU is used now."""
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else None


def _note_and_do(do: Callable[..., Any], tensor: Tensor, *value: Any) -> Any:
    # AOTAutograd only looks at its type
    if value or not str(sys._getframe(2).f_globals.get("__name__")).startswith("torch._functorch."):
        for noted in (tensor, *value):
            _note(noted)
    return do(tensor, *value)


def _note(tensor: Any) -> None:
    if not isinstance(tensor, Tensor):
        return
    try:
        with torch._C.DisableTorchFunctionSubclass():
            key = storage_key(tensor)
    except RuntimeError:  # a tensor without memory of its own: of other tensors, or sparse
        return
    if (count := _asked.get(key)) is not None:
        _asked[key] = count + 1


def _is_written_unseen() -> bool:
    tensor = torch.zeros(1)
    tensor.data.add_(1)
    return version(tensor) == 0


DATA = Patch(
    "torch",
    "Tensor.data",
    defect="What is written through `.data` is counted nowhere.",
    upstream="https://github.com/pytorch/pytorch/issues/5396, left so; #30987 would remove `.data`",
    fixed_in=None,
    still_needed=_is_written_unseen,
    change=_note_and_do,
    acts=lambda *_: bool(_asked),
)
