"""Regions that Dynamo captures once (`torch.compiler.nested_compile_region`): answers and rows for each call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import assert_same_bits, eager_backend, train_step
from rewritten import rewrite
from torch import Tensor, fx, nn
from truth import Counted, Layered, differences, reported, without_layers

import fxquant
from fxquant import (
    CustomRecipe,
    Float8CurrentScalingQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    Quantizer,
    Rule,
    Rules,
)

region = torch.compiler.nested_compile_region


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(self.a(x).relu())


class Region(Block):
    @region
    def forward(self, x: Tensor) -> Tensor:
        return Block.forward(self, x)


class Pair(nn.Module):
    def __init__(self, kind: type[Block]) -> None:
        super().__init__()
        self.c, self.d = kind(), kind()

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(x))


class PairRegion(Pair):
    @region
    def forward(self, x: Tensor) -> Tensor:
        return Pair.forward(self, x)


def models(nested: bool, count: int = 4) -> list[nn.Module]:
    """A stack of equal blocks, written plainly and as regions, behind a layer, so that all inputs are alike."""
    torch.manual_seed(0)
    blocks = [PairRegion(Region) if nested else Region() for _ in range(count)]
    regions = nn.Sequential(nn.Linear(64, 64), *blocks)
    plain = nn.Sequential(nn.Linear(64, 64), *(Pair(Block) if nested else Block() for _ in blocks))
    plain.load_state_dict(regions.state_dict())
    return [regions, plain]


def without(pattern: str, others: Quantizer = MXFP8Quantizer()) -> CustomRecipe:  # noqa: B008
    return CustomRecipe(qfactory=Rules([Rule(IdentityQuantizer(), name=pattern), Rule(others, module_type="linear")]))


RECIPES: dict[str, Any] = {"one answer": "mxfp8", "by name": without(r"2\..*"), "inside": without(r"3\..*\b(d\.a|b)")}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_each_call_has_the_answers_for_its_own_layers(recipe: Any, nested: bool) -> None:
    results, layers = [], []
    for model in models(nested):
        torch.compiler.reset()
        backend, x = Layered(recipe, model=model), torch.ones(32, 64)
        with Counted() as counted:
            results.append(train_step(model, torch.compile(model, backend=backend, fullgraph=True), x))
        report = backend.report()
        layers.append([(d.layer, d.role.tensor_type, d.gemm, str(d.quantizer)) for d in report.decisions])
        ran, said = without_layers(counted.quantized), without_layers(reported(report))
        assert not differences(ran, said, repeated=nested)  # a backward of nested ones runs the inner ones again
    assert_same_bits(*results)
    assert sorted(layers[0]) == sorted(layers[1])


def bodies(gm: fx.GraphModule) -> list[str]:
    """The bodies that the calls in a graph run, in order, and behind each those of its own calls."""
    names: list[str] = []
    for call in gm.graph.nodes:
        if str(call.target) == "invoke_subgraph":
            body = getattr(gm, call.args[0].target)
            assert call.args[1] == call.args[0].target
            names += [call.args[1], *bodies(body)]
    return names


@pytest.mark.parametrize(("recipe", "count"), [("mxfp8", 1), (without(r"2\..*"), 2), (without(r"[24]\.b"), 2)])
def test_calls_with_equal_answers_share_a_body(recipe: Any, count: int) -> None:
    model, _ = models(nested=False)
    facts = rewrite(recipe, lambda x: model(x), torch.ones(32, 64))
    names = bodies(facts.gm)
    assert len(names) == 4 and len(set(names)) == count
    held = [name for name, _ in facts.gm.named_children() if name.startswith("subgraph")]
    assert set(names) <= set(held) and len(held) == count


def test_one_module_called_twice_is_two_products() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Region()

        def forward(self, x: Tensor) -> Tensor:
            return self.block(x) + self.block(2 * x)

    model, backend = Twice(), eager_backend("mxfp8")
    torch.compile(model, backend=backend)(torch.ones(32, 64))
    weights = [d.layer for d in backend.report().decisions if d.gemm == "fprop" and d.role.tensor_type == "weight"]
    assert weights == ["block.a", "block.b"] * 2


@pytest.mark.slow
def test_inductor_compiles_them() -> None:
    results = []
    for model in models(nested=False, count=2):
        torch.compiler.reset()
        run = fxquant.compile(model, without(r"2\..*", Float8CurrentScalingQuantizer()))
        results.append(train_step(model, run, torch.ones(32, 64)))
    for name, value in results[0].items():
        torch.testing.assert_close(value, results[1][name])
