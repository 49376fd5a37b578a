"""What a report says is what ran, on every model: GEMMs and attentions by layer, forward and backward.

`make sweep` runs whole models under every recipe; else there are models of each kind, with one layer, under recipes
that take turns.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn
from truth import Counted, Layered, differences, plain_flops, reported, without_layers

pytest.importorskip("models", reason="needs the corpus extra: transformers and peft")

import flops
import models
from corpus.test_export import Named

import fxquant
from fxquant import CustomRecipe, MXFP8Quantizer, NVFP4Quantizer, Quantizer, QuantizerRole, recipes

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def hybrid(role: QuantizerRole) -> Quantizer:
    """MXFP8 forward, NVFP4 backward."""
    if not role.module_type.endswith("linear"):
        return fxquant.IdentityQuantizer()
    if role.tensor_type == "grad_output":
        return NVFP4Quantizer()
    source = "rowwise_dequantized" if role.tensor_type == "weight" else "original"
    return fxquant.HybridQuantizer(MXFP8Quantizer(), NVFP4Quantizer(), columnwise_source=source)  # type: ignore[arg-type]


def inputs_alone(role: QuantizerRole) -> Quantizer:
    linear = role.module_type.endswith("linear") and role.tensor_type == "input"
    return MXFP8Quantizer() if linear else fxquant.IdentityQuantizer()


RECIPES: dict[str, fxquant.Recipe] = {
    **{name: recipes.get(name) for name in recipes.RECIPES if name != "high_precision"},
    "nvfp4": fxquant.NVFP4BlockScaling(disable_stochastic_rounding=True),  # which no program has
    "current_scaling with attention": fxquant.Float8CurrentScaling(fp8_dpa=True),
    "delayed_scaling with attention": fxquant.DelayedScaling(fp8_dpa=True),
    "mxfp8 with attention": fxquant.MXFP8BlockScaling(fp8_dpa=True),
    "backward in high precision": fxquant.Float8CurrentScaling(backward_override="high_precision"),
    "dequantized backward": fxquant.MXFP8BlockScaling(backward_override="dequantized"),
    "hybrid": CustomRecipe(qfactory=hybrid),
    "inputs alone": CustomRecipe(qfactory=inputs_alone),
}

IN_CI: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "llama_gqa": (("delayed_scaling with attention", "nvfp4", "hybrid", "backward in high precision"), ()),
    "llama_checkpoint": (("mxfp8 with attention",), ("weight_only_fp8",)),
    "llama_lora": (("dequantized backward",), ("rowwise",)),
    "gpt2": (("rowwise", "float8_blockwise"), ()),
    "qwen3_moe_bf16": (("mxfp8",), ("inputs alone",)),
    "t5": (("current_scaling with attention",), ("weight_only_nvfp4",)),
    "kitchen_sink": (("delayed_scaling",), ("mxfp8",)),
}
"""Models that always run, the recipes that each trains under, and those of inference, for which it is captured again.

What is special about the two without the latter, their kinds of layers, the others or `test_program` have too.
"""


class Recipes:
    """A backend that compiles what is captured under several recipes, and runs it under the chosen one."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self.backends = {name: Layered(RECIPES[name], model=model) for name in names}
        self.chosen = names[0]

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled = {name: backend(copy.deepcopy(gm), inputs) for name, backend in self.backends.items()}
        return lambda *args: compiled[self.chosen](*args)


def case(name: str, whole: bool) -> models.Case:
    """A model and its inputs; of lists of layers the first layer, if it is not taken as a whole."""
    if "kitchen_sink" in name and not hasattr(torch.nn.functional, "linear_cross_entropy"):
        pytest.skip("this torch has no linear_cross_entropy")
    model, kwargs = models.CASES[name]()
    return model if whole else models.one_layer(model), kwargs


def check(name: str, recipe: str, counted: Counted, report: Any, *, layers: bool = True) -> int:
    """Compares what ran with a report; returns the number of quantized GEMMs and attentions."""
    ran, said = counted.quantized, reported(report)
    if not layers:
        ran, said = without_layers(ran), without_layers(said)
    # a checkpoint computes its forward again; of two equal gradients of one product, reported as two, one runs
    checkpoint = "checkpoint" in name or "sink" in name
    problems = differences(ran, said, repeated=checkpoint, merged="sink" in name)
    plain = sum(counted.plain["forward"].values())
    if plain != plain_flops(report):
        problems.append(f"{plain} FLOPs ran unquantized, {plain_flops(report)} reported")
    assert not problems, "\n".join([f"{name}, {recipe}:", *problems])
    return sum(gemms.total() for gemms in ran.values())


EVERY = tuple(RECIPES)
SWEPT = [pytest.param(name, EVERY, EVERY, True, id=f"{name}-every", marks=pytest.mark.sweep) for name in models.CASES]
CASES = [*(pytest.param(name, *names, False, id=name) for name, names in IN_CI.items()), *SWEPT]


@pytest.mark.parametrize(("name", "trained", "served", "whole"), CASES)
def test_compiled(name: str, trained: tuple[str, ...], served: tuple[str, ...], whole: bool) -> None:
    """In training, and in inference."""
    model, kwargs = case(name, whole)
    for training, names in ((True, trained), (False, served)) if served else ((True, trained),):
        torch.compiler.reset()
        switch = Recipes(model, names)
        run = torch.compile(model, backend=switch)
        for recipe, backend in switch.backends.items():
            switch.chosen = recipe
            with Counted(flops._counter().flop_registry) as counted, torch.set_grad_enabled(training):
                loss = flops.to_loss(run(**kwargs))
                if loss.requires_grad:
                    loss.backward()
            assert check(name, recipe, counted, backend.report())


@pytest.mark.parametrize(("name", "names", "_served", "whole"), [CASES[0], *SWEPT])
def test_program(name: str, names: tuple[str, ...], _served: tuple[str, ...], whole: bool) -> None:
    model, kwargs = case(name, whole)
    model = Named(model) if "args" in inspect.signature(model.forward).parameters else model
    kwargs = {key: value.detach() for key, value in kwargs.items()}
    source = torch.export.export(model.eval(), (), kwargs)
    for recipe in names:
        calibration = [kwargs] if "delayed" in recipe else None
        program = fxquant.quantize_program(source, RECIPES[recipe], calibration=calibration)
        with Counted(flops._counter().flop_registry) as counted, torch.no_grad():
            program.module()(**kwargs)
        assert check(name, recipe, counted, fxquant.report_of(program), layers=False)
