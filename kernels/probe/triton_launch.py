"""The statistics on a GPU: quantized forms as the kernels of probes read them, and what no kernel takes.

A kernel is compiled for a format and an orientation, not for a size, and copies no operand of a built-in format.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxquant.formats import QuantSpec
from fxquant.kernels.probe import reference, triton_measure, triton_products
from fxquant.kernels.probe.triton_tiles import BLOCK, CODED, GIVEN, MX, NVFP4, PER_ROW, PER_TENSOR, Form

_WIDEST = 128
"""The rows and columns of the largest block that is a part of a tile."""
_KINDS = {"per_tensor": PER_TENSOR, "per_row": PER_ROW, "block": BLOCK, "mxfp8": MX, "nvfp4": NVFP4}


def statistics(x: Tensor, parts: Sequence[Tensor], spec: QuantSpec, groups: Sequence[str]) -> Tensor:
    """`reference.statistics` by kernels, but for blocks that they do not take."""
    parts, spec = reference.plain_scales(parts, spec)
    if spec.is_identity or (not spec.key and spec.row.family in _KINDS):
        row = spec.row
        form = _stored(parts, spec) if row.element else _given(parts[0])
        ends = (row.element.max, row.element.smallest_normal) if row.element else None
        scales = parts[1].numel() if row.element else 0
        return _measured(x, form, reference.block_of(row), groups, ends, scales, _transform(spec), row.element is None)
    seen = reference.compared(x.float(), parts, spec)
    return compared(seen, reference.factors(parts, spec, seen.row), groups)


def compared(seen: reference.Compared, scales: Tensor | None, groups: Sequence[str]) -> Tensor:
    """`reference.measured` by kernels, of an operand that is compared with values in memory."""
    block = reference.block_of(seen.row)
    taken = all(size <= _WIDEST and not size & (size - 1) for size in block)
    if not taken or seen.x is not seen.original or seen.valid is not None:
        return reference.measured(seen, scales, groups)
    code = None if seen.code is None else seen.code.float()
    form = _given(seen.q, code, None if scales is None else scales.contiguous(), block[1])
    ends, count = reference.ends(seen), 0 if scales is None else scales.numel()
    return _measured(seen.original, form, block, groups, ends, count, None, seen.exact)


def products(
    operands: Sequence[Tensor], quantized: Sequence[Sequence[Tensor]], specs: Sequence[QuantSpec], gemm: str
) -> Tensor:
    """`reference.products` by kernels."""
    forms, transforms = [], []
    for x, parts, spec in zip(operands, quantized, specs, strict=True):
        parts, spec = reference.plain_scales(parts, spec)
        stored = not spec.key and spec.row.family in _KINDS
        forms.append(_stored(parts, spec) if stored else _given(reference.dequantized(parts, spec, x)))
        transforms.append(_transform(spec) if stored else None)
    return triton_products.products([_matrices(x) for x in operands], forms, transforms, wgrad=gemm == "wgrad")


def _measured(
    x: Tensor, form: Form, block: tuple[int, int], groups: Sequence[str], ends: tuple[float, float] | None,
    scales: int, transform: bool | None, exact: bool,
) -> Tensor:  # fmt: skip
    codes = "codes" in groups and not exact
    return triton_measure.measure(
        _matrices(x), form, block, groups, ends if codes else None, scales if "scales" in groups else 0, transform,
        codes and ends is None,
    )  # fmt: skip


def _transform(spec: QuantSpec) -> bool | None:
    return spec.random_signs if spec.rht else None


def _stored(parts: Sequence[Tensor], spec: QuantSpec) -> Form:
    """The form of what was quantized to a built-in format, of which parts lie as they were stored."""
    row, data, scale = spec.row, _matrices(parts[0]), parts[1].contiguous()
    assert row.element is not None
    high, wide = reference.block_of(row)
    kind, s, g, extra, unit = _KINDS[row.family].value, (0, 0), (0, 0), scale, 1.0
    if row.family != "per_tensor":
        s = _strides(scale)
    if row.family == "nvfp4":
        extra, unit = parts[2].contiguous(), 1 / (spec.e4m3_max * row.element.max)
        g = _strides(extra) if spec.row_scaled else (0, 0)
    return Form(kind, data, scale, extra, _of(data), s, g, high if row.family == "block" else 1, wide, unit)


def _given(q: Tensor, code: Tensor | None = None, scales: Tensor | None = None, wide: int = 32) -> Form:
    """The form of values that lie in memory, with codes in the same order if there are any."""
    data = _matrices(q)
    if code is not None:
        data, code = data.contiguous(), _matrices(code).contiguous()
    kind = (GIVEN if code is None else CODED).value
    return Form(kind, data, data if scales is None else scales, data if code is None else code, _of(data), wide=wide)


def _of(data: Tensor) -> tuple[int, int, int]:
    batch, row, column = data.stride()
    return batch, row, column


def _strides(scale: Tensor) -> tuple[int, int]:
    """The elements from one matrix of scales to the next, and from one row."""
    return scale.shape[-2] * scale.shape[-1], scale.shape[-1]


def _matrices(x: Tensor) -> Tensor:
    """x as [batches, R, C], in a dtype that kernels read."""
    x = x.float() if x.dtype == torch.float64 else x
    return x.flatten(0, -3) if x.ndim > 2 else x.unsqueeze(0)
