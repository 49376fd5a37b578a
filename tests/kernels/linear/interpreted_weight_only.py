"""The kernels for a weight that alone is quantized, in Triton's interpreter, against the reference in float32.

Run by test_triton_weight_only.py.
"""

from __future__ import annotations

import math

import torch
from interpreting import interpret
from torch import Tensor
from torch.nn.functional import gelu, silu

from fxquant.formats import IDENTITY, QuantSpec
from fxquant.kernels.cast import reference
from fxquant.kernels.linear import triton_weight_only, weight_only

SPECS = ("per_row_e4m3(torchao)", "per_tensor_e4m3", "nvfp4", "nvfp4_2d(four_over_six=mae,e4m3_max=256)",
         "nvfp4(row_scaled)")  # fmt: skip
SIZES = ((1, 272, 136), (3, 128, 8), (20, 200, 136), (2, 1100, 24), (16, 37, 40), (5, 8200, 72), (33, 1100, 136),
         (70, 37, 40), (128, 256, 136))  # fmt: skip
"""M, K, N: K that is odd, that no step divides and that is split over programs, N down to 8 and beyond whole tiles."""
DTYPES = (torch.bfloat16, torch.float16)


def multiply(x: Tensor, b: list[Tensor], spec: QuantSpec, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The kernel's result, which must be the reference's but for the order of sums."""
    kernel = triton_weight_only.wide_mm if x.shape[0] > weight_only.FEW_ROWS else triton_weight_only.scaled_mm
    got = kernel(x, b, spec, bias, dtype)
    want = reference.scaled_mm([x], IDENTITY, b, spec, bias, dtype)
    assert got.shape == want.shape and got.dtype == want.dtype
    close = {"rtol": 1e-6, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 2**-7}
    torch.testing.assert_close(got, want, equal_nan=True, **close, msg=lambda text: f"{spec}, {x.shape}: {text}")
    return got


interpret(triton_weight_only)
torch.manual_seed(0)
count = 0
for i, (m, k, n) in enumerate(SIZES):
    for text in SPECS:
        spec = QuantSpec.parse(text)
        for j, dtype in enumerate(DTYPES):
            x, w = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
            w[0] *= 1e-3
            bias = torch.randn(n).to(dtype) if (i + j) % 2 else None
            multiply(x, reference.quantize(w, spec), spec, bias, (torch.float32, dtype)[(i // 2 + j) % 2])
            count += 1

for text in ("per_row_e4m3", "nvfp4"):
    spec = QuantSpec.parse(text)
    whole = torch.randn(7, 300).bfloat16()
    parts = reference.quantize(torch.randn(40, 128), spec)
    for x in (whole[:, 8:136], whole[:, 3:131], whole[2:4, ::2][:, :128], whole[:6, :128].t().contiguous().t()):
        multiply(x, parts, spec, None, torch.float32)  # rows of others, not aligned, not dense, by columns
    scattered = [torch.stack((part, part), -1)[..., 0] for part in parts]
    multiply(whole[:, :128], scattered, spec, None, torch.float32)

for text in ("per_row_e4m3", "per_tensor_e4m3", "nvfp4"):  # NaN and zero in weights, scales and x
    spec = QuantSpec.parse(text)
    for m in (1, 4, 40):
        x, w = torch.randn(m, 64).bfloat16(), torch.randn(24, 64)
        w[3, 5], w[7] = math.nan, 0
        parts = reference.quantize(w, spec)
        got = multiply(x, parts, spec, None, torch.float32)
        assert text == "nvfp4" or (got[:, 3].isnan().all() and not got[:, 4].isnan().any())
        for part in parts[1:]:
            broken = [p.clone() for p in parts]
            changed = next(i for i, p in enumerate(parts) if p is part)
            broken[changed].view(-1)[-1] = math.nan
            got = multiply(x, broken, spec, None, torch.float32)
            assert got[:, -1].isnan().all()
        x[0, 9] = math.nan
        assert multiply(x, parts, spec, None, torch.float32)[0].isnan().all()

for text in ("per_row_e4m3", "nvfp4"):
    spec = QuantSpec.parse(text)
    for rows in (1, 20):
        x, b = (torch.randn(rows, 256) / 16).bfloat16(), reference.quantize(torch.randn(136, 256), spec)
        y = triton_weight_only.scaled_mm(x, b, spec, None, torch.bfloat16)
        other = torch.randn(rows, 136).bfloat16()
        assert weight_only.in_one_kernel([x], b, spec)
        for name, after in (
            ("add", y + other), ("silu_mul", silu(other.float()) * y), ("gelu", gelu(y)),
            ("gelu_tanh", gelu(y, approximate="tanh")),
        ):  # fmt: skip
            more = other if name in ("add", "silu_mul") else None
            got = triton_weight_only.scaled_mm(x, b, spec, None, torch.bfloat16, name, more)
            torch.testing.assert_close(got, after.bfloat16(), rtol=2**-7, atol=2**-7)
print(count)
