"""A text that tells quantizers of one's own apart: it is equal only if settings and code are equal.

Graphs, caches of compiled code and reports know a quantizer by it. So it has what the methods read: attributes of the
object and of its class, variables around the class, globals of the module, and functions that are called.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import re
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from fxquant.compat.constants import without_modes

_LIBRARIES = {"fxquant", "numpy", "torch", "triton", *sys.stdlib_module_names} - {"__main__"}
"""Packages whose functions and classes are told by their names."""

_PLAIN = (str, bytes, int, float, complex, torch.dtype, torch.device, torch.Size, type(None), type(Ellipsis))


def fingerprint(value: object) -> str:
    """Twelve hexadecimal digits, equal in every process that has the same code."""
    with without_modes():
        return _Digests().of(value)[:12]


class _Digests:
    """The digests of objects, each made once; `held` keeps what an identity stands for."""

    def __init__(self) -> None:
        self.digests: dict[int, str] = {}
        self.held: list[Any] = []

    def of(self, value: Any) -> str:
        """A digest of a value and of all that it refers to."""
        if isinstance(value, _PLAIN) and not isinstance(value, Enum):
            return repr(value)
        if id(value) not in self.digests:
            self.held.append(value)
            self.digests[id(value)] = "itself"  # where it refers to itself
            text = "\n".join((type(value).__qualname__, *self._parts(value)))
            self.digests[id(value)] = hashlib.sha256(text.encode()).hexdigest()
        return self.digests[id(value)]

    def _parts(self, value: Any) -> Iterator[str]:
        if isinstance(value, Tensor):
            yield from (str(value.dtype), str(tuple(value.shape)), _bytes_of(value))
        elif isinstance(value, Mapping):
            yield from (f"{self.of(key)}: {self.of(item)}" for key, item in value.items())
        elif isinstance(value, list | tuple):
            yield from map(self.of, value)
        elif isinstance(value, set | frozenset):
            yield from sorted(map(self.of, value))
        elif isinstance(value, types.MethodType):
            yield from (self.of(value.__func__), self.of(value.__self__))
        elif isinstance(value, functools.partial):
            yield from map(self.of, (value.func, value.args, value.keywords))
        elif isinstance(value, property):
            yield self.of(value.fget)
        elif isinstance(value, staticmethod | classmethod):
            yield self.of(value.__func__)
        elif isinstance(value, types.FunctionType):
            yield from self._function(value)
        elif isinstance(value, type):
            yield from self._class(value)
        else:
            yield from self._object(value)

    def _object(self, value: Any) -> Iterator[str]:
        """The class and the attributes of an object; the text alone if its class is one of a library."""
        cls = type(value)
        if isinstance(value, Enum | types.ModuleType) or (_of_a_library(cls) and not is_dataclass(value)):
            yield re.sub(r" at 0x[0-9a-f]+", "", repr(value))
            return
        yield self.of(cls)
        slots = (name for owner in cls.__mro__ for name in _slots(owner) if hasattr(value, name))
        attributes = {**getattr(value, "__dict__", {}), **{name: getattr(value, name) for name in slots}}
        yield from (f"{name}={self.of(item)}" for name, item in sorted(attributes.items()))

    def _class(self, cls: type) -> Iterator[str]:
        """The name of a class, and all that it and its bases define if it is one of the user's."""
        yield f"{cls.__module__}.{cls.__qualname__}"
        if not _of_a_library(cls):
            members = sorted((name, item) for name, item in vars(cls).items() if _defines(name, item))
            yield from (f"{name}={self.of(item)}" for name, item in members)
            yield from map(self.of, cls.__bases__)

    def _function(self, function: types.FunctionType) -> Iterator[str]:
        """The code of a function, its defaults, and the variables and globals that it reads."""
        yield f"{function.__module__}.{function.__qualname__}"
        if _of_a_library(function):
            return
        yield from map(self.of, (function.__defaults__, function.__kwdefaults__))
        yield from _code(function.__code__)
        yield from map(self.of, map(_content, function.__closure__ or ()))
        read = sorted(_globals(function.__code__) & function.__globals__.keys())
        yield from (f"{name}={self.of(function.__globals__[name])}" for name in read)


def _slots(owner: type) -> tuple[str, ...]:
    slots = vars(owner).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _defines(name: str, member: object) -> bool:
    """Returns True for methods and settings, False for what Python writes into each class."""
    if isinstance(member, types.MemberDescriptorType | types.GetSetDescriptorType):
        return False
    written = name.startswith("__") and not callable(member)
    return not written and name != "_abc_impl" and not (name == "__init__" and _of_a_library(member))


def _content(cell: types.CellType) -> Any:
    """Returns the value of a variable around a function, None before it is set."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _code(code: types.CodeType) -> Iterator[str]:
    """Instructions, names and constants of a piece of code, without its lines."""
    yield code.co_code.hex()
    yield from (*code.co_names, *code.co_varnames, *code.co_freevars)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _code(constant)
        else:
            yield repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant)


def _globals(code: types.CodeType) -> set[str]:
    """The names of globals that a piece of code reads, in functions inside of it too."""
    names = {str(step.argval) for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return names.union(*(_globals(inner) for inner in code.co_consts if isinstance(inner, types.CodeType)))


def _of_a_library(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).partition(".")[0] in _LIBRARIES


def _bytes_of(tensor: Tensor) -> str:
    """A digest of the bytes of a tensor, empty for one without data."""
    if tensor.is_meta or type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return ""
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()
