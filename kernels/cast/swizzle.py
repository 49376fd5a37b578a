"""The order in memory of MXFP8 and NVFP4 scales that tensor cores of compute capability 10 read.

Scales [*, R, C], one byte each, are padded with zeros to whole tiles of 128 rows and 4 columns. Tiles follow each other
row by row; in a tile, the four columns of rows i, i + 32, i + 64 and i + 96 stand together. (cuBLAS documentation, "1D
block scaling factors layout"; torch calls it ``SWIZZLE_32_4_4``.) Here they keep the padded sizes as their shape.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fxquant.compat.values import statically_known_true

TILE = (128, 4)
"""Rows and columns of scales that are read at once."""


def padded_sizes(rows: Any, columns: Any) -> tuple[Any, Any]:
    """The sizes of whole tiles that cover so many scales."""
    down, across = TILE
    return (rows + down - 1) // down * down, (columns + across - 1) // across * across


def swizzle(scale: Tensor) -> Tensor:
    """Scales [*, R, C], padded with zeros and in the order of tiles."""
    *batch, rows, columns = scale.shape
    high, wide = padded_sizes(rows, columns)
    raw = scale.view(torch.uint8)
    if not (statically_known_true(high == rows) and statically_known_true(wide == columns)):
        raw = torch.nn.functional.pad(raw, (0, wide - columns, 0, high - rows))
    tiles = raw.reshape(math.prod(batch), high // 128, 4, 32, wide // 4, 4)
    return tiles.permute(0, 1, 4, 3, 2, 5).reshape(*batch, high, wide).view(scale.dtype)


def unswizzle(scale: Tensor, rows: Any, columns: Any) -> Tensor:
    """The scales [*, rows, columns] of which `swizzle` made these."""
    *batch, high, wide = scale.shape
    tiles = scale.view(torch.uint8).reshape(math.prod(batch), high // 128, wide // 4, 32, 4, 4)
    padded = tiles.permute(0, 1, 4, 3, 2, 5).reshape(*batch, high, wide)
    return padded.narrow(-2, 0, rows).narrow(-1, 0, columns).contiguous().view(scale.dtype)
