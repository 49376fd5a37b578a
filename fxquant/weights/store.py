"""Models whose weights are stored quantized, and trained through masters."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from fxquant.checks import checked
from fxquant.errors import ArgumentError, FxQuantWarning, RecipeError, tell
from fxquant.formats import OperandSpec
from fxquant.quantizers import DelayedScalingRequest
from fxquant.recipes import Recipe, resolve
from fxquant.roles import SMALLEST, Direction, QuantizerRole
from fxquant.weights.layer import Layer
from fxquant.weights.parts import is_one, laid_out, quantized, side
from fxquant.weights.prepare import inside, put, quantizable, weight_spec
from fxquant.weights.weight import QuantizedWeight, fits, mismatch

_DELAYED = "its scale is the state of delayed scaling, another one in every step"
_ROUNDED_ANEW = "it is rounded anew in every step"
_TAKES = {"recipe": "the name or the Recipe that the model is compiled with"}


@checked(ArgumentError, called="fxquant.quantize_parameters", takes={"model": "a module", **_TAKES})
def quantize_parameters(
    model: nn.Module, recipe: Recipe | str, blocks: Iterable[nn.Module] | str | None = None, *,
    masters: bool | None = None,
) -> nn.Module:  # fmt: skip
    """Stores the weights of linear layers quantized, as the recipe multiplies them, and returns the model.

        fxquant.quantize_parameters(model, "mxfp8")
        optimizer = torch.optim.AdamW(model.parameters())
        compiled = fxquant.compile(model, "mxfp8")

    A weight that requires a gradient keeps its values as a master, which the optimizer trains; it is quantized again
    before the next forward. Others are payload and scales alone. `masters` says it for all: False drops the values, and
    freezes the weights. MXFP8 and other formats whose columnwise form is another are stored in both directions, in rows
    alone where the layer is in evaluation mode. `blocks` are the parts of the model that are compiled under the recipe,
    as modules or as a regular expression for their names; None is the whole model.

    Call it before an optimizer is made of the parameters. Raises RecipeError where no weight can be stored under the
    recipe, and ArgumentError for a model that is sharded already.
    """
    _store(model, resolve(recipe), None if blocks is None else inside(model, blocks), masters, False)
    return model


@contextlib.contextmanager
@checked(ArgumentError, called="fxquant.quantized_model_init", takes=_TAKES)
def quantized_model_init(
    recipe: Recipe | str, preserve_high_precision_init_val: bool = False, *, enabled: bool = True
) -> Iterator[None]:
    """Stores the weights of models that are made in this scope as `quantize_parameters` does, at its end.

        with fxquant.quantized_model_init("mxfp8"):
            model = Model()

    With `preserve_high_precision_init_val` the values that a weight began with stay on the CPU:
    `weight.get_high_precision_init_val()` returns them, `weight.clear_high_precision_init_val()` lets go of them.
    """
    recipe, thread = resolve(recipe), threading.get_ident()
    modules: dict[int, nn.Module] = {}
    inner: dict[int, nn.Module | None] = {}

    def with_parameter(module: nn.Module, *_: object) -> None:
        if threading.get_ident() == thread:
            modules[id(module)] = module

    def with_module(module: nn.Module, name: str, child: nn.Module | None) -> None:
        with_parameter(module)
        inner[id(child)] = child

    hooks = [
        register_module_parameter_registration_hook(with_parameter),
        register_module_module_registration_hook(with_module),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    roots = [module for key, module in modules.items() if key not in inner]
    for root in roots if enabled else ():
        if any(isinstance(module, nn.Linear) for module in root.modules()):
            _store(root, recipe, None, None, preserve_high_precision_init_val)


def _store(model: nn.Module, recipe: Recipe, within: set[int] | None, masters: bool | None, preserve: bool) -> None:
    stored, reasons, plain = 0, dict[str, str](), list[str]()
    for name, layer in list(quantizable(model)):
        if within is not None and id(layer) not in within:
            continue
        if isinstance(layer.weight, QuantizedWeight):
            spec = weight_spec(recipe, name)
            if spec is not None and not fits(layer.weight.spec, spec):
                raise RecipeError(mismatch(name, layer.weight.spec, spec))
            stored += 1
            continue
        if isinstance(layer.weight, DTensor):
            raise ArgumentError(f"{name}.weight is sharded already: quantize the parameters before that")
        spec, reason = _spec(recipe, name, layer.weight)
        if spec is None:
            reasons.setdefault(reason, name)
            plain += [name] if reason in (_DELAYED, _ROUNDED_ANEW) else []
            continue
        stored += 1
        if masters is False:
            layer.weight.requires_grad_(False)
        new = quantized_weight(
            layer.weight.detach(), spec, Layer(name), master=layer.weight.requires_grad if masters is None else masters,
            columns=layer.training,
        )  # fmt: skip
        if preserve:
            new.layer.initial = layer.weight.detach().to("cpu", copy=True)
        put(model, layer.weight, new)
    if not stored:
        shown = "; ".join(f"{name or '<model>'}: {reason}" for reason, name in reasons.items())
        raise RecipeError(
            f"no weight of {type(model).__name__} can be stored quantized under {recipe}: "
            f"{shown or 'it has no linear layers whose weights nothing else reads'}"
        )
    if plain:
        why = "; ".join(reason for reason in reasons if reason in (_DELAYED, _ROUNDED_ANEW))
        tell(
            f"{len(plain)} weights of {type(model).__name__} are not stored quantized, though {recipe} quantizes them, "
            f"{plain[0]}.weight first: {why}",
            FxQuantWarning,
        )  # fmt: skip


def _spec(recipe: Recipe, name: str, weight: torch.Tensor) -> tuple[OperandSpec | None, str]:
    """The format of a weight; None with the reason where it is not stored quantized."""
    if min(weight.shape) < SMALLEST:
        return None, f"fewer than {SMALLEST} features"
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return None, f"{str(weight.dtype).removeprefix('torch.')} values"
    spec = weight_spec(recipe, name)
    if spec is not None:
        return spec, ""
    answer = recipe.quantizer(QuantizerRole("linear", "weight", name))
    if isinstance(answer, DelayedScalingRequest):
        return None, _DELAYED
    return None, "it stays in high precision" if answer.is_identity else _ROUNDED_ANEW


def quantized_weight(
    values: torch.Tensor, spec: OperandSpec, layer: Layer, *, master: bool, columns: bool
) -> QuantizedWeight:
    """A weight that is stored quantized, and keeps its values as a `master`."""
    parts: dict[Direction, list[torch.Tensor]] = {d: [] for d in Direction}
    one, spec = is_one(spec, values.shape), laid_out(spec, values.device)
    for direction in Direction:
        wanted = direction is Direction.ROWWISE or (columns and not one)
        if wanted and not side(spec, direction).is_identity:
            parts[direction] = quantized(values, spec, direction)
    row, column = parts.values()
    return QuantizedWeight(
        str(spec), master=values if master else None, rowwise=row, columnwise=column, size=values.shape,
        dtype=values.dtype, layer=layer,
    )  # fmt: skip
