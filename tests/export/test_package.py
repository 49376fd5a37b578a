"""Compiled packages: they run without fxquant, from Python and from C++."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import cpp_runner
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import fxquant
from fxquant import OptionError, ProgramError

LOAD = """
import sys, torch
sys.modules["fxquant"] = None
package = torch._inductor.aoti_load_package(sys.argv[1])
for x, y in torch.load(sys.argv[2]):
    torch.testing.assert_close(package(x), y, rtol=1e-5, atol=1e-6)
print("same")
"""


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(64, 96), nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x) * self.gate(x).sigmoid())


def program(recipe: str) -> torch.export.ExportedProgram:
    torch.manual_seed(0)
    source = torch.export.export(Gated(), (torch.randn(4, 64),), dynamic_shapes=({0: Dim("batch", min=2, max=64)},))
    return fxquant.quantize_program(source, recipe)


def pairs(of: torch.export.ExportedProgram) -> list[tuple[Tensor, Tensor]]:
    with torch.no_grad():
        return [(x, of.module()(x)) for x in (torch.randn(4, 64), torch.randn(7, 64))]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[Tensor, Tensor]]]:
    """A package of a quantized program, and what it should answer."""
    path = tmp_path_factory.mktemp("package") / "model.pt2"
    quantized = program("mxfp8")
    assert fxquant.aoti_compile_and_package(quantized, package_path=path) == str(path)
    return path, pairs(quantized)


@pytest.mark.slow
def test_a_package_runs_where_fxquant_is_not(package: tuple[Path, list[tuple[Tensor, Tensor]]], tmp_path: Path) -> None:
    path, answers = package
    torch.save(answers, tmp_path / "pairs.pt")
    command = [sys.executable, "-c", LOAD, str(path), str(tmp_path / "pairs.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "same", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["current_scaling", pytest.param("nvfp4", marks=pytest.mark.sweep)])
def test_packages_of_other_recipes(recipe: str, tmp_path: Path) -> None:
    quantized = program(recipe)
    run = torch._inductor.aoti_load_package(
        fxquant.aoti_compile_and_package(quantized, package_path=tmp_path / "model.pt2")
    )
    for x, y in pairs(quantized):
        torch.testing.assert_close(run(x), y, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_package_runs_from_cpp(package: tuple[Path, list[tuple[Tensor, Tensor]]], tmp_path: Path) -> None:
    path, answers = package
    runner = cpp_runner.build(tmp_path, "cpu")
    for x, y in answers:
        cpp_runner.check(runner, path, "cpu", x, y, 1e-5)


def test_what_cannot_be_packaged_is_refused(tmp_path: Path) -> None:
    quantized = program("mxfp8")
    with pytest.raises(OptionError, match="no setting 'max_autotone'"):
        fxquant.aoti_compile_and_package(
            quantized, package_path=tmp_path / "a.pt2", inductor_configs={"max_autotone": True}
        )
    with pytest.raises(OptionError, match="path ends in"):
        fxquant.aoti_compile_and_package(quantized, package_path=tmp_path / "a.so")
    with pytest.raises(ProgramError, match="expected, not a Gated"):
        fxquant.aoti_compile_and_package(Gated(), package_path=tmp_path / "a.pt2")  # type: ignore[arg-type]
    with pytest.raises(ProgramError, match="absent: no such folder"):
        fxquant.aoti_compile_and_package(quantized, package_path=tmp_path / "absent" / "a.pt2")
    assert not list(tmp_path.iterdir())
    quantized.example_inputs = None
    with pytest.raises(ProgramError, match="no example inputs"):
        fxquant.aoti_compile_and_package(quantized, package_path=tmp_path / "a.pt2")
