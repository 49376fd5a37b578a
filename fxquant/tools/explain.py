"""`fxquant.explain`: reports the effects of a recipe on a model, and runs nothing quantized."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxquant.backend.backend import Backend, compile_eager
from fxquant.backend.options import check_model
from fxquant.backend.record import graph_text
from fxquant.backend.uncaptured import Uncaptured
from fxquant.checks import checked
from fxquant.compat.device import card_name, kept_random_state
from fxquant.compat.inside.recompiles import graph_breaks
from fxquant.compat.private import (
    changed_inputs,
    compile_to_look,
    min_cut_rematerialization_partition,
    tree_map_only,
)
from fxquant.compat.values import fake_mode_of
from fxquant.errors import ArgumentError
from fxquant.passes.graph.considered import considered
from fxquant.passes.graph.meta import VAL
from fxquant.passes.joint.repeat import products_to_repeat
from fxquant.passes.look import Stages, half, snapshot, watched, with_epilogues
from fxquant.passes.lower.epilogues import problems
from fxquant.passes.pipeline import Partition
from fxquant.passes.plan.layers import layer_name
from fxquant.passes.preview import copy_of, fused
from fxquant.recipes import Recipe
from fxquant.report.data import EpilogueGemm
from fxquant.report.header import header_of
from fxquant.report.report import Report
from fxquant.snapshots import Snapshot
from fxquant.tools.calls import called_with
from fxquant.tools.progress import progress


class _Explainer(Backend):
    """A backend that records the graphs it would compile, and runs the captured ones as they were.

    So Python between two graphs sees the model's own values. Graphs on meta or fake tensors are answered with zeros.
    """

    tells = False
    switches = False

    def __init__(self, recipe: Recipe | str, model: nn.Module | None) -> None:
        super().__init__(recipe, inner="aot_eager", model=model)
        self.stages = Stages(self._names)
        self._half: fx.GraphModule | None = None
        self.graphs: dict[str, list[str]] = {"forward": [], "backward": []}
        self.views: dict[str, list[Snapshot]] = {}
        self.epilogues: list[EpilogueGemm] = []
        self.again: list[str] = []
        self.uncaptured = Uncaptured(self._names())
        self._doing = "capturing"
        self._original = fx.GraphModule(nn.Module(), fx.Graph())
        self._written: dict[int, tuple[Tensor, Tensor]] = {}
        """Inputs that graphs have written into, by id, with their values before."""

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        with self._at("reading"):
            self._original = _copy_of(gm)
            return super().__call__(gm, example_inputs, **kwargs)

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        original, changed = self._original, list[int]()
        count = len(original.graph.find_nodes(op="placeholder"))

        def record(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            name = half(graph_module.graph)
            backward = name == "backward"
            self.graphs[name].append(graph_text(graph_module))
            gemms = list(problems(graph_module.graph))
            self.epilogues += [
                EpilogueGemm(layer_name(node, self._names()), name, problem, card_name(node.meta[VAL].device))
                for node, problem, _ in gemms
            ]
            if self._half is not None:
                graph = self._fused(self._half)
                gemms = list(problems(graph))
            else:
                graph = graph_module.graph
            self.views.setdefault(name, []).append(with_epilogues(snapshot(graph, self._names()), gemms))
            if not backward:
                changed[:] = changed_inputs()
                if changed and len(inputs) != len(example_inputs):  # aliases share one input: any may be written
                    changed[:] = range(count)
            return _zeros_of(graph_module, [] if backward else changed_inputs())

        def cut(graph_module: fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> Any:
            self.again += [layer_name(node, self._names()) for node in products_to_repeat(graph_module.graph)]
            return min_cut_rematerialization_partition(graph_module, joint_inputs, **kwargs)

        with self._at("differentiating"):
            partition = Partition(self.settings, cut, self._record.considered)
            unrun = compile_eager(gm, example_inputs, record, partition)

        def run(*inputs: Any) -> Any:
            if any(isinstance(x, Tensor) and (x.is_meta or fake_mode_of(x) is not None) for x in inputs):
                return unrun(*inputs)
            for x in (inputs[i] for i in changed if i < count):
                if isinstance(x, Tensor) and id(x) not in self._written:
                    self._written[id(x)] = (x, x.detach().clone())
            with self._at("running"), self.uncaptured.paused():
                return original(*inputs[:count])

        return run

    def _fused(self, copied: fx.GraphModule) -> fx.Graph:
        """A forward or a backward with what the fusions of a GPU make of it."""
        graph = fused(copied, self.settings).graph
        self._half = None
        self._record.considered += considered(graph, half(graph))
        return graph

    def watch(self, stage: str, step: str, because: str, subject: Any) -> None:
        """Keeps what a pass has done, and a copy of what Inductor would get."""
        self.stages(stage, step, because, subject)
        if stage == "meaning" and not step:
            self._half = copy_of(subject)

    def restore(self) -> None:
        """Gives inputs that graphs have written into the values that they had before."""
        with torch.no_grad():
            for x, before in reversed(self._written.values()):
                x.copy_(before)
        self._written.clear()

    def state(self) -> str:
        """Says how far it is."""
        graph = self.captured + (self._doing != "running")
        return f"{self._doing} graph {graph}, {self._sites} matmuls so far"

    @contextmanager
    def _at(self, doing: str) -> Iterator[None]:
        before, self._doing = self._doing, doing
        try:
            yield
        finally:
            self._doing = before


def _copy_of(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a captured graph and its bodies, with the same tensors and modules."""
    kept = [*gm.parameters(), *gm.buffers(), *(m for m in gm.modules() if not isinstance(m, fx.GraphModule))]
    kept += [x for m in gm.modules() for x in vars(m).values() if isinstance(x, Tensor)]
    return copy.deepcopy(gm, {id(x): x for x in kept})


def _zeros_of(graph_module: fx.GraphModule, changed: Sequence[int]) -> Callable[..., Any]:
    """Returns a function that answers a graph's inputs with zeros; of the `changed` ones it returns the old values.

    The new values of inputs come first, and are copied into them.
    """
    output = next(n for n in graph_module.graph.nodes if n.op == "output")
    values = list(fx.node.map_arg(output.args[0], lambda n: n.meta[VAL]))

    def zeros(*inputs: Any) -> list[Any]:
        return [*(inputs[i].clone() for i in changed), *tree_map_only(Tensor, _zeros, values[len(changed) :])]

    return zeros


def _zeros(fake: Tensor) -> Tensor:
    """Real zeros in the place of a fake tensor."""
    size, stride = [int(s) for s in fake.shape], [int(s) for s in fake.stride()]
    return torch.empty_strided(size, stride, dtype=fake.dtype, device=fake.device).zero_()


@checked(
    ArgumentError,
    called="fxquant.explain",
    takes={
        "model": "a module or a function",
        "recipe": 'a name, such as fxquant.explain(model, "mxfp8", x), or a Recipe',
    },
)
def explain(model: Any, recipe: Recipe | str, *args: Any, stages: bool = False, **kwargs: Any) -> Report:
    """Captures `model(*args, **kwargs)` and reports every operand of every matmul under `recipe`.

    The model's graphs are captured, rewritten and differentiated. Nothing quantized runs: a captured graph runs once as
    the model wrote it, so that Python behind it sees the model's own values, and its matmuls cost what the model costs.
    On meta tensors it does not run, and Python gets zeros. Inputs that graphs write into and the random state keep
    their values. Code that torch.compile leaves out of its graphs runs too, and its matmuls are NOT_CAPTURED. Work of
    more than some seconds shows its progress on stderr.

    The report holds the decisions, the reasons for graph breaks, the parts of the recipe that matched nothing, and the
    text of the rewritten forward and backward graphs. With `stages` it keeps those before and after each pass too,
    which `Report.stage` shows; a model's own argument of this name is given by position. Raises RecipeError as
    compiling would, OptionError for what is no model, and ArgumentError for inputs that the model does not take.
    """
    check_model(model, "explained")
    backend = _Explainer(recipe, model if isinstance(model, nn.Module) else None)
    uncaptured = backend.uncaptured
    try:
        with progress("explain", backend.state), compile_to_look(), kept_random_state():
            with graph_breaks() as breaks, uncaptured, watched(backend.watch) if stages else nullcontext():
                compiled: Callable[..., Any] = torch.compile(model, backend=backend, dynamic=False)
                with called_with(model, args, kwargs):
                    compiled(*args, **kwargs)
    finally:
        backend.restore()
    backend.records.uncaptured.append(uncaptured)
    report = backend.report()
    report.header = header_of(backend.recipe, model)
    report.breaks = breaks if backend.captured else [*breaks, "torch.compile captured no graph at all"]
    report.epilogues, report.again = backend.epilogues, backend.again
    report.steps, report.views = backend.stages.steps, backend.views
    report.graphs = {name: "\n\n".join(texts) for name, texts in backend.graphs.items()}
    return report
