"""The scripts that run one product of a report alone: each is short, runs, and shows the error of its product."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import OneGroupedWeight, OneWeight
from torch import Tensor, nn

import fxquant
from fxquant import CustomRecipe, HybridQuantizer, MXFP8Quantizer, NVFP4Quantizer, OptionError, recipes


class Transposed(OneWeight):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Attention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def linear(recipe: Any) -> fxquant.Report:
    return fxquant.explain(nn.Linear(64, 96), recipe, torch.randn(32, 64, requires_grad=True))


def heads(count: int = 3) -> list[Tensor]:
    return [torch.randn(1, 2, 32, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(count)]


def experts() -> fxquant.Report:
    x, ends = torch.randn(64, 64).bfloat16().requires_grad_(), torch.tensor([32, 64], dtype=torch.int32)
    return fxquant.explain(OneGroupedWeight(2, 64, 96, dtype=torch.bfloat16), "mxfp8", x, ends)


def hybrid(role: fxquant.QuantizerRole) -> fxquant.Quantizer:
    return HybridQuantizer(MXFP8Quantizer(), NVFP4Quantizer())


CASES: dict[str, tuple[Callable[[], fxquant.Report], str]] = {
    "linear wgrad": (lambda: linear("mxfp8"), "wgrad"),
    "linear delayed fprop": (lambda: linear("delayed_scaling"), "fprop"),
    "linear hybrid dgrad": (lambda: linear(CustomRecipe(qfactory=hybrid)), "dgrad"),
    "one side": (lambda: linear("weight_only_fp8"), "fprop"),
    "experts wgrad": (experts, "wgrad"),
    "attention": (lambda: fxquant.explain(Attention(), recipes.Float8CurrentScaling(fp8_dpa=True), *heads()), "dgrad"),
}


def run(text: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> float:
    """Runs a script; returns the error that it shows."""
    shown: list[str] = []
    monkeypatch.setattr(sys, "argv", ["product.py", *arguments])
    exec(compile(text, "product.py", "exec"), {"__name__": "product", "print": shown.append})
    table, error, times = shown
    assert "operands quantized" in table and times == "no GPU: no times"
    match = re.fullmatch(r"[a-z]+: ([0-9.]+)% from the unquantized result", error)
    assert match is not None
    return float(match[1])


@pytest.mark.parametrize("case", CASES)
def test_a_script_runs_and_shows_the_error(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    explained, gemm = CASES[case]
    path = tmp_path / "product.py"
    text = explained().repro("<model>", gemm, path=path)
    assert path.read_text() == text and len(text.splitlines()) < 60
    assert 0 < run(text, monkeypatch) < 25


def test_saved_and_measured_operands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros whose one value is a power of two have no error; what was measured is how random operands spread."""
    layer, x = nn.Linear(64, 96), 3 * torch.randn(32, 64)
    text = fxquant.measure(layer, "mxfp8", x).repro("<model>")
    assert f"rms={x.square().mean().sqrt():.4g}, amax={x.abs().max():.4g}" in text
    assert run(text, monkeypatch) > 0
    torch.save({"input": torch.eye(32, 64), "weight": torch.ones(96, 64)}, tmp_path / "saved.pt")
    assert run(text, monkeypatch, str(tmp_path / "saved.pt")) == 0


def test_strides_are_those_of_the_model() -> None:
    report = fxquant.explain(Transposed(64, 96), "mxfp8", torch.randn(64, 32).T)
    text = report.repro(report.decisions[0].layer)
    assert "random(32, 64, strides=(1, 32))" in text and "strides=(1, 96)" in text


class OwnQuantizer(fxquant.IdentityQuantizer):
    """A quantizer whose text is no Python."""

    def __repr__(self) -> str:
        return "<mine>"


def test_errors_say_what_to_do() -> None:
    report = linear("mxfp8")
    with pytest.raises(OptionError, match=r"gemm='forward': it is one of fprop, dgrad, wgrad"):
        report.repro("<model>", "forward")
    with pytest.raises(OptionError, match=r"no product is called 'up'; those here are <model>"):
        report.repro("up")
    with pytest.raises(OptionError, match=r"wgrad of <model> is not quantized \(grad_output skipped: HIGH_PRECISION"):
        linear("high_precision").repro("<model>", "wgrad")
    with pytest.raises(OptionError, match=r"<model> has no dgrad: nothing asks for that gradient"):
        fxquant.explain(nn.Linear(64, 96), "mxfp8", torch.randn(32, 64)).repro("<model>", "dgrad")
    decision = replace(report.decisions[0], quantizer=OwnQuantizer())
    with pytest.raises(OptionError, match=r"quantizer of <model>, <mine>, cannot be written into a script"):
        fxquant.Report(recipe="mine", decisions=[decision]).repro("<model>")
