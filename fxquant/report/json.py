"""The JSON view of a report: everything in it, for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fxquant.cost.work import Estimate, Work
from fxquant.decisions import Decision
from fxquant.report.codec import encode
from fxquant.report.data import EpilogueGemm, ReportData, layer_pattern, result
from fxquant.report.picture import pictures

SCHEMA = 1
"""The version of the JSON: it grows when a field changes its meaning or goes, not when one is added."""


def dumps(report: ReportData, layer: str = "", *, collapse: bool = False, graphs: bool = True) -> str:
    """The report as a JSON object in text; see `content`."""
    return json.dumps(content(report, layer, collapse=collapse, graphs=graphs), indent=1)


def content(report: ReportData, layer: str = "", *, collapse: bool = False, graphs: bool = True) -> dict[str, Any]:
    """The report in the types of JSON, with the version of its form in ``schema``.

    Lists by layer hold the layers in whose name the regular expression `layer` is found; `collapse` folds those that
    differ only in numbers of their names into one with ``layers``, their count. The summary and the estimate are the
    whole report's. Without `graphs` their texts and pictures are left out. ``schema.json`` beside this file describes
    every field, and `Report.from_json` reads what is not folded.
    """
    pattern, layers = layer_pattern(layer), report.layers(layer, collapse=collapse)
    return {
        "schema": SCHEMA,
        "header": asdict(report.header),
        "recipe": report.recipe,
        "card": report.card,
        "summary": report.summary(),
        "unused": report.unused,
        "breaks": report.breaks,
        "recompilations": report.recompilations,
        "uncompiled": report.uncompiled,
        "estimate": report.time(),
        "work": [
            {"layer": name, **_work(work)} | _times(repeats, collapse)
            for name, repeats, work in report.work(layer, collapse=collapse)
        ],
        "epilogues": [_epilogue(gemm, report.card) for gemm in report.epilogues if pattern.search(gemm.layer)],
        "saved": report.saved and asdict(report.saved),
        "kept_fp8": [asdict(kept) for kept in report.kept_fp8 if pattern.search(kept.layer)],
        "again": [name for name in report.again if pattern.search(name)],
        "not_fused": [asdict(fusion) for fusion in report.not_fused if pattern.search(fusion.layer)],
        "sent_quantized": [asdict(sent) for sent in report.sent_quantized if any(map(pattern.search, sent.layers))],
        "losses": [asdict(loss) for loss in report.losses if pattern.search(loss.layer)],
        "decisions": [
            _plain(d) | ({"layer": name} | _times(repeats, collapse) if collapse else {})
            for name, repeats, decisions in layers
            for d in decisions
        ],
        "products": _products(report, [d for _, _, decisions in layers for d in decisions]),
        "graphs": report.graphs if graphs else {},
        "drawn": {name: svgs for name, svgs in pictures(report).items() if pattern.search(name)} if graphs else {},
    }


def _times(repeats: int, collapse: bool) -> dict[str, int]:
    """The count of folded layers."""
    return {"layers": repeats} if collapse else {}


def _work(work: Work) -> dict[str, Any]:
    times = {"unquantized_us": work.unquantized, "quantized_us": work.quantized}
    return {"what": work.what, "kernel": work.kernel, **times}


def _epilogue(gemm: EpilogueGemm, card: str) -> dict[str, Any]:
    sizes = {"size": gemm.problem.size, "epilogue": gemm.problem.epilogue}
    facts = {"card": gemm.card, "problem": encode(gemm.problem)}
    return {"layer": gemm.layer, "graph": gemm.graph, **sizes, "kernel": str(gemm.chosen(card)), **facts}


def _products(report: ReportData, decisions: Sequence[Decision]) -> list[dict[str, Any]]:
    """The facts that decide the time of each product, and what its time was estimated to be."""
    estimates, first = report.estimates(), {d.site: d for d in reversed(decisions)}
    return [_product(first[site], estimates.get(site)) for site in sorted(first)]


def _product(decision: Decision, estimate: Estimate | None) -> dict[str, Any]:
    facts = {"site": decision.site, "matmul": encode(decision.matmul), "attention": encode(decision.attention)}
    if estimate is None:
        return {**facts, "work": None, "reference": ""}
    return {**facts, "work": [_work(work) for work in estimate.work], "reference": estimate.reference}


def _plain(decision: Decision) -> dict[str, Any]:
    """A decision in the types of JSON."""
    return {
        "layer": decision.layer,
        "part": decision.part,
        "module_type": decision.role.module_type,
        "tensor_type": decision.role.tensor_type,
        "gemm": str(decision.gemm),
        "direction": str(decision.direction),
        "shape": list(decision.shape),
        "quantizer": None if decision.quantizer is None else result(decision),
        "spec": None if decision.quantizer is None else str(decision.quantizer.spec(decision.direction)),
        "skip_reason": decision.skip_reason and str(decision.skip_reason),
        "detail": decision.detail,
        "form": decision.form,
        "site": decision.site,
        "flops": decision.flops,
        "shared": decision.shared,
        "bits": decision.bits,
        "merged": decision.merged,
    }
