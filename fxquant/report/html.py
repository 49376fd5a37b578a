"""The HTML view of a `Report`: one file, no other resources, light and dark."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from fxquant.decisions import Decision
from fxquant.formats import FORMATS, HEAD_FORMATS
from fxquant.report.data import MODEL, Layer, ReportData, result, role_text, shape_text
from fxquant.report.text import (
    COLUMNS,
    NOT_FUSED_COLUMNS,
    WORK_COLUMNS,
    aligned,
    bytes_text,
    loss_table,
    sent_text,
    totals,
    us_text,
    verdict,
)
from fxquant.roles import GEMM_OPERANDS, Gemm

STYLE = """
.fxq { --ink:#1c2430; --soft:#5b6676; --line:#dde2ea; --card:#fff; --page:#f5f7fa; --hatch:#e6eaf0; --accent:#2563c9;
  --warn:#fdeacb; --bad:#c2410c;
  --per_tensor:#cfe3fb; --per_row:#bfe9ec; --block:#d6ebc4; --mxfp8:#fbe3b5; --nvfp4:#f8cfc4; --own:#e3d3f5;
  color:var(--ink); font:14px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif; }
@media (prefers-color-scheme: dark) { .fxq { --ink:#e4e9f1; --soft:#98a4b5; --line:#323b49; --card:#1b222c;
  --page:#12171e; --hatch:#2a323e; --accent:#7fb0ff;
  --warn:#54390b; --bad:#ff9566;
  --per_tensor:#1f4a7d; --per_row:#14595f; --block:#355d1d; --mxfp8:#6b4d0b; --nvfp4:#74321f; --own:#50327a; } }
body.fxq { margin:0; background:var(--page); }
.fxq main { max-width:1280px; margin:0 auto; padding:28px 20px 60px; }
.fxq h1 { font-size:24px; margin:0 0 4px; letter-spacing:-.01em; overflow-wrap:anywhere; }
.fxq h2 { font-size:16px; margin:30px 0 10px; }
.fxq p { margin:6px 0; } .fxq .soft { color:var(--soft); }
.fxq .cards { display:flex; flex-wrap:wrap; gap:12px; margin:16px 0; }
.fxq .card { background:var(--card); border:1px solid var(--line); border-radius:10px; padding:12px 16px;
  flex:1 1 150px; min-width:0; }
.fxq .card b { display:block; font-size:23px; line-height:1.25; font-weight:650; font-variant-numeric:tabular-nums; }
.fxq .bar { height:5px; border-radius:3px; background:var(--hatch); margin-top:8px; overflow:hidden; }
.fxq .bar i { display:block; height:100%; background:var(--accent); }
.fxq .scroll { overflow:auto; max-height:560px; background:var(--card); border:1px solid var(--line);
  border-radius:10px; }
.fxq table { border-collapse:separate; border-spacing:0; width:100%; font-size:13px; margin:0; color:inherit; }
.fxq th { text-align:left; font-weight:600; color:var(--soft); background:var(--card); position:sticky; top:0;
  padding:7px 10px; border-bottom:1px solid var(--line); white-space:nowrap; z-index:1; }
.fxq td { padding:5px 10px; border-bottom:1px solid var(--line); text-align:left; vertical-align:middle;
  background:transparent; }
.fxq tr:last-child td { border-bottom:0; }
.fxq td.num, .fxq th.num { text-align:right; font-variant-numeric:tabular-nums; }
.fxq code, .fxq .mono, .fxq pre { font:12px/1.5 ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace; }
.fxq .matrix th { text-align:center; } .fxq .matrix th:first-child { text-align:left; }
.fxq .matrix thead tr:nth-child(2) th { top:33px; font-weight:400; padding-top:4px; }
.fxq .matrix td { padding:4px 3px; } .fxq .matrix td:first-child { padding:4px 12px; white-space:nowrap; }
.fxq .matrix td.edge, .fxq .matrix th.edge { border-left:1px solid var(--line); }
.fxq .cell { display:block; border-radius:5px; padding:2px 7px;  text-align:center; cursor:default;
  white-space:nowrap; }
.fxq .skipped { color:var(--soft); background:repeating-linear-gradient(135deg,var(--hatch) 0 5px,transparent 5px 10px);
  outline:1px dashed var(--line); outline-offset:-1px; }
.fxq .per_tensor { background:var(--per_tensor); } .fxq .per_row { background:var(--per_row); }
.fxq .block { background:var(--block); } .fxq .mxfp8 { background:var(--mxfp8); }
.fxq .nvfp4 { background:var(--nvfp4); } .fxq .own { background:var(--own); }
.fxq .warning { background:var(--warn); border-radius:8px; padding:9px 14px; margin:12px 0; }
.fxq .work td.mono, .fxq .work td.what { white-space:nowrap; } .fxq .work .sum td { border-top:1px solid var(--line); }
.fxq .work td { border-bottom:0; padding:3px 10px; } .fxq .work td.track { width:20%; min-width:110px; }
.fxq .work i { display:block; height:6px; border-radius:3px; margin:2px 0; min-width:1px; }
.fxq .work i.was { background:var(--soft); opacity:.45; } .fxq .work i.now { background:var(--accent); }
.fxq .work .sum td { font-weight:600; } .fxq .work .worse i.now { background:var(--bad); }
.fxq .untimed .num, .fxq .untimed .track { display:none; }
.fxq .work .worse td.now { color:var(--bad); }
.fxq .times { color:var(--soft); margin-left:8px; }
.fxq .legend { display:flex; flex-wrap:wrap; gap:8px; margin:10px 0 0; font-size:12px; }
.fxq .tools { display:flex; flex-wrap:wrap; gap:8px; margin-bottom:8px; align-items:center; }
.fxq input, .fxq select { font:inherit; color:inherit; background:var(--card); border:1px solid var(--line);
  border-radius:7px; padding:5px 10px; }
.fxq input { flex:0 1 320px; min-width:0; }
.fxq details { margin:8px 0; background:var(--card); border:1px solid var(--line); border-radius:10px; }
.fxq details > summary { cursor:pointer; padding:9px 14px; font-weight:600; }
.fxq details > div { padding:0 16px 16px; }
.fxq pre { margin:0; padding:4px 14px 14px; overflow:auto; max-height:600px; background:transparent; color:inherit; }
.fxq img { max-width:100%; height:auto; border-radius:10px; border:1px solid var(--line); background:#fff; }
"""

SCRIPT = """
for (const box of document.querySelectorAll('.fxq .rows')) {
  const text = box.querySelector('input'), kind = box.querySelector('select'), shown = box.querySelector('output');
  const rows = [...box.querySelectorAll('tbody tr')];
  const update = () => {
    const words = text.value.toLowerCase().split(/\\s+/).filter(Boolean);
    let count = 0;
    for (const row of rows) {
      const match = (!kind.value || row.dataset.kind === kind.value)
        && words.every(word => row.textContent.toLowerCase().includes(word));
      row.hidden = !match;
      count += match;
    }
    shown.textContent = count + ' of ' + rows.length + ' rows';
  };
  text.oninput = kind.onchange = update;
  update();
}
"""

FAMILIES = {
    "per_tensor": "FP8, one scale per tensor",
    "per_row": "FP8, one scale per row",
    "per_head": "FP8, one scale per attention head",
    "block": "FP8, one scale per 128 or 128x128",
    "mxfp8": "MXFP8, one scale per 32",
    "nvfp4": "NVFP4, one scale per 16",
    "own": "a quantizer of your own",
    "skipped": "high precision (hover for the reason)",
}


def page(title: str, body: str) -> str:
    """A whole HTML document around `body`."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        f'<body class="fxq"><main>\n{body}\n</main><script>{SCRIPT}</script></body></html>\n'
    )


def section(report: ReportData) -> str:
    """The report without style and script, for `page`."""
    parts = [f"<h1>Recipe <span class='mono' style='font-size:.95em'>{escape(report.recipe)}</span></h1>"]
    parts += [f"<p class='soft'>{escape(totals(report))}</p>", _cards(report)]
    parts += _notes('Computed again in the backward with save="least", besides casts', report.again)
    parts += _notes("Sent quantized", [*map(sent_text, report.sent_quantized)])
    parts += _notes("Unused in the recipe", report.unused) + _notes("Graph breaks", report.breaks)
    parts += _notes("Compiled again", report.recompilations) + _notes("Not compiled", report.uncompiled)
    if report.decisions:
        parts += [_matrix(report.layers(collapse=True)), _work(report), _rows(report)]
    if report.not_fused:
        rows = [(fusion.layer or MODEL, fusion.step, fusion.operator, fusion.reason) for fusion in report.not_fused]
        parts.append(_folded("Not fused", aligned([NOT_FUSED_COLUMNS, *rows])))
    if report.losses:
        parts.append(f"<h2>Losses</h2><pre>{escape(loss_table(report))}</pre>")
    if report.graphs:
        parts.append("<h2>Rewritten graphs</h2>")
        parts += [_folded(name, text) for name, text in report.graphs.items()]
    return "\n".join(parts)


def _folded(title: str, text: str) -> str:
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"


def _cards(report: ReportData) -> str:
    s = report.summary()
    operands = s["quantized_operands"] / s["operands"] if s["operands"] else 1.0
    cards = [
        _card(str(s["matmuls"]), "matmuls"),
        _card(f"{s['quantized_operands']} / {s['operands']}", "operands quantized", operands),
        _card(f"{100 * s['coverage']:.1f}%", f"of {_si(s['flops']['total'])}FLOP quantized", s["coverage"]),
        _card(f"{100 * s['explained']:.1f}%", "quantized or explained", s["explained"]),
    ]
    if s["one_sided"]:
        cards.append(_card(f"{100 * s['one_sided']:.1f}%", "of FLOP with one operand quantized", s["one_sided"]))
        cards.append(_card(bytes_text(s["weights"]["quantized"]), "of weights as GEMMs read them"))
    time = report.time()
    if time["quantized_us"]:
        speedup = time["unquantized_us"] / time["quantized_us"]
        cards.append(_card(f"{speedup:.2f}x", "estimated speed-up of matmuls"))
    return f"<div class='cards'>{''.join(cards)}</div>"


def _work(report: ReportData) -> str:
    """Kernels and estimated times, layer by layer."""
    sentences = verdict(report)
    if not sentences:
        return ""
    estimates = report.estimates()
    layers = [
        (layer, [estimates[site] for site in dict.fromkeys(d.site for d in layer.decisions) if site in estimates])
        for layer in report.layers(collapse=True)
    ]
    longest = max((estimate.longest for _, of_layer in layers for estimate in of_layer), default=0.0)
    body = []
    for layer, of_layer in layers:
        for estimate in of_layer:
            worse = " worse" if estimate.slower else ""
            body.append(
                _work_row(_name(layer), "all", "", (estimate.unquantized, estimate.quantized), longest, f"sum{worse}")
            )
            for work in estimate.work:
                body.append(_work_row("", work.what, work.kernel, (work.unquantized, work.quantized), longest, ""))
    head = "".join(f"<th class='{'num' if name.endswith(' us') else ''}'>{name}</th>" for name in WORK_COLUMNS)
    notes = [f"<p class='soft'>{escape(sentences[0])}</p>"]
    notes += [f"<p class='warning'>{escape(line)}</p>" for line in sentences[1:]]
    return (
        f"<h2>Kernels{' and times' if longest else ''}</h2>{''.join(notes)}<div class='scroll'>"
        f"<table class='work{'' if longest else ' untimed'}'><thead><tr>{head}<th class='track'></th></tr></thead>"
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _work_row(
    layer: str, what: str, kernel: str, times: tuple[float | None, float | None], scale: float, kind: str
) -> str:
    """A row of times without and with quantization, a bar for each; `scale` is the time of a full bar."""
    bars = numbers = ""
    for name, us in zip(("was", "now"), times, strict=True):
        bars += f"<i class='{name}' style='width:{100 * us / scale:.2f}%'></i>" if us is not None and scale else ""
        numbers += f"<td class='num {name}'>{us_text(us)}</td>"
    return (
        f"<tr class='{kind}'><td class='mono'>{layer}</td><td class='what'>{what}</td><td>{escape(kernel)}</td>"
        f"{numbers}<td class='track'>{bars}</td></tr>"
    )


def _card(number: str, label: str, share: float | None = None) -> str:
    bar = "" if share is None else f"<div class='bar'><i style='width:{100 * share:.1f}%'></i></div>"
    return f"<div class='card'><b>{escape(number)}</b><span class='soft'>{escape(label)}</span>{bar}</div>"


def _si(number: float) -> str:
    """A number with three digits and the prefix of its unit."""
    power = min((len(str(int(number))) - 1) // 3, 5)
    return f"{number / 1000**power:.3g} {'kMGTP'[power - 1] if power else ''}"


def _notes(title: str, notes: Sequence[str]) -> list[str]:
    return [f"<p><b>{title}:</b> {escape('; '.join(notes))}</p>"] if notes else []


def _matrix(layers: Sequence[Layer]) -> str:
    """Layers by the operands of the three GEMMs, coloured by format."""
    run = {d.gemm for layer in layers for d in layer.decisions}
    gemms = {gemm: operands for gemm, operands in GEMM_OPERANDS.items() if gemm in run}
    top = "".join(f"<th colspan='2' class='edge'>{gemm}</th>" for gemm in gemms)
    under = "".join(
        f"<th class='{'' if i else 'edge'}'>{operand}.{direction.removesuffix('wise').replace('umn', '')}</th>"
        for operands in gemms.values()
        for i, (operand, direction) in enumerate(operands)
    )
    body = []
    for layer in layers:
        for site in dict.fromkeys(d.site for d in layer.decisions):
            cells = "".join(_cells(gemm, [d for d in layer.decisions if d.site == site]) for gemm in gemms)
            body.append(f"<tr><td class='mono'>{_name(layer)}</td>{cells}</tr>")
    kinds = {_family(d) for layer in layers for d in layer.decisions}
    legend = "".join(
        f"<span class='cell {family}'>{meaning}</span>" for family, meaning in FAMILIES.items() if family in kinds
    )
    return (
        f"<h2>Layers</h2><div class='scroll'><table class='matrix'><thead><tr><th></th>{top}</tr>"
        f"<tr><th></th>{under}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
        f"<div class='legend'>{legend}</div>"
    )


def _name(layer: Layer) -> str:
    return escape(layer.name) + (f"<span class='times'>×{layer.repeats}</span>" if layer.repeats > 1 else "")


def _cells(gemm: Gemm, decisions: Sequence[Decision]) -> str:
    """The cells of one GEMM of one matmul, left operand then right; empty if the GEMM does not run."""
    operands = [d for d in decisions if d.gemm == gemm]
    if not operands:
        return "<td class='edge'></td><td></td>"
    return "".join(
        f"<td class='{'' if i else 'edge'}'><span class='cell {_family(d)}' title='{escape(_explained(d))}'>"
        f"{escape(_short(d))}</span></td>"
        for i, d in enumerate(operands)
    )


def _explained(decision: Decision) -> str:
    reason = f"\n{decision.skip_reason.meaning}" if decision.skip_reason else ""
    return f"{role_text(decision)} {decision.direction} {shape_text(decision)}: {result(decision)}{reason}"


def _short(decision: Decision) -> str:
    if decision.skip_reason is not None:
        return decision.skip_reason.replace("_", " ").lower()
    return re.split(r"[( ]", result(decision), maxsplit=1)[0]


def _family(decision: Decision) -> str:
    if decision.skip_reason is not None:
        return "skipped"
    name = _short(decision)
    row = FORMATS.get(name) or HEAD_FORMATS.get(name)
    return "own" if row is None else row.family


def _rows(report: ReportData) -> str:
    """Every decision, with a filter."""
    head = "".join(f"<th>{name}</th>" for name in COLUMNS)
    body = "".join(
        f"<tr data-kind='{'skipped' if d.skip_reason else 'quantized'}'><td class='mono'>{escape(layer.name)}</td>"
        f"<td>{escape(role_text(d))}</td><td>{d.gemm}</td><td>{d.direction}</td><td>{escape(shape_text(d))}</td>"
        f"<td>{escape(result(d))}</td></tr>"
        for layer in report.layers()
        for d in layer.decisions
    )
    return (
        "<div class='rows'><h2>Every operand of every GEMM</h2><div class='tools'>"
        "<input type='search' placeholder='filter: layer, role, format …' aria-label='filter'>"
        "<select aria-label='kind'><option value=''>all</option><option>quantized</option><option>skipped</option>"
        "</select><output class='soft'></output></div>"
        f"<div class='scroll'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></div>"
    )
