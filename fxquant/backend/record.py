"""A record for every captured graph, which becomes part of a report when the graph runs for the first time.

torch may call a backend and drop what it compiles: when an analysis starts again, when a later part of the frame fails,
or when the compilation itself does, and the frame runs as it is.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch import fx, nn

from fxquant.backend.shared import Key, Shared
from fxquant.backend.uncaptured import Uncaptured
from fxquant.compat.inside.frames import CallKey
from fxquant.compat.private import CapturedInputs, trace_artifact
from fxquant.decisions import ComputedOnce, Considered, Decision, KeptInFp8, NotFused, Saved, SentQuantized
from fxquant.passes.look import half, snapshot
from fxquant.recipes import Recipe
from fxquant.report.header import header_of
from fxquant.report.report import Report
from fxquant.roles import TENSOR_TYPES, QuantizerRole
from fxquant.snapshots import Snapshot

if TYPE_CHECKING:
    from fxquant.backend.kept_facts import Keeper


def graph_text(gm: fx.GraphModule) -> str:
    """A graph as Python text, without blank lines and the comments that name places in the source."""
    lines = gm.print_readable(print_output=False).splitlines()
    text = [re.sub(r";\s+[\w\s=]*= None$", "", line.rstrip()) for line in lines if line.strip()]
    return "\n".join(line for line in text if not line.lstrip().startswith("#"))


@dataclass(kw_only=True, eq=False)
class GraphRecord:
    """The decisions for a captured graph, the roles that its recipe was asked for, and what later passes leave.

    Its sites are counted from `first_site`. It is part of the report once it is `in_use`. `breaks` are the graph breaks
    before and behind it. `compilation` is the number of its compilation, and `recompiled` has the reasons why it stands
    beside earlier graphs of the same code, by their numbers; these may be graphs of other models. `others`
    are the decisions for the layers of further modules that run it, which `shared` names, and `other_roles` the roles;
    `runners` are the modules, those it was captured for first.
    Products without a name leave the parts of the recipe `undecided` that go by names. `inputs` are those of the first
    call, until it runs.
    `texts` has its ``forward`` and ``backward``, or what was ``captured``, if torch took it from a cache beside which
    neither was kept; `views` has the nodes of the first two. A `keeper` keeps both beside torch's cache.
    """

    first_site: int = 0
    decisions: Sequence[Decision] = ()
    roles: Sequence[QuantizerRole] = ()
    shared: Shared | None = None
    others: list[Decision] = field(default_factory=list)
    other_roles: list[QuantizerRole] = field(default_factory=list)
    runners: list[Key] = field(default_factory=list)
    considered: list[Considered] = field(default_factory=list)
    in_use: bool = False
    texts: dict[str, list[str]] = field(default_factory=dict)
    views: dict[str, list[Snapshot]] = field(default_factory=dict)
    keeper: Keeper | None = None
    breaks: Sequence[str] = ()
    compilation: str = ""
    recompiled: Mapping[str, str] = field(default_factory=dict)
    undecided: Sequence[str] = ()
    inputs: CapturedInputs | None = None

    def add_layers(self, names: Mapping[str, str], first_site: int) -> int:
        """Adds the layers of another module that runs this graph, by the names of those captured.

        Returns the first site behind them.
        """

        def named(role: QuantizerRole) -> QuantizerRole:
            return replace(role, name=names.get(role.name, role.name))

        shift = first_site - self.first_site
        self.other_roles += map(named, self.roles)
        for decision in self.decisions:
            matmul, attention = decision.matmul, decision.attention
            if matmul is not None:  # its tensors are others
                matmul = replace(matmul, input=f"{matmul.input}+{shift}", weight=f"{matmul.weight}+{shift}")
            if attention is not None:
                attention = replace(attention, site=attention.site + shift)
            role, site = named(decision.role), decision.site + shift
            self.others.append(replace(decision, role=role, site=site, matmul=matmul, attention=attention))
        return max((decision.site + 1 for decision in self.others), default=first_site)

    def decisions_in(self, model: nn.Module | None) -> list[Decision]:
        """The decisions for the layers of a model, or for all; those of a function count as any model's."""
        merges = [one for one in self.considered if isinstance(one, ComputedOnce)]
        once = {(self.first_site + one.place, one.gemm): one for one in merges}
        merged = [once.get((decision.site, decision.gemm)) for decision in self.decisions]
        count, parts = len(self.decisions), None if model is None else set(map(id, model.modules()))
        decisions = [
            decision if one is None else one.applied(decision)
            for decision, one in zip([*self.decisions, *self.others], merged * (len(self.runners) or 1), strict=True)
        ]
        chosen = [i for i, key in enumerate(self.runners) if parts is None or _is_of(key, model, parts)]
        return [decision for i in chosen for decision in decisions[i * count : (i + 1) * count]]

    def runs_in(self, model: nn.Module | None) -> bool:
        """Returns True if a model or its parts run this graph, or a function does."""
        parts = None if model is None else set(map(id, model.modules()))
        return parts is None or any(_is_of(key, model, parts) for key in self.runners)

    def see(self, gm: fx.GraphModule) -> fx.GraphModule:
        """Keeps the text of the forward or the backward, in which the operators of fxquant stand."""
        text, name = graph_text(gm), half(gm.graph)
        self.texts.setdefault(name, []).append(text)
        trace_artifact(f"fxquant_{name}_graph", lambda: text)
        return gm

    def look(self, graph: fx.Graph, names: Mapping[str, str]) -> None:
        """Keeps the nodes of the forward or the backward, as they are when kernels are chosen."""
        self.views.setdefault(half(graph), []).append(snapshot(graph, names))


def _is_of(modules: Sequence[Callable[[], nn.Module | None]], model: nn.Module | None, parts: set[int]) -> bool:
    """Returns True if modules are parts of a model, or one of them holds it."""
    alive = [module for reference in modules if (module := reference()) is not None]
    return not modules or any(id(m) in parts or any(part is model for part in m.modules()) for m in alive)


def outside_text(used: tuple[str, Sequence[str]]) -> str:
    """Says of a part of the recipe that it matches only these layers."""
    part, layers = used
    some = ", ".join(layers[:5]) + (", .." if len(layers) > 5 else "")
    return f"{part} matches only layers that run outside of the captured graphs: {some}"


def _recompilations(graphs: Sequence[GraphRecord]) -> list[str]:
    """The reasons why graphs stand beside others of these; what they stand beside besides is another model's."""
    numbers = {graph.compilation for graph in graphs}
    reasons = ([text for number, text in graph.recompiled.items() if number in numbers] for graph in graphs)
    return [texts[0] for texts in reasons if texts]


@dataclass(kw_only=True, eq=False)
class Records:
    """The captured graphs of one backend that have run, for a recipe.

    `runs` counts the runs of all. Where a whole model is compiled (`whole`), `calls` counts its calls and `plain` those
    that ran no graph, by the reason if it is known; `outside` names the layers that no call reaches. `uncaptured` has
    what first calls ran outside of graphs: that of the model (`first_seen`), or those of all that was compiled, which
    are `watched`. `limits` has the functions that torch does not compile any more, `failed` the errors of graphs that
    it runs as they are, and `missed` names calls that had no graph. `what` names the model, and `dispatch` says that
    the option `quantized_dispatch` was given. Those of a copied backend know the ones that they are a `copy_of`, which
    then count as run (`elsewhere`).
    """

    recipe: Recipe
    what: str
    dispatch: bool = False
    whole: bool = False
    graphs: list[GraphRecord] = field(default_factory=list)
    runs: int = 0
    calls: int = 0
    plain: Counter[str] = field(default_factory=Counter)
    limits: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    missed: str = ""
    outside: list[str] = field(default_factory=list)
    uncaptured: list[Uncaptured] = field(default_factory=list)
    first_seen: bool = False
    watched: set[CallKey] = field(default_factory=set)
    told: bool = False
    told_plain: bool = False
    told_alone: bool = False
    told_kinds: set[type] = field(default_factory=set)
    copy_of: Records | None = None
    elsewhere: bool = False

    def run(self, graph: GraphRecord) -> None:
        """Counts a run of a graph."""
        self.runs += 1
        if not graph.in_use:
            graph.in_use = True
            if self.copy_of is not None:
                self.copy_of.elsewhere = True
            self.graphs.append(graph)
            self.graphs.sort(key=lambda graph: graph.first_site)

    def decisions(self, model: nn.Module | None = None) -> list[Decision]:
        """The decisions in these graphs, for the layers of a model if one is given."""
        decisions = [decision for graph in self.graphs for decision in graph.decisions_in(model)]
        return sorted(decisions, key=lambda decision: decision.site)

    def uncaptured_in(self, model: nn.Module | None) -> list[Uncaptured]:
        """The records of what ran outside of graphs in the calls of a model or of its parts, or of all."""
        if model is None:
            return self.uncaptured
        parts = set(map(id, model.modules()))
        return [one for one in self.uncaptured if one.module() is None or _is_of([one.module], model, parts)]

    def _graphs_of(self, model: nn.Module | None) -> list[GraphRecord]:
        """The graphs of a model; those of functions alone are not its, where the others are of other models."""
        its = [graph for graph in self.graphs if graph.runs_in(model)]
        of_modules = [graph for graph in self.graphs if all(graph.runners)]
        return its if not of_modules or any(graph in its for graph in of_modules) else []

    def unused(self, *, trained: bool = False) -> list[str]:
        """The parts of the recipe that matched nothing; with `trained`, nothing in a training step either."""
        outside = [decision.role for one in self.uncaptured for decision in one.decisions(0)]
        return self.recipe.unused([*self._roles(trained), *outside])

    def used_outside(self, *, trained: bool = False) -> dict[str, list[str]]:
        """The parts of the recipe that matched nothing but layers outside of the captured graphs, with these."""
        roles, layers = self._roles(trained), dict[str, list[str]]()
        outside: dict[str, list[QuantizerRole]] = {}
        for decision in (decision for one in self.uncaptured for decision in one.decisions(0)):
            outside.setdefault(decision.role.name, []).append(decision.role)
        unmatched = self.recipe.unused(roles) if outside else []
        for layer, own_roles in outside.items():
            still = self.recipe.unused([*roles, *own_roles])
            for part in unmatched:
                if part not in still:
                    layers.setdefault(part, []).append(layer or "the model itself")
        return layers

    def _roles(self, trained: bool) -> list[QuantizerRole]:
        """The roles in graphs; with `trained` those of gradients too, which inference does not ask for."""
        roles = [role for graph in self.graphs for role in (*graph.roles, *graph.other_roles)]
        if trained:
            roles += [
                replace(role, tensor_type=kind)
                for role in roles
                for kind in TENSOR_TYPES[role.module_type]
                if kind in ("grad_output", "do", "dp")
            ]
        return roles

    def undecided(self) -> list[str]:
        """The parts of the recipe that go by names and met a product without one, with its place."""
        return [*dict.fromkeys(text for graph in self.graphs for text in graph.undecided)]

    def report(self, model: nn.Module | None = None, of: object = None) -> Report:
        """The decisions for these graphs, and what ran in none; of a `model` alone if other ones ran them too.

        The header names the model, or what it is the report `of`.
        """
        header = header_of(self.recipe, of if model is None else model)
        report = Report(recipe=str(self.recipe), decisions=self.decisions(model), header=header)
        report.unused = [*self.unused(), *map(outside_text, self.used_outside().items()), *self.undecided()]
        seen = self.uncaptured_in(model)
        for one in seen:
            report.decisions += one.decisions(1 + max((d.site for d in report.decisions), default=-1))
        considered = dict.fromkeys(outcome for graph in self.graphs for outcome in graph.considered)
        report.not_fused = [outcome for outcome in considered if isinstance(outcome, NotFused)]
        report.sent_quantized = [outcome for outcome in considered if isinstance(outcome, SentQuantized)]
        every = [outcome for graph in self.graphs for outcome in graph.considered * max(1, len(graph.runners))]
        kept = [outcome for outcome in every if isinstance(outcome, Saved)]
        report.saved = sum(kept[1:], kept[0]) if kept else None
        report.kept_fp8 = [outcome for outcome in every if isinstance(outcome, KeptInFp8)]
        for graph in self.graphs:
            for name, views in graph.views.items():
                report.views.setdefault(name, []).extend(views)
            for name, texts in graph.texts.items():
                report.graphs[name] = "\n\n".join([report.graphs[name], *texts] if name in report.graphs else texts)
        its = self._graphs_of(model)
        breaks = [reason for graph in its for reason in graph.breaks]
        report.breaks = [*dict.fromkeys([*breaks, *(reason for one in seen for reason in one.breaks)])]
        report.recompilations = _recompilations(its)
        report.uncompiled = [] if self.graphs else ["no graph has run"]
        report.uncompiled += [f"new inputs, since {text}" for text in self.limits]
        report.uncompiled += [f"a graph that failed: {text}" for text in self.failed]
        if self.missed:
            report.uncompiled.append(self.missed)
        if self.outside:
            report.uncompiled.append(f"outside of {self.what}, as the model has it: {', '.join(self.outside)}")
        for why, count in self.plain.items():
            since = f", since {why}" if why else ""
            report.uncompiled.append(f"{count} of {self.calls} calls of {self.what}, which ran no graph{since}")
        return report
