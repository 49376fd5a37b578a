"""The graphs before and after each pass, as a report that was asked for them shows them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

import fxquant
from fxquant import OptionError, Report
from fxquant.passes import pipeline
from fxquant.passes.look import Stages, snapshot, watched
from fxquant.report import stepper
from fxquant.snapshots import NodeText, changes


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.up(x)))


@pytest.fixture(scope="module")
def report() -> Report:
    return fxquant.explain(Mlp(), "current_scaling", torch.randn(32, 64, requires_grad=True), stages=True)


def test_what_find_found_of_one_layer(report: Report) -> None:
    """Versions of torch differ in names of inputs, and in whether these have a layer."""
    lines = report.stage("find", layer="^down$").splitlines()
    assert_expected_inline(
        re.sub(r"l_\w+_", "p", "\n".join(line for line in lines if not line.endswith("= input"))),
        """\
find of the captured graph: 2 nodes changed
  everything else reads matmuls as facts
~ linear_1: f32[32, 32] = linear(silu, p, p)  # linear 32 x 96 x 32""",
    )


def test_what_is_written_is_marked_beside_what_is_gone(report: Report) -> None:
    text = report.stage("insert", layer="down")
    assert "\n- linear_1: f32[32, 32] = linear(silu, " in text
    assert "# linear down 32 x 96 x 32; input per_tensor_e4m3; weight per_tensor_e4m3; grad_output per_tens" in text
    assert "\n+ linear_default_1: f32[32, 32] = fxquant::linear(silu, " in text


def test_a_stage_is_all_of_its_passes_over_each_graph(report: Report) -> None:
    halves = report.stage("MEANING").split("\n\n")
    assert [half.splitlines()[0].split(" graph")[0] for half in halves] == [
        "meaning of the forward", "meaning of the backward",
    ]  # fmt: skip
    assert report.stage("meaning", graph="backward") == halves[1]
    assert "+ hybrid_quantize_default" in halves[0] and "- quantize" in halves[0]
    assert "# must save" in report.stage("save_scales")


def test_the_list_of_all_has_every_pass(report: Report) -> None:
    lines = report.stage().splitlines()
    passes = [step for stage in ("CAPTURED", "BOUND", "JOINT") for step in getattr(pipeline, stage)]
    half = [step.name for step in (*pipeline.MEANING, *pipeline.before_lowering())]
    names = [step.name for step in passes] + 2 * half
    assert [line.split()[1] for line in lines] == names
    assert "captured  find of the captured graph: 2 nodes changed" in lines


def test_errors_say_what_to_do(report: Report) -> None:
    with pytest.raises(OptionError, match=r"no pass or stage 'fnid' .* those that did: captured, inputs_first, "):
        report.stage("fnid")
    with pytest.raises(OptionError, match=r"graph='\(' is not a regular expression"):
        report.stage("find", graph="(")
    with pytest.raises(OptionError, match=r"kept no stages: .* stages=True"):
        Report(recipe="mxfp8").stage("find")
    assert report.stage("find", layer="nothing").endswith("no node of these layers")


def test_nodes_that_stay_take_memory_once(report: Report) -> None:
    nodes = [node for step in report.steps for node in step.after]
    assert len({id(node) for node in nodes}) == len(set(nodes)) < len(nodes) / 4


def test_removed_nodes_stand_where_they_stood() -> None:
    a, b, c = (NodeText(name=name, operator="op") for name in "abc")
    marked = changes((a, b, c), (NodeText(name="a", operator="other"), c, NodeText(name="d", operator="op")))
    assert [(mark, node.name) for mark, node in marked] == [("~", "a"), ("-", "b"), (" ", "c"), ("+", "d")]
    assert [(mark, node.name) for mark, node in changes((b, a), (a,))] == [("-", "b"), (" ", "a")]


def test_the_stepper_has_the_steps_that_change_a_block() -> None:
    """Of blocks that repeat the first; lines stand in its data once, and marks with their numbers."""
    report = fxquant.explain(nn.Sequential(Mlp(), nn.Linear(32, 64), Mlp()), "mxfp8", torch.randn(32, 64), stages=True)
    assert stepper.block_of(report) == "0"
    html = stepper.section(report)
    data = json.loads(html.partition("application/json'>")[2].partition("</script>")[0])
    titles = [step["title"] for step in data["steps"]]
    assert titles[:4] == [
        "captured: find, captured, 2 changed",
        "captured: name_layers, captured, 2 changed",
        "captured: resolve, captured, 2 changed",
        "captured: insert, captured, 5 changed",
    ]
    assert html.count("<option>") == len(titles) and "<code>0</code>" in html
    inserted = data["steps"][3]["lines"]
    assert {mark for mark, _ in inserted} == {"-", "+", "~"} | ({" "} & {mark for mark, _ in inserted})
    assert "fxquant::linear" in data["lines"][next(line for mark, line in inserted if mark == "+")]
    assert len(set(data["lines"])) == len(data["lines"])
    assert stepper.section(Report(recipe="mxfp8")) == ""


def test_texts_of_nodes_that_stay_are_those_that_would_be_written_anew() -> None:
    """Nodes whose parts are the same objects keep their text."""
    stages, fresh = Stages(dict), list[tuple[NodeText, ...]]()

    def both(stage: str, step: str, because: str, subject: Any) -> None:
        stages(stage, step, because, subject)
        if step:
            fresh.append(snapshot(subject, {}))

    with watched(both):
        backend = fxquant.Backend("current_scaling", inner="aot_eager")
        torch.compile(Mlp(), backend=backend)(torch.randn(32, 64, requires_grad=True)).sum().backward()
    assert len(fresh) > 20 and [step.after for step in stages.steps] == fresh
