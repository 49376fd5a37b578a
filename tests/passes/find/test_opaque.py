"""Matmuls without a form: by their FLOPs, or by their names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers import eager_backend
from rewriting import Calls, Rewrite, flops
from torch import Tensor, nn

import fxquant
from fxquant.decisions import SkipReason


@torch.library.custom_op("fxquant_tests::my_matmul", mutates_args=())
def my_matmul(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


@my_matmul.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[1])


def test_unknown_matmuls_are_opaque() -> None:
    model = Calls(lambda x, w: my_matmul(x.cos(), torch.linalg.matrix_power(w, 2)), (24, 24))
    backend = Rewrite()
    torch._dynamo.reset()
    torch.compile(model, backend=backend, fullgraph=True)(torch.randn(5, 24))
    assert backend.reasons() == [SkipReason.OPAQUE, SkipReason.OPAQUE]
    assert flops(backend.products[0]) == 2 * 24**3
    assert [product.rhs_is_weight for product in backend.products] == [True, False]


@dataclass(frozen=True)
class Settings:
    scale: float


torch.utils._pytree.register_constant(Settings)
HALVED = Settings(0.5)


@torch._dynamo.allow_in_graph
class Scaled(torch.autograd.Function):
    """A product with a configuration, as torchao's linears in FP8 are one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, settings: Settings) -> Tensor:
        return x @ w * settings.scale

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None


def test_a_function_that_dynamo_does_not_open_is_opaque() -> None:
    model = Calls(lambda x, w: Scaled.apply(x, w, HALVED), (24, 40))
    backend = Rewrite()
    with torch.no_grad():
        torch.compile(model, backend=backend, fullgraph=True)(torch.randn(5, 24))
    assert backend.reasons() == [SkipReason.OPAQUE]
    assert flops(backend.products[0]) == 2 * 5 * 24 * 40 and backend.products[0].rhs_is_weight


def test_fused_kernels_of_torch_are_opaque_whatever_their_results() -> None:
    """An encoder layer and an LSTM of inference, which no counter knows, and products of whole numbers and of FP8."""
    layer, lstm = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval(), nn.LSTM(32, 16)
    whole = torch.ones(32, 64, dtype=torch.int8)
    fp8 = torch.ones(64, 32).to(torch.float8_e4m3fn).t()  # column by column

    def run(x: Tensor) -> tuple[Tensor, ...]:
        one = torch.ones(())
        y = torch._int_mm(x[0].to(torch.int8), whole)
        z = torch._scaled_mm(x[0].to(torch.float8_e4m3fn), fp8, one, one, out_dtype=torch.bfloat16)
        return layer(x), lstm(x)[0], y, z

    backend = eager_backend("mxfp8")
    torch._dynamo.reset()
    with torch.no_grad(), torch._dynamo.config.patch(allow_rnn=True):
        torch.compile(run, backend=backend)(torch.randn(2, 32, 32))
    found = {d.form: d for d in backend.report().decisions}
    assert [d.skip_reason for d in found.values()] == [SkipReason.OPAQUE] * 4
    known = {form: d.flops for form, d in found.items()}
    encoder = "_transformer_encoder_layer_fwd"
    assert known == {encoder: 0, "lstm": 2 * 64 * 64 * 48, "_int_mm": known["_int_mm"], "_scaled_mm": 2 * 32 * 32 * 64}
    assert "set_fastpath_enabled(False)" in found[encoder].detail
    assert backend.report().coverage == 0


def test_opaque_operators_have_the_shapes_of_their_tensors() -> None:
    model = Calls(lambda x, w: my_matmul(x.detach(), w.detach()) + torch.cdist(x, w.mT), (24, 40))
    backend = eager_backend("mxfp8")
    torch.compile(model, backend=backend, fullgraph=True)(torch.randn(5, 24))
    shapes = {(d.form, d.role.tensor_type): d.shape for d in backend.report().decisions}
    product = "fxquant_tests::my_matmul"
    assert shapes == {
        (product, "input"): (5, 24), (product, "weight"): (24, 40), ("cdist", "input"): (5, 24),
        ("cdist", "weight"): (40, 24), ("cdist", "grad_output"): (5, 40),
    }  # fmt: skip
    assert f"{product}" in str(backend.report()) and "[5, 24] and [24, 40]" in backend.report().overview()


SOLVERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linalg_solve": lambda x, w: torch.linalg.solve(w, x),
    "linalg_solve_triangular": lambda x, w: torch.linalg.solve_triangular(w, x, upper=False),
    "cholesky_solve": lambda x, w: torch.cholesky_solve(x, w),
    "matrix_exp": lambda x, w: torch.matrix_exp(w) + x.sum(),
    "linalg_householder_product": lambda x, w: torch.linalg.householder_product(w[:, :2], w[0, :2]) + x.sum(),
}


@pytest.mark.parametrize("name", SOLVERS)
def test_operators_that_multiply_within_are_told(name: str) -> None:
    """torch counts no FLOPs of them, and their gradients are products."""
    x, w = torch.randn(24, 32), torch.eye(24, requires_grad=True)
    decisions = fxquant.explain(SOLVERS[name], "mxfp8", x, w).decisions
    assert {(d.form, d.skip_reason) for d in decisions} == {(name, SkipReason.OPAQUE)}
