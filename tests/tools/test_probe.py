"""Probes: what they measure is what quantizers do to the same tensors, once a step, and costs nothing when off."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Region
from probed import EAGER, Heavy, Own, assert_row, by_operand, cosine, error, expected, seen
from ranks import Ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxquant
from fxquant import (
    BlockQuantizer,
    CustomRecipe,
    Float8CurrentScalingQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    OptionError,
    Quantizer,
    QuantizerRole,
)
from fxquant.kernels.cast.ops import quantize_operand
from fxquant.kernels.probe import reference
from fxquant.probes import statistics
from fxquant.recipes import Rule, Rules


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    """x, w and dy of a linear, with values that underflow."""
    generator = torch.Generator().manual_seed(0)
    x, w, dy = (torch.randn(shape, generator=generator) for shape in ((64, 96), (32, 96), (64, 32)))
    x[:, 3] *= 2.0**8
    dy[5] *= 2.0**-14
    return x, w, dy


def linear(recipe: Any, x: Tensor, w: Tensor) -> tuple[Callable[..., Any], Tensor]:
    layer = nn.Linear(w.shape[1], w.shape[0], bias=False)
    with torch.no_grad():
        layer.weight.copy_(w)
    return fxquant.compile(layer, recipe, options=EAGER), x.clone().requires_grad_()


TRIED = (NVFP4Quantizer(), BlockQuantizer("e2m3"), Own())


@pytest.mark.parametrize(
    "quantizer", [Float8CurrentScalingQuantizer(), MXFP8Quantizer(), NVFP4Quantizer(), Own()], ids=str
)
def test_statistics_are_those_of_an_eager_computation(quantizer: Quantizer) -> None:
    x, w, dy = tensors()
    recipe = CustomRecipe(qfactory=Rules([Rule(quantizer, module_type="linear")]))
    run, x = linear(recipe, x, w)
    with fxquant.probe(run, every=1, whatif=TRIED) as log:
        run(x).backward(dy)
    own = by_operand(log.rows)
    operands = {"input": x.detach(), "weight": w, "grad_output": dy}
    assert set(own) == {(role, d) for role in operands for d in ("rowwise", "columnwise")}
    pairs = {"rowwise": ("input", "weight"), "columnwise": ("grad_output", "input")}
    for (role, direction), row in own.items():
        sides = {key: (t.mT if key[1] == "columnwise" else t) for key in own for t in [operands[key[0]]]}
        q = {key: seen(quantizer, operands[key[0]], key[1]) for key in own}
        assert_row(row, expected(sides[role, direction], q[role, direction]))
        if role in pairs[direction] and not (role, direction) == ("grad_output", "rowwise"):
            left, right = ((name, direction) for name in pairs[direction])
            products = sides[left] @ sides[right].mT, q[left] @ q[right].mT
            assert row["cosine"] == pytest.approx(cosine(*products), rel=1e-5)
            assert row["product_error"] == pytest.approx(error(*products, both=direction == "columnwise"), rel=1e-4)
    for candidate in TRIED:
        name = fxquant.quantizers.base.quantizer_text(candidate)
        tried = by_operand(log.rows, whatif=True, candidate=name)
        for (role, direction), row in tried.items():
            side = operands[role].mT if direction == "columnwise" else operands[role]
            assert_row(row, expected(side, seen(candidate, operands[role], direction)))
        assert set(tried) == set(own)


def test_what_a_loss_changes_by_is_that_of_gradients_times_errors() -> None:
    """Both operands of the forward have it, a frozen weight and an input without gradients too, if it is named."""
    x, w, dy = tensors()
    run, x = linear("mxfp8", x, w)
    x.requires_grad_(False)
    with fxquant.probe(run, every=1, stats="loss_change", whatif="nvfp4") as log:
        run(x).backward(dy)
    for quantizer, whatif in ((MXFP8Quantizer(), False), (fxquant.recipes.get("nvfp4"), True)):
        rows = by_operand(log.rows, whatif=whatif)
        assert rows["grad_output", "columnwise"]["loss_change"] is None
        for name, changed in (("input", x), ("weight", w)):
            own = quantizer if isinstance(quantizer, Quantizer) else quantizer.quantizer(QuantizerRole("linear", name))
            assert isinstance(own, Quantizer)
            lost = (seen(own, changed, "rowwise") - changed).double()
            errors = lost @ w.double().mT if name == "input" else x.double() @ lost.mT
            changes = (dy.double() * errors).sum(1)
            wanted = changes.sum().abs() + len(x) * changes.square().sum() / 2
            assert rows[name, "rowwise"]["loss_change"] == pytest.approx(float(wanted), rel=1e-4)
    assert "loss_change" not in measured(every=1)[0]


def of_operand(quantizer: Quantizer, x: Tensor) -> dict[str, Any]:
    spec = quantizer.spec(fxquant.Direction.ROWWISE)
    parts, _ = quantize_operand(x, quantizer.operand_spec(), "rowwise")
    return statistics(reference.statistics(x, parts, spec, reference.GROUPS))


def test_codes_at_the_ends_of_a_format_are_counted() -> None:
    """A scale rounded down lets an element saturate; what is small beside it is a subnormal, or zero."""
    x = torch.ones(2, 64)
    x[0, 0], x[0, 1], x[0, 2] = -500.0, 2.0**-8, 2.0**-11
    row = of_operand(MXFP8Quantizer(scale_mode="floor"), x)
    assert (row["saturated"], row["subnormal"], row["underflow"]) == (1 / 128, 1 / 128, 1 / 128)
    assert (row["scale_max"], row["scale_min"], row["scale_spread"]) == (1.0, 2.0**-8, 8.0)
    assert (row["worst_block_row"], row["worst_block_column"]) == (0, 0)
    assert of_operand(MXFP8Quantizer(), x)["saturated"] == 0


def test_numbers_that_become_nan_are_counted() -> None:
    """Infinity makes a block of int8 NaN: it counts as what it was, the others as what they became."""
    x = torch.ones(2, 64)
    x[0, 3] = math.inf
    row = of_operand(BlockQuantizer("int8"), x)
    assert (row["nonfinite"], row["overflow"]) == (1, 31) and row["sqnr"] > 30


class Model(nn.Module):
    """Two layers, the first of them in a checkpoint if that is wanted."""

    def __init__(self, inner: bool = False) -> None:
        super().__init__()
        self.inner = inner
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        if self.inner:
            x = checkpoint(lambda x: self.up(x).relu(), x, use_reentrant=False)
        else:
            x = self.up(x).relu()
        return self.down(x)


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(32, 32, generator=generator) * scale for scale in (1.0, 4.0)]


def train(model: Model, run: Callable[..., Any], steps: int = 1, around: Callable[..., Any] | None = None) -> None:
    """Steps of two microbatches each."""
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    for _ in range(steps):
        for x in batches():
            x = x.clone().requires_grad_()
            y = run(x) if around is None else around(run, x)
            y.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def measured(inner: bool = False, around: Callable[..., Any] | None = None, **kwargs: Any) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model = Model(inner)
    run = fxquant.compile(model, "mxfp8", options=EAGER)
    with fxquant.probe(run, **kwargs) as log:
        train(model, run, around=around)
    return log.rows


@pytest.fixture(scope="module")
def plain() -> list[dict[str, Any]]:
    return measured(every=1)


def test_microbatches_of_a_step_are_one(plain: list[dict[str, Any]]) -> None:
    """Sums over both, and the amax of the larger."""
    assert len(plain) == 12 and {row["step"] for row in plain} == {0}
    row = next(row for row in plain if (row["layer"], row["role"], row["direction"]) == ("up", "input", "rowwise"))
    q = [MXFP8Quantizer().quantize(x).dequantize() for x in batches()]
    assert_row(row, expected(torch.cat(batches()), torch.cat(q)))


CHECKPOINTS: dict[str, Any] = {
    "inside": {"inner": True},
    "around": {"around": lambda run, x: checkpoint(run, x, use_reentrant=False)},
    "reentrant": {"around": lambda run, x: checkpoint(run, x, use_reentrant=True)},
}


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_checkpoints_count_once(kind: str, plain: list[dict[str, Any]]) -> None:
    assert measured(every=1, **CHECKPOINTS[kind]) == plain


def test_probes_change_no_plain_graph_and_compile_once() -> None:
    model = Model()
    run = fxquant.compile(model, "mxfp8", options=EAGER)
    train(model, run)
    before = fxquant.report(run)
    with fxquant.probe(run, every=3) as log:
        train(model, run, steps=5)
    assert {row["step"] for row in log.rows} == {0, 3}
    forms = torch._dynamo.utils.counters["aot_autograd"]["total"]
    with fxquant.probe(run, every=2) as log:
        train(model, run, steps=3)
    assert {row["step"] for row in log.rows} == {0, 2}
    assert torch._dynamo.utils.counters["aot_autograd"]["total"] == forms
    after = fxquant.report(run)
    assert after.graphs == before.graphs and not after.recompilations
    assert not any("probe" in text for text in after.graphs.values())


def test_rows_are_written(tmp_path: Path, plain: list[dict[str, Any]]) -> None:
    model = Model()
    run = fxquant.compile(model, "mxfp8", options=EAGER)
    with fxquant.probe(run, every=1, layers="up", tensors="weight", stats=["sqnr", "exponents"]) as log:
        train(model, run)
    assert [(row["layer"], row["direction"]) for row in log.rows] == [("up", "rowwise"), ("up", "columnwise")]
    log.to_jsonl(tmp_path / "rows.jsonl")
    log.to_csv(tmp_path / "rows.csv")
    first, _ = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert first["sqnr"] == log.rows[0]["sqnr"] and set(first) == set(log.rows[0])
    assert (tmp_path / "rows.csv").read_text().startswith("step,layer,role,direction,quantizer,whatif,sqnr,exponents")


class Experts(nn.Module):
    """Experts whose tokens come in groups, and a layer behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 64, 32) / 8)
        self.head = nn.Linear(64, 16)

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        return self.head(nn.functional.grouped_mm(x.bfloat16(), self.weight.bfloat16().mT, offs=offs).float())


def test_experts_and_high_precision_are_measured() -> None:
    """The rows of no group do not count, and a layer that nothing quantizes has rows of what would be."""
    torch.manual_seed(0)
    recipe = CustomRecipe(qfactory=Rules([Rule(MXFP8Quantizer(), module_type="grouped_linear")]))
    run = fxquant.compile(Experts(), recipe, options=EAGER)
    x, offs = torch.randn(48, 32), torch.tensor([10, 10, 40], dtype=torch.int32)
    x[40:] = 1000.0
    with fxquant.probe(run, every=1, whatif=["current_scaling", Own()]) as log:
        run(x, offs)[:40].square().sum().backward()
    experts = by_operand([row for row in log.rows if row["layer"] != "head"])
    inside = x[:40].bfloat16().float()
    for direction in ("rowwise", "columnwise"):
        row = experts["input", direction]
        halves = [seen(MXFP8Quantizer(), part, direction) for part in (inside[:10], inside[10:])]
        q = torch.cat(halves, -1 if direction == "columnwise" else 0)
        assert_row(row, expected(inside.mT if direction == "columnwise" else inside, q))
        assert row["cosine"] is None
    head = by_operand([row for row in log.rows if row["layer"] == "head"])
    assert {row["quantizer"] for row in head.values()} == {"identity"} and head["weight", "rowwise"]["sqnr"] == math.inf
    tried = [row for row in log.rows if row["whatif"] and row["layer"] == "head"]
    assert len(tried) == 12 and all(20 < row["sqnr"] < 50 for row in tried)
    left_out = {(one.role, one.candidate) for one in log.unmeasured}
    assert left_out == {(role, "Own()") for role in ("input", "weight", "grad_output")}
    assert "takes one matrix at a time" in log.unmeasured[0].reason


class Stack(nn.Module):
    """Three equal blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Model() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def blocks_of(model: Stack) -> Any:
    return fxquant.compile_blocks(model, "mxfp8", model.layers, options=EAGER)


def in_place(model: Stack) -> Any:
    model.compile(backend=fxquant.Backend("mxfp8", inner="aot_eager", model=model))
    return model


def by_name(model: Stack) -> Any:
    return torch.compile(model, backend="fxquant", options={"recipe": "mxfp8", "inner": "aot_eager"})


@pytest.mark.parametrize("door", [blocks_of, in_place, by_name])
def test_every_door(door: Callable[[Stack], Any]) -> None:
    """Layers have their full names, and those of one pattern are chosen where blocks share a graph."""
    run = door(Stack())
    with fxquant.probe(run, every=1, layers=r"layers\.[12]\.up", stats="amax") as log:
        run(torch.randn(8, 32)).sum().backward()
    assert Counter(row["layer"] for row in log.rows) == {"layers.1.up": 6, "layers.2.up": 6}


@pytest.fixture(scope="module")
def compiled() -> Iterator[Any]:
    yield fxquant.compile(Model(), "mxfp8", options=EAGER)


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"layers": "upp"}, "matches the name of no module; did you mean 'up'"),
        ({"layers": "("}, "not a regular expression"),
        ({"tensors": "gradient"}, "did you mean 'grad_output'"),
        ({"stats": ["snr"]}, "did you mean 'sqnr'"),
        ({"whatif": ["delayed_scaling"]}, "has the history of a run"),
        ({"whatif": [MXFP8Quantizer]}, "write MXFP8Quantizer()"),
        ({"every": 0}, "every must be an int of at least 1"),
        ({"freq": 3}, "write every="),
    ],
)
def test_errors(compiled: Any, kwargs: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError) as error, fxquant.probe(compiled, **kwargs):
        pass
    assert said in str(error.value)


def test_a_model_that_fxquant_has_not_compiled_is_refused() -> None:
    with pytest.raises(OptionError, match="has compiled no part of Model"), fxquant.probe(Model()):
        pass


def test_a_step_that_an_error_ends_is_kept_and_the_next_probe_begins_anew() -> None:
    """A convolution that is no matmul has a reason, and a forward alone no change of a loss."""
    model = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.Flatten(), nn.Linear(256, 32))
    run = fxquant.compile(model, "mxfp8", options=EAGER)
    for _ in range(2):
        with pytest.raises(KeyError), fxquant.probe(run, every=1, stats="loss_change") as log:
            run(torch.randn(32, 16, 4, 4))
            raise KeyError
        assert [(row["layer"], row["role"], row["loss_change"]) for row in log.rows] == [
            ("2", role, None) for role in ("input", "weight", "input", "weight")
        ]
        assert {one.layer for one in log.unmeasured} == {"0"} and log.unmeasured[0].reason.startswith("CONVOLUTION")


def test_what_measured_nothing_is_told(compiled: Any) -> None:
    with pytest.warns(fxquant.FxQuantWarning, match="no compiled graph ran inside it"), fxquant.probe(compiled):
        pass


def test_what_no_operand_matches_is_told(compiled: Any) -> None:
    """Though others match: by patterns, tensors and candidates; and statistics that a log has not."""
    asked = {"layers": ["up", ""], "tensors": ["input", "q"], "whatif": ["mxfp8", "high_precision"]}
    with pytest.warns(fxquant.FxQuantWarning) as told, fxquant.probe(compiled, stats="amax", **asked) as log:
        compiled(torch.randn(8, 32)).sum().backward()
    (message,) = [str(one.message) for one in told if "fxquant.probe" in str(one.message)]
    wanted = "fxquant.probe measured nothing of layers='', tensors='q', whatif=high_precision: no product"
    assert message.startswith(wanted)
    for ask in (log.worst, lambda: log.plot("map.png"), log.outliers):
        with pytest.raises(OptionError, match=r"was not measured|needs stats="):
            ask()
    with pytest.raises(OptionError, match="a probe measures one model"), fxquant.probe([compiled]):
        pass


def test_products_of_regions_are_listed() -> None:
    """Torch puts the first call into the graph itself."""
    compiled = fxquant.compile(nn.Sequential(Region(), Region(), Region()), "mxfp8", options=EAGER)
    with fxquant.probe(compiled, stats="amax") as log:
        compiled(torch.randn(16, 16)).sum().backward()
    assert {row["layer"] for row in log.rows} == {"0.inner"}
    assert {one.layer for one in log.unmeasured} == {"1.inner"}
    assert "nested_compile_region" in log.unmeasured[0].reason


class Planted(nn.Module):
    """Six layers behind a norm each; two channels of the inputs of two layers are 2^8 times larger than others.

    The gradient of the first has a heavy tail.
    """

    def __init__(self, planted: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(6))
        self.register_buffer("factors", torch.tan(math.pi * (torch.rand(64, 64) - 0.5)))
        for i in planted:
            self.norms[i].weight.data[[5, 40]] = 2.0**8
            self.layers[i].weight.data[:, [5, 40]] *= 2.0**-8

    def forward(self, x: Tensor) -> Tensor:
        for i, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            y = layer(norm(x))
            y = Heavy.apply(y, self.factors) if i == 0 else y
            x = x + y
        return x


@pytest.mark.parametrize("recipe", ["current_scaling", "nvfp4"])
def test_probes_point_at_planted_operands(recipe: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    run = fxquant.compile(Planted((2, 4)), recipe, options=EAGER)
    x = torch.randn(64, 64)
    with fxquant.probe(run, every=1, whatif="mxfp8") as log:
        for _ in range(2):
            run(x).square().sum().backward()
            log.step()
    expected = {("layers.2", "input"), ("layers.4", "input"), ("layers.0", "grad_output")}
    for statistic in ("kurtosis", "crest"):
        assert {operand[:2] for operand, _ in log.worst(statistic, 6)} == expected, statistic
    losing = {operand[:2] for operand, _ in log.outliers()}
    weights = {(layer, "weight") for layer, _ in expected}  # those of channels are small beside others
    assert losing - weights == (expected if recipe == "nvfp4" else set()) and not log.outliers("mxfp8")
    with pytest.raises(OptionError, match="no candidate 'mxfp' was tried; did you mean 'mxfp8'"):
        log.outliers("mxfp")
    assert {row["step"] for row in log.rows} == {0, 1}
    if find_spec("matplotlib"):
        log.plot(tmp_path / "map.png", "underflow")
        assert (tmp_path / "map.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(OptionError, match="did you mean 'kurtosis'"):
        log.worst("kurtosi")


def on_a_rank(half: bool) -> list[dict[str, Any]]:
    """Returns what a step measures where each rank has half of the rows, or all of them where there is one."""
    torch.manual_seed(0)
    model = Model()
    run = fxquant.compile(model, "mxfp8", options=EAGER)
    x = torch.cat(batches())
    if half:
        x = x.chunk(2)[torch.distributed.get_rank()]
    with fxquant.probe(run, every=1, stats=["amax", "underflow", "sqnr", "exponents", "kurtosis"]) as log:
        run(x.requires_grad_()).square().sum().backward()
    return [row for row in log.rows if row["role"] != "weight"]


def test_rows_are_those_of_all_ranks(ranks: Ranks) -> None:
    alone = on_a_rank(half=False)
    for rows in ranks.run(on_a_rank, True):
        assert len(rows) == len(alone)
        for row, other in zip(rows, alone, strict=True):
            assert_row(row, other)
