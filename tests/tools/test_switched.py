"""Runs of a model that is compiled once have the bits of recipes that are compiled for the chosen operands alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import Region
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxquant
from fxquant import Recipe
from fxquant.recipes import HighPrecision, resolve
from fxquant.recipes.operands import Operand, PerOperand
from fxquant.tools.bisect import _results
from fxquant.tools.switched import NotSwitchable, SwitchedModel, may_switch
from fxquant.tools.trials import Trials, operands_of
from tests.tools.test_bisect import planted


class Model(nn.Module):
    """A checkpoint, dropout, experts, a region and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.up, self.down = nn.Embedding(32, 16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.experts, self.dropout = nn.Parameter(torch.randn(2, 16, 16) / 4), nn.Dropout(0.2)

    def body(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(F.gelu(self.up(x))))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + checkpoint(self.body, x, use_reentrant=False)
        ends = torch.stack([torch.tensor(8), torch.tensor(len(tokens))]).int()
        x = x + F.grouped_mm(x.bfloat16(), self.experts.bfloat16(), offs=ends).float()
        return F.linear(x, self.embedding.weight)


class Attention(nn.Module):
    """Two attentions, with a mask that takes gradients and with what torch has no kernel for."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.mask = nn.Linear(16, 48), nn.Parameter(torch.randn(32, 32))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part[:, None] for part in self.qkv(x).chunk(3, -1))
        x = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.scaled_dot_product_attention(x, k, v, self.mask)[:, 0]


def trained(compiled: Any, model: nn.Module, data: Any) -> dict[str, Tensor]:
    """The outputs and gradients of two steps."""
    results = {}
    for step in range(2):
        results |= {f"{name} of step {step}": x for name, x in _results(compiled, model, data).items()}
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    return results


def assert_bits(trials: Trials, data: Any, recipe: Recipe, model: SwitchedModel, chosen: Iterable[Operand]) -> None:
    """Compares a switched run with one of a recipe that is compiled for the same operands."""
    chosen = [*chosen]
    alone = PerOperand.of([recipe], dict.fromkeys(chosen, 0)) if chosen else HighPrecision()
    mine = model.run(chosen, lambda compiled: trained(compiled, trials.model, data))
    its = trials.run(alone, lambda compiled: trained(compiled, trials.model, data))
    assert mine.keys() == its.keys()
    for name, x in mine.items():
        torch.testing.assert_close(x, its[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["nvfp4", "delayed_scaling", "own"])
def test_a_switched_run_has_the_bits_of_a_compiled_recipe(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the model every third operand, so that no layer is quantized as a whole."""
    monkeypatch.setenv("FXQUANT_VERIFY", "0")
    torch.manual_seed(0)
    model, data = Model(), [torch.randint(32, (rows,)) for rows in ((32, 48) if name == "own" else (32,))]
    places = [("up", "input", "rowwise"), ("down", "grad_output", "columnwise")]
    recipe = planted(*places) if name == "own" else resolve(name)
    trials = Trials(model)
    switched = SwitchedModel(trials, recipe)
    switched.run(None, lambda compiled: trained(compiled, model, data))
    units = operands_of(trials.decisions, recipe)
    assert_bits(trials, data, recipe, switched, (operand for unit in units[1::3] for operand in unit))


@pytest.mark.parametrize("name", ["current_scaling", "delayed_scaling", "mxfp8"])
def test_attention_is_switched_too(name: str) -> None:
    torch.manual_seed(0)
    model, x, recipe = Attention(), torch.randn(2, 32, 16), replace(resolve(name), fp8_dpa=True)
    trials = Trials(model)
    switched = SwitchedModel(trials, recipe)
    switched.run(None, lambda compiled: compiled(x).sum().backward())
    units = operands_of(trials.decisions, recipe)
    attention = next(unit for unit in units if unit[0].role == "qkv")
    for chosen in (attention, units[1]):
        assert_bits(trials, x, recipe, switched, chosen)


def test_a_whole_bisection_compiles_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once to switch, and once to be sure of the answer; equal regions have names of their own."""
    kinds, compile = list[str](), Trials.compiled_by

    def compiled_by(trials: Trials, kind: type, recipe: Recipe) -> Any:
        kinds.append(kind.__name__)
        return compile(trials, kind, recipe)

    monkeypatch.setattr(Trials, "compiled_by", compiled_by)
    model, place = nn.Sequential(*(Region() for _ in range(3))), ("1.inner", "grad_output", "rowwise")
    assert fxquant.bisect(model.eval(), [torch.randn(16, 16)], planted(place)) == [place]
    assert kinds == ["SwitchedBackend", "QuietBackend"]


class Twice(nn.Module):
    """A layer in two graphs, of which one has another one's random numbers besides."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        torch._dynamo.graph_break()
        return self.second(y) + self.first(y)


def test_what_cannot_be_switched_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a check catches every error; and if a switched run is wrong, the answer is right."""
    model, x = Twice(), torch.randn(16, 16)

    def finite(compiled: nn.Module, x: Tensor) -> bool:
        try:
            y = compiled(x)
            y.sum().backward()
            return bool(y.isfinite().all())
        except Exception:
            return False

    with pytest.raises(NotSwitchable, match="a state in common"):
        SwitchedModel(Trials(model), resolve("nvfp4")).run((), lambda compiled: finite(compiled, x))
    plain, place, run = (
        nn.Sequential(*(nn.Linear(16, 16) for _ in range(2))),
        ("1", "weight", "rowwise"),
        SwitchedModel.run,
    )
    wrong = lambda self, chosen, use: run(self, chosen, use) if not chosen else "wrong"  # noqa: E731
    monkeypatch.setattr(SwitchedModel, "run", wrong)
    monkeypatch.setattr(SwitchedModel, "errors", lambda self, use: {Operand("0", "input", "rowwise"): 1.0})
    assert fxquant.bisect(plain, x, planted(place)) == [place]
    assert not may_switch(resolve("auto(mxfp8)"), {"inner": "aot_eager"})
    assert not may_switch(resolve("mxfp8"), {"inner": "inductor"})
