"""Products of blocks of 128 in Gluon: values by float64, the bits of cuBLAS and of other kernels of groups, repeats."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fxquant.compat.device import is_hopper, knows_gluon
from fxquant.formats import QuantSpec
from fxquant.kernels.cast import reference
from fxquant.kernels.grouped import gluon_op as grouped_gluon_op
from fxquant.kernels.grouped.triton_gemm import grouped_columns, grouped_rows
from fxquant.kernels.linear import gluon_op
from fxquant.kernels.linear.cublas import by_cublas

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
LINES, TILES = "block_1x128_e4m3", "block_128x128_e4m3"


@pytest.fixture(autouse=True)
def needs_hopper() -> None:
    if not (knows_gluon() and is_hopper(torch.device(DEVICE))):
        pytest.skip("no Hopper GPU, or this Triton's Gluon is not the kernel's")


def operand(rows: int, k: int, spec: str) -> list[Tensor]:
    x = torch.randn(rows, k, device=DEVICE) * torch.randn(rows, 1, device=DEVICE).exp()
    return list(reference.quantize(x, QuantSpec.parse(spec)))


def values(parts: list[Tensor], spec: str) -> Tensor:
    return reference.dequantize(parts, QuantSpec.parse(spec)).double()


def error(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
@pytest.mark.parametrize("b_spec", (LINES, TILES))
@pytest.mark.parametrize("sizes", ((1, 128, 16), (200, 384, 272), (1000, 1408, 640), (4096, 512, 384)), ids=str)
def test_values(sizes: tuple[int, int, int], b_spec: str, dtype: torch.dtype) -> None:
    m, k, n = sizes
    torch.manual_seed(0)
    a, b = operand(m, k, LINES), operand(n, k, b_spec)
    expected = values(a, LINES) @ values(b, b_spec).t()
    got = gluon_op.block_mm(a, b, b_spec == TILES, dtype)
    assert error(got, expected) < {torch.float32: 3e-4, torch.float16: 6e-4, torch.bfloat16: 3e-3}[dtype]
    assert torch.equal(gluon_op.block_mm(a, b, b_spec == TILES, dtype), got)
    if m % 16 == 0 and n % 128 == 0:
        other = by_cublas(a, b, LINES, b_spec, None, dtype, False)
        assert error(other, expected) > 0.9 * error(got, expected), "as exact as cuBLAS"


@pytest.mark.parametrize("sizes", ([100, 0, 300, 8, 1000], [101, 0, 302, 7, 1001], [2048] * 4), ids=str)
def test_groups(sizes: list[int]) -> None:
    torch.manual_seed(0)
    n, k, m = 384, 512, sum(sizes)
    offs = torch.tensor(sizes, device=DEVICE).cumsum(0).int()
    x = operand(m + 37, k, LINES)
    weights = [operand(n, k, TILES) for _ in sizes]
    w = [torch.stack([parts[i].view(torch.uint8) if i == 0 else parts[i] for parts in weights]) for i in range(2)]
    w[0] = w[0].view(torch.float8_e4m3fn)
    for dtype in (torch.bfloat16, torch.float32):
        got = grouped_gluon_op.grouped_block_mm(x, w, offs, dtype)
        torch.testing.assert_close(got, grouped_rows(x, w, offs, 128, dtype, False), rtol=1e-2, atol=1e-2)
        assert not got[m:].any(), "rows of no group are zero"
    padded = torch.tensor([-(-size // 128) * 128 for size in sizes], device=DEVICE).cumsum(0).int()
    columns = int(padded[-1])
    dy, x = operand(n, columns, LINES), operand(k, columns, LINES)
    got = grouped_gluon_op.grouped_block_mm(dy, x, padded, torch.float32)
    expected = grouped_columns((dy[0], dy[1]), (x[0], x[1]), padded, 1, torch.float32, False)
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)
