"""The comparison of two reports: two recipes, two versions of torch, two checkpoints of a model."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from fxquant.checks import AtLeast, article, checked
from fxquant.decisions import SkipReason
from fxquant.errors import ArgumentError
from fxquant.report.data import MODEL, ReportData, folded, result, role_text, shape_text
from fxquant.report.report import Report
from fxquant.report.tree import Leaf, leaves_of, title

Source = Report | str | Path
"""A report, the path of its JSON, or the JSON itself."""

KINDS = {
    "only in a": "only in {a}",
    "only in b": "only in {b}",
    "no longer quantized": "no longer quantized",
    "less quantized": "with fewer quantized operands",
    "newly quantized": "newly quantized",
    "more quantized": "with more quantized operands",
    "other formats": "in other formats",
    "other sizes": "of other sizes",
    "other kernels": "with other kernels",
    "another reason": "in high precision for another reason",
    "another time": "with another time",
    "another error": "with another error",
}
"""The words for a change by its kind, from those that matter most to those that follow from others."""


@dataclass(frozen=True, kw_only=True)
class Operand:
    """An operand of a GEMM whose format, reason or shape differs: as text, empty where it is on one side alone."""

    gemm: str
    operand: str
    direction: str
    a: str
    b: str


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A fact `what` of a layer on both sides."""

    what: str
    a: Any
    b: Any


@dataclass(frozen=True, kw_only=True)
class Change:
    """The change of one kind of layer, which `layers` names and `name` folds.

    `operands` and `kernels` are those that differ, in one layer; `time` (microseconds), `bytes` (of weights as forwards
    read them) are of all these layers, `errors` the largest of them. None is not known.
    """

    name: str
    layers: tuple[str, ...]
    kind: str
    operands: tuple[Operand, ...]
    sizes: tuple[Pair, ...]
    kernels: tuple[Pair, ...]
    time: Pair
    bytes: Pair
    errors: tuple[Pair, ...]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Two reports as they are `named`, the facts of the `summary` with those that are equal, and the changed layers.

    `same` counts the layers that are equal. `formats` counts operands by their formats on both sides.
    """

    a: ReportData
    b: ReportData
    named: tuple[str, str]
    summary: list[Pair]
    changes: list[Change]
    same: int
    formats: list[tuple[str, str, int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Returns True if a layer or a fact differs, other than the date."""
        return bool(self.changes) or any(pair.a != pair.b for pair in self.summary if pair.what != "date")

    def by_kind(self) -> dict[str, list[Change]]:
        """The changes by their kind, in the order of `KINDS`."""
        kinds = {kind: [change for change in self.changes if change.kind == kind] for kind in KINDS}
        return {kind: changes for kind, changes in kinds.items() if changes}


@checked(ArgumentError, called="fxquant.diff", takes={"a": "a Report, its JSON or a path", "b": "the same"})
def compare(a: Source, b: Source, tolerance: Annotated[float, AtLeast(0)] = 0.01) -> dict[str, Any]:
    """The fields of a `Difference`; see `fxquant.diff`."""
    (first, first_name), (second, second_name) = _opened(a, "a"), _opened(b, "b")
    if first_name == second_name:
        first_name, second_name = "a", "b"
    before, after = _facts(first), _facts(second)
    names = dict.fromkeys((*before, *after))
    compared = (_change(name, before.get(name), after.get(name), tolerance) for name in names)
    changes = [change for change in compared if change is not None]
    formats = Counter((o.a, o.b) for change in changes for o in change.operands if o.a and o.b)
    return {
        "a": first,
        "b": second,
        "named": (first_name, second_name),
        "summary": _pairs(_whole(first), _whole(second)),
        "changes": _folded(changes),
        "same": len(names) - len(changes),
        "formats": [(*pair, count) for pair, count in formats.most_common()],
    }


def _opened(source: Source, name: str) -> tuple[Report, str]:
    """A report with the name that the comparison calls it by."""
    if isinstance(source, Report):
        return source, name
    if isinstance(source, Path) or (isinstance(source, str) and not source.lstrip().startswith("{")):
        return Report.load(source), Path(source).name
    if isinstance(source, str):
        return Report.from_json(source), name
    raise ArgumentError(f"{name} is {article(type(source).__name__)}: a Report, its JSON or the path of it is expected")


@dataclass(frozen=True)
class _Facts:
    """The facts of one layer that are compared."""

    operands: dict[tuple[int, str, str, str], str]
    shapes: dict[tuple[int, str, str, str], str]
    kernels: dict[str, str]
    time: float | None
    bytes: int
    errors: dict[str, float]

    @property
    def quantized(self) -> int:
        return sum(not text.startswith("skipped: ") for text in self.operands.values())


def _facts(report: ReportData) -> dict[str, _Facts]:
    """The facts of every layer by its name, in the order of the graph; an attention is one, with both its products."""
    names, layers = report.names(), defaultdict[str, list[Leaf]](list)
    for leaf in leaves_of(report):
        first = leaf.decisions[0]
        name = title(first.layer, leaf) if leaf.is_attention else names[first.site] or MODEL
        layers[name].append(leaf)
    return {name: _facts_of(report, leaves) for name, leaves in layers.items()}


def _facts_of(report: ReportData, leaves: Sequence[Leaf]) -> _Facts:
    """The facts of one layer, which may run several times."""
    decisions = [decision for leaf in leaves for decision in leaf.decisions]
    sites = list(dict.fromkeys(d.site for d in decisions))
    gemms = [f"{d.part} {d.gemm}" if d.attention is not None else str(d.gemm) for d in decisions]
    keys = [
        (sites.index(d.site), gemm, role_text(d), str(d.direction)) for d, gemm in zip(decisions, gemms, strict=True)
    ]
    timed = [leaf.estimate for leaf in leaves if leaf.estimate is not None]
    work = [work for estimated in timed for work in estimated.work]
    times = [estimated.quantized for estimated in timed]
    errors: dict[str, float] = {}
    for loss in (loss for leaf in leaves for loss in leaf.losses):
        errors[loss.what] = max(loss.error, errors.get(loss.what, 0.0))
    kernels = {
        what: ", ".join(dict.fromkeys(w.kernel for w in work if w.what == what))
        for what in dict.fromkeys(w.what for w in work)
    }
    return _Facts(
        operands={key: result(d) for key, d in zip(keys, decisions, strict=True)},
        shapes={key: shape_text(d) for key, d in zip(keys, decisions, strict=True)},
        kernels=kernels,
        time=None if None in times or not times else sum(filter(None, times)),
        bytes=ReportData(recipe=report.recipe, decisions=decisions).weights["quantized"],
        errors=errors,
    )


def _change(name: str, a: _Facts | None, b: _Facts | None, tolerance: float) -> Change | None:
    """The change of a layer; None if it is the same on both sides."""
    none = _Facts({}, {}, {}, None, 0, {})
    old, new = a or none, b or none
    operands = tuple(
        Operand(gemm=key[1], operand=key[2], direction=key[3], a=old.operands.get(key, ""), b=new.operands.get(key, ""))
        for key in dict.fromkeys((*old.operands, *new.operands))
        if old.operands.get(key) != new.operands.get(key)
    )
    shapes = dict.fromkeys((key[2], old.shapes[key], new.shapes[key]) for key in old.shapes if key in new.shapes)
    sizes = tuple(Pair(what=what, a=before, b=after) for what, before, after in shapes if before != after)
    kernels = tuple(pair for pair in _pairs(old.kernels, new.kernels) if pair.a != pair.b)
    errors = tuple(pair for pair in _pairs(old.errors, new.errors) if _differ(pair.a, pair.b, tolerance))
    kind = _kind(a, b, operands, sizes, kernels)
    kind = kind or ("another time" if _differ(old.time, new.time, tolerance) else "another error" if errors else "")
    if not kind:
        return None
    return Change(
        name=name,
        layers=(name,),
        kind=kind,
        operands=operands,
        sizes=sizes,
        kernels=kernels,
        time=Pair(what="time", a=old.time, b=new.time),
        bytes=Pair(what="bytes", a=old.bytes, b=new.bytes),
        errors=errors,
    )


def _kind(
    a: _Facts | None, b: _Facts | None, operands: Sequence[Operand], sizes: Sequence[Pair], kernels: Sequence[Pair]
) -> str:
    """The kind of a change; empty where neither decisions nor sizes and kernels differ."""
    if a is None or b is None:
        return "only in b" if a is None else "only in a"
    if operands and a.quantized != b.quantized:
        if b.quantized < a.quantized:
            return "less quantized" if b.quantized else "no longer quantized"
        return "more quantized" if a.quantized else "newly quantized"
    if operands and a.quantized:
        return "other formats"
    if sizes or kernels:
        return "other sizes" if sizes else "other kernels"
    return "another reason" if operands else ""


def _pairs(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Pair]:
    return [Pair(what=what, a=a.get(what), b=b.get(what)) for what in dict.fromkeys((*a, *b))]


def _differ(a: float | None, b: float | None, tolerance: float) -> bool:
    if a is None or b is None:
        return a is not b
    return abs(a - b) > tolerance * max(abs(a), abs(b))


def _folded(changes: list[Change]) -> list[Change]:
    """The changes with those of repeated layers in one, whose times and bytes are added up."""
    names = [change.name for change in changes]
    contents = [(c.kind, c.operands, c.sizes, c.kernels, tuple(pair.what for pair in c.errors)) for c in changes]
    merged = []
    for name, places in folded(names, contents):
        members = [changes[place] for place in places]
        merged.append(
            replace(
                members[0],
                name=name,
                layers=tuple(names[place] for place in places),
                time=_sum([member.time for member in members]),
                bytes=_sum([member.bytes for member in members]),
                errors=tuple(map(_worst, zip(*(member.errors for member in members), strict=True))),
            )
        )
    return merged


def _sum(pairs: list[Pair]) -> Pair:
    sides = [[pair.a for pair in pairs], [pair.b for pair in pairs]]
    a, b = (None if None in side else sum(side) for side in sides)
    return Pair(what=pairs[0].what, a=a, b=b)


def _worst(pairs: tuple[Pair, ...]) -> Pair:
    sides = [pair.a for pair in pairs], [pair.b for pair in pairs]
    a, b = (max((value for value in side if value is not None), default=None) for side in sides)
    return Pair(what=pairs[0].what, a=a, b=b)


def _whole(report: ReportData) -> dict[str, Any]:
    """The facts about the whole of a report."""
    summary, time, header = report.summary(), report.time(), report.header
    skipped = {f"skipped as {SkipReason(name)}": count for name, count in summary["skipped"].items()}
    facts = {
        "recipe": report.recipe,
        "model": header.model,
        "parameters": header.parameters,
        "device": header.device,
        "date": header.date,
        **header.versions,
        "FLOPs quantized": summary["coverage"],
        "FLOPs with one operand quantized": summary["one_sided"],
        "operands quantized": summary["quantized_operands"],
        "operands": summary["operands"],
        "matmuls": summary["matmuls"],
        **skipped,
        "FLOPs": summary["flops"]["total"],
        "bytes of weights": summary["weights"]["quantized"],
        "bytes kept for the backward": None if report.saved is None else report.saved.total,
        "card": time["card"],
        "time in high precision (us)": time["unquantized_us"],
        "estimated time (us)": time["quantized_us"],
        "largest error": max((loss.error for loss in report.losses), default=None),
        "fusions not taken": len(report.not_fused),
        "graph breaks": len(report.breaks),
        "compiled again": len(report.recompilations),
        "not compiled": len(report.uncompiled),
        "unused in the recipe": len(report.unused),
    }
    return {name: value for name, value in facts.items() if value != ""}
