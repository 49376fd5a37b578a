"""Settings that are checked where they are given: a wrong type, value or keyword is one sentence with a hint.

    @checked()
    @dataclass(frozen=True)
    class Blocks(Recipe):
        rows: Annotated[int, AtLeast(1)] = 1
        mode: Literal["floor", "ceil"] = "ceil"
        dtype: Annotated[torch.dtype, OneOf(torch.int8, torch.uint8)] = torch.int8

The annotation of a field says what it takes: numbers, text, True and False, enumerations, dtypes, functions, dicts,
modules, dataclasses and choices are checked. What has another type is left to the class itself. Functions are checked
alike.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import re
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from enum import Enum, EnumMeta
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

import torch

from fxquant.errors import FxQuantError, SettingError

T = TypeVar("T", bound=Callable[..., Any])


@dataclass(frozen=True)
class AtLeast:
    """The least number that a setting takes."""

    least: float


class OneOf:
    """The values that a setting takes, where `Literal` cannot hold them."""

    def __init__(self, *choices: Any) -> None:
        self.choices = choices


def did_you_mean(spelling: object, choices: Iterable[Any], foreign: Mapping[str, Any] | None = None) -> str:
    """A hint with the one of `choices` that is spelled most like `spelling`, in any case; empty if none is near.

    `foreign` maps other spellings to choices.
    """
    shown = {_plain(name): item for name, item in (foreign or {}).items()} | {_plain(item): item for item in choices}
    asked = _plain(spelling)
    inside = sorted((key for key in shown if len(asked) > 2 and asked in key), key=len)
    close = [asked] if asked in shown else inside or difflib.get_close_matches(asked, shown, 1)
    return f"; did you mean {_shown(shown[close[0]])}?" if close else ""


class Table(type):
    """The class of a table of names: one that it does not have gets a hint, and the names that there are."""

    def __getattr__(cls, name: str) -> Any:
        # Python 3.10 looks for the members of an enumeration here
        members = vars(cls).get("_member_map_") or {key: value for key, value in vars(cls).items() if key[:1] != "_"}
        if name in members:
            return members[name]
        if name.startswith("_"):
            raise AttributeError(name)
        names = [f"{cls.__name__}.{item}" for item in members]
        hint = did_you_mean(f"{cls.__name__}.{name}", map(_Bare, names))
        raise AttributeError(f"{cls.__name__} has no {name!r}{hint or '.'} Known: {', '.join(names)}")


class _EnumTable(Table, EnumMeta):
    pass


class Words(Enum, metaclass=_EnumTable):
    """An enumeration whose wrong names and wrong values get a hint."""

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        choices = " or ".join(_shown(item) for item in cls)
        raise SettingError(f"{article(cls.__name__)} is {choices}, not {_shown(value)}{did_you_mean(value, cls)}")


def first_line(error: Exception) -> str:
    """The first line of what an error says."""
    return str(error).strip().partition("\n")[0]


def place_of(error: Exception) -> str:
    """The last line of the user's own code that an error went through, in parentheses; empty without one."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_NOT_USERS)]
    return f" ({frames[-1].filename}:{frames[-1].lineno}, {frames[-1].line})" if frames else ""


_HERE = Path(__file__).parent
_NOT_USERS = (
    "<",
    *torch.__path__,
    *(f"{folder}/" for folder in (_HERE, _HERE.with_name("passes"), _HERE.with_name("kernels"))),
)
"""The beginnings of names of files that are torch's or of this package."""


def article(name: str) -> str:
    """A noun with its article."""
    return f"{'an' if name[:1] in 'aeiouAEIO' else 'a'} {name}"


def checked(
    error: type[FxQuantError] = SettingError, *, called: str = "", takes: Mapping[str, str] | None = None
) -> Callable[[T], T]:
    """Makes wrong arguments of a dataclass or function an `error` that names it, or what it is `called`.

    `takes` says of an argument in words what it takes, and of a keyword that there is not what to write instead.
    """

    def decorate(target: T) -> T:
        is_class = isinstance(target, type)
        function: Any = vars(target)["__init__"] if is_class else target
        signature = inspect.signature(function)
        words = takes or {}

        @functools.cache
        def kinds() -> dict[str, _Kind]:
            # Python 3.10 refuses the value of KW_ONLY as an annotation
            hints = get_type_hints(target, localns={"KW_ONLY": Any}, include_extras=True)
            all_kinds = {name: _kind(hints.get(name, Any)) for name in signature.parameters}
            return {name: kind for name, kind in all_kinds.items() if kind is not None}

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            name = called or (type(args[0]).__name__ if is_class else target.__name__)
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError:
                raise error(_unbound(name, signature, is_class, args, kwargs, words)) from None
            for key, value in bound.arguments.items():
                kind = kinds().get(key)
                if kind is not None and not kind.takes(value):
                    named = [choice for choice in kind.choices if choice is not None]
                    what, hint = words.get(key) or str(kind), did_you_mean(value, named)
                    raise error(f"{name}: {key} must be {what}, not {_shown(value)}{hint}")
            return function(*args, **kwargs)

        if not is_class:
            return call  # type: ignore[return-value]
        setattr(target, "__init__", call)  # noqa: B010 — mypy refuses the assignment
        return target

    return decorate


@dataclass(frozen=True)
class _Kind:
    """The values of an annotation: those of some types, and single ones."""

    types: tuple[Any, ...]
    choices: tuple[Any, ...] = ()
    least: float = -math.inf

    def takes(self, value: Any) -> bool:
        if any(type(value) is type(choice) and value == choice for choice in self.choices):
            return True
        return any(self._is(value, kind) for kind in self.types)

    def _is(self, value: Any, kind: Any) -> bool:
        if kind in (int, float):
            number = isinstance(value, int | kind) and not isinstance(value, bool)
            return number and math.isfinite(value) and value >= self.least
        return callable(value) if kind is Callable else isinstance(value, kind)

    def __str__(self) -> str:
        bound = f" of at least {self.least:g}" if self.least > -math.inf else ""
        words: dict[Any, str] = {bool: "True or False", int: f"an int{bound}", float: f"a number{bound}", str: "a str"}
        words |= {Callable: "a function", torch.dtype: "a torch.dtype"}
        words |= {Mapping: "a dict", torch.nn.Module: "an nn.Module"}
        parts = [_shown(choice) for choice in sorted(self.choices, key=lambda choice: choice is not None)]
        parts += [words.get(kind) or article(kind.__name__) for kind in self.types]
        return " or ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))


def _kind(hint: Any) -> _Kind | None:
    """The values that an annotation takes, or None for one with a type that is left to the class."""
    members = list(_members(hint))
    if None in members:
        return None
    plain = [member for member in members if member is not None]
    choices = tuple(choice for member in plain for choice in member.choices)
    return _Kind(tuple(t for member in plain for t in member.types), choices, max(member.least for member in plain))


def _members(hint: Any) -> Iterator[_Kind | None]:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        for member in args:
            yield from _members(member)
    elif origin is Annotated:
        limit = next((item for item in args[1:] if isinstance(item, AtLeast | OneOf)), None)
        if isinstance(limit, OneOf):
            yield _Kind((), limit.choices)
        elif isinstance(limit, AtLeast):
            yield _Kind((args[0],), least=limit.least)
        else:
            yield from _members(args[0])
    elif origin is Literal:
        yield _Kind((), args)
    elif isinstance(hint, TypeVar) and hint.__bound__ is not None:
        yield from _members(hint.__bound__)
    elif hint is type(None):
        yield _Kind((), (None,))
    elif origin is Callable or getattr(origin, "__name__", "") == "Callable":
        yield _Kind((Callable,))
    elif isinstance(hint, type) and issubclass(hint, Enum):
        yield _Kind((), tuple(hint))
    elif isinstance(origin or hint, type) and issubclass(origin or hint, _BY_TYPE):
        yield _Kind((origin or hint,))
    elif hint in (bool, int, float, str, torch.dtype) or (isinstance(hint, type) and is_dataclass(hint)):
        yield _Kind((hint,))
    else:
        yield None


_BY_TYPE = (Mapping, torch.nn.Module)
"""The classes that a setting is checked by, whatever such an object holds."""


def _unbound(
    name: str,
    signature: inspect.Signature,
    is_class: bool,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    words: Mapping[str, str],
) -> str:
    """The fault of arguments that do not fit a signature."""
    parameters = dict(list(signature.parameters.items())[is_class:])
    positional = args[is_class:]
    by_name = [key for key, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    by_place = [key for key in by_name if parameters[key].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    for key in kwargs:
        if key not in by_name:
            instead = f": {words[key]}." if key in words else did_you_mean(key, map(_Keyword, by_name))
            keywords = ", ".join(by_name) or "none"
            return f"{name} got an unexpected keyword {key!r}{instead or '.'} Known keywords: {keywords}"
    if len(positional) > len(by_place):
        only = ", ".join(f"{key}=" for key in by_name[len(by_place) :])
        rest = f"; by keyword it takes {only}" if only else ""
        most = f"{len(by_place)} argument" + "s" * (len(by_place) != 1)
        return f"{name} takes {most} by position, not {len(positional)}{rest}"
    for key in by_place[: len(positional)]:
        if key in kwargs:
            return f"{name} got {key} twice, by position and by keyword"
    needed = [key for key in by_name[len(positional) :] if parameters[key].default is inspect.Parameter.empty]
    key = next(key for key in needed if key not in kwargs)
    return f"{name} needs {key}" + (f": {words[key]}" if key in words else "")


class _Bare(str):
    """A name that a hint shows without quotes."""

    def __repr__(self) -> str:
        return str(self)


class _Keyword(str):
    """A name that a hint shows as a keyword."""

    def __repr__(self) -> str:
        return f"{self}="


def _shown(value: object) -> str:
    if isinstance(value, Enum):
        return repr(value.value) if isinstance(value, str) else str(value)
    if isinstance(value, str | int | float | torch.dtype | None):
        return repr(value) if len(repr(value)) < 80 else f"{repr(value)[:76]}..."
    return f"the class {value.__name__}" if isinstance(value, type) else article(type(value).__name__)


def _plain(item: object) -> str:
    return re.sub(r"[^a-z0-9]", "", str(item).lower())
