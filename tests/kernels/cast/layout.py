"""How hardware wants scales stored: padded, and for block-scaled GEMMs in tiles.

Scales come as `fxquant.kernels.cast.reference` makes them, [R, C] for an operand whose contracted axis is last; a
columnwise operand is transposed already, so each function serves both directions.
"""

from __future__ import annotations

import torch
from torch import Tensor

TILE = (128, 4)
"""Rows and columns of scales that a block-scaled GEMM reads at once."""


def pad_scales(scale: Tensor, multiples: tuple[int, int] = TILE) -> Tensor:
    """Scales [R, C] with zeros behind their rows and columns, up to multiples."""
    rows, columns = (-size % multiple for size, multiple in zip(scale.shape, multiples, strict=True))
    if not rows and not columns:
        return scale
    raw = scale if scale.dtype == torch.float32 else scale.view(torch.uint8)
    return torch.nn.functional.pad(raw, (0, columns, 0, rows)).view(scale.dtype)


def swizzle(scale: Tensor) -> Tensor:
    """MXFP8 and NVFP4 scales [R, C], one byte each, padded and in the order of tcgen05 GEMMs: flat.

    Tiles of 128x4 follow each other row by row; in a tile, the four columns of rows i, i + 32, i + 64 and i + 96 stand
    together. (cuBLAS documentation, "1D block scaling factors layout".)
    """
    padded = pad_scales(scale)
    rows, columns = padded.shape
    return padded.view(rows // 128, 4, 32, columns // 4, 4).permute(0, 3, 2, 1, 4).flatten()


def unswizzle(flat: Tensor, rows: int, columns: int) -> Tensor:
    """The scales [rows, columns] of which `swizzle` made `flat`."""
    tiles = (-(-rows // 128), -(-columns // 4))
    padded = flat.view(*tiles, 32, 4, 4).permute(0, 3, 2, 1, 4).reshape(tiles[0] * 128, tiles[1] * 4)
    return padded[:rows, :columns]


def block_scales(scale: Tensor, *, tiled: bool) -> Tensor:
    """float32 scales of FP8 blocks as cuBLAS reads them, the last axis padded with zeros to a multiple of 4.

    1x128 blocks, [R, C / 128], are stored with the rows last, [C / 128, R up to 4]; 128x128 tiles (`tiled`) as they
    are, [R / 128, C / 128 up to 4]. (cuBLAS documentation, "scaling factors layouts"; numerics: Float8 block.)
    """
    return pad_scales(scale if tiled else scale.mT, (1, 4)).contiguous()
