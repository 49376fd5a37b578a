"""The parameter in quantized form: what operators make of it, and what products take."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import eager_backend
from torch import Tensor, nn

import fxquant
from fxquant import MXFP8Quantizer, RecipeError
from fxquant.formats import OperandSpec
from fxquant.weights import QuantizedWeight
from fxquant.weights.parts import quantized

MXFP8 = str(MXFP8Quantizer().operand_spec())


def stored(values: Tensor, spec: str = MXFP8, *, master: bool = False) -> QuantizedWeight:
    row, column = (quantized(values, OperandSpec.parse(spec), side) for side in ("rowwise", "columnwise"))
    kept = values.clone() if master else None
    return QuantizedWeight(spec, master=kept, rowwise=row, columnwise=column, size=values.shape, dtype=values.dtype)


def test_values_are_the_dequantized_parts_or_the_master() -> None:
    values = torch.randn(64, 96)
    expected = MXFP8Quantizer().quantize(values).dequantize()
    assert torch.equal(stored(values) + 0, expected)
    assert type(stored(values) * 2) is Tensor
    assert torch.equal(stored(values, master=True) + 0, values)


@pytest.mark.parametrize("step", [
    lambda w, g: w.add_(g, alpha=-0.1),
    lambda w, g: torch._foreach_add_([w], [g], alpha=-0.1),
    lambda w, g: torch._foreach_addcdiv_([w], [g], [g.abs() + 1], value=-0.1),
    lambda w, g: w.copy_(g),
    lambda w, g: w.zero_(),
])  # fmt: skip
def test_writes_go_into_the_master_and_the_parts_follow(step: Callable[..., Any]) -> None:
    values, gradient = torch.randn(64, 96), torch.randn(64, 96)
    weight, plain = stored(values, master=True), values.clone()
    memory = [part.data_ptr() for part in weight.parts("rowwise") + weight.parts("columnwise")]
    step(weight, gradient)
    step(plain, gradient)
    assert weight.master is not None and torch.equal(weight.master, plain)
    weight.refresh()
    for side in ("rowwise", "columnwise"):
        for part, expected in zip(weight.parts(side), stored(plain).parts(side), strict=True):
            assert torch.equal(part.view(torch.uint8), expected.view(torch.uint8))
    assert memory == [part.data_ptr() for part in weight.parts("rowwise") + weight.parts("columnwise")]


@pytest.mark.parametrize("keywords", [{"foreach": True}, {"fused": True}, {"foreach": False}])
def test_optimizers_train_the_master(keywords: dict[str, bool]) -> None:
    values, gradient = torch.randn(64, 96), torch.randn(64, 96)
    weights = nn.Parameter(stored(values, master=True)), nn.Parameter(values.clone())
    for weight in weights:
        weight.grad = gradient.clone()
        optimizer = torch.optim.AdamW([weight], 0.1, **keywords)
        for _ in range(2):
            optimizer.step()
        assert {type(t) for t in optimizer.state[weight].values() if isinstance(t, Tensor)} == {Tensor}
    assert torch.equal(weights[0].master, weights[1])


@pytest.mark.parametrize("product", [
    nn.functional.linear,
    lambda x, w: x @ w.T,
    lambda x, w: torch.einsum("mk,nk->mn", x, w),
])  # fmt: skip
def test_products_take_the_parts(product: Callable[..., Tensor]) -> None:
    class Layer(nn.Module):
        def __init__(self, weight: Tensor) -> None:
            super().__init__()
            self.weight = nn.Parameter(weight)

        def forward(self, x: Tensor) -> Tensor:
            return product(x, self.weight)

    values, results = torch.randn(64, 96), []
    for weight in (values, stored(values)):
        layer, backend = Layer(weight), eager_backend("mxfp8")
        x = torch.randn(32, 96, generator=torch.Generator().manual_seed(0)).requires_grad_()
        torch.compile(layer, backend=backend)(x).square().sum().backward()
        assert backend.report().coverage == 1
        assert type(layer.weight.grad) is Tensor
        results.append((x.grad, layer.weight.grad))
        graphs = backend.report().graphs
    assert all(map(torch.equal, *results))
    text = graphs["forward"] + graphs["backward"]
    assert (text.count("quantize.default("), text.count("hybrid_quantize.default(")) == (2, 2), "input and gradient"


def test_another_recipe_is_an_error_when_the_graph_is_compiled() -> None:
    layer = nn.Linear(96, 64)
    layer.weight = nn.Parameter(stored(torch.randn(64, 96)))
    run = fxquant.compile(nn.Sequential(layer), "float8_blockwise", options={"inner": "aot_eager"})
    with pytest.raises(RecipeError, match=r"Recipe mismatch for 0\.weight: stored as mxfp8_e4m3, recipe wants block"):
        run(torch.randn(32, 96))


def test_casts_and_copies_stay_quantized() -> None:
    weight = stored(torch.randn(64, 96), master=True)
    for other in (weight.to(torch.bfloat16), weight.detach(), weight.clone(), copy.deepcopy(nn.Parameter(weight))):
        assert isinstance(other, QuantizedWeight) and len(other.parts("columnwise")) == 2
    assert weight.to(torch.bfloat16).dtype == torch.bfloat16
