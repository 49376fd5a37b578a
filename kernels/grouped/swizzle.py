"""The order of groups' MXFP8 and NVFP4 scales that grouped GEMMs on tensor cores read.

Each group's scales are tiles of their own (`fxquant.kernels.cast.swizzle`), one group behind the other: groups of rows
begin at multiples of 128 rows, groups of columns at multiples of 4 blocks, and the tiles of a group of columns lie
together. Payloads of groups of columns begin at multiples of 16 bytes: of 32 elements, where plain NVFP4 has 16.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxquant.formats import QuantSpec
from fxquant.kernels.cast.swizzle import TILE, padded_sizes, swizzle, unswizzle
from fxquant.kernels.grouped.places import Dim, group_of, moved, padded_ends, padded_rows, positions, starts

_BYTES_OF_A_TILE = 512
_UNIT = 32
"""The elements at whose multiples groups of columns begin."""


def swizzled(parts: Sequence[Tensor], offs: Tensor, spec: QuantSpec, direction: str) -> list[Tensor]:
    """The parts of a ragged operand as grouped GEMMs on tensor cores read them."""
    data, scale, *rest = parts
    if direction == "rowwise":
        return [data, swizzle_rows(scale, offs), *rest]
    return [in_units(data.contiguous(), offs, spec), swizzle_columns(scale, _blocks(offs, spec)), *rest]


def plain(parts: Sequence[Tensor], offs: Tensor, spec: QuantSpec, direction: str) -> list[Tensor]:
    """The parts of which `swizzled` made these; columns may have more zeros behind the last group."""
    data, scale, *rest = parts
    packed, block, ends = spec.row.packed, spec.row.block[1], _blocks(offs, spec)
    count = data.shape[-1] * packed // block
    if direction == "rowwise":
        rows = unswizzle(scale, scale.shape[0], count)
        return [data, moved(rows, padded_ends(offs, TILE[0]), offs, data.shape[0], 0), *rest]
    scale = unswizzle_columns(scale, ends, data.shape[0], count)
    if block != _UNIT:
        data = moved(data.contiguous().view(torch.int64), padded_ends(ends, _UNIT // block), ends, count, 1).view(
            data.dtype
        )
    return [data, scale, *rest]


def sizes(rows: Dim, columns: Dim, groups: Dim, spec: QuantSpec, direction: str) -> tuple[list[Dim], list[Dim]]:
    """The sizes of payload and scales of a ragged operand of so many rows, its contracted axis the last, columns."""
    packed, block = spec.row.packed, spec.row.block[1]
    if direction == "rowwise":
        length = (columns + block - 1) // block * block
        _, across = padded_sizes(rows, length // block)
        return [rows, length // packed], [padded_rows(rows, groups, TILE[0]), across]
    blocks = padded_rows(columns, groups, block) // block
    down, _ = padded_sizes(rows, 0)
    return [rows, padded_rows(columns, groups, _UNIT) // packed], [down, padded_rows(blocks, groups, TILE[1])]


def swizzle_rows(scale: Tensor, offs: Tensor) -> Tensor:
    """The scales [M, C] of groups of rows, each in tiles of its own: [Mp, C up to 4], zero where nothing is."""
    count = padded_rows(scale.shape[0], offs.shape[0], TILE[0])
    return swizzle(moved(scale, offs, padded_ends(offs, TILE[0]), count, 0))


def swizzle_columns(scale: Tensor, ends: Tensor) -> Tensor:
    """The scales [R, C] of groups of columns, which end at `ends`: [R up to 128, Cp], a group's tiles together."""
    count = padded_rows(scale.shape[1], ends.shape[0], TILE[1])
    in_tiles = swizzle(moved(scale, ends, padded_ends(ends, TILE[1]), count, 1))
    tiles = in_tiles.view(torch.uint8).reshape(-1, _BYTES_OF_A_TILE)
    place = _places_of_tiles(in_tiles, ends)
    together = torch.zeros_like(tiles).index_copy(0, place, tiles)
    return together.reshape(in_tiles.shape).view(scale.dtype)


def unswizzle_columns(scale: Tensor, ends: Tensor, rows: Dim, columns: Dim) -> Tensor:
    """The scales [rows, columns] of which `swizzle_columns` made these."""
    tiles = scale.view(torch.uint8).reshape(-1, _BYTES_OF_A_TILE)
    in_tiles = tiles.index_select(0, _places_of_tiles(scale, ends)).reshape(scale.shape).view(scale.dtype)
    return moved(unswizzle(in_tiles, rows, scale.shape[1]), padded_ends(ends, TILE[1]), ends, columns, 1)


def in_units(data: Tensor, offs: Tensor, spec: QuantSpec) -> Tensor:
    """Columns whose groups begin at multiples of a block, at multiples of 16 bytes."""
    block = spec.row.block[1]
    if block == _UNIT:
        return data
    ends, count = _blocks(offs, spec), data.shape[1] * spec.row.packed // block
    words = data.view(torch.int64)  # of 16 elements
    return moved(
        words, ends, padded_ends(ends, _UNIT // block), padded_rows(count, ends.shape[0], _UNIT // block), 1
    ).view(data.dtype)


def unit_ends(offs: Tensor) -> Tensor:
    """The ends of groups of columns in such a payload, in elements."""
    return padded_ends(offs, _UNIT)


def _blocks(offs: Tensor, spec: QuantSpec) -> Tensor:
    """The ends of groups in blocks."""
    block = spec.row.block[1]
    return padded_ends(offs, block) // block


def _places_of_tiles(in_tiles: Tensor, ends: Tensor) -> Tensor:
    """The places of tiles that stand row by row, where those of each group stand together."""
    down, across = in_tiles.shape[0] // TILE[0], in_tiles.shape[1] // TILE[1]
    # the tiles behind the last group are one more
    last = ends.new_full([1], 1) * across
    tile_ends = torch.cat((padded_ends(ends, TILE[1]) // TILE[1], last))
    tile = positions(across, ends)
    group = group_of(tile_ends, across).clamp(max=ends.shape[0])
    first = starts(tile_ends)[group]
    width = tile_ends[group] - first
    place = first * down + positions(down, ends).unsqueeze(1) * width + (tile - first)
    return place.reshape(-1).long()
