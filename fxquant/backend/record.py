"""A record for every captured graph, which becomes part of a report when the graph runs for the first time.

torch may call a backend and drop what it compiles: when an analysis starts again, when a later part of the frame fails,
or when the compilation itself does, and the frame runs as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from fxquant.decisions import Decision, NotFused
from fxquant.recipes import Recipe
from fxquant.report.report import Report
from fxquant.roles import QuantizerRole


@dataclass(kw_only=True, eq=False)
class GraphRecord:
    """The decisions for a captured graph, the roles that its recipe was asked for, and the reasons of later passes.

    Its sites are counted from `first_site`. It is part of the report once it is `in_use`.
    """

    first_site: int = 0
    decisions: Sequence[Decision] = ()
    roles: Sequence[QuantizerRole] = ()
    not_fused: list[NotFused] = field(default_factory=list)
    in_use: bool = False


@dataclass(kw_only=True, eq=False)
class Records:
    """The captured graphs of one backend that have run, for a recipe.

    `runs` counts the runs of all. Where a whole model is compiled (`whole`), `calls` counts its calls and `plain` those
    that ran no graph. `limits` has the functions that torch does not compile any more. `what` names the model.
    """

    recipe: Recipe
    what: str
    whole: bool = False
    graphs: list[GraphRecord] = field(default_factory=list)
    runs: int = 0
    calls: int = 0
    plain: int = 0
    limits: list[str] = field(default_factory=list)
    told: bool = False
    told_plain: bool = False

    def run(self, graph: GraphRecord) -> None:
        """Counts a run of a graph."""
        self.runs += 1
        if not graph.in_use:
            graph.in_use = True
            self.graphs.append(graph)
            self.graphs.sort(key=lambda graph: graph.first_site)

    @property
    def decisions(self) -> list[Decision]:
        return [decision for graph in self.graphs for decision in graph.decisions]

    def unused(self, *, trained: bool = False) -> list[str]:
        """The parts of the recipe that matched nothing; with `trained`, nothing in a training step either."""
        roles = [role for graph in self.graphs for role in graph.roles]
        if trained:  # gradients have roles that inference does not ask for
            roles += [replace(role, tensor_type=kind) for role in roles for kind in ("grad_output", "do", "dp")]
        return self.recipe.unused(roles)

    def report(self) -> Report:
        """The decisions for these graphs, and what ran in none."""
        report = Report(recipe=str(self.recipe), decisions=self.decisions, unused=self.unused())
        report.not_fused = [*dict.fromkeys(fusion for graph in self.graphs for fusion in graph.not_fused)]
        report.uncompiled = [] if self.graphs else ["no graph has run"]
        report.uncompiled += [f"new inputs, since {text}" for text in self.limits]
        if self.plain:
            report.uncompiled.append(f"{self.plain} of {self.calls} calls of {self.what}, which ran no graph")
        return report
