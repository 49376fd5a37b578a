"""MXFP8 and NVFP4 on tensor cores that read the scales of blocks: which GEMM is chosen, what it is given, its result.

No card is here. A GEMM that reads payload and scales as NVIDIA's documentation says stands in for the tensor cores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from bits import same
from tensor_cores import described, tensor_core_mm
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fxquant.compat.private import make_fx
from fxquant.formats import QuantSpec
from fxquant.kernels.cast import reference
from fxquant.kernels.cast.ops import fake_operand
from fxquant.kernels.linear import choice
from fxquant.kernels.linear.choice import GemmFacts, GemmKernel
from fxquant.kernels.linear.ops import scaled_mm
from fxquant.passes.lower.lower import lower
from fxquant.passes.settings import Settings


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Sets the compute capability that every device seems to have."""
    return lambda major, minor: monkeypatch.setattr(choice, "capability", lambda device: (major, minor))


PAIRS = (
    ("mxfp8_e4m3", "mxfp8_2d_e4m3"), ("mxfp8_e5m2", "mxfp8_e4m3"), ("nvfp4", "nvfp4_2d"),
    ("nvfp4(rht)", "nvfp4(rht)"), ("nvfp4(row_scaled)", "nvfp4"), ("nvfp4(four_over_six=mae,e4m3_max=256)", "nvfp4"),
)  # fmt: skip


@pytest.mark.parametrize(("a", "b"), PAIRS)
@pytest.mark.parametrize("sizes", [(5, 40, 56), (300, 150, 16), (128, 128, 41)], ids=str)
def test_documented_gemm_gives_the_bits_of_the_emulated_path(
    a: str, b: str, sizes: tuple[int, int, int], on: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ragged rows, lengths and columns, and a bias of another dtype."""
    m, k, n = sizes
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(m, k, generator=generator), torch.randn(n, k, generator=generator)
    x[3] *= 1e3
    parts = [reference.quantize(t, QuantSpec.parse(text)) for t, text in ((x, a), (w, b))]
    bias = torch.randn(n, generator=generator)
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", tensor_core_mm)
    monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype: a.float() @ b.float())
    monkeypatch.setattr(torch, "matmul", lambda a, b: (a.float() @ b.float()).to(a.dtype))
    for offset, dtype in ((bias, torch.float32), (None, torch.bfloat16), (None, torch.float32)):
        on(9, 0)
        expected = scaled_mm.best(*parts, a, b, offset, dtype, False)
        on(10, 0)
        assert chosen(parts, a, b) in (GemmKernel.MXFP8, GemmKernel.NVFP4)
        assert same(scaled_mm.best(*parts, a, b, offset, dtype, False), expected)


def chosen(parts: Sequence[list[Tensor]], a: str, b: str) -> GemmKernel:
    return scaled_mm.choose(GemmFacts.of(*parts, a, b, None, torch.bfloat16, False)).kernel  # type: ignore[no-any-return]


def call(a: str, b: str, m: int, k: int, n: int, bias: bool = False) -> str:
    """The GEMM in the lowered graph of one product on a card: its arguments as torch's meta function has taken them."""
    with FakeTensorMode():
        parts = [
            fake_operand(torch.empty(rows, k, device="cuda", dtype=torch.bfloat16), QuantSpec.parse(text))
            for rows, text in ((m, a), (n, b))
        ]
        offset = torch.empty(n, device="cuda", dtype=torch.bfloat16) if bias else None
        flat = [*parts[0], *parts[1], *([offset] if bias else [])]
        count = len(parts[0])

        def run(*flat: Tensor) -> Tensor:
            left, right = list(flat[:count]), list(flat[count : count + len(parts[1])])
            return torch.ops.fxquant.scaled_mm(left, right, a, b, flat[-1] if bias else None, torch.bfloat16, False)

        gm = make_fx(run)(*flat)
    lower(gm.graph, Settings())
    (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten._scaled_mm_v2.default)

    return described(node)


def test_what_torch_is_given(on: Any) -> None:
    """Kinds 2 and 3 are 1x16 and 1x32, 0 is of the whole tensor; swizzle 1 is 32_4_4."""
    on(10, 0)
    assert call("mxfp8_e5m2", "mxfp8_e4m3", 40, 96, 48, bias=True) == (
        "float8_e5m2[40, 96][96, 1] float8_e4m3fn[96, 48][1, 96] [float8_e8m0fnu[128, 4][4, 1]] [3] [1] "
        "[float8_e8m0fnu[128, 4][4, 1]] [3] [1] bfloat16[48][1] bfloat16"
    )
    assert call("nvfp4", "nvfp4_2d", 40, 80, 41) == (
        "float4_e2m1fn_x2[40, 48][48, 1] float4_e2m1fn_x2[48, 48][1, 48] "
        "[float8_e4m3fn[128, 8][8, 1], float32[1][1]] [2, 0] [1, 0] "
        "[float8_e4m3fn[128, 8][8, 1], float32[1][1]] [2, 0] [1, 0] None bfloat16"
    )
    assert call("nvfp4(row_scaled)", "nvfp4", 130, 64, 16) == (
        "float4_e2m1fn_x2[130, 32][32, 1] float4_e2m1fn_x2[32, 16][1, 32] [float8_e4m3fn[256, 4][4, 1]] [2] [1] "
        "[float8_e4m3fn[128, 4][4, 1]] [2] [1] None float32"
    )


SIZES: dict[str, Any] = {"m": 128, "n": 128, "k": 128, "most_rows": 128}


def test_cards_and_sizes() -> None:
    """Each by its reason, at the first that could know."""
    mx, fp4 = QuantSpec(format="mxfp8_e4m3"), QuantSpec(format="nvfp4")

    def says(**facts: Any) -> str:
        return str(scaled_mm.choose(GemmFacts(**{**SIZES, **facts})))

    emulated = "bf16 GEMM of dequantized operands"
    for capability in ((10, 0), (10, 3), (12, 0)):
        assert says(a=mx, b=mx, capability=capability) == "cuBLAS scaled_mm, MXFP8"
        assert says(a=fp4, b=fp4, capability=capability) == "cuBLAS scaled_mm, NVFP4"
        assert says(a=mx, b=mx, m=None, capability=capability) == "cuBLAS scaled_mm, MXFP8"
    for capability in ((8, 0), (8, 9), (9, 0)):
        assert says(a=mx, b=mx, capability=capability) == f"{emulated} (no FP8 GEMM for mxfp8 scales)"
    blackwell = {"a": fp4, "b": fp4, "capability": (10, 0)}
    assert says(**blackwell, matrices=False) == f"{emulated} (a batch of matrices)"
    assert says(**blackwell, n=None) == f"{emulated} (dynamic sizes)"
    assert says(**blackwell, k=0) == f"{emulated} (a sum of nothing)"
    assert says(**blackwell, launches=False) == f"{emulated} (no GEMM for nvfp4 scales in a package)"
    row, tensor = QuantSpec(format="per_row_e4m3"), QuantSpec(format="per_tensor_e4m3")
    for capability in ((8, 9), (10, 0), (12, 0)):
        assert says(a=row, b=row, capability=capability) == "cuBLAS _scaled_mm, rowwise"
        assert says(a=tensor, b=tensor, capability=capability) == "cuBLAS _scaled_mm, per tensor"
    assert says(a=row, b=tensor, capability=(8, 0)) == f"{emulated} (no FP8 GEMM on this device)"


def test_cards_without_fp8_scale_behind(on: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elements that bfloat16 holds are multiplied, and the scales of rows and tensors come after."""
    monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype: a.float() @ b.float())
    on(8, 0)
    x, w = torch.randn(40, 96), torch.randn(56, 96)
    for a, b in (("per_row_e4m3", "per_tensor_e4m3"), ("per_tensor_e5m2", "per_row_e4m3")):
        parts = [reference.quantize(t, QuantSpec.parse(text)) for t, text in ((x, a), (w, b))]
        expected = scaled_mm.meaning(*parts, a, b, None, torch.float32, False)
        got = scaled_mm.best(*parts, a, b, None, torch.float32, False)
        assert chosen(parts, a, b) is GemmKernel.EMULATED
        assert (got - expected).norm() < 1e-6 * expected.norm()
