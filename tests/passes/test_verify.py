"""A graph that has not the form of its place is caught, and the error names the pass and the stage."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import fx, nn

import fxquant
from fxquant.errors import GraphVerificationError
from fxquant.passes import pipeline
from fxquant.passes.captured import Captured
from fxquant.passes.pipeline import BORDERS, CAPTURED, JOINT, SPLIT, Pass, run
from fxquant.passes.settings import Settings
from fxquant.passes.verify import COMPOSITES, FUSED, STATEFUL

Change = Callable[[fx.Graph], object]


def quantization() -> fx.Graph:
    """A graph of one quantization."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(32, 32)
    quantize = graph.call_function(torch.ops.fxquant.quantize.default, (x, "per_tensor_e4m3", "rowwise"))
    quantize.meta["val"] = [x.meta["val"], x.meta["val"].new_ones(1)]
    graph.output(quantize)
    return graph


def node(graph: fx.Graph) -> fx.Node:
    return list(graph.nodes)[1]


def call(name: str) -> Change:
    def change(graph: fx.Graph) -> None:
        with graph.inserting_before(node(graph)):
            graph.call_function(getattr(torch.ops.fxquant, name).default, ()).meta["val"] = None

    return change


BROKEN: dict[str, tuple[Change, str]] = {
    "no value": (lambda graph: node(graph).meta.clear(), "it has no value"),
    "no order": (lambda graph: node(graph).append(next(iter(graph.nodes))), "torch's lint"),
    "a composite": (call("linear"), "fxquant::linear has no place here"),
    "fused too early": (call("fused_scaled_mm"), "fxquant::fused_scaled_mm has no place here"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_pass_is_named(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, message = BROKEN[case]

    def broken(graph: fx.Graph, settings: Settings) -> int:
        change(graph)
        return 1

    stage = (JOINT[0], Pass(broken, "this test breaks a graph"), *JOINT[1:])
    monkeypatch.setitem(BORDERS, stage, BORDERS[JOINT])
    with pytest.raises(GraphVerificationError, match=rf"behind the pass broken of the stage joint: .*{message}"):
        run(stage, quantization(), Settings())
    monkeypatch.setenv("FXQUANT_VERIFY", "0")
    run((stage[1],), quantization(), Settings())


def test_what_a_stage_gets_is_checked() -> None:
    graph = quantization()
    call("linear")(graph)
    with pytest.raises(GraphVerificationError, match=r"before the stage split: .*fxquant::linear"):
        run(SPLIT, graph, Settings())


def test_nothing_is_left_of_what_a_stage_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = tuple(step for step in SPLIT if step.name != "lower")
    monkeypatch.setitem(BORDERS, stage, BORDERS[SPLIT])
    with pytest.raises(GraphVerificationError, match=r"behind the pass materialize_shared_inputs of the stage split: "):
        run(stage, quantization(), Settings())


def test_what_was_decided_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def insert(captured: Captured, settings: Settings) -> Captured:
        return captured

    stage = tuple(replace(step, run=insert) if step.name == "insert" else step for step in CAPTURED[:-2])
    monkeypatch.setitem(BORDERS, stage, BORDERS[CAPTURED])
    monkeypatch.setattr("fxquant.backend.backend.CAPTURED", stage)
    with pytest.raises(Exception, match=re.compile("the pass insert of the stage captured: .*it was to be quantized")):
        fxquant.explain(nn.Linear(32, 32), "mxfp8", torch.ones(32, 32))


def test_every_stage_has_a_border_and_tests_check_it() -> None:
    stages = {name: value for name, value in vars(pipeline).items() if isinstance(value, tuple) and value in BORDERS}
    assert {name.lower(): BORDERS[stage].stage for name, stage in stages.items()} == {
        border.stage: border.stage for border in BORDERS.values()
    }
    assert os.environ["FXQUANT_VERIFY"] == "graphs"
    for name in COMPOSITES | STATEFUL | FUSED:
        assert hasattr(torch.ops.fxquant, name)
