"""Pictures of a layer's neighbourhood: the boxes and their layout, as XML."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fxquant
from fxquant import (
    CustomRecipe,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    OptionError,
    Report,
)
from fxquant.decisions import NotFused
from fxquant.report.layered import arrange
from fxquant.report.neighbours import Units
from fxquant.report.picture import GRAPHS, pictures
from fxquant.snapshots import NodeText

SVG = "{http://www.w3.org/2000/svg}"


class Block(nn.Module):
    """A normalized MLP with a gate, around which a residual runs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(64)
        self.gate, self.up, self.down = nn.Linear(64, 96), nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


def mixed(role: fxquant.QuantizerRole) -> fxquant.Quantizer:
    return IdentityQuantizer() if role.name == "up" else HybridQuantizer(MXFP8Quantizer(), NVFP4Quantizer())


def example() -> Tensor:
    return torch.randn(32, 64, requires_grad=True)


@pytest.fixture(scope="module")
def report() -> Report:
    return fxquant.explain(Block(), CustomRecipe(qfactory=mixed), example())


def headings(svg: str) -> list[str]:
    return [text.text or "" for box in ET.fromstring(svg).iter(f"{SVG}g") for text in box.findall(f"{SVG}text")[:1]]


def test_around_a_layer_in_the_forward(report: Report) -> None:
    svg = report.picture("down")
    assert Counter(headings(svg)) == Counter(
        ["fprop of gate", "fprop of up", "<model>", "quantize input", "weight", "quantize weight", "fprop", "<model>"]
        + ["parameter or input"] * headings(svg).count("parameter or input")
    )
    assert "mxfp8_e4m3 rowwise" in svg and "not quantized: addmm" in svg and ">silu, mul<" in svg


def test_the_backward_names_its_gemms(report: Report) -> None:
    shown = headings(report.picture("gate", "backward"))
    assert {"dgrad", "wgrad", "quantize grad_output", "input, saved"} <= set(shown)
    assert shown.count("dgrad") == shown.count("wgrad") == 1


def test_a_picture_can_be_read_by_all(report: Report) -> None:
    """It has a name and a description, its text is large enough, and colours follow the reader's."""
    svg = report.picture("gate")
    root = ET.fromstring(svg)
    assert root.get("role") == "img" and root.find(f"{SVG}title").text == "forward around gate"
    description = root.find(f"{SVG}desc").text
    assert "fprop of quantize input and quantize weight" in description
    assert min(float(size) for size in re.findall(r"font(?:-size)?:([0-9.]+)px", svg)) >= 11
    assert "prefers-color-scheme: dark" in svg and not re.search(r'(fill|stroke)="#', svg)
    width, height = float(root.get("width")), float(root.get("height"))
    for box in root.iter(f"{SVG}rect"):
        assert 0 <= float(box.get("x")) <= width - float(box.get("width"))
        assert 0 <= float(box.get("y")) <= height - float(box.get("height"))


def test_halves_have_the_colours_of_their_formats(report: Report) -> None:
    boxes = [g for g in ET.fromstring(report.picture("down")).iter(f"{SVG}g") if len(g.findall(f"{SVG}rect")) == 3]
    assert [[rect.get("class") for rect in box.findall(f"{SVG}rect")[1:]] for box in boxes] == [["mxfp8", "nvfp4"]]


def said(svg: str) -> str:
    """The texts of a picture, whose lines are wrapped."""
    return " ".join(" ".join(re.findall(r"<text [^>]*>([^<]*)<", svg)).split())


def test_what_was_not_fused_has_its_reason() -> None:
    """With all stages, what a GPU fuses is fused in a copy; a kernel's own reasons come by the text of the operator."""
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    report = fxquant.explain(Block().bfloat16(), "mxfp8", x, stages=True)
    svg = report.picture("down")
    assert ">fused with silu_mul<" in svg and 'class="fused"' in svg
    svg = report.picture("down", "backward")
    sentence = "its tensor, because something else reads what it quantizes"
    assert sentence in said(svg) and "cast unfused" in svg
    (view,) = report.views["forward"]
    gemm = next(node for node in view if node.operator == "fxquant::scaled_mm" and node.layer == "down")
    operator = " ".join(("scaled_mm", *gemm.specs, "[32, 96]"))
    report.not_fused = [NotFused(step="lower", layer="down", operator=operator, reason="no kernel for such")]
    assert "An operator does not run in its first kernel, but in no kernel for such." in said(report.picture("down"))


def test_pictures_are_small_and_each_is_one(report: Report, tmp_path: Path) -> None:
    drawn = pictures(report)
    assert {name: [*svgs] for name, svgs in drawn.items()} == {name: [*GRAPHS] for name in ("gate", "up", "down")}
    again = Report.from_json(report.to_json())
    assert pictures(again) == drawn and again.picture("up") == report.picture("up")
    read = Report(recipe="mxfp8", decisions=report.decisions, drawn={"gate": drawn["gate"]})
    with pytest.raises(OptionError, match=r"was read, and has pictures of gate: of equal layers the first"):
        read.picture("up")
    assert report.picture("up", path=tmp_path / "up.svg") == (tmp_path / "up.svg").read_text()
    assert report.picture("up")._repr_svg_().startswith("<svg ")


def test_errors_say_what_to_do(report: Report) -> None:
    with pytest.raises(OptionError, match=r"no layer 'dwon'; the layers are gate, up, down"):
        report.picture("dwon")
    with pytest.raises(OptionError, match=r"graph='joint': it is 'forward' or 'backward'"):
        report.picture("down", "joint")
    with pytest.raises(OptionError, match=r"this report has no graphs"):
        Report(recipe="mxfp8").picture("down")


def test_an_epilogue_that_a_card_fuses_is_one_box() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(2048, 2048, bias=False, dtype=torch.bfloat16, device="meta")

        def forward(self, x: Tensor) -> Tensor:
            return x + self.up(x.sin())

    x = torch.empty(2048, 2048, dtype=torch.bfloat16, device="meta")
    report = fxquant.explain(Residual(), "current_scaling", x).on("H100")
    svg = report.picture("up")
    fused = "Triton" in str(report.epilogues[0].chosen(report.card).kernel)
    assert ("then add" in svg) is fused and ("leaves + residual to others" in said(svg)) is not fused
    assert headings(svg).count("<model>") == 1 + (not fused)


def node(name: str, operator: str, *reads: str, layer: str = "") -> NodeText:
    return NodeText(name=name, operator=operator, reads=reads, values=("f32[4]",), layer=layer)


def test_operators_are_one_box_unless_something_lies_between() -> None:
    nodes = (
        node("x", "input"), node("w", "input"), node("a", "sin", "x"), node("v", "view", "a"), node("b", "cos", "v"),
        node("mm", "mm", "b", "w", layer="up"), node("c", "add", "mm", "a"), node("d", "exp", "x"),
        node("e", "mul", "c", "d"),
    )  # fmt: skip
    units = Units(nodes)
    assert [[n.name for n in unit.nodes] for unit in units.units] == [
        ["x"], ["w"], ["a", "b"], ["mm"], ["c", "d", "e"],
    ]  # fmt: skip
    assert [unit.nodes[0].name for unit in units.around("up")] == ["x", "w", "a", "mm", "c"]
    assert units.around("down") == []


def test_edges_go_down_and_nodes_have_room() -> None:
    nodes = list("abcdefg")
    edges = [("a", "b"), ("a", "c"), ("b", "d"), ("c", "d"), ("a", "d"), ("e", "d"), ("d", "f"), ("f", "a"), ("g", "f")]
    layout = arrange(nodes, edges)
    layers = {key: layer for key, (_, layer) in layout.places.items()}
    assert layers == {"a": 0, "b": 1, "c": 1, "e": 1, "d": 2, "g": 2, "f": 3} and layout.layers == 4
    for layer in range(4):
        columns = sorted(column for column, at in layout.places.values() if at == layer)
        assert all(right - left >= 1 - 1e-9 for left, right in pairwise(columns))
    assert len(layout.edges["a", "d"]) == 3 and [at for _, at in layout.edges["f", "a"]] == [3, 2, 1, 0]
    assert min(column for column, _ in layout.places.values()) >= 0
