"""The operators of grouped linears: schemas, fake kernels, and their meaning on any device.

They are to groups of rows what those of `fxquant.kernels.cast.ops` are to one tensor. `offs` are the ends of the groups
(int32 [G]) of a ragged operand [M, C]; without it the operand is batched, [G, R, C]. Layouts and scales are those of
`fxquant.kernels.grouped.reference`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fxquant.compat.private import fake_kernel, operator_library
from fxquant.formats import OperandSpec, QuantSpec, check_parts
from fxquant.kernels.cast import reference
from fxquant.kernels.cast.ops import random_state, shared_spec
from fxquant.kernels.grouped import reference as grouped_reference

_library = operator_library("fxquant", more=True)

_SCHEMAS = {
    "split_quantize": "(Tensor x, Tensor? offs, str spec, str direction, Tensor? state=None) -> Tensor[]",
    "hybrid_split_quantize": (
        "(Tensor x, Tensor? offs, str rowwise_spec, str columnwise_spec, Tensor? rowwise_state=None,"
        " Tensor? columnwise_state=None) -> Tensor[]"
    ),
    "split_quantize_and_amax": "(Tensor x, str spec) -> Tensor[]",
    "split_amax": "(Tensor x, Tensor? offs) -> Tensor",
    "split_dequantize": "(Tensor[] parts, Tensor? offs, str spec, SymInt length, ScalarType dtype) -> Tensor",
    "grouped_scaled_mm": (
        "(Tensor[] a, Tensor[] b, Tensor? offs, str a_spec, str b_spec, ScalarType out_dtype, bool fast_accum)"
        " -> Tensor"
    ),
}
for _name, _schema in _SCHEMAS.items():
    _library.define(_name + _schema, tags=torch.Tag.pt2_compliant_tag)


def _split_quantize(
    x: Tensor, offs: Tensor | None, spec: str, direction: str, state: Tensor | None = None
) -> list[Tensor]:
    # a GEMM wants the contracted axis dense, see `fxquant.kernels.cast.ops`
    parts = grouped_reference.quantize(x, offs, QuantSpec.parse(spec), direction, state)
    return [part.contiguous() for part in parts]


def _hybrid_split_quantize(
    x: Tensor,
    offs: Tensor | None,
    rowwise_spec: str,
    columnwise_spec: str,
    rowwise_state: Tensor | None = None,
    columnwise_state: Tensor | None = None,
) -> list[Tensor]:
    row = _split_quantize(x, offs, rowwise_spec, "rowwise", rowwise_state)
    return [*row, *_split_quantize(x, offs, columnwise_spec, "columnwise", columnwise_state)]


def _split_quantize_and_amax(x: Tensor, spec: str) -> list[Tensor]:
    """A batch [G, R, C] rowwise, and the amaxes of its columns [G, C]."""
    return [*_split_quantize(x, None, spec, "rowwise"), reference.amax(x.mT, -1)]


def _split_amax(x: Tensor, offs: Tensor | None) -> Tensor:
    return grouped_reference.group_amax(x, offs)


def _split_dequantize(
    parts: Sequence[Tensor], offs: Tensor | None, spec: str, length: int, dtype: torch.dtype
) -> Tensor:
    values = grouped_reference.dequantize(parts, offs, QuantSpec.parse(spec), "rowwise")
    return values[..., :length].to(dtype).contiguous()


def _grouped_scaled_mm(
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    offs: Tensor | None,
    a_spec: str,
    b_spec: str,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> Tensor:
    return grouped_reference.scaled_mm(a, b, offs, QuantSpec.parse(a_spec), QuantSpec.parse(b_spec), out_dtype)


IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "split_quantize": _split_quantize,
    "hybrid_split_quantize": _hybrid_split_quantize,
    "split_quantize_and_amax": _split_quantize_and_amax,
    "split_amax": _split_amax,
    "split_dequantize": _split_dequantize,
    "grouped_scaled_mm": _grouped_scaled_mm,
}
"""The meaning of each operator in plain torch, by name."""

for _name, _kernel in IMPLEMENTATIONS.items():
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")


def _fake_operand(x: Tensor, offs: Tensor | None, spec: QuantSpec, direction: str) -> list[Tensor]:
    """Shapes and dtypes of `grouped_reference.quantize`."""
    row, align = spec.row, spec.row.alignment
    assert row.element is not None and row.scale_dtype is not None
    sizes: list[Any] = list(x.shape)
    *batch, rows, length = sizes
    groups = x.shape[0] if offs is None else offs.shape[0]
    tiled = row.family == "block" and row.block[0] > 1
    tile_rows = rows
    if direction == "columnwise":
        rows, length = length, rows
        tile_rows = rows
        if offs is not None:
            length = grouped_reference.padded_rows(length, groups, align)
    elif offs is not None and tiled:
        tile_rows = grouped_reference.padded_rows(rows, groups, row.block[0])
    padded = (length + align - 1) // align * align
    if row.family == "per_tensor":
        scale_shape = [groups]
    elif row.family == "per_row":
        scale_shape = [groups, rows] if direction == "columnwise" and offs is not None else [*batch, rows, 1]
    else:
        scale_rows = (tile_rows + row.block[0] - 1) // row.block[0] if tiled else rows
        scale_shape = [*batch, scale_rows, padded // row.block[1]]
    packed = row.element.packed
    parts = [
        x.new_empty([*batch, rows, padded // packed], dtype=row.dtypes[0]),
        x.new_empty(scale_shape, dtype=row.dtypes[1]),
    ]
    by_column = direction == "columnwise" and offs is not None
    amax_shape = ([groups, rows] if by_column else [*batch, rows, 1]) if spec.row_scaled else [groups]
    return [*parts, x.new_empty(amax_shape, dtype=torch.float32)] if row.has_global_amax else parts


@fake_kernel(_library, "split_quantize")
def _split_quantize_fake(
    x: Tensor, offs: Tensor | None, spec: str, direction: str, state: Tensor | None = None
) -> list[Tensor]:
    return _fake_operand(x, offs, QuantSpec.parse(spec), direction)


@fake_kernel(_library, "hybrid_split_quantize")
def _hybrid_split_quantize_fake(
    x: Tensor,
    offs: Tensor | None,
    rowwise_spec: str,
    columnwise_spec: str,
    rowwise_state: Tensor | None = None,
    columnwise_state: Tensor | None = None,
) -> list[Tensor]:
    return [
        *_fake_operand(x, offs, QuantSpec.parse(rowwise_spec), "rowwise"),
        *_fake_operand(x, offs, QuantSpec.parse(columnwise_spec), "columnwise"),
    ]


@fake_kernel(_library, "split_quantize_and_amax")
def _split_quantize_and_amax_fake(x: Tensor, spec: str) -> list[Tensor]:
    parts = _fake_operand(x, None, QuantSpec.parse(spec), "rowwise")
    return [*parts, x.new_empty([x.shape[0], x.shape[-1]], dtype=torch.float32)]


@fake_kernel(_library, "split_amax")
def _split_amax_fake(x: Tensor, offs: Tensor | None) -> Tensor:
    return x.new_empty([x.shape[0] if offs is None else offs.shape[0]], dtype=torch.float32)


@fake_kernel(_library, "split_dequantize")
def _split_dequantize_fake(
    parts: Sequence[Tensor], offs: Tensor | None, spec: str, length: int, dtype: torch.dtype
) -> Tensor:
    check_parts(parts, QuantSpec.parse(spec))
    return parts[0].new_empty([*parts[0].shape[:-1], length], dtype=dtype)


@fake_kernel(_library, "grouped_scaled_mm")
def _grouped_scaled_mm_fake(
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    offs: Tensor | None,
    a_spec: str,
    b_spec: str,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> Tensor:
    check_parts(a, QuantSpec.parse(a_spec))
    check_parts(b, QuantSpec.parse(b_spec))
    groups = [offs.shape[0]] if offs is not None and b[0].ndim == 2 else []
    return a[0].new_empty([*groups, *a[0].shape[:-1], b[0].shape[-2]], dtype=out_dtype)


def quantize_groups(
    x: Tensor,
    offs: Tensor | None,
    spec: OperandSpec,
    direction: str,
    scales: Tensor | None = None,
    random: Tensor | None = None,
) -> tuple[list[Tensor], QuantSpec]:
    """One direction of a grouped operand with the spec that applies: an identity gives the oriented tensor itself.

    `scales` are the delayed scales of the graph; a spec that names a slot has one for each group from there on.
    `random` is its seed and step, for specs that round stochastically.
    """
    if direction == "rowwise":
        return _one_side(x, offs, spec.rowwise, direction, scales, random), shared_spec(spec.rowwise)
    if spec.from_rowwise and not spec.rowwise.is_identity:
        row = _one_side(x, offs, spec.rowwise, "rowwise", scales, random)
        x = torch.ops.fxquant.split_dequantize(row, offs, str(shared_spec(spec.rowwise)), x.shape[-1], x.dtype)
    elif spec.from_rowwise:
        x = _one_side(x, offs, spec.rowwise, "rowwise", scales, random)[0].to(x.dtype)
    return _one_side(x, offs, spec.columnwise, direction, scales, random), shared_spec(spec.columnwise)


def _one_side(
    x: Tensor, offs: Tensor | None, spec: QuantSpec, direction: str, scales: Tensor | None, random: Tensor | None
) -> list[Tensor]:
    if spec.is_identity:
        x = x.to(getattr(torch, spec.dtype)) if spec.dtype else x
        return [x.mT if direction == "columnwise" else x]
    state = random_state(spec, random) if spec.stochastic and random is not None else None
    if spec.is_delayed:
        assert scales is not None, spec
        state = scales.narrow(0, spec.slot, x.shape[0] if offs is None else offs.shape[0])
    given = [] if state is None else [state]
    return torch.ops.fxquant.split_quantize(x, offs, str(shared_spec(spec)), direction, *given)  # type: ignore[no-any-return]


__all__ = ["IMPLEMENTATIONS", "quantize_groups"]
