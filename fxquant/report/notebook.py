"""The view of a report in a cell of a notebook: a few numbers, and a row for each kind of layer."""

from __future__ import annotations

from html import escape
from itertools import accumulate

from fxquant.decisions import SkipReason
from fxquant.report.data import ReportData
from fxquant.report.text import bytes_text, overview_columns, overview_rows, shortened, time_text, totals

MOST_OF_ROWS = 18_000
"""The characters that the rows of the table may take: a whole model of unequal layers would have hundreds."""

STYLE = """
.fxq-cell { font:13px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif; color:inherit; max-width:1100px; }
.fxq-cell .cards { display:flex; flex-wrap:wrap; gap:8px; margin:8px 0; }
.fxq-cell .cards div { border:1px solid rgba(128,128,128,.4); border-radius:8px; padding:6px 14px; }
.fxq-cell .cards b { display:block; font-size:18px; } .fxq-cell .soft { opacity:.75; }
.fxq-cell ul { margin:4px 0; padding-left:20px; } .fxq-cell details { margin-top:6px; }
.fxq-cell summary { cursor:pointer; } .fxq-cell .wide { overflow-x:auto; }
.fxq-cell table { border-collapse:collapse; margin:6px 0; color:inherit; }
.fxq-cell th, .fxq-cell td { text-align:left; padding:2px 12px 2px 0; white-space:nowrap; background:transparent; }
.fxq-cell td:first-child { font-family:ui-monospace,Menlo,Consolas,monospace; font-size:12px; }
"""


def fragment(report: ReportData) -> str:
    """The report as a part of a page: below 30 KB, in the colours of the notebook, without a script."""
    rows = overview_rows(report) if report.decisions else []
    shown = ["<tr>" + "".join(f"<td>{escape(shortened(cell, 120))}</td>" for cell in row) + "</tr>" for row in rows]
    ends = [end for end in accumulate(map(len, shown)) if end <= MOST_OF_ROWS]
    body, rest = "".join(shown[: len(ends)]), len(rows) - len(ends)
    head = "".join(f"<th scope='col'>{name}</th>" for name in overview_columns(rows))
    hidden = f"<p class='soft'>and {rest} more kinds of layers</p>" if rest else ""
    table = f"<div class='wide'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{hidden}"
    kinds = f"<details><summary>{len(rows)} kinds of layers</summary>{table}</details>" if rows else ""
    whole = "<p class='soft'>the whole page: <code>report.to_html(\"report.html\")</code></p>"
    cards = "".join(f"<div><b>{escape(number)}</b>{escape(label)}</div>" for number, label in _cards(report))
    return (
        f"<style>{STYLE}</style><div class='fxq-cell'><b>{escape(shortened(report.recipe, 300))}</b>"
        f"<div class='soft'>{escape(shortened(totals(report), 600))}</div><div class='cards'>{cards}</div>"
        f"{_notes(report)}{kinds}{whole}</div>"
    )


def _cards(report: ReportData) -> list[tuple[str, str]]:
    """The numbers of a report, each with its label."""
    summary, time = report.summary(), report.time()
    cards = [
        (f"{100 * summary['coverage']:.1f}%", "of FLOPs quantized"),
        (f"{summary['quantized_operands']} / {summary['operands']}", "operands quantized"),
    ]
    before, after = summary["weights"]["unquantized"], summary["weights"]["quantized"]
    if before != after:
        cards.append((f"{bytes_text(before)} → {bytes_text(after)}", "weights, as GEMMs read them"))
    if time["quantized_us"]:
        times = f"{time_text(time['unquantized_us'])} → {time_text(time['quantized_us'])}"
        basis = " from published rates" if time["published"] else ""
        cards.append((times, f"matmuls and casts, estimated{basis} for {time['card']}"))
    return cards


def _notes(report: ReportData) -> str:
    """The reasons of skips, and what did not run as the recipe has it."""
    skipped = report.summary()["skipped"]
    lines = [f"{count} × {name}: {SkipReason(name).meaning}" for name, count in skipped.items()]
    for title, texts in (
        ("unused in the recipe", report.unused), ("graph break", report.breaks),
        ("compiled again", report.recompilations), ("not compiled", report.uncompiled),
    ):  # fmt: skip
        lines += [f"{title}: {text}" for text in texts[:2]]
        lines += [f"{title}: and {len(texts) - 2} more"] * (len(texts) > 2)
    items = "".join(f"<li>{escape(shortened(line, 300))}</li>" for line in lines)
    return f"<ul>{items}</ul>" if items else ""
