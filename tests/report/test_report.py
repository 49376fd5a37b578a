from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import replace
from typing import Any

import pytest

from fxquant.decisions import Decision, SkipReason
from fxquant.quantizers import (
    Float8CurrentScalingQuantizer,
    Float8HeadQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from fxquant.report.data import plain_spec
from fxquant.report.html import FAMILIES, page, section
from fxquant.report.report import Report
from fxquant.roles import GEMM_OPERANDS, Gemm, QuantizerRole


def matmul(
    site: int,
    name: str,
    quantizer: Quantizer | None = None,
    skip: SkipReason | None = None,
    detail: str = "",
    module_type: str = "linear",
    shape: tuple[int, int, int] = (64, 32, 128),
) -> list[Decision]:
    m, k, n = shape
    shapes = {"input": (m, k), "weight": (n, k), "grad_output": (m, n)}
    return [
        Decision(
            role=QuantizerRole(module_type, operand, name),
            gemm=gemm,
            direction=direction,
            shape=shapes[operand],
            quantizer=quantizer,
            skip_reason=skip,
            detail=detail,
            site=site,
            flops=2 * m * k * n,
        )
        for gemm, operands in GEMM_OPERANDS.items()
        for operand, direction in operands
    ]


@pytest.fixture
def report() -> Report:
    decisions = matmul(0, "layers.0.fc", MXFP8Quantizer()) + matmul(1, "layers.1.fc", MXFP8Quantizer())
    decisions += matmul(2, "router", None, SkipReason.TOO_SMALL, "N=8", shape=(64, 32, 8))
    return Report(recipe="mxfp8", decisions=decisions, unused=["rule 1: name='lyers.*'"])


def test_table_has_one_aligned_row_per_operand_and_gemm(report: Report) -> None:
    lines = report.table("router").splitlines()
    assert lines == [
        "layer   role         gemm   direction   shape     quantizer",
        "router  input        fprop  rowwise     [64, 32]  skipped: TOO_SMALL (N=8)",
        "router  weight       fprop  rowwise     [8, 32]   skipped: TOO_SMALL (N=8)",
        "router  grad_output  dgrad  rowwise     [64, 8]   skipped: TOO_SMALL (N=8)",
        "router  weight       dgrad  columnwise  [8, 32]   skipped: TOO_SMALL (N=8)",
        "router  grad_output  wgrad  columnwise  [64, 8]   skipped: TOO_SMALL (N=8)",
        "router  input        wgrad  columnwise  [64, 32]  skipped: TOO_SMALL (N=8)",
    ]


SUMMARY = [
    "recipe: mxfp8",
    "3 matmuls, 12/18 operands quantized, 97.0% of matmul FLOPs; 6 skipped: 6 TOO_SMALL",
    "unused in the recipe: rule 1: name='lyers.*'",
]


def test_a_report_prints_its_summary_and_a_row_for_each_kind_of_layer(report: Report) -> None:
    assert str(report).splitlines() == [
        *SUMMARY,
        "layer             M x K x N      operands",
        "layers.{0..1}.fc  64 x 32 x 128  mxfp8_e4m3",
        "router            64 x 32 x 8    skipped: TOO_SMALL (N=8)",
        "every operand, kernel and time: report.text(full=True), or --full in the command line",
    ]


def test_the_full_text_has_every_operand_behind_the_summary(report: Report) -> None:
    lines = report.text(full=True).splitlines()
    assert lines[:3] == SUMMARY and len(lines) == 3 + 1 + 18
    assert report.text("router").splitlines() == [*SUMMARY, *report.table("router").splitlines()]
    assert report.text(collapse=True).splitlines()[3:] == report.table(collapse=True).splitlines()


def test_operands_that_differ_are_told_apart_in_the_overview() -> None:
    decisions = matmul(0, "fc", MXFP8Quantizer())
    weights = [replace(d, quantizer=NVFP4Quantizer()) if d.role.tensor_type == "weight" else d for d in decisions]
    assert (
        Report(recipe="r", decisions=weights)
        .overview()
        .splitlines()[1]
        .endswith("input mxfp8_e4m3, weight nvfp4, grad_output mxfp8_e4m3")
    )
    directions = [replace(d, quantizer=NVFP4Quantizer()) if d.gemm == Gemm.WGRAD else d for d in decisions]
    row = Report(recipe="r", decisions=directions).overview().splitlines()[1]
    assert "input mxfp8_e4m3 rowwise, input nvfp4 columnwise, weight mxfp8_e4m3, grad_output mxfp8_e4m3 rowwise" in row


def test_a_report_of_many_kinds_of_layers_and_reasons_fits_a_screen() -> None:
    decisions = [d for i in range(80) for d in matmul(i, f"fc{i}", MXFP8Quantizer(), shape=(64, 32, 32 + 16 * i))]
    reasons = [f"reason {i}" for i in range(40)]
    report = Report(recipe="mxfp8", decisions=decisions, unused=reasons, breaks=reasons)
    lines = str(report).splitlines()
    assert len(lines) <= 60 and "and 50 more kinds of layers" in lines and "graph break: and 35 more" in lines
    assert len(report.text(full=True).splitlines()) > 480 + 80


def test_collapse_folds_layers_that_differ_in_a_number_only() -> None:
    decisions = []
    for i in range(4):
        decisions += matmul(4 * i, f"layers.{i}.fc1", MXFP8Quantizer())
        decisions += matmul(4 * i + 1, f"layers.{i}.fc2", NVFP4Quantizer() if i == 3 else MXFP8Quantizer())
        for expert in (0, 2):
            decisions += matmul(4 * i + 2 + expert // 2, f"layers.{i}.experts.{expert}", MXFP8Quantizer())
    report = Report(recipe="r", decisions=decisions)
    assert [(layer.name, layer.repeats) for layer in report.layers(collapse=True)] == [
        ("layers.{0..3}.fc1", 4),
        ("layers.{0..2}.fc2", 3),
        ("layers.{0..3}.experts.{0,2}", 8),
        ("layers.3.fc2", 1),
    ]
    assert len(report.table(collapse=True).splitlines()) == 1 + 4 * 6
    assert len(report.table().splitlines()) == 1 + 16 * 6


def test_flops_count_a_gemm_once_and_only_when_both_operands_are_quantized() -> None:
    decisions = matmul(0, "fc", MXFP8Quantizer())
    decisions[1] = dataclasses.replace(decisions[1], quantizer=None, skip_reason=SkipReason.HIGH_PRECISION)
    report = Report(recipe="r", decisions=decisions)
    one = 2 * 64 * 32 * 128
    assert report.flops == {"total": 3 * one, "quantized": 2 * one}
    assert report.coverage == pytest.approx(2 / 3)
    assert report.explained == 1.0


def test_report_without_matmuls_is_covered_and_prints() -> None:
    report = Report(recipe="mxfp8")
    assert report.coverage == report.explained == 1.0
    assert str(report) == "recipe: mxfp8\nno matmuls"
    assert "<h2>Model" not in section(report)


def test_roles_outside_linear_name_their_module_type() -> None:
    decisions = matmul(0, "", None, SkipReason.HIGH_PRECISION, module_type="matmul")
    assert Report(recipe="r", decisions=decisions).table().splitlines()[1].startswith("<model>  matmul.input ")


def test_json_holds_every_decision(report: Report) -> None:
    content = json.loads(report.to_json())
    assert content["summary"]["skipped"] == {"TOO_SMALL": 6}
    assert len(content["decisions"]) == 18
    assert content["decisions"][0] == {
        "layer": "layers.0.fc",
        "part": "",
        "module_type": "linear",
        "tensor_type": "input",
        "gemm": "fprop",
        "direction": "rowwise",
        "shape": [64, 32],
        "quantizer": "mxfp8_e4m3",
        "spec": "mxfp8_e4m3",
        "skip_reason": None,
        "detail": "",
        "form": "",
        "site": 0,
        "flops": 2 * 64 * 32 * 128,
        "shared": False,
        "merged": False,
        "bits": 0.0,
    }
    assert content["decisions"][-1]["skip_reason"] == "TOO_SMALL"


def leaves(report: Report) -> list[dict[str, Any]]:
    """The rows of matmuls in the page, from its data."""
    found = re.search(r'<script type="application/json" class="data">(.*?)</script>', section(report))
    assert found is not None
    nodes = json.loads(found[1])["nodes"]
    for node in nodes:
        nodes += node.get("nodes", ())  # the list grows while it is read
    return [node for node in nodes if "gemms" in node]


def test_html_is_one_file_and_escapes_what_it_shows(report: Report, tmp_path) -> None:
    report.recipe = "<b>&mine"
    report.decisions += matmul(3, "</script><b>", MXFP8Quantizer())
    path = tmp_path / "report.html"
    report.to_html(path)
    text = path.read_text(encoding="utf-8")
    assert "&lt;b&gt;&amp;mine" in text and "<b>&mine" not in text and "</script><b>" not in text
    assert not re.search(r"https?:|(src|href)=['\"](?!#)|@import|url\(", text)
    rows = {row["path"]: row for row in leaves(report)}
    assert list(rows) == ["layers.{0..1}.fc", "router", "</script><b>"]
    assert [row["count"] for row in rows.values()] == [2, 1, 1] and rows["router"]["reasons"] == ["TOO_SMALL"]
    for said in (
        "TOO_SMALL",
        "N=8",
        SkipReason.TOO_SMALL.remedy,
        "rule 1: name=&#x27;lyers.*&#x27;",
        f"{report.coverage:.1%}",
    ):
        assert said in text


@pytest.mark.parametrize(
    ("quantizer", "family"),
    [
        (Float8CurrentScalingQuantizer(), "per_tensor"),
        (Float8HeadQuantizer(), "per_head"),
        (MXFP8Quantizer(scale_mode="floor"), "mxfp8"),
        (NVFP4Quantizer(with_2d_quantization=True), "nvfp4"),
    ],
)
def test_html_colours_operands_by_format_family(quantizer: Quantizer, family: str) -> None:
    report = Report(recipe="r", decisions=matmul(0, "fc", quantizer))
    families = [operand[4] for _, _, operands, _ in leaves(report)[0]["gemms"] for operand in operands]
    assert families == [family] * 6 and f"<span class='chip {family}'>{FAMILIES[family]}" in section(report)
    assert f".fxq .{family} {{" in page("", "") and f"--{family}:" in page("", "")


def test_inference_has_one_gemm_in_the_page() -> None:
    decisions = [d for d in matmul(0, "fc", MXFP8Quantizer()) if d.gemm == Gemm.FPROP]
    rows = leaves(Report(recipe="r", decisions=decisions + matmul(1, "head", MXFP8Quantizer())))
    assert [[gemm for _, gemm, _, _ in row["gemms"]] for row in rows] == [["fprop"], ["fprop", "dgrad", "wgrad"]]


def test_equal_modules_stand_once_in_the_page() -> None:
    """Blocks that differ in one layer are apart, also where a detail names a layer of the block itself."""
    decisions, site = [], 0
    for i in range(4):
        for name in ("attn.q", "attn.k", "mlp"):
            detail = f"as m.layers.{i}.attn quantized it" if name == "mlp" else ""
            skip = SkipReason.TOO_SMALL if (i, name) == (3, "attn.k") else None
            decisions += matmul(site, f"m.layers.{i}.{name}", None if skip else MXFP8Quantizer(), skip, detail)
            site += 1
    rows = leaves(Report(recipe="r", decisions=decisions))
    names = [f"m.layers.{block}.{name}" for block in ("{0..2}", "3") for name in ("mlp", "attn.q", "attn.k")]
    assert {row["path"]: row["count"] for row in rows} == dict(zip(names, [3, 3, 3, 1, 1, 1], strict=True))


def test_specs_are_shown_without_what_only_tells_layers_and_processes_apart() -> None:
    assert plain_spec("per_tensor_e4m3(slot=12)") == "per_tensor_e4m3(delayed)"
    assert plain_spec("custom(key=Int8Quantizer-0a1b2c)") == "Int8Quantizer"
    assert plain_spec("per_row_e4m3(pow2,torchao)") == "per_row_e4m3(pow2,torchao)"
