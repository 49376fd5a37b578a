"""A recipe as Python, to be read and kept."""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Callable
from dataclasses import is_dataclass
from enum import Enum
from functools import partial

import fxquant
from fxquant.quantizers import Quantizer, value_text
from fxquant.recipes.base import AutoRecipe, Recipe

WIDTH = 88
MOST_LINES = 80
"""The lines of a factory's source that are shown."""


def python_of(recipe: Recipe) -> str:
    """The expression that makes a recipe, behind imports and the source of the user's factories in it."""
    expression = _expression(recipe, 0)
    of_users = dict.fromkeys(_own(recipe))
    imported = [item for item in of_users if isinstance(item, type) and _can_be_imported(item)]
    sources = [source for item in of_users if item not in imported and (source := _source(item))]
    words = {name for name in re.findall(r"\b[A-Z]\w*", expression) if name in fxquant.__all__}
    words |= {"recipes"} if "recipes." in expression else set()
    imports = [f"import {name}" for name in ("fxquant", "torch") if re.search(rf"\b{name}\.", expression)]
    imports += ["from functools import partial"] if re.search(r"\bpartial\(", expression) else []
    line = f"from fxquant import {', '.join(sorted(words))}"
    if len(line) > WIDTH:
        line = "from fxquant import (\n" + "".join(f"    {word},\n" for word in sorted(words)) + ")"
    imports += [line] if words else []
    imports += [f"from {item.__module__} import {item.__name__}" for item in imported]
    return "\n\n\n".join(filter(None, ["\n".join(imports), *sources, f"recipe = {expression}"]))


def _expression(value: object, indent: int) -> str:
    """The value as an expression, in several lines where one would be too long."""
    head, items, tail = _parts(value)
    inner = [
        _expression(item, indent + 4) if not name else f"{name}={_expression(item, indent + 4)}" for name, item in items
    ]
    line = f"{head}{', '.join(inner)}{tail}"
    if not items or (len(line) + indent <= WIDTH and "\n" not in line):
        return line
    space = " " * (indent + 4)
    return f"{head}\n" + "".join(f"{space}{item},\n" for item in inner) + " " * indent + tail


def _parts(value: object) -> tuple[str, list[tuple[str, object]], str]:
    """How an expression begins, its arguments by name, and how it ends."""
    if isinstance(value, AutoRecipe):
        return "recipes.auto(", [("", value.recipe)], ")"
    if isinstance(value, (tuple, list)):
        return "[", [("", item) for item in value], "]"
    if isinstance(value, partial):
        named = [("", item) for item in (value.func, *value.args)]
        return "partial(", [*named, *value.keywords.items()], ")"
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}", [], ""
    if isinstance(value, str):
        plain = '"' not in value and value.isprintable() and not value.endswith("\\")
        raw = "r" if "\\" in value else ""
        return f'{raw}"{value}"' if plain else repr(value), [], ""
    return _call(value)


def _call(value: object) -> tuple[str, list[tuple[str, object]], str]:
    """The parts of a call with the settings that differ from their defaults, or of a name."""
    fields = getattr(value, "__dataclass_fields__", None)
    if fields is not None and not isinstance(value, type):
        kept = {f.name: getattr(value, f.name) for f in fields.values() if f.repr}
        shown = [
            (name, item)
            for name, item in kept.items()
            if item != fields[name].default and (name, str(item)) != ("default", fields[name].default)
        ]
        first = next(iter(fields), "") if type(value).__name__ in ("Rule", "Rules", "HybridQuantizer") else ""
        return f"{type(value).__name__}(", [("" if name == first else name, item) for name, item in shown], ")"
    if isinstance(value, Quantizer | Recipe):
        return f"{type(value).__name__}(...)", [], ""
    return (_name(value) if callable(value) else value_text(value)), [], ""


def _name(function: Callable[..., object]) -> str:
    """The name of a function, method or object that can be called; a lambda's is written out by `_source`."""
    name = getattr(function, "__name__", "")
    if inspect.ismethod(function):
        return f"{type(function.__self__).__name__}(...).{name}"
    if not name:
        return f"{type(function).__name__}(...)"
    text = value_text(function)
    return text if text.startswith("fxquant.factories.") else name.replace("<lambda>", "lambda role: ...")


def _own(value: object) -> list[Callable[..., object]]:
    """The functions of the user's that a recipe asks, and the classes of the user's whose settings it shows."""
    cls = type(value)
    owned = [cls] if is_dataclass(value) and not isinstance(value, type) and _is_own(cls) else []
    _, items, _ = _parts(value)
    if items:
        return [*owned, *(item for _, part in items for item in _own(part))]
    if inspect.isfunction(value) and _is_own(value):
        owned.append(value)  # type: ignore[arg-type]
    return owned  # type: ignore[return-value]


def _is_own(item: object) -> bool:
    return (getattr(item, "__module__", "") or "").partition(".")[0] not in ("fxquant", "torch")


def _can_be_imported(cls: type) -> bool:
    """Returns True if other scripts find a class where it says that it is."""
    module = sys.modules.get(cls.__module__)
    return cls.__module__ != "__main__" and getattr(module, cls.__name__, None) is cls


def _source(item: Callable[..., object]) -> str:
    """The source of a function or class, empty where it cannot be read or is long."""
    try:
        text = textwrap.dedent(inspect.getsource(item)).rstrip()
    except (OSError, TypeError):
        return ""
    if text.count("\n") >= MOST_LINES:
        return ""
    return text if text.startswith(("def ", "class ", "@")) else textwrap.indent(text, "# ")
