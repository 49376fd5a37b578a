"""The facts of a compilation in torch's structured trace, as ``TORCH_TRACE=folder`` writes it for tlparse."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._logging._internal import TorchLogsFormatter, trace_log

import fxquant
from fxquant.compat.private import trace_artifact
from fxquant.passes.graph.considered import allowed
from fxquant.passes.pipeline import Lowering
from fxquant.passes.settings import Settings

Artifacts = Callable[[], dict[str, str]]


@pytest.fixture
def artifacts(tmp_path: Path) -> Iterator[Artifacts]:
    """The artifacts of fxquant that a trace has, by name."""
    handler = logging.FileHandler(tmp_path / "trace.log")
    handler.setFormatter(TorchLogsFormatter(trace=True))
    logging.Logger.addHandler(trace_log, handler)  # for other tests it takes none

    def read() -> dict[str, str]:
        handler.flush()
        texts: dict[str, str] = {}
        lines = (tmp_path / "trace.log").read_text().splitlines()
        for i, line in enumerate(lines):
            entry: dict[str, Any] = json.loads(line[line.index("{") :]) if "] {" in line[:200] else {}
            name = entry.get("artifact", {}).get("name", "")
            if name.startswith("fxquant"):
                ends = [j for j in range(i + 1, len(lines) + 1) if j == len(lines) or not lines[j].startswith("\t")]
                texts[name] = "\n".join(line.removeprefix("\t") for line in lines[i + 1 : ends[0]])
                assert "frame_id" in entry or name == "fxquant_not_fused", entry
        return texts

    yield read
    trace_log.removeHandler(handler)
    handler.close()


def test_a_trace_has_decisions_and_graphs(artifacts: Artifacts) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
    compiled = fxquant.compile(model, "mxfp8", options={"inner": "aot_eager"})
    compiled(torch.randn(32, 64)).sum().backward()
    texts = artifacts()
    assert list(texts) == ["fxquant_decisions", "fxquant_report", "fxquant_forward_graph", "fxquant_backward_graph"]
    assert "skipped: TOO_SMALL" in texts["fxquant_decisions"] and "fprop" in texts["fxquant_decisions"]
    assert fxquant.Report.from_json(texts["fxquant_report"]).coverage > 0.5
    assert (
        "torch.ops.fxquant.scaled_mm" in texts["fxquant_forward_graph"]
        and "tangents" in texts["fxquant_backward_graph"]
    )


def test_a_trace_says_why_something_was_not_fused(artifacts: Artifacts) -> None:
    module = torch.fx.symbolic_trace(nn.ReLU())
    allowed(next(iter(module.graph.nodes)), "fuse_producers", "a reason")
    Lowering(Settings())(module.graph)
    text = artifacts()["fxquant_not_fused"]
    assert text.startswith("fuse_producers, <model> in the forward graph, ") and text.endswith(", because a reason")


def test_without_a_trace_no_text_is_made() -> None:
    assert not trace_log.handlers
    trace_artifact("fxquant_report", lambda: pytest.fail("a text was made for nobody"))
