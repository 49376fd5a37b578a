"""Packages compiled ahead of time for CUDA: they run without fxquant, and give what the program gives on the CPU."""

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

pytestmark = pytest.mark.gpu

RUN = """
import sys, torch
sys.modules["fxquant"] = None
package = torch._inductor.aoti_load_package(sys.argv[1])
for x, y in torch.load(sys.argv[2]):
    got = package(x.cuda()).cpu().double()
    assert got.shape == y.shape and (got - y.double()).norm() < 2**-7 * y.double().norm(), (got - y).abs().max()
print("same")
"""


class Gated(nn.Module):
    def __init__(self, size: int = 256) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(size, 384, bias=False), nn.Linear(size, 384, bias=False)
        self.down = nn.Linear(384, size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * self.gate(x).sigmoid())


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("recipe", ["current_scaling", "static", "rowwise", "float8_blockwise", "mxfp8"])
def test_a_package_runs_where_fxquant_is_not(recipe: str, dynamic: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Gated().bfloat16().eval(), torch.randn(32, 256).bfloat16()
    check(model, x, recipe, tmp_path, dynamic=dynamic)


@pytest.mark.parametrize("recipe", ["rowwise", "float8_blockwise"])
def test_a_prefill_runs_where_fxquant_is_not(recipe: str, tmp_path: Path) -> None:
    """Rows for cuBLAS, and for its tiles of 128 sums of four of them and of three."""
    torch.manual_seed(0)
    check(Gated(512).bfloat16().eval(), torch.randn(256, 512).bfloat16(), recipe, tmp_path, dynamic=False)


def test_a_package_runs_from_cpp(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Gated().bfloat16().eval(), torch.randn(32, 256).bfloat16()
    path, ((_, y),) = check(model, x, "static", tmp_path, dynamic=False)
    cpp_runner.check(cpp_runner.build(tmp_path, "cuda"), path, "cuda", x, y, 2**-7)


def check(
    model: nn.Module, x: Tensor, recipe: str, tmp_path: Path, *, dynamic: bool
) -> tuple[str, list[tuple[Tensor, Tensor]]]:
    """The path of the package, and inputs with what the program makes of them on the CPU."""
    batch = {0: Dim("batch", min=2, max=256)}

    def quantized(device: str) -> torch.export.ExportedProgram:
        source = torch.export.export(model.to(device), (x.to(device),), dynamic_shapes=(batch,) if dynamic else None)
        calibration = [x.to(device)] if recipe == "static" else None
        return fxquant.quantize_program(
            source, "current_scaling" if calibration else recipe, calibration=calibration
        )  # fmt: skip

    on_cpu: nn.Module = quantized("cpu").module()
    inputs = [x, x[:16]] if dynamic else [x]
    with torch.no_grad():
        pairs = [(each, on_cpu(each)) for each in inputs]
    torch.save(pairs, tmp_path / "pairs.pt")
    # what is cast between the layers has to be rounded as on the CPU: codes next to a boundary would differ by a step
    path = fxquant.aoti_compile_and_package(
        quantized("cuda"),
        package_path=tmp_path / "model.pt2",
        inductor_configs={"emulate_precision_casts": True},
    )
    command = [sys.executable, "-c", RUN, path, str(tmp_path / "pairs.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "same", done.stderr
    return path, pairs
