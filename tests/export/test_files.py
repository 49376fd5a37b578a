"""Program files and the command that quantizes them: whole or not at all, and one sentence where it fails."""

from __future__ import annotations

import json
import resource
import signal
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import Dim

import fxquant
from fxquant import ProgramError
from fxquant.__main__ import main
from fxquant.export.files import load_inputs, load_program, save_program


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))


@pytest.fixture
def saved(model: nn.Module, tmp_path: Path) -> Path:
    program = torch.export.export(model, (torch.randn(4, 64),), dynamic_shapes=({0: Dim("batch")},))
    save_program(program, tmp_path / "model.pt2")
    return tmp_path / "model.pt2"


def test_quantizes_a_file(model: nn.Module, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, page, data, x = tmp_path / "out.pt2", tmp_path / "report.html", tmp_path / "data.pt", torch.randn(8, 64)
    assert main(["quantize", str(saved), "--recipe", "factories.mxfp8", "-o", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("2 matmuls, 4/4 operands quantized")
    assert (
        lines[1] == f"{out}: {2 * 64 * 128 * 33 // 32 + 4 * 192} bytes of state instead of {4 * (2 * 64 * 128 + 192)}"
    )
    want = fxquant.quantize_program(torch.export.load(saved), "mxfp8").module()(x)
    assert torch.equal(torch.export.load(out).module()(x), want)
    torch.save([x, (2 * x,)], data)
    calibrate = ["--recipe", "current_scaling", "--calibrate", str(data), "--report", str(page), "--json"]
    assert main(["quantize", str(saved), "-o", str(out), *calibrate]) == 0
    captured = capsys.readouterr()
    assert "static amax" in json.loads(captured.out)["decisions"][0]["detail"]
    assert "calibrated on 2 of 2 inputs" in captured.err
    assert page.read_text().startswith("<!doctype html>") and "static amax" in page.read_text()
    assert any(name.endswith("input_multiplier") for name in torch.export.load(out).state_dict)
    assert not list(tmp_path.glob(".*")), "nothing is left lying about"


def edited(source: Path, target: Path, change: Callable[[str, bytes], bytes]) -> Path:
    with zipfile.ZipFile(source) as read, zipfile.ZipFile(target, "w") as written:
        for name in read.namelist():
            written.writestr(name, change(name, read.read(name)))
    return target


def newer(name: str, data: bytes) -> bytes:
    if not name.endswith("model.json"):
        return data
    return json.dumps({**json.loads(data), "schema_version": {"major": 999, "minor": 0}}).encode()


def test_files_that_are_no_programs_are_refused_by_name(saved: Path, tmp_path: Path) -> None:
    content = saved.read_bytes()
    weight = bytearray(content)
    place = content.index(b"data/weights/weight_0") + 8000
    weight[place : place + 8] = bytes(byte ^ 0x55 for byte in weight[place : place + 8])
    files = {"text": b"hello", "empty": b"", "half": content[: len(content) // 2], "bits": bytes(weight)}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with zipfile.ZipFile(tmp_path / "archive", "w") as archive:
        archive.writestr("a", "b")
    edited(saved, tmp_path / "newer", newer)
    edited(saved, tmp_path / "operator", lambda _, data: data.replace(b"aten.relu.default", b"aten.rely.default"))
    messages = {
        "absent": "no such file",
        "text": "is not an exported program, or it is damaged",
        "empty": "is not an exported program, or it is damaged",
        "half": "is not an exported program, or it is damaged",
        "bits": "is damaged: the checksum of",
        "archive": "without an exported program in it",
        "newer": "cannot be loaded as an exported program by torch 2.",
        "operator": "aten.rely.default",
    }
    for name, message in messages.items():
        with pytest.raises(ProgramError, match=message) as caught:
            load_program(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value) and "\n" not in str(caught.value)


def test_inputs_that_are_none_are_refused_by_name(tmp_path: Path) -> None:
    torch.save({"a": 1}, tmp_path / "dict.pt")
    (tmp_path / "text.pt").write_text("hello")
    for name, message in (("absent", "no such file"), ("dict.pt", "holds a dict"), ("text.pt", "cannot be loaded")):
        with pytest.raises(ProgramError, match=message) as caught:
            load_inputs(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value) and "\n" not in str(caught.value)


def test_a_full_disk_is_an_error_and_not_the_end_of_the_process(saved: Path, tmp_path: Path) -> None:
    program = torch.export.load(saved)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limit[1]))
    try:
        with pytest.raises(ProgramError, match=r"out\.pt2 cannot be written: File too large"):
            save_program(program, tmp_path / "out.pt2")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, before)
    assert [each.name for each in tmp_path.iterdir()] == [saved.name]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--report", "absent/report.html"], "absent: no such folder"),
        (["--report", "{out}"], "the outputs need a file each"),
        (["--recipe", "mxpf8"], "did you mean 'mxfp8'?"),
        (["--recipe", "delayed_scaling"], "give calibration inputs"),
        (["--calibrate", "absent.pt"], "absent.pt: no such file"),
    ],
)
def test_the_command_fails_in_one_line_and_writes_nothing(
    saved: Path, tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.pt2"
    assert main(["quantize", str(saved), "-o", str(out), *(each.format(out=out) for each in arguments)]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("fxquant: error: ") and captured.err.count("\n") == 1
    assert message in captured.err and not out.exists()
