"""The activation checkpoints around a call: those whose first run it belongs to, and the one that runs it again.

torch says neither. A checkpoint that is not reentrant has a frame, which the functions that pack saved tensors hold
while it runs; it runs again inside the function that unpacks them. A reentrant one, torch's or another's, is an
`autograd.Function` whose forward runs without gradients, and whose backward runs it again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch._C import _autograd as hooks
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from fxquant.compat.inside.functions import context

_ALL_MODES = True
"""Hooks count also while something is traced."""


@dataclass(frozen=True)
class Repeat:
    """A checkpoint that runs again what it has run before; `run` differs in each of its runs.

    One that is not `certain` is some `autograd.Function` whose backward is running. The first run is not `complete` if
    a backward inside it repeats its beginning.
    """

    checkpoint: Any
    run: Any
    certain: bool = False
    complete: bool = True


@dataclass
class Around:
    """The checkpoints around a call.

    `first` has those that are in their first run, since the innermost repetition began; `repeats` has what may be
    repetitions, innermost first.
    """

    first: list[Any] = field(default_factory=list)
    repeats: list[Repeat] = field(default_factory=list)


def checkpoints_around() -> Around:
    """Returns the checkpoints around a call on this thread."""
    around = Around(first=list(_packing()))
    if not torch.is_grad_enabled() or torch._C._current_autograd_node() or torch._C._current_graph_task_id() != -1:
        _look_at_stack(sys._getframe(1), around)
    elif not around.first and _top() is not None:
        _look_at_stack(sys._getframe(1), around)  # saved tensors are unpacked by hand
    return around


def in_reentrant_checkpoint() -> bool:
    """Returns True if a call without gradients is part of the first run of a reentrant checkpoint."""
    return not torch.is_grad_enabled() and any(isinstance(c, BackwardCFunction) for c in checkpoints_around().first)


CONTEXTS = "_checkpoint_context_fn"
"""The key in the meta of a checkpoint's captured body under which the function lies that gives its modes."""


def selective_modes() -> list[Any]:
    """Returns the modes of selective checkpoints around a call."""
    if not torch._C._len_torch_dispatch_stack():
        return []
    kinds = (torch_checkpoint._CachingTorchDispatchMode, torch_checkpoint._CachedTorchDispatchMode)
    return [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, kinds)]


def _top() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    return hooks._top_saved_tensors_default_hooks(_ALL_MODES)


def _packing() -> Iterator[Any]:
    """Gives the frames whose first run is going on, innermost first, up to a repetition."""
    enabled: bool = hooks._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined, unused-ignore]
    if _top() is None or not enabled:
        return
    popped = []
    try:
        while (top := _top()) is not None:
            popped.append(top)
            hooks._pop_saved_tensors_default_hooks()
    finally:
        for pack, unpack in reversed(popped):
            hooks._push_saved_tensors_default_hooks(pack, unpack)
    for pack, _ in popped:
        pack = getattr(pack, "__wrapped__", pack)
        if _closure(pack, "target_frame_ref") is not None:
            return
        frame = _closure(pack, "frame")
        if isinstance(frame, torch_checkpoint._CheckpointFrame):
            yield frame


def _closure(function: Any, name: str) -> Any:
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    return function.__closure__[names.index(name)].cell_contents if name in names else None


def _look_at_stack(frame: FrameType | None, around: Around) -> None:
    """Adds what Python's stack shows: reentrant checkpoints, and repetitions."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "unpack_hook" and code.co_filename == torch_checkpoint.__file__:
            names = frame.f_locals
            repeated = names["frame"]
            around.repeats.append(Repeat(repeated, names["gid"], certain=True, complete=repeated.forward_completed))
        elif ctx := context(frame):
            if code.co_name == "backward":
                around.repeats.append(Repeat(ctx, torch._C._current_graph_task_id()))
            elif not around.repeats and ctx.next_functions:
                around.first.append(ctx)
        frame = frame.f_back
