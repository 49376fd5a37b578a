"""Draws what pages show besides the pipeline: operands with their formats, and measured figures (`make docs`).

Formats come from recipes, figures from `FIGURES`. Pictures follow the reader's light or dark scheme.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

import torch
from torch import nn

import fxquant
from fxquant import CustomRecipe, Direction, Gemm, factories

STYLE = """
svg { --text: #1f2933; --soft: #52606d; --line: #cbd2d9; --bf16: #7b8794; --torchao: #b7bec6; --ours: #2f6fd0;
  --more: #79a7ea; --paper: #ffffff; --e4m3: #dbe9fb; --e5m2: #d3f0e4; --fp4: #fbe3cf; --high: #eceff2 }
@media (prefers-color-scheme: dark) { svg { --text: #e4e7eb; --soft: #9aa5b1; --line: #3e4c59; --bf16: #9aa5b1;
  --torchao: #616e7c; --ours: #5b96ee; --more: #2f5a9e; --paper: #1b1f27; --e4m3: #1f3a63; --e5m2: #1d4a3a;
  --fp4: #5c3a1e; --high: #323f4b } }
text { font: 13px ui-sans-serif, system-ui, "DejaVu Sans", sans-serif; fill: var(--text) }
.name { font-weight: 600 } .note { fill: var(--soft); font-size: 12px } .number { font-weight: 600; font-size: 12px }
.mono { font: 12px ui-monospace, "DejaVu Sans Mono", monospace }
.paper { fill: var(--paper) } .axis { stroke: var(--line) } .box { stroke: var(--soft) }
"""
FILLS = {"bf16": "--bf16", "torchao": "--torchao", "ours": "--ours", "more": "--more"}


class Figures(NamedTuple):
    """Measured figures of one run: `source` has the card, versions, date and command that repeats them."""

    title: str
    unit: str
    source: str
    rows: tuple[tuple[str, float, str], ...]


BLOCKS = "one NVIDIA H200, torch 2.11.0+cu130, torchao 0.17.0, 2026-11-30: python -m fxquant bench block"
FIGURES = {
    "speed": Figures(
        "Speed of a training step, four Llama3-8B blocks, over bf16", "x", BLOCKS,
        (
            ("bf16 Inductor", 1.00, "bf16"), ("torchao rowwise", 1.19, "torchao"),
            ("torchao tensorwise", 1.39, "torchao"), ("float8_blockwise", 1.34, "ours"), ("rowwise", 1.39, "ours"),
            ("current_scaling", 1.44, "ours"), ("delayed_scaling", 1.48, "ours"),
        ),
    ),
    "memory": Figures(
        "Peak memory of the same steps", " GiB", BLOCKS,
        (
            ("bf16 Inductor", 11.57, "bf16"), ("torchao rowwise", 10.44, "torchao"),
            ("torchao tensorwise", 9.93, "torchao"), ("float8_blockwise", 9.76, "ours"), ("rowwise", 10.03, "ours"),
            ("current_scaling", 9.72, "ours"), ("delayed_scaling", 9.71, "ours"),
        ),
    ),
}  # fmt: skip
"""Figures in bars, by name: docs/measurements/blocks.md has the tables."""

TOKENS = (1, 16, 32, 64)
DECODE = {
    "torchao, its better variant": (23.8, 26.7, 27.6, 28.0),
    "float8_blockwise": (21.4, 22.8, 23.6, 25.0),
    "current_scaling": (20.8, 23.4, 24.3, 25.1),
    "rowwise": (20.9, 22.7, 23.4, 24.3),
    "reading the FP8 weight": (19.8, 19.8, 19.8, 19.8),
}
"""Microseconds of one linear layer, K = 4096, N = 14336, by number of tokens: docs/measurements/decode.md."""
DECODE_SOURCE = (
    "one NVIDIA H100 80GB HBM3, torch 2.11.0+cu130, torchao 0.17.0, 2026-11-28: python -m fxquant bench decode"
)


def picture(width: int, height: int, title: str, body: Sequence[str]) -> str:
    """Returns an SVG with a title for those who do not see it."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'role="img">',
            f"<title>{escape(title)}</title><style>{STYLE}</style>",
            f'<rect class="paper" width="{width}" height="{height}" rx="8"/>',
            *body,
            "</svg>\n",
        ]
    )


def text(x: float, y: float, content: str, kind: str = "", anchor: str = "start") -> str:
    """Returns a line of text, of a kind that `STYLE` knows, beginning, centered or ending at a place."""
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(content)}</text>'


def bars(figures: Figures) -> str:
    """Returns horizontal bars, each behind its name and its number, which a narrow screen shows first."""
    left, right, line = 290, 744, 28
    scale = (right - left) / max(value for _, value, _ in figures.rows)
    body = [text(16, 28, figures.title, "name")]
    for place, (name, value, kind) in enumerate(figures.rows):
        y = 46 + place * line
        body += [
            text(left - 86, y + 15, name, "", "end"),
            text(left - 10, y + 15, f"{value:.2f}{figures.unit}", "number", "end"),
            f'<rect x="{left}" y="{y}" width="{value * scale:.1f}" height="20" rx="3" fill="var({FILLS[kind]})"/>',
        ]
    bottom = 46 + len(figures.rows) * line + 20
    body.append(text(16, bottom, figures.source, "note"))
    return picture(760, bottom + 14, figures.title, body)


def decode() -> str:
    """Returns lines over the number of tokens, with names at their ends."""
    left, right, top, bottom, low, high = 60, 520, 60, 300, 18.0, 30.0

    def at(number: int, value: float) -> tuple[float, float]:
        x = left + number * (right - left) / (len(TOKENS) - 1)
        return x, bottom - (value - low) / (high - low) * (bottom - top)

    title = "Decode: microseconds of one linear layer, 4096 to 14336 features, by tokens"
    body = [text(16, 28, title, "name")]
    for value in range(18, 31, 4):
        y = at(0, value)[1]
        body += [
            f'<path class="axis" d="M{left} {y:g} H{right}"/>',
            text(left - 8, y + 4, str(value), "note", "end"),
        ]
    body += [text(at(i, low)[0], bottom + 20, str(tokens), "note", "middle") for i, tokens in enumerate(TOKENS)]
    names = sorted(DECODE, key=lambda name: DECODE[name][-1])
    height = bottom
    for name in names:
        color = "--torchao" if "torchao" in name else "--bf16" if "reading" in name else "--ours"
        dash = {"reading the FP8 weight": "2 4", "current_scaling": "7 3", "float8_blockwise": "3 3"}.get(name, "none")
        points = " ".join("{:.1f},{:.1f}".format(*at(i, value)) for i, value in enumerate(DECODE[name]))
        body.append(
            f'<polyline points="{points}" fill="none" stroke="var({color})" stroke-width="2.5" '
            f'stroke-dasharray="{dash}"/>'
        )
        height = min(at(3, DECODE[name][-1])[1] + 4, height - 17)
        body.append(text(right + 10, height, name, "note"))
    body.append(text(16, bottom + 50, DECODE_SOURCE, "note"))
    return picture(760, bottom + 64, title, body)


def operands(recipe: fxquant.Recipe | str, title: str) -> str:
    """Returns the three GEMMs of a linear layer with the formats that a recipe gives their six operands."""
    x = torch.randn(64, 256, requires_grad=True)
    decisions = fxquant.explain(nn.Linear(256, 256), recipe, x).decisions
    result = {Gemm.FPROP: "output", Gemm.DGRAD: "grad_input", Gemm.WGRAD: "grad_weight"}
    body = [text(16, 28, title, "name")]
    for row, gemm in enumerate(result):
        y = 48 + row * 76
        body.append(text(16, y + 36, gemm, "name"))
        for column, decision in enumerate(d for d in decisions if d.gemm == gemm):
            spec = str(decision.quantizer)
            halves = spec.replace(">", "|").split("|")
            spec = halves[decision.direction is Direction.COLUMNWISE and len(halves) > 1]
            left = 80 + column * 280
            body += box(left, y, f"{decision.role.tensor_type}, {decision.direction}", spec)
            body.append(text(left + 259, y + 36, "@" if column == 0 else "=", "name", "middle"))
        body.append(text(628, y + 36, f"{result[gemm]}, bfloat16"))
    return picture(790, 48 + 3 * 76 + 6, title, body)


def box(x: int, y: int, name: str, spec: str) -> list[str]:
    """Returns a box of one operand: its name above its format, in the color of the format."""
    fill = "--high" if spec == "identity" else "--fp4" if "fp4" in spec else "--e5m2" if "e5m2" in spec else "--e4m3"
    return [
        f'<rect class="box" x="{x}" y="{y}" width="240" height="58" rx="6" fill="var({fill})"/>',
        text(x + 12, y + 24, name),
        text(x + 12, y + 45, spec, "mono"),
    ]


PICTURES: dict[str, Callable[[], str]] = {
    "operands": lambda: operands("mxfp8", "The three GEMMs of a linear layer and their six operands, under mxfp8"),
    "hybrid": lambda: operands(
        CustomRecipe(qfactory=factories.mxfp8_fwd_nvfp4_bwd),
        "MXFP8 forward, NVFP4 backward: a format for each direction",
    ),
    "speed": lambda: bars(FIGURES["speed"]),
    "memory": lambda: bars(FIGURES["memory"]),
    "decode": decode,
}
"""The pictures in docs/pictures, by the names of their files."""
