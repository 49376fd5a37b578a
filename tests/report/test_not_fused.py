"""What was considered and not fused is in the log, and in the report of a compiled model."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.nn.functional import silu

from fxquant import Backend
from fxquant.decisions import NotFused
from fxquant.report.html import section
from fxquant.report.report import Report


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(128, 256), nn.Linear(128, 256), nn.Linear(256, 128)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(silu(self.gate(x)) * self.up(x))


@pytest.mark.usefixtures("without_cpp")
def test_a_compiled_model_says_why_kernels_were_not_fused(caplog: pytest.LogCaptureFixture) -> None:
    """A CPU stands in for the GPU."""
    backend = Backend("current_scaling")
    backend.settings = replace(backend.settings, device="cpu")
    with caplog.at_level(logging.DEBUG, logger="fxquant.passes.graph.considered"):
        torch.compile(Block().bfloat16(), backend=backend)(torch.randn(128, 128).bfloat16()).sum().backward()
    report = backend.report()
    lines = [line for line in report.text().splitlines() if line.startswith("not fused")]
    assert_expected_inline("\n".join(lines), """\
not fused: 2 x something else reads what it quantizes (fuse_producers)
not fused: 1 x silu_mul: computing it twice, once for its amax, is slower (fuse_producers)
not fused: 1 x cuBLAS _scaled_mm, per tensor (no measured rates for cpu), without + bias, + residual (fuse_epilogues)\
""")  # fmt: skip
    assert "fuse_producers: layer down: %hybrid_quantize" in caplog.text
    assert sum(report.summary()["not_fused"].values()) == len(json.loads(report.to_json())["not_fused"])
    assert {left.layer for left in report.not_fused} == {"gate", "up", "down"}
    assert "<summary><b>Not fused</b>" in section(report)


def test_reasons_are_counted() -> None:
    names = ("a", "a", "b")
    left = [NotFused(step=step, layer="0.fc1", operator=f"quantize {i}", reason="why") for i, step in enumerate(names)]
    report = Report(recipe="mxfp8", not_fused=left)
    assert report.text().endswith("no matmuls\nnot fused: 2 x why (a)\nnot fused: 1 x why (b)")
    assert json.loads(report.to_json())["not_fused"][2] == {
        "layer": "0.fc1", "operator": "quantize 2", "reason": "why", "step": "b",
    }  # fmt: skip
    assert "Not fused" not in section(Report(recipe="mxfp8"))
