"""Reports as data: a published schema, JSON that is read back whole, a table of pandas, and a cell of a notebook."""

from __future__ import annotations

import copy
import json
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxquant
from fxquant import BlockQuantizer, CustomRecipe, ProgramError, QuantizedTensor, Quantizer, Report
from fxquant.quantizers import QuantizedOperand
from fxquant.recipes import DelayedScaling
from fxquant.report.data import ReportData
from fxquant.report.html import section

SCHEMA = json.loads((Path(sys.modules["fxquant.report"].__path__[0]) / "schema.json").read_text())


@dataclass(frozen=True)
class Halves(Quantizer):
    """A quantizer of a user's own."""

    scale: float = 2.0

    def quantize(self, x: Tensor, *, rowwise: bool = True, columnwise: bool = True) -> QuantizedTensor:
        row, column = (QuantizedOperand((t / self.scale).half()) for t in (x, x.mT))
        return QuantizedTensor(row if rowwise else None, column if columnwise else None)

    def dequantize(self, operand: QuantizedOperand) -> Tensor:
        return operand.data.float() * self.scale


class Attending(nn.Module):
    """A linear layer, an attention and a head too small to quantize, with a break of the graph before it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        q = nn.functional.gelu(self.up(x)).view(2, 4, 32, 64).expand(2, 4, 32, 64)
        return self.head(nn.functional.scaled_dot_product_attention(q, q, q))


def of_two(role: fxquant.QuantizerRole) -> Quantizer:
    return Halves() if role.name == "0" else BlockQuantizer("e2m3", (1, 32), "e8m0")


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    """A report of each kind."""
    two, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), torch.randn(32, 64)
    attended = fxquant.explain(Attending(), DelayedScaling(fp8_dpa=True), torch.randn(256, 64))
    compiled = fxquant.compile(two, "mxfp8", options={"inner": "aot_eager"})
    compiled(x).sum().backward()
    meta = nn.Sequential(nn.Linear(4096, 4096), nn.GELU(), nn.Linear(4096, 4096)).bfloat16().to("meta")
    carded = fxquant.explain(meta, "current_scaling", torch.empty(8192, 4096, device="meta").bfloat16()).on("H100")
    return {
        "explained": attended,
        "another card's": carded,
        "compiled": compiled.report() if hasattr(compiled, "report") else fxquant.report(compiled),
        "own quantizers": fxquant.explain(two, CustomRecipe(qfactory=of_two), x),
        "measured": fxquant.measure(two, "nvfp4", x),
        "empty": Report(recipe="mxfp8", uncompiled=["no graph has run"]),
    }


KINDS = ("explained", "another card's", "compiled", "own quantizers", "measured", "empty")


def closed(schema: Any) -> Any:
    """A copy of a schema that allows no field which it does not describe."""
    if isinstance(schema, dict):
        more = {"additionalProperties": False} if "properties" in schema else {}
        return {**{name: closed(item) for name, item in schema.items()}, **more}
    return [closed(item) for item in schema] if isinstance(schema, list) else schema


@pytest.mark.parametrize("kind", KINDS)
def test_reports_are_as_their_schema_describes(kind: str, reports: dict[str, Report]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(closed(SCHEMA))
    content = json.loads(reports[kind].to_json())
    validator.validate(content)
    validator.validate(json.loads(reports[kind].to_json(collapse=True)))
    assert content["decisions"] or kind == "empty"
    assert not validator.is_valid({**content, "recipe": 3}) and not validator.is_valid({**content, "other": 3})


@pytest.mark.parametrize("kind", KINDS)
def test_json_is_read_back_whole(kind: str, reports: dict[str, Report], tmp_path: Path) -> None:
    report, path = reports[kind], tmp_path / "report.json"
    report.save(path)
    for again in (Report.from_json(report.to_json()), Report.load(path)):
        assert again.to_json() == report.to_json()
        assert again.text(full=True) == report.text(full=True) and str(again) == str(report)
        assert section(again) == section(report) and again._repr_html_() == report._repr_html_()
        assert [d.matmul for d in again.decisions] == [d.matmul for d in report.decisions]
        assert [d.attention for d in again.decisions] == [d.attention for d in report.decisions]
        if kind != "own quantizers":  # which another process does not know
            assert again.on("H100").to_json() == report.on("H100").to_json()


def test_every_field_of_a_report_is_in_its_json(reports: dict[str, Report]) -> None:
    content = json.loads(reports["measured"].to_json())
    shown_otherwise = {"estimated", "views", "steps"}  # products have the estimates, pictures the nodes
    assert {f.name for f in fields(ReportData)} - shown_otherwise <= set(content)
    assert reports["measured"].losses and reports["another card's"].time()["quantized_us"]


def test_a_report_that_is_read_says_what_was_estimated_then(reports: dict[str, Report]) -> None:
    content = json.loads(reports["another card's"].to_json())
    content["products"][0]["work"][0]["quantized_us"] = 1e6
    again = Report.from_json(json.dumps(content))
    assert again.time()["quantized_us"] > 1e6 and again.on("H100").time() == reports["another card's"].time()


@pytest.fixture
def texts(reports: dict[str, Report]) -> dict[str, str]:
    report = reports["measured"]
    content = json.loads(report.to_json())
    without = {name: item for name, item in content.items() if name != "products"}
    damaged = copy.deepcopy(content)
    damaged["decisions"][0]["gemm"] = "sgemm"
    return {
        "the text is not JSON": "recipe: mxfp8",
        "JSON, but not of a report": '{"schema": 1, "formats": []}',
        "has the form 2 of a report, and this fxquant reads 1": json.dumps({**content, "schema": 2}),
        "layers folded: write it without --collapse": report.to_json(collapse=True),
        "whose reports cannot be read back": json.dumps(without),
        "fields cannot be read .SettingError: a Gemm is 'fprop' or .* not 'sgemm'": json.dumps(damaged),
    }


def test_what_is_no_report_is_said_in_a_sentence(texts: dict[str, str], tmp_path: Path) -> None:
    for message, text in texts.items():
        with pytest.raises(ProgramError, match=message):
            Report.from_json(text)
    with pytest.raises(ProgramError, match=r"absent.json cannot be read: No such file"):
        Report.load(tmp_path / "absent.json")


def test_rows_are_a_table_of_pandas(reports: dict[str, Report]) -> None:
    pytest.importorskip("pandas")
    frame = reports["compiled"].to_dataframe()
    assert len(frame) == len(reports["compiled"].decisions) and set(frame.layer) == {"0", "2"}
    assert list(reports["measured"].to_dataframe("losses").what) == ["linear", "linear"]
    assert set(reports["compiled"].to_dataframe("work", layer="0").layer) == {"0"}


def test_without_pandas_an_error_says_so(reports: dict[str, Report], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pandas is not installed: pip install pandas"):
        reports["compiled"].to_dataframe()
    with pytest.raises(fxquant.OptionError, match="did you mean 'decisions'"):
        reports["compiled"].to_dataframe("decision")


def test_a_cell_of_a_notebook_is_small(reports: dict[str, Report]) -> None:
    some = reports["compiled"].decisions
    many = [replace(d, role=replace(d.role, name=f"a.long.path<to>.layer.{i}.of"), site=100 * i + d.site,
                    shape=(i, 64)) for i in range(200) for d in some]  # fmt: skip
    cell = Report(recipe="mxfp8", decisions=many, breaks=["a reason" * 99] * 99)._repr_html_()
    assert 10_000 < len(cell.encode()) < 30_000 and "more kinds of layers" in cell
    assert "<script" not in cell and "100.0%" in cell and reports["explained"]._repr_html_().count("<li>") > 0
