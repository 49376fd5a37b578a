"""Which kernel runs a GEMM or a cast: by formats, sizes and device alone, so that a report can say it without either.

The lowering asks the same functions, so what is said here is what runs.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import torch

from fxquant.compat.values import statically_known_true
from fxquant.formats import QuantSpec
from fxquant.kernels.cast import supported
from fxquant.kernels.grouped import supported as supported_groups
from fxquant.kernels.linear import few_rows

Dim = int | torch.SymInt | None
"""A size, or None for one that is not known."""


GEMM = ("auto", "cublas", "triton", "autotune")
"""How to decide between cuBLAS and Triton where both have a GEMM: by what is known, one of them, or by measuring."""


class GemmKernel(str, Enum):
    """The kernels that a GEMM of quantized operands can be."""

    PER_TENSOR = "cuBLAS _scaled_mm, per tensor"
    PER_ROW = "cuBLAS _scaled_mm, rowwise"
    TILES = "cuBLAS _scaled_mm, 1x128 by 128x128"
    BLOCKS = "cuBLAS _scaled_mm, 1x128 by 1x128"
    TRITON = "Triton GEMM"
    FEW_ROWS = "Triton, few rows"
    GROUPED = "_scaled_grouped_mm"
    GROUPED_FAST = "Triton, grouped FP8, fast accumulation"
    GROUPED_TRITON = "Triton, grouped FP8"
    GROUPED_BLOCKS = "Triton, grouped FP8, block scales"
    EMULATED = "bf16 GEMM of dequantized operands"
    REFERENCE = "float32 GEMM of dequantized operands"
    OWN = "the quantizer's own code"

    def __str__(self) -> str:
        return self.value


class Chosen(NamedTuple):
    """A kernel, and why it is none of FP8 where it is not."""

    kernel: GemmKernel
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.kernel} ({self.reason})" if self.reason else str(self.kernel)


class Fast(NamedTuple):
    """Of a [M, K]: the most that M may be, and K."""

    most_rows: int
    length: Dim


def gemm(
    a: QuantSpec, b: QuantSpec, rows: tuple[Dim, Dim], *, matrices: bool = True, capability: tuple[int, int],
    fast: Fast | None = None,
) -> Chosen:  # fmt: skip
    """The kernel on a CUDA device for a [M, K] x b [N, K]^T, whose `rows` are (M, N).

    Each is a matrix, or with `matrices` false a batch of them. `fast` is of a GEMM that may accumulate fast, by a
    kernel of our own.
    """
    if "custom" in (a.row.family, b.row.family):
        return Chosen(GemmKernel.OWN)
    if fast is not None and matrices and capability[0] == 9 and fast.most_rows <= few_rows.MOST_TOKENS:
        static = all(isinstance(size, int) and size > 0 for size in (fast.most_rows, rows[1], fast.length))
        if static and rows[0] != 0 and few_rows.supports(a, b):
            return Chosen(GemmKernel.FEW_ROWS)
    if a.row.family in ("per_tensor", "per_row") and matrices:
        by_row = "per_row" in (a.row.family, b.row.family)
        return Chosen(GemmKernel.PER_ROW if by_row else GemmKernel.PER_TENSOR)
    problem = _no_block_mm(a, b, rows, matrices, capability)
    if problem is None:
        return Chosen(GemmKernel.BLOCKS if b.row.block[0] == 1 else GemmKernel.TILES)
    exact = all(exact_in_bfloat16(spec) for spec in (a, b))
    return Chosen(GemmKernel.EMULATED if exact else GemmKernel.REFERENCE, problem)


def _no_block_mm(
    a: QuantSpec, b: QuantSpec, rows: tuple[Dim, Dim], matrices: bool, capability: tuple[int, int]
) -> str | None:
    """Why cuBLAS has no GEMM of these blocks.

    It has one for 1x128-scaled `a` and 1x128- or 128x128-scaled `b`: e4m3, whole 128x128 tiles of `b`, sizes in
    multiples of 16, and on Hopper alone.
    """
    if not matrices:
        return "a batch of matrices"
    if a.row.family != "block":
        return f"no FP8 GEMM for {a.row.family} scales" if a.row.family in ("mxfp8", "nvfp4") else "no FP8 GEMM"
    if a.row.block != (1, 128):
        return "the left operand is scaled in tiles"
    for spec in (a, b):
        if spec.row.element is None or spec.row.element.name != "e4m3":
            return "not e4m3 by e4m3"
    if capability[0] != 9:
        return "no block scales on this device"
    multiple = 16 if b.row.block[0] == 1 else 128
    for size, by in zip(rows, (16, multiple), strict=True):
        if size is None or not statically_known_true(size % by == 0):
            return f"{size} rows are no multiple of {by}" if isinstance(size, int) else "dynamic sizes"
    return None if rows[0] is not None and statically_known_true(rows[0] > 0) else "no rows"


def exact_in_bfloat16(spec: QuantSpec) -> bool:
    """Whether element x block scale fits bfloat16's 8 bits of significand: the GEMM then sees the exact values."""
    return spec.row.family in ("mxfp8", "nvfp4") or (spec.row.family == "block" and spec.pow2)


def grouped_gemm(
    a: QuantSpec, b: QuantSpec, *, wgrad: bool, dtype: torch.dtype, fast: bool, capability: tuple[int, int]
) -> Chosen:
    """The kernel on a CUDA device for a GEMM of groups of rows, whose result has `dtype`: the faster that was measured.

    `fast` says that sums may be kept in tensor cores throughout.
    """
    hopper = capability[0] == 9
    if a.row.family in ("per_tensor", "per_row"):
        both_e4m3 = all(spec.row.element is not None and spec.row.element.name == "e4m3" for spec in (a, b))
        if both_e4m3 and (dtype == torch.bfloat16 or not hopper):
            return Chosen(GemmKernel.GROUPED_FAST if hopper and fast and not wgrad else GemmKernel.GROUPED)
        return (
            Chosen(GemmKernel.GROUPED_TRITON) if hopper else Chosen(GemmKernel.EMULATED, "no FP8 GEMM of e5m2 groups")
        )
    one_by_128 = a.row.block[0] == 1 and (not wgrad or b.row.block[0] == 1)
    if a.row.family == "block" and one_by_128 and hopper:
        return Chosen(GemmKernel.GROUPED_BLOCKS)
    return Chosen(GemmKernel.EMULATED, f"no grouped FP8 GEMM for {a.row.family} scales")


def casts_one_row(spec: QuantSpec, capability: tuple[int, int]) -> bool:
    """Whether the GEMM of a single row, which is `GemmKernel.FEW_ROWS`, quantizes it as well."""
    return capability[0] == 9 and few_rows.casts(spec)


def casts_by_triton(
    specs: tuple[QuantSpec, ...], *, apart: bool, matrix: bool, dtype: torch.dtype, fp8: bool, grouped: bool = False,
    ragged: bool = False,
) -> bool:  # fmt: skip
    """Whether a Triton kernel quantizes a tensor, in one direction or both.

    Inductor fuses a rowwise cast into the producer of its tensor, unless the amax of the whole tensor or of a tile of
    several rows comes between, and stores transposed payloads a byte at a time: `apart` says that the cast is
    transposed, or after the amax of the tensor. `matrix` says that the tensor is one and not empty, `fp8` that the
    device makes FP8. Groups are matrices of a batch, or `ragged`.
    """
    known = all(supported.supports(spec) for spec in specs)
    if grouped:
        known = known and all(supported_groups.supports(spec, ragged=ragged) for spec in specs)
    in_tiles = any(spec.row.block[0] > 1 for spec in specs)
    return (apart or in_tiles) and known and matrix and dtype != torch.float64 and fp8
