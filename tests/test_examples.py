"""The programs in docs/examples run, each in a small size; those that resume are in tests/integrations."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
RUNS = {
    "pretrain_gpt": (["--inner", "aot_eager", "--steps", "2", "--width", "32", "--depth", "1"], "blocks.0.up"),
    "hybrid_recipe": (["--steps", "2"], "nvfp4(rht,stochastic)"),
    "own_format": (["--steps", "1", "--formats", "int8, clipped"], "int8, clipped: loss"),
    "serve_generate": (["--tokens", "2", "--recipes", "weight_only_nvfp4"], "weight nvfp4"),
}


def run(name: str, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # Dynamo imports it by its name
    spec.loader.exec_module(module)
    module.main(arguments)
    return capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", RUNS)
def test_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    torch._dynamo.reset()
    if name == "serve_generate":
        pytest.importorskip("transformers", reason="transformers is not installed")
    arguments, shown = RUNS[name]
    assert shown in run(name, arguments, capsys)


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch has no distributed package")
def test_fsdp2_loop() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = [str(EXAMPLES / "fsdp2_loop.py"), "--inner", "aot_eager", "--steps", "2"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False, timeout=120)
    assert "stored quantized" in done.stdout, done.stderr[-3000:]


@pytest.mark.sweep
def test_export_to_cpp(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = run("export_to_cpp", ["--output", str(tmp_path)], capsys).splitlines()[-1]
    python, cpp = (float(part.split()[-1]) for part in printed.split(", "))
    assert python == pytest.approx(cpp, rel=1e-5)


def test_every_example_has_a_page_and_a_test() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    page = (EXAMPLES.parent / "examples.md").read_text(encoding="utf-8")
    tests = "".join(
        path.read_text() for path in (Path(__file__), EXAMPLES.parents[1] / "tests/integrations/test_trainers.py")
    )
    assert all(f"[{name}.py](examples/{name}.py)" in page for name in names)
    assert not [name for name in names if f'"{name}' not in tests and f"test_{name}" not in tests]
