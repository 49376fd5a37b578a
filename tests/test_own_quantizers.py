"""Quantizers of the user's own: blocks that no size has to fit, and mistakes that are told before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

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


class Levels(Quantizer):
    """A quantizer whose levels are one apart, or come from wherever a subclass has them."""

    def levels(self) -> Any:
        return 1.0

    def _half(self, x: Tensor) -> Any:
        return QuantizedOperand((x * self.levels()).round(), None)

    def quantize(self, x: Tensor, *, rowwise: bool = True, columnwise: bool = True) -> Any:
        return QuantizedTensor(self._half(x) if rowwise else None, self._half(x.mT) if columnwise else None)

    def dequantize(self, operand: QuantizedOperand) -> Any:
        return operand.data / self.levels()


def around(levels: float) -> Quantizer:
    class Around(Levels):
        def levels(self) -> float:
            return levels

    return Around()


@dataclass(frozen=True)
class Hidden(Levels):
    number: float = field(repr=False)

    def levels(self) -> float:
        return self.number


class Named(Levels):
    def __init__(self, number: float) -> None:
        self.number = number

    def __repr__(self) -> str:
        return "Named()"

    def levels(self) -> float:
        return self.number


class Slotted(Levels):
    __slots__ = ("number",)
    levels = Hidden.levels

    def __init__(self, number: float) -> None:
        self.number = number


@dataclass
class Changing(Levels):
    number: float

    levels = Hidden.levels


@dataclass(frozen=True)
class Table(Levels):
    """The levels lie in the middle of a tensor, which prints without them."""

    table: Tensor

    def levels(self) -> Tensor:
        return self.table[1500]


MAKE: dict[str, Callable[[float], Quantizer]] = {
    "a variable around the class": around,
    "a field that does not print": Hidden,
    "an attribute that does not print": Named,
    "a slot": Slotted,
    "a dataclass that may change": Changing,
    "a tensor": lambda levels: Table(torch.full((3000,), 1.0).index_fill(0, torch.tensor(1500), levels)),
}


@pytest.mark.parametrize("kind", MAKE)
def test_quantizers_with_other_settings_are_other_quantizers(kind: str) -> None:
    """Wherever the settings stand: in one process, a second quantizer of a class never runs as the first."""
    model, x = OneLinear(64), torch.randn(32, 64)
    compiled = fxquant.compile(model, recipe_of(MAKE[kind](2.0)), options={"inner": "aot_eager"})
    first = (compiled(x) - model(x)).norm() / model(x).norm()
    rules = [fxquant.CustomRecipe(qfactory=fxquant.Rules([fxquant.Rule(MAKE[kind](n))])) for n in (2.0, 2e4)]
    for recipe in rules:
        fxquant.set_recipe(compiled, recipe)
        error = (compiled(x) - model(x)).norm() / model(x).norm()
        assert error < 1e-3 if recipe is rules[1] else torch.equal(error, first)
    assert first > 0.1 and rules[0] != rules[1]


def test_a_held_table_trains_and_is_exported() -> None:
    model, x, recipe = OneLinear(64), torch.randn(32, 64), recipe_of(MAKE["a tensor"](256.0))
    step(model, MAKE["a tensor"](256.0), x).sum().backward()
    program = fxquant.quantize_program(torch.export.export(model, (x,)), recipe)
    for module in (program.module(), fxquant.lower_program(program).module()):
        assert (module(x) - model(x)).norm() / model(x).norm() < 0.02


class Held(Levels):
    """Changes what it holds while it quantizes."""

    def __init__(self, how: str) -> None:
        self.how, self.calls, self.amax = how, 1, torch.ones(())

    def levels(self) -> Any:
        if self.how == "calls":
            self.calls += 1
        if self.how == "amax":
            self.amax = self.amax * 2
        if self.how == "in place":
            self.amax.mul_(2)
        return self.calls


class Wrong(Levels):
    def __init__(self, how: str) -> None:
        self.how = how

    def quantize(self, x: Tensor, *, rowwise: bool = True, columnwise: bool = True) -> Any:
        if self.how == "writes":
            x.mul_(2)
        half: Any = [x] if self.how == "list" else QuantizedOperand(x, 2.0 if self.how == "number" else None)  # type: ignore[arg-type]
        return (x, x.mT) if self.how == "tuple" else QuantizedTensor(half, half)

    def dequantize(self, operand: QuantizedOperand) -> Any:
        values = {"none": None, "bool": operand.data > 0, "complex": operand.data * 1j, "meta": operand.data.to("meta")}
        return values.get(self.how, operand.data)


def test_a_quantizer_that_counts_its_calls_is_told_that_it_counts_traces() -> None:
    with pytest.warns(fxquant.FxQuantWarning, match="Held changes its attribute 'calls' while it quantizes"):
        step(OneLinear(64), Held("calls"), torch.randn(32, 64))


@pytest.mark.parametrize(
    ("quantizer", "message"),
    [
        (Held("amax"), "changes its attribute 'amax' while it quantizes"),
        (Held("in place"), "a tensor that is held across calls is written to"),
        (Wrong("writes"), "quantize writes into its input"),
        (Wrong("tuple"), "has to give a QuantizedTensor.*not a tuple"),
        (Wrong("list"), "has to give a QuantizedOperand.*not a list"),
        (Wrong("number"), "consists of tensors, and that of Wrong has 2.0"),
        (Wrong("none"), "dequantize gave a NoneType"),
        (Wrong("bool"), "dequantize gave torch.bool"),
        (Wrong("complex"), "dequantize gave torch.complex64"),
        (Wrong("meta"), "its values are on meta, and have to be on cpu"),
    ],
    ids=lambda value: value.how if isinstance(value, Levels) else "",
)
def test_what_no_graph_can_have_is_refused_with_layer_and_quantizer(quantizer: Quantizer, message: str) -> None:
    with pytest.raises(RecipeError, match=rf"layer 'fc': {type(quantizer).__name__}, rowwise, of input .*{message}"):
        step(OneLinear(64), quantizer, torch.randn(32, 64))
