"""Questions to a model however it was compiled: its report, its recipe, its state and its cached weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from fxquant.backend.backend import Backend
from fxquant.backend.by_name import ByName
from fxquant.backend.by_rank import marked
from fxquant.backend.checkpoint import Part, gathered, restore
from fxquant.backend.controls import Controls, controls_that_compiled
from fxquant.checks import article, checked
from fxquant.compat.inside.frames import backends_behind, is_compiled_form, unwrapped
from fxquant.errors import ArgumentError, OptionError
from fxquant.passes.plan.layers import clean_path
from fxquant.report.report import Report

_LAYERS = (
    nn.Linear, nn.Bilinear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip
"""The modules of torch that hold one matmul."""


def report(model: Any) -> Report:
    """The fate of every operand of a compiled model, under the recipe that ran last.

    The model may be compiled by `fxquant.compile`, by name, with a `Backend`, in place or in blocks, and wrapped
    since: also the module that was compiled may be given. Raises OptionError for one that fxquant has not compiled.
    """
    controls = controls_of(model)
    used = [one for one in controls if one.compiled_any()] or controls[:1]
    module = unwrapped(model) if isinstance(model, nn.Module) else None
    latest = [one.latest(module).records for one in used]
    first, *others = [records.report(module, model) for records in latest]
    for other in others:
        sites = 1 + max((decision.site for decision in first.decisions), default=-1)
        first.decisions += [replace(decision, site=decision.site + sites) for decision in other.decisions]
        first.unused = [part for part in first.unused if part in other.unused]
        first.uncompiled = [why for why in first.uncompiled if why in other.uncompiled]
        first.not_fused = [*dict.fromkeys([*first.not_fused, *other.not_fused])]
        first.sent_quantized = [*dict.fromkeys([*first.sent_quantized, *other.sent_quantized])]
    blocks = any(records.outside for records in latest)  # what stands outside of compiled blocks
    homes = [home for one in used for home in one.homes()]
    missing = [] if blocks else _in_no_graph(_named_in(model, module, homes), first)
    if missing:
        first.uncompiled.append(f"{', '.join(missing)}, called in no captured graph")
    return first


def _named_in(model: Any, module: nn.Module | None, homes: Sequence[nn.Module]) -> Any:
    """Returns the model whose names a report has: the one given, its one part that is compiled, None for several."""
    if len(homes) == 1 and (module is None or any(part is homes[0] for part in module.modules())):
        return homes[0]
    return model if not homes or any(home is module for home in homes) else None


def _in_no_graph(model: Any, report: Report) -> list[str]:
    """The layers that multiply and stand in no graph, such as one that the code around a break calls by itself."""
    reported = {decision.layer for decision in report.decisions}
    named = model.named_modules() if isinstance(model, nn.Module) else ()
    modules = {clean_path(name): module for name, module in named}
    if not reported or not reported <= modules.keys():  # a backend that does not know the model has other names
        return []
    return [
        name
        for name, module in modules.items()
        if isinstance(module, _LAYERS) and not any(f"{name}.".startswith(f"{layer}.") for layer in reported)
    ]


_MODEL = {"model": "a compiled model"}


@checked(ArgumentError, called="fxquant.set_recipe", takes=_MODEL)
def set_recipe(model: Any, recipe: Any) -> None:
    """Runs a compiled model under another recipe from its next call on.

    Raises RecipeError for an unknown recipe, and OptionError for a model that fxquant has not compiled, or a function
    that was compiled by name: calls of torch.compile with equal options share its graphs.
    """
    module = model if isinstance(model, nn.Module) else None
    for controls in controls_of(model):
        if module is None and controls.by_name:
            raise OptionError(
                "a function that torch.compile(function, backend='fxquant', options=..) has compiled keeps its recipe: "
                "use fxquant.compile(function, recipe), or fxquant.autocast(recipe=recipe) around the call"
            )
        alone = module is not None and not controls.by_name and controls.compiles_nothing_but(module)
        controls.set_recipe(recipe, None if alone else module)


@checked(ArgumentError, called="fxquant.clear_cache", takes=_MODEL)
def clear_cache(model: Any) -> None:
    """Forgets the quantized weights that the option `cache_weights` keeps of a compiled model."""
    for controls in controls_of(model):
        controls.latest().clear_cache()


@checked(ArgumentError, called="fxquant.state_dict", takes=_MODEL)
def state_dict(model: Any) -> dict[str, Tensor]:
    """The state of delayed scaling and stochastic rounding of a compiled model, as plain tensors.

    A key is ``<layer>.<operand>.<value>``, such as ``layers.0.up.input.scale``, with the names that layers have in the
    given model, whichever of its parts were compiled. Raises OptionError for a model that fxquant has not compiled.
    """
    return gathered(_parts(model))


@checked(ArgumentError, called="fxquant.load_state_dict", takes={**_MODEL, "state": "what state_dict gave"})
def load_state_dict(model: Any, state: Any) -> None:
    """Restores what `state_dict` gave, also before the model has run.

    Raises RecipeError for what is not the state of this model under its recipe, and changes nothing then.
    """
    restore(state, _parts(model))


@checked(ArgumentError, called="fxquant.QuantizationState", takes=_MODEL)
class QuantizationState:
    """The quantization state of a compiled model for tools that save and load objects.

        dcp.save({"model": model.state_dict(), "quantization": fxquant.QuantizationState(model)}, checkpoint_id=path)

    It is `torch.distributed.checkpoint`'s `Stateful`, and fits `accelerator.register_for_checkpointing`.
    """

    def __init__(self, model: Any) -> None:
        if not callable(model):
            raise OptionError(f"fxquant.QuantizationState takes a compiled model, not {article(type(model).__name__)}")
        self._model = model

    def state_dict(self) -> dict[str, Tensor]:
        """The state by layer, operand and value, as `fxquant.state_dict` gives it.

        Delayed scaling with ``reduce_amax=False``, or over some of the ranks, has the rank in its keys besides.
        """
        parts = _parts(self._model)
        return marked(gathered(parts), {key for part in parts for key in part.of_rank()})

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restores a state, as `fxquant.load_state_dict` does."""
        load_state_dict(self._model, state)


quantization_state_dict = state_dict
load_quantization_state_dict = load_state_dict
"""The same, under the names that the methods of a compiled model have."""


def _parts(model: Any) -> list[Part]:
    module = unwrapped(model) if isinstance(model, nn.Module) else None
    parts = [part for controls in controls_of(model) for part in controls.parts(module)]
    return [*{id(part.states): part for part in parts}.values()]


def controls_of(model: Any) -> list[Controls]:
    """The controls of all backends that have compiled a model, or are to compile it, in the order of creation."""
    controls = {id(one): one for one in _behind(model)}
    alone = bool(controls) and is_compiled_form(model)
    if isinstance(model, nn.Module) and not alone:
        controls |= {id(one): one for one in controls_that_compiled(model)}
    elif alone:
        controls |= {id(one): one for silent in [*controls.values()] for one in _instead_of(silent, model)}
    if not controls:
        name = type(model).__name__ if isinstance(model, nn.Module) else repr(model)
        raise OptionError(
            f"fxquant has compiled no part of {name}: compile it by fxquant.compile(model, recipe), or by "
            "torch.compile(model, backend='fxquant', options={'recipe': recipe}); a function is asked for by what "
            "compiling it gave, and what was compiled in place is not after unpickling"
        )
    return sorted(controls.values(), key=lambda one: one.number)


def _instead_of(silent: Controls, model: nn.Module) -> Iterator[Controls]:
    """The controls whose graphs ran instead: torch shares those of two names with equal options between models."""
    if silent.by_name and not silent.compiled_any():
        options = silent.first().options
        for one in controls_that_compiled(model):
            if one.by_name and one.first().options == options:
                silent.latest().records.elsewhere = True
                yield one


def _behind(model: Any) -> Iterator[Controls]:
    method = getattr(model, "__dict__", {}).get("set_recipe")  # of what fxquant.compile gave for a function
    owner = model if isinstance(model, Backend) else getattr(method, "__self__", None)
    if isinstance(owner, Backend):
        yield owner.controls
    for module, holder, function, keywords in backends_behind(model):
        if isinstance(function, Backend):
            backend = function
        elif isinstance(function, ByName):
            backend = function.backend(**keywords)
            vars(holder)["fxquant"] = backend  # keeps it alive until the first graph does
        else:
            continue
        if module is not None:
            backend.controls.add_root(module)
            backend.states.of(backend.controls.place_of(module).home)
        yield backend.controls
