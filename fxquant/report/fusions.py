"""Fusions in rows: those that passes considered and did not take, and what GEMMs do behind their products."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from fxquant.decisions import NotFused
from fxquant.report.data import MODEL, EpilogueGemm, ReportData, folded, layer_pattern

UNFUSED_COLUMNS = ("times", "graph", "outcome and reason", "layers", "pass")
KIND_COLUMNS = ("GEMMs", "epilogue", "kernel", "graph", "layers, with M x K x N")


class Unfused(NamedTuple):
    """An outcome with its reason, so many `times` in a graph; the `layers` are in short where they repeat."""

    times: int
    graph: str
    sentence: str
    layers: list[str]
    step: str

    def __str__(self) -> str:
        return f"{self.times} x {self.sentence} ({', '.join(filter(None, (self.step, self.graph)))})"


def once(fusions: Sequence[NotFused]) -> list[NotFused]:
    """The fusions without those of the joint graph that a pass has looked at again in a half of it."""
    halves = {replace(fusion, graph="joint") for fusion in fusions if fusion.graph != "joint"}
    return [fusion for fusion in fusions if fusion not in halves]


def unfused(report: ReportData) -> list[Unfused]:
    """The fusions that were not taken, by graph, pass and reason; the most frequent first."""
    layers: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for fusion in once(report.not_fused):
        layers[fusion.graph, fusion.step, fusion.sentence].append(fusion.layer)
    rows = [
        Unfused(len(names), graph, sentence, in_short(names), step) for (graph, step, sentence), names in layers.items()
    ]
    return sorted(rows, key=lambda row: -row.times)


def in_short(names: Sequence[str]) -> list[str]:
    """The names of layers, each once, and those that differ in a number as one."""
    once = list(dict.fromkeys(names))
    return [name or MODEL for name, _ in folded(once, [""] * len(once))]


def epilogues(report: ReportData, layer: str = "") -> list[EpilogueGemm]:
    """The GEMMs on a GPU that have an epilogue, of layers in whose name the regular expression is found."""
    return [
        gemm
        for gemm in report.epilogues
        if gemm.problem.fuses and (report.card or gemm.card != "cpu") and layer_pattern(layer).search(gemm.layer)
    ]


def kinds_of_epilogues(report: ReportData) -> list[tuple[str, ...]]:
    """A row for each kind of epilogue in each graph, in `KIND_COLUMNS`, the most frequent first."""
    kinds: dict[tuple[str, str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for gemm in epilogues(report):
        chosen = gemm.chosen(report.card)
        facts = "; ".join(filter(None, (gemm.problem.size, chosen.reason)))
        kinds[gemm.problem.epilogue, str(chosen.kernel), gemm.graph][gemm.layer].append(facts)
    rows: list[tuple[str, ...]] = []
    for kind, layers in sorted(kinds.items(), key=lambda item: -sum(map(len, item[1].values()))):
        by_layer = list(layers.values())
        texts = [
            f"{name or MODEL} ({', '.join(dict.fromkeys(by_layer[places[0]]))})"
            for name, places in folded(list(layers), [tuple(facts) for facts in by_layer])
        ]
        rows.append((str(sum(map(len, by_layer))), *kind, "\n".join(texts)))
    return rows
