"""The backend of torch.compile: analyses and rewrites the captured graph, then hands it to AOTAutograd and Inductor."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxquant.backend.weight_cache import WeightCache
from fxquant.compat.patches import STATIC_LAUNCH, compile_with_inductor
from fxquant.compat.private import (
    aot_autograd,
    inductor_config,
    inductor_mode_options,
    is_inductor_option,
    make_boxed_func,
)
from fxquant.compat.values import static_fakes
from fxquant.decisions import Decision
from fxquant.errors import OptionError
from fxquant.kernels.linear.choice import GEMM
from fxquant.passes.insert.bind_state import bind_state
from fxquant.passes.insert.cache_weights import Taken, cache_weights
from fxquant.passes.pipeline import SAVE, Lowering, Partition, Rewriter, quantizes
from fxquant.passes.plan.layers import clean_path
from fxquant.recipes import RECIPES, Recipe, resolve
from fxquant.report.report import Report
from fxquant.state import Slots, State, StateStore

log = logging.getLogger(__name__)

INNER = ("inductor", "aot_eager")
OPTIONS = ("recipe", "inner", "allow_float64", "inductor", "amax_group", "save", "cache_weights", "gemm")


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
        inner: str = "inductor",
        allow_float64: bool = False,
        mode: str | None = None,
        inductor: Mapping[str, Any] | None = None,
        save: str = "quantized",
        cache_weights: bool = False,
        gemm: str = "auto",
        model: nn.Module | None = None,
        amax_group: Any = None,
        states: StateStore | None = None,
    ) -> None:
        self.recipe = resolve(recipe)
        if inner not in INNER:
            raise OptionError(f"unknown inner compiler {inner!r}; known: {', '.join(INNER)}")
        if save not in SAVE:
            raise OptionError(f"unknown choice {save!r} of what to save; known: {', '.join(SAVE)}")
        if gemm not in GEMM:
            raise OptionError(f"unknown choice {gemm!r} of GEMMs; known: {', '.join(GEMM)}")
        if not isinstance(inductor, Mapping | None):
            raise OptionError(f"Inductor's settings are a dict, not {inductor!r}")
        for name, switch in (("allow_float64", allow_float64), ("cache_weights", cache_weights)):
            if not isinstance(switch, bool):
                raise OptionError(f"{name} is True or False, not {switch!r}")
        if amax_group is not None and not hasattr(amax_group, "group_name"):
            raise OptionError(f"amax_group is a process group, not {amax_group!r}")
        self.inner = inner
        self.save = save
        self.gemm = gemm
        self.allow_float64 = allow_float64
        self.inductor = {**inductor_mode_options(mode), **(inductor or {})}
        for option in self.inductor:
            if not is_inductor_option(option):
                raise OptionError(f"Inductor has no setting {option!r}")
        self.amax_group = None if amax_group is None else amax_group.group_name
        self.states = states or StateStore()
        self.weights = WeightCache(self._compile_quantization) if cache_weights else None
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
        tensors: list[Tensor] = []
        if states:
            self._states += states
            gm, tensors = bind_state(gm, slots, states, training=torch.is_grad_enabled(), group=self.amax_group)
            # compiled for copies: that the backward's step is the forward's is not AOTAutograd's to see
            copies = [
                torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t) for t in tensors
            ]
            example_inputs = [*example_inputs, *static_fakes(copies, example_inputs)]
        taken: list[Taken] = []
        if self.weights is not None:
            gm, taken, parts = cache_weights(gm)
            example_inputs = [*example_inputs, *parts]
        run = self.compile(gm, example_inputs)
        if not tensors and not taken:
            return run
        return lambda *inputs: self._call(run, inputs, tensors, taken)

    def __getstate__(self) -> dict[str, Any]:
        """What a copy starts with: the settings and the states, and nothing of what is compiled."""
        made = {"captured": 0, "_decisions": [], "_roles": [], "_names": dict}
        return {**vars(self), **made, "weights": self.weights is not None}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self.weights = WeightCache(self._compile_quantization) if state["weights"] else None

    def _call(
        self, run: Callable[..., Any], inputs: Sequence[Any], tensors: Sequence[Tensor], taken: Sequence[Taken]
    ) -> Any:
        parts = self.weights.parts(taken, inputs) if self.weights is not None else []
        # tensors with a version of their own, so that other calls may come between this one and its backward
        return run(*inputs, *(tensor.data for tensor in tensors), *parts)

    def rewrite(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Slots:
        """Analyses `gm` and puts quantized matmuls in, in place. Adds to the report; returns what needs state."""
        rewriter = Rewriter(
            self.recipe, allow_float64=self.allow_float64, names=self._names(), stored_weights=self.weights is not None
        )
        first = 1 + max((d.site for d in self._decisions), default=-1)
        decisions, roles, slots = rewriter(gm, autocast=_ambient_autocast(example_inputs), first_site=first)
        self._decisions += decisions
        self._roles += roles
        log.info("%s", Report(recipe=str(self.recipe), decisions=decisions).totals())
        return slots

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compiles a rewritten graph, forward and backward."""
        if self.inner == "aot_eager":
            return compile_eager(gm, example_inputs, lambda graph_module, _inputs: graph_module, Partition(self.save))
        if not quantizes(gm):  # then the compilation is Inductor's own, to the bit
            return compile_with_inductor(gm, example_inputs, self.inductor)  # type: ignore[no-any-return]
        recomputed = self.save == "least" or quantizes(gm, recomputed=True)
        given = {**memory_settings(example_inputs), **self.inductor}
        patches = inductor_settings(
            self.recipe.fingerprint(), given, recomputed=recomputed, save=self.save, gemm=self.gemm
        )
        return compile_with_inductor(gm, example_inputs, patches)  # type: ignore[no-any-return]

    def _compile_quantization(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compiles the quantization of one weight."""
        if self.inner == "aot_eager":
            return gm
        patches = inductor_settings(self.recipe.fingerprint(), self.inductor, recomputed=False)
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


def inductor_settings(
    fingerprint: str,
    given: Mapping[str, Any],
    *,
    recomputed: bool,
    save: str = "quantized",
    portable: bool = False,
    gemm: str = "auto",
) -> dict[str, Any]:
    """The settings under which Inductor compiles a quantized graph; those `given` by the user come first.

    `recomputed` says that the backward computes quantized activations again, `portable` that the result runs where
    fxquant is not.
    """
    return {
        "eager_numerics.division_rounding": True,  # scales are true quotients
        "cpp.enable_loop_tail_vec": False,  # with it, a dynamic tail of a one-byte store loses lanes (torch 2.13)
        # a launch takes the host less time, and a later process loads the kernel from Inductor's cache, unparsed
        STATIC_LAUNCH: True,
        # where an activation is recomputed it must come out with the bits that the forward quantized
        "emulate_precision_casts": recomputed or inductor_config.emulate_precision_casts,
        # side by side with what is recomputed, transposed tiles are written in part (C++ backend of torch 2.13)
        **({"cpp.max_horizontal_fusion_size": 1} if recomputed else {}),
        **given,
        "custom_partitioner_fn": Partition(
            save, given.get("custom_partitioner_fn", inductor_config.custom_partitioner_fn)
        ),
        "post_grad_custom_post_pass": Lowering(
            fingerprint,
            given.get("post_grad_custom_post_pass", inductor_config.post_grad_custom_post_pass),
            portable=portable,
            gemm=gemm,
        ),
    }


def memory_settings(example_inputs: Sequence[Any]) -> dict[str, Any]:
    """What keeps the peak of a training step low on a GPU.

    Inductor holds what it will use again for a tensor of the same size, unless that raises the peak as it estimates it,
    which it does far too high where kernels that have been fused keep tensors to themselves.
    """
    tensors = [x for x in example_inputs if isinstance(x, Tensor)]
    trains = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return {"allow_buffer_reuse": False} if trains and any(x.is_cuda for x in tensors) else {}


def compile_eager(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    inner: Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]],
    partition: Partition | None = None,
) -> Callable[..., Any]:
    """AOTAutograd with the partitioner that Inductor uses, merged graphs, and `inner` as their compiler."""

    def compiler(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        Lowering.merge(graph_module.graph)
        graph_module.recompile()
        return make_boxed_func(inner(graph_module, inputs))

    run = aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        inference_compiler=compiler,
        partition_fn=partition or Partition(),
    )
    return run(gm, list(example_inputs))


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

    Options: `recipe` (required: a name or a Recipe), `inner`, `allow_float64`, `inductor`, `amax_group`, `save`,
    `cache_weights`, `gemm`. Raises OptionError for another and RecipeError for an unknown recipe, each with the list of
    those that are known.
    """
    options = {} if options is None else options
    check_options(options)
    settings = {name: value for name, value in options.items() if name != "recipe"}
    states = _states_of(options)
    backend = Backend(options["recipe"], mode=mode, states=states, **settings)
    states.weights = backend.weights = states.weights or backend.weights
    return backend(gm, example_inputs)


_stores: weakref.WeakValueDictionary[int, _OptionStates] = weakref.WeakValueDictionary()


def _states_of(options: Mapping[str, Any]) -> _OptionStates:
    """The states of all graphs of one call of torch.compile, which hands the same options to each of them."""
    return _stores.setdefault(id(options), _OptionStates(options))


def check_options(options: Mapping[str, Any]) -> None:
    """Raises OptionError for an unknown option, or when no recipe is given."""
    if not isinstance(options, Mapping):
        raise OptionError(f"options are a dict of {', '.join(OPTIONS)}, not a {type(options).__name__}")
    unknown = [key for key in options if key not in OPTIONS]
    if unknown:
        raise OptionError(f"unknown options {unknown}; known options: {', '.join(OPTIONS)}")
    if "recipe" not in options:
        raise OptionError(
            f"the option 'recipe' is missing: options={{'recipe': name}} with one of {', '.join(RECIPES)}"
        )


__all__ = [
    "INNER",
    "OPTIONS",
    "Backend",
    "check_options",
    "compile_eager",
    "fxquant_backend",
    "inductor_settings",
    "memory_settings",
]
