"""What was considered and not fused is in the log, and in the report of a compiled model."""

from __future__ import annotations

import inspect
import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.nn.functional import silu

from fxquant import Backend
from fxquant.decisions import _NOT_TAKEN, NotFused
from fxquant.kernels.linear.problem import Problem
from fxquant.passes import pipeline
from fxquant.report.data import EpilogueGemm
from fxquant.report.fusions import kinds_of_epilogues, unfused
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
    assert_expected_inline("\n".join(lines).replace(", because ", ",\n  because "), """\
not fused: 2 x a quantization is not fused with what computes its tensor,
  because something else reads what it quantizes (fuse_producers, backward)
not fused: 1 x a quantization is not fused with what computes its tensor,
  because computing it twice, once for its amax, is slower (silu_mul) (fuse_producers, forward)
not fused: 1 x a GEMM does not finish its result itself,
  because its kernel, cuBLAS _scaled_mm, per tensor (no measured rates for cpu), leaves + bias, + residual to others \
(fuse_epilogues, forward)\
""")  # fmt: skip
    assert "fuse_producers: layer down: %hybrid_quantize" in caplog.text
    assert sum(report.summary()["not_fused"].values()) == len(json.loads(report.to_json())["not_fused"])
    assert {left.layer for left in report.not_fused} == {"gate", "up", "down"}
    assert "<summary><b>Not fused</b>" in section(report)


def test_reasons_are_counted() -> None:
    names = ("a", "a", "b")
    left = [NotFused(step=step, layer="0.fc1", operator=f"quantize {i}", reason="why") for i, step in enumerate(names)]
    report = Report(recipe="mxfp8", not_fused=left)
    assert report.text().endswith(
        "no matmuls\nnot fused: 2 x the pass a did not take an operator, because why (a)\n"
        "not fused: 1 x the pass b did not take an operator, because why (b)"
    )
    assert json.loads(report.to_json())["not_fused"][2] == {
        "layer": "0.fc1", "operator": "quantize 2", "reason": "why", "step": "b", "graph": "",
    }  # fmt: skip
    assert "Not fused" not in section(Report(recipe="mxfp8"))


def test_reasons_say_their_graph_and_name_repeated_layers_once() -> None:
    left = [
        NotFused(step="pair_directions", layer=f"layers.{i}.up", operator="quantize", reason="why", graph=graph)
        for i in range(3) for graph in ("forward", "backward")
    ]  # fmt: skip
    rows = unfused(Report(recipe="mxfp8", not_fused=left))
    assert [(row.times, row.graph, row.layers) for row in rows] == [
        (3, "forward", ["layers.{0..2}.up"]), (3, "backward", ["layers.{0..2}.up"]),
    ]  # fmt: skip
    sentence = "the two directions of a tensor are quantized by a kernel each, because why"
    assert rows[0].sentence == sentence and f">{sentence.capitalize()}</td>" in section(
        Report(recipe="mxfp8", not_fused=left)
    )


@pytest.mark.parametrize("step", [step for stage in (pipeline.JOINT, pipeline.SPLIT) for step in stage])
def test_every_pass_that_considers_something_has_its_sentence(step: pipeline.Pass) -> None:
    source = Path(inspect.getsourcefile(step.run) or "").read_text()
    if re.search(r"\ballowed\(", source):
        assert step.name in _NOT_TAKEN


def test_epilogues_are_grouped_by_kind_and_repeated_layers() -> None:
    def gemm(layer: str, graph: str = "forward", **problem: Any) -> EpilogueGemm:
        sizes = Problem(64, 32, 16, "per_tensor_e4m3", "per_tensor_e4m3", torch.bfloat16, True, **problem)
        return EpilogueGemm(layer, graph, sizes, "")

    gemms = [gemm(f"layers.{i}.{name}", residual=True) for i in range(4) for name in ("o", "down")]
    gemms += [gemm("layers.0.up", activation="gelu"), gemm("layers.0.o", "backward", residual=True)]
    rows = kinds_of_epilogues(Report(recipe="mxfp8", epilogues=gemms, card="H100"))
    kernel, reason = gemms[0].chosen("H100").kernel, gemms[0].chosen("H100").reason
    facts = f"(64 x 32 x 16; {reason})"
    assert rows[0] == (
        "8", "+ residual", str(kernel), "forward", f"layers.{{0..3}}.o {facts}\nlayers.{{0..3}}.down {facts}",
    )  # fmt: skip
    lines = Report(recipe="mxfp8", epilogues=gemms, card="H100").epilogue_table(collapse=True).splitlines()
    assert [line.split()[0] for line in lines[1:]] == [
        "layers.0.o", "layers.0.o", "layers.{0..3}.down", "layers.{1..3}.o", "layers.0.up",
    ]  # fmt: skip
    assert [row[0] for row in rows] == ["8", "1", "1"] and rows[1][1] == "gelu" and rows[2][3] == "backward"
