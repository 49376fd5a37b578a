"""The Triton GEMM on CUDA: within what tensor cores promise, its amax to the bit, and a model that trains."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, gelu

import fxquant
from fxquant.formats import QuantSpec
from fxquant.kernels.cast import reference
from fxquant.kernels.linear import timing as gemm_timing
from fxquant.kernels.linear import triton_gemm
from fxquant.kernels.linear.epilogues import ACTIVATIONS
from fxquant.kernels.linear.problem import Problem

pytestmark = pytest.mark.gpu

PAIRS = (
    ("per_tensor_e4m3", "per_tensor_e4m3"), ("per_row_e4m3", "per_row_e4m3"), ("per_tensor_e5m2", "per_tensor_e4m3"),
    ("per_row_e5m2", "per_tensor_e4m3"),
)  # fmt: skip
CASES = (
    # M, K, N, activation, bias, residual, dtype
    (256, 512, 512, "", False, False, torch.bfloat16),
    (1, 272, 8, "relu", True, False, torch.bfloat16),
    (8, 128, 136, "silu", False, True, torch.float16),
    (100, 400, 264, "gelu", True, True, torch.bfloat16),
    (300, 1168, 528, "gelu_tanh", True, True, torch.float32),
)
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-21}


def operand(rows: int, length: int, spec: QuantSpec) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows + length)
    x = torch.randn(rows, length, generator=generator).bfloat16()
    return [part.cuda() for part in reference.quantize(x, spec)]


@pytest.mark.parametrize("fast_accum", [True, False])
@pytest.mark.parametrize(("a_spec", "b_spec"), PAIRS)
def test_products_epilogues_and_amax(a_spec: str, b_spec: str, fast_accum: bool) -> None:
    specs = QuantSpec.parse(a_spec), QuantSpec.parse(b_spec)
    limit = 2.0 ** (-11 if fast_accum else -12)
    for m, k, n, activation, has_bias, has_residual, dtype in CASES:
        a, b = operand(m, k, specs[0]), operand(n, k, specs[1])
        bias = torch.randn(n, device="cuda").to(dtype) if has_bias else None
        residual = torch.randn(m, n, device="cuda").to(dtype) if has_residual else None
        y, amax = triton_gemm.scaled_mm(
            a, specs[0], b, specs[1], bias, dtype, fast_accum, activation=activation, residual=residual, record=True,
        )  # fmt: skip
        left, right = (reference.dequantize(p, s).double() for p, s in zip((a, b), specs, strict=True))
        product, size = left @ right.T, left.abs() @ right.abs().T
        product = product if bias is None else product + bias.double()
        want = ACTIVATIONS[activation](product) if activation else product
        want = want if residual is None else want + residual.double()
        spare = (y.double() - want).abs() - ROUNDING[dtype] * (want.abs() + product.abs())
        assert y.shape == want.shape and (spare / size).max() <= limit, (m, k, n, activation)
        assert torch.equal(amax, reference.amax(y))


class Model(nn.Module):
    """A bias, an activation between GEMMs, a residual, and an input that two layers read."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 768), nn.Linear(768, 256)
        self.q, self.k = nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(gelu(self.up(x), approximate="tanh"))
        return x + torch.tanh(self.q(x)) * self.k(x)


@pytest.mark.parametrize("recipe", ["current_scaling", "delayed_scaling", "rowwise"])
def test_a_model_trains_and_infers_as_with_cublas(recipe: str) -> None:
    """As near to the model without quantization: what is rounded once less gives other codes next to a boundary."""
    torch.manual_seed(0)
    base = Model().bfloat16().cuda()
    x, dy = torch.randn(4, 128, 256).bfloat16().cuda(), torch.randn(4, 128, 256).bfloat16().cuda()

    def results(**options: str) -> list[Tensor]:
        torch.compiler.reset()
        model = copy.deepcopy(base)
        run = torch.compile(model, backend=fxquant.Backend(recipe, **options)) if options else model  # type: ignore[arg-type]
        own = x.clone().requires_grad_()
        y = run(own)
        y.backward(dy)
        with torch.no_grad():
            inferred = run(x)
        return [y.detach(), own.grad, inferred, *(p.grad for p in model.parameters())]  # type: ignore[list-item]

    def distances(got: list[Tensor]) -> list[Tensor]:
        pairs = zip(got, exact, strict=True)
        return [1 - cosine_similarity(a.double().flatten(), b.double().flatten(), 0) for a, b in pairs]

    exact = results()
    with_cublas, with_triton = distances(results(gemm="cublas")), distances(results(gemm="triton"))
    for i, (a, b) in enumerate(zip(with_cublas, with_triton, strict=True)):
        assert b < 1.1 * a + 1e-4, (i, a, b)


def test_a_measurement_is_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    problem = Problem(512, 256, 384, "per_tensor_e4m3", "per_row_e4m3", torch.bfloat16, True, bias=True, residual=True)
    device = torch.device("cuda", 0)
    assert gemm_timing.remembered(problem, device) is None
    times = gemm_timing.measured(problem, device)
    assert times is not None and min(*times.kernels, times.copy) > 1
    again = gemm_timing.remembered(problem, device)
    assert again is not None and again.chosen(problem, "measured") == times.chosen(problem, "measured")
