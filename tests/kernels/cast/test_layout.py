"""Layouts of scales against their goldens, and that they only move them."""

from __future__ import annotations

import golden
import pytest
import torch
from bits import same
from torch import Tensor

from fxquant.formats import QuantSpec
from fxquant.kernels.cast.reference import quantize
from fxquant.kernels.cast.swizzle import padded_sizes, swizzle, unswizzle

VECTORS = golden.load("layout")
PARTS = ("padded", "padded_row", "padded_col", "compact_col", "swizzled")


def padded(scale: Tensor, multiples: tuple[int, int]) -> Tensor:
    """Scales [R, C] with zeros behind their rows and columns, up to multiples."""
    rows, columns = (-size % multiple for size, multiple in zip(scale.shape, multiples, strict=True))
    raw = scale if scale.dtype == torch.float32 else scale.view(torch.uint8)
    return torch.nn.functional.pad(raw, (0, columns, 0, rows)).view(scale.dtype)


@pytest.mark.parametrize("key", golden.keys("layout", "compact", under="scale_", reads=PARTS))
def test_tiles_of_block_scaled_gemms(key: str) -> None:
    """Invariant 55; the transposed storage is that of the same scales, padded the same."""
    compact = VECTORS[f"{key}/compact"]
    assert same(padded(compact, (128, 4)), VECTORS[f"{key}/padded"])
    assert same(padded(compact, (128, 4)).mT, VECTORS[f"{key}/padded_col"])
    assert same(VECTORS[f"{key}/compact_col"].mT, compact)
    swizzled = swizzle(compact)
    assert swizzled.shape == padded_sizes(*compact.shape)
    assert same(swizzled.flatten(), VECTORS[f"{key}/swizzled"])
    assert same(unswizzle(swizzled, *compact.shape), compact)
    batch = torch.stack((compact, compact + 1))
    assert same(swizzle(batch)[1], swizzle(compact + 1)) and same(unswizzle(swizzle(batch), *compact.shape), batch)


@pytest.mark.parametrize("key", golden.keys("layout", "compact", under="block128_", reads=PARTS))
def test_scales_of_128_blocks(key: str) -> None:
    """Goldens have [M, K] in all directions, so that their columns are transposed here, as a columnwise operand is."""
    compact = VECTORS[f"{key}/compact"]
    if key == "block128_2d":
        assert same(padded(compact, (1, 4)), VECTORS[f"{key}/padded_row"])
        assert same(padded(compact.mT, (1, 4)), VECTORS[f"{key}/padded_col"])
    else:
        compact = compact.mT if key == "block128_col" else compact
        assert same(padded(compact.mT, (1, 4)).contiguous(), VECTORS[f"{key}/padded"])


@pytest.mark.parametrize("format", ["mxfp8_e4m3", "nvfp4"])
@pytest.mark.parametrize("shape", [(5, 32), (128, 128), (300, 416)], ids=str)
def test_quantized_scales_come_back(format: str, shape: tuple[int, int]) -> None:
    _, scale, *_ = quantize(torch.randn(shape), QuantSpec(format=format))
    swizzled = swizzle(scale)
    assert swizzled.dtype == scale.dtype and swizzled.numel() % 512 == 0 and swizzled.is_contiguous()
    assert same(unswizzle(swizzled, *scale.shape), scale)
    flat = swizzled.view(torch.uint8).flatten()
    assert torch.equal(flat.sort().values[-scale.numel() :], scale.view(torch.uint8).flatten().sort().values)
