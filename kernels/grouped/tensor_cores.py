"""Grouped GEMMs of MXFP8 and NVFP4 on tensor cores that read the scales of blocks, by `scaled_grouped_mm`.

Each group's scales are tiles of their own (`fxquant.kernels.cast.swizzle`), one group behind the other: groups of rows
begin at multiples of 128 rows, groups of columns at multiples of 4 blocks, and the tiles of a group of columns lie
together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxquant.compat.private import ScalingType, SwizzleType, knows_grouped_kinds, torch_scaled_grouped_mm
from fxquant.compat.values import statically_known_true
from fxquant.formats import QuantSpec
from fxquant.kernels.cast.swizzle import TILE, swizzle
from fxquant.kernels.grouped import choice
from fxquant.kernels.grouped.fp8 import cleared
from fxquant.kernels.grouped.ops import grouped_scaled_mm
from fxquant.kernels.grouped.reference import group_of, padded_ends, padded_rows, starts
from fxquant.kernels.linear.choice import GemmKernel
from fxquant.kernels.operator import Parts

_BYTES_OF_A_TILE = 512


def swizzle_rows(scale: Tensor, offs: Tensor) -> Tensor:
    """The scales [M, C] of groups of rows, each in tiles of its own: [Mp, C up to 4], zero where nothing is."""
    high, groups = TILE[0], offs.shape[0]
    ends = padded_ends(offs, high)
    row = _positions(padded_rows(scale.shape[0], groups, high), offs)
    return swizzle(_moved(scale, row, offs, ends, 0))


def swizzle_columns(scale: Tensor, ends: Tensor) -> Tensor:
    """The scales [R, C] of groups of columns, which end at `ends`: [R up to 128, Cp], a group's tiles together."""
    wide, groups = TILE[1], ends.shape[0]
    places = padded_ends(ends, wide)
    column = _positions(padded_rows(scale.shape[1], groups, wide), ends)
    in_tiles = swizzle(_moved(scale, column, ends, places, 1))
    down, across = in_tiles.shape[0] // TILE[0], in_tiles.shape[1] // wide
    # the tiles behind the last group are one more
    last = places.new_full([1], 1) * across
    tile_ends = torch.cat((places // wide, last))
    tile = _positions(across, ends)
    group = group_of(tile_ends, across).clamp(max=groups)
    first = starts(tile_ends)[group]
    width = tile_ends[group] - first
    place = first * down + _positions(down, ends).unsqueeze(1) * width + (tile - first)
    tiles = in_tiles.view(torch.uint8).reshape(down * across, _BYTES_OF_A_TILE)
    moved = torch.zeros_like(tiles).index_copy(0, place.reshape(-1).long(), tiles)
    return moved.reshape(in_tiles.shape).view(scale.dtype)


def _positions(count: Any, ends: Tensor) -> Tensor:
    return torch.arange(count, dtype=ends.dtype, device=ends.device)


def _moved(scale: Tensor, place: Tensor, ends: Tensor, padded: Tensor, axis: int) -> Tensor:
    """Scales whose groups end at `ends` along an axis, at places where they end at `padded`, with zeros between."""
    group = group_of(padded, place.shape[0]).clamp(max=ends.shape[0] - 1)
    within = place - starts(padded)[group]
    taken = within < (ends - starts(ends))[group]
    source = (within + starts(ends)[group]).clamp(0, max(scale.shape[axis] - 1, 0)).long()
    raw = scale.view(torch.uint8).index_select(axis, source)
    return torch.where(taken.unsqueeze(1 - axis), raw, 0).view(scale.dtype)


@grouped_scaled_mm.implementation(GemmKernel.GROUPED_MXFP8, when=choice.mxfp8)
def _mxfp8(
    a: Parts, b: Parts, offs: Tensor, a_spec: str, b_spec: str, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    offs, spec = offs.to(torch.int32), QuantSpec.parse(a_spec)
    weight_gradient, features = b[0].ndim == 2, b[0].shape[-2]
    ends = padded_ends(offs, spec.row.alignment) if weight_gradient else offs
    block = spec.row.block[1]
    if weight_gradient:
        scales = [swizzle_columns(parts[1].contiguous(), ends // block) for parts in (a, b)]
    else:
        of_weights = swizzle(b[1].contiguous())
        scales = [swizzle_rows(a[1].contiguous(), offs), of_weights.flatten(1)]
    a_scale, b_scale = (scale.view(torch.float8_e8m0fnu) for scale in scales)
    left, right = a[0].contiguous(), b[0].contiguous()
    spare = -features % 16
    if not statically_known_true(spare == 0):  # rows of the result start at aligned addresses
        right = torch.nn.functional.pad(right.view(torch.uint8), (0, 0, 0, spare)).view(right.dtype)
    if knows_grouped_kinds():
        kind, order = ScalingType.BlockWise1x32, SwizzleType.SWIZZLE_32_4_4
        functional: Any = torch.nn.functional
        out = functional.scaled_grouped_mm(
            left, right.mT, a_scale, kind, b_scale, kind, order, order, offs=ends, output_dtype=torch.bfloat16
        )
    else:  # by the older operator, which knows these scales by their dtype
        out = torch_scaled_grouped_mm(left, right.mT, a_scale, b_scale, offs=ends, out_dtype=torch.bfloat16)
    out = out if statically_known_true(spare == 0) else out.narrow(-1, 0, features)
    return cleared(out, offs).to(out_dtype)
