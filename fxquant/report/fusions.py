"""Fusions in rows: those that passes considered and did not take, and what GEMMs do behind their products."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

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


def unfused(report: ReportData) -> list[Unfused]:
    """The fusions that were not taken, by graph, pass and reason; the most frequent first."""
    layers: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for fusion in report.not_fused:
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
    kinds: dict[tuple[str, str, str], list[EpilogueGemm]] = defaultdict(list)
    for gemm in epilogues(report):
        kinds[gemm.problem.epilogue, str(gemm.chosen(report.card)), gemm.graph].append(gemm)
    rows: list[tuple[str, ...]] = []
    for kind, gemms in sorted(kinds.items(), key=lambda item: -len(item[1])):
        sizes: dict[str, list[str]] = defaultdict(list)
        for gemm in gemms:
            sizes[gemm.layer].append(gemm.problem.size)
        short = folded(list(sizes), [tuple(of_layer) for of_layer in sizes.values()])
        named = {name: dict.fromkeys(sizes[list(sizes)[places[0]]]) for name, places in short}
        texts = [f"{name or MODEL} ({', '.join(of_layer)})" for name, of_layer in named.items()]
        rows.append((str(len(gemms)), *kind, "; ".join(texts)))
    return rows
