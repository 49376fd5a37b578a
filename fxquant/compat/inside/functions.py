"""The custom functions, `torch.autograd.Function`, whose forward or backward runs in a frame of Python's stack.

Since torch 2.15 `apply` has no frame, so those of the users' own two methods are looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch.autograd import Function
from torch.autograd.function import BackwardCFunction


def context(frame: FrameType) -> BackwardCFunction | None:
    """Returns the context that a frame of a `forward` or `backward` got, None for other frames."""
    code = frame.f_code
    # the variables of another method are not looked at, which would keep them alive
    if code.co_name not in ("forward", "backward") or code.co_varnames[:1] in ((), ("self",)):
        return None
    first = frame.f_locals.get(code.co_varnames[0])
    return first if isinstance(first, BackwardCFunction) else None


def forward_with_gradients(frame: FrameType) -> type | None:
    """Returns the custom function whose forward a frame runs, if the results get gradients."""
    code = frame.f_code
    if code.co_name != "forward" or code.co_varnames[:1] in ((), ("self",)):
        return None
    if ctx := context(frame):
        return ctx._forward_cls if ctx.next_functions else None  # type: ignore[attr-defined]
    for function in _kinds(Function):  # one with `setup_context` has no context yet
        method = vars(function).get("forward")
        if isinstance(method, staticmethod) and getattr(method.__func__, "__code__", None) is code:
            return function if any(getattr(x, "requires_grad", False) for x in frame.f_locals.values()) else None
    return None


def _kinds(function: Any) -> Iterator[type]:
    for kind in function.__subclasses__():
        yield kind
        yield from _kinds(kind)
