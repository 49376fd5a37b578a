"""`fxquant.measure`: the error of every product's result, and what its operands lose."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from helpers import compiled
from test_grouped import SPELLINGS, ends, rows_in
from test_reuse import SelfAttention, recipe
from torch import Tensor, nn

import fxquant
from fxquant import (
    CustomRecipe,
    Float8CurrentScalingQuantizer,
    Float8HeadQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    Quantizer,
    RecipeError,
    Report,
)
from fxquant.report.html import section


def test_errors_of_linears_are_those_of_the_same_tensors() -> None:
    """Of 100 features that are padded, with a bias, and behind another quantized layer."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 32)), torch.randn(48, 64)
    x[:, :3] *= 1e-9
    report = fxquant.measure(model, "rowwise", x)
    assert [(each.layer, each.what) for each in report.losses] == [("0", "linear"), ("2", "linear")]
    with torch.no_grad():
        torch.compiler.reset()
        backend = fxquant.Backend("rowwise", inner="aot_eager")
        hidden = torch.compile(model[:1], backend=backend)(x)
        exact = model[0](x)
    assert report.losses[0].error == pytest.approx(((hidden - exact).norm() / exact.norm()).item(), rel=1e-4)
    assert 0.01 < report.losses[1].error < 0.05
    assert report.losses[0].lost["input"] == pytest.approx(3 / 64, abs=0.005) and report.losses[0].lost["weight"] < 0.02
    text = str(report)
    assert "elements that became zero" in text and "relative error" in text and "per_row_e4m3" in text
    assert json.loads(report.to_json())["losses"][1]["what"] == "linear"
    assert "Largest measured error" in section(report) and "data-key='error'" in section(report)
    assert "relative error" not in str(fxquant.explain(model, "rowwise", x)), "which runs nothing"
    with pytest.raises(RecipeError):
        fxquant.measure(model, "no such recipe", x)


@pytest.mark.parametrize("spell", ["grouped_mm", "bmm"])
def test_errors_of_experts_are_those_of_their_groups(spell: str) -> None:
    """Rows of no group count for nothing."""
    torch.manual_seed(0)
    multiply, w = SPELLINGS[spell], nn.Parameter(torch.randn(4, 48, 64).bfloat16())
    ragged = spell == "grouped_mm"
    x, offs = torch.randn((64, 48) if ragged else (4, 33, 48)).bfloat16(), ends(3, 3, 40, 57)
    x[..., :3] *= 1e-9
    if ragged:
        x[57:] = torch.nan
    (loss,) = fxquant.measure(multiply, "rowwise", x, w, offs).losses
    torch.compiler.reset()
    with torch.no_grad():
        groups = [x[rows] for rows in rows_in(offs.tolist())] if ragged else x
        exact = torch.cat([rows.float() @ each.float() for rows, each in zip(groups, w, strict=True)])
        got = compiled(multiply, "rowwise")(x, w, offs).reshape(-1, 64)[: len(exact)]
    assert loss.what == "experts"
    assert loss.error == pytest.approx(((got - exact).norm() / exact.norm()).item(), rel=1e-4)
    assert loss.lost["input"] == pytest.approx(3 / 48, abs=0.005) and loss.lost["weight"] < 0.02


def attention_under(qkv: Quantizer, q: Tensor, k: Tensor, v: Tensor) -> Report:
    softmax = IdentityQuantizer() if isinstance(qkv, MXFP8Quantizer) else Float8HeadQuantizer()
    answers = {"qkv": qkv, "s": softmax}
    torch.compiler.reset()
    return fxquant.measure(
        F.scaled_dot_product_attention,
        CustomRecipe(qfactory=lambda role: answers.get(role.tensor_type, IdentityQuantizer())), q, k, v,
    )  # fmt: skip


def test_outliers_in_queries_and_keys_are_seen_and_blocks_recover_from_them() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 4, 256, 128).unbind()
    plain = attention_under(Float8CurrentScalingQuantizer(), q, k, v).losses[0]
    q[..., 7], k[..., 9] = q[..., 7] * 2**17, k[..., 9] * 2**17
    k[..., 7], q[..., 9] = 0, 0  # the scores are as they were
    tensor, blocks = (
        attention_under(each, q, k, v).losses[0] for each in (Float8CurrentScalingQuantizer(), MXFP8Quantizer())
    )
    assert plain.error < 0.06 and max(plain.lost.values()) < 0.01
    assert tensor.error > 8 * plain.error and min(tensor.lost["q"], tensor.lost["k"]) > 0.5 > tensor.lost["v"]
    assert blocks.error < tensor.error / 3 and max(blocks.lost.values()) < 0.15


def test_attention_beside_linears_with_a_shared_tensor() -> None:
    torch.manual_seed(0)
    model, x = SelfAttention(kv_heads=2).bfloat16(), torch.randn(2, 24, 64, dtype=torch.bfloat16)
    torch.compiler.reset()
    losses = fxquant.measure(model, recipe(), x).losses
    assert [each.what for each in losses] == ["linear"] * 3 + ["attention", "linear"]
    assert all(0.005 < each.error < 0.08 for each in losses), losses
