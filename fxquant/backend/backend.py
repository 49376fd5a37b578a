"""The backend of torch.compile: analyses and rewrites the captured graph, then hands it to AOTAutograd and Inductor."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxquant.backend.inductor import inductor_settings, memory_settings
from fxquant.backend.options import Options
from fxquant.backend.weight_cache import WeightCache
from fxquant.compat.patches import compile_with_inductor
from fxquant.compat.private import aot_autograd, make_boxed_func
from fxquant.compat.values import static_fakes
from fxquant.decisions import Decision
from fxquant.passes.captured import Bound, Captured, quantizes
from fxquant.passes.insert.cache_weights import Taken
from fxquant.passes.pipeline import BOUND, CAPTURED, MEANING, Partition, run
from fxquant.passes.plan.layers import clean_path
from fxquant.passes.settings import Settings
from fxquant.recipes import Recipe, resolve
from fxquant.report.report import Report
from fxquant.state import Slots, State, StateStore

log = logging.getLogger(__name__)


class Backend:
    """A torch.compile backend for one recipe.

        backend = fxquant.Backend("mxfp8")
        compiled = torch.compile(model, backend=backend)
        compiled(x)
        print(backend.report())

    `inner` compiles the rewritten graphs: ``inductor``, or ``aot_eager`` to run their operators one by one, for
    debugging. `allow_float64` quantizes float64 operands too (as float32). `mode` and `inductor` (a dict of settings)
    go to Inductor. `save` says what a forward keeps for its backward: ``quantized`` activations, or the ``least``, of
    which the backward quantizes them again, and multiplies again where attention's output goes into a sum. With
    `cache_weights` a weight is quantized only when it has changed, and its payloads take memory in between;
    `clear_cache` says that it has where that cannot be seen. `gemm` says which kernel multiplies where a GPU has two
    for it: ``cublas``, ``triton``, whose epilogues do what follows a GEMM, the faster by what was measured before
    (``auto``), or by measuring while compiling (``autotune``). `model` gives layers their full names where the graph
    breaks. `amax_group` is the process group over which delayed scaling takes the largest amax. Backends with the same
    `states` share them. `captured` counts the graphs so far.

    Raises RecipeError for an unknown recipe and OptionError for an unknown setting.
    """

    def __init__(
        self,
        recipe: Recipe | str,
        *,
        mode: str | None = None,
        model: nn.Module | None = None,
        states: StateStore | None = None,
        **options: Any,
    ) -> None:
        self.options = Options(recipe=recipe, **options)
        self.recipe = resolve(recipe)
        self.inductor = self.options.for_inductor(mode)
        self.settings = self.options.for_passes()
        self.states = states or StateStore()
        self.weights = self._weight_cache()
        self.captured = 0
        self._states: list[State] = []
        self._names: Callable[[], Mapping[str, str]] = _names_of(model)
        self._decisions: list[Decision] = []
        self._roles: list[Any] = []

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        """Compiles one captured graph; torch.compile calls this."""
        self.captured += 1
        with torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is):  # a checkpoint around counts what is saved
            slots = self.rewrite(gm, example_inputs)
        devices = [x.device for x in example_inputs if isinstance(x, Tensor)]
        device = next((d for d in devices if d.type != "cpu"), torch.device("cpu"))
        states = self.states.get(slots, device)
        self._states += states
        group = self.options.amax_group
        bound = Bound(gm=gm, slots=slots, states=states, group=None if group is None else group.group_name)
        bound = run(BOUND, bound, self.settings)
        # compiled for copies: that the backward's step is the forward's is not AOTAutograd's to see
        copies = [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t) for t in bound.tensors
        ]
        compiled = self.compile(bound.gm, [*example_inputs, *static_fakes(copies, example_inputs), *bound.parts])
        if not bound.tensors and not bound.taken:
            return compiled
        return lambda *inputs: self._call(compiled, inputs, bound.tensors, bound.taken)

    def __getstate__(self) -> dict[str, Any]:
        """The settings and the states, with which a copy starts; nothing of what is compiled."""
        return {**vars(self), "captured": 0, "_decisions": [], "_roles": [], "_names": dict, "weights": None}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self.weights = self._weight_cache()

    def _weight_cache(self) -> WeightCache | None:
        return WeightCache(self._compile_quantization) if self.settings.stored_weights else None

    def _call(
        self, run: Callable[..., Any], inputs: Sequence[Any], tensors: Sequence[Tensor], taken: Sequence[Taken]
    ) -> Any:
        parts = self.weights.parts(taken, inputs) if self.weights is not None else []
        # tensors with a version of their own, so that other calls may come between this one and its backward
        return run(*inputs, *(tensor.data for tensor in tensors), *parts)

    def rewrite(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Slots:
        """Analyses `gm` and puts quantized matmuls in, in place. Adds to the report; returns what needs state."""
        captured = Captured(
            gm=gm,
            recipe=self.recipe,
            autocast=_ambient_autocast(example_inputs),
            names=self._names(),
            first_site=1 + max((d.site for d in self._decisions), default=-1),
        )
        captured = run(CAPTURED, captured, self.settings)
        self._decisions += captured.decisions
        self._roles += captured.roles
        log.info("%s", Report(recipe=str(self.recipe), decisions=[*captured.decisions]).totals())
        return captured.slots

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compiles a rewritten graph, forward and backward."""
        if self.options.inner == "aot_eager":
            return compile_eager(gm, example_inputs, lambda module, _inputs: module, Partition(self.settings))
        if not quantizes(gm):  # then the compilation is Inductor's own, to the bit
            return compile_with_inductor(gm, example_inputs, self.inductor)  # type: ignore[no-any-return]
        recomputed = self.settings.save == "least" or quantizes(gm, recomputed=True)
        given = {**memory_settings(example_inputs), **self.inductor}
        patches = inductor_settings(self.settings, given, recomputed=recomputed)
        return compile_with_inductor(gm, example_inputs, patches)  # type: ignore[no-any-return]

    def _compile_quantization(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compiles the quantization of one weight."""
        if self.options.inner == "aot_eager":
            return gm
        patches = inductor_settings(self.settings, self.inductor, recomputed=False)
        return compile_with_inductor(gm, inputs, patches)  # type: ignore[no-any-return]

    def clear_cache(self) -> None:
        """Has every weight quantized again, where `cache_weights` keeps them: after writes that no version shows."""
        if self.weights is not None:
            self.weights.clear()

    def activate(self) -> None:
        """Makes the states of this backend's graphs the ones that count, where backends share them."""
        for state in self._states:
            self.states.activate(state)

    def state_dict(self) -> dict[str, Tensor]:
        """The state of delayed scaling and stochastic rounding as plain tensors; empty for recipes without state."""
        return self.states.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restores what `state_dict` gave, for graphs compiled already and those to come."""
        self.states.load_state_dict(state)

    def report(self) -> Report:
        """What was decided in all graphs that this backend has compiled so far."""
        return Report(recipe=str(self.recipe), decisions=list(self._decisions), unused=self.recipe.unused(self._roles))


def compile_eager(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    inner: Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]],
    partition: Partition | None = None,
) -> Callable[..., Any]:
    """AOTAutograd with the partitioner that Inductor uses, and `inner` to compile the stage `MEANING`."""
    partition = partition or Partition(Settings())

    def compiler(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        run(MEANING, graph_module.graph, partition.settings)
        graph_module.recompile()
        return make_boxed_func(inner(graph_module, inputs))

    compiled = aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        inference_compiler=compiler,
        partition_fn=partition,
    )
    return compiled(gm, list(example_inputs))


def _as_it_is(saved: Tensor) -> Tensor:
    return saved


def _ambient_autocast(example_inputs: Sequence[Any]) -> dict[str, torch.dtype]:
    """The dtypes of autocast regions around the compiled call, by device type, which no node of the graph shows."""
    devices = {x.device.type for x in example_inputs if isinstance(x, Tensor)}
    able = filter(torch.amp.is_autocast_available, devices)  # of meta tensors there is nothing to run
    return {device: torch.get_autocast_dtype(device) for device in able if torch.is_autocast_enabled(device)}


def _names_of(model: nn.Module | None) -> Callable[[], Mapping[str, str]]:
    if model is None:
        return dict
    reference = weakref.ref(model)

    def names() -> Mapping[str, str]:
        alive = reference()
        return {} if alive is None else {str(id(m)): clean_path(name) for name, m in alive.named_modules() if name}

    return names


class _OptionStates(StateStore):
    """States that keep the options they belong to, whose identity would otherwise pass to another object.

    And the quantized weights of all graphs that were compiled with these options.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.options = options
        self.weights: WeightCache | None = None


def fxquant_backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """``torch.compile(model, backend="fxquant", options={"recipe": "mxfp8"})``.

    `options` are those of `Options`, of which `recipe` (a name or a Recipe) is required. Raises OptionError for another
    and RecipeError for an unknown recipe, each with the list of those that are known.
    """
    options = {} if options is None else options
    Options.of(options)
    states = _states_of(options)
    backend = Backend(**options, mode=mode, states=states)
    states.weights = backend.weights = states.weights or backend.weights
    return backend(gm, example_inputs)


_stores: weakref.WeakValueDictionary[int, _OptionStates] = weakref.WeakValueDictionary()


def _states_of(options: Mapping[str, Any]) -> _OptionStates:
    """The states of all graphs of one call of torch.compile, which hands the same options to each of them."""
    return _stores.setdefault(id(options), _OptionStates(options))


__all__ = ["Backend", "compile_eager", "fxquant_backend"]
