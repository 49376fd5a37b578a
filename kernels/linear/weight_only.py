"""The limits of the Triton kernels for a weight that alone is quantized, and their tiles: what they take.

Up to 128 rows of bfloat16 or float16 by a weight in FP8 or NVFP4, which is dequantized as it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fxquant.compat.values import upper_bound
from fxquant.formats import QuantSpec
from fxquant.kernels.linear.few_rows import MULTIPROCESSORS, is_one_row, parts_of_k

FEW_ROWS = 32
"""Rows of x up to which the products of a warp fit its registers beside the weight."""
MOST_ROWS = 128
"""Rows of x up to which each program decodes the weight that it reads, faster than a kernel before a GEMM would."""
DTYPES = (torch.bfloat16, torch.float16)
"""The dtypes of x, in which the weight's elements times their block scales are exact."""
_FEW_PROGRAMS = 2 * MULTIPROCESSORS
"""Programs that run at the same time in any case: two share a multiprocessor."""

VECTOR_BYTES = 8192
"""Bytes of a row of an FP8 weight up to which one row of x is multiplied as fast without tensor cores."""
_LEAST_COLUMNS, _LEAST_BYTES = 1024, 1024
"""Rows of the weight, and bytes of a row, from which on `Direct` is for it."""


class _Tile(NamedTuple):
    """The tile of a program: m rows of x by n rows of the weight, k along the contracted axis at a time."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


class Tiles(_Tile):
    """Each warp reads k bytes of a row at a time. Warps share the contracted axis: none needs what another decoded."""

    @classmethod
    def of(cls, rows: int, size_n: int, spec: QuantSpec) -> Tiles:
        """The fastest for weights of 4096 x 14336, 8192 x 28672 and 14336 x 4096 (docs/measurements/decode.md)."""
        m = max(8, 1 << (rows - 1).bit_length())
        n, k = (32, 128) if m <= 16 else (64, 64)
        return cls(m, n, k // 2 if is_packed(spec) else k, 4, 3)

    def steps(self, size_n: int, row_bytes: int) -> tuple[int, int]:
        """The number of parts that K is split into, so that no multiprocessor idles, and the steps of a part."""
        return parts_of_k(-(-row_bytes // (self.k * self.warps)), _FEW_PROGRAMS // -(-size_n // self.n))


class Wide(_Tile):
    """Warps multiply more rows together: they take the decoded weight from registers, and x from shared memory."""

    @classmethod
    def of(cls, rows: int) -> Wide:
        """The fastest for weights of 4096 x 4096, 4096 x 14336 and 14336 x 4096 (docs/measurements/decode.md)."""
        return cls(64, 128, 128, 8, 4) if rows <= 64 else cls(128, 64, 128, 4, 3)

    def steps(self, size_n: int, size_k: int) -> tuple[int, int]:
        """The number of parts that K is split into, so that no multiprocessor idles, and the steps of a part."""
        programs = MULTIPROCESSORS * 128 // self.n  # two share a multiprocessor if their tiles are small
        return parts_of_k(-(-size_k // self.k), programs // -(-size_n // self.n))


class Direct(NamedTuple):
    """The share of a program whose lanes multiply the weight as it is stored (`fxquant.kernels.linear.gluon`).

    `groups` of 8 rows of x by at most `tiles` of 16 rows of the weight, whose `warps` share K in pieces of 64 bytes;
    what they read is asked for `depth` - 1 steps ahead.
    """

    groups: int
    tiles: int
    warps: int
    depth: int

    @property
    def step(self) -> int:
        """The bytes of a row of the weight that its length must be a multiple of."""
        return 64 * self.warps

    def programs(self, size_n: int) -> int:
        """The number of programs: as many on each multiprocessor, since the next kernel's come in where one is free."""
        return MULTIPROCESSORS * -(-size_n // (16 * self.tiles * MULTIPROCESSORS))

    @classmethod
    def of(cls, rows: int, size_n: int, row_bytes: int, spec: QuantSpec) -> Direct | None:
        """The tiles where they are faster than `Tiles`, by the times in docs/measurements/decode.md; None elsewhere."""
        if rows > 16 or size_n % 16 or size_n < _LEAST_COLUMNS or row_bytes < _LEAST_BYTES:
            return None
        packed, groups = is_packed(spec), 1 if rows <= 8 else 2
        # half the warps for half the tiles, in twice as many programs, where K has no whole pieces for more
        warps, depth, most = (8, 5, 7 if packed else 4) if row_bytes % 512 == 0 else (4, 10, 4 if packed else 2)
        needed = -(-size_n // (16 * MULTIPROCESSORS))
        tiles = -(-needed // -(-needed // most))
        if tiles == 2 and not packed and row_bytes % 1024 == 0:
            warps, depth = 16, 3
        share = cls(groups, tiles, warps, depth)
        return None if row_bytes % share.step else share


def is_packed(spec: QuantSpec) -> bool:
    """Returns True if a byte holds two elements."""
    return spec.row.element is not None and spec.row.element.packed == 2


def supports(spec: QuantSpec) -> bool:
    """Returns True if the weight may have this format: e4m3 with scales per tensor or per row, or NVFP4."""
    element = spec.row.element
    if spec.row.family == "nvfp4":
        return not spec.rht
    return spec.row.family in ("per_tensor", "per_row") and element is not None and element.name == "e4m3"


def in_one_kernel(a: Sequence[Tensor], b: Sequence[Tensor], spec: QuantSpec) -> bool:
    """Returns True if the GEMM adds no partial sums, so that it takes an epilogue."""
    rows, (size_n, row_bytes) = a[0].shape[0], b[0].shape
    if is_vector(rows, row_bytes, spec):
        return True
    return Tiles.of(upper_bound(rows), size_n, spec).steps(size_n, row_bytes)[0] == 1


def is_vector(rows: object, row_bytes: int, spec: QuantSpec) -> bool:
    """Returns True if the product is one of a matrix and a vector without tensor cores: by an FP8 weight."""
    return not is_packed(spec) and is_one_row(rows, row_bytes)
