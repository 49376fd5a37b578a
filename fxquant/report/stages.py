"""The graphs of a report before and after each pass of the pipeline, as text."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fxquant.errors import OptionError
from fxquant.report.data import ReportData, layer_pattern, plain_spec
from fxquant.report.text import count_text
from fxquant.snapshots import Step, changes


def stage(report: ReportData, name: str = "", *, layer: str = "", graph: str = "") -> str:
    """The graphs after a pass, such as ``find``, or a stage, such as ``captured``; without a name the list of all.

    New nodes are marked ``+``, removed ones ``-`` and changed ones ``~``; behind ``#`` stands what passes have found
    out. Of graphs, which are ``captured``, ``joint``, ``forward`` or ``backward``, those in whose name the regular
    expression `graph` is found, and of their nodes those of the layers in whose name `layer` is found.

    Raises OptionError for another name, or for a report that kept no stages.
    """
    if not report.steps:
        raise OptionError(
            "this report kept no stages: ask for them by fxquant.explain(model, recipe, *args, stages=True)"
        )
    graphs, layers = layer_pattern(graph, "graph"), layer_pattern(layer)
    steps = [step for step in report.steps if graphs.search(step.graph)]
    if not name:
        return "\n".join(f"{step.stage}  {title(step)}" for step in steps)
    chosen = [step for step in steps if step.name == name] or _whole(steps, name.lower())
    if not chosen:
        names = dict.fromkeys(x for step in steps for x in (step.stage, step.name))
        raise OptionError(f"no pass or stage {name!r} ran over a graph {graph!r}; those that did: {', '.join(names)}")
    return "\n\n".join(_text(step, layers) for step in chosen if step.changed or not any(s.changed for s in chosen))


def title(step: Step) -> str:
    """A pass, its graph, and how many nodes it changed."""
    return f"{step.name} of the {step.graph} graph: {count_text(step.changed, 'node')} changed"


def _whole(steps: Sequence[Step], stage: str) -> list[Step]:
    """A stage over each graph as one step."""
    first: dict[str, Step] = {}
    last: dict[str, Step] = {}
    for step in steps:
        if step.stage == stage:
            first.setdefault(step.graph, step)
            last[step.graph] = step
    return [Step(stage, stage, "", graph, first[graph].before, step.after) for graph, step in last.items()]


def _text(step: Step, layers: re.Pattern[str]) -> str:
    lines = [title(step)]
    lines += [f"  {step.because}"] if step.because else []
    marked = [(mark, node) for mark, node in changes(step.before, step.after) if layers.search(node.layer)]
    lines += [f"{mark} {plain_spec(str(node))}" for mark, node in marked]
    return "\n".join(lines if marked else [*lines, "  no node of these layers"])
