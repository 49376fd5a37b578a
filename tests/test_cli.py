from __future__ import annotations

import importlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fxquant
from fxquant.__main__ import main
from fxquant.factories import FACTORIES, PAPERS
from fxquant.formats import FORMATS
from fxquant.recipes import RECIPES
from fxquant.tools.console import printed

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

def wrong_shape():
    return model(), (torch.randn(4, 63),)

def fails():
    raise KeyError("no weights")

def exits():
    raise SystemExit(3)

number = 3

import fxquant
recipe = fxquant.NVFP4BlockScaling(disable_rht=True)
name = "rowwise"
rules = fxquant.Rules([fxquant.Rule("mxfp8", module_type="linear")])

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.o = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        q = self.q(x).view(2, -1, 2, 32).transpose(1, 2)
        return self.o(nn.functional.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(2, -1, 64))
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"models_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODELS)
    monkeypatch.syspath_prepend(tmp_path)
    return name


@pytest.mark.parametrize("function", ["with_args", "with_kwargs", "with_both"])
def test_explain_prints_a_row_per_operand(models: str, function: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{models}:{function}", "--recipe", "mxfp8", "--full"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "recipe: mxfp8" and lines[1].startswith("2 matmuls, ")
    assert ["layer", "role", "gemm", "direction", "shape", "quantizer"] in [line.split() for line in lines]
    assert any(line.startswith("0 ") and line.endswith("mxfp8_e4m3") for line in lines)
    assert any(line.startswith("2 ") and "skipped: TOO_SMALL" in line for line in lines)
    assert main(["explain", f"{models}:{function}", "--recipe", "mxfp8"]) == 0
    overview = capsys.readouterr().out.splitlines()
    assert len(overview) < 10 < len(lines) and "--full" in overview[-1]


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
    for card in ("A100", ""):
        assert main([*command, card]) == 1
        assert f"no rates for {card!r}; known cards: NVIDIA H100" in capsys.readouterr().err


def test_explain_writes_json_and_html(models: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "report.html"
    assert main(["explain", f"{models}:with_args", "--recipe", "nvfp4", "--json", "--html", str(page)]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["summary"]["matmuls"] == 2
    assert page.read_text().startswith("<!doctype html>")


def test_explain_prints_what_a_pass_has_changed(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["explain", f"{models}:with_args", "--layer", "^0$", "--stage"]
    assert main([*command, "find"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("find of the captured graph: 2 nodes changed") and "# linear 4 x 64 x 128" in printed
    assert main(command) == 0 and "captured  find of the captured graph" in capsys.readouterr().out
    assert main([*command, "fnid", "--full"]) == 1
    assert "unknown stage 'fnid'; did you mean 'find'? --stage without a name" in capsys.readouterr().err


def test_report_writes_the_page_of_saved_json(models: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, page = tmp_path / "report.json", tmp_path / "report.html"
    assert main(["explain", f"{models}:with_args", "--recipe", "nvfp4"]) == 0
    printed = capsys.readouterr().out
    assert main(["explain", f"{models}:with_args", "--recipe", "nvfp4", "--json", "--graphs", "--html", str(page)]) == 0
    saved.write_text(capsys.readouterr().out)
    first = page.read_text()
    assert main(["report", str(saved), "-o", str(page)]) == 0
    made = r"<dt>made</dt><dd>[^<]*"
    assert re.sub(made, "", page.read_text()) == re.sub(made, "", first) and "2 matmuls" in capsys.readouterr().out
    assert main(["report", str(saved)]) == 0 and capsys.readouterr().out == printed
    assert main(["report", str(saved), "--json", "--card", "H100"]) == 0
    assert "H100" in json.loads(capsys.readouterr().out)["estimate"]["card"]
    assert main(["report", str(saved), "-o", str(page), "--layer", "0", "--full"]) == 0
    assert "note: a page has all of a report: --layer, --full has no effect" in capsys.readouterr().err
    assert main(["report", str(saved), "--layer", "head"]) == 0
    assert "note: --layer 'head' has no effect" in capsys.readouterr().err
    assert main(["report", str(page)]) == 1 and "is not JSON" in capsys.readouterr().err
    content = json.loads(saved.read_text())
    (saved.parent / "cut.json").write_text(json.dumps({**content, "decisions": content["decisions"][:1]}))
    assert main(["report", str(saved.parent / "cut.json")]) == 1
    assert "has one operand alone" in capsys.readouterr().err
    assert main(["report", str(saved), "-o", str(saved)]) == 1


def test_filters_hold_for_json_too(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["explain", f"{models}:with_args", "--recipe", "mxfp8", "--json"]
    assert main([*command, "--layer", "^0$"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["schema"] == 1 and content["graphs"] == {} and content["summary"]["matmuls"] == 2
    assert {d["layer"] for d in content["decisions"]} == {d["layer"] for d in content["work"]} == {"0"}
    assert "layers" not in content["decisions"][0]
    assert main([*command, "--collapse", "--graphs"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert set(content["graphs"]) == {"forward", "backward"}
    assert {(d["layer"], d["layers"]) for d in content["decisions"]} == {("0", 1), ("2", 1)}
    assert main([*command, "--layer", "head"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["decisions"] == []
    assert "fxquant: note: --layer 'head' has no effect" in captured.err


def test_measure_prints_the_losses(models: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["measure", f"{models}:with_args", "--html", str(tmp_path / "page.html")]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "relative error" in out and "0      linear" in out and (tmp_path / "page.html").is_file()
    assert main([*command, "--json"]) == 0
    assert [loss["layer"] for loss in json.loads(capsys.readouterr().out)["losses"]] == ["0"]
    assert main([*command, "--recipe", "high_precision"]) == 1
    assert "nothing was quantized, so nothing is measured" in capsys.readouterr().err


def test_bisect_prints_the_operands(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bisect", f"{models}:with_args", "--recipe", "nvfp4", "--check"]
    assert main([*command, "differs=0.0001", "--json"]) == 0
    (operand,) = json.loads(capsys.readouterr().out)["operands"]  # each of both alone breaks it
    assert operand.pop("role") in ("input", "weight") and operand == {"layer": "0", "direction": "rowwise"}
    assert main([*command, "nan"]) == 0 and "the check holds under nvfp4" in capsys.readouterr().out
    for bound in ("1e", "1..2"):
        assert main([*command, f"differs={bound}"]) == 1 and "check must be 'nan'" in capsys.readouterr().err
    assert main([*command, f"{models}:number"]) == 1 and "is no function" in capsys.readouterr().err


def test_recipes_of_the_users_modules(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name, shown in (("recipe", "disable_rht=True"), ("name", "recipe: rowwise"), ("rules", "module_type='linear'")):
        assert main(["explain", f"{models}:with_args", "--recipe", f"{models}:{name}"]) == 0
        assert shown in capsys.readouterr().out
    for name, said in (("number", "is an int: a recipe or a factory"), ("absent", "has no object 'absent'")):
        assert main(["explain", f"{models}:with_args", "--recipe", f"{models}:{name}"]) == 1
        assert said in capsys.readouterr().err


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0 and capsys.readouterr().out == f"fxquant {fxquant.__version__}\n"


@pytest.fixture
def program(models: str, tmp_path: Path) -> Path:
    model = importlib.import_module(models).Attention().eval()
    torch.export.save(torch.export.export(model, (torch.randn(2, 16, 64),)), tmp_path / "p.pt2")
    return tmp_path / "p.pt2"


def test_no_input_is_overwritten(models: str, program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = program.parent
    data, source = folder / "data.pt", folder / f"{models}.py"
    torch.save([torch.randn(2, 16, 64)], data)
    (folder / "link.pt2").symlink_to(program)
    os.link(program, folder / "hard.pt2")
    before = {path: path.read_bytes() for path in (program, data, source)}
    quantize = ["quantize", str(program), "--recipe", "current_scaling", "--calibrate", str(data)]
    spelled = str(folder / ".." / folder.name / program.name)
    for outputs in (
        ["-o", str(program)],
        ["-o", spelled],
        ["-o", str(folder / "link.pt2")],
        ["-o", str(folder / "hard.pt2")],
        ["-o", str(data)],
        ["-o", str(folder / "q.pt2"), "--report", str(data)],
        ["-o", str(folder / "q.pt2"), "--report", str(program)],
    ):
        assert main([*quantize, *outputs]) == 1
        assert "is an input, which would be overwritten" in capsys.readouterr().err
    assert main([*quantize, "-o", str(folder / "q.pt2"), "--report", str(folder / "q.pt2")]) == 1
    assert "the outputs need a file each" in capsys.readouterr().err
    for command in ("explain", "measure"):
        assert main([command, f"{models}:with_args", "--html", str(source)]) == 1
        assert "is an input" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in before} == before and not (folder / "q.pt2").exists()


def test_what_has_nothing_to_quantize_is_refused(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quantized, again = program.with_name("q.pt2"), program.with_name("again.pt2")
    data = program.with_name("data.pt")
    torch.save([torch.randn(2, 16, 64)], data)
    assert main(["quantize", str(program), "-o", str(quantized), "--calibrate", str(data)]) == 0
    assert "note: --calibrate has no effect: no activation of mxfp8" in capsys.readouterr().err
    lowered = program.with_name("lowered.pt2")
    torch.export.save(fxquant.lower_program(torch.export.load(quantized)), lowered)
    for source, recipe, said in (
        (quantized, "mxfp8", "already: give the program it was made from"),
        (quantized, "high_precision", "already: give the program it was made from"),
        (program, "high_precision", "nothing was quantized, so nothing is written"),
    ):
        assert main(["quantize", str(source), "--recipe", recipe, "-o", str(again)]) == 1
        assert said in capsys.readouterr().err and not again.exists()


def test_benchmarks_refuse_before_they_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    assert main(["bench", "cast", "--device", "cpu", "--csv", str(notes)]) == 1
    assert "stays as it is" in capsys.readouterr().err and notes.read_text() == "mine"
    if not torch.cuda.is_available():
        assert main(["bench", "cast", "--device", "cuda"]) == 1
        assert capsys.readouterr().err.startswith("fxquant: error: torch finds no CUDA device")


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
        (["{models}:fails"], "{models}:fails() failed: KeyError: 'no weights'"),
        (["{models}:exits"], "{models}:exits() failed: it ends the process, with the exit code 3"),
        (["{models}:wrong_shape"], "mat1 and mat2 shapes cannot be multiplied (4x63 and 64x128)"),
        (["{models}:with_args", "--card", "A100"], "known cards: NVIDIA H100"),
        (["{models}:with_args", "--recipe", "MXFP8"], "did you mean 'mxfp8'?"),
    ],
)
def test_failures_are_one_line_and_exit_1(
    models: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *(a.format(models=models) for a in arguments)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("fxquant: error: ") and captured.err.count("\n") == 1
    assert message.format(models=models) in captured.err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nothing"],
        ["explain"],
        ["explain", "module"],
        ["explain", "m:f", "--layer", "("],
        ["explain", "m:f", "--html", ""],
        ["diff", "a.json", "b.json", "-o", ""],
        ["rates", "--seconds", "nan"],
        ["bench", "cast", "--repeats", "0"],
        ["bench", "block", "--length", "-5"],
    ],
)
def test_wrong_usage_exits_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "usage: python -m fxquant" in capsys.readouterr().err


def test_what_the_users_code_prints_is_no_part_of_the_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "talks.py").write_text(
        MODELS + "\nprint('imported')\ndef make():\n    print('made')\n    return with_args()"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["explain", "talks:make", "--json", "--full"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["summary"]["matmuls"] == 2
    assert captured.err.startswith("imported\nmade\n") and "note: --full has no effect" in captured.err


def test_an_output_that_takes_nothing_is_one_line(tmp_path: Path) -> None:
    command = f"{sys.executable} -m fxquant formats"
    full = subprocess.run(
        f"{command} > /dev/full", shell=True, capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert full.returncode == 1 and full.stderr == "fxquant: error: stdout cannot be written: No space left on device\n"
    pipe = f"({command} --json; echo $? > code) | head -c 1"
    done = subprocess.run(pipe, shell=True, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (tmp_path / "code").read_text() == "0\n" and done.stderr == ""


def test_an_interrupt_is_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("fxquant.__main__.environment", interrupt)
    monkeypatch.setattr("fxquant.bench.run.run_benchmark", interrupt)
    for command in (["env"], ["bench", "cast", "--device", "cpu"]):
        assert main(command) == 130 and capsys.readouterr().err == "fxquant: interrupted\n"


def test_a_letter_that_a_terminal_has_not_is_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert printed("sch\xf6n") == 0
    assert terminal.buffer.getvalue() == b"sch\\xf6n\n"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("target", "hint"),
    [("my_models.py:make", "my_models:make"), ("./tools/m.py:make", "tools.m:make"), ("m.make", "m:make")],
)
def test_a_file_or_a_dotted_name_is_told_what_to_write(
    target: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["explain", target])
    assert f"write {hint}" in " ".join(capsys.readouterr().err.replace("the module, ", "").split())


def test_outputs_are_checked_before_anything_runs(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    for place, said in (("-", "stands for no output"), ("/proc/page.html", "/proc/page.html cannot be written: ")):
        assert main(["explain", f"{models}:fails", "--html", place]) == 1
        assert said in capsys.readouterr().err
    assert main(["quantize", "/dev/stdin", "-o", "out.pt2"]) == 1
    assert "from which it has to be read" in capsys.readouterr().err


def test_formats_lists_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["formats"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(FORMATS)
    assert main(["formats", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    rows = {row["format"]: row for row in content["formats"]}
    assert content["schema"] == 1
    assert rows["mxfp8_e4m3"]["one scale for"] == "1x32"
    assert rows["nvfp4"]["bits/element"] == "4.5"


def test_recipes_and_env_say_how_each_recipe_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    rows = {row["recipe"]: row for row in content["recipes"]}
    assert content["schema"] == 1
    assert list(rows) == [*RECIPES, *(f"factories.{name}" for name in (*FACTORIES, *PAPERS))]
    assert rows["factories.high_precision_fwd_mxfp8_bwd"]["input"] == "identity|mxfp8_e4m3"
    assert rows["factories.mxfp8_fwd_high_precision_bwd"]["weight"] == "mxfp8_e4m3>identity"
    assert rows["high_precision"]["CPU"] == "native" and rows["high_precision"]["because"] == ""
    places = ("8.0", "8.9", "9.0", "10.0", "12.0", "CPU")
    ways = {name: "".join(rows[name][place][0] for place in places) for name in RECIPES}
    assert [ways[name] for name in ("rowwise", "float8_blockwise", "mxfp8", "nvfp4")] == [
        "ennnne",
        "eeneee",
        "eeenne",
        "eeenne",
    ]
    assert ways["weight_only_fp8"] == "eeeeee"
    assert rows["mxfp8"]["because"] == "8.0, 8.9, 9.0: no FP8 GEMM for mxfp8 scales; CPU: a float32 GEMM"
    assert main(["env", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert list(content["recipes"]) == list(content["generations"]) == list(RECIPES) and content["schema"] == 1
    assert main(["env"]) == 0
    assert capsys.readouterr().out.splitlines()[0].startswith("fxquant ")


def test_runs_from_the_shell_in_the_users_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODELS)
    command = [sys.executable, "-m", "fxquant", "explain", "mine:with_args", "--recipe", "high_precision"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "skipped: HIGH_PRECISION" in done.stdout
    script = "import sys; sys.argv[0] = '/bin/fxquant'; from fxquant.__main__ import main; sys.path.remove(''); main()"
    command = [sys.executable, "-c", script, "explain", "mine:absent"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert "mine has no function 'absent'" in done.stderr, "the console script looks there too"
