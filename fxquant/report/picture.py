"""The neighbourhood of a layer's products as an SVG: boxes coloured by format, edges by direction."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from fxquant.decisions import NotFused
from fxquant.errors import OptionError
from fxquant.files import write_whole
from fxquant.formats import QuantSpec
from fxquant.report.data import MODEL, ReportData, plain_spec
from fxquant.report.layered import Layout, arrange
from fxquant.report.markup import capital
from fxquant.report.neighbours import Unit, Units, sides_of
from fxquant.snapshots import NodeText

STYLE = """
.fxg { --ink:#1c2430; --soft:#5b6676; --line:#dde2ea; --card:#fff; --hatch:#e6eaf0; --accent:#2563c9; --bad:#c2410c;
  --per_tensor:#cfe3fb; --per_row:#bfe9ec; --block:#d6ebc4; --mxfp8:#fbe3b5; --nvfp4:#f8cfc4; --own:#e3d3f5; }
@media (prefers-color-scheme: dark) { .fxg { --ink:#e4e9f1; --soft:#98a4b5; --line:#323b49; --card:#1b222c;
  --hatch:#2a323e; --accent:#7fb0ff; --bad:#ff9566; --per_tensor:#1f4a7d; --per_row:#14595f; --block:#355d1d;
  --mxfp8:#6b4d0b; --nvfp4:#74321f; --own:#50327a; } }
"""
"""The colours of a picture that stands alone; inside a page they are the page's."""

GRAPHS = ("forward", "backward")
MOST_BYTES = 600_000
RULES = """
.fxg text { font:11.5px system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif; fill:var(--ink); }
.fxg .h { font-weight:650; } .fxg .s { fill:var(--soft); font-size:11px; } .fxg .m { font-size:11px;
  font-family:ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace; }
.fxg rect { fill:var(--card); stroke:var(--soft); stroke-width:1; } .fxg .bare { stroke:none; }
.fxg .product > rect { stroke:var(--accent); stroke-width:2.5; } .fxg .near > rect { stroke:var(--line); }
.fxg .fused > rect { stroke-width:2.5; } .fxg .unfused > rect { stroke:var(--bad); stroke-dasharray:5 3; }
.fxg .per_tensor, .fxg .per_head { fill:var(--per_tensor); } .fxg .per_row { fill:var(--per_row); }
.fxg .block { fill:var(--block); } .fxg .mxfp8 { fill:var(--mxfp8); } .fxg .nvfp4 { fill:var(--nvfp4); }
.fxg .custom { fill:var(--own); } .fxg .identity { fill:var(--hatch); }
.fxg path { stroke:var(--soft); stroke-width:1.5; fill:none; } .fxg .columnwise { stroke-dasharray:6 4; }
.fxg .rowwise, .fxg .columnwise { stroke:var(--accent); } .fxg marker path { fill:var(--soft); stroke:none; }
.fxg rect.per_tensor, .fxg rect.per_head, .fxg rect.per_row, .fxg rect.block, .fxg rect.mxfp8, .fxg rect.nvfp4,
.fxg rect.custom, .fxg rect.identity { stroke:none; }
"""
"""The style of all pictures, by the colours that are around them."""

_WIDTH, _PITCH, _GAP, _MARGIN = 186, 206, 38, 12
"""The width of a box, the distance of two columns, the room between layers, and the margin, in pixels."""
_LINE, _PAD = 15, 8
_CASTS = {"_to_copy": "cast", "prims::convert_element_type": "cast"}
_CHARACTERS = 28
"""The characters of a line in a box."""


@dataclass(eq=False)
class _Box:
    """A box as it is drawn: its first line is a heading."""

    style: str
    lines: list[str]
    detail: str
    halves: list[tuple[str, str]] = field(default_factory=list)
    """The family and the text of each format."""
    notes: list[str] = field(default_factory=list)

    @property
    def height(self) -> int:
        return 2 * _PAD + _LINE * (len(self.lines) + bool(self.halves)) + (3 if self.halves else 0)


class Svg(str):
    """A picture as text, which notebooks draw."""

    def _repr_svg_(self) -> str:
        return str(self)


def picture(report: ReportData, layer: str, graph: str = "forward", *, path: str | Path | None = None) -> Svg:
    """An SVG of what stands around the products of a layer in the ``forward`` or the ``backward``.

    Quantizations are coloured by their formats, and edges tell rowwise from columnwise payloads. What one kernel
    computes is one box; what was considered for that, and is not, has a number and its reason. It is also written to
    `path`. Raises OptionError for a layer without products in this graph.
    """
    if graph not in GRAPHS:
        raise OptionError(f"graph={graph!r}: it is 'forward' or 'backward'")
    drawn = Pictures(report).of(layer, graph) if report.views else report.drawn.get(layer, {}).get(graph)
    if not drawn:
        raise OptionError(_missing(report, layer, graph))
    svg = drawn.replace(">", f"><style>{STYLE}{RULES}</style>", 1)
    if path is not None:
        write_whole(path, lambda file: file.write(svg.encode()))
    return Svg(svg)


def _missing(report: ReportData, layer: str, graph: str) -> str:
    if not report.views and not report.drawn:
        return "this report has no graphs: torch took what it had compiled from a cache, or nothing has run"
    layers = list(dict.fromkeys(d.layer or MODEL for d in report.decisions))
    if layer not in layers:
        return f"no layer {layer!r}; the layers are {', '.join(layers[:12])}{' ..' if len(layers) > 12 else ''}"
    if not report.views:
        return f"this report was read, and has pictures of {', '.join(report.drawn)}: of equal layers the first"
    return f"layer {layer!r} has no product in a {graph} graph"


class Pictures:
    """The pictures of a report; a graph is read once for all layers."""

    def __init__(self, report: ReportData) -> None:
        self.report = report
        self.graphs: dict[str, list[Units]] = {}
        self.saved = {node.name for view in report.views.get("backward", ()) for node in view if _is_input(node)}

    def of(self, layer: str, graph: str) -> str:
        """The SVG of a layer in a graph, without colours; empty if it has no product there."""
        if graph not in self.graphs:
            self.graphs[graph] = [Units(view) for view in self.report.views.get(graph, ())]
        name = "" if layer == MODEL else layer
        for units in self.graphs[graph]:
            chosen = units.around(name)
            if chosen:
                return _draw(_Reader(self.report, units, chosen, name, graph, self.saved))
        return ""


def pictures(report: ReportData) -> dict[str, dict[str, str]]:
    """The pictures of all layers, those that are equal but for a number once: by the layer's name and the graph's.

    They take their colours from the page around them, and their style from `RULES`. Where hardly any layers are equal,
    they are the first of them, in `MOST_BYTES`. Those of a report that was read are as they were drawn then.
    """
    if not report.views:
        return report.drawn
    drawn = Pictures(report)
    layers = dict.fromkeys(layer.decisions[0].layer for layer in report.layers(collapse=True))
    svgs: dict[str, dict[str, str]] = {}
    size = 0
    for layer in layers:
        by_graph = {graph: svg for graph in GRAPHS if (svg := drawn.of(layer, graph))}
        size += sum(map(len, by_graph.values()))
        if size > MOST_BYTES:
            break
        if by_graph:
            svgs[layer] = by_graph
    return svgs


def _is_input(node: NodeText) -> bool:
    return node.operator == "input"


class _Reader:
    """The texts of the boxes around a layer, and the edges between them."""

    def __init__(
        self, report: ReportData, units: Units, chosen: Sequence[Unit], layer: str, graph: str, saved: set[str]
    ) -> None:
        self.layer, self.graph, self.units, self.chosen = layer, graph, units, chosen
        self.report, self.saved = report, saved
        self.kernels = [reason for reason in report.not_fused if (reason.layer, reason.step) == (layer, "lower")]
        self.roles: dict[Unit, str] = {}
        for unit in chosen:
            if unit.kind == "product" and unit.layer == layer:
                self._name_operands(unit)
        taken = {node.name for unit in chosen for node in self.finished(unit)}
        kept = {unit: [node for node in unit.nodes if node.name not in taken] for unit in chosen}
        self.boxes = {unit: self._box(unit, kept[unit]) for unit in chosen if kept[unit] and unit.kind != "output"}
        gemms = {n.name: unit for unit in chosen for n in self.finished(unit)}
        for unit in chosen:
            if not kept[unit] and gemms[unit.nodes[0].name] in self.boxes:
                self.boxes[unit] = self.boxes[gemms[unit.nodes[0].name]]
        self._join_inputs()

    def _join_inputs(self) -> None:
        """Draws inputs as one box where they say the same and the same units read them."""
        alike: dict[object, _Box] = {}
        for unit, box in self.boxes.items():
            if unit.kind == "input":
                first = alike.setdefault((box.lines[0], *sorted(reader.order for reader in unit.readers)), box)
                if first is not box:
                    first.lines += box.lines[1:]
                    first.detail += f"\n{box.detail}"
                    self.boxes[unit] = first
        for box in alike.values():
            title, *values = box.lines
            box.lines = [title if len(values) < 2 else f"{len(values)} x {title}", *dict.fromkeys(values)][:4]

    def gemm(self, unit: Unit) -> str:
        """The name of a product among the three GEMMs, as far as its operands tell."""
        node = unit.nodes[0]
        name = node.operator.removeprefix("fxquant::")
        if "attention" in name or "scaled_dot_product" in name:
            return "attention, backward" if "backward" in name else "attention"
        if self.graph == "forward":
            return "fprop"
        direction = next(iter(self.units.sources(node)), ("", ""))[1]
        return {"rowwise": "dgrad", "columnwise": "wgrad"}.get(direction, "product")

    def _name_operands(self, unit: Unit) -> None:
        operands = {
            "fprop": ("input", "weight"), "dgrad": ("grad_output", "weight"), "wgrad": ("grad_output", "input"),
        }.get(self.gemm(unit), ())  # fmt: skip
        names = list(dict.fromkeys(name for name, _ in self.units.sources(unit.nodes[0])))
        for role, name in zip(operands, names, strict=False):
            source = self.units.of[name]
            self.roles.setdefault(source, role)
            if source.kind == "cast":
                alone = not source.nodes[0].operator.startswith("fxquant::produce_quantize")
                for below in list(source.reads)[:alone]:  # behind it come scales, and the ends of groups
                    self.roles.setdefault(below, role)

    def finished(self, unit: Unit) -> list[NodeText]:
        """The operators that a GEMM's kernel does behind its product, where that is what was chosen."""
        return unit.epilogue if self._epilogue(unit)[0] else []

    def _epilogue(self, unit: Unit) -> tuple[bool, str]:
        """Returns True if a GEMM takes its epilogue, and the choice in words."""
        if not unit.epilogue:
            return False, ""
        for gemm in self.report.epilogues:
            shape = f"[{gemm.problem.m}, {gemm.problem.n}]"
            here = (gemm.layer, gemm.graph, shape) == (unit.layer, self.graph, unit.nodes[0].shape)
            if here and gemm.problem.fuses:
                chosen = gemm.chosen(self.report.card)
                return "Triton GEMM" in str(chosen.kernel), gemm.problem.left_to_others(chosen)
        return False, ""

    def _box(self, unit: Unit, nodes: Sequence[NodeText]) -> _Box:
        last = nodes[-1]
        detail = "\n".join(plain_spec(str(node)) for node in unit.nodes[:8])
        near = unit.layer != self.layer
        if unit.kind == "cast":
            return self._cast(unit, last, detail)
        if unit.kind == "product":
            return self._product(unit, last, detail)
        if unit.kind == "input":
            return _Box("near", [self._input(unit, last), _value(last)], detail)
        names = list(dict.fromkeys(_CASTS.get(node.operator, node.operator.rpartition("::")[2]) for node in nodes))
        title = _short(unit.layer, self.layer) or MODEL
        style = "near" if near and unit not in self.roles else "operators"
        return _Box(style, [title, _listed(names), _value(last)], detail)

    def _cast(self, unit: Unit, node: NodeText, detail: str) -> _Box:
        sides = sides_of(node)
        names = [spec.partition("(")[0] for _, spec in sides]
        if len(sides) == 1:
            halves = [(_family(sides[0][1]), f"{names[0]} {sides[0][0]}".strip())]
        elif len({spec for _, spec in sides}) == 1:
            halves = [(_family(sides[0][1]), f"{names[0]} both ways")]
        else:
            halves = [(_family(spec), name) for (_, spec), name in zip(sides, names, strict=True)]
        operator = node.operator.removeprefix("fxquant::")
        producer = node.specs[0].split()[0] if operator.startswith("produce") else ""
        verb = "dequantize" if "dequantize" in operator else "quantize"
        title = f"{verb} " + (self.roles.get(unit) or _short(unit.layer, self.layer))
        lines = [title.strip(), *([f"fused with {producer}"] if producer else [])]
        lines.append(f"{_source_value(self.units, node)}")
        box = _Box("fused" if producer else "cast", lines, detail, halves)
        box.notes = self._reasons(node)
        return box

    def _product(self, unit: Unit, node: NodeText, detail: str) -> _Box:
        specs = [plain_spec(spec) for spec in node.specs if _family(spec)]
        near = unit.layer != self.layer
        title = self.gemm(unit)
        formats = " x ".join(dict.fromkeys(spec.partition("(")[0] for spec in specs))
        heading = f"{title} of {_short(unit.layer, self.layer) or MODEL}" if near else title
        lines = [heading, formats or f"not quantized: {node.operator.lstrip('_')}", _value(node)]
        fused, choice = self._epilogue(unit)
        behind = "fused_scaled_mm" in node.operator
        if fused or behind:
            names = [n.operator for n in unit.epilogue] if fused else _finishing(node)
            lines.insert(2, f"then {_listed(list(dict.fromkeys(names)))}")
        box = _Box("near" if near else "product fused" if fused or behind else "product", lines, detail)
        if not near:
            box.notes = self._reasons(node)
            box.notes += [self._sentence("fuse_epilogues", choice)] if choice and not fused else []
        return box

    def _reasons(self, node: NodeText) -> list[str]:
        """The reasons that passes have left at a node, and those for its kernel, which is chosen behind all others."""
        text = self._text(node)
        notes = [self._sentence(*reason.split(": ", 1)) for reason in node.reasons]
        return [*notes, *(kernel.sentence for kernel in self.kernels if kernel.operator == text)]

    def _sentence(self, step: str, reason: str) -> str:
        return NotFused(step=step, layer=self.layer, operator="", reason=reason).sentence

    def _text(self, node: NodeText) -> str:
        """The text by which a reason names an operator."""
        first = self.units.nodes.get(node.reads[0]) if node.reads else None
        shape = first.shape if first is not None and len(first.values) == 1 else ""
        return " ".join(filter(None, (node.operator.removeprefix("fxquant::"), *node.specs, shape)))

    def _input(self, unit: Unit, node: NodeText) -> str:
        if node.name.startswith("tangents"):
            return "gradient of the output"
        role = self.roles.get(unit, "")
        if self.graph == "backward" and role != "weight":
            return f"{role}, saved" if role else "saved by the forward"
        return role or "parameter or input"

    def edges(self) -> dict[tuple[_Box, _Box], str]:
        """The edges between boxes with their directions."""
        edges: dict[tuple[_Box, _Box], str] = {}
        for unit, box in self.boxes.items():
            for source, directions in unit.reads.items():
                start = self.boxes.get(source)
                if start is not None and start is not box:
                    edges[start, box] = next(iter(directions)) if len(directions) == 1 else ""
        return edges

    def leaving(self) -> dict[_Box, str]:
        """The boxes whose results the graph gives out, and what for."""
        return {
            box: "saved" if self._is_saved(unit) else "out"
            for unit, box in self.boxes.items()
            if unit.kind != "input" and any(reader.kind == "output" for reader in unit.readers)
        }

    def _is_saved(self, unit: Unit) -> bool:
        """Returns True if the backward takes a result of the forward, or a view of it."""
        names = {node.name for node in unit.nodes}
        views = (node for node in self.units.nodes.values() if node.name in self.saved)
        return self.graph == "forward" and any(
            node.name in names or any(name in names for name, _ in self.units.sources(node)) for node in views
        )


def _finishing(node: NodeText) -> list[str]:
    """The operations of a GEMM behind its product; its last arguments are a residual, and True to record an amax."""
    *_, residual, record = node.arguments.split(", ")
    activations = [text for text in node.specs if text and not _family(text)]
    return [*activations, *["+ residual"] * (residual != "None"), *["amax"] * (record == "True")]


def _family(spec: str) -> str:
    """The family of a format, by which it is coloured; empty for what is none."""
    try:
        return QuantSpec.parse(spec).row.family
    except (KeyError, ValueError):
        return ""


def _value(node: NodeText) -> str:
    return node.values[0] if node.values else ""


def _source_value(units: Units, node: NodeText) -> str:
    source = units.nodes.get(node.reads[0]) if node.reads else None
    return _value(source) if source is not None else ""


def _short(layer: str, beside: str) -> str:
    """The name of a layer without what it has in common with another one."""
    parts, others = layer.split("."), beside.split(".")
    count = 0
    while count < min(len(parts) - 1, len(others)) and parts[count] == others[count]:
        count += 1
    count -= count > 0 and parts[count].isdecimal()
    return ".".join(parts[count:])


def _listed(names: Sequence[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" +{len(names) - most}" if len(names) > most else "")


def _cut(text: str) -> str:
    return text if len(text) <= _CHARACTERS else text[: _CHARACTERS - 1] + "…"


def _cut_inside(text: str) -> str:
    """A heading that fits, with its end: there stand the names of layers."""
    return text if len(text) <= _CHARACTERS - 3 else f"{text[:8]}…{text[12 - _CHARACTERS :]}"


def _draw(reader: _Reader) -> str:
    """The picture as an element of its own size."""
    boxes, edges = list(dict.fromkeys(reader.boxes.values())), reader.edges()
    layout = arrange(boxes, list(edges))
    tops = _tops(boxes, layout)
    numbers: dict[str, int] = {}
    drawn = [_draw_edge(edge, direction, layout, tops) for edge, direction in edges.items()]
    drawn += [_draw_box(box, _x(layout.places[box][0]), tops[layout.places[box][1]][0], numbers) for box in boxes]
    for box, what in reader.leaving().items():
        column, at = layout.places[box]
        drawn.append(_draw_exit(_x(column), tops[at][0] + box.height, what))
    width = int(_x(layout.columns) + _WIDTH / 2 + _MARGIN)
    bottom = max(top + height for top, height in tops.values()) + 26
    width = max(width, 2 * _PITCH)
    foot = []
    for note, number in numbers.items():
        for i, line in enumerate(textwrap.wrap(f"{number}  {capital(note)}.", max(40, width // 6))):
            bottom += _LINE + (4 if i == 0 else 0)
            foot.append(f'<text class="s" x="{_MARGIN}" y="{bottom}">{escape(line)}</text>')
    if "columnwise" in edges.values():
        bottom += _LINE + 4
        foot.append(f'<text class="s" x="{_MARGIN}" y="{bottom}">dashed: a columnwise payload</text>')
    bottom += _MARGIN
    name = f"{reader.graph} around {reader.layer or MODEL}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="fxg" role="img" viewBox="0 0 {width} {bottom}" '
        f'width="{width}" height="{bottom}"><title>{escape(name)}</title>'
        f"<desc>{escape(_described(boxes, edges))}</desc>{''.join(drawn)}{''.join(foot)}</svg>"
    )


def _described(boxes: Sequence[_Box], edges: Mapping[tuple[_Box, _Box], str]) -> str:
    """The picture in words."""
    sentences = []
    for box in boxes:
        sources = [start.lines[0] for (start, end) in edges if end is box]
        formats = [text for _, text in box.halves]
        behind = f" of {' and '.join(dict.fromkeys(sources))}" if sources else ""
        sentences.append(" ".join([box.lines[0], *formats]) + behind)
    return "; ".join(sentences) + "."


def _x(column: float) -> float:
    return _MARGIN + _WIDTH / 2 + column * _PITCH


def _tops(boxes: Sequence[_Box], layout: Layout[_Box]) -> dict[int, tuple[int, int]]:
    """The top and the height of each layer."""
    heights: dict[int, int] = {}
    for box in boxes:
        at = layout.places[box][1]
        heights[at] = max(heights.get(at, 0), box.height)
    tops, y = {}, _MARGIN
    for at in range(layout.layers):
        tops[at] = (y, heights.get(at, 0))
        y += heights.get(at, 0) + _GAP
    return tops


def _draw_box(box: _Box, middle: float, top: int, numbers: dict[str, int]) -> str:
    edge = round(middle - _WIDTH / 2)
    style = f"{box.style} unfused" if box.notes else box.style
    parts = [f"<title>{escape(box.detail)}</title>" if box.detail else ""]
    parts.append(f'<rect x="{edge}" y="{top}" width="{_WIDTH}" height="{box.height}" rx="6"/>')
    y = top + _PAD + 11
    for i, line in enumerate(box.lines):
        shown = escape(_cut_inside(line) if i == 0 else _cut(line))
        parts.append(f'<text class="{"h" if i == 0 else "s"}" x="{edge + 9}" y="{y}">{shown}</text>')
        y += _LINE
        if i == 0 and box.halves:
            width = (_WIDTH - 14 - 4 * (len(box.halves) - 1)) // len(box.halves)
            for number, (family, text) in enumerate(box.halves):
                x = edge + 7 + number * (width + 4)
                text = text if len(box.halves) == 1 else text[: width // 7]
                parts.append(f'<rect class="{family}" x="{x}" y="{y - 11}" width="{width}" height="16" rx="3"/>')
                parts.append(f'<text class="m" x="{x + 3}" y="{y + 1}">{escape(text[:26])}</text>')
            y += _LINE + 3
    for place, note in enumerate(box.notes):
        number = numbers.setdefault(note, 1 + len(numbers))
        parts.append(f'<text class="h" x="{edge + _WIDTH - 16 - 14 * place}" y="{top + 18}">{number}</text>')
    return f'<g class="{style}">{"".join(parts)}</g>'


def _draw_edge(
    edge: tuple[_Box, _Box], direction: str, layout: Layout[_Box], tops: Mapping[int, tuple[int, int]]
) -> str:
    start, _ = edge
    points = layout.edges[edge]
    (x, at), *between, (last_x, last_at) = points
    path = [f"M{_x(x):.0f} {tops[at][0] + start.height}"]
    for column, layer in between:
        top, height = tops[layer]
        path.append(f"L{_x(column):.0f} {top - 4}V{top + height + 4}")
    tip = tops[last_at][0]
    path.append(f"L{_x(last_x):.0f} {tip - 6}m-4 0l4 6 4-6")
    return f'<path{f" class={chr(34)}{direction}{chr(34)}" if direction else ""} d="{"".join(path)}"/>'


def _draw_exit(x: float, bottom: int, what: str) -> str:
    """An arrow out of the graph."""
    arrow = f'<path d="M{x + 46:.0f} {bottom}v14m-4 -5l4 6 4-6"/>'
    return f'{arrow}<text class="s" x="{x + 54:.0f}" y="{bottom + 13}">{what}</text>'
