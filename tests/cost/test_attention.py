"""What attention is estimated to take beside what was measured, what `auto` leaves out, and what has no kernel."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import per_role
from torch import Tensor
from torch._subclasses import FakeTensorMode

import fxquant
from fxquant import (
    CustomRecipe,
    DelayedScaling,
    Float8CurrentScaling,
    Float8CurrentScalingQuantizer,
    Float8HeadQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    SkipReason,
    recipes,
)
from fxquant.cost.attention import attention_work
from fxquant.decisions import Attended
from fxquant.formats import AttentionSpec, QuantSpec, Step
from fxquant.kernels.attention import choice as attention_choice
from fxquant.kernels.attention.choice import AttentionFacts, AttentionKernel
from fxquant.kernels.attention.ops import attention_backward, attention_forward
from fxquant.quantizers import Float8Quantizer
from fxquant.recipes import Recipe
from fxquant.report.report import Report

H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
HEAD, FP8, MX, HIGH = Float8HeadQuantizer(), Float8CurrentScalingQuantizer(), MXFP8Quantizer(), IdentityQuantizer()

FORWARD = {
    # milliseconds at (keys, causal): cuDNN, the FP8 kernel in Triton, and with the casts of q, k and v, of one run
    (16384, False): (6.96, 5.34, 5.59),
    (16384, True): (3.67, 2.80, 3.11),
    (4096, False): (0.444, 0.376, 0.476),
    (4096, True): (0.270, 0.217, 0.330),
}
TRAINING = {
    # forward and backward: cuDNN, and FP8 forward with casts, cuDNN backward and dequantizing
    (16384, False): (26.85, 25.70 + 0.22),
    (16384, True): (14.14, 13.35 + 0.22),
    (4096, False): (1.80, 1.82 + 0.06),
    (4096, True): (1.08, 1.12 + 0.06),
}
FP8_BACKWARD = {
    (16384, False): (20.5, 20.8), (16384, True): (10.3, 11.4), (4096, False): (1.35, 1.49), (4096, True): (0.82, 0.97)
}  # fmt: skip


def attended(keys: int, causal: bool, **specs: str) -> Attended:
    """One batch of 32 heads of 128 on an H100."""
    steps = (Step("mul", 128**-0.5), *([Step("causal")] if causal else []))
    given = {slot: QuantSpec.parse(text) for slot, text in specs.items()}
    return Attended(
        site=0, batch=1, heads=32, kv_heads=32, queries=keys, keys=keys, width=128, features=128, steps=steps,
        spec=AttentionSpec(**given, steps=steps), device=H100, capability=(9, 0),
    )  # fmt: skip


def times(attention: Attended, training: bool) -> dict[str, tuple[float, float]]:
    """Milliseconds without and with quantization, by what it is."""
    return {
        work.what: (work.unquantized / 1e3, work.quantized / 1e3)
        for work in attention_work(attention, training)
        if work.unquantized is not None and work.quantized
    }


def total(found: dict[str, tuple[float, float]]) -> tuple[float, float]:
    before, after = (sum(each[i] for each in found.values()) for i in (0, 1))
    return before, after


@pytest.mark.parametrize("case", FORWARD, ids=str)
def test_as_fast_as_measured(case: tuple[int, bool]) -> None:
    plain, kernel, with_casts = FORWARD[case]
    heads = attended(*case, qkv="per_head_e4m3", s="per_head_e4m3")
    found = times(heads, training=False)
    assert found["attention, forward"] == pytest.approx((plain, kernel), rel=0.05)
    assert total(found) == pytest.approx((plain, with_casts), rel=0.05)
    assert (total(found)[0] > total(found)[1]) == (plain > with_casts)
    before, after = total(times(heads, training=True))
    assert (before, after) == pytest.approx(TRAINING[case], rel=0.05)
    assert before / after == pytest.approx(TRAINING[case][0] / TRAINING[case][1], rel=0.05)
    if case in FP8_BACKWARD:
        quantized = attended(*case, **dict.fromkeys(("qkv", "s", "do", "dp"), "per_head_e4m3"))
        assert times(quantized, training=True)["attention, backward"] == pytest.approx(FP8_BACKWARD[case], rel=0.05)


def test_as_fast_as_within_a_step() -> None:
    """Of a Llama3-8B block; there the card's power limit slows the FP8 kernel down, and not cuDNN's."""
    heads = attended(8192, True, qkv="per_head_e4m3", s="per_head_e4m3")
    found = times(dataclasses.replace(heads, batch=2, kv_heads=8), training=True)
    assert found["attention, forward"] == pytest.approx((1.97, 1.64), rel=0.15)
    assert found["attention, backward"] == pytest.approx((5.8, 5.9), rel=0.15)
    assert sum(after for what, (_, after) in found.items() if what.startswith("cast")) == pytest.approx(0.2, rel=0.15)


OVER_CUDNN = {
    # casts of heads and delayed ones over cuDNN in bfloat16: forward, and with a backward by cuDNN
    (16384, False): ((1.35, 1.42), (1.02, 1.07)),
    (16384, True): ((1.32, 1.35), (1.06, 1.06)),
    (4096, False): ((1.11, 1.19), (0.99, 1.01)),
    (4096, True): ((1.05, 1.19), (0.97, 0.98)),
}
"""`python -m fxquant bench attention` (docs/measurements/attention.md)."""


@pytest.mark.parametrize("case", OVER_CUDNN, ids=str)
def test_pays_as_measured(case: tuple[int, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_choice, "knows_gluon", lambda: True)
    for training, measured in zip((False, True), OVER_CUDNN[case], strict=True):
        for spec, ratio in zip(("per_head_e4m3", "per_tensor_e4m3(slot=0)"), measured, strict=True):
            before, after = total(times(attended(*case, qkv=spec, s=spec), training))
            assert before / after == pytest.approx(ratio, rel=0.05), (spec, training)


GLUON = {(16384, False): 1.02, (16384, True): 1.07, (4096, False): 1.13, (4096, True): 1.16}
"""How much faster than the Triton kernel the forward in Gluon is (docs/measurements/attention.md)."""


@pytest.mark.parametrize("case", GLUON, ids=str)
def test_the_forward_in_gluon_is_as_fast_as_measured(case: tuple[int, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    heads = attended(*case, qkv="per_head_e4m3", s="per_head_e4m3")
    _, triton = times(heads, training=False)["attention, forward"]
    monkeypatch.setattr(attention_choice, "knows_gluon", lambda: True)
    assert attention_work(heads, False)[0].kernel == "Triton's Gluon, FP8"
    _, gluon = times(heads, training=False)["attention, forward"]
    assert triton / gluon == pytest.approx(GLUON[case], rel=0.05)
    short = dataclasses.replace(heads, queries=512, keys=512)
    assert attention_work(short, False)[0].kernel == "Triton, FP8"


@pytest.fixture(autouse=True)
def without_gluon(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a Triton that does not have it."""
    monkeypatch.setattr(attention_choice, "knows_gluon", lambda: False)


@pytest.fixture
def on_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = importlib.import_module("fxquant.passes.plan.resolve")
    monkeypatch.setattr(resolve, "card_name", lambda device: H100)
    monkeypatch.setattr(resolve, "capability", lambda device: (9, 0))


def heads_recipe(**others: Any) -> CustomRecipe:
    """FP8 in the forward with a scale for each head, and what else is given for a slot."""
    return CustomRecipe(qfactory=lambda role: {"qkv": HEAD, "s": HEAD, **others}.get(role.tensor_type, HIGH))


def explained(recipe: Recipe, run: Callable[..., Tensor], *shapes: Sequence[int], grad: bool = True) -> Report:
    torch.compiler.reset()
    tensors = [torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=grad) for shape in shapes]
    return fxquant.explain(run, recipe, *tensors)


def two(q: Tensor, k: Tensor, v: Tensor, short: Tensor) -> Tensor:
    """A long attention and a short one."""
    long = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return long.sum() + F.scaled_dot_product_attention(short, short, short).sum()


LONG, SHORT = [1, 32, 16384, 128], [1, 32, 1024, 128]


@pytest.mark.usefixtures("on_h100")
@pytest.mark.parametrize("grad", [False, True])
def test_auto_leaves_short_attention_alone(grad: bool) -> None:
    report = explained(heads_recipe(), two, LONG, LONG, LONG, SHORT, grad=grad)
    assert report.coverage == pytest.approx(1 / 3 if grad else 1) and len(report.slower()) == 1
    assert report.verdict()[1].startswith("warning: estimated to be slower than unquantized, by")
    shown = [(work.what, work.kernel) for _, _, work in report.work()]
    assert shown.count(("attention, forward", "Triton, FP8")) == 2, "an estimate for every attention"
    assert shown.count(("attention, backward", "cuDNN on dequantized q, k and v")) == 2 * grad
    assert all(each.quantized is not None for each in report.estimates().values())

    report = explained(recipes.auto(heads_recipe()), two, LONG, LONG, LONG, SHORT, grad=grad)
    reasons = {d.shape[-2]: (d.skip_reason, d.detail) for d in report.decisions if d.gemm == "fprop"}
    assert reasons[16384] == (None, "")
    reason, detail = reasons[1024]
    assert reason is SkipReason.NOT_PROFITABLE and "us in high precision" in detail and "us quantized" in detail
    assert {d.skip_reason for d in report.decisions if 1024 in d.shape} == {SkipReason.NOT_PROFITABLE}
    assert report.graphs["forward"].count("fxquant.attention_forward") == 1
    assert report.slower() == [] and [e.kernel for _, _, e in report.work()].count("torch's own") == 1 + grad


def one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


BLOCK = [2, 32, 8192, 128], [2, 8, 8192, 128], [2, 8, 8192, 128]
"""Queries, keys and values of a Llama3-8B block."""


def test_within_a_step_of_an_h200_as_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four blocks took 117.3 ms with FP8 attention where 113.4 without, and on an H100 112.9 where 114.3."""
    monkeypatch.setattr(attention_choice, "knows_gluon", lambda: True)
    delayed = dataclasses.replace(
        attended(8192, True, qkv="per_tensor_e4m3(slot=0)", s="per_tensor_e4m3(slot=0)"), batch=2, kv_heads=8
    )
    for card, (before, after), close in ((H200, (113.4, 117.3), 0.1), (H100, (114.3, 112.9), 0.5)):
        plain, quantized = total(times(dataclasses.replace(delayed, device=card), training=True))
        assert 4 * (quantized - plain) == pytest.approx(after - before, abs=close), card
    plain, quantized = total(times(dataclasses.replace(delayed, device=H200), training=False))
    assert plain > 1.2 * quantized, "a forward alone is not within a step"


@pytest.mark.usefixtures("on_h100")
def test_auto_trains_attention_in_fp8_where_a_step_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_choice, "knows_gluon", lambda: True)
    monkeypatch.setattr(importlib.import_module("fxquant.passes.plan.resolve"), "card_name", lambda device: H200)
    report = explained(recipes.auto(heads_recipe()), one, *BLOCK)
    assert {d.skip_reason for d in report.decisions} == {SkipReason.NOT_PROFITABLE}
    assert "us in high precision" in report.decisions[0].detail and "fxquant" not in report.graphs["forward"]
    assert explained(recipes.auto(heads_recipe()), one, *BLOCK, grad=False).coverage == 1, "in inference it gains"
    forced = explained(heads_recipe(), one, *BLOCK)
    assert forced.coverage > 0 and "warning: estimated to be slower than unquantized, by 1.04 ms" in str(forced)


@pytest.mark.usefixtures("on_h100")
@pytest.mark.parametrize("recipe", [Float8CurrentScaling(fp8_dpa=True), DelayedScaling(fp8_dpa=True)], ids=str)
def test_auto_keeps_the_backward_alone_in_high_precision(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """The FP8 backward is slower than cuDNN's, as docs/measurements/attention.md has it."""
    monkeypatch.setattr(attention_choice, "knows_gluon", lambda: True)
    report = explained(recipes.auto(recipe), one, *BLOCK)
    reasons = {(d.role.tensor_type, d.gemm.value): (d.skip_reason, d.detail) for d in report.decisions}
    for slot, gemm in (("do", "dgrad"), ("do", "wgrad"), ("dp", "dgrad"), ("dp", "wgrad"), ("s", "wgrad")):
        reason, detail = reasons[slot, gemm]
        assert reason is SkipReason.NOT_PROFITABLE and detail.startswith("the backward: "), (slot, detail)
    assert reasons["qkv", "dgrad"] == (None, "as stored, dequantized") and reasons["s", "fprop"] == (None, "")
    assert "do=identity" in report.graphs["forward"]
    kernels = {work.what: work.kernel for _, _, work in report.work()}
    assert kernels["attention, backward"] == "cuDNN on dequantized q, k and v" and not report.slower()
    forced = explained(recipe, one, *BLOCK)
    assert "do=identity" not in forced.graphs["forward"] and not {d.skip_reason for d in forced.decisions} - {None}


@pytest.mark.usefixtures("on_h100")
@pytest.mark.parametrize("card", [H100, "a Hopper without rates"])
def test_auto_never_takes_the_reference_on_a_gpu(card: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("fxquant.passes.plan.resolve"), "card_name", lambda device: card)

    def attend(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q)

    recipe = heads_recipe(qkv=Float8CurrentScalingQuantizer(torch.float8_e5m2))
    report = explained(recipe, attend, LONG)
    why = "per_tensor_e5m2 in qkv"
    assert any(f"no FP8 kernel for the attention of <model> ({why})" in line for line in report.verdict())
    assert f"the reference, float32 scores in memory ({why})" in str(report)
    report = explained(recipes.auto(recipe), attend, LONG)
    assert {d.skip_reason for d in report.decisions} == {SkipReason.NOT_PROFITABLE}
    assert {d.detail for d in report.decisions} == {f"no FP8 kernel: {why}"}
    assert "fxquant" not in report.graphs["forward"] and len(report.verdict()) == 1


def test_elsewhere_the_reference_is_no_warning() -> None:
    report = explained(heads_recipe(), lambda q: F.scaled_dot_product_attention(q, q, q), SHORT)
    assert not any("warning" in line for line in report.verdict())
    assert "no FP8 kernel" not in str(report)
    on_card = report.on("H100")
    assert on_card.slower() and "Triton, FP8" in str(on_card), "of another card"


@pytest.mark.usefixtures("on_h100")
def test_slots_of_attention_stay_where_it_is_quantized_alone() -> None:
    recipe = recipes.auto(DelayedScaling(fp8_dpa=True))
    torch.compiler.reset()
    backend = fxquant.Backend(recipe, inner="aot_eager")
    x = torch.randn(1, 2, 16, 64, requires_grad=True)
    torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q), backend=backend)(x).sum().backward()
    assert {d.detail for d in backend.report().decisions} == {"no FP8 kernel: float32"}
    assert backend.state_dict() == {}


STEPS: dict[str, tuple[Step, ...]] = {
    "": (Step("mul", 0.125),),
    "causal": (Step("mul", 0.125), Step("causal")),
    "mask": (Step("mul", 0.125), Step("keep", extra=0)),
    "bias": (Step("mul", 0.125), Step("add", extra=0), Step("causal")),
    "fill": (Step("mul", 0.125), Step("fill", float("-inf"), extra=0)),
    "finite fill": (Step("mul", 0.125), Step("fill", -1e9, extra=0)),
    "mask, bias": (Step("keep", extra=0), Step("add", extra=1)),
    "bias, scale": (Step("add", extra=0), Step("mul", 0.125)),
    "learned scale": (Step("mul", extra=0),),
    "negative": (Step("mul", -0.125),),
    "cap": (Step("mul", 0.125), Step("tanh"), Step("mul", 50.0)),
    "sink": (Step("mul", 0.125), Step("sink", extra=0)),
    "number": (Step("add", 1.0),),
}
SPECS = {
    "head": per_role(qkv=HEAD, s=HEAD, do=HIGH, dp=HIGH),
    "head, quantized backward": per_role(qkv=HEAD, s=HEAD, do=HEAD, dp=HEAD),
    "tensor": per_role(qkv=FP8, s=FP8, do=FP8, dp=FP8),
    "e5m2": per_role(qkv=FP8, s=FP8, do=Float8CurrentScalingQuantizer(torch.float8_e5m2), dp=FP8),
    "pow2": per_role(qkv=Float8CurrentScalingQuantizer(force_pow_2_scales=True), s=FP8, do=HIGH, dp=HIGH),
    "delayed": per_role(qkv=Float8Quantizer(E4M3, 0), s=Float8Quantizer(E4M3, 1), do=HIGH, dp=HIGH),
    "delayed, quantized backward": per_role(
        qkv=Float8Quantizer(E4M3, 0),
        s=Float8Quantizer(E4M3, 1),
        do=Float8Quantizer(E5M2, 2),
        dp=Float8Quantizer(E5M2, 3),
    ),
    "blocks": per_role(qkv=Float8HeadQuantizer(block_len=128), s=HEAD, do=HIGH, dp=HIGH),
    "mxfp8": per_role(qkv=MX, s=HIGH, do=MX, dp=HIGH),
}


def lowered(facts: AttentionFacts, backward: bool) -> AttentionFacts:
    """The facts of a node on a fake CUDA device."""
    spec, width, dtype = facts.spec, facts.width, facts.dtype
    with FakeTensorMode():
        shape = [2, 3, 32, width][4 - facts.axes :]
        do = torch.empty(shape, dtype=dtype, device="cuda")
        payload = torch.empty(shape, dtype=torch.float8_e4m3fn, device="cuda")
        scale = torch.empty(shape[:-2], device="cuda")
        v = [torch.empty([*shape[:-2], facts.features, 32], dtype=torch.float8_e4m3fn, device="cuda"), scale]
        q, lse = [payload, scale], torch.empty(shape[:-1], device="cuda")
        extras = [torch.empty(32, 32, dtype=torch.bool, device="cuda")] * 2
        scales = [torch.empty(1, device="cuda") if given.is_delayed else None for given in (spec.s, spec.do, spec.dp)]
        text = str(spec.each(lambda given: dataclasses.replace(given, slot=-1)))
        if backward:
            wanted = [0] if facts.learned else []
            return attention_backward.facts_of(do, q, q, v, do, lse, extras, None, *scales, wanted, text, width)
        return attention_forward.facts_of(q, q, v, extras, None, scales[0], text, width, dtype)


@pytest.mark.parametrize("formats", SPECS)
def test_what_is_said_to_run_is_what_is_lowered(formats: str) -> None:
    answers = SPECS[formats].qfactory
    specs = {}
    for slot in ("qkv", "s", "do", "dp"):
        specs[slot] = answers(fxquant.QuantizerRole("dpa", slot)).spec(fxquant.Direction.ROWWISE)
    plain = {"axes": 4, "width": 64, "features": 64, "dtype": torch.bfloat16}
    cases = [(steps, plain, 0.0) for steps in STEPS.values()]
    for changed in (
        {"axes": 3}, {"width": 48, "features": 48}, {"features": 128}, {"dtype": torch.float32}, {"learned": True},
    ):  # fmt: skip
        cases.append((STEPS["bias" if "learned" in changed else ""], plain | changed, 0.0))
    cases.append((STEPS[""], plain, 0.1))
    for steps, sides, dropout in cases:
        spec = AttentionSpec(**specs, steps=steps, dropout=dropout)
        for called in (attention_forward, attention_backward):
            facts = AttentionFacts(spec=spec, keys=32, capability=(9, 0), **sides)
            said = called.choose(facts)
            kernel = called.choose(lowered(facts, called is attention_backward)).kernel
            assert bool(said.reason) == (said.kernel is AttentionKernel.REFERENCE), (steps, sides, said)
            assert kernel is said.kernel, (steps, sides, said)
