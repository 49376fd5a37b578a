"""Calibration: the data and the method that give a program its static activation scales."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from fxquant.checks import article, checked
from fxquant.errors import ArgumentError, OptionError

_BINS = 0x7F80
"""Magnitudes by the upper 16 bits of their float32: bins of a 128th of a power of two, up to infinity."""


@checked(ArgumentError, called="fxquant.Amax")
@dataclass(frozen=True, kw_only=True)
class Amax:
    """The method that makes one amax, and from it a scale, of an activation's magnitudes over all calibration inputs.

    ``max`` takes the largest. ``moving_average`` starts at the first input's amax and then adds `1 - momentum` of each
    further one to `momentum` of itself. ``percentile`` takes the magnitude that `percentile` percent of all elements
    do not exceed, rounded up by less than a 128th of its value. NaN is ignored, as in every amax.

    Raises ArgumentError for an unknown method, and OptionError for a number out of range.
    """

    method: Literal["max", "moving_average", "percentile"] = "max"
    momentum: float = 0.9
    percentile: float = 99.99

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise OptionError(f"momentum must be at least 0 and less than 1, not {self.momentum}")
        if not 0 < self.percentile <= 100:
            raise OptionError(f"percentile must be more than 0 and at most 100, not {self.percentile}")

    def __str__(self) -> str:
        detail = {"max": "", "moving_average": f" {self.momentum:g}", "percentile": f" {self.percentile:g}"}
        return f"{self.method}{detail[self.method]}"


@checked(
    ArgumentError,
    called="fxquant.Calibration",
    takes={"inputs": "a list of what one call takes", "method": "write amax=fxquant.Amax(method=...)"},
)
@dataclass(frozen=True)
class Calibration:
    """Calibration inputs and their use.

    Each of `inputs` is the input of one call of the program: a tensor, a tuple of positional inputs, a dict of keyword
    inputs, or a (tuple, dict) of both. `overrides` maps regular expressions of layer names to an `Amax` of their own,
    or to None, which leaves a layer's scales dynamic; the first that matches the whole name counts. The first of
    several layers that share an input decides. `progress` shows a count on stderr.
    """

    inputs: Iterable[Any]
    amax: Amax = Amax()
    overrides: Mapping[str, Amax | None] = field(default_factory=dict)
    progress: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.inputs, (str, bytes, Mapping, Tensor)) or not isinstance(self.inputs, Iterable):
            raise OptionError(
                f"calibration inputs are a list, or another iterable, of what one call takes, not "
                f"{article(type(self.inputs).__name__)}: put a single input into a list"
            )
        if not isinstance(self.overrides, Mapping):
            raise OptionError(
                "overrides is a dict of regular expressions of layers and an fxquant.Amax for each, not "
                f"{article(type(self.overrides).__name__)}"
            )
        for layers, amax in self.overrides.items():
            if not isinstance(amax, Amax | None):
                raise OptionError(f"calibration of {layers!r}: an fxquant.Amax is expected, not {amax!r}")
        for layers in self.overrides:
            try:
                re.compile(layers)
            except (re.error, TypeError) as error:
                raise OptionError(f"calibration: {layers!r} is no regular expression of layers: {error}") from error

    def unused(self, layers: Collection[str]) -> list[str]:
        """The overrides that are for none of these layers."""
        met = {next((name for name in self.overrides if re.fullmatch(name, layer)), None) for layer in layers}
        return [f"calibration of {name!r}" for name in self.overrides if name not in met]

    def amax_of(self, layer: str) -> Amax | None:
        """The method of a layer, or None for dynamic scales."""
        return next((amax for name, amax in self.overrides.items() if re.fullmatch(name, layer)), self.amax)


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """One calibration input as positional and keyword arguments."""
    match inputs:
        case (tuple() | list() as args, dict() as kwargs):
            return tuple(args), kwargs
        case dict():
            return (), inputs
        case tuple() | list():
            return tuple(inputs), {}
    return (inputs,), {}


def expect(value: Any, name: str, dtype: torch.dtype) -> None:
    """Raises TypeError for a calibration input that is no tensor of the exported program's dtype."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}, not a tensor")
    if value.dtype != dtype:
        raise TypeError(f"{name} is {value.dtype}, not {dtype}")


class Observer(torch.nn.Module):
    """Observes an activation of every calibration input; `result()` is its amax, float32 [1], None without a number."""

    def __init__(self, amax: Amax) -> None:
        super().__init__()
        self.amax = amax
        self.called = False
        self.largest: Tensor | None = None
        self.counts: Tensor | None = None

    def forward(self, x: Tensor) -> None:
        self.called = True
        magnitude = x.detach().float().abs()
        if not magnitude.numel() or bool(magnitude.isnan().all()):
            return
        if self.amax.method == "percentile":
            counts = torch.bincount(magnitude.flatten().view(torch.int32) >> 16, minlength=_BINS + 128)
            self.counts = counts if self.counts is None else self.counts + counts
            return
        new = magnitude.nan_to_num(nan=0.0, posinf=torch.inf).amax().reshape(1)
        if self.largest is None:
            self.largest = new
        elif self.amax.method == "max":
            self.largest = torch.maximum(self.largest, new)
        else:
            self.largest = self.amax.momentum * self.largest + (1 - self.amax.momentum) * new

    def result(self) -> Tensor | None:
        if self.counts is None:
            return self.largest
        counts = self.counts[: _BINS + 1].cumsum(0)  # without NaN
        wanted = (counts[-1].double() * (self.amax.percentile / 100)).ceil().clamp(min=1).long()
        place = int(torch.searchsorted(counts, wanted).item())
        if not place:  # zeros, or smaller than any bin
            return torch.zeros(1, device=counts.device)
        if place >= _BINS:
            return torch.full((1,), torch.inf, device=counts.device)
        # the end of the bin, so that at least that many elements lie below it
        return torch.tensor([(place << 16) | 0xFFFF], dtype=torch.int32, device=counts.device).view(torch.float32)
