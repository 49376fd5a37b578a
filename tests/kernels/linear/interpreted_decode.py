"""The kernels for few tokens in Triton's interpreter against the reference; run by test_triton_decode.py."""

from __future__ import annotations

from typing import Any

import torch
from interpreting import interpret
from torch import Tensor
from torch.nn.functional import gelu, silu

from fxquant.formats import QuantSpec
from fxquant.kernels.cast import reference
from fxquant.kernels.linear import few_rows
from fxquant.kernels.linear import triton_few_rows as triton_decode

PAIRS = (
    ("per_tensor_e4m3", "per_tensor_e4m3"), ("per_row_e4m3(pow2,torchao)", "per_row_e4m3(pow2,torchao)"),
    ("block_1x128_e4m3(pow2)", "block_128x128_e4m3(pow2)"), ("per_tensor_e4m3(eps=0.015625)", "per_row_e4m3"),
)  # fmt: skip
SIZES = ((1, 272, 136), (3, 128, 8), (40, 200, 136), (2, 1100, 24))
"""M, K, N: K that is no multiple of 128 or of 16, N down to 8 and beyond whole tiles."""


def operands(m: int, k: int, n: int, a_spec: QuantSpec, b_spec: QuantSpec) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    x, w = torch.randn(m, k).to(torch.bfloat16), torch.randn(n, k).to(torch.bfloat16)
    x[0, :4] *= 100
    return x, reference.quantize(x, a_spec), reference.quantize(w, b_spec)


def check(y: Tensor, want: Tensor, what: Any) -> None:
    assert y.shape == want.shape and y.dtype == want.dtype, what
    torch.testing.assert_close(y.float(), want.float(), rtol=2**-7, atol=1e-3, msg=lambda text: f"{what}: {text}")


interpret(triton_decode)
torch.manual_seed(0)
count = 0
for texts in PAIRS:
    a_spec, b_spec = map(QuantSpec.parse, texts)
    for i, (m, k, n) in enumerate(SIZES):
        x, a, b = operands(m, k, n, a_spec, b_spec)
        bias = torch.randn(n).to(torch.bfloat16) if i % 2 else None
        dtype = torch.float32 if i == 2 else torch.bfloat16
        want = reference.scaled_mm(a, a_spec, b, b_spec, bias, dtype)
        sources = [a]
        multiplier = [reference.multiplier_from_amax(reference.amax(x), a_spec)]
        for given in [[], multiplier] if a_spec.row.family == "per_tensor" else [[]]:
            if few_rows.quantizes_itself(x, a_spec, scaled=bool(given)):
                sources.append([x, *given])
            if few_rows.quantizes(x):
                for got, part in zip(triton_decode.quantize(x, a_spec, *given), a, strict=True):
                    assert got.shape == part.shape and torch.equal(got.float(), part.float()), (texts, m, k)
        for source in sources:
            assert few_rows.supports(a_spec, b_spec)
            check(triton_decode.scaled_mm(source, a_spec, b, b_spec, bias, dtype), want, (texts, m, k, n, len(source)))
            count += 1
for rows in (1, 20):
    a_spec = b_spec = QuantSpec.parse("per_row_e4m3")
    x, _, b = operands(rows, 256, 136, a_spec, b_spec)
    a = reference.quantize(x.clamp(-3, 3) / 16, a_spec)
    y = reference.scaled_mm(a, a_spec, b, b_spec, None, torch.bfloat16)
    other = torch.randn(rows, 136).to(torch.bfloat16)
    for name, after in (
        ("add", y + other), ("silu_mul", silu(other.float()) * y), ("gelu", gelu(y)),
        ("gelu_tanh", gelu(y, approximate="tanh")),
    ):  # fmt: skip
        more = other if name in ("add", "silu_mul") else None
        got = triton_decode.scaled_mm(a, a_spec, b, b_spec, None, torch.bfloat16, name, more)
        torch.testing.assert_close(got, after.bfloat16(), rtol=2**-6, atol=2**-6)  # of values around 1, rounded twice
x = torch.randn(48, 8).to(torch.bfloat16).t()
a_spec = QuantSpec.parse("per_row_e4m3")
for got, part in zip(triton_decode.quantize(x, a_spec), reference.quantize(x, a_spec), strict=True):
    assert torch.equal(got.float(), part.float()), "stored by columns"
print(count)
