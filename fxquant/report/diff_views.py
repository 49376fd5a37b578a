"""The views of a comparison: text of a screen, JSON, and a page."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from difflib import unified_diff
from html import escape
from pathlib import Path
from typing import Annotated, Any

from fxquant.checks import AtLeast, checked
from fxquant.errors import ArgumentError
from fxquant.files import write_whole
from fxquant.report import html
from fxquant.report.diff import KINDS, Change, Difference, Operand, Pair, Source, compare
from fxquant.report.json import SCHEMA
from fxquant.report.text import aligned, bytes_text, count_text, shortened, time_text

MOST_ROWS = 5
"""The rows of one kind of change in text, and the layers that a sentence names."""
MOST_KINDS = 6
"""The kinds of changes whose rows are in text."""

_WIDTH = 60
"""The characters of a fact that are shown."""

_SHARES = ("FLOPs quantized", "FLOPs with one operand quantized", "largest error")
_ALWAYS = ("recipe", "FLOPs quantized", "estimated time (us)", "bytes of weights")
"""The facts that a comparison shows where they are equal too."""


class Diff(Difference):
    """The difference between two reports: print it, or write it as JSON or HTML. It is true if there is any."""

    def __str__(self) -> str:
        return text(self)

    def to_json(self) -> str:
        """The comparison as a JSON object, with the version of its form in ``schema``, which is that of reports."""
        return dumps(self)

    def to_html(self, path: str | Path) -> None:
        """Writes one file that needs no other, whole or not at all. Raises ProgramError if it cannot be written."""
        whole = page(self)
        write_whole(path, lambda file: file.write(whole.encode()))


@checked(ArgumentError, called="fxquant.diff", takes=dict.fromkeys("ab", "a Report, its JSON or the path of it"))
def diff(a: Source, b: Source, tolerance: Annotated[float, AtLeast(0)] = 0.01) -> Diff:
    """The changes between two reports: two recipes, two versions of torch, two checkpoints of a model.

    Each is a Report, its JSON, or the path of it. Layers are compared by name, in their decisions, kernels, sizes,
    estimated time, bytes and measured errors; repeated layers are one row. Times and errors within `tolerance` of each
    other are the same. Raises ProgramError for what is not the JSON of a report.
    """
    return Diff(**compare(a, b, tolerance))


def text(diff: Difference) -> str:
    """The facts that differ, then the changed layers of each kind."""
    shown = [pair for pair in diff.summary if pair.a != pair.b or pair.what in _ALWAYS]
    sides = [[shortened(_value(pair.what, side), _WIDTH) for side in (pair.a, pair.b)] for pair in shown]
    rows = [(_label(pair), *texts) for pair, texts in zip(shown, sides, strict=True)]
    lines = [aligned([("", *diff.named), *rows]), *_sentences(diff)]
    kinds = list(diff.by_kind().items())
    for kind, changes in kinds[:MOST_KINDS]:
        lines.append(f"{_title(diff, kind)}:")
        lines.append(aligned([("  " + change.name, _times(change), _what(change)) for change in changes[:MOST_ROWS]]))
        if len(changes) > MOST_ROWS:
            lines.append(f"  and {len(changes) - MOST_ROWS} more kinds of layers")
    if len(kinds) > MOST_KINDS:
        lines.append(f"and {len(kinds) - MOST_KINDS} more kinds of changes: diff.to_json() has all")
    return "\n".join(lines)


def _sentences(diff: Difference) -> list[str]:
    """The changes in a few lines."""
    if not diff.changes:
        return [f"all {diff.same} layers are the same"]
    lines = []
    for kind, changes in diff.by_kind().items():
        count = sum(len(change.layers) for change in changes)
        names = ", ".join(change.name for change in changes[:MOST_ROWS])
        more = f" and {len(changes) - MOST_ROWS} more kinds" if len(changes) > MOST_ROWS else ""
        lines.append(f"{count_text(count, 'layer')} {_title(diff, kind)}: {names}{more}")
    formats = [f"{a} → {b} ({count_text(count, 'operand')})" for a, b, count in diff.formats[:4]]
    more = f" and {len(diff.formats) - 4} more" if len(diff.formats) > 4 else ""
    lines += [f"formats: {'; '.join(formats)}{more}"] if formats else []
    return [*lines, *_slower(diff), f"{count_text(diff.same, 'layer')} the same", ""]


def _slower(diff: Difference) -> list[str]:
    """Says of a side that takes longer than without quantization that it does."""
    facts = {pair.what: pair for pair in diff.summary}
    time, high = facts["estimated time (us)"], facts["time in high precision (us)"]
    sides = ((diff.named[0], time.a, high.a), (diff.named[1], time.b, high.b))
    return [
        f"{name} is slower than high precision: {time_text(taken)} of {time_text(plain)}, as where formats are emulated"
        for name, taken, plain in sides
        if taken is not None and plain is not None and taken > plain
    ]


def _title(diff: Difference, kind: str) -> str:
    return KINDS[kind].format(a=diff.named[0], b=diff.named[1])


def _times(change: Change) -> str:
    return f"×{len(change.layers)}" if len(change.layers) > 1 else ""


def _what(change: Change) -> str:
    """The change of a layer in one line."""
    parts = [*_operands(change.operands)]
    parts += [f"{pair.what} {pair.a} → {pair.b}" for pair in change.sizes]
    if change.kind == "other kernels":
        parts += [f"{pair.what}: {pair.a} → {pair.b}" for pair in change.kernels[:2]]
    if change.time.a != change.time.b and change.time.a is not None and change.time.b is not None:
        parts.append(f"{time_text(change.time.a)} → {time_text(change.time.b)}")
    parts += [f"error of {pair.what} {_value('largest error', pair.a)} → {_value('largest error', pair.b)}"
              for pair in change.errors[:2]]  # fmt: skip
    return "; ".join(parts)


def _operands(operands: Iterable[Operand]) -> list[str]:
    """The changes of a layer's operands, those that change alike together."""
    alike: dict[tuple[str, str], list[Operand]] = {}
    for operand in operands:
        alike.setdefault((operand.a, operand.b), []).append(operand)
    texts = []
    for (a, b), members in alike.items():
        names = ", ".join(dict.fromkeys(member.operand for member in members))
        change = f"{a} → {b}" if a and b else a or b
        texts.append(change if len(alike) == 1 else f"{names} {change}")
    return texts


def _label(pair: Pair) -> str:
    """The name of a fact, whose value is shown with its unit."""
    return pair.what.removesuffix(" (us)")


def _value(what: str, value: Any) -> str:
    """A fact of the summary as text."""
    if value is None:
        return "0" if what.startswith("skipped") else "-"
    if what in _SHARES:
        return f"{100 * value:.3g}%"
    if what.endswith(" (us)"):
        return time_text(value)
    if what == "date":
        return str(value).replace("T", " ")[:16]
    if what.startswith("bytes"):
        return bytes_text(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def dumps(diff: Difference) -> str:
    """The comparison as JSON."""
    content = {
        "schema": SCHEMA,
        "a": {"name": diff.named[0], "header": asdict(diff.a.header)},
        "b": {"name": diff.named[1], "header": asdict(diff.b.header)},
        "differs": bool(diff),
        "same": diff.same,
        "summary": [asdict(pair) for pair in diff.summary],
        "formats": [{"a": a, "b": b, "operands": count} for a, b, count in diff.formats],
        "changes": [asdict(change) for change in diff.changes],
    }
    return json.dumps(content, indent=1)


def page(diff: Difference) -> str:
    """The comparison as a whole HTML document."""
    a, b = map(escape, diff.named)
    head = "<div class='overline'><span>fxquant diff</span><button class='theme' type='button' hidden></button></div>"
    head += f"<h1><small>from</small> {a} <small>to</small> {b}</h1>"
    sides = [diff.a.recipe, diff.b.recipe] if diff.a.recipe != diff.b.recipe else [diff.a.recipe]
    models = dict.fromkeys(filter(None, (diff.a.header.model, diff.b.header.model)))
    about = f"{' → '.join(models)}, {' → '.join(shortened(recipe, _WIDTH) for recipe in sides)}".strip(", ")
    head += f"<p class='soft'>{escape(about)}</p>"
    sections = [_section(diff, kind, changes) for kind, changes in diff.by_kind().items()]
    lead = "".join(f"<li>{escape(line)}</li>" for line in _sentences(diff) if line)
    parts = [head, _cards(diff), f"<h2>What changed</h2><ul class='lead'>{lead}</ul>", *sections, _facts(diff)]
    parts += _recipes(diff)
    return html.page(f"fxquant diff: {diff.named[0]}, {diff.named[1]}", f"<style>{STYLE}</style>" + "\n".join(parts))


STYLE = """
.fxq .lead { padding-left:20px; margin:6px 0; } .fxq .lead li { margin:3px 0; overflow-wrap:anywhere; }
.fxq .delta td, .fxq .delta th { padding:6px 12px; } .fxq .delta td { vertical-align:top; }
.fxq .delta td.name { font-family:ui-monospace,Menlo,Consolas,monospace; font-size:12.5px; overflow-wrap:anywhere; }
.fxq .delta details > summary { cursor:pointer; font-weight:400; padding:0; }
.fxq .delta tbody tr { border-top:1px solid var(--line); }
.fxq .delta details { border:0; margin:0; background:none; } .fxq .delta td.num { white-space:nowrap; }
.fxq .delta th { text-align:left; } .fxq .delta th.num { text-align:right; } .fxq .delta { width:100%; }
.fxq .delta .same td { color:var(--soft); } .fxq .delta b { font-weight:600; }
.fxq .delta .inner { margin:6px 0; width:auto; }
.fxq .delta .inner td, .fxq .delta .inner th { padding:2px 14px 2px 0; }
.fxq .delta td.name { min-width:230px; }
@media (max-width:760px) {
  .fxq .layers > thead { display:none; } .fxq .layers > tbody > tr { display:block; padding:8px 0; }
  .fxq .layers > tbody > tr > td { display:block; padding:1px 12px; }
  .fxq .layers > tbody > tr > td.num { text-align:left; }
}
"""


def _cards(diff: Difference) -> str:
    facts = {pair.what: pair for pair in diff.summary}
    changed = sum(len(change.layers) for change in diff.changes)
    cards = [("layers changed", f"{changed:,}", f"{diff.same:,} the same")]
    for what, label in (
        ("FLOPs quantized", "FLOPs quantized"), ("estimated time (us)", "estimated time of matmuls and casts"),
        ("bytes of weights", "weights as forwards read them"), ("bytes kept for the backward", "kept for the backward"),
        ("largest error", "largest error of a product"),
    ):  # fmt: skip
        pair = facts[what]
        if pair.a is not None and pair.b is not None:
            same = "" if pair.a != pair.b else ", the same"
            under = _ratio(pair)
            if what == "estimated time (us)":
                high = facts["time in high precision (us)"]
                under += f"; in high precision {' and '.join(dict.fromkeys(_value(what, t) for t in (high.a, high.b)))}"
            a, b = _value(what, pair.a), _value(what, pair.b)
            cards.append((label + same, a if a == b else f"{a} → {b}", under))
    return "<div class='cards'>" + "".join(_card(*card) for card in cards) + "</div>"


def _card(label: str, number: str, under: str) -> str:
    return (
        f"<div class='card'><div class='label'>{escape(label)}</div><b>{escape(number)}</b>"
        f"<span class='soft'>{escape(under)}</span></div>"
    )


def _ratio(pair: Pair) -> str:
    """How the second side compares with the first."""
    if pair.a == pair.b or not pair.a or not pair.b:
        return ""
    if pair.what.startswith("FLOPs"):
        return f"{100 * (pair.b - pair.a):+.3g} percentage points"
    return f"{pair.b / pair.a - 1:+.1%}"


def _section(diff: Difference, kind: str, changes: Sequence[Change]) -> str:
    count = sum(len(change.layers) for change in changes)
    rows = "".join(_row(diff, change) for change in changes)
    timed = any(change.time.b is not None for change in changes)
    head = "<th scope='col'>layer</th><th scope='col'>change (open for each operand)</th>"
    head += "<th scope='col' class='num'>estimated time</th>" * timed
    return (
        f"<h2>{escape(count_text(count, 'layer'))} {escape(_title(diff, kind))}</h2><div class='frame scroll'>"
        f"<table class='delta layers'><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _row(diff: Difference, change: Change) -> str:
    short = "; ".join([*_operands(change.operands), *(f"{p.what} {p.a} → {p.b}" for p in change.sizes)])
    short = short or "; ".join(f"{pair.what}: {pair.a or '-'} → {pair.b or '-'}" for pair in change.kernels[:1])
    short = short or "; ".join(f"error of {p.what}" for p in change.errors) or change.kind
    count = f"<span class='times'>×{len(change.layers)}</span>" if len(change.layers) > 1 else ""
    time = ""
    if change.time.a is not None and change.time.b is not None:
        time = ", ".join(
            filter(None, (f"{time_text(change.time.a)} → {time_text(change.time.b)}", _ratio(change.time)))
        )
    elif change.time.b is not None or change.time.a is not None:
        time = time_text(change.time.b or change.time.a)
    return (
        f"<tr><td class='name'>{escape(change.name)}{count}</td><td><details><summary>{escape(short)}</summary>"
        f"{_inner(diff, change)}</details></td><td class='num'>{escape(time)}</td></tr>"
    )


def _inner(diff: Difference, change: Change) -> str:
    """The operands, kernels, bytes and errors of a change, side by side."""
    rows = [(f"{o.gemm} {o.operand} {o.direction}", o.a, o.b) for o in change.operands]
    rows += [(f"{pair.what} size", pair.a, pair.b) for pair in change.sizes]
    rows += [(f"{pair.what} kernel", pair.a or "", pair.b or "") for pair in change.kernels]
    if change.bytes.a != change.bytes.b:
        rows.append(("bytes of weights", bytes_text(change.bytes.a), bytes_text(change.bytes.b)))
    rows += [(f"error of {p.what}", _value("largest error", p.a), _value("largest error", p.b)) for p in change.errors]
    return _table(("", *diff.named), rows, "inner")


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], kind: str) -> str:
    head = "".join(f"<th scope='col'>{escape(name)}</th>" for name in columns)
    cells = [
        f"<th scope='row'>{escape(row[0])}</th>" + "".join(f"<td>{escape(text)}</td>" for text in row[1:])
        for row in rows
    ]
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    return f"<table class='{kind}'><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _facts(diff: Difference) -> str:
    """The facts about both reports, those that differ first."""
    facts = sorted(diff.summary, key=lambda pair: pair.a == pair.b)
    rows = [(_label(pair), *(_value(pair.what, side) for side in (pair.a, pair.b))) for pair in facts]
    changed = [row for row in rows if row[1] != row[2]]
    equal = [row[:2] for row in rows if row[1] == row[2]]
    same = f"<details class='group'><summary>{len(equal)} facts are the same</summary><div>"
    same += _table(("", "both"), equal, "delta") + "</div></details>"
    table = _table(("", *diff.named), changed, "delta") if changed else ""
    return f"<h2>Both reports</h2><div class='frame scroll'>{table}</div>{same if equal else ''}"


def _recipes(diff: Difference) -> list[str]:
    """The recipes as Python, as a patch where both are known and differ."""
    a, b = diff.a.header.recipe, diff.b.header.recipe
    if a == b or not (a and b):
        return []
    lines = unified_diff(a.splitlines(), b.splitlines(), *diff.named, lineterm="", n=20)
    return [f"<h2>The recipes</h2><pre>{escape(chr(10).join(lines))}</pre>"]
