"""The backend of torch.compile: analyses and rewrites a captured graph, then AOTAutograd and Inductor compile it."""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn

from fxquant.backend.blocks import Blocks, Place
from fxquant.backend.checkpoint import gathered, restore
from fxquant.backend.controls import Controls
from fxquant.backend.copies import Given, mark_copies
from fxquant.backend.finite import FiniteCheck
from fxquant.backend.first_calls import watch_first_calls
from fxquant.backend.gathered import GatheredWeights
from fxquant.backend.inductor import inductor_settings, memory_settings
from fxquant.backend.kept_facts import Keeper, key_of
from fxquant.backend.notices import tell_alone, tell_failed, watch
from fxquant.backend.options import Options, check_keywords
from fxquant.backend.outside import Quantizations
from fxquant.backend.probing import Probed, Totals
from fxquant.backend.record import GraphRecord, Records, graph_text
from fxquant.backend.repeats import states_of_first_run, without_gradients
from fxquant.backend.selective import ask_around, ask_inside
from fxquant.backend.shared import Shared, named_here
from fxquant.backend.states import StateStore
from fxquant.backend.uncaptured import graph_runs
from fxquant.backend.weight_cache import CachedWeights, WeightCache
from fxquant.checks import article, checked
from fxquant.compat.inside.frames import unwrapped, without_switch
from fxquant.compat.inside.ranks import in_pipeline_stage, name_of_all
from fxquant.compat.inside.recompiles import breaks_around, compilation, recompile_reasons
from fxquant.compat.patches import compile_with_inductor
from fxquant.compat.private import (
    CapturedInputs,
    aot_autograd,
    make_boxed_func,
    own_errors,
    recomputes_activations,
    trace_artifact,
    with_hooks,
)
from fxquant.compat.values import static_fakes
from fxquant.errors import ArgumentError, FxQuantWarning, OptionError, tell
from fxquant.passes.captured import Bound, Captured, quantizes, undecided
from fxquant.passes.graph.considered import considered
from fxquant.passes.look import half
from fxquant.passes.lower.ranges import register_ranges
from fxquant.passes.pipeline import BOUND, CAPTURED, MEANING, Partition, run, source_key, traced
from fxquant.passes.plan.layers import clean_path
from fxquant.passes.settings import Settings
from fxquant.passes.verify import checks_values
from fxquant.quantizers import DelayedScalingRequest
from fxquant.recipes import Recipe, resolve
from fxquant.report.report import Report
from fxquant.state import Slots

log = logging.getLogger(__name__)


@checked(
    ArgumentError, called="fxquant.Backend", takes={"recipe": 'a name, such as fxquant.Backend("mxfp8"), or a Recipe'}
)
class Backend(Given):
    """A torch.compile backend for one recipe.

        backend = fxquant.Backend("mxfp8")
        compiled = torch.compile(model, backend=backend)
        compiled(x)
        print(backend.report())

    `inner` compiles the rewritten graphs: ``inductor``, or ``aot_eager`` to run their operators one by one, for
    debugging. `allow_float64` quantizes float64 operands too (as float32). `mode` and `inductor` (a dict of settings)
    go to Inductor. A forward keeps ``quantized`` activations for its backward, or the ``least`` (`save`): the backward
    then quantizes them again, and multiplies again where attention's output goes into a sum. By ``less`` a
    GPU makes activations once more alone, and by ``fp8`` what norms, activations and attention keep is in FP8 too,
    from which gradients lose a little. With `cache_weights` a
    weight is quantized only after a change, and its payloads take memory in between; `clear_cache` tells of a change
    that nothing shows. `gemm` chooses between two kernels of a GPU: ``cublas``, ``triton``, which fuses the operators
    after a GEMM, the faster by earlier measurements (``auto``) or by measuring while compiling (``autotune``). `model`
    gives layers their full names where the graph breaks. `amax_group` is the process group over which delayed scaling
    takes the largest amax; without one it is that of all ranks, also ``world``, but not in a stage of a pipeline.
    With `quantized_dispatch` tokens are quantized before ranks exchange them for experts' products, where each row has
    its scales for itself. With `ranges` products run under names for a profiler, such as ``layers.3.mlp.down wgrad``.
    Backends with the same `states` share them. `captured` counts the graphs that have run so far.

    Raises RecipeError for an unknown recipe and OptionError for an unknown setting.
    """

    tells: ClassVar[bool] = True
    """Warns of what ran unquantized."""

    switches: ClassVar[bool] = True
    """Lets `autocast` and `set_recipe` change the recipe."""

    def __init__(
        self,
        recipe: Recipe | str,
        *,
        mode: str | None = None,
        model: nn.Module | None = None,
        states: StateStore | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(model, nn.Module | None):
            raise OptionError(f"model is the nn.Module that is compiled, not {article(type(model).__name__)}")
        check_keywords(options, "fxquant.Backend")
        mark_copies()
        self.mode = mode
        self.called_with: tuple[Any, ...] = ()
        self.states = states or StateStore()
        self._names: Callable[[], Mapping[str, str]] = _names_of(None if model is None else unwrapped(model))
        self._begin(Options(recipe=recipe, **options))
        if self.inductor and self.options.inner == "aot_eager":
            ignored = ", ".join(sorted(self.inductor))
            tell(f"settings of Inductor have no effect with inner='aot_eager': {ignored}", FxQuantWarning)
        self.controls = Controls(self)
        if model is not None:
            self.controls.add_root(model)
            self.controls.model = weakref.ref(model)
            self.states.of(unwrapped(model))
        if self.tells:
            watch(self.records)

    def _begin(self, options: Options) -> None:
        self.options = options
        self.recipe = resolve(options.recipe)
        self.inductor = options.for_inductor(self.mode)
        self.settings = options.for_passes()
        if options.ranges:
            register_ranges()
        self.quantizations = Quantizations(self._compile_quantization)
        self.weights = self._weight_cache()
        self.records = self._no_records()
        self._record = GraphRecord()  # of the graph that is compiled now
        self._sites = 0

    def under(self, recipe: Recipe) -> Backend:
        """A backend with the same options, names, states and controls for another recipe."""
        other = type(self).__new__(type(self))
        vars(other).update(vars(self))
        other._begin(replace(self.options, recipe=recipe))
        return other

    @own_errors()
    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        """Compiles one captured graph under the recipe of this call; torch.compile calls this."""
        backend = self.controls.begin() if self.switches else self
        try:
            return backend.compile_captured(gm, example_inputs)
        except Exception as error:
            tell_failed(backend.records, error)
            raise

    def compile_captured(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compiles one captured graph under this backend's recipe."""
        record = GraphRecord(
            first_site=self._sites, breaks=breaks_around(gm), compilation=compilation(),
            recompiled=recompile_reasons(), inputs=CapturedInputs(gm),
        )  # fmt: skip
        self._record = record
        place = self.controls.place()
        names = self._names_here(place)
        with with_hooks(_same, _same):  # a checkpoint around counts saved tensors
            slots = self.rewrite(gm, example_inputs, place)
        if not self.switches:  # tools have states of the one model that they know
            place = None
        devices = [x.device for x in example_inputs if isinstance(x, Tensor)]
        device = next((d for d in devices if d.type != "cpu"), torch.device("cpu"))
        group = self.group_of(slots.request)
        blocks = Blocks(slots, device, group, self.states, place)
        if place is not None:
            blocks.look_at(place.root, example_inputs, self.controls.place_with)
        states = blocks.first[1]
        shared = place is not None and bool(place.path)
        autocast = _ambient_autocast(example_inputs)
        bound = Bound(
            gm=gm, slots=slots, states=states, group=group, shared=shared, names=names, autocast=autocast
        )  # fmt: skip
        compile = partial(self._bound, record, blocks)
        if bound.training or not states:
            return compile(run(BOUND, bound, self.settings), example_inputs)
        uses = (bound, replace(bound, training=True))
        by_use = {bound.training: run(BOUND, bound, self.settings) for bound in uses}
        return without_gradients(by_use, example_inputs, compile)

    def _bound(
        self, record: GraphRecord, blocks: Blocks, bound: Bound, example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        """Compiles a graph for the inputs that it was captured with, and calls it with what it takes besides."""
        self._record = record
        probed = Probed(bound, example_inputs, self.settings, self._compile_measured)
        # compiled for copies, so that AOTAutograd does not see that forward and backward have one step
        copies = [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t) for t in bound.tensors
        ]
        inputs = [*example_inputs, *static_fakes(copies, example_inputs), *bound.parts]
        if self._may_be_cached(bound.gm):
            names = [role.name for role in record.roles]
            others = (self.settings, sorted(self.inductor.items()), names, torch.is_grad_enabled(), source_key())
            record.keeper = Keeper(record, key_of(graph_text(bound.gm), inputs, *others))
        compiled = self.compile(bound.gm, inputs)
        if record.keeper is not None:
            record.keeper.complete()
        if not record.texts:  # from a cache, or without a quantized matmul
            record.texts["captured"] = [graph_text(bound.gm)]
        held = GatheredWeights(bound.gm, example_inputs, self.settings, self.quantizations)
        if checks_values():
            compiled = FiniteCheck(bound.gm, self._all_names, self.records.what).watching(compiled)
        cached = self.weights.of(bound.taken) if self.weights is not None else None
        graph, read = without_switch(compiled), (blocks, bound, held, cached, probed)
        return lambda *inputs: self._call(graph, inputs, record, read)

    def _may_be_cached(self, gm: fx.GraphModule) -> bool:
        """Returns True if Inductor keeps a quantized graph, so that a later process compiles nothing."""
        return self.options.inner == "inductor" and quantizes(gm) and not self.inductor.get("force_disable_caches")

    def _compile_measured(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compiles the form of a graph that measures, of which no report tells."""
        record, self._record = self._record, GraphRecord()
        try:
            return self.compile(gm, inputs)
        finally:
            self._record = record

    def group_of(self, request: DelayedScalingRequest | None) -> str | None:
        """The name of the process group over which a graph takes its largest amaxes; None for this process alone."""
        if request is None or not request.reduce_amax:
            return None
        if self.options.group is not None:
            return self.options.group
        if self.options.amax_group is None and in_pipeline_stage() and name_of_all() is not None:
            tell_alone(self.records)
            return None
        return name_of_all()

    def note_copy(self, module: nn.Module, copied: nn.Module) -> None:
        """Notes that a module was copied that this compiles in place and has not met."""
        self.controls.note_copy(module, copied)

    def __deepcopy__(self, memo: dict[int, Any]) -> Backend:
        """Returns a copy with states of its own, whose graphs count for this backend where none of its own has run."""
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        copied.records.copy_of = self.records.copy_of or self.records
        if self.tells:
            watch(copied.records)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """The settings and states of a copy, which has compiled nothing yet."""
        empty = {"records": self._no_records(), "_record": GraphRecord(), "_sites": 0}
        try:
            states = self.state_dict()
        except OptionError as error:
            tell(f"a copy of {self.records.what} begins with a new quantization state: {error}", FxQuantWarning)
            states = {}
        copied = {
            "_names": dict,
            "weights": None,
            "quantizations": None,
            "controls": self.controls.recipe,
            "states": states,
        }
        return {**vars(self), **empty, **copied}

    def _no_records(self) -> Records:
        return Records(
            recipe=self.recipe, what=f"fxquant.Backend({self.recipe})", dispatch=self.options.quantized_dispatch
        )

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self.quantizations = Quantizations(self._compile_quantization)
        self.weights = self._weight_cache()
        self.controls, self.states = Controls(self), StateStore()
        self.controls.recipe = state["controls"]
        if state["states"]:
            self.load_state_dict(state["states"])

    def _weight_cache(self) -> WeightCache | None:
        return WeightCache(self.quantizations) if self.settings.stored_weights else None

    def _call(
        self,
        run: Callable[..., Any],
        inputs: Sequence[Any],
        record: GraphRecord,
        read: tuple[Blocks, Bound, GatheredWeights, CachedWeights | None, Probed],
    ) -> Any:
        self.records.run(record)
        self.controls.run()
        if record.inputs is not None:
            record.inputs.forget()
            record.inputs = None
        assert record.shared is not None
        names, modules, new = record.shared.begin()
        if new:
            if record.runners:
                self._sites = record.add_layers(names, self._sites)
            record.runners.append(modules)
            if self.tells and self.switches:
                watch_first_calls(self.records, self._all_names, twice=not self.inductor.get("triton.cudagraphs"))
        with graph_runs():  # also while its form that measures is made: no product of these is the model's
            return self._run(run, inputs, names, read)

    def _run(
        self,
        run: Callable[..., Any],
        inputs: Sequence[Any],
        names: Mapping[str, str],
        read: tuple[Blocks, Bound, GatheredWeights, CachedWeights | None, Probed],
    ) -> Any:
        """Runs a graph, or its form that measures, with what it takes besides its inputs."""
        blocks, bound, held, cached, probed = read
        states = blocks.of_call(inputs, names)
        held.use(inputs, states)
        parts = () if cached is None else cached.parts(inputs)
        ask_around()
        totals: list[Totals] = []
        if self.controls.session is not None and (measured := probed.of_call(self.controls.session, names)):
            run, totals = measured[0], [measured[1]]
        if not states and not totals and not bound.tensors:  # as in serving, where the host binds short steps
            return run(*inputs, *parts)
        with states_of_first_run([*states, *totals]):
            # tensors with a version of their own, so that other calls may come between this one and its backward
            taken = [tensor.data for tensor in bound.tensors_of(states)]
            return run(*inputs, *taken, *parts, *(tensor.data for one in totals for tensor in one.tensors().values()))

    def names(self) -> Mapping[str, str]:
        """The full names of the model's modules, by their ids."""
        return self._names()

    @property
    def captured(self) -> int:
        return len(self.records.graphs)

    def rewrite(self, gm: fx.GraphModule, example_inputs: Sequence[Any], place: Place | None = None) -> Slots:
        """Writes quantized matmuls into `gm`, and keeps what was decided. Returns the slots of operands with state.

        The graph is of the module at `place`.
        """
        record = self._record
        captured = Captured(
            gm=gm,
            recipe=self.recipe,
            autocast=_ambient_autocast(example_inputs),
            names=self._names_here(place),
            first_site=record.first_site,
            all_ranks=self.options.amax_group in (None, "world") and not in_pipeline_stage(),
        )
        captured = run(CAPTURED, captured, self.settings)
        ask_inside(gm)
        self._sites = 1 + max((d.site for d in captured.decisions), default=self._sites - 1)
        record.decisions, record.roles = captured.decisions, captured.roles
        record.undecided = undecided(captured)
        record.shared = Shared(
            self.recipe, self._all_names if place is not None and place.path else self._names, captured.roles
        )
        report = Report(recipe=str(self.recipe), decisions=[*captured.decisions], breaks=[*record.breaks])
        log.info("%s", report.totals())
        trace_artifact("fxquant_decisions", lambda: report.text(full=True))
        trace_artifact("fxquant_report", lambda: report.to_json(), "json")
        return captured.slots

    def _names_here(self, place: Place | None) -> Mapping[str, str]:
        """The names of the modules that the graph which is compiled now may run."""
        return named_here({**(place.names() if place is not None else {}), **self._names()})

    def _all_names(self) -> dict[str, str]:
        """The names of all modules in those that this backend compiles, by their ids."""
        return {**(self.controls.names() if self.switches else {}), **self._names()}

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compiles a rewritten graph, forward and backward."""
        if self.options.inner == "aot_eager":
            partition = Partition(self.settings, reasons=self._record.considered)
            record = self._record
            names = self._names()

            def inner(module: fx.GraphModule, _inputs: Sequence[Any]) -> fx.GraphModule:
                record.look(module.graph, names)
                return record.see(module)

            return compile_eager(gm, example_inputs, inner, partition)
        settings = self.inductor
        if quantizes(gm) or self.settings.ranges:  # else the compilation is Inductor's own, to the bit
            recomputed = self.settings.save == "least" or recomputes_activations(gm) or quantizes(gm, recomputed=True)
            settings = {**memory_settings(example_inputs, self.settings.save), **settings}
            record = self._record
            settings = inductor_settings(
                self.settings, settings, recomputed=recomputed, reasons=record.considered, seen=record.see,
                fused=partial(record.look, names=self._names()),
                done=None if record.keeper is None else record.keeper.keep,
            )  # fmt: skip
        return compile_with_inductor(gm, example_inputs, settings)  # type: ignore[no-any-return]

    def _compile_quantization(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compiles the quantization of one weight, whose results outlive every CUDA graph."""
        if self.options.inner == "aot_eager":
            return gm.forward
        settings = {**self.inductor, "triton.cudagraphs": False}
        settings = inductor_settings(self.settings, settings, recomputed=False)
        return compile_with_inductor(gm, inputs, settings)  # type: ignore[no-any-return]

    @checked(ArgumentError, called="set_recipe", takes={"recipe": "a name or a Recipe"})
    def set_recipe(self, recipe: Recipe | str) -> None:
        """Runs all that this backend compiles under another recipe from the next call on.

        Raises RecipeError for an unknown one.
        """
        self.controls.set_recipe(recipe)

    def clear_cache(self) -> None:
        """Forgets the weights that `cache_weights` keeps, after writes that no version shows."""
        for backend in self.controls.backends.values():
            if backend.weights is not None:
                backend.weights.clear()

    def state_dict(self) -> dict[str, Tensor]:
        """The state of delayed scaling and stochastic rounding as plain tensors; empty for recipes without state.

        A key is ``<layer>.<operand>.<value>``, such as ``layers.0.up.input.scale``, in the module that was compiled.
        """
        return gathered(self.controls.parts())

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restores the tensors of `state_dict`, for graphs compiled already and those to come.

        Raises RecipeError for what is not the state of this model under this recipe, and changes nothing then.
        """
        restore(state, self.controls.parts())

    def report(self) -> Report:
        """The decisions in all graphs that have run so far, under the recipe that ran last."""
        records = self.controls.latest().records if self.switches else self.records
        return records.report(of=self.controls.model())


def compile_eager(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    inner: Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]],
    partition: Partition | None = None,
) -> Callable[..., Any]:
    """Differentiates by AOTAutograd with Inductor's partitioner, and compiles the stage `MEANING` by `inner`."""
    partition = partition or Partition(Settings())

    @own_errors()
    def compiler(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        run(MEANING, graph_module.graph, partition.settings)
        partition.reasons += traced(considered(graph_module.graph, half(graph_module.graph)))
        graph_module.recompile()
        return make_boxed_func(inner(graph_module, inputs))

    compilers = dict.fromkeys(("fw_compiler", "bw_compiler", "inference_compiler"), compiler)
    return aot_autograd(**compilers, partition_fn=partition)(gm, list(example_inputs))


def _same(saved: Tensor) -> Tensor:
    return saved


def _ambient_autocast(example_inputs: Sequence[Any]) -> dict[str, torch.dtype]:
    """The dtypes of autocast regions around the compiled call by device type; no node of the graph shows them."""
    devices = {x.device.type for x in example_inputs if isinstance(x, Tensor)}
    able = filter(torch.amp.is_autocast_available, devices)  # not the meta device
    return {device: torch.get_autocast_dtype(device) for device in able if torch.is_autocast_enabled(device)}


def _names_of(model: nn.Module | None) -> Callable[[], Mapping[str, str]]:
    if model is None:
        return dict
    reference = weakref.ref(model)

    def names() -> Mapping[str, str]:
        alive = reference()
        return {} if alive is None else {str(id(m)): clean_path(name) for name, m in alive.named_modules() if name}

    return names
