"""Masks that are computed of sizes alone, read as conditions on places.

    keep = arange(n)[None, :] <= arange(n)[:, None]     # read as: kept where query - key >= 0, which is causality

A tensor is read as a `Line`, whole numbers that grow evenly along axes, or as a `Choice` between two numbers by lines
that are at least 0. What depends on an input, or on an operation without a row in `_READERS`, is not read.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.compat.private import HigherOrderOperator
from fxquant.compat.values import statically_known_true
from fxquant.passes.find.uses import has_effects
from fxquant.passes.graph.axes import order_of, same
from fxquant.passes.graph.names import (
    ALIASES,
    CASTS,
    COPIES,
    DETACHES,
    EXPANDS,
    ORDERS,
    PICKS,
    RESHAPES,
    SLICES,
    UNIT_AXES,
    VIEWS,
    op_name,
)
from fxquant.passes.graph.values import Dim, maybe_value, value_of

Number = bool | int | float


@dataclass(frozen=True)
class Line:
    """Whole numbers: `offset`, plus for each axis its step times the place. Axes count from the last, which is -1."""

    offset: Dim
    steps: tuple[tuple[int, int], ...] = ()

    def plus(self, other: Line, factor: int = 1) -> Line:
        steps = dict(self.steps)
        for axis, step in other.steps:
            steps[axis] = steps.get(axis, 0) + factor * step
        return Line(self.offset + factor * other.offset, tuple(sorted((a, s) for a, s in steps.items() if s)))

    def moved(self, axes: Mapping[int, Line]) -> Line:
        """Puts a line in the place of each axis; an axis that is not there has place 0."""
        moved = Line(self.offset)
        for axis, step in self.steps:
            moved = moved.plus(axes.get(axis, Line(0)), step)
        return moved

    def least(self, shape: Sequence[Dim]) -> Dim:
        """Returns the smallest number of a tensor of this shape."""
        return self.offset + sum(step * (shape[axis] - 1) for axis, step in self.steps if step < 0)

    def is_like(self, other: Line) -> bool:
        return self.steps == other.steps and same(self.offset, other.offset)


@dataclass(frozen=True)
class Choice:
    """A number where all conditions are at least 0, and another number elsewhere; without conditions, a constant."""

    conditions: tuple[Line, ...]
    then: Number
    otherwise: Number

    def each(self, function: Callable[[Number], Number]) -> Choice:
        return Choice(self.conditions, function(self.then), function(self.otherwise))

    def swapped(self) -> Choice | None:
        """Returns the same choice by the opposite of its one condition."""
        if len(self.conditions) != 1:
            return None
        return Choice((Line(-1).plus(self.conditions[0], -1),), self.otherwise, self.then)


Read = Line | Choice | None


def constant(number: Number) -> Choice:
    """Returns a number that is the same everywhere."""
    return Choice((), number, number)


def kept(mask: fx.Node, outer: Mapping[fx.Node, fx.Node]) -> tuple[Line, ...] | None:
    """Returns the conditions under which a mask keeps a score [*batch, query, key]; None if they cannot be told.

    A mask of truth keeps a score by True, and one that is added by 0 instead of the smallest number. `outer` maps a
    body's placeholders to what the calling graph passes for them.
    """
    shape, dtype = value_of(mask).shape, value_of(mask).dtype
    read = _Reader(outer).read(mask)
    if not isinstance(read, Choice):
        return None
    keep, drop = (True, False) if dtype == torch.bool else (0, -math.inf)
    if dtype.is_floating_point and min(read.then, read.otherwise) <= torch.finfo(dtype).min:
        read = read.each(lambda number: -math.inf if number <= torch.finfo(dtype).min else number)
    if read.then != keep and read.conditions:
        read = read.swapped() or read
    if read.then != keep or (read.conditions and read.otherwise != drop):
        return None
    return tuple(line for line in read.conditions if not statically_known_true(line.least(shape) >= 0))


CAUSAL = Line(0, ((-2, 1), (-1, -1)))
"""Query minus key."""


def is_causal(conditions: tuple[Line, ...]) -> bool:
    """Returns True for the condition that a query comes no earlier than its key, each counted from the first."""
    return bool(conditions) and all(line.is_like(CAUSAL) for line in conditions)


class _Reader:
    """Reads nodes, each once."""

    def __init__(self, outer: Mapping[fx.Node, fx.Node]) -> None:
        self.outer = outer
        self.seen: dict[fx.Node, Read] = {}

    def read(self, x: Any) -> Read:
        if isinstance(x, (bool, int, float)):
            return constant(x)
        if isinstance(x, torch.SymInt):
            return Line(x)
        if not isinstance(x, fx.Node):
            return None
        if x not in self.seen:
            self.seen[x] = None
            self.seen[x] = self._node(x)
        return self.seen[x]

    def _node(self, node: fx.Node) -> Read:
        value = maybe_value(node)
        if isinstance(value, (bool, int, float, torch.SymInt)):
            return self.read(value)
        if node in self.outer:
            return self.read(self.outer[node])
        reader = _READERS.get(op_name(node).strip("_"))
        calls = node.op in ("call_function", "call_method") and isinstance(value, Tensor)
        if reader is None or not calls or "out" in node.kwargs or _is_written(node):
            return None
        shape = value.shape  # an axis of size 1 has no other place than 0
        return _moved(
            reader(self, node), {-i: Line(0, ((-i, 1),)) for i in range(1, 1 + len(shape)) if not same(shape[-i], 1)}
        )

    def line(self, x: Any) -> Line | None:
        """Reads whole numbers."""
        read = self.read(x)
        if isinstance(read, Choice):
            whole = not read.conditions and isinstance(read.then, int)
            return Line(int(read.then)) if whole else None
        return read


def _is_written(node: fx.Node) -> bool:
    """Returns True if something writes into a tensor, or into a view of it."""
    for user in node.users:
        inner = not isinstance(user.target, HigherOrderOperator) and user.op != "output"
        if (inner and has_effects(user)) or (op_name(user) in VIEWS | EXPANDS | PICKS and _is_written(user)):
            return True
    return False


def _argument(node: fx.Node, place: int, name: str, default: Any = None) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def _arange(reader: _Reader, node: fx.Node) -> Read:
    numbers = [x for x in node.args if not isinstance(x, torch.dtype)]
    names = ("end",) if len(numbers) < 2 else ("start", "end", "step")
    bounds = dict(zip(names, numbers, strict=False)) | {
        key: value for key, value in node.kwargs.items() if key in ("start", "end", "step")
    }
    start, step = reader.line(bounds.get("start", 0)), value_of(bounds.get("step", 1))
    whole = not value_of(node).dtype.is_floating_point and isinstance(step, int)
    return start.plus(Line(0, ((-1, step),))) if start is not None and whole else None


def _filled(number: Number | None) -> Callable[[_Reader, fx.Node], Read]:
    def read(reader: _Reader, node: fx.Node) -> Read:
        filled = number
        if filled is None:
            place = {"tensor": 0, "scalar_tensor": 0}.get(op_name(node), 1)
            filled = _argument(node, place, "fill_value")
        return _cast(reader.read(filled), value_of(node).dtype)

    return read


def _cast(read: Read, dtype: torch.dtype) -> Read:
    if isinstance(read, Choice):
        kind: Any = bool if dtype == torch.bool else float if dtype.is_floating_point else int
        infinite = any(math.isinf(number) for number in (read.then, read.otherwise))
        return None if infinite and kind is int else read.each(kind)
    return read if not dtype.is_floating_point and dtype != torch.bool else None


def _same_places(reader: _Reader, node: fx.Node) -> Read:
    return _cast(reader.read(node.args[0]), value_of(node).dtype)


def _moved(read: Read, axes: Mapping[int, Line]) -> Read:
    if isinstance(read, Choice):
        return Choice(tuple(line.moved(axes) for line in read.conditions), read.then, read.otherwise)
    return None if read is None else read.moved(axes)


def _viewed(read: Read, before: Sequence[Dim], after: Sequence[Dim], pairs: Iterable[tuple[int, int]]) -> Read:
    """Reads a view, given the axes of the source and of the view that are the same, counted from the first."""
    axes = {source - len(before): Line(0, ((view - len(after), 1),)) for source, view in pairs}
    return _moved(read, axes)


def _view(reader: _Reader, node: fx.Node) -> Read:
    """Reads a view that exchanges axes, repeats along them, or differs by axes of size 1."""
    source: Any = node.args[0]
    read, before, after = reader.read(source), value_of(source).shape, value_of(node).shape
    order = order_of(node, len(before))
    if order is not None:
        return _viewed(read, before, after, [(axis, place) for place, axis in enumerate(order)])
    if op_name(node) in ORDERS:
        return None
    if op_name(node) in EXPANDS:
        more = len(after) - len(before)
        return _viewed(read, before, after, [(axis, axis + more) for axis in range(len(before))])
    wide = [[axis for axis, size in enumerate(shape) if not same(size, 1)] for shape in (before, after)]
    alike = len(wide[0]) == len(wide[1]) and all(same(before[a], after[b]) for a, b in zip(*wide, strict=True))
    return _viewed(read, before, after, zip(*wide, strict=True)) if alike else None


def _getitem(reader: _Reader, node: fx.Node) -> Read:
    source, index = node.args[:2]
    if not isinstance(source, fx.Node) or not isinstance(value_of(source), Tensor):
        return None
    index = index if isinstance(index, (tuple, list)) else (index,)
    if any(isinstance(part, fx.Node) and isinstance(maybe_value(part), Tensor) for part in index):
        return _gathered(reader, source, index)
    missing = value_of(source).ndim - sum(part is not None and part is not Ellipsis for part in index)
    parts: list[Any] = []
    for part in index if Ellipsis in index else (*index, Ellipsis):
        parts += [slice(None)] * missing if part is Ellipsis else [part]
    return _sliced(reader, node, source, parts)


def _sliced(reader: _Reader, node: fx.Node, source: fx.Node, parts: Sequence[Any]) -> Read:
    """Reads an index of slices, whole numbers and None, an entry for each axis of the source or new one."""
    before, after = value_of(source).shape, value_of(node).shape
    axes: dict[int, Line] = {}
    axis = place = 0
    for part in parts:
        if part is None:
            place += 1
            continue
        start = part.start if isinstance(part, slice) else value_of(part)
        start = 0 if start is None else value_of(start)
        step = part.step if isinstance(part, slice) else None
        if isinstance(part, bool) or not isinstance(start, (int, torch.SymInt)) or step not in (None, 1):
            return None
        first = start + before[axis] if isinstance(start, int) and start < 0 else start
        if not statically_known_true(first >= 0):
            return None
        axes[axis - len(before)] = Line(first, ((place - len(after), 1),) if isinstance(part, slice) else ())
        axis, place = axis + 1, place + isinstance(part, slice)
    return _moved(reader.read(source), axes)


def _slice(reader: _Reader, node: fx.Node) -> Read:
    source: Any = node.args[0]
    axis, start, end, step = (
        _argument(node, i, name, default)
        for i, (name, default) in enumerate((("dim", 0), ("start", 0), ("end", None), ("step", 1)), 1)
    )
    if op_name(node) == "narrow":
        end, step = None, 1
    parts = [slice(None)] * value_of(source).ndim
    parts[axis] = slice(start, end, step)
    return _sliced(reader, node, source, parts)


def _gathered(reader: _Reader, source: fx.Node, index: Sequence[Any]) -> Read:
    """Reads an index of one tensor for each axis of the source, whose entries are places there."""
    ndim, lines = value_of(source).ndim, [reader.line(part) for part in index]
    axes: dict[int, Line] = {}
    for axis, (part, line) in enumerate(zip(index, lines, strict=True)):
        shape = value_of(part).shape if isinstance(part, fx.Node) else ()
        if line is None or not statically_known_true(line.least(shape) >= 0):
            return None
        axes[axis - ndim] = line
    return _moved(reader.read(source), axes) if len(axes) == ndim else None


def _index(reader: _Reader, node: fx.Node) -> Read:
    source, index = node.args[:2]
    return _gathered(reader, source, index)  # type: ignore[arg-type]


def _triangle(sign: int) -> Callable[[_Reader, fx.Node], Read]:
    """Reads `tril` (1) and `triu` (-1) of a constant."""

    def read(reader: _Reader, node: fx.Node) -> Read:
        source, diagonal = reader.read(node.args[0]), _argument(node, 1, "diagonal", 0)
        if not isinstance(source, Choice) or source.conditions or not isinstance(diagonal, int):
            return None
        inside = Line(sign * diagonal, ((-2, sign), (-1, -sign)))
        return Choice((inside,), source.then, type(source.then)(0))

    return read


def _of_two(
    choices: Callable[[Choice, Choice, torch.dtype], Read], lines: Callable[[Line, Line, torch.dtype], Read]
) -> Callable[[_Reader, fx.Node], Read]:
    """Reads an operator of two operands: `choices` where both are choices, else `lines` where both are lines."""

    def read(reader: _Reader, node: fx.Node) -> Read:
        if len(node.args) != 2 or node.kwargs:
            return None
        a, b = map(reader.read, node.args)
        if isinstance(a, Choice) and isinstance(b, Choice):
            return choices(a, b, value_of(node).dtype)
        line, other = (reader.line(x) for x in node.args)
        return None if line is None or other is None else lines(line, other, value_of(node).dtype)

    return read


def _arithmetic(function: Callable[[Any, Any], Any]) -> Callable[[_Reader, fx.Node], Read]:
    def of_lines(line: Line, other: Line, dtype: torch.dtype) -> Read:
        if dtype.is_floating_point or function not in (operator.add, operator.sub):
            return None
        return line.plus(other, 1 if function is operator.add else -1)

    return _of_two(lambda a, b, dtype: _cast(_pointwise(function, a, b), dtype), of_lines)


def _pointwise(function: Callable[[Any, Any], Any], a: Choice, b: Choice) -> Choice | None:
    """Combines choices of which one is a constant, or which have the same conditions."""
    alike = len(a.conditions) == len(b.conditions) and all(
        x.is_like(y) for x, y in zip(a.conditions, b.conditions, strict=True)
    )
    if a.conditions and b.conditions and not alike:
        return None
    return Choice(a.conditions or b.conditions, function(a.then, b.then), function(a.otherwise, b.otherwise))


def _comparison(function: Callable[[Any, Any], bool]) -> Callable[[_Reader, fx.Node], Read]:
    def of_lines(line: Line, other: Line, dtype: torch.dtype) -> Read:
        more = line.plus(other, -1)
        if not more.steps and isinstance(more.offset, int):
            return constant(function(more.offset, 0))
        less = Line(0).plus(more, -1)
        conditions = {
            operator.ge: (more,), operator.le: (less,), operator.gt: (Line(-1).plus(more),),
            operator.lt: (Line(-1).plus(less),), operator.eq: (more, less),
        }.get(function)  # fmt: skip
        if conditions is None:
            return Choice((more, less), False, True)
        return Choice(conditions, True, False)

    return _of_two(lambda a, b, dtype: _pointwise(function, a, b), of_lines)


def _and(reader: _Reader, node: fx.Node) -> Read:
    a, b = map(reader.read, node.args[:2])
    truth = value_of(node).dtype == torch.bool and isinstance(a, Choice) and isinstance(b, Choice)
    if not truth or not isinstance(a, Choice) or not isinstance(b, Choice):
        return None
    if not a.conditions or not b.conditions:
        return _pointwise(lambda x, y: bool(x and y), a, b)
    a, b = (x if x.then else x.swapped() or x for x in (a, b))
    if (a.then, a.otherwise, b.then, b.otherwise) != (True, False, True, False):
        return None
    return Choice((*a.conditions, *b.conditions), True, False)


def _or(reader: _Reader, node: fx.Node) -> Read:
    a, b = map(reader.read, node.args[:2])
    if value_of(node).dtype != torch.bool or not isinstance(a, Choice) or not isinstance(b, Choice):
        return None
    return _pointwise(lambda x, y: bool(x or y), a, b)


def _not(reader: _Reader, node: fx.Node) -> Read:
    read = reader.read(node.args[0])
    truth = value_of(node).dtype == torch.bool and isinstance(read, Choice)
    return read.each(lambda number: not number) if truth and isinstance(read, Choice) else None


def _where(reader: _Reader, node: fx.Node) -> Read:
    if len(node.args) != 3:
        return None
    return _selected(reader, node, *node.args)


def _masked_fill(reader: _Reader, node: fx.Node) -> Read:
    return _selected(reader, node, _argument(node, 1, "mask"), _argument(node, 2, "value"), node.args[0])


def _selected(reader: _Reader, node: fx.Node, condition: Any, then: Any, otherwise: Any) -> Read:
    by, a, b = map(reader.read, (condition, then, otherwise))
    if not (isinstance(by, Choice) and isinstance(a, Choice) and isinstance(b, Choice)) or a.conditions or b.conditions:
        return None
    return _cast(by.each(lambda number: a.then if number else b.then), value_of(node).dtype)


def _diff(reader: _Reader, node: fx.Node) -> Read:
    """Reads differences along an axis that are one number, that in front of the first included."""
    source, axis, prepend = reader.line(node.args[0]), _argument(node, 2, "dim", -1), node.kwargs.get("prepend")
    if source is None or _argument(node, 1, "n", 1) != 1 or node.kwargs.get("append") is not None:
        return None
    axis = axis if axis < 0 else axis - value_of(node).ndim
    step = dict(source.steps).get(axis, 0)
    if prepend is not None:
        first = reader.line(prepend)
        if first is None or not same(value_of(prepend).shape[axis], 1):
            return None
        before = source.moved({a: Line(0, ((a, 1),)) for a, _ in source.steps if a != axis})
        jump = before.plus(first, -1)
        if jump.steps or not same(jump.offset, step):
            return None
    return constant(step)


def _cumsum(reader: _Reader, node: fx.Node) -> Read:
    read = reader.read(node.args[0])
    zero = isinstance(read, Choice) and not read.conditions and not read.then
    return constant(0) if zero else None


_READERS: dict[str, Callable[[_Reader, fx.Node], Read]] = {
    "arange": _arange,
    **dict.fromkeys(("ones", "ones_like", "new_ones"), _filled(1)),
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), _filled(0)),
    **dict.fromkeys(("full", "full_like", "new_full", "tensor", "scalar_tensor"), _filled(None)),
    **dict.fromkeys((*CASTS, *COPIES, *ALIASES, *DETACHES, "to_copy", "bool", "int", "long"), _same_places),
    **dict.fromkeys((*RESHAPES, *UNIT_AXES, *ORDERS, *EXPANDS), _view),
    "getitem": _getitem,
    **dict.fromkeys(SLICES, _slice),
    "index": _index,
    "tril": _triangle(1),
    "triu": _triangle(-1),
    "add": _arithmetic(operator.add),
    **dict.fromkeys(("sub", "subtract"), _arithmetic(operator.sub)),
    **dict.fromkeys(("mul", "multiply"), _arithmetic(operator.mul)),
    **{name: _comparison(getattr(operator, name)) for name in ("lt", "le", "gt", "ge", "eq", "ne")},
    **dict.fromkeys(("and", "logical_and", "bitwise_and"), _and),
    **dict.fromkeys(("or", "logical_or", "bitwise_or"), _or),
    **dict.fromkeys(("invert", "logical_not", "bitwise_not"), _not),
    "where": _where,
    "masked_fill": _masked_fill,
    "diff": _diff,
    "cumsum": _cumsum,
}
"""Readers by names without underscores around them. What writes in place is not read: its source is written."""
