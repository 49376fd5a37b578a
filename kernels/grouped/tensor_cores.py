"""Grouped GEMMs of MXFP8 and NVFP4 on tensor cores that read the scales of blocks, by `scaled_grouped_mm`.

Each group's scales are tiles of their own (`fxquant.kernels.cast.swizzle`), one group behind the other: groups of rows
begin at multiples of 128 rows, groups of columns at multiples of 4 blocks, and the tiles of a group of columns lie
together.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def _moved(x: Tensor, place: Tensor, ends: Tensor, padded: Tensor, axis: int) -> Tensor:
    """Moves groups, which end at `ends` along an axis, to places where they end at `padded`, with zeros between."""
    group = group_of(padded, place.shape[0]).clamp(max=ends.shape[0] - 1)
    within = place - starts(padded)[group]
    taken = within < (ends - starts(ends))[group]
    source = (within + starts(ends)[group]).clamp(0, max(x.shape[axis] - 1, 0)).long()
    raw = x.view(torch.uint8) if x.itemsize == 1 else x
    return torch.where(taken.unsqueeze(1 - axis), raw.index_select(axis, source), 0).view(x.dtype)


def _in_units(data: Tensor, ends: Tensor) -> Tensor:
    """NVFP4 columns [R, C / 2] whose groups end at multiples of 16 elements, at multiples of 32: of 16 bytes."""
    words = data.view(torch.int64)
    places = padded_ends(ends, 2)
    column = _positions(padded_rows(words.shape[1], ends.shape[0], 2), ends)
    return _moved(words, column, ends, places, 1).view(torch.uint8)


@grouped_scaled_mm.implementation(GemmKernel.GROUPED_MXFP8, when=choice.mxfp8)
@grouped_scaled_mm.implementation(GemmKernel.GROUPED_NVFP4, when=choice.nvfp4)
def _on_tensor_cores(
    a: Parts, b: Parts, offs: Tensor, a_spec: str, b_spec: str, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    offs, spec = offs.to(torch.int32), QuantSpec.parse(a_spec)
    weight_gradient, features, in_four_bits = b[0].ndim == 2, b[0].shape[-2], spec.row.has_global_amax
    ends = padded_ends(offs, spec.row.alignment) if weight_gradient else offs
    left, right = (parts[0].contiguous() for parts in (a, b))
    if weight_gradient:
        blocks = ends // spec.row.block[1]
        scales = [swizzle_columns(parts[1].contiguous(), blocks) for parts in (a, b)]
        if in_four_bits:
            left, right, ends = _in_units(left, blocks), _in_units(right, blocks), padded_ends(blocks, 2) * 16
    else:
        scales = [swizzle_rows(a[1].contiguous(), offs), swizzle(b[1].contiguous()).flatten(1)]
    left, right = (_padded(data, 0) for data in (left, right))
    spare = -features % 16
    right = _padded(right, spare)  # rows of the result start at aligned addresses
    element, dtype = spec.row.element, spec.row.scale_dtype
    assert element is not None and dtype is not None
    a_scale, b_scale = (scale.view(dtype) for scale in scales)
    factors = [p[2] / QuantSpec.parse(text).unit_amax for p, text in ((a, a_spec), (b, b_spec)) if in_four_bits]
    left, right = (data if data.dtype == element.dtype else data.view(element.dtype) for data in (left, right))
    out = _multiplied(left, right.mT, a_scale, b_scale, factors, ends)
    out = out if statically_known_true(spare == 0) else out.narrow(-1, 0, features)
    return cleared(out, offs).to(out_dtype)


def _padded(data: Tensor, rows: Any) -> Tensor:
    """A payload in whole units of 16 bytes, with rows of zeros behind."""
    columns = -data.shape[-1] % 16
    if statically_known_true(rows == 0) and statically_known_true(columns == 0):
        return data
    return torch.nn.functional.pad(data.view(torch.uint8), (0, columns, 0, rows)).view(data.dtype)


def _multiplied(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, factors: Sequence[Tensor], ends: Tensor
) -> Tensor:
    """torch's grouped GEMM in bfloat16; NVFP4 has a factor of each group for both operands."""
    if not factors and not knows_grouped_kinds():  # the older operator knows scales by their dtype
        return torch_scaled_grouped_mm(a, b, a_scale, b_scale, offs=ends, out_dtype=torch.bfloat16)
    kinds, orders = [ScalingType.BlockWise1x32], [SwizzleType.SWIZZLE_32_4_4]
    scales = [[a_scale], [b_scale]]
    if factors:
        kinds, orders = [ScalingType.BlockWise1x16, ScalingType.TensorWise], [*orders, SwizzleType.NO_SWIZZLE]
        scales = [[a_scale, factors[0]], [b_scale, factors[1]]]
    functional: Any = torch.nn.functional
    return functional.scaled_grouped_mm(  # type: ignore[no-any-return]
        a, b, scales[0], kinds, scales[1], kinds, orders, orders, offs=ends, output_dtype=torch.bfloat16
    )
