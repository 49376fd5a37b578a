"""`fxquant.bisect`: the operands that break a check, in few runs."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import fxquant
from fxquant import (
    CustomRecipe,
    DelayedScaling,
    Float8CurrentScaling,
    HybridQuantizer,
    MXFP8BlockScaling,
    MXFP8Quantizer,
    QuantizedTensor,
    Quantizer,
    QuantizerRole,
    Recipe,
    Rule,
    Rules,
)
from fxquant.errors import ArgumentError, OptionError, RecipeError
from fxquant.quantizers import QuantizedOperand
from fxquant.recipes.operands import Operand, PerOperand
from fxquant.tools.bisect import Unit, _Search
from fxquant.tools.trials import Trials, operands_of

LAYERS = 12


@dataclass(frozen=True)
class Times(Quantizer):
    """Keeps values times a factor."""

    factor: float

    def quantize(self, x: Tensor, *, rowwise: bool = True, columnwise: bool = True) -> QuantizedTensor:
        def half(t: Tensor) -> QuantizedOperand:
            return QuantizedOperand(t * self.factor)

        return QuantizedTensor(half(x) if rowwise else None, half(x.mT) if columnwise else None)

    def dequantize(self, operand: QuantizedOperand) -> Tensor:
        return operand.data


def deep() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(LAYERS))), torch.randn(16, 16)


def planted(*places: tuple[str, str, str], factor: float = float("nan")) -> CustomRecipe:
    """MXFP8, but for operands that are multiplied by a factor."""

    def qfactory(role: QuantizerRole) -> Quantizer:
        sides = [d for d in ("rowwise", "columnwise") if (role.name, role.tensor_type, d) in places]
        row, column = (Times(factor) if d in sides else MXFP8Quantizer() for d in ("rowwise", "columnwise"))
        return HybridQuantizer(row, column) if sides else MXFP8Quantizer()

    return CustomRecipe(qfactory=qfactory)


def test_a_planted_operand_of_12_layers_is_found_in_3_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXQUANT_VERIFY", "0")
    model, x = deep()
    counted, place = list[int](), ("7", "weight", "rowwise")

    def check(model: nn.Module, x: Tensor) -> bool:
        counted.append(1)
        with torch.no_grad():
            return bool(model(x).isfinite().all())

    assert fxquant.bisect(model, x, planted(place), check) == [place]
    assert len(counted) == 3, "its error is the largest"
    counted.clear()
    few, place = model[:4], ("2", "weight", "rowwise")
    assert fxquant.bisect(few, iter([x]), planted(place), lambda model, _: check(model, x)) == [place]
    assert len(counted) <= 4 + 3, "in the model's order"


def test_a_check_may_train() -> None:
    """The model and the random state are as before."""
    model, x = nn.Sequential(*(nn.Linear(16, 16) for _ in range(2))), torch.randn(16, 16)
    before, random = [p.clone() for p in model.parameters()], torch.get_rng_state()
    place = ("1", "grad_output", "columnwise")

    def check(model: nn.Module, x: Tensor) -> bool:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        model(x).square().mean().backward()
        optimizer.step()
        return all(bool(parameter.isfinite().all()) for parameter in model.parameters())

    assert fxquant.bisect(model, x, planted(place), check) == [place]
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    assert torch.equal(random, torch.get_rng_state()) and all(p.grad is None for p in model.parameters())


def test_two_operands_that_break_only_together_are_both_named() -> None:
    model, x = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3))), torch.randn(16, 16)
    places = [("0", "input", "rowwise"), ("2", "weight", "rowwise")]
    recipe = planted(*places, factor=3.0)
    exact = model(x).norm()

    def small(compiled: nn.Module, x: Tensor) -> None:
        with torch.no_grad():
            assert compiled(x).norm() < 4 * exact

    assert sorted(fxquant.bisect(model, x, recipe, small)) == places


def test_a_check_may_copy_the_model() -> None:
    """Each run compiles then; the check evaluates without gradients besides."""
    model, x = nn.Sequential(*(nn.Linear(16, 16) for _ in range(2))), torch.randn(16, 16)
    place = ("1", "weight", "rowwise")

    def finite(compiled: nn.Module, x: Tensor) -> bool:
        with torch.no_grad():
            return bool(copy.deepcopy(compiled).eval()(x).isfinite().all())

    assert fxquant.bisect(model, x, planted(place), finite) == [place]


class Hidden(nn.Module):
    """An attention and experts, in which two channels of q, and of the experts' input, hide all others."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.weight = nn.Linear(16, 48), nn.Parameter(torch.randn(2, 16, 16) / 8)
        self.register_buffer("scale", torch.ones(16))
        self.scale[[3, 9]] = 2.0**20
        with torch.no_grad():
            self.weight.div_(self.scale[:, None])

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part[None, None] for part in self.qkv(x).chunk(3, -1))
        x = x + nn.functional.scaled_dot_product_attention(9 * q * self.scale, k / self.scale, v)[0, 0]
        rows, ends = (x * self.scale).bfloat16(), torch.tensor([8, 32], dtype=torch.int32)
        return x + nn.functional.grouped_mm(rows, self.weight.bfloat16(), offs=ends).float()


def test_an_attention_and_experts_that_break_only_together_are_both_named() -> None:
    torch.manual_seed(0)
    model, x, counted = Hidden(), torch.randn(32, 16), list[float]()
    exact, places = model(x), [("", "input", "rowwise"), ("", "qkv", "rowwise"), ("", "s", "rowwise")]
    rules = Rules([Rule(fxquant.IdentityQuantizer(), module_type="linear")], default=Float8CurrentScaling(fp8_dpa=True))
    recipe = CustomRecipe(qfactory=rules, fp8_dpa=True)

    def near(compiled: nn.Module, x: Tensor) -> bool:
        with torch.no_grad():
            counted.append(float((compiled(x) - exact).norm() / exact.norm()))
        return counted[-1] < 0.85 * max(counted[:2]) + 1e-6

    assert sorted(fxquant.bisect(model, x, recipe, near)) == places
    assert len(counted) <= 6


@pytest.mark.parametrize("place", [0, 1, 63, 64, 1343])
def test_few_runs_find_one_of_many_operands(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search among 32 layers of 7 linears takes 12 runs for an early one, with both recipes and the probe."""
    trials, counted = Trials(nn.Linear(1, 1)), list[int]()
    search = _Search(trials, MXFP8BlockScaling(), lambda _: True, None)
    units = [(Operand(str(i), "weight", "rowwise"),) for i in range(7 * 6 * 32)]

    def breaks(chosen: Sequence[Unit]) -> bool:
        counted.append(1)
        return units[place] in chosen

    monkeypatch.setattr(search, "breaks", breaks)
    assert search.among(units) == [units[place]]
    assert len(counted) <= (9 if place < 64 else 14)


def test_checks_that_need_no_function() -> None:
    model, x = nn.Sequential(*(nn.Linear(16, 16) for _ in range(2))), torch.randn(16, 16)
    place = ("1", "weight", "columnwise")
    assert fxquant.bisect(model, [x, (x,)], planted(place)) == [place]
    assert fxquant.bisect(model, x, planted(place, factor=2.0), {"differs": 0.5}) == [place]
    assert fxquant.bisect(model, x, "mxfp8", {"differs": 0.5}) == []

    def loss(x: Tensor) -> Tensor:
        return model(x).square().mean()

    front = ("0", "input", "rowwise")
    assert fxquant.bisect(loss, {"x": x}, planted(front, factor=9.0), {"loss": 2 * loss(x).item()}) == [front]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part[None] for part in self.qkv(x).chunk(3, -1))
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v)[0])


@pytest.mark.parametrize("name", ["delayed_scaling", "nvfp4", "mxfp8"])
def test_a_recipe_for_one_operand_quantizes_it_alone(name: str) -> None:
    """The slots of an attention count as one, and so do both directions of a delayed scale."""
    recipes = {"delayed_scaling": DelayedScaling(fp8_dpa=True), "mxfp8": MXFP8BlockScaling(fp8_dpa=True)}
    model, x, recipe = Block(), torch.randn(32, 32), recipes.get(name) or fxquant.recipes.get(name)

    def quantized(recipe: Recipe) -> list[tuple[Operand, ...]]:
        decisions = fxquant.explain(model, recipe, x).decisions
        return operands_of(decisions, recipe)

    units = quantized(recipe)
    assert len(units) == {"delayed_scaling": 7, "nvfp4": 10, "mxfp8": 11}[name]
    for unit in units[:: 3 if name == "nvfp4" else 4]:
        (alone,) = quantized(PerOperand.of([recipe], dict.fromkeys(unit, 0)))
        assert set(alone) == set(unit)
    both = PerOperand.of([fxquant.recipes.get("mxfp8"), fxquant.recipes.get("rowwise")], {**dict.fromkeys(units[0], 1)})
    assert (
        pickle.loads(pickle.dumps(both)) == both
        and both.fingerprint() == pickle.loads(pickle.dumps(both)).fingerprint()
    )


def test_what_cannot_be_bisected_is_said() -> None:
    model, x = nn.Linear(16, 16), torch.randn(16, 16)
    with pytest.raises(ArgumentError, match="did you mean 'nan'"):
        fxquant.bisect(model, x, "mxfp8", "NaN")
    with pytest.raises(ArgumentError, match="must be a number"):
        fxquant.bisect(model, x, "mxfp8", {"loss": "low"})
    with pytest.raises(OptionError, match="does not hold for the unquantized model either: output 0 of batch 0"):
        fxquant.bisect(model, x / 0, "mxfp8")
    with pytest.raises(RecipeError, match="quantizes nothing"):
        fxquant.bisect(model, x, "high_precision")
    with pytest.raises(OptionError, match="returns no loss"):
        fxquant.bisect(model, x, "mxfp8", {"loss": 1.0})
