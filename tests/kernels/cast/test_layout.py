"""Layouts of scales against their goldens, and that they only move them."""

from __future__ import annotations

import golden
import layout
import pytest
import torch
from bits import same

from fxquant.formats import QuantSpec
from fxquant.kernels.cast.reference import quantize

VECTORS = golden.load("layout")
PARTS = ("padded", "padded_row", "padded_col", "compact_col", "swizzled")


@pytest.mark.parametrize("key", golden.keys("layout", "compact", under="scale_", reads=PARTS))
def test_tiles_of_block_scaled_gemms(key: str) -> None:
    """Invariant 55; the transposed storage is that of the same scales, padded the same."""
    compact = VECTORS[f"{key}/compact"]
    assert same(layout.pad_scales(compact), VECTORS[f"{key}/padded"])
    assert same(layout.pad_scales(compact).mT, VECTORS[f"{key}/padded_col"])
    assert same(VECTORS[f"{key}/compact_col"].mT, compact)
    swizzled = layout.swizzle(compact)
    assert same(swizzled, VECTORS[f"{key}/swizzled"])
    assert same(layout.unswizzle(swizzled, *compact.shape), compact)


@pytest.mark.parametrize("key", golden.keys("layout", "compact", under="block128_", reads=PARTS))
def test_scales_of_128_blocks(key: str) -> None:
    """Goldens have [M, K] in all directions, so that their columns are transposed here, as a columnwise operand is."""
    compact = VECTORS[f"{key}/compact"]
    if key == "block128_2d":
        assert same(layout.block_scales(compact, tiled=True), VECTORS[f"{key}/padded_row"])
        assert same(layout.block_scales(compact.mT, tiled=True), VECTORS[f"{key}/padded_col"])
    else:
        compact = compact.mT if key == "block128_col" else compact
        assert same(layout.block_scales(compact, tiled=False), VECTORS[f"{key}/padded"])


@pytest.mark.parametrize("format", ["mxfp8_e4m3", "nvfp4"])
@pytest.mark.parametrize("shape", [(5, 32), (128, 128), (300, 416)], ids=str)
def test_quantized_scales_come_back(format: str, shape: tuple[int, int]) -> None:
    _, scale, *_ = quantize(torch.randn(shape), QuantSpec(format=format))
    flat = layout.swizzle(scale)
    assert flat.dtype == scale.dtype and flat.numel() % 512 == 0
    back = layout.unswizzle(flat, *scale.shape)
    assert same(back, scale)
    assert torch.equal(
        flat.view(torch.uint8).sort().values[-scale.numel() :], scale.view(torch.uint8).flatten().sort().values
    )
