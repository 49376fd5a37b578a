"""A recipe as Python, to be read and kept."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from enum import Enum
from functools import partial

import fxquant
from fxquant.quantizers import Quantizer, value_text
from fxquant.recipes.base import AutoRecipe, Recipe

WIDTH = 88
MOST_LINES = 80
"""The lines of a factory's source that are shown."""


def python_of(recipe: Recipe) -> str:
    """The expression that makes a recipe, behind the source of the factories of the user's in it, and its import."""
    expression, functions = _expression(recipe, 0), dict.fromkeys(_functions(recipe))
    sources = [source for function in functions if (source := _source(function))]
    words = {name for name in re.findall(r"\b[A-Z]\w*", expression) if name in fxquant.__all__}
    words |= {"recipes"} if "recipes." in expression else set()
    imports = [f"import {name}" for name in ("fxquant", "torch") if re.search(rf"\b{name}\.", expression)]
    imports += ["from functools import partial"] if re.search(r"\bpartial\(", expression) else []
    line = f"from fxquant import {', '.join(sorted(words))}"
    if len(line) > WIDTH:
        line = "from fxquant import (\n" + "".join(f"    {word},\n" for word in sorted(words)) + ")"
    imports += [line] if words else []
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
        shown = [(name, item) for name, item in kept.items() if item != fields[name].default]
        first = type(value).__name__ in ("Rule", "Rules", "HybridQuantizer") and bool(shown)
        return f"{type(value).__name__}(", [("" if first and not i else n, v) for i, (n, v) in enumerate(shown)], ")"
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


def _functions(value: object) -> list[Callable[..., object]]:
    """The functions of the user's that a recipe asks."""
    _, items, _ = _parts(value)
    if items:
        return [function for _, item in items for function in _functions(item)]
    module = getattr(value, "__module__", "") or ""
    is_own = inspect.isfunction(value) and module.partition(".")[0] not in ("fxquant", "torch")
    return [value] if is_own else []  # type: ignore[list-item]


def _source(function: Callable[..., object]) -> str:
    """The source of a function, empty where it cannot be read or is long."""
    try:
        text = textwrap.dedent(inspect.getsource(function)).rstrip()
    except (OSError, TypeError):
        return ""
    if text.count("\n") >= MOST_LINES:
        return ""
    return text if text.startswith(("def ", "@")) else textwrap.indent(text, "# ")
