"""Linears of few tokens whose weight alone is quantized, on Hopper: the kernels against float64, and their programs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from gpu.gated import Gated, served
from gpu.replay import assert_same_in_a_graph
from torch import Tensor, nn
from torch.export import Dim

import fxquant
from fxquant import Backend
from fxquant.compat.device import is_hopper, knows_gluon
from fxquant.formats import QuantSpec
from fxquant.kernels.cast import reference
from fxquant.kernels.linear import gluon_op, triton_weight_only
from fxquant.kernels.linear.choice import GemmKernel
from fxquant.kernels.linear.weight_only import Direct

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not is_hopper(torch.device(DEVICE)), reason="Hopper's kernels"),
]

SPECS = ("per_row_e4m3(torchao)", "per_tensor_e4m3", "nvfp4", "nvfp4(row_scaled)")
RECIPES = ("weight_only_fp8", "weight_only_nvfp4")
GLUON = pytest.mark.skipif(not knows_gluon(), reason="this Triton's Gluon is not the kernel's")
KERNELS = ("triton", pytest.param("gluon", marks=GLUON))
SIZES = ((512, 17024), (3072, 5120))
"""Features, and hidden ones: all layers by Triton's own kernel, and all by the one in Gluon where Triton has that."""


def close(got: Tensor, want: Tensor, share: float) -> None:
    error = (got.double() - want.double()).norm() / want.double().norm()
    assert error < share, float(error)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("text", SPECS)
@pytest.mark.parametrize("shape", [(272, 136), (128, 24), (1100, 264), (4096, 14336), (14336, 1024), (8192, 28672)])
def test_values(shape: tuple[int, int], text: str, dtype: torch.dtype) -> None:
    """Elements and block scales are exact in 16 bits, so that only the order of float32 sums differs."""
    k, n = shape
    torch.manual_seed(0)
    spec = QuantSpec.parse(text)
    w = torch.randn(n, k, device=DEVICE) * torch.logspace(-2, 2, n, device=DEVICE)[:, None]
    parts = reference.quantize(w.to(dtype), spec)
    values = reference.dequantize(parts, spec)[:, :k].double()
    for rows in (1, 3, 8, 16, 32):
        x, bias = torch.randn(rows, k, device=DEVICE).to(dtype), torch.randn(n, device=DEVICE).to(dtype)
        want = x.double() @ values.T
        close(triton_weight_only.scaled_mm(x, parts, spec, None, torch.float32), want, 1e-5)
        got = triton_weight_only.scaled_mm(x, parts, spec, bias, dtype, early=False)
        close(got, want + bias.double(), 2**-8)
    for rows in (33, 64, 65, 128):
        whole = torch.randn(rows, k + 8, device=DEVICE).to(dtype)
        for x in (whole[:, :k], whole[:, 3 : k + 3]):
            want = x.double() @ values.T
            close(triton_weight_only.wide_mm(x, parts, spec, None, torch.float32), want, 1e-5)
            close(triton_weight_only.wide_mm(x, parts, spec, bias, dtype), want + bias.double(), 2**-8)


@GLUON
@pytest.mark.parametrize("text", SPECS)
@pytest.mark.parametrize(
    "shape", [(2048, 2128), (6144, 4224), (4096, 14336), (14336, 4096), (4096, 6144), (3584, 18944)]
)
def test_values_in_gluon(shape: tuple[int, int], text: str) -> None:
    """Every number of rows that it takes is tried, what follows a GEMM, and x and weights that lie anywhere."""
    k, n = shape
    torch.manual_seed(0)
    spec = QuantSpec.parse(text)
    w = torch.randn(n, k, device=DEVICE) * torch.logspace(-2, 2, n, device=DEVICE)[:, None]
    parts = reference.quantize(w.bfloat16(), spec)
    values = reference.dequantize(parts, spec).double()
    whole = torch.randn(17, k + 8, device=DEVICE).bfloat16()
    bias, other = (torch.randn(*size, n, device=DEVICE).bfloat16() for size in ((), (16,)))
    taken = 0
    for rows in (1, 2, 3, 7, 8, 9, 15, 16):
        if Direct.of(rows, n, parts[0].shape[1], spec) is None:
            continue
        taken += 1
        for x in (whole[1 : rows + 1, 8:], whole[:rows, 3 : k + 3]):
            want = x.double() @ values.T
            for early in (False, True):
                got = gluon_op.scaled_mm(x, parts, text, None, torch.float32, early=early)
                close(got, want, 1e-5)
        y = gluon_op.scaled_mm(x, parts, text, bias, torch.bfloat16)
        close(y, want + bias.double(), 2**-8)
        added = gluon_op.scaled_mm(x, parts, text, bias, torch.bfloat16, "add", other[:rows])
        torch.testing.assert_close(added, y + other[:rows], rtol=0, atol=0)
        gelu = gluon_op.scaled_mm(x, parts, text, None, torch.bfloat16, "gelu")
        close(gelu, nn.functional.gelu(want), 2**-7)
    assert taken >= 5


def multiply(kernel: str, x: Tensor, parts: list[Tensor], spec: QuantSpec) -> Tensor:
    if kernel == "triton":
        return triton_weight_only.scaled_mm(x, parts, spec, None, torch.float32)
    from fxquant.kernels.linear import gluon

    return gluon.scaled_mm(x, parts, spec, None, torch.float32, Direct(2, 2, 4, 4))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("text", SPECS)
@pytest.mark.parametrize("rows", [1, 16])
def test_every_code_comes_out_as_it_was_stored(rows: int, text: str, kernel: str) -> None:
    """Multiplied by the identity; a NaN makes its row of the weight NaN, and no other."""
    spec, size = QuantSpec.parse(text), 512
    parts = reference.quantize(torch.randn(256, size, device=DEVICE), spec)
    column = torch.arange(parts[0].shape[1], device=DEVICE)
    codes = ((torch.arange(256, device=DEVICE)[:, None] + column) % 256).to(torch.uint8)
    if spec.row.family != "nvfp4":
        codes = torch.where(codes & 127 == 127, 0, codes)
    parts[0] = codes.to(torch.uint8).view(parts[0].dtype)
    values = reference.dequantize(parts, spec)
    identity = torch.eye(size, device=DEVICE, dtype=torch.bfloat16)
    for x, want in zip(identity.split(rows), values.T.split(rows), strict=True):
        got = multiply(kernel, x, parts, spec)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    if spec.row.family != "nvfp4":
        codes[3, 100] = 255
        got = multiply(kernel, identity[:rows], [codes.view(parts[0].dtype), *parts[1:]], spec)
        assert got[:, 3].isnan().all() and not got[:, 4:].isnan().any()


@pytest.mark.parametrize("text", SPECS)
def test_scales_that_are_not_finite_and_tokens_that_lie_apart(text: str) -> None:
    spec = QuantSpec.parse(text)
    parts = reference.quantize(torch.randn(136, 256, device=DEVICE), spec)
    whole = torch.randn(9, 700, device=DEVICE).bfloat16()
    for x in (whole[:, 8:264], whole[:, 3:259], whole[2:3, 1:257], whole[::2, ::2][:, :256]):
        want = x.double() @ reference.dequantize(parts, spec).double().T
        close(triton_weight_only.scaled_mm(x, parts, spec, None, torch.float32), want, 1e-5)
    for part in range(1, len(parts)):
        broken = [p.clone() for p in parts]
        broken[part].view(-1)[-1] = math.nan
        got = triton_weight_only.scaled_mm(whole[:, :256], broken, spec, None, torch.float32)
        assert got[:, -1].isnan().all()
        assert broken[part].numel() == 1 or not got[:, 0].isnan().any()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("packaged", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_programs_with_epilogues_and_dynamic_rows(
    recipe: str, packaged: bool, size: tuple[int, int], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, size[0], dtype=torch.bfloat16, device=DEVICE)
    exported = torch.export.export(Gated(*size).to(DEVICE), (x,), dynamic_shapes=({0: Dim("batch", min=1, max=16)},))
    program = fxquant.quantize_program(exported, recipe)
    run = served(program, tmp_path / "model.pt2" if packaged else None)
    with torch.no_grad():
        for rows in (1, 2, 16):
            x = torch.randn(rows, size[0], dtype=torch.bfloat16, device=DEVICE)
            for got, want in zip(run(x), program.module()(x), strict=True):
                close(got, want, 2**-6)


@pytest.mark.parametrize("recipe", RECIPES)
def test_more_rows_read_the_stored_weight_too(recipe: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(512, 1040).to(DEVICE, torch.bfloat16), torch.randn(100, 512, device=DEVICE).bfloat16()
    (fprop, *_) = (w for _, _, w in fxquant.explain(model, recipe, x).work() if w.what == "fprop")
    assert fprop.kernel == str(GemmKernel.WEIGHT_ONLY_WIDE)
    run = fxquant.compile(model, recipe, mode="reduce-overhead", options={"cache_weights": True})
    with torch.no_grad():
        want = fxquant.compile(model, recipe, options={"inner": "aot_eager"})(x)
        for _ in range(3):
            close(run(x).clone(), want, 2**-7)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_cached_weights_are_read_as_they_are_stored(recipe: str, size: tuple[int, int]) -> None:
    """Also after a change of the weight, in CUDA graphs, and with kernels launched early."""
    torch.manual_seed(0)
    model, x = Gated(*size).to(DEVICE), torch.randn(4, size[0], dtype=torch.bfloat16, device=DEVICE)
    kernels = [w.kernel for _, _, w in fxquant.explain(model, recipe, x).work() if w.what == "fprop"]
    direct = knows_gluon() and size == SIZES[1]
    assert set(kernels) == {str(GemmKernel.WEIGHT_ONLY_DIRECT if direct else GemmKernel.WEIGHT_ONLY)}
    eager = fxquant.compile(model, recipe, options={"inner": "aot_eager"})
    for mode in (None, "reduce-overhead"):
        torch.compiler.reset()
        run = fxquant.compile(model, recipe, mode=mode, options={"cache_weights": True})
        with torch.no_grad():
            for scale in (1.0, 1.5):
                model.up.weight.mul_(scale)
                for _ in range(3):
                    for got, want in zip([y.clone() for y in run(x)], eager(x), strict=True):
                        close(got, want, 2**-6)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("rows", [1, 8, 16])
def test_one_after_another_in_a_graph(rows: int, recipe: str, size: tuple[int, int]) -> None:
    """Kernels that are launched while the one before still runs read what that wrote, and leave what it reads."""
    torch.manual_seed(0)
    inputs = [torch.randn(rows, size[0], dtype=torch.bfloat16, device=DEVICE) for _ in range(12)]
    program = fxquant.quantize_program(torch.export.export(Gated(*size).to(DEVICE), (inputs[0],)), recipe)
    run = torch.compile(program.module(), backend=Backend("high_precision"), fullgraph=True, dynamic=False)
    assert_same_in_a_graph(run, inputs)
