from __future__ import annotations

import pytest
import torch
from torch import nn

import fxquant
from fxquant.bench.training import SavedBytes
from fxquant.report.html import section


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(64, 128), nn.Linear(128, 64), nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


@pytest.mark.parametrize("recipe", ["mxfp8", "current_scaling"])
def test_what_a_forward_saves_is_what_autograd_keeps(recipe: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Block(), Block()), torch.randn(96, 64)
    compiled = fxquant.compile(model, recipe, options={"inner": "aot_eager"})
    compiled(x)
    kept = SavedBytes([*model.parameters(), x])
    with kept:
        compiled(x).sum().backward()
    report, explained = fxquant.report(compiled), fxquant.explain(model, recipe, x)
    assert report.saved is not None and report.saved.total == kept.total and report.saved == explained.saved
    plain = fxquant.explain(model, "high_precision", x).saved
    assert plain is not None and plain.quantized == plain.instead == 0
    assert report.saved.unquantized == pytest.approx(plain.total, abs=64) and 0 < report.saved.quantized < plain.total
    assert explained.saved is not None and "Saved for the backward" in section(explained)
