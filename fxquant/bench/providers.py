"""The names of providers of training steps, and the recipe of each."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterable

import torch
from torch import nn

from fxquant import recipes
from fxquant.quantizers import Float8HeadQuantizer
from fxquant.recipes import places

QUANTIZED = ("current_scaling", "delayed_scaling", "rowwise", "float8_blockwise", "mxfp8", "nvfp4")
CACHED = ("rowwise cached", "float8_blockwise cached")
"""The recipes whose weights stay quantized, as in all micro-batches of a step but the first."""
LEAST = ("current_scaling least", "delayed_scaling least")
"""The recipes whose forward keeps the least for its backward (docs/memory.md)."""
TORCHAO = ("torchao tensorwise", "torchao rowwise")
WEIGHT_ONLY = ("weight_only_fp8", "weight_only_nvfp4")
TORCHAO_WEIGHT_ONLY = ("torchao float8 weight-only", "torchao int8 weight-only")
"""The providers of inference that quantize weights alone."""
ATTENTION = " + attention"
"""The suffix of a provider that quantizes attention too."""
WITH_ATTENTION = tuple(f"{name}{ATTENTION}" for name in QUANTIZED)
GATHERED = " + gather"
"""The suffix of a provider whose weights FSDP2 gathers quantized."""
WITH_GATHER = ("torchao tensorwise + gather", *(f"{name}{GATHERED}" for name in QUANTIZED))
WITHOUT_ATTENTION = ("bf16", *QUANTIZED, *CACHED, *LEAST, *TORCHAO)
PROVIDERS = (*WITHOUT_ATTENTION, *WITH_ATTENTION)
CALIBRATED = "current_scaling calibrated"
"""The recipe of inference whose activation scales are constants."""


def installed(providers: Iterable[str]) -> list[str]:
    """The providers without those of torchao if it is not installed."""
    torchao = importlib.util.find_spec("torchao") is not None
    return [name for name in providers if torchao or not name.startswith("torchao")]


def recipe_of(provider: str) -> recipes.Recipe | None:
    """The recipe of a provider, or None for one that is not fxquant's.

    With attention, its forward is in FP8 with a scale for each head, or with delayed scales like the linears, its
    backward in high precision.
    """
    name = _recipe_name(provider)
    if name not in QUANTIZED or not provider.endswith(ATTENTION):
        return recipes.get(name) if name in QUANTIZED else None
    of_linears = recipes.get(name)
    answer = of_linears.request() if isinstance(of_linears, recipes.DelayedScaling) else Float8HeadQuantizer()
    forward = recipes.Rule(answer, module_type="dpa", tensor_type="qkv|s")
    return recipes.CustomRecipe(qfactory=recipes.Rules([forward], default=name))


def gemms(provider: str, device: str) -> str:
    """``native`` if the device has instructions for the GEMMs of a provider, else ``emulated``.

    ``dequantized as read`` where a kernel of few rows reads the stored bytes of a weight that alone is quantized.
    """
    name = _recipe_name(provider.removesuffix(" calibrated"))
    hopper = device == "cuda" and torch.cuda.get_device_capability()[0] == 9
    if name in WEIGHT_ONLY:
        return "dequantized as read" if hopper else "emulated"
    if name not in QUANTIZED:
        return "native"
    return places.runs_as(recipes.get(name), torch.cuda.get_device_capability() if device == "cuda" else (0, 0))


def quantize_by_torchao(provider: str, model: nn.Module, *, tunes: bool = True) -> None:
    """Quantizes linear layers in place, by one of torchao's configurations.

    As torchao has it, it `tunes`: it sets Inductor to tune every kernel, which takes minutes for a model.
    """
    from torchao import quantization as ao  # type: ignore[import-not-found]

    dynamic = ao.Float8DynamicActivationFloat8WeightConfig
    configs = {
        "torchao tensorwise": functools.partial(dynamic, granularity=ao.PerTensor()),
        "torchao rowwise": functools.partial(dynamic, granularity=ao.PerRow()),
        "torchao float8 weight-only": ao.Float8WeightOnlyConfig,
        "torchao int8 weight-only": ao.Int8WeightOnlyConfig,
    }
    ao.quantize_(model, configs[provider](set_inductor_config=tunes))


def _recipe_name(provider: str) -> str:
    for suffix in (ATTENTION, GATHERED, " cached", " least"):
        provider = provider.removesuffix(suffix)
    return provider
