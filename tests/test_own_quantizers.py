"""Quantizers of the user's own: blocks that no size has to fit, and mistakes that are told before anything runs."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from helpers import OneLinear, linear_step, per_role, recipe_of
from torch import Tensor, nn

import fxquant
from fxquant import IdentityQuantizer, QuantizedTensor, Quantizer, RecipeError
from fxquant.quantizers import QuantizedOperand


@dataclass(frozen=True)
class Blocks(Quantizer):
    """Integers of 8 bits with a scale for each block of the contracted axis."""

    block: int = 32

    def _half(self, x: Tensor) -> QuantizedOperand:
        blocks = x.float().unflatten(-1, (-1, self.block))
        scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
        return QuantizedOperand((blocks / scale).round().to(torch.int8).flatten(-2), scale.squeeze(-1))

    def quantize(self, x: Tensor, *, rowwise: bool = True, columnwise: bool = True) -> QuantizedTensor:
        return QuantizedTensor(self._half(x) if rowwise else None, self._half(x.mT) if columnwise else None)

    def dequantize(self, operand: QuantizedOperand) -> Tensor:
        blocks = operand.data.float().unflatten(-1, (-1, self.block))
        return (blocks * operand.scale.unsqueeze(-1)).flatten(-2)


@dataclass(frozen=True)
class Padded(Blocks):
    @property
    def alignment(self) -> int:  # type: ignore[override]
        return self.block


def seen(quantizer: Padded, x: Tensor) -> Tensor:
    """The values of x [M, K], rowwise."""
    spare = -x.shape[-1] % quantizer.block
    half = quantizer._half(torch.nn.functional.pad(x, (0, spare)))
    return quantizer.dequantize(half)[..., : x.shape[-1]]


@pytest.mark.parametrize("one_sided", [False, True])
def test_sizes_are_padded_to_the_alignment_that_a_quantizer_declares(one_sided: bool) -> None:
    quantizer = Padded(64)
    x, w, dy = torch.randn(33, 96), torch.randn(40, 96), torch.randn(33, 40)
    recipe = per_role(input=IdentityQuantizer() if one_sided else quantizer, weight=quantizer, grad_output=quantizer)
    got = linear_step(recipe, x, w, dy)

    def of_input(t: Tensor) -> Tensor:
        return t if one_sided else seen(quantizer, t)

    wanted = {
        "y": of_input(x) @ seen(quantizer, w).mT,
        "dx": seen(quantizer, dy) @ seen(quantizer, w.mT).mT,
        "dw": seen(quantizer, dy.mT) @ of_input(x.mT).mT,
    }
    for key, value in wanted.items():
        torch.testing.assert_close(got[key], value, rtol=1e-4, atol=1e-4)


def step(model: nn.Module, quantizer: Quantizer, x: Tensor) -> Tensor:
    torch.compiler.reset()
    return fxquant.compile(model, recipe_of(quantizer), options={"inner": "aot_eager"})(x)


def test_a_size_that_no_block_divides_names_layer_quantizer_and_line() -> None:
    for shape, direction in (((64, 96), "rowwise, of input"), ((33, 128), "columnwise, of grad_output")):
        with pytest.raises(RecipeError, match=rf"layer 'fc': Blocks, {direction} .*unflatten.*alignment") as error:
            step(OneLinear(shape[1]), Blocks(64), torch.randn(*shape))
        assert "test_own_quantizers.py:" in str(error.value) and "\n" not in str(error.value)


@dataclass(frozen=True)
class Untransposed(Blocks):
    def quantize(self, x: Tensor, *, rowwise: bool = True, columnwise: bool = True) -> QuantizedTensor:
        return QuantizedTensor(self._half(x) if rowwise else None, self._half(x) if columnwise else None)


@dataclass(frozen=True)
class Reads(Blocks):
    def _half(self, x: Tensor) -> QuantizedOperand:
        return super()._half(x if x.abs().max() > 0 else x + 1)


@pytest.mark.parametrize("rows", [32, 64])
def test_a_columnwise_half_that_is_not_transposed_is_told_before_a_backward(rows: int) -> None:
    with pytest.raises(RecipeError, match=r"layer 'fc': Untransposed, columnwise.*quantize x\.mT"):
        step(OneLinear(64), Untransposed(), torch.randn(rows, 64))
    with torch.no_grad():
        step(OneLinear(64), Untransposed(), torch.randn(rows, 64))


def test_code_that_reads_values_is_refused_with_its_line() -> None:
    with pytest.raises(RecipeError, match=r"layer 'fc': Reads, rowwise.*if x\.abs\(\)\.max\(\) > 0"):
        fxquant.explain(OneLinear(96), recipe_of(Reads()), torch.randn(32, 96))


def test_the_report_has_bits_an_element_with_scales() -> None:
    report = fxquant.explain(OneLinear(96), recipe_of(Padded()), torch.randn(32, 96))
    assert {d.bits for d in report.decisions} == {9.0} and "Padded (9 bits an element)" in str(report)


@pytest.mark.parametrize("one_sided", [False, True])
def test_measure_has_the_losses_of_own_quantizers(one_sided: bool) -> None:
    model, x = OneLinear(96), torch.randn(33, 96)
    quantizer = Padded(64)
    recipe = per_role(input=IdentityQuantizer() if one_sided else quantizer, weight=quantizer, grad_output=quantizer)
    (loss,) = fxquant.measure(model, recipe, x).losses
    with torch.no_grad():
        exact = model(x)
        weight, inputs = seen(quantizer, model.fc.weight), x if one_sided else seen(quantizer, x)
        wanted = nn.functional.linear(inputs, weight, model.fc.bias)
    assert loss.layer == "fc" and set(loss.lost) == {"input", "weight"}
    assert loss.error == pytest.approx(((wanted - exact).norm() / exact.norm()).item(), rel=1e-3)
    assert (loss.lost["input"] == 0) == one_sided and loss.lost["weight"] > 0
