"""Draws the stages of `fxquant.passes.pipeline` as an SVG: ``make docs`` writes it to docs/pipeline.svg."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from fxquant.passes import pipeline
from fxquant.passes.pipeline import Pass

WIDTH, GAP, COLUMN_GAP, MARGIN = 246, 26, 34, 14
"""The width of a box, the room below it, the room between columns, and the margin around everything, in pixels."""
LINE, HEAD = 18, 44
"""The height of a line of text and of a box without passes, in pixels."""

STYLE = """
svg { --text: #1f2933; --soft: #52606d; --paper: #ffffff; --stage: #eef4fc; --other: #f4f4f2 }
@media (prefers-color-scheme: dark) { svg { --text: #e4e7eb; --soft: #9aa5b1; --paper: #1b1f27; --stage: #1f2f4a;
  --other: #2a2f38 } }
text { font: 13px ui-sans-serif, system-ui, "DejaVu Sans", sans-serif; fill: var(--text) }
.name { font-weight: 600 } .note { fill: var(--soft); font-size: 12px }
.pass { font: 12px ui-monospace, "DejaVu Sans Mono", monospace }
.paper { fill: var(--paper) } .head { fill: var(--soft) }
.stage { fill: var(--stage); stroke: #3b76c4 } .other { fill: var(--other); stroke: #9aa5b1 }
.training { fill: #b7791f } .needs { fill: none; stroke: #b83280; stroke-width: 1.5 }
.arrow { stroke: var(--soft); stroke-width: 1.5; fill: none; marker-end: url(#head) }
"""

Box = tuple[str, str, Sequence[Pass]]
"""A name, what it works on, and the passes of a stage; none for what torch does."""

COLUMNS: tuple[tuple[Box, ...], ...] = (
    (
        ("torch.compile", "Dynamo captures a call", ()),
        ("CAPTURED", "the captured graph", pipeline.CAPTURED),
        ("BOUND", "a copy with more inputs", pipeline.BOUND),
    ),
    (
        ("AOTAutograd", "traces forward and backward", ()),
        ("JOINT", "both in one graph", pipeline.JOINT),
        ("the partitioner", "cuts them apart", ()),
        ("MEANING", "each half, for inner=aot_eager", pipeline.MEANING),
    ),
    (
        ("Inductor", "each half, as ATen operators", ()),
        ("SPLIT", "forward or backward", pipeline.SPLIT),
        ("Inductor", "writes and compiles kernels", ()),
    ),
    (
        ("torch.export", "gives a program", ()),
        ("EXPORTED", "quantize_program", pipeline.EXPORTED),
        ("CALIBRATED", "with calibration inputs", pipeline.CALIBRATED),
        ("PACKAGED", "ahead of time, then SPLIT", pipeline.PACKAGED),
        ("LOWERED", "or lower_program: ATen alone", pipeline.LOWERED),
    ),
)
"""The boxes, each column from above."""


def rows(passes: Sequence[Pass]) -> list[tuple[str, Pass | None]]:
    """The passes by name; the whole of `CAPTURED` inside another stage is one row, without a pass."""
    inner = pipeline.CAPTURED
    for start in range(len(passes) - len(inner) + 1 if len(passes) > len(inner) else 0):
        if tuple(passes[start : start + len(inner)]) == inner:
            return [*rows(passes[:start]), ("all of CAPTURED", None), *rows(passes[start + len(inner) :])]
    return [(step.name, step) for step in passes]


def height(box: Box) -> int:
    """The height of a box in pixels."""
    count = len(rows(box[2]))
    return HEAD + (count * LINE + 8 if count else 0)


def draw_box(box: Box, x: int, y: int) -> list[str]:
    """A box with its name, its passes, and marks behind those that are special; a pass says why on hovering."""
    name, note, passes = box
    kind = "stage" if passes else "other"
    lines = [
        f'<rect class="{kind}" x="{x}" y="{y}" width="{WIDTH}" height="{height(box)}" rx="6"/>',
        f'<text class="name" x="{x + 12}" y="{y + 19}">{escape(name)}</text>',
        f'<text class="note" x="{x + 12}" y="{y + 35}">{escape(note)}</text>',
    ]
    for index, (label, step) in enumerate(rows(passes)):
        base = y + HEAD + 12 + index * LINE
        title = f"<title>{escape(step.because)}</title>" if step else ""
        lines.append(f'<text class="pass" x="{x + 12}" y="{base}">{title}{escape(label)}</text>')
        if step is None:
            continue
        if step.training_only:
            lines.append(f'<circle class="training" cx="{x + WIDTH - 14}" cy="{base - 4}" r="4"/>')
        if not step.portable:
            lines.append(f'<circle class="needs" cx="{x + WIDTH - 28}" cy="{base - 4}" r="4"/>')
    return lines


def draw() -> str:
    """The whole picture."""
    total = max(sum(map(height, column)) + GAP * (len(column) - 1) for column in COLUMNS) + 2 * MARGIN + 2 * LINE
    width = len(COLUMNS) * (WIDTH + COLUMN_GAP) - COLUMN_GAP + 2 * MARGIN
    body: list[str] = []
    for number, column in enumerate(COLUMNS):
        x, y = MARGIN + number * (WIDTH + COLUMN_GAP), MARGIN
        middle = x + WIDTH // 2
        for place, box in enumerate(column):
            body += draw_box(box, x, y)
            y += height(box)
            if place + 1 < len(column):
                body.append(f'<path class="arrow" d="M{middle} {y} V{y + GAP - 4}"/>')
                y += GAP
        if number < 2:  # to the column on the right, which begins where this one ends
            side, target = x + WIDTH, MARGIN + HEAD // 2
            start = y - height(column[-1]) // 2 if number == 0 else cut_of(column)
            bend = side + COLUMN_GAP // 2
            body.append(f'<path class="arrow" d="M{side} {start} H{bend} V{target} H{side + COLUMN_GAP - 4}"/>')
    legend = total - MARGIN
    body += [
        f'<circle class="training" cx="{MARGIN + 6}" cy="{legend - 4}" r="4"/>',
        f'<text class="note" x="{MARGIN + 18}" y="{legend}">for training only</text>',
        f'<circle class="needs" cx="{MARGIN + 146}" cy="{legend - 4}" r="4"/>',
        f'<text class="note" x="{MARGIN + 158}" y="{legend}">its graph needs fxquant to run</text>',
    ]
    head = '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {total}" width="{width}" height="{total}">',
            f"<style>{STYLE}</style>",
            f'<defs>{head}<path d="M0 0 L8 4 L0 8 z" class="head"/></marker></defs>',
            f'<rect class="paper" width="{width}" height="{total}" rx="8"/>',
            *body,
            "</svg>\n",
        ]
    )


def cut_of(column: Sequence[Box]) -> int:
    """The middle of the box before the last, in pixels from above: there the partitioner hands over to Inductor."""
    above = sum(height(box) + GAP for box in column[:-2])
    return MARGIN + above + height(column[-2]) // 2
