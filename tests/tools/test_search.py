"""`fxquant.search`: formats under a budget, a recipe as Python, and what was planted is protected."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from probed import Heavy
from torch import Tensor, nn

import fxquant
from fxquant import QuantizedTensor, QuantizerRole, recipes
from fxquant.errors import ArgumentError, OptionError
from fxquant.quantizers import QuantizedOperand
from fxquant.recipes.operands import Operand
from fxquant.recipes.source import python_of
from fxquant.tools.cut import best_of, not_worse
from fxquant.tools.outliers import Place, Seen, outliers
from fxquant.tools.patterns import name_pattern, recipe_of
from fxquant.tools.result import Point, SearchResult, against
from fxquant.tools.sensitivity import Sensitivity, unfit
from fxquant.tools.training import OutOfTime, Training, adamw
from fxquant.tools.wanted import candidates_of

LAYERS = [f"blocks.{i}.{end}" for i in range(6) for end in ("attn.q", "attn.k", "mlp.up", "mlp.down")] + ["head"]


@pytest.mark.parametrize(
    ("names", "pattern"),
    [
        (["blocks.1.mlp.up", "blocks.3.mlp.up"], r"blocks\.(1|3)\.mlp\.up"),
        ([f"blocks.{i}.mlp.up" for i in range(6)], r"blocks\.\d+\.mlp\.up"),
        ([f"blocks.{i}.attn.{end}" for i in range(6) for end in "qk"], r"blocks\.\d+\.attn\.(q|k)"),
        (["head", "blocks.0.mlp.up", "blocks.0.mlp.down"], r"head|blocks\.0\.mlp\.(up|down)"),
        (["blocks.2.mlp.down", "blocks.0.mlp.up"], r"blocks\.2\.mlp\.down|blocks\.0\.mlp\.up"),
    ],
)
def test_names_have_a_pattern(names: list[str], pattern: str) -> None:
    others = set(LAYERS) - set(names)
    assert name_pattern(names, others) == pattern
    assert all(re.fullmatch(pattern, name) for name in names)
    assert not any(re.fullmatch(pattern, name) for name in others)


def test_choices_become_rules_that_answer_alike() -> None:
    """What is usual needs no name, and the text of the recipe makes an equal one."""
    candidates = [recipes.get("nvfp4"), recipes.get("mxfp8")]
    roles = {
        Operand(layer, role, direction): QuantizerRole("linear", role, layer)
        for layer in LAYERS
        for role in ("input", "weight", "grad_output")
        for direction in ("rowwise", "columnwise")
    }
    chosen: dict[Operand, int | None] = dict.fromkeys(roles, 0)
    chosen[Operand("blocks.1.mlp.up", "input", "rowwise")] = None
    for direction in ("rowwise", "columnwise"):
        chosen[Operand("head", "weight", direction)] = chosen[Operand("head", "input", direction)] = 1
    recipe = recipe_of(candidates, chosen, roles)
    for operand, index in chosen.items():
        answer = recipe.quantizer(roles[operand])
        assert isinstance(answer, fxquant.Quantizer)
        direction = fxquant.Direction(operand.direction)
        wanted = None if index is None else candidates[index].quantizer(roles[operand])
        assert str(answer.spec(direction)) == ("identity" if wanted is None else str(wanted.spec(direction)))  # type: ignore[union-attr]
    scope: dict[str, Any] = {}
    exec(python_of(recipe), scope)
    assert scope["recipe"] == recipe and len(recipe.qfactory.rules) == 2  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Rounds(fxquant.Quantizer):
    """A format of one's own, in which rules may answer."""

    steps: int = 4

    def quantize(self, x: Tensor, *, rowwise: bool = True, columnwise: bool = True) -> QuantizedTensor:
        halves = (x if rowwise else None, x.mT if columnwise else None)
        return QuantizedTensor(
            *(None if half is None else QuantizedOperand((half * self.steps).round()) for half in halves)
        )

    def dequantize(self, operand: QuantizedOperand) -> Tensor:
        return operand.data / self.steps


def test_candidates_are_recipes_or_quantizers_which_tables_name() -> None:
    six = fxquant.BlockQuantizer("e2m3")
    named = candidates_of({"mine": six, "theirs": "mxfp8"})
    assert list(named) == ["mine", "theirs"] and named["theirs"] == recipes.get("mxfp8")
    assert list(candidates_of([six, Rounds(), recipes.auto("mxfp8"), "mxfp8"])) == [
        "BlockQuantizer(element='e2m3')",
        "Rounds()",
        "mxfp8",
    ]
    assert named["mine"].quantizer(QuantizerRole("grouped_linear", "weight", "x")) == six
    assert isinstance(named["mine"].quantizer(QuantizerRole("dpa", "qkv", "x")), fxquant.IdentityQuantizer)
    with pytest.raises(fxquant.FxQuantError, match="called by texts, not by 3"):
        candidates_of({3: six})


@pytest.mark.parametrize("candidate", ["mxfp8", fxquant.BlockQuantizer("e2m3"), Rounds()])
def test_one_candidate_everywhere_is_python_that_makes_it(candidate: Any) -> None:
    roles = {
        Operand("up", role, direction): QuantizerRole("linear", role, "up")
        for role in ("input", "weight", "grad_output")
        for direction in ("rowwise", "columnwise")
    }
    candidates = list(candidates_of(candidate).values())
    recipe = recipe_of(candidates, dict.fromkeys(roles, 0), roles)
    scope: dict[str, Any] = {}
    exec(python_of(recipe), scope)
    assert scope["recipe"] == recipe and "HighPrecision" not in python_of(recipe)
    for role in (*roles.values(), QuantizerRole("dpa", "qkv", "attention")):
        assert str(recipe.quantizer(role)) == str(candidates[0].quantizer(role))


WIDTH = 32


class Block(nn.Module):
    """A residual block, some channels of whose input are larger, and their weights smaller."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))
        self.scale[::8] = factor
        with torch.no_grad():
            self.up.weight.div_(self.scale)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x) * self.scale)))


def planted(*places: int, depth: int = 2) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(2.0**8 if i in places else 1.0) for i in range(depth)))
    teacher = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, WIDTH))
    inputs = [torch.randn(64, WIDTH) for _ in range(8)]
    return model, [(x, teacher(x).detach() + 0.3 * torch.randn(64, WIDTH)) for x in inputs]


class Tailed(Block):
    """A block whose first linear has a gradient with a heavy tail."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self.register_buffer("factors", torch.tan(math.pi * (torch.rand(64, 64) - 0.5)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(Heavy.apply(self.up(self.norm(x)), self.factors)))


def test_three_faults_at_once_are_protected_and_nothing_else() -> None:
    """Channels in two layers' inputs, whose weights are small there, and a gradient with a heavy tail in a third."""
    _, data = planted(depth=1)
    data = [(x, y + torch.randn_like(y)) for x, y in data]
    model = nn.Sequential(Tailed(), Block(2.0**8), Block(1.0), Block(2.0**8))
    result = searched(model, data, {"loss": 0.005}, candidates=["nvfp4", "mxfp8"], steps=8)
    planted_places = {
        ("1.up", "input"),
        ("3.up", "input"),
        ("1.up", "weight"),
        ("3.up", "weight"),
        ("0.up", "grad_output"),
    }
    assert {operand[:2] for operand in result.protected} == planted_places
    assert result.gap < 0.005 < result.uniform[0].gap and result.coverage == 1.0
    assert result.cost["bits"] < 5.1
    assert result.against["nvfp4"].startswith("beaten, since it does not keep loss 0.005: a loss of")
    assert result.against["mxfp8"].startswith("beaten by bits, both keep the loss: ")
    assert "mxfp8 everywhere is beaten by bits" in str(result).replace("\n# ", " ")
    assert set(result.why) >= set(result.protected)
    assert all(result.why[one].startswith("nvfp4: ") for one in result.protected)
    hidden = "nvfp4: a few large elements hide others, of which"
    assert hidden in result.why[Operand("0.up", "grad_output", "rowwise")] and hidden in " ".join(str(result).split())


class Scaled(nn.Module):
    """A residual block, some rows of whose gradient are larger, and those of the input smaller."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64, bias=False), nn.Linear(64, WIDTH)
        self.register_buffer("scale", torch.ones(64, 1))
        self.scale[::8] = factor

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x) / self.scale) * self.scale))


def test_operands_that_only_gradients_mind_are_protected() -> None:
    """Rows of a gradient that are 2^8 times larger hurt the product over rows, the gradient of the weight."""
    _, data = planted(depth=1)
    model = nn.Sequential(Scaled(2.0**8), Scaled(1.0))
    result = searched(model, data, {"loss": 0.01}, candidates=["nvfp4", "mxfp8"], steps=8)
    hurt = {Operand("0.up", role, "columnwise") for role in ("input", "grad_output")}
    assert {
        operand for operand, candidate in result.chosen.items() if candidate == "nvfp4"
    } == result.chosen.keys() - hurt
    assert {effect[:3] for effect in map(astuple, result.effects[:2])} == hurt
    assert not result.kept and result.gap < 0.01 and result.coverage == 1.0


def test_candidates_are_unfit_where_more_is_lost_than_usual() -> None:
    """An error in one step, or one that hurts nothing though it is many times that of a fine format, is no outlier."""

    def row(
        layer: str, role: str, error: float, elements: float = 0.2, candidate: int = 0, kurtosis: float = 3.0,
        sqnr: float = 20.0, exponents: dict[int, int] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        names = {"layer": layer, "role": role, "direction": "rowwise", "candidate": str(candidate), "whatif": True}
        lost = {"product_error": error, "cosine": math.sqrt(1 - error**2), "relative_error": elements}
        return {**names, **lost, "sqnr": sqnr, "kurtosis": kurtosis, "exponents": exponents}

    places = [(f"{i}.up", role) for i in range(5) for role in ("input", "grad_output")]
    rows = [row(*place, 0.1 + 0.01 * (i % 3)) for i, place in enumerate(places) for _ in range(2)]
    rows += [row(layer, role, 0.01, candidate=1) for layer, role in places] + [row("5.up", "input", 0.1, candidate=1)]
    rows += [row("5.up", "input", 0.7), row("5.up", "input", 0.8), row("6.up", "input", 0.1), row("6.up", "input", 0.3)]
    rows += [row("7.up", "grad_output", 0.1, 0.4, 0, 200.0), row("8.up", "grad_output", 0.05, 0.3, 0, 50.0, 26.0)]
    rows += [row(f"{i}.down", "grad_output", 0.1, 0.4, 0, 200.0) for i in range(3)]  # as all of their name
    rows += [row("9.up", "input", 0.25, kurtosis=200.0)]  # less of an error, and a tail
    rows += [row("head", "grad_output", 0.1, 0.5, 0, 200.0, exponents={-8: 64, -15: 6000})]  # of a loss over classes
    levels = {(*operand[:2], i): level for (operand, i), level in unfit(Sensitivity.of(rows)).items()}
    hurt = [("5.up", "input", 0), ("7.up", "grad_output", 0), ("8.up", "grad_output", 0), ("9.up", "input", 0)]
    assert levels == dict.fromkeys(hurt, 2) | dict.fromkeys([("6.up", "input", 0), ("5.up", "input", 1)], 1)
    rows[-1]["exponents"] = {-1: 1, -2: 3, -8: 64, -15: 6000}  # which thin out
    assert unfit(Sensitivity.of(rows))[Operand("head", "grad_output", "rowwise"), 0] == 2


def test_of_several_products_of_a_layer_the_one_that_loses_most_counts() -> None:
    """Experts have two of a name in each step."""
    names = {"layer": "experts", "role": "input", "direction": "rowwise", "candidate": "0", "whatif": True}
    rows = [
        {**names, "step": step, "product_error": None, "sqnr": 20.0, "relative_error": elements}
        for step in (0, 7)
        for elements in (0.5, 0.3)
    ]
    (steps,) = Sensitivity.of(rows).steps.values()
    assert [one.elements for one in steps] == [0.5, 0.5]


def test_large_rows_of_a_gradient_count_where_they_begin() -> None:
    """They hide others in columns; layers before inherit them, none if one behind has a tail."""
    layers, large = [f"{i}.up" for i in range(6)], range(4)
    places = {
        (layer, d): Place(layer, "grad_output", d, "nvfp4") for layer in layers for d in ("rowwise", "columnwise")
    }
    seen = {key: [Seen(0.1, 0.2, 0.14, 3.0)] for key in places}
    for i in large:
        seen[layers[i], "rowwise"] = [Seen(0.1, 0.2, 0.14, 90.0)]
        seen[layers[i], "columnwise"] = [Seen(0.1, 0.4 + 0.1 * (i == 0), 0.1, 90.0)]
    assert outliers(seen, places) == {("3.up", "columnwise"): (pytest.approx(2.0), "rows")}
    seen["5.up", "rowwise"] = [Seen(0.1, 0.5, 0.1, 200.0)]
    assert outliers(seen, places).keys() == {("5.up", "rowwise")}


@pytest.mark.parametrize("columns", [Seen(0.1, 0.13, 0.14, 9.0), Seen(0.1, 0.2, 0.07, 9.0)])
def test_large_rows_count_where_columns_are_transformed(columns: Seen) -> None:
    """Less is lost of these, and rows lose what they always do; rows of padding, and single elements, are no such."""
    layers = [f"{i}.up" for i in range(6)]
    places = {
        (layer, d): Place(layer, "grad_output", d, "nvfp4") for layer in layers for d in ("rowwise", "columnwise")
    }
    seen = {key: [Seen(0.1, 0.2, 0.14, 3.0)] for key in places}
    large = {(layer, d): [Seen(0.1, 0.2, 0.14, 90.0)] for layer in layers[:4] for d in ("rowwise",)}
    seen |= large | {("3.up", "columnwise"): [columns]}
    assert {key: one.sign for key, one in outliers(seen, places).items()} == {("3.up", "columnwise"): "rows"}
    assert not outliers(seen | {("3.up", "rowwise"): [Seen(0.1, 0.2, 0.14, 90.0, 0, 0.9)]}, places)
    assert outliers(seen | {("4.up", "rowwise"): [Seen(0.1, 0.2, 0.05, 2000.0)]}, places).keys() == {
        ("4.up", "rowwise")
    }


def test_layers_before_a_tail_inherit_it() -> None:
    """A few elements that have nearly all of the norm are a tail, however little others lose; a lesser before is none.

    A loss over classes has rows with one large element, and no large rows.
    """
    layers = [f"{i}.up" for i in range(6)]
    places = {
        (layer, d): Place(layer, "grad_output", d, "nvfp4") for layer in layers for d in ("rowwise", "columnwise")
    }
    seen = {key: [Seen(0.1, 0.2, 0.14, 3.0)] for key in places}
    lesser = {("1.up", "rowwise"): [Seen(0.1, 0.3, 0.14, 200.0)]}
    assert outliers(seen | lesser, places).keys() == lesser.keys()
    begins = {("3.up", "rowwise"): [Seen(0.1, 0.2, 0.06, 2000.0)]}
    assert outliers(seen | lesser | begins, places).keys() == begins.keys()
    assert outliers(seen | begins | {("4.up", "rowwise"): lesser["1.up", "rowwise"]}, places).keys() == {
        ("3.up", "rowwise"),
        ("4.up", "rowwise"),
    }
    classes = {("5.up", d): [Seen(0.1, 0.33, 0.14, 61.0, 128)] for d in ("rowwise", "columnwise")}
    assert not outliers(seen | classes | {("5.up", "columnwise"): [Seen(0.1, 0.2, 0.07, 9.0)]}, places)


def searched(model: nn.Module, data: Sequence[Any], budget: dict[str, float], **settings: Any) -> SearchResult:
    candidates = settings.pop("candidates", ["nvfp4"])
    return fxquant.search(model, data, F.mse_loss, candidates, budget, **{"steps": 12, **settings})


def test_planted_outliers_are_protected(tmp_path: Path) -> None:
    """By a search that goes on from its file, and gives an equal recipe, as Python too."""
    model, data = planted(1)
    before = [p.clone() for p in model.parameters()]
    result = searched(model, data, {"loss": 0.05}, file=tmp_path / "search.jsonl")
    assert {operand.layer for operand in result.kept} == {"1.up"}
    assert {operand.role for operand in result.kept} <= {"input", "weight"}
    assert result.gap < 0.05 and result.coverage > 0.8
    assert [point.name for point in result.uniform] == ["nvfp4"] and result.uniform[0].loss > result.loss
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    scope: dict[str, Any] = {}
    exec(str(result), scope)
    assert scope["recipe"] == result.recipe
    lines = (tmp_path / "search.jsonl").read_text().splitlines()
    again = searched(model, data, {"loss": 0.05}, file=tmp_path / "search.jsonl")
    assert again.recipe == result.recipe and again.runs == 0
    assert (tmp_path / "search.jsonl").read_text().splitlines() == lines
    with pytest.raises(OptionError, match="is of another search"):
        searched(model, data, {"loss": 0.05}, file=tmp_path / "search.jsonl", seed=1)


def test_budgets_are_kept() -> None:
    model, data = planted(depth=2)
    data = [[*batch] for batch in data]  # as a DataLoader has them
    result = searched(model, data, {"bits": 9.0}, candidates=["nvfp4", "mxfp8"], steps=4, exclude=r"0\.up")
    assert 7.3 < result.cost["bits"] <= 9.0 and {o.layer for o in result.chosen} == {"0.down", "1.up", "1.down"}
    assert result.recipe.quantizer(QuantizerRole("linear", "weight", "0.up")) == fxquant.IdentityQuantizer()
    costs = [point.cost["bits"] for point in result.front]
    assert costs == sorted(costs) and "bits" in result.front_table() and "1.up" in result.table()
    with pytest.raises(OptionError, match="no rates are known"):
        searched(model, data, {"time": 0.9}, steps=2)
    with pytest.raises(OptionError, match=r"no choice of these candidates has bits 3: the least is"):
        searched(model, data, {"bits": 3.0}, steps=0)


def test_inference_has_forward_products_alone() -> None:
    model, data = planted(depth=1)
    result = searched(model, data, {"loss": 10.0}, steps=0)
    assert result.coverage == 1.0 and result.cost["bits"] == 4.5
    assert {operand.direction for operand in result.chosen} == {"rowwise"}


def test_the_time_limit_ends_a_search_with_a_sentence() -> None:
    model, data = planted(1)
    before = [p.clone() for p in model.parameters()]
    result = searched(model, data, {"loss": 0.05}, time_limit=1e-3)
    assert result.runs == 0 and not result.chosen and math.isnan(result.loss) and result.cost["bits"] == 16
    operands = [Operand(layer, role, "rowwise") for role in ("input", "weight") for layer in "abcd"]
    halves = replace(result, chosen={operand: "nvfp4" if i > 1 else "mxfp8" for i, operand in enumerate(operands)})
    assert halves.protected == operands[:2]  # beside as many of their kind with what most operands have
    hurt = frozenset({(operands[0], "nvfp4"), (operands[7], "nvfp4")})
    moved = replace(halves, chosen=dict.fromkeys(operands[:4], "mxfp8") | dict.fromkeys(operands[4:], "nvfp4"))
    assert not moved.protected and replace(moved, outliers=hurt).protected == operands[:1]  # with all of their kind
    assert result.cut.startswith("The time limit of 0.001 s ended the search at: measuring the unquantized model; ")
    assert "loss not measured" in str(result) and result.cut[:60] in str(result)
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("steps", [8, 0])
def test_no_step_begins_behind_the_time_limit(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor a backward: the clock is read before each."""
    clock = iter(range(100))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    calls, model, x = list[int](), nn.Linear(4, 4), torch.randn(2, 4)

    def loss(output: Tensor) -> Tensor:
        calls.append(1)
        return output.square().mean()

    training = Training(model, [x] * 8, loss, steps, adamw, end=2.5)
    with pytest.raises(OutOfTime):
        training.run(model)
    assert len(calls) == (2 if steps else 3)  # a forward, its backward and a forward; or three forwards


@pytest.mark.parametrize("budget", [{"loss": 0.05}, {"bits": 5.0}])
def test_a_search_that_is_cut_returns_the_best_that_was_measured(budget: dict[str, float]) -> None:
    def point(gap: float, bits: float, chosen: int) -> Point:
        return Point({"bits": bits}, 1 + gap, gap, 1.0, {operand: chosen})

    operand = Operand("up", "input", "rowwise")
    points = [point(0.01, 4.0, 0), point(0.02, 5.0, 1), point(0.03, 6.0, 1), point(0.5, 4.5, 2)]
    (kind, limit) = next(iter(budget.items()))
    best = best_of(points, kind, limit, {(operand, 0): 2}, lambda one: one.cost["bits"] <= 5.0)
    assert best == (points[1] if kind == "loss" else points[0])
    assert best_of(points[:1], "loss", 0.05, {(operand, 0): 2}, lambda _: True) is None


def test_a_candidate_everywhere_is_never_better_than_the_result() -> None:
    """Losses that differ by no more than is allowed leave outliers protected, and the result says so."""

    def point(name: str, gap: float, bits: float) -> Point:
        return Point({"bits": bits}, 1 + gap, gap, 1.0, {Operand(name, "input", "rowwise"): 0}, name)

    result, four, eight = point("result", 0.003, 4.7), point("four", -0.07, 4.5), point("eight", 0.0, 8.25)
    best, note = not_worse(replace(result, gap=0.02), [replace(four, gap=0.01)], "loss", 0.005)
    assert best.name == "four" and note.startswith("four everywhere costs no more and has a smaller loss here; what")
    assert not_worse(result, [four, eight], "loss", 0.005)[0] is result, "a loss below the unquantized one is luck"
    best, note = not_worse(result, [replace(four, gap=-0.001), eight], "loss", 0.005)
    assert best is result and "four everywhere keeps the loss here too, with 4.5 bits (-0.10%)" in note
    assert not_worse(result, [replace(four, gap=0.02), eight], "loss", 0.005) == (result, "")
    best, note = not_worse(replace(result, gap=0.01), [four, eight], "loss", 0.005)
    assert best is four and "keeps the loss; what the search chose is at +1.00%" in note
    assert not_worse(result, [four, eight], "bits", 5.0)[0] is four
    assert not_worse(result, [replace(four, gap=0.02), eight], "bits", 5.0) == (result, "")


@pytest.mark.parametrize(
    ("kind", "limit", "gap", "bits", "said"),
    [
        (
            "loss",
            0.005,
            0.03,
            4.5,
            "beaten, since it does not keep loss 0.005: a loss of +0.20% instead of +3.00%, 5 in",
        ),
        ("loss", 0.005, 0.001, 8.25, "beaten by bits, both keep the loss: 5 instead of 8.25 bits, a loss of +0.20%"),
        ("loss", 0.005, 0.001, 4.5, "not beaten, both keep the loss: 5 instead of 4.5 bits"),
        ("loss", 0.001, 0.0, 4.5, "not beaten: a loss of +0.20% instead of +0.00%"),
        ("bits", 6.0, 0.0, 8.25, "beaten, since it does not keep bits 6: a loss of +0.20%"),
        ("bits", 6.0, 0.03, 4.5, "beaten by the loss, both keep bits 6: a loss of +0.20% instead of +3.00%"),
        ("bits", 6.0, 0.0, 4.5, "not beaten, both keep bits 6"),
    ],
)
def test_a_result_says_by_what_it_beats_a_candidate(
    kind: str, limit: float, gap: float, bits: float, said: str
) -> None:
    point = Point({"bits": bits}, 1 + gap, gap, 1.0, {}, "four")
    assert against(0.002, {"bits": 5.0}, point, kind, limit).startswith(said)


def test_what_cannot_be_searched_is_said() -> None:
    model, data = planted(depth=1)
    for budget in ({"bit": 4.0}, {"bits": 4.0, "loss": 0.1}, {"bits": 0.0}, 6.0):
        with pytest.raises(ArgumentError, match=r"fxquant\.search: "):
            searched(model, data, budget)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="did you mean 'exclude'"):
        searched(model, data, {"bits": 6.0}, excludes="head")
    with pytest.raises(OptionError, match="the loss must be a tensor with one element"):
        fxquant.search(model, [x for x, _ in data])
    with pytest.raises(ArgumentError, match="needs candidates"):
        searched(model, data, {"bits": 6.0}, candidates=["high_precision"])
