"""The programs in docs/examples run, each in a small size; those that resume are in tests/integrations."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch
from ranks import Ranks

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
RUNS = {
    "pretrain_gpt": (["--inner", "aot_eager", "--steps", "2", "--width", "32", "--depth", "1"], "blocks.0.up"),
    "hybrid_recipe": (["--steps", "2"], "nvfp4(rht,stochastic)"),
    "own_format": (["--steps", "1", "--formats", "int8, clipped"], "int8, clipped: loss"),
    "serve_generate": (["--tokens", "2", "--recipes", "weight_only_nvfp4"], "q_proj  16 x 64 x 64 "),
    "own_weight_only": (["--tokens", "2", "--formats", "MXFP4"], "weight e2m1_1x32_e8m0"),
}


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # Dynamo imports it by its name
    spec.loader.exec_module(module)
    return module


def run(name: str, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    load(name).main(arguments)
    return capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", RUNS)
def test_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    torch._dynamo.reset()
    if name in ("serve_generate", "own_weight_only"):
        pytest.importorskip("transformers", reason="transformers is not installed")
    arguments, shown = RUNS[name]
    assert shown in run(name, arguments, capsys)


@pytest.mark.filterwarnings("ignore")
def test_hugging_face_loop_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    small = ["--inner", "aot_eager", "--width", "32", "--layers", "1", "--output", str(tmp_path)]
    steps = []
    for more in (["--steps", "2"], ["--steps", "1"], ["--steps", "2", "--resume"]):
        torch._dynamo.reset()
        printed = run("hugging_face_loop", [*small, *more], capsys)
        assert "weight per_tensor_e4m3(delayed)" in printed
        steps.append([line for line in printed.splitlines() if line.startswith("step ")])
    assert steps[0] == steps[1] + steps[2]
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").config.hidden_size == 32


def on_ranks(number: int, name: str, *arguments: str) -> list[str]:
    """Runs an example on several ranks, and returns the lines that the first prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(number)]
    script = [str(EXAMPLES / f"{name}.py"), "--inner", "aot_eager", *arguments]
    done = subprocess.run([*command, *script], capture_output=True, text=True, check=False, timeout=180)
    assert "stored quantized" in done.stdout, done.stderr[-3000:]
    return [line for line in done.stdout.splitlines() if line.startswith("step ")]


def fsdp2_loop() -> str:
    """What the example prints on a rank whose group is there already."""
    printed = io.StringIO()
    with (
        mock.patch.object(torch.distributed, "init_process_group"),
        mock.patch.object(torch.distributed, "destroy_process_group"),
        contextlib.redirect_stdout(printed),
    ):
        load("fsdp2_loop").main(["--inner", "aot_eager", "--steps", "2"])
    return printed.getvalue()


@pytest.mark.slow
def test_fsdp2_loop(ranks: Ranks) -> None:
    first, second = ranks.run(fsdp2_loop)
    assert re.findall(r"^step (\d): loss ", first, re.MULTILINE) == ["0", "1"] and "stored quantized" in first
    assert not second


@pytest.mark.sweep
def test_mesh_2d_resumes_on_a_mesh_of_another_size(tmp_path: Path) -> None:
    alone = on_ranks(1, "mesh_2d", "--output", str(tmp_path / "alone"), "--steps", "4")
    four = on_ranks(4, "mesh_2d", "--output", str(tmp_path / "mesh"), "--tensor", "2", "--steps", "2")
    two = on_ranks(2, "mesh_2d", "--output", str(tmp_path / "mesh"), "--resume", "--steps", "4")
    assert [*four, *two] == alone  # losses to four digits: blocks of mxfp8 lie in one part each


@pytest.mark.sweep
def test_export_to_cpp(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = run("export_to_cpp", ["--output", str(tmp_path)], capsys).splitlines()[-1]
    python, cpp = (float(part.split()[-1]) for part in printed.split(", "))
    assert python == pytest.approx(cpp, rel=1e-5)


def test_examples_know_the_options_of_their_docstrings() -> None:
    for path in EXAMPLES.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        told, _, code = text.partition('"""\n\nimport')
        assert f"{path.name}" in told, path
        script = told.rpartition(path.name)[2]
        assert all(f'"{option}"' in code for option in re.findall(r"--[\w-]+", script)), (path.name, script)


def test_every_example_has_a_page_and_a_test() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    page = (EXAMPLES.parent / "examples.md").read_text(encoding="utf-8")
    tests = "".join(
        path.read_text() for path in (Path(__file__), EXAMPLES.parents[1] / "tests/integrations/test_trainers.py")
    )
    assert all(f"[{name}.py](examples/{name}.py)" in page for name in names)
    assert not [name for name in names if f'"{name}' not in tests and f"test_{name}" not in tests]
