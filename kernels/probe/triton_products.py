# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,misc"
"""`reference.products` as two Triton kernels around a GEMM: rows are picked, multiplied, and both products compared.

The rows are picked in float64, in slices of the contracted axis that a batched GEMM multiplies side by side.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fxquant.kernels.probe.reference import COLUMNS, NEUTRAL, SAMPLE
from fxquant.kernels.probe.triton_tiles import Form, original, plain_basis, quantized

_SAMPLE = tl.constexpr(SAMPLE)
_SLICE = 512
"""The columns that one GEMM of a batch contracts."""
_ROWS, _COLUMNS = 16, 128
"""The sizes of the tile of a program that picks."""
_CHUNK = tl.constexpr(16)
_AT_INNER, _AT_PRODUCT, _AT_EXACT, _AT_PRODUCTS, _AT_ERROR = (
    tl.constexpr(COLUMNS.index(name)) for name in ("inner", "product", "exact", "products", "product_error")
)
_AT_LEAST, _AT_WORST = (tl.constexpr(COLUMNS.index(name)) for name in ("minus_scale_min", "worst"))
assert all(
    number == (float("-inf") if name == "minus_scale_min" else -1 if name == "worst" else 0)
    for name, number in zip(COLUMNS, NEUTRAL, strict=True)
)


@triton.jit
def pick_kernel(
    x, data, scale, extra, out, seen, batches, rows, columns, width, apart, x_rows, x_apart, slices, x_batch, x_row,
    x_column, d_batch, d_row, d_column, s_batch, s_row, g_batch, g_row, unit, KIND: tl.constexpr, R: tl.constexpr,
    P: tl.constexpr, W: tl.constexpr, HIGH: tl.constexpr, RHT: tl.constexpr, SIGNS: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """Stores every n-th row of x, and of its quantized form `seen` elements behind: [batches, slices, rows, SLICE].

    n is `x_apart` for x, whose rows may have been picked before, and `apart` for the quantized form.
    """
    batch = tl.program_id(2).to(tl.int64)
    picked = tl.program_id(0) * R + tl.arange(0, R)
    row = picked.to(tl.int64) * apart
    column = tl.program_id(1) * (P * W)
    x_row_at = picked.to(tl.int64) * x_apart
    t = original(x, batch, x_row_at, column, x_rows, columns, x_batch, x_row, x_column, P, W, False)
    q, _ = quantized(
        data, scale, extra, batch, row, column, rows, width, d_batch, d_row, d_column, s_batch, s_row, g_batch, g_row,
        unit, KIND, P, W, HIGH, False,
    )  # fmt: skip
    if RHT:
        q = plain_basis(q, SIGNS)
    at = column + (tl.arange(0, P) * W)[:, None] + tl.arange(0, W)[None, :]
    q = tl.where((row < rows)[:, None, None] & (at < columns)[None, :, :], q, 0.0)
    which = at // SLICE
    place = (
        (batch * slices + which)[None, :, :] * (_SAMPLE * SLICE) + (picked * SLICE)[:, None, None] + (at % SLICE)[None]
    )
    tl.store(out + place, t.to(tl.float64), mask=(which < slices)[None, :, :])
    tl.store(out + seen + place, q.to(tl.float64), mask=(which < slices)[None, :, :])


@triton.jit
def compare_kernel(products, out, batches, WGRAD: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Stores the vector of two products [2, batches, SAMPLE, SAMPLE]: the exact one, and that of quantized operands."""
    column = tl.arange(0, _SAMPLE)
    signal, noise = tl.zeros((_SAMPLE,), tl.float64), tl.zeros((_SAMPLE,), tl.float64)
    inner, product, ratios = signal, signal, tl.zeros((_CHUNK,), tl.float64)
    counted = tl.zeros((_CHUNK,), tl.int32)
    for first in range(0, _SAMPLE, _CHUNK):
        of_signal, of_noise = tl.zeros((_CHUNK,), tl.float64), tl.zeros((_CHUNK,), tl.float64)
        for batch in range(batches):
            at = (tl.arange(0, _CHUNK) + first + batch * _SAMPLE)[:, None] * _SAMPLE + column[None, :]
            y = tl.load(products + at)
            z = tl.load(products + batches * (_SAMPLE * _SAMPLE) + at)
            inner += tl.sum(y * z, axis=0)
            product += tl.sum(z * z, axis=0)
            square, lost = y * y, (y - z) * (y - z)
            signal += tl.sum(square, axis=0)
            noise += tl.sum(lost, axis=0)
            of_signal += tl.sum(square, axis=1)
            of_noise += tl.sum(lost, axis=1)
        ratios += tl.where(of_signal > 0, of_noise / tl.where(of_signal > 0, of_signal, 1.0), 0.0)
        counted += (of_signal > 0).to(tl.int32)
    of_columns = tl.sum(tl.where(signal > 0, noise / tl.where(signal > 0, signal, 1.0), 0.0), axis=0)
    error = of_columns / tl.maximum(tl.sum((signal > 0).to(tl.int32), axis=0), 1).to(tl.float64)
    if WGRAD:
        of_rows = tl.sum(ratios, axis=0) / tl.maximum(tl.sum(counted, axis=0), 1).to(tl.float64)
        error = tl.where((of_rows > error) | (of_rows != of_rows), of_rows, error)
    at = tl.arange(0, PADDED)
    vector = tl.zeros((PADDED,), tl.float64)
    vector = tl.where(at == _AT_INNER, tl.sum(inner, axis=0), vector)
    vector = tl.where(at == _AT_PRODUCT, tl.sum(product, axis=0), vector)
    vector = tl.where(at == _AT_EXACT, tl.sum(signal, axis=0), vector)
    vector = tl.where(at == _AT_PRODUCTS, 1.0, vector)
    vector = tl.where(at == _AT_ERROR, error, vector)
    vector = tl.where(at == _AT_LEAST, float("-inf"), vector)
    vector = tl.where(at == _AT_WORST, -1.0, vector)
    tl.store(out + at, vector, mask=at < WIDTH)


def products(
    operands: Sequence[Tensor], forms: Sequence[Form], transforms: Sequence[bool | None], *, wgrad: bool
) -> Tensor:  # fmt: skip
    """The vector [COLUMNS] of a product of two operands [B, *, C] and of their quantized forms."""
    (left, right), batches = operands, operands[0].shape[0]
    slices = max(1, triton.cdiv(left.shape[2], _SLICE))
    picked = [
        _pick(x, form, transform, slices) for x, form, transform in zip((left, right), forms, transforms, strict=True)
    ]
    a, b = (t.flatten(0, 2) for t in picked)
    both = torch.bmm(a, b.mT).view(2, batches, slices, SAMPLE, SAMPLE).sum(2)
    out = torch.empty(len(COLUMNS), dtype=torch.float64, device=left.device)
    compare_kernel[(1,)](both, out, batches, wgrad, len(COLUMNS), triton.next_power_of_2(len(COLUMNS)), num_warps=8)
    return out


def _pick(x: Tensor, form: Form, transform: bool | None, slices: int) -> Tensor:
    """Every n-th row of x [B, R, C] and of its quantized form: float64 [2, B, slices, SAMPLE, columns]."""
    batches, x_rows, columns = x.shape
    rows = form.data.shape[1]
    out = torch.empty((2, batches, slices, SAMPLE, _SLICE), dtype=torch.float64, device=x.device)
    grid = (SAMPLE // _ROWS, slices * _SLICE // _COLUMNS, batches)
    pick_kernel[grid](
        x, form.data, form.scale, form.extra, out, out.stride(0), batches, rows, columns, form.width,
        triton.cdiv(rows, SAMPLE), x_rows, triton.cdiv(x_rows, SAMPLE), slices, *x.stride(), *form.strides, form.unit,
        form.kind, _ROWS, _COLUMNS // form.wide, form.wide, form.high, transform is not None, bool(transform), _SLICE,
        num_warps=4,
    )  # fmt: skip
    return out
