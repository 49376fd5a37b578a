"""The statistics of operands in groups of rows, as experts have them; rows of no group do not count.

Layouts are those of `fxquant.kernels.grouped.reference`. All groups of an operand are one row of a log.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxquant.formats import QuantSpec
from fxquant.kernels.cast import reference as cast
from fxquant.kernels.grouped import reference as grouped
from fxquant.kernels.probe.reference import Compared, elements, factors, measured, padded


def statistics(
    x: Tensor, offs: Tensor | None, parts: Sequence[Tensor], spec: QuantSpec, direction: str, groups: Sequence[str]
) -> Tensor:
    """The vector [COLUMNS] of an operand x of groups, [M, C] with `offs` or [G, R, C], in one direction."""
    original, valid = _laid_out(x.float(), offs, spec, direction)
    if spec.is_identity:
        q = _kept(parts[0].float(), valid)
        return measured(Compared(original, original, q, None, None, valid, exact=True), None, groups)
    values, shown = grouped.expanded(parts, offs, spec, direction)
    row = shown.row
    assert row.element is not None
    q, code = cast.dequantize(values, shown), elements(values[0], row.element)
    seen = cast.hadamard(padded(original, q), random_signs=spec.random_signs) if spec.rht else original
    q, code = (_kept(t.narrow(-1, 0, seen.shape[-1]), valid) for t in (q, code))
    scales = factors(values if len(parts) > 2 else parts, shown, row)
    if valid is not None and scales is not None and row.block[1]:
        scales = _of_groups(scales, valid)
    return measured(Compared(original, seen, q, code, row, valid), scales, groups)


def _laid_out(x: Tensor, offs: Tensor | None, spec: QuantSpec, direction: str) -> tuple[Tensor, Tensor | None]:
    """x in the layout of its quantized form, zero in the place of what is in no group, and where something is."""
    if offs is None:
        return (x.mT if direction == "columnwise" else x), None
    inside = grouped.in_groups(offs, x.shape[0])
    x = torch.where(inside, x, 0.0)
    if direction == "rowwise":
        return x, inside
    if spec.is_identity:
        return x.mT, inside.mT
    alignment = spec.row.alignment
    buffer = grouped.pad_groups(torch.cat((x, inside.float()), 1), offs, alignment)
    return buffer[:, :-1].mT, buffer[:, -1:].mT > 0


def _kept(x: Tensor, valid: Tensor | None) -> Tensor:
    return x if valid is None else torch.where(valid, x.float(), 0.0)


def _of_groups(scales: Tensor, valid: Tensor) -> Tensor:
    """The scales of blocks [rows, blocks] in which something is in a group; 0 for others."""
    if valid.shape[0] > 1:
        return scales if scales.shape[0] != valid.shape[0] else torch.where(valid, scales, 0.0)
    wide = valid.shape[1] // scales.shape[-1]
    return torch.where(cast.in_blocks(valid, wide).any(-1), scales, 0.0)
