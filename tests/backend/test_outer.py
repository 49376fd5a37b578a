"""Finding the model around a block."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import TwoLinears
from torch import Tensor, nn

import fxquant
from fxquant.backend.outer import outermost


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"0": nn.Sequential(nn.Linear(2, 2)), "1": nn.Sequential(nn.Linear(2, 2))})


@pytest.mark.parametrize("path", ["layers.0.0", "layers.1", "layers", ""])
def test_the_model_around_a_block_is_found(path: str) -> None:
    model = Model()
    copied = copy.deepcopy(model)
    assert outermost(model.get_submodule(path)) is model
    assert outermost(copied.get_submodule(path)) is copied
    wrapper = nn.Sequential(model)
    assert outermost(model.get_submodule(path)) is wrapper


def test_a_block_of_two_models_is_in_none_of_them() -> None:
    block = nn.Linear(2, 2)
    first, second = nn.Sequential(block), nn.Sequential(block)
    assert outermost(block) is block and len({first, second}) == 2
    outer = nn.Sequential(first)
    assert outermost(first) is outer


def test_a_module_that_holds_itself_ends_the_search() -> None:
    model = Model()
    model.again = model
    assert outermost(model.layers) is model


class Block(TwoLinears):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.b(self.a(hidden).relu())


@pytest.mark.parametrize("recipe", ["mxfp8", "delayed_scaling"])
def test_blocks_compiled_by_a_name_have_the_names_of_the_model(recipe: str) -> None:
    models = [nn.Sequential(*(Block() for _ in range(count))) for count in (3, 2)]
    for model in models:
        for block in model:
            block.compile(backend=f"fxquant-{recipe}", options={"inner": "aot_eager"})
        model(torch.randn(32, 32)).sum().backward()
    for model, count in zip(models, (3, 2), strict=True):
        report = fxquant.report(model)
        assert {f"{i}.{name}" for i in range(count) for name in "ab"} == {d.layer for d in report.decisions}
        assert report.coverage == 1 and bool(fxquant.state_dict(model)) == (recipe == "delayed_scaling")


def test_models_that_share_graphs_have_reports_of_their_own() -> None:
    models = [nn.Sequential(*(Block() for _ in range(count))) for count in (2, 2, 3)]
    for model in models:
        for block in model:
            block.compile(backend="fxquant-mxfp8", options=EAGER)
        model(torch.randn(32, 32, requires_grad=True)).sum().backward()
    rows = [[(d.layer, d.gemm) for d in fxquant.report(model).decisions] for model in models]
    assert sorted(rows[0]) == sorted(rows[1]) and len(rows[2]) == len(rows[0]) // 2 * 3
    assert {layer for layer, _ in rows[2]} == {f"{i}.{name}" for i in range(3) for name in "ab"}


EAGER = {"inner": "aot_eager"}
