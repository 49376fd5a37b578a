"""Writes into a tensor's memory, as far as they can be seen.

A tensor counts the writes through itself and its views (`_version`). More kinds are seen here: other memory in the
tensor's place, tensors and arrays in the same memory with a count of their own or none, and what comes and goes between
two looks. Functions that hand the memory out (`.data`, DLPack, `set_`), or write into it and count nothing (those of
storages, collectives), take note of it while it is watched (`NOTED`).
"""

from __future__ import annotations

import functools
import importlib
import itertools
import re
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.convert_frame import compile_lock as compile_lock
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.dlpack import from_dlpack

from fxquant.compat.patch import Patch, apply
from fxquant.compat.values import storage_key, version

_use_count: Callable[[int], int] = torch._C._storage_Use_Count
_asked: dict[int, int] = {}
"""The number of the last note of each memory that is watched; none has the number of another."""
_notes = itertools.count(1)
_latest = [0]
"""The number of the latest note of any memory, which no other note has: where it is as it was, nothing was noted."""


class Memory:
    """The memory of a tensor at one moment, kept alive by the tensor alone; `gone` is called when it is freed."""

    def __init__(self, tensor: Tensor, gone: Callable[[], object]) -> None:
        _watch_functions()
        self._key = key = storage_key(tensor)

        def freed(_: object) -> None:
            _asked.pop(key, None)
            gone()

        self._storage = weakref.ref(tensor.untyped_storage(), freed)
        self._version = version(tensor)
        self._asked = _asked.setdefault(key, 0)
        self._pointer, self._layout = tensor.data_ptr(), _layout(tensor)

    def unchanged(self, tensor: Tensor) -> bool:
        """Returns True if the tensor lies in this memory as it did, and nothing was written there, seen or unseen.

        It asks what `unseen_writes` asks, in one look. (Memory that begins to be shared with other processes moves.)
        """
        return Memories([self]).unchanged([tensor]) and self._layout == _layout(tensor)


class Memories:
    """The memories of several tensors, which are looked at together: graphs that decode ask in every call.

    Shapes, strides and dtypes are not among what is looked at; the guards of a graph hold those of its parameters.
    """

    def __init__(self, memories: Sequence[Memory]) -> None:
        self._storages = [memory._storage for memory in memories]
        self._keys = [memory._key for memory in memories]
        self._versions = [memory._version for memory in memories]
        self._asked = [memory._asked for memory in memories]
        self._latest = -1
        self._pointers = [memory._pointer for memory in memories]
        self._holders = [_lone_holders()] * len(memories)

    def unchanged(self, tensors: Sequence[Tensor]) -> bool:
        """Returns True if each tensor lies where it did, and nothing was written there, seen or unseen.

        It asks all of them one question at a time, which takes a third of the time of all questions for each.
        """
        try:
            versions = [tensor._version for tensor in tensors]
            storages = [*map(Tensor.untyped_storage, tensors)]
        except RuntimeError:  # of inference_mode, where no writes are counted, or without memory
            return False
        latest = _latest[0]
        unchanged = (
            [kept() for kept in self._storages] == storages  # by identity
            and versions == self._versions
            and [*map(Tensor.data_ptr, tensors)] == self._pointers
            and [*map(_use_count, self._keys)] == self._holders
            and all(map(torch.UntypedStorage.resizable, storages))
            and (latest == self._latest or [*map(_asked.get, self._keys)] == self._asked)
        )
        if unchanged:
            self._latest = latest
        return unchanged


def _layout(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.shape, tensor.stride()


def unseen_writes(tensor: Tensor) -> str | None:
    """Returns why something could write into a tensor's memory without a trace; None if the memory is its own."""
    if tensor.is_inference():
        return "was made under inference_mode, where no writes are counted"
    storage = tensor.untyped_storage()
    if _use_count(storage._cdata) != _lone_holders():
        return "shares its memory with other tensors"
    if not storage.resizable() or (tensor.device.type == "cpu" and storage.is_shared()):
        return "shares its memory with an array, a file or another process"
    return None


@functools.cache
def _lone_holders() -> int:
    """Returns how many hold the memory of a tensor that nothing shares: the tensor, and the storage asked for."""
    lone = torch.empty(1, device="cpu")
    storage = lone.untyped_storage()
    return _use_count(storage._cdata)


def is_fake(tensor: Tensor) -> bool:
    """Returns True for a tensor without values that stands for another while graphs are made."""
    return isinstance(tensor, FakeTensor)


def is_captured(device: torch.device) -> bool:
    """Returns True if what is computed on a device now is recorded into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def stream_of(device: torch.device) -> int | None:
    """Returns the stream on which tensors of a GPU are used now."""
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(torch._C._cuda_getCurrentRawStream(index))


def _note_and_do(do: Callable[..., Any], tensor: Tensor, *value: Any) -> Any:
    # AOTAutograd only looks at its type
    if value or not str(sys._getframe(2).f_globals.get("__name__")).startswith("torch._functorch."):
        for noted in (tensor, *value):
            _note(noted)
    return do(tensor, *value)


def _do_and_note(do: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return do(*args, **kwargs)
    finally:  # behind it: who looks while a function writes must look again
        for noted in (*args, *kwargs.values()):
            _note(noted)


def _note(noted: Any) -> None:
    """Notes the memory of a tensor or a storage, or of those in lists."""
    if isinstance(noted, list | tuple):
        for member in noted:
            _note(member)
        return
    if not isinstance(noted, Tensor | torch.UntypedStorage):
        return
    try:
        with torch._C.DisableTorchFunctionSubclass():
            key = storage_key(noted) if isinstance(noted, Tensor) else noted._cdata
    except RuntimeError:  # a tensor without memory of its own: of other tensors, or sparse
        return
    if key in _asked:
        _asked[key] = _latest[0] = next(_notes)


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


def _counts_nothing() -> bool:
    tensor = torch.zeros(4)
    storage: Any = tensor.untyped_storage()
    storage.fill_(1)
    from_dlpack(tensor).add_(1)
    torch.empty(0).set_(storage, 0, (4,), (1,)).add_(1)
    return version(tensor) == 0


def _noted(function: str, module: str = "torch") -> Patch:
    return Patch(
        module,
        function,
        defect="What is written by this function, or through what it returns, is counted nowhere.",
        upstream="none found",
        fixed_in=None,
        still_needed=_counts_nothing,
        change=_do_and_note,
        acts=lambda *_, **__: bool(_asked),
    )


_STORAGE = "copy_ fill_ byteswap resize_ __setitem__ __getitem__ _set_from_file"
NOTED = (
    DATA,
    *map(_noted, ("Tensor.__dlpack__", "Tensor.set_", *(f"UntypedStorage.{name}" for name in _STORAGE.split()))),
    _noted("to_dlpack", "torch.utils.dlpack"),
)
"""Functions whose writes no tensor counts."""


@functools.cache
def _watch_functions() -> None:
    for patch in NOTED:
        apply(patch)
    if torch.distributed.is_available():
        module = "torch._C._distributed_c10d"
        methods = [*vars(importlib.import_module(module).ProcessGroup)]
        for name in filter(re.compile("_?(all|broadcast|gather|recv|reduce|scatter)").match, methods):
            apply(_noted(f"ProcessGroup.{name}", module))
