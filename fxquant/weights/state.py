"""Quantized weights in checkpoints: as plain tensors in high precision, or as their payloads and scales.

    weight                          the master; of a weight without one, what its parts stand for
    weight.rowwise.data, .scale     of `payload_state_dict`, in the place of it: the parts, and the format as bytes
    weight.format

Both are plain tensors under the names of the model, and `load_state_dict` takes both.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fxquant.checks import checked
from fxquant.compat.inside.subclass import set_apply
from fxquant.errors import ArgumentError, FxQuantWarning, RecipeError, tell
from fxquant.formats import OperandSpec
from fxquant.roles import Direction
from fxquant.weights.parts import plain_spec
from fxquant.weights.weight import QuantizedWeight, fits, mismatch

_NAMES = ("data", "scale", "global_amax")
"""The names of the parts of one direction, in order."""

_form = threading.local()


@checked(ArgumentError, called="fxquant.payload_state_dict")
def payload_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The `state_dict()` of a model with its quantized weights as they are stored, without their masters.

        torch.save(fxquant.payload_state_dict(model), "model.pt")
        model.load_state_dict(torch.load("model.pt", weights_only=True))

    A weight is ``<layer>.weight.rowwise.data``, ``.rowwise.scale`` and so on, in the memory of the model, and
    ``<layer>.weight.format``, the bytes of its format's text. All are plain tensors, and scales lie by rows: a copy
    where the model has them as tensor cores read them. Loaded into a model that trains masters, these get the values
    that the payloads stand for. Warns of a model that has no quantized weight.
    """
    with _payloads():
        state = model.state_dict()
    if not any(name.endswith("weight.format") for name in state):
        tell(
            f"no weight of {type(model).__name__} is quantized: fxquant.quantize_parameters makes them so, and without "
            "it payload_state_dict is state_dict",
            FxQuantWarning,
        )
    return state


@contextlib.contextmanager
def _payloads() -> Iterator[None]:
    _form.payloads = True
    try:
        yield
    finally:
        _form.payloads = False


def watch(layer: nn.Linear) -> None:
    """Lets a layer whose weight is quantized give and take state dicts of both forms."""
    set_apply(layer, QuantizedWeight)
    layer.register_state_dict_post_hook(_give)  # type: ignore[no-untyped-call]
    layer.register_load_state_dict_pre_hook(_take)  # type: ignore[no-untyped-call]


def _give(module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
    """Puts plain tensors in the place of a quantized weight in a state dict, in the same memory."""
    key, weight = f"{prefix}weight", own_weight(module)
    if key not in state or not isinstance(weight, Tensor):
        return
    if not getattr(_form, "payloads", False) or not isinstance(weight, QuantizedWeight) or not weight.is_stored:
        state[key] = plain(weight)
        return
    weight.refresh()
    state.pop(key)
    weight = weight.in_order(plain_spec(OperandSpec.parse(weight.spec)))
    for direction in Direction:
        for name, part in zip(_NAMES, weight.parts(direction), strict=False):
            state[f"{key}.{direction}.{name}"] = part
    state[f"{key}.format"] = torch.tensor([*weight.spec.encode()], dtype=torch.uint8)


def _take(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: object) -> None:
    """Makes a weight of the payloads in a state dict.

    Raises RecipeError for those of another format than the model's.
    """
    key, weight = f"{prefix}weight", own_weight(module)
    if not isinstance(weight, QuantizedWeight):
        return
    if f"{key}.format" in state:
        spec = bytes(state.pop(f"{key}.format").tolist()).decode()
        if not fits(spec, OperandSpec.parse(weight.spec)):
            raise RecipeError(mismatch(prefix.rstrip("."), spec, OperandSpec.parse(weight.spec)))
        row, column = (
            [state.pop(f"{key}.{direction}.{name}") for name in _NAMES if f"{key}.{direction}.{name}" in state]
            for direction in Direction
        )
        new = QuantizedWeight(
            spec, rowwise=row, columnwise=column, size=weight.shape, dtype=weight.dtype, layer=weight.layer
        )
        state[key] = new = new.in_order()
        if weight.master is not None:
            new.set_master(new.values())
    elif metadata.get("assign_to_params_buffers") and type(state.get(key)) in (Tensor, nn.Parameter):
        state[key] = weight.of(state[key].detach())


def own_weight(layer: nn.Module) -> Tensor | None:
    """The parameter of a layer, which is not what a parametrization computes."""
    return dict(layer.named_parameters(recurse=False)).get("weight")


def plain(weight: Tensor) -> Tensor:
    """A weight without its quantized forms: the same memory where it has a master."""
    if isinstance(weight, DTensor):
        local = weight.to_local()
        if not isinstance(local, QuantizedWeight):
            return weight.detach()
        return DTensor.from_local(
            plain(local), weight.device_mesh, weight.placements, run_check=False, shape=weight.shape,
            stride=weight.stride(),
        )  # fmt: skip
    if not isinstance(weight, QuantizedWeight):
        return weight.detach()
    with torch.no_grad():  # a view of the master counts writes with it, by which `refresh` sees them
        return weight.values() if weight.master is None else weight.master.detach()
