"""The meaning of quantize, dequantize and GEMM for groups of rows, in plain torch operations.

A grouped operand is ragged, x [M, C] with the ends of its G groups of rows in `offs` (int32 [G], ascending), or
batched, x [G, R, C] without `offs`. Each group is quantized as a tensor of its own, to the bytes of
`fxquant.kernels.cast.reference`; rows behind the last offset belong to none and are read by nothing. No offset is
needed on the host, and no shape depends on one.

Where a ragged operand is contracted over its rows (columnwise), the payload is [C, Mp] with the start of every group
at a multiple of the format's alignment A and zeros behind its end, so that no block straddles two groups.
Mp = (M + G * (A - 1)) // A * A holds any split of M rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fxquant.compat.values import statically_known_true
from fxquant.formats import QuantSpec, is_mixed
from fxquant.kernels.cast import reference
from fxquant.kernels.grouped import swizzle
from fxquant.kernels.grouped.high_precision import multiply_groups
from fxquant.kernels.grouped.places import Dim, group_of, padded_ends, padded_rows, positions, starts


def in_groups(offs: Tensor, rows: Dim) -> Tensor:
    """Which of the rows belong to a group: bool [M, 1]."""
    return (positions(rows, offs) < offs[-1]).unsqueeze(1)


def quantize(
    x: Tensor, offs: Tensor | None, spec: QuantSpec, direction: str, state: Tensor | None = None
) -> list[Tensor]:
    """Quantizes every group of x by itself: [data, scale] or [data, scale, global_amax].

    What `reference.quantize` gives for one tensor is stacked over the groups. Ragged rowwise: data [M, Cp] and
    scales by row; columnwise: data [C, Mp] and scales by column block. Of ragged tiles (block_128x128) the scale is
    [Mp/128, Cp/128] in the padded rows. Per group are: the scale of per_tensor [G], that of columnwise per_row [G, C]
    and the global amax of NVFP4 [G]. Batched operands have a leading G throughout.

    `state` is what `reference.quantize` takes from the state of a graph, for a delayed scale one of each group [G]; for
    rows of a batch it may be their amaxes [G, R], of columns [G, C].
    Random bits are drawn for the operand as it is laid out, groups padded. Ragged `swizzled` operands are laid out as
    `fxquant.kernels.grouped.swizzle` says, with the same bits. With `row_scaled` the global amax is that of
    each row [M, 1] ([G, R, 1] of a batch), or of each column of a group [G, C].
    """
    if x.dtype == torch.float64:
        x = x.float()
    if offs is None:
        return _quantize_batched(x.mT if direction == "columnwise" else x, spec, state)
    if spec.swizzled:
        return swizzle.swizzled(
            quantize(x, offs, replace(spec, swizzled=False), direction, state), offs, spec, direction
        )
    if direction == "columnwise":
        return _quantize_columns(x, offs, spec, state)
    return _quantize_rows(x, offs, spec, state)


def group_amax(x: Tensor, offs: Tensor | None) -> Tensor:
    """The largest magnitude in each group, NaN ignored: float32 [G], 0 for an empty one."""
    rows = reference.amax(x, -1)
    if offs is None:
        return reference.amax(rows, -1)
    return _by_group(rows, group_of(offs, x.shape[0]), offs.shape[0])


def dequantize(parts: Sequence[Tensor], offs: Tensor | None, spec: QuantSpec, direction: str) -> Tensor:
    """The float32 values of what `quantize` gave, in its layout (contracted axis last, padding zero)."""
    return reference.dequantize(*expanded(parts, offs, spec, direction))


def scaled_mm(
    a: Sequence[Tensor], b: Sequence[Tensor], offs: Tensor | None, a_spec: QuantSpec, b_spec: QuantSpec,
    out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """One GEMM a group, each operand with its contracted axis last.

    Ragged a [M, K] x batched b [G, N, K] gives [M, N]; columns of both, a [N, Mp] x b [K, Mp], give [G, N, K]; batched
    a [G, M, K] x b [G, N, K] gives [G, M, N]. Float32 products and sums, one rounding. Rows of no group are zero.
    """
    left, right, ends = multiplicands(a, b, offs, a_spec, b_spec)
    return multiply_groups(left, right, ends).to(out_dtype)


def multiplicands(
    a: Sequence[Tensor], b: Sequence[Tensor], offs: Tensor | None, a_spec: QuantSpec, b_spec: QuantSpec
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The float32 values of both operands as `multiply_groups` takes them, and the ends of the groups in them."""
    of_a, of_b, ends = gemm_operands(a, b, offs, a_spec, b_spec)
    left, right = reference.dequantize(*of_a), reference.dequantize(*of_b)
    if offs is None or b[0].ndim == 3 or not is_mixed(a_spec, b_spec):
        return *reference.multiplicands(left, a_spec, right, b_spec), ends
    # groups of columns that start at multiples of two alignments: those of the longer take the places of the other
    left, right = reference.plain_basis(left, a_spec), reference.plain_basis(right, b_spec)
    of_left, of_right = a_spec.row.alignment, b_spec.row.alignment
    if of_left <= of_right:
        return left, _placed(right, offs, of_right, of_left, left.shape[-1]), padded_ends(offs, of_left)
    return _placed(left, offs, of_left, of_right, right.shape[-1]), right, padded_ends(offs, of_right)


def _placed(columns: Tensor, offs: Tensor, alignment: int, wanted: int, length: Dim) -> Tensor:
    """Columns whose groups start at multiples of an alignment, with groups at multiples of the one that is wanted."""
    old, new = padded_ends(offs, alignment), padded_ends(offs, wanted)
    group = group_of(new, length).clamp(max=offs.shape[0] - 1)
    places = positions(length, offs) + (starts(old) - starts(new))[group]
    return columns[..., places.clamp(max=max(columns.shape[-1] - 1, 0))]


Dense = tuple[list[Tensor], QuantSpec]
"""Parts and spec of an operand as `fxquant.kernels.cast.reference` knows them."""


def gemm_operands(
    a: Sequence[Tensor], b: Sequence[Tensor], offs: Tensor | None, a_spec: QuantSpec, b_spec: QuantSpec
) -> tuple[Dense, Dense, Tensor | None]:
    """Both operands of a grouped GEMM with what is per group repeated, and the ends of the groups in them."""
    if offs is None:
        return expanded(a, None, a_spec, "rowwise"), expanded(b, None, b_spec, "rowwise"), None
    if b[0].ndim == 3:
        return expanded(a, offs, a_spec, "rowwise"), expanded(b, None, b_spec, "rowwise"), offs
    ends = padded_ends(offs, a_spec.row.alignment)
    return expanded(a, offs, a_spec, "columnwise"), expanded(b, offs, b_spec, "columnwise"), ends


def expanded(
    parts: Sequence[Tensor], offs: Tensor | None, spec: QuantSpec, direction: str
) -> tuple[list[Tensor], QuantSpec]:
    """The parts with what is per group repeated for its rows or columns, as `reference.dequantize` takes them."""
    if spec.is_identity:
        return list(parts), spec
    if spec.swizzled and offs is not None:
        parts, spec = swizzle.plain(parts, offs, spec, direction), replace(spec, swizzled=False)
    row, data, scale, *rest = spec.row, *parts
    per_group = row.family == "per_tensor" or (
        row.family == "per_row" and direction == "columnwise" and offs is not None
    )
    if offs is None:
        return [data, _over(scale) if per_group else scale, *(rest if spec.row_scaled else map(_over, rest))], spec
    last = offs.shape[0] - 1
    if direction == "columnwise":
        ends, count = padded_ends(offs, row.alignment), scale.shape[-1]
        if per_group:
            scale = scale[group_of(ends, data.shape[-1]).clamp(max=last)]
            return [data, scale.mT if scale.ndim > 1 else scale.unsqueeze(0)], spec
        step = row.alignment  # every format with a global amax pads to its block
        by_block = (amax[group_of(ends, count, step).clamp(max=last)] for amax in rest)
        return [data, scale, *(amax.mT if amax.ndim > 1 else amax.unsqueeze(0) for amax in by_block)], spec
    group = group_of(offs, data.shape[0]).clamp(max=last)
    if per_group:
        return [data, scale[group].unsqueeze(1)], spec
    if row.family == "block" and row.block[0] > 1:
        tile = _padded_positions(offs, data.shape[0], row.block[0]) // row.block[0]
        return [data, scale[tile.clamp(max=scale.shape[0] - 1)]], replace(
            spec, format=spec.format.replace("128x", "1x", 1)
        )
    return [data, scale, *(rest if spec.row_scaled else (g[group].unsqueeze(1) for g in rest))], spec


def _quantize_batched(x: Tensor, spec: QuantSpec, state: Tensor | None) -> list[Tensor]:
    """x [G, R, C], already with its contracted axis last."""
    if spec.row.family == "per_tensor":
        multiplier = state
        if multiplier is None:
            multiplier = reference.multiplier_from_amax(group_amax(x, None), spec)
        data, _ = reference.quantize(x, spec, _over(multiplier))
        return [data, reference.reciprocal(multiplier)]
    if spec.row.family == "per_row" and state is not None:
        return reference.quantize(x, spec, reference.multiplier_from_amax(state, spec).unsqueeze(-1))
    if spec.row.has_global_amax and not spec.row_scaled:
        amax = group_amax(_transformed(x, spec), None)
        return [*reference.quantize(x, spec, state, _over(amax))[:2], amax]
    return reference.quantize(x, spec)


def _quantize_rows(x: Tensor, offs: Tensor, spec: QuantSpec, state: Tensor | None) -> list[Tensor]:
    row, rows, last = spec.row, x.shape[0], offs.shape[0] - 1
    if spec.row_scaled:
        return reference.quantize(x, spec, state)
    of_group = state if row.family == "per_tensor" else None
    if row.has_global_amax or (row.family == "per_tensor" and state is None):
        of_group = group_amax(_transformed(x, spec), offs)
        if row.family == "per_tensor":
            of_group = reference.multiplier_from_amax(of_group, spec)
    if row.block[0] > 1:  # tiles of rows start with their group
        ends = padded_ends(offs, row.block[0])
        padded = pad_groups(x, offs, row.block[0])
        tiles = group_of(ends, padded.shape[0] // row.block[0], row.block[0]).clamp(max=last)
        of_row = None if of_group is None else of_group[tiles].unsqueeze(1)
        data, scale, *_ = reference.quantize(padded, spec, state, of_row)
        place = _padded_positions(offs, rows, row.block[0]).clamp(max=max(padded.shape[0] - 1, 0))
        parts = [data[place], scale if row.family == "block" else scale[place]]
        return parts if of_group is None else [*parts, of_group]
    if of_group is None:
        return reference.quantize(x, spec)
    of_row = of_group[group_of(offs, rows).clamp(max=last)].unsqueeze(1)
    if row.has_global_amax:
        return [*reference.quantize(x, spec, state, of_row)[:2], of_group]
    return [reference.quantize(x, spec, of_row)[0], reference.reciprocal(of_group)]


def _quantize_columns(x: Tensor, offs: Tensor, spec: QuantSpec, state: Tensor | None) -> list[Tensor]:
    row, groups = spec.row, offs.shape[0]
    ends = padded_ends(offs, row.alignment)
    columns = pad_groups(x, offs, row.alignment).mT
    group = group_of(ends, columns.shape[-1])
    inside = group.clamp(max=groups - 1)
    if row.family == "per_tensor":
        multiplier = state
        if multiplier is None:
            multiplier = reference.multiplier_from_amax(group_amax(x, offs), spec)
        return [reference.quantize(columns, spec, multiplier[inside].unsqueeze(0))[0], reference.reciprocal(multiplier)]
    if row.family == "per_row":
        blocks = reference.amax(torch.unflatten(columns, -1, (columns.shape[-1] // row.alignment, row.alignment)), -1)
        amax = _by_group(blocks.mT, group_of(ends, blocks.shape[-1], row.alignment), groups)
        by_column = reference.multiplier_from_amax(amax, spec)
        return [reference.quantize(columns, spec, by_column[inside].mT)[0], reference.reciprocal(by_column)]
    if row.has_global_amax:
        block = group_of(ends, columns.shape[-1] // row.alignment, row.alignment)
        if spec.row_scaled:
            blocks = torch.unflatten(columns, -1, (columns.shape[-1] // row.alignment, row.alignment))
            amax = _by_group(reference.amax(blocks, -1).mT, block, groups)
            of_block = amax[block.clamp(max=groups - 1)].mT
        else:
            amax = _by_group(reference.amax(_transformed(columns, spec), 0), group, groups)
            of_block = amax[block.clamp(max=groups - 1)].unsqueeze(0)
        return [*reference.quantize(columns, spec, state, of_block)[:2], amax]
    return reference.quantize(columns, spec)


def pad_groups(x: Tensor, offs: Tensor, alignment: int) -> Tensor:
    """x [M, C] as [Mp, C]: every group starts at a multiple of the alignment, zeros fill the gaps."""
    rows, last = x.shape[0], offs.shape[0] - 1
    ends = padded_ends(offs, alignment)
    place = positions(padded_rows(rows, last + 1, alignment), offs)
    group = torch.searchsorted(ends, place, right=True).clamp(max=last)
    source = place - starts(ends)[group] + starts(offs)[group]
    if not statically_known_true(rows > 0):
        x = torch.nn.functional.pad(x, (0, 0, 0, 1))
    return torch.where((source < offs[group]).unsqueeze(1), x[source.clamp(max=x.shape[0] - 1)], 0)


def _padded_positions(offs: Tensor, rows: Dim, alignment: int) -> Tensor:
    """The places of the rows in the padded buffer; rows of no group stand anywhere."""
    group = group_of(offs, rows).clamp(max=offs.shape[0] - 1)
    shift = starts(padded_ends(offs, alignment)) - starts(offs)
    return positions(rows, offs) + shift[group]


def _by_group(amax: Tensor, group: Tensor, groups: Dim) -> Tensor:
    """The largest of amaxes [n] or [n, C] in each group; those of group G are of none."""
    out = amax.new_zeros((groups + 1, *amax.shape[1:]))
    index = group.long().reshape(-1, *[1] * (amax.ndim - 1)).expand_as(amax)
    return out.scatter_reduce(0, index, amax, "amax")[:-1]


def _transformed(x: Tensor, spec: QuantSpec) -> Tensor:
    """The tensor whose amax NVFP4 takes."""
    if not spec.rht:
        return x
    spare = -x.shape[-1] % 16
    x = x if statically_known_true(spare == 0) else torch.nn.functional.pad(x, (0, spare))
    return reference.hadamard(x, random_signs=spec.random_signs)


def _over(state: Tensor) -> Tensor:
    """One value for each group, [G], as it broadcasts against tensors [G, R, C]."""
    return state.reshape(-1, 1, 1)
