"""A stepper through the passes over one block, for the page of a report."""

from __future__ import annotations

import json
import re
from html import escape
from typing import Any

from fxquant.report.data import ReportData, plain_spec
from fxquant.snapshots import KEPT, changes

MOST_LINES = 600
"""The lines of one step; those of a longer one are its changes alone."""

STYLE = """
.fxq .steps pre { max-height:560px; overflow:auto; background:var(--card); border:1px solid var(--line);
  border-radius:10px; padding:8px 0; margin:8px 0; }
.fxq .steps pre span { display:block; padding:0 14px; white-space:pre; width:max-content; min-width:100%;
  box-sizing:border-box; }
.fxq .steps .new { background:var(--block); } .fxq .steps .gone { background:var(--nvfp4); }
.fxq .steps .changed { background:var(--mxfp8); } .fxq .steps button { font:inherit; color:inherit;
  background:var(--card); border:1px solid var(--line); border-radius:7px; padding:5px 12px; cursor:pointer; }
.fxq .steps button:disabled { opacity:.5; cursor:default; } .fxq .steps select { min-width:0; max-width:100%; }
@media (max-width:760px) { .fxq .steps .tools { display:grid; grid-template-columns:auto minmax(0,1fr) auto; }
  .fxq .steps .tools label { grid-column:1 / -1; } }
.fxq .steps label { display:flex; align-items:center; gap:6px; } .fxq .steps label input { min-height:0; }
"""

SCRIPT = """
for (const box of document.querySelectorAll('.fxq .steps')) {
  const data = JSON.parse(box.querySelector('script').textContent), shown = box.querySelector('pre');
  const choice = box.querySelector('select'), [before, after] = box.querySelectorAll('button');
  const alone = box.querySelector('input'), kinds = { '+': 'new', '-': 'gone', '~': 'changed' };
  const update = () => {
    const at = choice.selectedIndex, step = data.steps[at];
    before.disabled = !at;
    after.disabled = at === data.steps.length - 1;
    box.querySelector('.because').textContent = step.because;
    shown.replaceChildren(...step.lines.filter(([mark]) => !alone.checked || mark !== ' ').map(([mark, line]) => {
      const row = document.createElement('span');
      row.className = kinds[mark] || '';
      row.textContent = mark + ' ' + data.lines[line];
      return row;
    }));
  };
  before.onclick = () => { choice.selectedIndex -= 1; update(); };
  after.onclick = () => { choice.selectedIndex += 1; update(); };
  choice.onchange = alone.onchange = update;
  update();
}
"""


def block_of(report: ReportData) -> str:
    """The name of the first of the blocks that repeat; empty for a model without such."""
    folded = next((layer.name for layer in report.layers(collapse=True) if "{" in layer.name), "")
    before, _, numbers = folded.partition("{")
    first = re.match(r"\d+", numbers)
    return f"{before}{first[0]}" if first else ""


def steps(report: ReportData, block: str) -> dict[str, Any]:
    """The changes of each pass to the nodes of a block: the lines of all steps once, and marks with their numbers."""
    inside = re.compile(rf"{re.escape(block)}(\.|$)" if block else "")
    numbers: dict[str, int] = {}
    shown = []
    for step in report.steps:
        marked = [(mark, node) for mark, node in changes(step.before, step.after) if inside.match(node.layer)]
        changed = [(mark, node) for mark, node in marked if mark != KEPT]
        if not changed:
            continue
        lines = [
            (mark, numbers.setdefault(plain_spec(str(node)), len(numbers)))
            for mark, node in (marked if len(marked) <= MOST_LINES else changed[:MOST_LINES])
        ]
        title = f"{step.stage}: {step.name}, {step.graph}, {len(changed)} changed"
        shown.append({"title": title, "because": step.because, "lines": lines})
    return {"block": block, "lines": list(numbers), "steps": shown}


def section(report: ReportData) -> str:
    """The stepper as a part of a page; empty for a report that kept no stages."""
    data = steps(report, block_of(report)) if report.steps else {}
    if not data.get("steps"):
        return ""
    options = "".join(f"<option>{escape(step['title'])}</option>" for step in data["steps"])
    name = f"<code>{escape(data['block'])}</code>" if data["block"] else "the model"
    content = json.dumps({key: data[key] for key in ("lines", "steps")}, separators=(",", ":"))
    content = content.replace("<", r"\u003c")  # nothing in it ends the element
    return (
        f"<section class='steps'><h2>Passes over {name}</h2><div class='tools'>"
        "<button type='button' aria-label='the pass before'>&lsaquo;</button>"
        f"<select aria-label='pass'>{options}</select>"
        "<button type='button' aria-label='the next pass'>&rsaquo;</button>"
        "<label><input type='checkbox' style='flex:none'> changes alone</label></div>"
        "<p class='soft because' aria-live='polite'></p><pre tabindex='0'></pre>"
        f"<script type='application/json'>{content}</script></section>"
    )
