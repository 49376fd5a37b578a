"""Runs of one model under one recipe after another, each from the same state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from fxquant.backend.backend import Backend
from fxquant.backend.options import Options
from fxquant.backend.probing import Session
from fxquant.checks import article
from fxquant.compat.device import kept_random_state
from fxquant.compat.inside.frames import unwrapped
from fxquant.compat.private import isolated, tree_leaves, unlimited_recompiles
from fxquant.decisions import Decision
from fxquant.errors import OptionError
from fxquant.probes import Request
from fxquant.quantizers import DelayedScalingRequest
from fxquant.recipes import Recipe
from fxquant.recipes.operands import Operand, units
from fxquant.tools.calls import called_with
from fxquant.tools.probe import measuring

R = TypeVar("R")


class Batch(NamedTuple):
    """A batch of arguments and keywords of a model."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]


class QuietBackend(Backend):
    """A backend of one recipe that warns of nothing."""

    tells = False
    switches = False

    def __deepcopy__(self, memo: dict[int, Any]) -> QuietBackend:
        """The backend itself: what a run does with copies of its model stands in the report of the run."""
        return self


B = TypeVar("B", bound=QuietBackend)


class RegionBackend(QuietBackend):
    """Compiles every call of a region (`torch.compiler.nested_compile_region`) by itself, under its own names."""

    def _begin(self, options: Options) -> None:
        super()._begin(options)
        self.settings = replace(self.settings, own_regions=True)


class Trials:
    """Runs a model under recipes, and gives it its parameters, buffers, gradients and mode back behind each run.

    Random numbers begin at `seed` in every run, and go on behind all as if none had been.
    """

    def __init__(self, model: Any, options: Mapping[str, Any] | None = None, seed: int = 0) -> None:
        self.model, self.seed = model, seed
        self.options = {"inner": "aot_eager", **(options or {})}
        self.runs = 0
        self.decisions: list[Decision] = []

    def run(self, recipe: Recipe, use: Callable[[Any], R]) -> R:
        """Calls `use` with the model compiled under a recipe; keeps the decisions of what ran."""
        return self._run(QuietBackend, recipe, lambda compiled, _: use(compiled))

    def measured(
        self, recipe: Recipe, request: Request, every: int, use: Callable[[Any, Session], R]
    ) -> tuple[R, list[dict[str, Any]]]:
        """Calls `use` with the model compiled under a recipe, and the probe that is open; returns its rows too."""

        def measured(compiled: Any, backend: QuietBackend) -> tuple[R, list[dict[str, Any]]]:
            with measuring([backend.controls], request, every) as session:
                result = use(compiled, session)
            return result, session.rows

        return self._run(RegionBackend, recipe, measured)

    def _run(self, kind: type[QuietBackend], recipe: Recipe, use: Callable[[Any, QuietBackend], R]) -> R:
        compiled, backend = self.compiled_by(kind, recipe)
        try:
            with self.scope():
                return use(compiled, backend)
        finally:
            self.decisions = backend.report().decisions

    def compile(self, recipe: Recipe) -> tuple[Any, QuietBackend]:
        """The model under a recipe, to be called in a `scope`, and its backend."""
        return self.compiled_by(QuietBackend, recipe)

    def compiled_by(self, kind: type[B], recipe: Recipe) -> tuple[Any, B]:
        """The model under a recipe, compiled by a kind of backend, to be called in a `scope`, and the backend."""
        module = self.model if isinstance(self.model, nn.Module) else None
        backend = kind(recipe, **self.options, model=None if module is None else unwrapped(module))
        return torch.compile(self.model, backend=backend, **isolated()), backend

    @contextmanager
    def scope(self) -> Iterator[None]:
        """A scope of one run, behind which the model and the random state are as they were."""
        self.runs += 1
        with ExitStack() as stack:
            stack.enter_context(unlimited_recompiles())
            stack.enter_context(kept_random_state())
            if isinstance(self.model, nn.Module):
                stack.enter_context(kept_state(self.model))
            torch.manual_seed(self.seed)
            yield


@contextmanager
def kept_state(model: nn.Module) -> Iterator[None]:
    """A scope without gradients, behind which a model has the values, gradients and modes that it had before."""
    tensors = [*model.parameters(), *model.buffers()]
    values = [tensor.detach().clone() for tensor in tensors]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, training in modes:
            module.training = training


def is_batch(data: Any) -> bool:
    """Returns True for one batch: a tensor, a tuple of arguments or a dict of keywords."""
    return isinstance(data, Tensor | tuple | Mapping)


def batches_of(data: Any) -> list[Any]:
    """The batches in `data`: a list of them, or any iterable but a tensor, a tuple and a dict, which are one batch.

    A batch that is a list, as a DataLoader has it, becomes a tuple.

    Raises OptionError for data without a batch, and for what is none.
    """
    if is_batch(data):
        return [data]
    try:
        batches = list(data)
    except TypeError:
        kinds = "a batch (a tensor, a tuple or a dict) or a list of batches"
        raise OptionError(f"data is {kinds}, not {article(type(data).__name__)}") from None
    if not batches:
        raise OptionError("data has no batch")
    return [tuple(batch) if isinstance(batch, list) else batch for batch in batches]


def call(model: Callable[..., Any], batch: Any) -> Any:
    """Calls a model with a batch: a tensor, a tuple of arguments, or a dict of keywords."""
    args, kwargs = _arguments(batch)
    with called_with(model, args, kwargs):
        return model(*args, **kwargs)


def _arguments(batch: Any) -> Batch:
    if isinstance(batch, Batch):
        return batch
    if isinstance(batch, Mapping):
        return Batch((), batch)
    return Batch(batch if isinstance(batch, tuple) else (batch,), {})


def loss_in(output: Any) -> Tensor | None:
    """The loss that a model returns: its scalar, what it calls `loss`, or the first scalar of its results."""
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    results = [named, output, *tree_leaves(output)]
    return next((x for x in results if isinstance(x, Tensor) and x.numel() == 1 and x.is_floating_point()), None)


def operands_of(decisions: Sequence[Decision], recipe: Recipe) -> list[tuple[Operand, ...]]:
    """The operands that were quantized under a recipe, those together that are quantized together."""
    quantized = [decision for decision in decisions if decision.quantizer is not None]
    operands = dict.fromkeys(Operand(d.layer, d.role.tensor_type, str(d.direction)) for d in quantized)
    roles = dict.fromkeys(decision.role for decision in quantized if decision.role.module_type != "dpa")
    delayed = [r for r in roles if isinstance(recipe.quantizer(r), DelayedScalingRequest)]
    return units(operands, [(role.name, role.tensor_type) for role in delayed])
