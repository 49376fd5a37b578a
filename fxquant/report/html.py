"""The HTML view of a report: one file that needs no other, with the model as a tree; its data are JSON in the page.

`page.css` and `page.js` beside this file are its style and its script.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from html import escape
from importlib.resources import files
from typing import Any

from fxquant.decisions import Decision
from fxquant.formats import FORMATS, HEAD_FORMATS
from fxquant.report import stepper
from fxquant.report.data import MODEL, ReportData, operand_bytes, result, role_text, shape_text
from fxquant.report.fusions import KIND_COLUMNS, UNFUSED_COLUMNS, in_short, kinds_of_epilogues, once, unfused
from fxquant.report.markup import Anchors, capital, percent, si, table
from fxquant.report.picture import RULES, pictures
from fxquant.report.text import (
    bytes_text,
    count_text,
    kept_text,
    sent_text,
    shortened,
    size_text,
    some,
    time_text,
    verdict,
)
from fxquant.report.tree import Leaf, Node, title, tree
from fxquant.report.why import Leaves, by_reason, unquantized

FAMILIES = {
    "per_tensor": "FP8, one scale per tensor",
    "per_row": "FP8, one scale per row",
    "per_head": "FP8, one scale per attention head",
    "block": "FP8, one scale per 128 or 128x128",
    "mxfp8": "MXFP8, one scale per 32",
    "nvfp4": "NVFP4, one scale per 16",
    "own": "a quantizer of your own",
    "skipped": "high precision",
}

COLUMNS = (
    ("name", "Layer", ""), ("", "Operands", ""), ("", "M x K x N", "num size"),
    ("flops", "FLOP", "num"), ("bytes", "Weight", "num"),
)  # fmt: skip
ORDERS = {
    "model": "as in the model", "time": "longest first", "saved": "most time saved first", "flops": "most FLOPs first",
    "bytes": "largest weights first", "error": "largest error first", "name": "by name",
}  # fmt: skip


FROM_CACHE = "torch took this graph from its cache, and what passes found out of it was not kept there"

Pictures = Mapping[str, Mapping[str, str]]
"""Drawings of layers, of equal ones the first, by their names and ``forward`` or ``backward``."""


def page(heading: str, body: str) -> str:
    """A whole HTML document around `body`, such as sections of reports."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(heading)}</title><style>{_resource('page.css')}{RULES}{stepper.STYLE}</style></head>\n"
        f'<body class="fxq"><main>\n{body}\n</main><script>{_resource("page.js")}{stepper.SCRIPT}</script></body>'
        "</html>\n"
    )


def section(report: ReportData, key: str = "") -> str:
    """The report without style and script, for `page`; of several on one page each has a `key` for its links."""
    anchors = Anchors(key)
    report = replace(report, estimated=report.estimates())
    root = tree(report)
    leaves = [(path, count, leaf) for path, count, leaf in root.walk()]
    parts = ['<div class="report">', _header(report), _cards(report, leaves, anchors), *_warnings(report, anchors)]
    if report.decisions:
        parts += [unquantized(report, leaves, anchors), _model(report, root, leaves, pictures(report), anchors)]
    parts += [*_notes(report, anchors), stepper.section(report), "</div>"]
    return "\n".join(parts)


def _resource(name: str) -> str:
    return files("fxquant.report").joinpath(name).read_text(encoding="utf-8")


def _header(report: ReportData) -> str:
    """The model, the recipe, versions, device and date."""
    header = report.header
    size = f"<small>{_parameters(header.parameters)} parameters</small>" if header.parameters else ""
    device = header.device or report.time()["card"]
    estimated = f", estimated for {report.card}" if report.card and report.card != device else ""
    facts = {
        "recipe": shortened(report.recipe, 60),
        "device": device + estimated,
        **header.versions,
        "made": _date(header.date),
    }
    meta = "".join(f"<div><dt>{name}</dt><dd>{escape(text)}</dd></div>" for name, text in facts.items() if text)
    python = f"<details><summary>The recipe as Python</summary><pre>{escape(header.recipe)}</pre></details>"
    return (
        "<header><div class='overline'><span>fxquant report</span>"
        "<button class='theme' type='button' hidden></button></div>"
        f"<h1>{escape(header.model or report.recipe)} {size}</h1><dl class='meta'>{meta}</dl>"
        f"{python if header.recipe else ''}</header>"
    )


def _parameters(count: int) -> str:
    """The number of parameters, billions as ``B``."""
    return si(count).strip().replace("G", "B")


def _date(text: str) -> str:
    return f"{datetime.fromisoformat(text):%d %B %Y, %H:%M}".lstrip("0") if text else ""


def _cards(report: ReportData, leaves: Leaves, anchors: Anchors) -> str:
    """The answers to the first questions: how much is quantized, what it saves, what takes the time."""
    cards = [_card("Quantized", *_quantized_card(report))]
    missing = by_reason(leaves)
    if missing:
        flops = sum(skipped.flops for skipped in missing.values())
        parts = [f"{name} {percent(s.flops, report.flops['total'])}" for name, s in list(missing.items())[:3]]
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        under = f"{si(flops)}FLOP: {', '.join(parts)}{more}. <a href='#{anchors.why}'>Why, and what to do</a>"
        cards.append(_card("Not quantized", percent(flops, report.flops["total"]), under))
    before, after = report.weights["unquantized"], report.weights["quantized"]
    if before:
        change = f"{abs(100 * (1 - after / before)):.0f}% {'less' if after < before else 'more'}"
        change = change if after != before else "as they are without quantization"
        cards.append(_card("Weights, as GEMMs read them", _from_to(bytes_text(before), bytes_text(after)), change))
    if report.saved is not None:
        saved = report.saved
        instead = f"which was {bytes_text(saved.instead)}" if saved.instead else "beside the tensors that it is made of"
        under = f"{bytes_text(saved.quantized)} of it quantized, {instead}"
        under = under if saved.quantized else "nothing of it in a format of the library"
        under += "; on meta, where attention keeps its scores" if report.header.device == "meta" else ""
        under += "".join(f". {capital(escape(line))}" for line in kept_text(report))
        number = _from_to(bytes_text(saved.unquantized), bytes_text(saved.total))
        cards.append(_card("Saved for the backward", number, under))
    elif report.from_cache:
        cards.append(_card("Saved for the backward", "not known", capital(FROM_CACHE)))
    cards += _time_card(report, leaves, anchors) + _error_card(leaves, anchors)
    return f"<div class='cards'>{''.join(cards)}</div>"


def _quantized_card(report: ReportData) -> tuple[str, str]:
    s = report.summary()
    if not report.decisions:
        return "nothing", "no matmuls"
    bar = f"<div class='bar'><i style='width:{100 * s['coverage']:.2f}%'></i>"
    bar += f"<i class='half' style='width:{100 * s['one_sided']:.2f}%'></i></div>"
    under = f"of {si(s['flops']['total'])}FLOP in {s['matmuls']} matmuls, with both operands"
    if s["one_sided"]:
        under += f"; {100 * s['one_sided']:.1f}% with one"
    return f"{100 * s['coverage']:.1f}%", f"{bar}{under}; {s['quantized_operands']} of {s['operands']} operands"


def _time_card(report: ReportData, leaves: Leaves, anchors: Anchors) -> list[str]:
    time = report.time()
    if not time["card"]:
        return []
    if time["quantized_us"] is None:
        under = 'No rates for this device: <code>report.on("H100")</code> estimates for a card. '
        flops, path, leaf = max(
            ((leaf.flops * count, path, leaf) for path, count, leaf in leaves), key=lambda item: item[0]
        )
        under += f"Most FLOPs: {_link(path, leaf, anchors)}, {percent(flops, report.flops['total'])}" if flops else ""
        return [_card("Time of matmuls", "not known", under)]
    before, after = time["unquantized_us"], time["quantized_us"]
    timed = [
        (leaf.estimate.quantized * count, path, leaf)
        for path, count, leaf in leaves
        if leaf.estimate is not None and leaf.estimate.quantized is not None
    ]
    longest, path, leaf = max(timed, key=lambda item: item[0])
    basis = " from published rates, not measured," if time["published"] else ""
    under = f"{before / after:.2f}x, estimated{basis} for {escape(time['card'])}. "
    under += f"Longest: {_link(path, leaf, anchors)}, {percent(longest, after)}"
    counted = {id(leaf) for _, _, leaf in timed}
    untimed = [title(path, leaf) for path, _, leaf in leaves if leaf.flops and id(leaf) not in counted]
    under += f". Without a time: {escape(some(untimed, 2))}" if untimed else ""
    return [_card("Time of matmuls and casts", _from_to(_time(before), _time(after)), under)]


def _error_card(leaves: Leaves, anchors: Anchors) -> list[str]:
    losses = [(loss.error, path, leaf) for path, _, leaf in leaves for loss in leaf.losses]
    if not losses:
        return []
    error, path, leaf = max(losses, key=lambda item: item[0])
    return [_card("Largest measured error", f"{error:.2%}", f"relative, of {_link(path, leaf, anchors)}")]


def _link(path: str, leaf: Leaf, anchors: Anchors) -> str:
    return f"<a href='#{anchors.row(title(path, leaf))}'>{escape(title(path, leaf))}</a>"


def _card(label: str, number: str, under: str) -> str:
    head = f"<span class='label'>{escape(label)}</span><b>{number}</b>"
    return f"<div class='card'>{head}<div class='soft'>{under}</div></div>"


def _time(us: float) -> str:
    return time_text(us).replace("us", "µs")


def _from_to(before: str, after: str) -> str:
    return after if before == after else f"{before}<span class='to'> → </span>{after}"


def _warnings(report: ReportData, anchors: Anchors) -> list[str]:
    lines = [f"Not compiled: {text}" for text in report.uncompiled] + verdict(report)[1:]
    parts = [f"<p class='warning' role='note'>{escape(line[0].upper() + line[1:])}</p>" for line in lines]
    counts = [(report.breaks, "graph break"), (report.unused, "unused rule"), (report.recompilations, "recompilation")]
    counted = [count_text(len(texts), noun) for texts, noun in counts if texts]
    return parts + (
        [f"<p class='warning' role='note'><a href='#{anchors.also}'>{', '.join(counted)}</a></p>"] * bool(counted)
    )


def _model(report: ReportData, root: Node, leaves: Leaves, pictures: Pictures, anchors: Anchors) -> str:
    """The tree, whose rows the script makes from JSON."""
    families = {_family(d) for d in report.decisions}
    timed = any(leaf.estimate is not None and leaf.estimate.quantized is not None for _, _, leaf in leaves)
    measured = any(leaf.losses for _, _, leaf in leaves)
    data = {
        "nodes": _nodes(root, "", 1),
        "prefix": anchors.prefix,
        "undrawn": f"No picture, and no reasons against fusions: {FROM_CACHE}." if report.from_cache else "",
        "unfused": _unfused(report, leaves),
        "all": len({d.site for d in report.decisions}),
        "timed": timed,
        "measured": measured,
        "reasons": {
            str(d.skip_reason): (d.skip_reason.meaning, d.skip_reason.remedy)
            for d in report.decisions
            if d.skip_reason is not None
        },
    }
    columns = [
        *COLUMNS,
        *([("time", "Time", "num")] if timed else []),
        *([("error", "Error", "num")] if measured else []),
    ]
    hidden = (set() if timed else {"time", "saved"}) | (set() if measured else {"error"})
    head = "".join(
        f"<th scope='col' class='{kind}' data-key='{key}' aria-sort='none'><button type='button'>{name}<span></span>"
        "</button></th>" if key else f"<th scope='col' class='{kind}'>{name}</th>"
        for key, name, kind in columns
    )  # fmt: skip
    orders = "".join(f"<option value='{key}'>{text}</option>" for key, text in ORDERS.items() if key not in hidden)
    kinds = {"": "all", "unquantized": "not quantized", "quantized": "quantized"}
    kinds |= {"slower": "slower than unquantized"} if timed else {}
    kinds |= {"measured": "measured"} if measured else {}
    shown = "".join(f"<option value='{key}'>{text}</option>" for key, text in kinds.items())
    legend = _legend(families, timed, [leaf for _, _, leaf in leaves])
    drawn = {leaf.layers[0]: pictures[leaf.layers[0]] for _, _, leaf in leaves if leaf.layers[0] in pictures}
    return (
        "<h2>Model</h2><p class='soft'>Modules as they nest; equal ones stand once, with their count, and FLOPs, "
        "weights and times are those of all of them. A row opens.</p>"
        "<noscript><p class='warning'>The tree needs JavaScript.</p></noscript>"
        "<div class='tools'><input type='search' aria-label='filter' "
        "placeholder='filter: layers.1 mlp, columnwise, nvfp4, a reason, a kernel …'>"
        f"<select class='kind' aria-label='which rows'>{shown}</select>"
        f"<select class='sort' aria-label='order'>{orders}</select>"
        "<button type='button' class='open'>Open all</button><button type='button' class='close'>Close all</button>"
        f"<output></output></div>{legend}<div class='frame' hidden>"
        "<table class='tree' role='treegrid' aria-label='layers'>"
        f"<thead><tr>{head}</tr></thead><tbody></tbody></table>"
        "<p class='none' hidden>No layer has all of these words.</p>"
        f"<button type='button' class='more' hidden></button></div>"
        f"{_script('data', data)}{_script('pictures', drawn) if drawn else ''}"
    )


def _legend(families: Collection[str], timed: bool, leaves: Iterable[Leaf]) -> str:
    """The meaning of colours, squares and bars in the tree."""
    squares = "<i class='key'></i><i class='key'></i>"
    pairs = "two squares for each GEMM, its left and its right operand: fprop, dgrad, wgrad"
    pairs += "; of an attention those of QK^T, then of PV" if any(leaf.is_attention for leaf in leaves) else ""
    items = [f"<span class='chip {key}'>{text}</span>" for key, text in FAMILIES.items() if key in families]
    items.append(f"<span><span class='strip'><span>{squares}</span></span>{escape(pairs)}</span>")
    items.append("<span><i class='key bar'></i>share of all FLOPs</span>")
    if timed:
        items[-1] = "<span><i class='key bar'></i>share of all FLOPs, or of the time as it was decided</span>"
        items.append("<span><i class='key bar was'></i>time in high precision</span>")
    if any(leaf.estimate is not None and leaf.estimate.slower for leaf in leaves):
        items.append("<span><i class='key bar worse'></i>slower than in high precision</span>")
    return f"<div class='legend' role='note' aria-label='legend'>{''.join(items)}</div>"


def _script(name: str, data: Any) -> str:
    """Data in the page; no text in it can end the element."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    return f'<script type="application/json" class="{name}">{text}</script>'


def _nodes(node: Node, path: str, count: int) -> list[dict[str, Any]]:
    """The rows in a module: its own matmuls, then the modules in it."""
    rows = [_leaf(leaf, path, leaf.label or MODEL, count) for leaf in node.leaves]
    for inner in node.nodes:
        here, many = f"{path}.{inner.name}".strip("."), count * inner.count
        if len(inner.leaves) == 1 and not inner.nodes:
            rows.append(_leaf(inner.leaves[0], here, f"{inner.name} {inner.leaves[0].label}".strip(), many))
        else:
            inside = _nodes(inner, here, many)
            rows.append({"name": inner.name, "path": here, "times": inner.count, "nodes": inside})
        rows[-1]["times"] = inner.count
    return rows


def _unfused(report: ReportData, leaves: Leaves) -> dict[str, list[tuple[str, str, str]]]:
    """The fusions that were considered and not taken, by layer; of equal layers those of the first."""
    fusions: dict[str, list[tuple[str, str, str]]] = {leaf.layers[0]: [] for _, _, leaf in leaves}
    for fusion in once(report.not_fused):
        if fusion.layer in fusions:
            fusions[fusion.layer].append((fusion.graph, capital(fusion.sentence), fusion.operator))
    return {layer: reasons for layer, reasons in fusions.items() if reasons}


def _leaf(leaf: Leaf, path: str, name: str, count: int) -> dict[str, Any]:
    products, estimate = leaf.products(), leaf.estimate
    weights = [(d, operand_bytes(d)) for operands in products.values() for d in operands
               if d.role.tensor_type == "weight" and d.gemm == "fprop"]  # fmt: skip
    sizes = [size for _, size in weights if size is not None]
    times = None if estimate is None else (estimate.unquantized, estimate.quantized)
    work = () if estimate is None else estimate.work
    return {
        "name": name,
        "path": title(path, leaf),
        "count": count,
        "times": 1,
        "form": leaf.decisions[0].form,
        "size": size_text(leaf.decisions),
        "flops": leaf.flops,
        "done": sum(ops[0].flops for ops in products.values() if all(d.quantizer is not None for d in ops)),
        "weight": [sum(size[i] for size in sizes) for i in (0, 1)] if sizes else None,
        "us": times if times and None not in times else None,
        "reference": "" if estimate is None else estimate.reference,
        "gemms": [
            [ops[0].part if leaf.is_attention else "", str(gemm), [_operand(d) for d in ops], ops[0].flops]
            for (_, gemm), ops in products.items()
        ],
        "work": [[w.what, w.kernel, w.unquantized, w.quantized] for w in work],
        "reasons": list(dict.fromkeys(str(d.skip_reason) for d in leaf.decisions if d.skip_reason is not None)),
        "errors": [
            [loss.layer or MODEL, loss.error, ", ".join(f"{name} {share:.1%}" for name, share in loss.lost.items())]
            for loss in sorted(leaf.losses, key=lambda loss: -loss.error)
        ],
        "error": max((loss.error for loss in leaf.losses), default=0.0),
        "layer": leaf.layers[0],
    }


def _operand(d: Decision) -> list[Any]:
    """An operand as the script reads it: role, direction, shape, format or reason, family, bytes, detail."""
    before, after = operand_bytes(d) or (None, None)
    text = str(d.skip_reason) if d.skip_reason is not None else re.split(r" \(", result(d), maxsplit=1)[0]
    bits = f"{d.bits:.4g} bits an element" if d.bits else ""
    detail = "; ".join(filter(None, (bits, d.detail)))
    return [role_text(d), str(d.direction), shape_text(d), text, _family(d), before, after, detail]


def _family(decision: Decision) -> str:
    if decision.skip_reason is not None:
        return "skipped"
    name = re.split(r"[( ]", result(decision), maxsplit=1)[0]
    row = FORMATS.get(name) or HEAD_FORMATS.get(name)
    return "own" if row is None else row.family


def _notes(report: ReportData, anchors: Anchors) -> list[str]:
    """The rest of what is to know: breaks, recompilations, unused rules, what was not fused, epilogues."""
    lists = (
        ("Graph breaks", "where torch.compile left its graph; what stands between is not quantized", report.breaks),
        ("Compiled again", "why torch compiled the same code again", report.recompilations),
        ("Unused in the recipe", "parts of the recipe that matched no operand", report.unused),
        ("Sent quantized", "what ranks exchange as payload and scales", [*map(sent_text, report.sent_quantized)]),
        ('Computed again with save="least"', "besides casts, by the backward", in_short(report.again)),
    )
    parts = [_note(name, meaning, _listed(texts), len(texts)) for name, meaning, texts in lists if texts]
    if rows := unfused(report):
        cells = [(str(row.times), row.graph, capital(row.sentence), some(row.layers, 4), row.step) for row in rows]
        meaning = "fusions and kernels that passes considered and did not take"
        parts.append(_note("Not fused", meaning, table(UNFUSED_COLUMNS, cells), sum(row.times for row in rows)))
    if kinds := kinds_of_epilogues(report):
        meaning = "what GEMMs add, activate or measure, and in which kernel"
        parts.append(_note("Epilogues", meaning, table(KIND_COLUMNS, kinds), sum(int(kind[0]) for kind in kinds)))
    return [f"<h2 id='{anchors.also}'>Also</h2>", *parts] if parts else []


def _note(name: str, meaning: str, inner: str, count: int) -> str:
    unfolded = " open" if count <= 8 else ""
    return (
        f"<details class='group'{unfolded}><summary><b>{escape(name)}</b><span class='soft'>{escape(meaning)}</span>"
        f"<span class='num'>{count}</span></summary><div>{inner}</div></details>"
    )


def _listed(texts: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in texts) + "</ul>"
