"""Snapshots of graphs while passes run over them, for whoever asks what a pass has done."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.compat.private import dtype_abbrs, tree_leaves
from fxquant.kernels.linear.problem import Problem
from fxquant.passes.captured import Captured
from fxquant.passes.find.facts import Match, shape_text
from fxquant.passes.graph.meta import CONSIDERED, CUSTOM, EXAMPLE_VALUE, RECOMPUTE, VAL, layer_of
from fxquant.passes.graph.names import op_name
from fxquant.passes.graph.values import maybe_value
from fxquant.passes.plan.layers import layer_name
from fxquant.snapshots import NodeText, Snapshot, Step

Watcher = Callable[[str, str, str, Any], None]
"""Is shown what a stage works on: the stage, the pass that has just run and its reason, ``""`` before the first."""

_WATCHERS: ContextVar[tuple[Watcher, ...]] = ContextVar("watchers", default=())


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Shows a watcher every pass that runs in this context."""
    token = _WATCHERS.set((*_WATCHERS.get(), watcher))
    try:
        yield
    finally:
        _WATCHERS.reset(token)


def show(stage: str, step: str, because: str, subject: Any) -> None:
    """Shows a graph, or the facts of one, to those who watch."""
    for watcher in _WATCHERS.get():
        watcher(stage, step, because, subject)


class Stages:
    """A watcher that keeps what each pass has done; nodes that stay as they are take memory once."""

    def __init__(self, names: Callable[[], Mapping[str, str]]) -> None:
        self.steps: list[Step] = []
        self._names = names
        self._before: Snapshot = ()
        self._counts: dict[tuple[str, str], int] = {}
        self._texts = Texts()

    def __call__(self, stage: str, step: str, because: str, subject: Any) -> None:
        if not step:
            self._texts.forget_nodes()
        nodes = snapshot(subject, self._names(), self._texts)
        kind = _kind(stage, subject)
        if not step:
            self._counts[stage, kind] = 1 + self._counts.get((stage, kind), 0)
        else:
            nodes = self._before if nodes == self._before else nodes
            count = self._counts[stage, kind]
            graph = kind if count == 1 else f"{kind} {count}"
            self.steps.append(Step(stage, step, because, graph, self._before, nodes))
        self._before = nodes


def _kind(stage: str, subject: Any) -> str:
    """Returns the kind of a graph."""
    if not isinstance(subject, fx.Graph):
        return "captured"
    return "joint" if stage == "joint" else half(subject)


def half(graph: fx.Graph) -> str:
    """The half of a training step that a graph is: ``forward`` or ``backward``."""
    return "backward" if any(n.name.startswith("tangents") for n in graph.find_nodes(op="placeholder")) else "forward"


def snapshot(subject: Any, names: Mapping[str, str], texts: Texts | None = None) -> Snapshot:
    """The nodes of a graph, or of what a pass of the captured stages works on; `names` are those of modules by id.

    Nodes that are as they were when their `texts` were written keep them.
    """
    texts = texts or Texts()
    if isinstance(subject, fx.Graph):
        return tuple(texts.of(node, "", names, "") for node in subject.nodes)
    notes = {}
    if isinstance(subject, Captured):
        notes = {match.node: _note(match) for match in subject.matches or ()}
    bodies = {path: body for path, body in subject.gm.named_modules() if isinstance(body, fx.GraphModule)}
    return tuple(
        texts.of(node, f"{path}/" if path else "", names, notes.get(node, ""))
        for path, body in bodies.items()
        for node in body.graph.nodes
    )


def with_epilogues(nodes: Snapshot, gemms: Iterable[tuple[fx.Node, Problem, fx.Node]]) -> Snapshot:
    """The nodes of a graph with what GEMMs could do behind their products, those that `problems` has found."""
    last = {node.name: root.name for node, problem, root in gemms if problem.fuses}
    return tuple(replace(node, epilogue=last[node.name]) if node.name in last else node for node in nodes)


class Texts:
    """The texts of nodes, which are written anew only if something in a node is another object than before."""

    def __init__(self) -> None:
        self._of: dict[fx.Node, tuple[tuple[Any, ...], NodeText]] = {}
        self._known: dict[NodeText, NodeText] = {}

    def forget_nodes(self) -> None:
        """Lets go of the nodes of a graph that is done; equal texts stay one object."""
        self._of.clear()

    def of(self, node: fx.Node, place: str, names: Mapping[str, str], note: str) -> NodeText:
        """The text of a node."""
        meta = node.meta
        facts = (
            node.target, node.args, node.kwargs, meta.get(VAL), meta.get(EXAMPLE_VALUE), meta.get(CONSIDERED),
            meta.get(CUSTOM), meta.get(RECOMPUTE),
        )  # fmt: skip
        words = (node.name, place, note)
        before = self._of.get(node)
        if before is None or before[0][-1] != words or not all(map(operator.is_, before[0], facts)):
            text = _node(node, place, names, note)
            before = self._of[node] = ((*facts, words), self._known.setdefault(text, text))
        return before[1]


def _node(node: fx.Node, place: str, names: Mapping[str, str], note: str) -> NodeText:
    operator = {"placeholder": "input", "get_attr": f"attribute {node.target}", "output": "output"}.get(node.op)
    arguments = [*map(_text, node.args), *(f"{key}={_text(value)}" for key, value in node.kwargs.items())]
    recompute = node.meta.get(RECOMPUTE)
    notes = (note, "" if recompute is None else getattr(recompute, "name", str(recompute)).lower().replace("_", " "))
    return NodeText(
        name=place + node.name,
        operator=operator or op_name(node),
        arguments=", ".join(arguments),
        reads=tuple(place + source.name for source in node.all_input_nodes),
        values=tuple(map(_value, tree_leaves(maybe_value(node)) if node.op != "output" else ())),
        specs=tuple(x for x in node.args if isinstance(x, str)),
        layer=layer_of(node) or layer_name(node, names),
        note="; ".join(filter(None, notes)),
        reasons=tuple(dict.fromkeys(node.meta.get(CONSIDERED, ()))),
    )


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_text(x)}' for key, x in value.items())}}}"
    if isinstance(value, str):
        return repr(value)
    if isinstance(value, Tensor):
        return _value(value)
    name = getattr(value, "__name__", "") if callable(value) and not isinstance(value, fx.Node) else ""
    return " ".join((name or str(value)).split()).removeprefix("torch.")


def _value(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{dtype_abbrs.get(value.dtype, str(value.dtype).removeprefix('torch.'))}{shape_text(value.shape)}"
    return str(value) if isinstance(value, (int, float, torch.SymInt, torch.SymFloat)) else type(value).__name__


def _note(match: Match) -> str:
    """Returns what is known of a match: its form and sizes, then the formats of its operands, or why it stays."""
    sizes = (f"{p.m} x {p.k} x {p.n}" for p in match.products if p.counted is None)
    facts = " ".join(filter(None, (match.module_type, match.name or "", "and ".join(dict.fromkeys(sizes)))))
    operands: dict[str, dict[str, None]] = {}
    for decision in (d for resolved in match.resolved for d in resolved.decisions):
        quantizer = decision.quantizer
        outcome = str(decision.skip_reason) if quantizer is None else str(quantizer.spec(decision.direction))
        operands.setdefault(decision.role.tensor_type, {})[outcome] = None
    skipped = [str(match.skip[0])] if match.skip and not operands else []
    return "; ".join([facts, *skipped, *(f"{name} {' or '.join(outcomes)}" for name, outcomes in operands.items())])
