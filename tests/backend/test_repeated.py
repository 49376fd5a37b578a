"""`compile_blocks`: full names, rules, scales, one report and one state, and code that equal blocks share."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from helpers import assert_same_bits
from torch import Tensor, nn

import fxquant
from fxquant import CustomRecipe, UnusedRuleWarning, factories
from fxquant.errors import ArgumentError

EAGER = {"inner": "aot_eager"}


class Block(nn.Module):
    """A linear layer, and a matrix that the block itself multiplies by."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)
        self.down = nn.Parameter(torch.randn(width, width) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.gelu(self.up(x)) @ self.down.T


class Model(nn.Module):
    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def without_head(inner: Any) -> CustomRecipe:
    return CustomRecipe(qfactory=factories.by_name({"head": "high_precision"}, default=inner))


def train(run: Any, model: nn.Module, steps: int = 4, first: int = 0) -> dict[str, Tensor]:
    optimizer, results = torch.optim.SGD(model.parameters(), lr=0.01), {}
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, 64, generator=generator)
    for step in range(first, first + steps):
        loss = run((1 + step) * x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        results[f"loss {step}"] = loss.detach()
    return results | {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("recipe", ["mxfp8", "current_scaling", "delayed_scaling"])
def test_blocks_compute_what_the_whole_model_does(recipe: str) -> None:
    whole, model = Model(3), Model(3)
    expected = train(fxquant.compile(whole, without_head(getattr(factories, recipe)), options=EAGER), whole)
    assert fxquant.compile_blocks(model, recipe, options=EAGER) is model
    assert_same_bits(train(model, model), expected)
    report = fxquant.report(model)
    assert list(dict.fromkeys(d.layer for d in report.decisions)) == [
        name for i in range(3) for name in (f"layers.{i}.up", f"layers.{i}")
    ]
    assert report.uncompiled == ["outside of the blocks of Model, as the model has it: head (Linear)"]
    assert model.state_dict().keys() == whole.state_dict().keys()


def graphs_of(model: Any) -> int:
    """The graphs that were compiled, each of which has one forward in the report."""
    return fxquant.report(model).graphs["forward"].count("def forward")


def test_blocks_with_equal_answers_share_code() -> None:
    x = torch.randn(32, 64, requires_grad=True)
    model = fxquant.compile_blocks(Model(12), "mxfp8", options=EAGER)
    model(x)
    assert graphs_of(model) == 1
    recipe = CustomRecipe(qfactory=factories.first_and_last(factories.mxfp8, first=1, last=2, layers=12))
    model = fxquant.compile_blocks(Model(12), recipe, options=EAGER)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnusedRuleWarning)
        for _ in range(2):
            model(x)
    answers = {d.layer: d.quantizer is None for d in fxquant.report(model).decisions}
    assert [answers[f"layers.{i}"] for i in range(12)] == [i in (0, 10, 11) for i in range(12)]
    assert graphs_of(model) == 2, "the first and the last blocks get equal answers"


def test_the_state_is_one_and_resumes() -> None:
    model = fxquant.compile_blocks(Model(), "delayed_scaling", options=EAGER)
    train(model, model, 3)
    saved, weights = fxquant.quantization_state_dict(model), copy.deepcopy(model.state_dict())
    assert sum(t.numel() for key, t in saved.items() if key.endswith("scale")) == 6 * 2 * 3
    expected = train(model, model, 2, first=3)
    torch.compiler.reset()
    again = fxquant.compile_blocks(Model(), "delayed_scaling", options=EAGER)
    again.load_state_dict(weights)
    fxquant.load_quantization_state_dict(again, saved)
    assert_same_bits(train(again, again, 2, first=3), expected)


def test_rounding_differs_between_blocks() -> None:
    """Equal blocks that get equal gradients draw other bits."""
    model = Model(2)
    model.layers[1].load_state_dict(model.layers[0].state_dict())
    fxquant.compile_blocks(model, "nvfp4", options=EAGER)
    x = torch.randn(32, 64)
    for layer in model.layers:
        layer(x).square().sum().backward()
    assert not torch.equal(*(layer.up.weight.grad for layer in model.layers))


def test_evaluation_and_other_recipes_run_in_blocks() -> None:
    model, x = fxquant.compile_blocks(Model(3), "mxfp8", options=EAGER), torch.randn(32, 64)
    plain = Model(3)(x)
    with torch.no_grad():
        first = model(x)
        with fxquant.autocast(enabled=False):
            assert torch.equal(model(x), plain)
        fxquant.set_recipe(model, "nvfp4")
        assert not torch.equal(model(x), first)
    assert fxquant.report(model).recipe == "nvfp4" and fxquant.report(model).coverage == 1


def test_blocks_that_are_compiled_again_have_the_new_recipe_alone() -> None:
    model, x = Model(3), torch.randn(32, 64)
    for recipe in ("delayed_scaling", "mxfp8"):
        fxquant.compile_blocks(model, recipe, options=EAGER)
        model(x)
    report = fxquant.report(model)
    assert report.recipe == "mxfp8" and len({decision.site for decision in report.decisions}) == 6
    assert not fxquant.quantization_state_dict(model)


@pytest.mark.parametrize("recipe", ["mxfp8", "delayed_scaling"])
def test_a_copy_has_compiled_blocks_with_the_names_and_states_of_the_model(recipe: str) -> None:
    model, x = fxquant.compile_blocks(Model(3), recipe, options=EAGER), torch.randn(32, 64)
    train(model, model, 2)
    copied, block = copy.deepcopy(model), copy.deepcopy(model.layers[1])
    state = fxquant.state_dict(model)
    assert_same_bits(fxquant.state_dict(copied), state)
    assert torch.equal(copy.deepcopy(block)(x), block(x)) and torch.equal(copied(x), model(x))
    layers = [{d.layer for d in fxquant.report(one).decisions} for one in (model, copied)]
    assert layers[0] == layers[1] and "layers.0.up" in layers[0]
    assert {key for key in state if key.startswith("layers.1.")} == {f"layers.1.{x}" for x in fxquant.state_dict(block)}


def test_exports_and_models_around_take_the_blocks_as_they_are() -> None:
    model, x = Model(3), torch.randn(32, 64)
    plain = model(x)
    fxquant.compile_blocks(model, "mxfp8", options=EAGER)
    assert not torch.equal(model(x), plain)
    assert torch.equal(torch.export.export(model, (x,)).module()(x), plain)
    report = fxquant.explain(model, "nvfp4", x)
    assert report.coverage == 1 and not report.breaks and len({d.layer for d in report.decisions}) == 7


class Counting(Block):
    """A block that reads its own number, as those do that have a place in a cache."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.number / 100)


def test_blocks_that_cannot_share_code_are_compiled_each() -> None:
    model = Model(1)
    model.layers = nn.ModuleList(Counting(number) for number in range(12))
    with warnings.catch_warnings():
        warnings.simplefilter("error", fxquant.FxQuantWarning)
        fxquant.compile_blocks(model, "mxfp8", options=EAGER)
        for _ in range(2):
            model(torch.randn(32, 64)).sum().backward()
    report = fxquant.report(model)
    assert report.coverage == 1 and len({decision.layer for decision in report.decisions}) == 24
    assert len(report.uncompiled) == 1, "the head alone"


class Numbered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleDict({str(i): Block() for i in range(2)})
        self.decoder = nn.Sequential(Block(), Block(), nn.Identity())
        self.stages = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.decoder(self.encoder["1"](self.encoder["0"](x)))
        return self.stages[1](self.stages[0](x))


@pytest.mark.parametrize(
    ("blocks", "names"),
    [
        (None, "encoder.0 encoder.1 decoder.0 decoder.1"),
        (Block, "encoder.0 encoder.1 decoder.0 decoder.1"),
        (r"decoder\.[01]", "decoder.0 decoder.1"),
        (r"stages\.\d", "stages.0 stages.1"),
        (lambda model: model.stages, "stages.0 stages.1"),
        (lambda model: [model.decoder[1]], "decoder.1"),
        (lambda model: [model.encoder, model.encoder["0"]], "encoder"),
    ],
)
def test_blocks_are_found(blocks: Any, names: str) -> None:
    model = Numbered()
    chosen = blocks(model) if getattr(blocks, "__name__", "") == "<lambda>" else blocks
    fxquant.compile_blocks(model, "mxfp8", chosen, options=EAGER)
    compiled = [name for name, module in model.named_modules() if module._compiled_call_impl is not None]
    assert compiled == names.split()


def test_what_is_no_block_is_refused() -> None:
    model = Model(2)
    for blocks, message in (
        (r"layer\.\d", r"Model has no repeated blocks that fit .*: give blocks= as a list of modules.*layers\.0"),
        ("(", r"blocks='\(' is no regular expression"),
        ([nn.Linear(2, 2)], "blocks has Linear, which is no module inside of this Model"),
        (nn.Conv2d, "Model has no repeated blocks that fit blocks=Conv2d"),
    ):
        with pytest.raises(ArgumentError, match=message):
            fxquant.compile_blocks(model, "mxfp8", blocks)
    with pytest.raises(ArgumentError, match="Linear has no repeated blocks: give blocks="):
        fxquant.compile_blocks(nn.Linear(64, 64), "mxfp8")
    with pytest.raises(ArgumentError, match="Known keywords"):
        fxquant.compile_blocks(model, "mxfp8", dynamics=True)
    with pytest.raises(fxquant.RecipeError, match="unknown recipe"):
        fxquant.compile_blocks(model, "mxpf8")
    assert all(module._compiled_call_impl is None for module in model.modules())


def test_blocks_in_a_checkpoint() -> None:
    from torch.utils.checkpoint import checkpoint

    def run(x: Tensor) -> Tensor:
        for layer in model.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return model.head(x)

    results = []
    for way in ("plain", "checkpoint"):
        torch.compiler.reset()
        model = fxquant.compile_blocks(Model(3), "delayed_scaling", options=EAGER)
        results.append(train(model if way == "plain" else run, model))
    assert_same_bits(*results)
