"""The cost model beside what was measured, and what it counts."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxquant
from fxquant import MXFP8Quantizer, OptionError, RecipeError, Rule, Rules, SkipReason, recipes
from fxquant.cost.estimate import estimate
from fxquant.cost.kept import find_card
from fxquant.cost.rates import RATES
from fxquant.cost.work import Estimate, Work
from fxquant.decisions import Decision, Matmul
from fxquant.kernels.grouped import choice as grouped_choice
from fxquant.kernels.linear import choice as gemm_choice
from fxquant.quantizers import DelayedScalingRequest, Float8Quantizer, IdentityQuantizer
from fxquant.recipes import AutoRecipe, Recipe
from fxquant.report.html import section
from fxquant.report.report import Report
from fxquant.roles import GEMM_OPERANDS, Gemm, QuantizerRole

H100 = "NVIDIA H100 80GB HBM3"
SIZES = ((16384, 4096, 4096), (16384, 4096, 14336), (16384, 14336, 4096), (16384, 8192, 8192), (8192, 8192, 28672))
TRAINING = {
    # speed-ups of a forward and backward of these sizes over bf16: TransformerEngine 2.20.2, whose casts read and
    # write the same bytes; one H100 80GB HBM3, torch 2.11, random data
    "current_scaling": (1.39, 1.64, 1.62, 1.62, 1.57),
    "delayed_scaling": (1.41, 1.69, 1.72, 1.77, 1.61),
    "float8_blockwise": (1.18, 1.37, 1.39, 1.39, 1.35),
}
ROWS = (1, 16, 64, 256, 1024)
DECODE = {
    # microseconds of bf16, and with stored FP8 weights of our kernels up to 64 rows, of torchao 0.17 above, in a CUDA
    # graph; same card
    ("bf16", 4096, 14336): (42.5, 43.8, 45.0, 51.4, 166),
    ("current_scaling", 4096, 14336): (21.1, 24.5, 27.1, 37.2, 102),
    ("rowwise", 4096, 14336): (21.1, 24.5, 26.5, 33.9, 94),
    ("bf16", 8192, 28672): (154, 163, 171, 202, 697),
    ("current_scaling", 8192, 28672): (76.7, 86.7, 91.5, 116, 358),
    ("rowwise", 8192, 28672): (77.9, 85.8, 90.6, 113, 372),
}
GEMMS = {
    # microseconds of (M, K, N): bf16, then with fast accumulation per tensor and per row, and 1x128 by 128x128
    (1, 4096, 14336): (41.2, 21.1, 21.1, 21.6),
    (64, 4096, 14336): (43.6, None, 23.6, 26.0),
    (256, 8192, 28672): (191.9, 104.2, 104.5, 111.5),
    (1024, 1024, 1024): (6.6, 5.1, 6.6, 6.6),
    (1024, 4096, 4096): (44.9, 25.4, 25.3, 28.9),
    (4096, 4096, 4096): (177.3, 96.9, 99.2, 121.8),
    (16384, 4096, 14336): (2627.1, 1419.5, 1462.2, 1548.5),
    (8192, 8192, 28672): (5216.3, 2709.8, 2774.4, 3164.6),
}
CASTS = {
    # microseconds for [16384, 4096]: an input in both directions, amaxes included; a weight of the backward columnwise
    ("delayed_scaling", "cast input"): 94.8,
    ("delayed_scaling", "cast weight"): 71.3,
    ("current_scaling", "cast weight"): 71.3,
    ("rowwise", "cast input"): 146,
    ("float8_blockwise", "cast input"): 99.3,
    ("float8_blockwise", "cast weight"): 70.5,
    ("mxfp8", "cast input"): 97.2,
    ("mxfp8", "cast weight"): 71.8,
}
BLOCKS = {
    (H100, "current_scaling"): (165.2, 119.4),
    (H100, "rowwise"): (165.2, 123.7),
    (H100, "float8_blockwise"): (165.2, 131.3),
    ("NVIDIA H200", "current_scaling"): (166.6, 115.8),
    ("NVIDIA H200", "rowwise"): (166.6, 119.8),
    ("NVIDIA H200", "float8_blockwise"): (166.6, 129.8),
}
"""Milliseconds of four Llama3-8B blocks, bf16 and quantized, of one run on a card."""


EXPERTS = {
    # microseconds of forward and backward of 128 experts, 65536 x 2048 x 768, and of 8, 32768 x 7168 x 2048; same card
    ("bf16", False): (1207, 3780),
    ("rowwise", False): (1644, 3257),
    ("rowwise", True): (1253, 2989),
    ("float8_blockwise", False): (1919, 5043),
    ("float8_blockwise", True): (1645, 4768),
    ("current_scaling", False): (2131, 4053),
}
"""The figures are by recipe, and by whether weights stay quantized (docs/measurements/linear.md)."""


@pytest.fixture(autouse=True)
def without_gluon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the kernels in Gluon away, without which it was measured."""
    monkeypatch.setattr(gemm_choice, "knows_gluon", lambda: False)
    monkeypatch.setattr(grouped_choice, "knows_gluon", lambda: False)


def linear(
    recipe: str, m: int, k: int, n: int, *, site: int = 0, training: bool = True, **facts: Any
) -> list[Decision]:
    """The decisions of one linear layer on an H100."""
    matmul = Matmul(m=m, k=k, n=n, device=H100, capability=(9, 0), **facts)
    decisions = []
    for gemm, operands in GEMM_OPERANDS.items():
        for operand, direction in operands:
            role = QuantizerRole("linear", operand, "fc")
            answer = recipes.get(recipe).quantizer(role)
            if isinstance(answer, DelayedScalingRequest):
                answer = Float8Quantizer(answer.fp8_format.dtype(operand), 0)
            if training or gemm is Gemm.FPROP:
                decisions.append(
                    Decision(
                        role=role, gemm=gemm, direction=direction, shape=(m, k), quantizer=answer.side(direction),
                        site=site, flops=2 * m * k * n, matmul=matmul,
                    )
                )  # fmt: skip
    return decisions


def weighed(*args: Any, **facts: Any) -> Estimate:
    return estimate(linear(*args, **facts))[0]


def speedup(found: Estimate) -> float:
    assert found.unquantized and found.quantized
    return found.unquantized / found.quantized


@pytest.mark.parametrize("recipe", TRAINING)
def test_training_is_as_fast_as_measured(recipe: str) -> None:
    for size, measured in zip(SIZES, TRAINING[recipe], strict=True):
        assert speedup(weighed(recipe, *size)) == pytest.approx(measured, rel=0.15), size


@pytest.mark.parametrize("size", GEMMS, ids=str)
def test_gemms_are_as_fast_as_measured(size: tuple[int, int, int]) -> None:
    plain, *measured = GEMMS[size]
    assert plain is not None
    for recipe, each in zip(("current_scaling", "rowwise", "float8_blockwise"), measured, strict=True):
        work = weighed(recipe, *size, training=False).work[0]
        if each is not None and work.unquantized and work.quantized:
            assert work.unquantized == pytest.approx(plain, rel=0.15)
            assert work.unquantized / work.quantized == pytest.approx(plain / each, rel=0.15), recipe


@pytest.mark.parametrize(("recipe", "what"), CASTS)
def test_casts_are_as_fast_as_measured(recipe: str, what: str) -> None:
    *_, work = (each for each in weighed(recipe, 16384, 4096, 16384).work if each.what == what)
    assert work.quantized == pytest.approx(CASTS[recipe, what], rel=0.15)


@pytest.mark.parametrize("k", [4096, 8192])
@pytest.mark.parametrize("recipe", ["current_scaling", "rowwise"])
def test_decoding_is_as_fast_as_measured(recipe: str, k: int) -> None:
    n = {4096: 14336, 8192: 28672}[k]
    for m, plain, quantized in zip(ROWS, DECODE["bf16", k, n], DECODE[recipe, k, n], strict=True):
        found = weighed(recipe, m, k, n, training=False, stored=True)
        assert found.unquantized == pytest.approx(plain, rel=0.15), m
        assert speedup(found) == pytest.approx(plain / quantized, rel=0.15), m


LLAMA3_8B = {
    # K, N and the input of each linear layer of a block
    "q": (4096, 4096, "h"), "k": (4096, 1024, "h"), "v": (4096, 1024, "h"), "o": (4096, 4096, "attention"),
    "gate": (4096, 14336, "g"), "up": (4096, 14336, "g"), "down": (14336, 4096, "product"),
}  # fmt: skip


@pytest.mark.parametrize(("card", "recipe"), BLOCKS)
def test_blocks_are_as_fast_as_measured(card: str, recipe: str) -> None:
    """Whatever is no linear layer takes its time on both sides."""
    decisions = []
    for site, (name, (k, n, tensor)) in enumerate(LLAMA3_8B.items()):
        decisions += linear(recipe, 16384, k, n, site=site, input=tensor, weight=name)
    saved = sum(each.unquantized - each.quantized for each in estimate(decisions, card).values())
    plain, quantized = BLOCKS[card, recipe]
    close = 0.05 if card == H100 else 0.07  # of an H200 only the copy rate was measured
    assert plain / (plain - 4 * saved / 1000) == pytest.approx(plain / quantized, rel=close)


@pytest.mark.parametrize(("recipe", "stored"), EXPERTS)
def test_experts_are_as_fast_as_measured(recipe: str, stored: bool) -> None:
    sizes = ((65536, 2048, 768, 128), (32768, 7168, 2048, 8))
    for (m, k, n, groups), measured in zip(sizes, EXPERTS[recipe, stored], strict=True):
        found = weighed("rowwise" if recipe == "bf16" else recipe, m, k, n, groups=groups, stored=stored)
        assert (found.unquantized if recipe == "bf16" else found.quantized) == pytest.approx(measured, rel=0.15)


def test_a_weight_cast_in_each_call_makes_decoding_slower() -> None:
    assert weighed("current_scaling", 1, 4096, 14336, training=False).slower
    assert not weighed("current_scaling", 1, 4096, 14336, training=False, stored=True).slower


def test_a_program_keeps_its_weights_quantized() -> None:
    layer = nn.Linear(64, 32, dtype=torch.bfloat16)
    exported = torch.export.export(layer, (torch.randn(16, 64, dtype=torch.bfloat16),))
    for fold, casts in ((True, ["cast input"]), (False, ["cast input", "cast weight"])):
        report = fxquant.report_of(fxquant.quantize_program(exported, "auto(rowwise)", fold_weights=fold))
        found = [each.what for _, _, each in report.work() if each.what.startswith("cast")]
        assert list(dict.fromkeys(found))[:2] == casts


@pytest.mark.parametrize("cached", [False, True])
def test_weights_that_stay_quantized_have_no_cast_to_weigh(cached: bool) -> None:
    layer, x = nn.Linear(64, 32, dtype=torch.bfloat16), torch.randn(16, 64, dtype=torch.bfloat16)
    backend = fxquant.Backend("rowwise", inner="aot_eager", cache_weights=cached)
    torch.compile(layer, backend=backend)(x)
    assert ("cast weight" in {each.what for _, _, each in backend.report().work()}) is not cached


def test_emulated_formats_are_slower_at_every_size() -> None:
    for recipe in ("mxfp8", "nvfp4"):
        for size in SIZES:
            found = weighed(recipe, *size)
            assert found.slower and all("dequantized" in work.kernel for work in found.work[:3])


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(512, 512, bias=False), nn.Linear(512, 256, bias=False)
        self.o = nn.Linear(512, 1024, bias=False).requires_grad_(False)
        self.to(torch.bfloat16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.o(self.q(x)), self.k(x)


@pytest.fixture(scope="module")
def heads() -> Report:
    with torch.device("meta"):
        model, x = Heads(), torch.empty(2048, 512, dtype=torch.bfloat16, requires_grad=True)
        return fxquant.explain(model, "rowwise", x)


def distinct(casts: Iterable[str]) -> float:
    """How many casts there are, where several layers name one."""
    shared = (re.search(r"once for (\d+)", kernel) for kernel in casts)
    return sum(1 / int(found[1]) if found else 1 for found in shared)


def test_casts_count_once_and_frozen_weights_have_no_wgrad(heads: Report) -> None:
    work: dict[str, list[tuple[str, str]]] = {}
    for name, _, each in heads.on("H100").work():
        work.setdefault(name, []).append((each.what, each.kernel))
    shared = ("cast input", "Triton cast, both directions, after its amaxes, once for 2 layers")
    assert shared in work["q"] and shared in work["k"]
    graphs = heads.graphs["forward"] + heads.graphs["backward"]
    casts = [kernel for rows in work.values() for what, kernel in rows if what.startswith("cast")]
    assert len(re.findall(r"quantize\.default", graphs)) == distinct(casts)
    assert len(re.findall(r"hybrid_quantize\.default", graphs)) == distinct(each for each in casts if "both" in each)
    alone = heads.on("H100").estimates()
    parts = [w.quantized for e in alone.values() for w in e.work if w.what == "cast input" and "once" in w.kernel]
    assert parts[0] == pytest.approx(2 * parts[1]), "by FLOPs"
    assert [what for what, _ in work["o"]] == [
        "fprop", "dgrad", "cast input", "cast weight", "cast grad_output", "cast weight",
    ]  # fmt: skip
    assert dict(work["o"])["cast input"] == "fused by Inductor, rowwise"


def test_kernels_are_those_of_the_device(heads: Report) -> None:
    assert {w.kernel for _, _, w in heads.on("H100").work() if "cast" not in w.what} == {"cuBLAS _scaled_mm, rowwise"}
    here = {w.kernel for _, _, w in heads.work() if "cast" not in w.what}
    assert here == {"float32 GEMM of dequantized operands (the reference)"}
    assert "unquantized us" not in heads.work_table()
    assert heads.verdict() == [f"estimate: none, no measured rates for meta (known: {', '.join(RATES)})"]
    with pytest.raises(OptionError, match="no rates for 'A100'; known cards: NVIDIA H100"):
        heads.on("A100")
    assert find_card("H100") == H100


@pytest.mark.parametrize(("recipe", "kernel", "least"), [("mxfp8", "MXFP8", 1.2), ("nvfp4", "NVFP4", 1.5)])
def test_rates_that_were_published_and_not_measured_are_told_and_decide_nothing(
    recipe: str, kernel: str, least: float
) -> None:
    """Kernels are those of the card, their times computed from its maker's numbers."""
    decisions = linear(recipe, 16384, 4096, 14336)
    report = Report(recipe=recipe, decisions=decisions).on("B200")
    assert {work.kernel for _, _, work in report.work() if "cast" not in work.what} == {f"cuBLAS scaled_mm, {kernel}"}
    weights = [work.kernel for _, _, work in report.work() if work.what == "cast weight"]
    assert all(text.startswith("Triton cast") for text in weights), "which lie in memory, with scales for tensor cores"
    (line,) = report.verdict()
    assert line.startswith("estimate for NVIDIA B200 (computed from published rates, not measured): ")
    time = report.time()
    assert time["published"] and least < time["unquantized_us"] / time["quantized_us"] < 4
    assert "not measured" not in Report(recipe=recipe, decisions=decisions).verdict()[0]


def test_blocks_that_are_no_whole_tiles_are_emulated_and_say_so() -> None:
    work = weighed("float8_blockwise", 4096, 4096, 192).work
    assert work[0].kernel == "bf16 GEMM of dequantized operands (192 rows are no multiple of 128)"
    assert work[1].kernel == "cuBLAS _scaled_mm, 1x128 by 128x128"
    assert work[2].kernel == "cuBLAS _scaled_mm, 1x128 by 1x128"
    kernels = [work.kernel for work in weighed("float8_blockwise", 4096, 4096, 4096, dynamic="m").work[:3]]
    assert ["dynamic sizes" in kernel for kernel in kernels] == [True, True, False], "M is the contracted axis of wgrad"
    experts = weighed("rowwise", 4096, 1024, 1024, batch=8, batch_weights=True).work[0]
    assert experts.kernel == "bf16 GEMM of dequantized operands (a batch of weights)"


def test_an_amax_is_taken_once_and_casts_of_groups_are_named() -> None:
    casts = {w.kernel for w in weighed("current_scaling", *SIZES[0]).work if w.what == "cast weight"}
    assert casts == {"Triton cast, rowwise, after its amaxes", "Triton cast, columnwise"}
    casts = {w.kernel for w in weighed("mxfp8", *SIZES[0], groups=8).work if w.what.startswith("cast")}
    assert casts == {
        "Triton cast of groups, both directions", "Triton cast of groups, columnwise", "Triton cast of groups, rowwise"
    }  # fmt: skip


def test_few_rows_have_a_kernel_of_their_own() -> None:
    """In fprop, where the number of rows or its bound says so; one row is quantized by it."""
    size = (4096, 14336)
    for recipe in ("current_scaling", "rowwise", "float8_blockwise"):
        for m, facts in ((1, {}), (64, {}), (16, {"dynamic": "m", "most_m": 64})):
            work = weighed(recipe, m, *size, training=False, stored=True, **facts).work
            assert work[0].kernel == "Triton, few rows", (recipe, m)
            assert (work[1].kernel == "by the GEMM, rowwise") == (m == 1)
        for m, facts in ((65, {}), (16, {"dynamic": "m"}), (16, {"dynamic": "n"})):
            assert "few rows" not in weighed(recipe, m, *size, training=False, **facts).work[0].kernel
        assert "few rows" not in weighed(recipe, 16, *size).work[1].kernel, "dgrad accumulates slowly"


def test_unknown_dtypes_have_kernels_and_no_times() -> None:
    found = weighed("rowwise", *SIZES[0], dtype=torch.float32)
    assert found.quantized is None and not found.slower and found.work[0].kernel == "cuBLAS _scaled_mm, rowwise"


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Linear(4096, 4096, bias=False, dtype=torch.bfloat16)
        self.small = nn.Linear(4096, 64, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.small(self.large(x)[:64])


def explained(recipe: Recipe | str) -> Report:
    with torch.device("meta"):
        return fxquant.explain(Mixed(), recipe, torch.empty(16384, 4096, dtype=torch.bfloat16, requires_grad=True))


@pytest.fixture
def on_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = importlib.import_module("fxquant.passes.plan.resolve")
    monkeypatch.setattr(resolve, "card_name", lambda device: H100)
    monkeypatch.setattr(resolve, "capability", lambda device: (9, 0))


@pytest.mark.usefixtures("on_h100")
@pytest.mark.parametrize("recipe", ["current_scaling", "delayed_scaling"])
def test_auto_leaves_out_what_would_be_slower(recipe: str) -> None:
    report = explained(recipe)
    assert report.slower() == ["small"]
    warning = report.verdict()[1]
    assert warning.startswith("warning: estimated to be slower than unquantized") and "small" in warning
    report = explained(f"auto({recipe})")
    assert report.recipe == f"auto({recipe})" and report.slower() == [] and len(report.verdict()) == 1
    reasons = {d.layer: d.skip_reason for d in report.decisions}
    assert reasons == {"large": None, "small": SkipReason.NOT_PROFITABLE}
    detail = next(d.detail for d in report.decisions if d.layer == "small")
    assert "us in high precision" in detail and "us quantized" in detail
    assert report.graphs["forward"].count("fxquant.scaled_mm") == 1


@pytest.mark.usefixtures("on_h100")
def test_auto_with_nothing_left_is_the_plain_graph() -> None:
    report = explained(recipes.auto("mxfp8"))
    assert {d.skip_reason for d in report.decisions} == {SkipReason.NOT_PROFITABLE}
    assert "fxquant" not in report.graphs["forward"] + report.graphs["backward"]


class Experts(nn.Module):
    def __init__(self, experts: int, k: int, n: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, n, k, dtype=torch.bfloat16))

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        return torch._grouped_mm(x, self.weight.mT, offs=offs)


@pytest.mark.usefixtures("on_h100")
def test_experts_of_few_rows_stay_in_high_precision() -> None:
    """128 with 512 rows each lose more in casts than their GEMMs save; 8 with 4096 do not."""

    def decided(experts: int, m: int, k: int, n: int) -> Report:
        with torch.device("meta"):
            x, offs = torch.empty(m, k, dtype=torch.bfloat16), torch.empty(experts, dtype=torch.int32)
            return fxquant.explain(Experts(experts, k, n), "auto(rowwise)", x.requires_grad_(), offs)

    few, many = decided(128, 65536, 2048, 768), decided(8, 32768, 7168, 2048)
    assert {d.skip_reason for d in few.decisions} == {SkipReason.NOT_PROFITABLE}
    assert "us in high precision" in few.decisions[0].detail and "fxquant" not in few.graphs["forward"]
    assert many.coverage == 1.0
    kernels = {each.what: each.kernel for _, _, each in many.work()}
    assert (
        kernels["cast input"]
        == kernels["cast grad_output"]
        == "Triton cast of groups, both directions, after its amaxes"
    )


def test_auto_without_rates_leaves_nothing_out_and_says_so() -> None:
    report = explained("auto(rowwise)")
    assert report.coverage == 1.0 and "no measured rates for meta" in str(report)


@pytest.mark.parametrize(
    ("capability", "recipe", "quantized"),
    [((8, 0), "current_scaling", 0.0), ((8, 9), "mxfp8", 0.0), ((8, 9), "current_scaling", 1.0)],
)
def test_auto_keeps_what_a_card_without_rates_only_emulates(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], recipe: str, quantized: float
) -> None:
    """One sentence says so; where per-tensor FP8 is all there is, that is taken."""
    resolve = importlib.import_module("fxquant.passes.plan.resolve")
    monkeypatch.setattr(resolve, "card_name", lambda device: "NVIDIA A card")
    monkeypatch.setattr(resolve, "capability", lambda device: capability)
    report = explained(f"auto({recipe})")
    assert report.coverage == quantized
    if not quantized:
        where = f"NVIDIA A card (compute capability {capability[0]}.{capability[1]})"
        reason = f"nothing multiplies these formats on {where}, where it could only be slower"
        assert report.verdict() == [f"auto: {reason}"]
        assert {(d.skip_reason, d.detail) for d in report.decisions} == {(SkipReason.NOT_PROFITABLE, reason)}


def test_an_estimate_without_times_is_text_too() -> None:
    work = (Work("fprop", "a kernel", 1.5, None),)
    assert str(Estimate(work)) == "1.5 us in high precision, no measured time quantized"


def test_auto_is_a_recipe() -> None:
    assert recipes.get("auto(mxfp8)") == recipes.auto(recipes.get("mxfp8")) == AutoRecipe("mxfp8")  # type: ignore[arg-type]
    assert recipes.auto("auto(mxfp8)") == recipes.auto("mxfp8") != recipes.get("mxfp8")
    assert recipes.auto("mxfp8").fingerprint() != recipes.get("mxfp8").fingerprint()
    with pytest.raises(RecipeError, match="did you mean 'mxfp8'"):
        recipes.get("auto(mxpf8)")
    with pytest.raises(RecipeError, match="wrap the whole"):
        Rules([Rule(MXFP8Quantizer(), name="fc")], default="auto(mxfp8)")
    rules = recipes.auto(recipes.CustomRecipe(qfactory=Rules([Rule(IdentityQuantizer(), name="nothing")])))
    assert rules.unused([QuantizerRole("linear", "input", "fc")]) == ["rule 0: name='nothing'"]


def test_json_and_html_hold_the_estimate(heads: Report) -> None:
    content = json.loads(heads.on("H100").to_json())
    assert content["estimate"]["card"] == H100 and content["estimate"]["quantized_us"] > 0
    assert content["work"][0]["kernel"] == "cuBLAS _scaled_mm, rowwise" and content["work"][0]["layer"] == "q"
    html = section(heads.on("H100"))
    assert "class='warning'" in html and "Longest: <a" in html and "data-key='time'" in html
