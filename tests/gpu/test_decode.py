"""Linears of few tokens on Hopper: the bytes that the kernels quantize to, and folded programs against the CPU's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gpu.gated import Gated, served
from gpu.replay import assert_same_in_a_graph
from torch import Tensor, nn
from torch.export import Dim

import fxquant
from fxquant import Backend
from fxquant.compat.device import is_hopper
from fxquant.formats import QuantSpec
from fxquant.kernels.cast import reference
from fxquant.kernels.linear import few_rows
from fxquant.kernels.linear import triton_few_rows as triton_decode

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not is_hopper(torch.device(DEVICE)), reason="Hopper's kernels"),
]

PAIRS = (
    ("per_tensor_e4m3", "per_tensor_e4m3"), ("per_row_e4m3(pow2,torchao)", "per_row_e4m3"),
    ("per_row_e4m3", "per_row_e4m3"), ("block_1x128_e4m3(pow2)", "block_128x128_e4m3(pow2)"),
)  # fmt: skip


@pytest.mark.parametrize("specs", PAIRS)
@pytest.mark.parametrize("rows", [1, 5, 16, 64])
def test_bytes_of_the_activation(rows: int, specs: tuple[str, str]) -> None:
    """Multiplied by the identity, what is quantized inside a kernel comes out as it was stored, exactly."""
    size = 384
    a_spec, b_spec = map(QuantSpec.parse, specs)
    x = torch.randn(rows, size, device=DEVICE) * torch.logspace(-3, 3, rows, device=DEVICE)[:, None]
    x = x.to(torch.bfloat16)
    x[0, 3] = 0
    data, scale = reference.quantize(torch.eye(size, device=DEVICE), b_spec)
    identity = [torch.eye(size, device=DEVICE).to(data.dtype), torch.ones_like(scale)]
    parts = reference.quantize(x, a_spec)
    want = reference.dequantize(parts, a_spec)
    sources: list[list[Tensor]] = [parts]
    multiplier = [reference.multiplier_from_amax(reference.amax(x), a_spec)]
    for given in [[], multiplier] if a_spec.row.family == "per_tensor" else [[]]:
        if few_rows.quantizes_itself(x, a_spec, scaled=bool(given)):
            sources.append([x, *given])
        if rows > 1:
            quantized = triton_decode.quantize(x, a_spec, *given)
            assert torch.equal(quantized[0].view(torch.uint8), parts[0].view(torch.uint8))
            assert torch.equal(quantized[1], parts[1])
    for source in sources:
        got = triton_decode.scaled_mm(source, a_spec, identity, b_spec, None, torch.float32)
        assert torch.equal(got, want), (specs, len(source))


@pytest.mark.parametrize("recipe", ["current_scaling", "calibrated", "rowwise", "float8_blockwise"])
@pytest.mark.parametrize("shape", [(1, 272, 136), (3, 128, 24), (16, 4096, 520), (20, 200, 264), (64, 1024, 2048)])
def test_folded_program(shape: tuple[int, int, int], recipe: str) -> None:
    m, k, n = shape
    torch.manual_seed(0)
    layer = nn.Linear(k, n, dtype=torch.bfloat16).requires_grad_(False)
    x = torch.randn(m, k).to(torch.bfloat16)
    program = fxquant.quantize_program(
        torch.export.export(layer, (x,)),
        "current_scaling" if recipe == "calibrated" else recipe,
        calibration=[x] if recipe == "calibrated" else None,
    )
    module: nn.Module = program.module()
    want = module(x).double()
    run = torch.compile(module.to(DEVICE), backend=Backend("high_precision"), fullgraph=True, dynamic=False)
    with torch.no_grad():
        got = run(x.to(DEVICE)).cpu().double()
    assert (got - want).norm() < 2**-8 * want.norm()


@pytest.mark.parametrize("packaged", [False, True])
@pytest.mark.parametrize("recipe", ["calibrated", "rowwise", "float8_blockwise"])
def test_epilogues_and_dynamic_rows(recipe: str, packaged: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Gated(512, 17024).to(DEVICE)
    x = torch.randn(5, 512, dtype=torch.bfloat16, device=DEVICE)
    exported = torch.export.export(model, (x,), dynamic_shapes=({0: Dim("batch", min=1, max=16)},))
    program = fxquant.quantize_program(
        exported, "current_scaling" if recipe == "calibrated" else recipe, calibration=[x]
    )
    run = served(program, tmp_path / "model.pt2" if packaged else None)
    with torch.no_grad():
        for rows in (1, 2, 16):
            x = torch.randn(rows, 512, dtype=torch.bfloat16, device=DEVICE)
            for got, want in zip(run(x), program.module()(x), strict=True):
                assert (got.double() - want.double()).norm() < 2**-6 * want.double().norm(), rows


@pytest.mark.parametrize("recipe", ["current_scaling", "calibrated", "rowwise", "float8_blockwise"])
@pytest.mark.parametrize("rows", [1, 64])
def test_one_after_another_in_a_graph(rows: int, recipe: str) -> None:
    """Kernels that are launched while the one before still runs read what that wrote, and leave what it reads."""
    torch.manual_seed(0)
    model = Gated(512, 17024).to(DEVICE)
    inputs = [torch.randn(rows, 512, dtype=torch.bfloat16, device=DEVICE) for _ in range(12)]
    program = fxquant.quantize_program(
        torch.export.export(model, (inputs[0],)), "current_scaling" if recipe == "calibrated" else recipe,
        calibration=inputs[:1] if recipe == "calibrated" else None,
    )  # fmt: skip
    run = torch.compile(program.module(), backend=Backend("high_precision"), fullgraph=True, dynamic=False)
    assert_same_in_a_graph(run, inputs)
