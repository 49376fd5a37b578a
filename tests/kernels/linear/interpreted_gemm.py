"""The GEMM with epilogues in Triton's interpreter against the reference; run by test_triton_gemm.py."""

from __future__ import annotations

from typing import Any

import torch
from interpreting import interpret
from torch import Tensor
from torch.nn.functional import gelu, relu, silu

from fxquant.formats import QuantSpec
from fxquant.kernels.cast import reference
from fxquant.kernels.linear import triton_gemm
from fxquant.kernels.linear.problem import triton_multiplies

PAIRS = (
    ("per_tensor_e4m3", "per_tensor_e4m3"), ("per_tensor_e5m2", "per_tensor_e4m3"), ("per_row_e4m3", "per_row_e4m3"),
    ("per_row_e5m2", "per_tensor_e4m3"), ("per_tensor_e4m3", "per_row_e4m3"),
)  # fmt: skip
SIZES = ((1, 128, 8), (8, 272, 136), (100, 400, 264), (260, 128, 528))
"""M, K, N: one row; K that is no multiple of 128; N down to 8; several tiles each way."""
ACTIVATIONS = {"": lambda y: y, "gelu": gelu, "gelu_tanh": lambda y: gelu(y, approximate="tanh"), "silu": silu,
               "relu": relu}  # fmt: skip


def check(y: Tensor, want: Tensor, what: Any) -> None:
    assert y.shape == want.shape and y.dtype == want.dtype, what
    torch.testing.assert_close(y.float(), want.float(), rtol=2**-7, atol=2e-3, msg=lambda text: f"{what}: {text}")


interpret(triton_gemm)
triton_gemm._programs = lambda device: 3
torch.manual_seed(0)
count = 0
for i, texts in enumerate(PAIRS):
    a_spec, b_spec = map(QuantSpec.parse, texts)
    for j, (m, k, n) in enumerate(SIZES):
        if (i + j) % 2 and i > 1:
            continue
        a, b = (
            reference.quantize(torch.randn(rows, k).to(torch.bfloat16), spec)
            for rows, spec in ((m, a_spec), (n, b_spec))
        )
        name = [*ACTIVATIONS][(i + j) % 5]
        dtype = (torch.bfloat16, torch.float16, torch.float32)[(i + j) % 3]
        bias = torch.randn(n).to(dtype) if j % 2 else None
        residual = torch.randn(m, n).to(dtype) if (i + j) % 2 else None
        want = ACTIVATIONS[name](reference.scaled_mm(a, a_spec, b, b_spec, bias, torch.float32))
        want = want if residual is None else want + residual.float()
        assert triton_multiplies(a, a_spec, b, b_spec, dtype)
        y, amax = triton_gemm.scaled_mm(
            a, a_spec, b, b_spec, bias, dtype, bool(i % 2), activation=name, residual=residual, record=True
        )
        check(y, want.to(dtype), (texts, m, k, n, name))
        assert torch.equal(amax, reference.amax(y)), (texts, m, k, n)
        count += 1
print(count)
