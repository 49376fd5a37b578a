"""The JSON view of a report: everything in it, for programs."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from fxquant.cost.work import Work
from fxquant.decisions import Decision
from fxquant.report.data import EpilogueGemm, ReportData, result


def dumps(report: ReportData) -> str:
    """The report as a JSON object."""
    content = {
        "recipe": report.recipe,
        "summary": report.summary(),
        "unused": report.unused,
        "breaks": report.breaks,
        "uncompiled": report.uncompiled,
        "estimate": report.time(),
        "work": [{"layer": name, **_work(work)} for name, _, work in report.work()],
        "epilogues": [_epilogue(gemm, report.card) for gemm in report.epilogues],
        "again": report.again,
        "not_fused": [asdict(fusion) for fusion in report.not_fused],
        "losses": [asdict(loss) for loss in report.losses],
        "decisions": [_plain(d) for d in report.decisions],
        "graphs": report.graphs,
    }
    return json.dumps(content, indent=1)


def _work(work: Work) -> dict[str, Any]:
    times = {"unquantized_us": work.unquantized, "quantized_us": work.quantized}
    return {"what": work.what, "kernel": work.kernel, **times}


def _epilogue(gemm: EpilogueGemm, card: str) -> dict[str, str]:
    sizes = {"size": gemm.problem.size, "epilogue": gemm.problem.epilogue}
    return {"layer": gemm.layer, "graph": gemm.graph, **sizes, "kernel": str(gemm.chosen(card))}


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
        "skip_reason": decision.skip_reason and str(decision.skip_reason),
        "detail": decision.detail,
        "form": decision.form,
        "site": decision.site,
        "flops": decision.flops,
    }
