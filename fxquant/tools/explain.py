"""`fxquant.explain`: reports the effects of a recipe on a model, without running its graphs."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxquant.backend.backend import Backend, compile_eager
from fxquant.compat.device import card_name
from fxquant.compat.private import (
    changed_inputs,
    compile_to_look,
    graph_breaks,
    min_cut_rematerialization_partition,
    own_errors,
    tree_map_only,
)
from fxquant.passes.joint.repeat import products_to_repeat
from fxquant.passes.lower.epilogues import problems
from fxquant.passes.pipeline import Partition
from fxquant.passes.plan.layers import layer_name
from fxquant.recipes import Recipe
from fxquant.report.data import EpilogueGemm
from fxquant.report.report import Report
from fxquant.tools.uncaptured import Uncaptured


def graph_text(gm: fx.GraphModule) -> str:
    """A graph as Python text, without blank lines and the comments that name places in the source."""
    lines = gm.print_readable(print_output=False).splitlines()
    text = [re.sub(r";\s+[\w\s=]*= None$", "", line.rstrip()) for line in lines if line.strip()]
    return "\n".join(line for line in text if not line.lstrip().startswith("#"))


class _Explainer(Backend):
    """A backend that records the graphs it would compile, and answers calls with zeros."""

    def __init__(self, recipe: Recipe | str, model: nn.Module | None) -> None:
        super().__init__(recipe, inner="aot_eager", model=model)
        self.graphs: dict[str, list[str]] = {"forward": [], "backward": []}
        self.epilogues: list[EpilogueGemm] = []
        self.again: list[str] = []

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        def record(graph_module: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
            backward = any(n.op == "placeholder" and n.name.startswith("tangents") for n in graph_module.graph.nodes)
            name = "backward" if backward else "forward"
            self.graphs[name].append(graph_text(graph_module))
            self.epilogues += [
                EpilogueGemm(layer_name(node, self._names()), name, problem, card_name(node.meta["val"].device))
                for node, problem in problems(graph_module.graph)
            ]
            output = next(n for n in graph_module.graph.nodes if n.op == "output")
            values = fx.node.map_arg(output.args[0], lambda n: n.meta["val"])
            changed = [] if backward else changed_inputs()

            def zeros(*inputs: Any) -> list[Any]:
                # the new values of inputs come first, and are copied into them: the old values here
                kept = [inputs[i].clone() for i in changed]
                return [*kept, *tree_map_only(Tensor, _zeros, list(values)[len(changed) :])]

            return zeros

        def cut(graph_module: fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> Any:
            self.again += [layer_name(node, self._names()) for node in products_to_repeat(graph_module.graph)]
            return min_cut_rematerialization_partition(graph_module, joint_inputs, **kwargs)

        return compile_eager(gm, example_inputs, record, Partition(self.settings, cut, self._not_fused))


def _zeros(fake: Tensor) -> Tensor:
    """Real zeros in the place of a fake tensor."""
    size, stride = [int(s) for s in fake.shape], [int(s) for s in fake.stride()]
    return torch.empty_strided(size, stride, dtype=fake.dtype, device=fake.device).zero_()


def explain(model: Callable[..., Any], recipe: Recipe | str, *args: Any, **kwargs: Any) -> Report:
    """Captures `model(*args, **kwargs)` and reports every operand of every matmul under `recipe`.

    The model's graphs are captured, rewritten and differentiated, but not run: Python gets zeros for the results of a
    graph, and inputs that a graph writes into keep their values. Code that torch.compile leaves out of its graphs does
    run, and its matmuls are NOT_CAPTURED. The report holds the decisions, the reasons for graph breaks, the parts of
    the recipe that matched nothing, and the text of the rewritten forward and backward graphs. Raises RecipeError as
    compiling would.
    """
    backend = _Explainer(recipe, model if isinstance(model, nn.Module) else None)
    uncaptured = Uncaptured(backend._names())
    with own_errors(), compile_to_look(), graph_breaks() as breaks, uncaptured:
        torch.compile(model, backend=backend, dynamic=False)(*args, **kwargs)
    report = backend.report()
    report.decisions += uncaptured.decisions(1 + max((d.site for d in report.decisions), default=-1))
    report.breaks = breaks if backend.captured else [*breaks, "torch.compile captured no graph at all"]
    report.epilogues, report.again = backend.epilogues, backend.again
    report.graphs = {name: "\n\n".join(texts) for name, texts in backend.graphs.items()}
    return report
