"""Comparing two reports: which layers changed, as text, JSON and a page, from Python and from the shell."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import fxquant
from fxquant import MXFP8Quantizer, OptionError, ProgramError, Quantizer, Report
from fxquant.__main__ import main
from fxquant.decisions import Decision, Matmul, SkipReason
from fxquant.quantizers import Float8BlockQuantizer
from fxquant.report.data import Loss
from fxquant.report.diff_views import Diff
from fxquant.report.header import Header
from fxquant.roles import GEMM_OPERANDS, QuantizerRole

H100 = "NVIDIA H100 80GB HBM3"


def linear(site: int, name: str, quantizer: Quantizer | None, k: int = 4096, n: int = 4096) -> list[Decision]:
    """The six operands of a linear layer of 8192 rows."""
    shapes = {"input": (8192, k), "weight": (n, k), "grad_output": (8192, n)}
    facts = Matmul(m=8192, k=k, n=n, device=H100, capability=(9, 0), weight=f"w{site}", input=f"x{site}")
    return [
        Decision(role=QuantizerRole("linear", operand, name), gemm=gemm, direction=direction, shape=shapes[operand],
                 quantizer=quantizer, skip_reason=None if quantizer else SkipReason.HIGH_PRECISION, site=site,
                 flops=2 * 8192 * k * n, matmul=facts)
        for gemm, operands in GEMM_OPERANDS.items() for operand, direction in operands
    ]  # fmt: skip


def model(quantizer: Quantizer, kept: tuple[int, ...] = (), count: int = 32, extra: str = "") -> Report:
    """A model of repeated layers, some of whose `down` are kept in high precision."""
    decisions: list[Decision] = []
    for i in range(count):
        decisions += linear(3 * i, f"layers.{i}.attn.q", quantizer)
        decisions += linear(3 * i + 1, f"layers.{i}.mlp.down", None if i in kept else quantizer, k=14336)
        decisions += linear(3 * i + 2, f"layers.{i}.router", None, n=64)
    decisions += linear(999, extra, quantizer) if extra else []
    header = Header(model="Llama", versions={"torch": "2.13.0", "fxquant": "0.1.0"}, recipe=f"recipe = {quantizer}")
    return Report(recipe=type(quantizer).__name__, decisions=decisions, header=header)


@pytest.fixture(scope="module")
def two_recipes() -> Diff:
    return fxquant.diff(model(MXFP8Quantizer()), model(Float8BlockQuantizer(), kept=(3, 17), extra="head"))


def test_two_recipes_say_what_changed_on_a_screen(two_recipes: Diff) -> None:
    lines = str(two_recipes).splitlines()
    assert len(lines) < 30 and max(map(len, lines)) < 400 and lines[0].split() == ["a", "b"]
    text = re.sub(r" +", " ", str(two_recipes))
    assert "2 layers no longer quantized: layers.{3,17}.mlp.down\n" in text
    assert "1 layer only in b: head\n" in text
    assert "62 layers in other formats: layers.{0..31}.attn.q, layers.{0..2,4..16,18..31}.mlp.down\n" in text
    assert "32 layers the same\n" in text and "router" not in text
    assert " layers.{3,17}.mlp.down ×2 mxfp8_e4m3 → skipped: HIGH_PRECISION; " in text
    assert "FLOPs quantized " in text and "torch" not in text.replace("torchao", "")


def test_changes_are_data(two_recipes: Diff) -> None:
    content = json.loads(two_recipes.to_json())
    assert content["same"] == 32 and content["differs"] and content["a"]["header"]["model"] == "Llama"
    gone = next(change for change in content["changes"] if change["kind"] == "no longer quantized")
    assert gone["layers"] == ["layers.3.mlp.down", "layers.17.mlp.down"] and len(gone["operands"]) == 6
    assert gone["operands"][0] == {"gemm": "fprop", "operand": "input", "direction": "rowwise", "a": "mxfp8_e4m3",
                                   "b": "skipped: HIGH_PRECISION"}  # fmt: skip
    assert gone["bytes"]["a"] < gone["bytes"]["b"] == 2 * 4096 * 14336 * 2
    assert {pair["what"] for pair in gone["kernels"]} >= {"fprop", "dgrad", "wgrad"}


def test_the_same_report_has_no_differences() -> None:
    report = model(MXFP8Quantizer())
    other = replace(report, header=replace(report.header, date="2026-11-29"))
    same = fxquant.diff(report, other)
    assert not same and str(same).splitlines()[-1] == "all 96 layers are the same" and same.same == 96


def test_times_errors_kernels_and_versions_of_equal_decisions_are_compared() -> None:
    report = model(MXFP8Quantizer(), count=2)
    report.losses = [Loss(layer=f"layers.{i}.attn.q", what="linear", error=0.02, lost={}) for i in range(2)]
    content = json.loads(report.to_json())
    content["header"]["versions"]["torch"] = "2.15.0"
    content["losses"][1]["error"] = 0.04
    content["products"][0]["work"][0]["quantized_us"] = 4e3
    content["products"][1]["work"][0]["kernel"] = "another"
    difference = fxquant.diff(report, json.dumps(content))
    kinds = {change.kind: change for change in difference.changes}
    assert kinds["another time"].layers == ("layers.0.attn.q",) and kinds["another error"].errors[0].b == 0.04
    assert kinds["other kernels"].kernels[0].b == "another" and difference.same == 3
    assert re.search(r"torch +2.13.0 +2.15.0", str(difference)) and "error of linear 2% → 4%" in str(difference)
    assert not fxquant.diff(report, report, tolerance=0.5)
    wide = fxquant.diff(report, json.dumps(content), tolerance=0.6)
    assert {change.kind for change in wide.changes} == {"other kernels", "another time"}


def test_the_page_is_one_file_and_escapes_what_it_shows(two_recipes: Diff, tmp_path: Path) -> None:
    two_recipes.to_html(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "2 layers no longer quantized" in text and "layers.{3,17}.mlp.down" in text and "62 layers in" in text
    assert "http:" not in text and "https:" not in text and len(text) < 100_000
    named = fxquant.diff(model(MXFP8Quantizer(), extra="<b>"), model(MXFP8Quantizer()))
    named.to_html(tmp_path / "page.html")
    assert "&lt;b&gt;" in (tmp_path / "page.html").read_text() and "<b>&" not in (tmp_path / "page.html").read_text()


def test_inputs_that_are_no_reports_are_told(tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match=r"absent.json cannot be read"):
        fxquant.diff(tmp_path / "absent.json", model(MXFP8Quantizer()))
    with pytest.raises(OptionError, match="a is an int: a Report"):
        fxquant.diff(3, model(MXFP8Quantizer()))  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="tolerance"):
        fxquant.diff(model(MXFP8Quantizer()), model(MXFP8Quantizer()), tolerance=-1)


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    paths = str(tmp_path / "old.json"), str(tmp_path / "new.json")
    model(MXFP8Quantizer(), count=2).save(paths[0])
    model(Float8BlockQuantizer(), count=2).save(paths[1])
    return paths


def test_the_shell_compares_and_shows_saved_reports(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = files
    assert main(["diff", old, new, "-o", str(tmp_path / "diff.html")]) == 0
    assert "old.json" in capsys.readouterr().out and "old.json" in (tmp_path / "diff.html").read_text()
    assert main(["diff", old, new, "--exit-code"]) == 1 and main(["diff", old, old, "--exit-code"]) == 0
    capsys.readouterr()
    assert main(["diff", old, new, "--json"]) == 0 and json.loads(capsys.readouterr().out)["same"] == 2
    assert main(["report", old, "-o", str(tmp_path / "page.html")]) == 0
    assert "6 matmuls" in capsys.readouterr().out and "layers" in (tmp_path / "page.html").read_text()
    assert main(["report", new, "--json"]) == 0 and capsys.readouterr().out.strip() == Path(new).read_text()


def test_the_shell_never_overwrites_a_report(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    old, new = files
    before = Path(old).read_bytes()
    assert main(["diff", old, new, "-o", old]) == main(["report", old, "-o", old]) == 1
    assert "is an input, which would be overwritten" in capsys.readouterr().err and Path(old).read_bytes() == before
    assert main(["report", "absent.json"]) == 1
    assert capsys.readouterr().err == "fxquant: error: absent.json cannot be read: No such file or directory\n"


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 192)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return nn.functional.scaled_dot_product_attention(q, k, v)


def test_an_attention_is_one_layer_with_both_its_products() -> None:
    x = torch.randn(2, 32, 64)
    plain, fp8 = (
        fxquant.explain(Attends(), fxquant.Float8CurrentScaling(fp8_dpa=fp8_dpa), x) for fp8_dpa in (False, True)
    )
    difference = fxquant.diff(plain, fp8)
    assert [change.name for change in difference.changes] == ["<model> attention"] and difference.same == 1
    gemms = {operand.gemm for operand in difference.changes[0].operands}
    assert gemms == {f"{part} {gemm}" for part in ("QK^T", "PV") for gemm in ("fprop", "dgrad", "wgrad")}
