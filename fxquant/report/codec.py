"""Facts in the types of JSON and back, by the annotations of their dataclasses."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch


def encode(value: Any) -> Any:
    """A fact in the types of JSON: dtypes and specs as text, dataclasses without the fields that have their default."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if hasattr(type(value), "parse"):
        return str(value)
    if is_dataclass(value):
        changed = {f.name: getattr(value, f.name) for f in fields(value) if getattr(value, f.name) != _default(f)}
        return {name: encode(item) for name, item in changed.items()}
    if isinstance(value, Mapping):
        return {str(name): encode(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    return value


def decode(kind: Any, value: Any) -> Any:
    """The inverse of `encode` for a value of an annotated kind; keys that a dataclass does not have are left out."""
    if kind is torch.dtype:
        return getattr(torch, value)
    if hasattr(kind, "parse"):
        return kind.parse(value)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        taken = {f.name: decode(hints[f.name], value[f.name]) for f in fields(kind) if f.name in value}
        return kind(**taken)  # type: ignore[operator]
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (types.UnionType, Union):
        return None if value is None else decode(_only_kind(arguments), value)
    if origin is list:
        return [decode(arguments[0], item) for item in value]
    if origin is dict:
        return {arguments[0](name): decode(arguments[1], item) for name, item in value.items()}
    if origin is tuple:
        kinds = [arguments[0]] * len(value) if arguments[-1:] == (...,) else arguments
        return tuple(decode(item_kind, item) for item_kind, item in zip(kinds, value, strict=True))
    return value


def _default(field: Any) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def _only_kind(kinds: tuple[Any, ...]) -> Any:
    """The kind of an optional value; of several, which JSON tells apart, any."""
    others = [kind for kind in kinds if kind is not type(None)]
    return others[0] if len(others) == 1 else Any
