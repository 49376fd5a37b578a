"""The GEMM of 128-blocks in Gluon without a GPU: its values, emulated, and what ptxas makes of it."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from emulated_warps import emulated
from helpers import assembled
from torch import Tensor

from fxquant.compat.device import knows_gluon
from fxquant.formats import QuantSpec
from fxquant.kernels.grouped import choice as grouped_choice
from fxquant.kernels.grouped.choice import GroupedGemmFacts
from fxquant.kernels.grouped.ops import grouped_scaled_mm
from fxquant.kernels.linear import choice
from fxquant.kernels.linear.block_tiles import Config
from fxquant.kernels.linear.choice import GemmFacts, GemmKernel
from fxquant.kernels.linear.ops import scaled_mm

KERNEL = Path(__file__).parents[3] / "kernels" / "linear" / "gluon_blocks.py"
CONFIGS: tuple[dict[str, Any], ...] = (
    {}, {"deep": True}, {"groups": 3}, {"height": 128}, {"height": 128, "c_tiles": 2},
)  # fmt: skip
PROGRAMS = 3


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return emulated(monkeypatch, KERNEL)


def pointer(kernel: ModuleType, x: Tensor) -> Any:
    return kernel.Pointer(x.numpy().reshape(-1), np.float32 if x.dtype == torch.float32 else np.int32)


def operand(rows: int, k: int, tiled: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Elements, scales and values."""
    x = torch.randn(rows, k).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-rows // 128) if tiled else rows, -(-k // 128)) + 0.5
    each = scale.double().repeat_interleave(128, 1)[:, :k]
    return x, scale, x.double() * (each.repeat_interleave(128, 0)[:rows] if tiled else each)


def arguments(
    kernel: ModuleType, config: Any, a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], out: Tensor, parts: Any,
    by_column: bool, by_rows: bool = False,
) -> list[Any]:  # fmt: skip
    shape, strides, base = parts
    if by_rows:
        left = pointer(kernel, a[1].t().contiguous())
    else:
        left = kernel.Descriptor(kernel.by_columns(a[1]), [1, config.height])
    right = kernel.Descriptor(kernel.by_columns(b[1]), [1, config.columns]) if by_column else pointer(kernel, b[1])
    return [
        kernel.Descriptor(a[0], [config.height, 128]), kernel.Descriptor(b[0], [config.columns, 128]),
        kernel.Descriptor(out, [1, 64, config.columns], shape, strides, base),
        left, right,
    ]  # fmt: skip


@pytest.mark.parametrize("tiled", (True, False), ids=("128x128", "1x128"))
@pytest.mark.parametrize("shape", ((64, 128, 128), (520, 144, 528)), ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_values(config: dict[str, Any], shape: tuple[int, int, int], tiled: bool, kernel: ModuleType) -> None:
    if not tiled and config.get("height") != 128:
        return  # which has tiles of 256 rows
    torch.manual_seed(0)
    m, n, k = shape
    tiles = Config(**config)
    (a, a_scale, left), (b, b_scale, right) = operand(m, k), operand(n, k, tiled)
    out = torch.full((m, n), torch.nan)
    kernel.run(
        kernel.block_mm_kernel, PROGRAMS,
        *arguments(kernel, tiles, (a, a_scale), (b, b_scale), out, ([1, m, n], [m * n, n, 1], 0), not tiled),
        None, None, m, n, a_scale.shape[1], 1, 0, b_scale.shape[1] if tiled else 0, 0, KIND=0, BY_COLUMN=not tiled,
        **tiles.options(torch.float32),
    )  # fmt: skip
    torch.testing.assert_close(out.double(), left @ right.t(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("config", ({}, {"deep": True}, {"height": 128}), ids=str)
def test_rows_of_groups(config: dict[str, Any], kernel: ModuleType) -> None:
    """Groups start at any row, where no copy along rows could."""
    torch.manual_seed(0)
    sizes, n, k = [101, 0, 302, 7], 272, 384
    m, tiles = sum(sizes) + 40, Config(**config)
    ends = torch.tensor(sizes).cumsum(0)
    table, rows = [], tiles.rows
    for group, (size, end) in enumerate(zip(sizes, ends.tolist(), strict=True)):
        table += [[group, first, end, 0] for first in range(end - size, end, rows)]
    a, a_scale, left = operand(m, k)
    weights = [operand(n, k, tiled=True) for _ in sizes]
    b, b_scale = (torch.stack([w[i].view(torch.uint8) if i == 0 else w[i] for w in weights]) for i in range(2))
    out = torch.full((m, n), 7.0)
    b = b.view(torch.float8_e4m3fn).view(-1, k)
    kernel.run(
        kernel.block_mm_kernel, PROGRAMS,
        *arguments(kernel, tiles, (a, a_scale), (b, b_scale), out, ([m + 1, m, n], [n, n, 1], -m * n), False, True),
        pointer(kernel, torch.tensor(table, dtype=torch.int32)),
        pointer(kernel, torch.tensor([len(table)], dtype=torch.int32)),
        m, n, k // 128, len(sizes), *b_scale.stride()[:2], m, KIND=1, BY_COLUMN=False,
        **tiles.options(torch.float32),
    )  # fmt: skip
    for end, size, weight in zip(ends.tolist(), sizes, weights, strict=True):
        expected = left[end - size : end] @ weight[2].t()
        torch.testing.assert_close(out[end - size : end].double(), expected, rtol=1e-5, atol=1e-4)
    assert (out[sum(sizes) :] == 7).all(), "rows of no group are left alone"


def test_columns_of_groups(kernel: ModuleType) -> None:
    torch.manual_seed(0)
    sizes, n, k = [256, 0, 384, 128], 200, 272
    tiles, m, groups = Config(height=128), sum(sizes), len(sizes)
    (a, a_scale, left), (b, b_scale, right) = operand(n, m), operand(k, m)
    ends = torch.tensor(sizes, dtype=torch.int32).cumsum(0).int()
    out = torch.full((groups, n, k), torch.nan)
    kernel.run(
        kernel.block_mm_kernel, PROGRAMS,
        *arguments(kernel, tiles, (a, a_scale), (b, b_scale), out, ([groups, n, k], [n * k, k, 1], 0), True),
        None, pointer(kernel, ends), n, k, m // 128, groups, 0, 0, 0, KIND=2, BY_COLUMN=True,
        **tiles.options(torch.float32),
    )  # fmt: skip
    for group, (end, size) in enumerate(zip(ends.tolist(), sizes, strict=True)):
        expected = left[:, end - size : end] @ right[:, end - size : end].t()
        torch.testing.assert_close(out[group].double(), expected, rtol=1e-5, atol=1e-4)


MADE = (
    (0, False, 8192),
    pytest.param(0, True, 8192, marks=pytest.mark.sweep),
    (1, False, 100),
    pytest.param(1, False, 1000, marks=pytest.mark.sweep),
    (2, True, 8192),
)


@pytest.mark.skipif(not knows_gluon(), reason="this Triton's Gluon is not the kernel's")
@pytest.mark.parametrize(("kind", "by_column", "rows"), MADE)
def test_nothing_spills_on_hopper(kind: int, by_column: bool, rows: int) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    from fxquant.kernels.linear import gluon_blocks

    gl, kernel = gluon_blocks.gl, gluon_blocks.block_mm_kernel
    config = Config.of_groups(rows, tiled=True) if kind == 1 else Config.of((rows, rows), 132, tiled=not by_column)

    def box(name: str, shape: list[int], dtype: Any) -> str:
        layout = gl.NVMMASharedLayout.get_default_for(shape, dtype)
        if name == "fp32":
            layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
        return f"tensordesc<{name}[{', '.join(map(str, shape))}],{layout!r}>"

    types = dict.fromkeys("m n steps groups b_part_step b_row_step a_step".split(), "i32") | {
        "a": box("fp8e4nv", [config.height, 128], gl.float8e4nv),
        "b": box("fp8e4nv", [config.columns, 128], gl.float8e4nv),
        "c": box("bf16", [1, 64, config.columns], gl.bfloat16), "table": "*i32", "ends": "*i32",
        "a_scale": "*fp32" if kind == 1 else box("fp32", [1, config.height], gl.float32),
        "b_scale": box("fp32", [1, config.columns], gl.float32) if by_column else "*fp32",
    }  # fmt: skip
    constants = config.options(torch.bfloat16) | {"KIND": kind, "BY_COLUMN": by_column}
    names = [p.name for p in kernel.params]
    signature = {name: types.get(name, "constexpr") for name in names}
    given = {(names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(fn=kernel, signature=signature, constexprs=given, attrs={})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert made.metadata.shared <= 232_448
    log = assembled(made.asm["ptx"])
    assert int(log.split(" bytes spill stores")[0].split()[-1]) == 0, log
    assert "C75" not in log, log


def test_large_products_of_blocks_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "knows_gluon", lambda: True)
    a, tiles = QuantSpec.parse("block_1x128_e4m3"), QuantSpec.parse("block_128x128_e4m3")

    def chosen(b: QuantSpec, m: int | None, n: int, k: int, **more: Any) -> str:
        facts = GemmFacts(a=a, b=b, m=m, n=n, k=k, most_rows=m or 1 << 20, capability=(9, 0), **more)
        return str(scaled_mm.choose(facts).kernel)

    assert chosen(tiles, 16384, 4096, 4096) == GemmKernel.TILES_WARPS.value
    assert chosen(a, 4096, 4096, 16384) == GemmKernel.BLOCKS_WARPS.value
    assert chosen(tiles, 16384, 4096, 4096, launches=False) == GemmKernel.TILES.value
    assert chosen(tiles, 4096, 4096, 4096) == GemmKernel.TILES.value, "cuBLAS is launched faster"
    assert chosen(tiles, 16383, 4096, 4096) == GemmKernel.TILES_WARPS.value, "any number of rows"
    assert chosen(tiles, 16384, 4096, 4104) == GemmKernel.TILES.value
    assert "emulated" not in chosen(tiles, 16384, 4000, 4096).lower(), "columns that are no whole tiles"


def test_tiles_are_those_that_end_together() -> None:
    of = Config.of
    assert of((8192, 8192), 132, tiled=True).rows == of((16384, 4096), 132, tiled=True).rows == 192
    assert of((4096, 4096), 132, tiled=True).rows == 256, "six turns of 192 rows take longer than four of 256"
    assert of((8192, 8192), 132, tiled=False).rows == 256
    assert Config.of_groups(100, tiled=True).rows == 128


def test_large_products_of_groups_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_choice, "knows_gluon", lambda: True)
    a, tiles = QuantSpec.parse("block_1x128_e4m3"), QuantSpec.parse("block_128x128_e4m3")

    def chosen(b: QuantSpec, **more: Any) -> GemmKernel:
        facts = {"dtype": torch.bfloat16, "features": 2048, "flops": 1 << 40, "capability": (9, 0)}
        return grouped_scaled_mm.choose(GroupedGemmFacts(a=a, b=b, **{**facts, **more})).kernel  # type: ignore[arg-type]

    assert chosen(tiles) is chosen(a, wgrad=True) is GemmKernel.GROUPED_WARPS
    for more in ({"flops": 1 << 36}, {"features": 2040}, {"launches": False, "triton": False}):
        assert chosen(tiles, **more) is not GemmKernel.GROUPED_WARPS, more
    assert chosen(a) is GemmKernel.GROUPED_BLOCKS, "weights in 1x128"
