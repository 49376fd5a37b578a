from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fxquant.__main__ import main
from fxquant.factories import FACTORIES
from fxquant.formats import FORMATS
from fxquant.recipes import RECIPES

MODELS = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))

def with_args():
    return model(), (torch.randn(4, 64),)

def with_kwargs():
    return model(), {"input": torch.randn(4, 64)}

def with_both():
    return model(), [torch.randn(4, 64)], {}

def wrong():
    return model()

def no_model():
    return 3, ()

number = 3
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"models_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODELS)
    monkeypatch.syspath_prepend(tmp_path)
    return name


@pytest.mark.parametrize("function", ["with_args", "with_kwargs", "with_both"])
def test_explain_prints_a_row_per_operand(models: str, function: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{models}:{function}", "--recipe", "mxfp8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["layer", "role", "gemm", "direction", "shape", "quantizer"]
    assert any(line.startswith("0 ") and line.endswith("mxfp8_e4m3") for line in lines)
    assert any(line.startswith("2 ") and "skipped: TOO_SMALL" in line for line in lines)
    assert lines[-1].startswith("2 matmuls, ")


def test_explain_filters_layers_and_shows_graphs(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{models}:with_args", "--layer", "^0$", "--graphs"]) == 0
    out = capsys.readouterr().out
    assert "TOO_SMALL (" not in out
    assert "forward graph\n" in out and "backward graph\n" in out and "fxquant" in out


def test_explain_takes_factories_of_the_library(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{models}:with_args", "--recipe", "factories.mxfp8_fwd_high_precision_bwd"]) == 0
    assert "mxfp8_e4m3" in capsys.readouterr().out
    assert main(["explain", f"{models}:with_args", "--recipe", "factories.mxfp9"]) == 1


def test_explain_tells_of_another_card(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["explain", f"{models}:with_args", "--recipe", "auto(rowwise)", "--card"]
    assert main([*command, "H100"]) == 0
    out = capsys.readouterr().out
    assert "recipe: auto(rowwise)" in out and "cuBLAS _scaled_mm, rowwise" in out
    assert "no measured rates for these dtypes or kernels on NVIDIA H100" in out, "the model is float32"
    assert main([*command, "A100"]) == 1
    assert "known cards: NVIDIA H100" in capsys.readouterr().err


def test_explain_writes_json_and_html(models: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "report.html"
    assert main(["explain", f"{models}:with_args", "--recipe", "nvfp4", "--json", "--html", str(page)]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["summary"]["matmuls"] == 2
    assert page.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_module:f"], "cannot import 'no_such_module'"),
        (["{models}:absent"], "has no function 'absent'"),
        (["{models}:number"], "has no function 'number'"),
        (["{models}:wrong"], "must return (model, args)"),
        (["{models}:no_model"], "must return (model, args)"),
        (["{models}:with_args", "--recipe", "mxpf8"], "did you mean 'mxfp8'?"),
        (["{models}:with_args", "--recipe", "nope"], "unknown recipe 'nope'. Known recipes: "),
        (["{models}:with_args", "--recipe", "factories.mxpf8"], "did you mean 'factories.mxfp8'? known factories: "),
        (["{models}:with_args", "--html", "absent/report.html"], "absent: no such folder"),
    ],
)
def test_failures_are_one_line_and_exit_1(
    models: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *(a.format(models=models) for a in arguments)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("fxquant: error: ") and captured.err.count("\n") == 1
    assert message in captured.err


@pytest.mark.parametrize(
    "arguments", [[], ["nothing"], ["explain"], ["explain", "module"], ["explain", "m:f", "--layer", "("]]
)
def test_wrong_usage_exits_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "usage: python -m fxquant" in capsys.readouterr().err


def test_formats_lists_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["formats"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(FORMATS)
    assert main(["formats", "--json"]) == 0
    rows = {row["format"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["mxfp8_e4m3"]["one scale for"] == "1x32"
    assert rows["nvfp4"]["bits/element"] == "4.5"


def test_recipes_and_env_say_how_each_recipe_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "--json"]) == 0
    rows = {row["recipe"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == [*RECIPES, *(f"factories.{name}" for name in FACTORIES)]
    assert rows["factories.high_precision_fwd_mxfp8_bwd"]["input"] == "identity|mxfp8_e4m3"
    assert rows["factories.mxfp8_fwd_high_precision_bwd"]["weight"] == "mxfp8_e4m3>identity"
    assert rows["high_precision"]["on the CPU"] == "native"
    assert rows["rowwise"]["on Hopper"] == "native"
    assert rows["nvfp4"]["on Hopper"] == "emulated"
    assert main(["env", "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)["recipes"]) == list(RECIPES)
    assert main(["env"]) == 0
    assert capsys.readouterr().out.splitlines()[0].startswith("fxquant ")


def test_runs_from_the_shell_in_the_users_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODELS)
    command = [sys.executable, "-m", "fxquant", "explain", "mine:with_args", "--recipe", "high_precision"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "skipped: HIGH_PRECISION" in done.stdout
