"""The operators of grouped linears.

They are to groups of rows what those of `fxquant.kernels.cast.ops` and `fxquant.kernels.linear.ops` are to one tensor.
`offs` are the ends of the groups (int32 [G]) of a ragged operand [M, C]; without it the operand is batched, [G, R, C].
Layouts and scales are those of `fxquant.kernels.grouped.reference`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fxquant.formats import OperandSpec, QuantSpec, check_parts
from fxquant.kernels.cast import choice, reference
from fxquant.kernels.cast.choice import CastFacts, CastKernel, by_direction, one_direction, register_casts
from fxquant.kernels.cast.ops import fake_operand, parts_spec, shared_spec
from fxquant.kernels.cast.rounded import rounded
from fxquant.kernels.grouped import reference as grouped_reference
from fxquant.kernels.grouped import swizzle
from fxquant.kernels.grouped.choice import GroupedGemmFacts
from fxquant.kernels.grouped.places import padded_rows
from fxquant.kernels.linear.choice import GemmKernel
from fxquant.kernels.operator import Parts, Side, Traits, operator
from fxquant.kernels.state.step import STATELESS, StepState


def fake_groups(x: Tensor, offs: Tensor | None, spec: QuantSpec, direction: str) -> list[Tensor]:
    """Shapes and dtypes of `grouped_reference.quantize`."""
    columnwise = direction == "columnwise"
    x = x.mT if columnwise else x
    if offs is None:
        return fake_operand(x, spec, tensors=x.shape[0])
    groups = offs.shape[0]
    if spec.swizzled:
        rows, length = x.shape
        of_rows: list[Any] = [groups, rows] if columnwise else [rows, 1]
        sizes = swizzle.sizes(rows, length, groups, spec, direction)
        shapes: list[Any] = [*sizes, of_rows if spec.row_scaled else [groups]]
        return [x.new_empty(shape, dtype=dtype) for shape, dtype in zip(shapes, spec.row.dtypes, strict=False)]
    if columnwise:
        rows, length = x.shape
        x = x.new_empty(rows, padded_rows(length, groups, spec.row.alignment))
        return fake_operand(x, spec, tensors=groups, lines=[groups, rows])
    tile_rows = padded_rows(x.shape[0], groups, max(1, spec.row.block[0]))
    return fake_operand(x, spec, tensors=groups, tile_rows=tile_rows)


@operator(reference=CastKernel.FUSED, traits=Traits(reads_values=1))
def split_amax(x: Tensor, offs: Tensor | None) -> Tensor:
    """The largest magnitude in each group, NaN ignored: float32 [G]."""
    return grouped_reference.group_amax(x, offs)


@split_amax.fake
def _split_amax_fake(x: Tensor, offs: Tensor | None) -> Tensor:
    return x.new_empty([x.shape[0] if offs is None else offs.shape[0]], dtype=torch.float32)


def _facts(sides: Callable[..., list[Side]], x: Tensor, offs: Tensor | None, *args: Any) -> CastFacts:
    return CastFacts.of(x, sides(x, *args), ragged=offs is not None)


split_amax.facts(lambda x, offs: CastFacts.of(x, ragged=offs is not None))


@split_amax.implementation(CastKernel.TRITON, when=choice.amax_of_groups)
def _triton_amax(x: Tensor, offs: Tensor | None) -> Tensor:
    from fxquant.kernels.grouped import triton_cast

    return triton_cast.group_amax(x, offs)


def _rounded_amax(x: Tensor, offs: Tensor | None) -> Tensor:
    return grouped_reference.group_amax(rounded(x), offs)


@operator(reference=CastKernel.FUSED, traits=Traits(reads_values=1, operands=2))
def hybrid_split_quantize(
    x: Tensor,
    offs: Tensor | None,
    rowwise_spec: str,
    columnwise_spec: str,
    rowwise_state: Tensor | None = None,
    columnwise_state: Tensor | None = None,
) -> list[Tensor]:
    """`split_quantize` in both directions."""
    row = split_quantize.meaning(x, offs, rowwise_spec, "rowwise", rowwise_state)
    return [*row, *split_quantize.meaning(x, offs, columnwise_spec, "columnwise", columnwise_state)]


@hybrid_split_quantize.fake
def _hybrid_split_quantize_fake(
    x: Tensor, offs: Tensor | None, rowwise_spec: str, columnwise_spec: str, *states: Tensor | None
) -> list[Tensor]:
    row = fake_groups(x, offs, QuantSpec.parse(rowwise_spec), "rowwise")
    return [*row, *fake_groups(x, offs, QuantSpec.parse(columnwise_spec), "columnwise")]


@operator(
    reference=CastKernel.FUSED,
    traits=Traits(reads_values=1, operands=2, amax=split_amax, both=hybrid_split_quantize),
)
def split_quantize(
    x: Tensor, offs: Tensor | None, spec: str, direction: str, state: Tensor | None = None
) -> list[Tensor]:
    """Quantizes every group by itself, in one direction; `state` is that of `fxquant.kernels.grouped.reference`."""
    # a GEMM wants the contracted axis dense, see `fxquant.kernels.cast.ops`
    parts = grouped_reference.quantize(x, offs, QuantSpec.parse(spec), direction, state)
    return [part.contiguous() for part in parts]


@split_quantize.fake
def _split_quantize_fake(
    x: Tensor, offs: Tensor | None, spec: str, direction: str, state: Tensor | None = None
) -> list[Tensor]:
    return fake_groups(x, offs, QuantSpec.parse(spec), direction)


def _triton_quantize(
    sides: Callable[..., list[Side]], measure: Callable[..., Tensor], x: Tensor, offs: Tensor | None, *args: Any
) -> list[Tensor]:
    from fxquant.kernels.grouped import triton_cast, triton_nvfp4

    (row, row_state), (column, column_state) = by_direction(sides(x, *args))
    in_four_bits = [spec.row.family == "nvfp4" for spec in (row, column) if spec is not None]
    if len(set(in_four_bits)) > 1:  # a kernel for each direction
        one_by_one = [(side.spec, side.direction, side.state) for side in sides(x, *args)]
        return [part for side in one_by_one for part in _triton_quantize(one_direction, measure, x, offs, *side)]
    cast = triton_nvfp4.quantize if in_four_bits[0] else triton_cast.quantize
    return cast(x, offs, row, column, row_state, column_state, measure)


register_casts(
    (split_quantize, hybrid_split_quantize), _facts, _triton_quantize,
    [(CastKernel.STORED, choice.stored_groups, _triton_amax), (CastKernel.TRITON, choice.groups, _rounded_amax)],
)  # fmt: skip


@operator(reference=CastKernel.FUSED, traits=Traits(reads_values=1))
def split_quantize_and_amax(x: Tensor, spec: str) -> list[Tensor]:
    """Quantizes a batch [G, R, C] rowwise, and gives the amaxes of its columns [G, C]."""
    return [*split_quantize.meaning(x, None, spec, "rowwise"), reference.amax(x.mT, -1)]


split_quantize_and_amax.facts(lambda x, spec: _facts(one_direction, x, None, spec, "rowwise"))


@split_quantize_and_amax.implementation(CastKernel.STORED, when=choice.stored_groups)
def _triton_quantize_and_amax(x: Tensor, spec: str) -> list[Tensor]:
    from fxquant.kernels.grouped import triton_cast

    return triton_cast.quantize_and_amax(x, QuantSpec.parse(spec))


@operator()
def split_dequantize(parts: Parts, offs: Tensor | None, spec: str, length: int, dtype: torch.dtype) -> Tensor:
    """The values of a rowwise operand [*, C] in `dtype`, C being `length`."""
    values = grouped_reference.dequantize(parts, offs, QuantSpec.parse(spec), "rowwise")
    return values[..., :length].to(dtype).contiguous()


@operator(reference=GemmKernel.REFERENCE)
def grouped_scaled_mm(
    a: Parts, b: Parts, offs: Tensor | None, a_spec: str, b_spec: str, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    """One GEMM a group in `out_dtype`, as `fxquant.kernels.grouped.reference.scaled_mm` lays it out."""
    return grouped_reference.scaled_mm(a, b, offs, QuantSpec.parse(a_spec), QuantSpec.parse(b_spec), out_dtype)


@grouped_scaled_mm.fake
def _grouped_scaled_mm_fake(
    a: Parts, b: Parts, offs: Tensor | None, a_spec: str, b_spec: str, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    check_parts(a, QuantSpec.parse(a_spec))
    check_parts(b, QuantSpec.parse(b_spec))
    groups = [offs.shape[0]] if offs is not None and b[0].ndim == 2 else []
    return a[0].new_empty([*groups, *a[0].shape[:-1], b[0].shape[-2]], dtype=out_dtype)


grouped_scaled_mm.facts(GroupedGemmFacts.of)


def quantize_groups(
    x: Tensor, offs: Tensor | None, spec: OperandSpec, direction: str, state: StepState = STATELESS,
    stored: list[Tensor] | None = None,
) -> tuple[list[Tensor], QuantSpec]:  # fmt: skip
    """One direction of a grouped operand with the spec of its parts: an identity gives the oriented tensor itself.

    `state` is that of the graph; a spec that names a slot has one for each group from there on. `stored` is as for
    `fxquant.kernels.cast.ops.quantize_operand`.
    """
    if direction == "rowwise":
        return _one_side(x, offs, spec.rowwise, direction, state), parts_spec(spec.rowwise)
    if spec.from_rowwise and not spec.rowwise.is_identity:
        row = _one_side(x, offs, spec.rowwise, "rowwise", state) if stored is None else stored
        x = split_dequantize(row, offs, str(parts_spec(spec.rowwise)), x.shape[-1], x.dtype)
    elif spec.from_rowwise:
        x = _one_side(x, offs, spec.rowwise, "rowwise", state)[0].to(x.dtype)
    return _one_side(x, offs, spec.columnwise, direction, state), parts_spec(spec.columnwise)


def _one_side(x: Tensor, offs: Tensor | None, spec: QuantSpec, direction: str, state: StepState) -> list[Tensor]:
    if spec.is_identity:
        x = x.to(getattr(torch, spec.dtype)) if spec.dtype else x
        return [x.mT if direction == "columnwise" else x]
    groups = x.shape[0] if offs is None else offs.shape[0]
    return split_quantize(x, offs, str(shared_spec(spec)), direction, state.of(spec, groups))
