"""The limits of the Triton kernels for few rows, and their tiles: what they take, for those who ask without Triton."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxquant.compat.values import upper_bound
from fxquant.formats import QuantSpec

MOST_TOKENS = 64
"""Rows of x up to which reading the weight takes longer than anything else."""
EPILOGUES = ("add", "silu_mul", "gelu", "gelu_tanh")
"""The operations that a GEMM may apply to its result; the first two read a tensor of the same shape."""
LONGEST_ROW = 32768
"""Elements of a row of the weight that a program of the matrix-vector product holds in registers."""
MULTIPROCESSORS = 132
"""Multiprocessors of an H100: no fewer programs than that should read the weight."""
_MOST_ROWS_CAST_INSIDE, _LONGEST_ROW_CAST_INSIDE = 16, 4096
"""Rows of x, and elements of a row, that each program of a GEMM quantizes itself where they have one scale."""


class Tiles(NamedTuple):
    """The tile of a program of the GEMM: m tokens by n rows of the weight, k of both at a time."""

    m: int
    n: int
    k: int
    stages: int
    warps: int

    @classmethod
    def of(cls, rows: int, *, casts: bool) -> Tiles:
        """The fastest for weights of 4096 x 14336 and 8192 x 28672 (docs/measurements/decode.md).

        `casts` says that the GEMM quantizes its tokens. At least two programs share a multiprocessor: stages are what
        its memory has room for.
        """
        m = max(16, 1 << (rows - 1).bit_length())
        return cls(m, 64, 256, 3 if m == 64 or casts else 4, 4)

    def steps(self, size_n: int, size_k: int) -> tuple[int, int]:
        """The number of parts that K is split into, so that no multiprocessor idles, and the steps of k of a part."""
        return parts_of_k(-(-size_k // self.k), MULTIPROCESSORS // -(-size_n // self.n))


def parts_of_k(steps: int, most: int) -> tuple[int, int]:
    """Divides the steps of K into at most so many parts, each of four steps at least.

    Returns the number of parts and the steps of a part, of which the last may have fewer.
    """
    of_a_part = -(-steps // max(1, min(most, steps // 4)))
    return -(-steps // of_a_part), of_a_part


def supports(a_spec: QuantSpec, b_spec: QuantSpec) -> bool:
    """Returns True if the GEMM takes these formats, x of up to 64 rows.

    They are e4m3 with scales per tensor, per row, or 1x128 x 128x128.
    """
    blocks = {a_spec.row.block, b_spec.row.block} if "block" in (a_spec.row.family, b_spec.row.family) else None
    return _is_e4m3(b_spec) and casts(a_spec) and blocks in (None, {(1, 128), (128, 128)})


def casts(spec: QuantSpec) -> bool:
    """Returns True if x may have this format: e4m3, a scale per tensor, per row, or per 1x128 block."""
    return _is_e4m3(spec) and (spec.row.family != "block" or spec.row.block == (1, 128)) and not spec.nonfinite


def _is_e4m3(spec: QuantSpec) -> bool:
    element = spec.row.element
    families = ("per_tensor", "per_row", "block")
    return spec.row.family in families and element is not None and element.dtype == torch.float8_e4m3fn


def quantizes(x: Tensor) -> bool:
    """Returns True if the cast takes x [M, K], for a GEMM that is supported: more than one row, or a long one."""
    return x.ndim == 2 and x.dtype != torch.float64 and not is_one_row(x.shape[0], x.shape[1])


def quantizes_itself(x: Tensor, spec: QuantSpec, *, scaled: bool, gemms: int = 1, early: bool = False) -> bool:
    """Returns True if the GEMM takes x not yet quantized: one row, not too long; or some, which have one scale.

    `scaled` says that its multiplier is there already. Without one, some rows that are read by several `gemms` are
    better quantized once, as where kernels are launched `early` in any case.
    """
    if x.ndim != 2 or x.dtype == torch.float64:
        return False
    rows, length = x.shape
    if _is_one(rows):
        return length <= LONGEST_ROW
    alone = scaled or (gemms == 1 and spec.row.family == "per_tensor")
    return alone and not early and upper_bound(rows) <= _MOST_ROWS_CAST_INSIDE and length <= _LONGEST_ROW_CAST_INSIDE


def in_one_kernel(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    """Returns True if the GEMM adds no partial sums, so that it takes an epilogue."""
    rows, (size_n, size_k) = a[0].shape[0], b[0].shape
    tiles = Tiles.of(upper_bound(rows), casts=a[0].dtype != b[0].dtype)
    return is_one_row(rows, size_k) or tiles.steps(size_n, size_k)[0] == 1


def quantizes_rows(shape: Sequence[Any], dtype: torch.dtype, spec: QuantSpec) -> bool:
    """Returns True if the cast takes any number of rows that fit into a program each and have a scale each."""
    element = spec.row.element if spec.row.family == "per_row" else None
    if element is None or element.dtype != torch.float8_e4m3fn or len(shape) != 2 or dtype == torch.float64:
        return False
    if spec.nonfinite:
        return False
    rows, length = shape
    sizes = isinstance(rows, int) and isinstance(length, int)
    return sizes and 0 < length <= LONGEST_ROW and 0 < rows * length < 2**31


def is_one_row(rows: Any, length: Any) -> bool:
    """Returns True if x [rows, length] is the vector of a matrix-vector product."""
    return _is_one(rows) and length <= LONGEST_ROW


def _is_one(rows: Any) -> bool:
    return isinstance(rows, int) and rows == 1
