from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import refusal

DEMO = Path(__file__).parents[1] / "docs" / "demo"


def run(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(DEMO / "train.py"), "--out", str(out), *arguments]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_the_model_knows_nothing_of_fxquant() -> None:
    tree = ast.parse((DEMO / "model.py").read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} == {"__future__", "torch"}


@pytest.mark.slow
def test_demo_trains_compares_and_writes_its_results(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    hybrid = "mxfp8 fwd, nvfp4 bwd"
    done = run(tmp_path, "--steps", "6", "--recipes", "bf16", "mxfp8", hybrid)
    assert done.returncode == 0, done.stderr
    assert f"every operand of one layer under {hybrid!r}" in done.stdout
    assert "blocks.{0..1}.mlp.up  weight       fprop  rowwise     [384, 128]  mxfp8_e4m3" in done.stdout
    assert "blocks.{0..1}.mlp.up  weight       dgrad  columnwise  [384, 128]  nvfp4" in done.stdout

    results = json.loads((tmp_path / "results.json").read_text())
    bf16, mxfp8, mixed = results["runs"]
    assert [len(r["losses"]) for r in results["runs"]] == [6, 6, 6]
    assert bf16["coverage"] == 0 and mxfp8["coverage"] > 0.8 and mixed["coverage"] >= mxfp8["coverage"]
    assert mixed["saved_bytes"] < mxfp8["saved_bytes"] < bf16["saved_bytes"]
    for quantized in (mxfp8, mixed):
        assert quantized["losses"][0] == pytest.approx(bf16["losses"][0], rel=0.01)
        assert quantized["losses"][-1] < quantized["losses"][0] - 0.3
        assert quantized["losses"][-1] == pytest.approx(bf16["losses"][-1], rel=0.03)

    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    curves = (tmp_path / "loss_curves.svg").read_text(encoding="utf-8")
    assert "<svg" in page and page.count("<details>") >= 2
    assert "<svg" in curves and "prefers-color-scheme: dark" in curves and ">gap to bf16<" in curves


def test_demo_refuses_unknown_recipes() -> None:
    assert "invalid choice: 'int3'" in refusal(DEMO / "train.py", "--recipes", "int3")


@pytest.mark.slow
def test_resumed_runs_have_the_bits_of_uninterrupted_ones() -> None:
    """Delayed scaling with its amax history, and stochastic rounding, each saved halfway and restored elsewhere."""
    recipes = ("delayed_scaling", "nvfp4")
    command = [sys.executable, str(DEMO / "resume.py"), "--steps", "4", "--recipes", *recipes]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("identical") == len(recipes)
