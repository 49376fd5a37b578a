"""A GEMM of quantized operands as its sizes, formats and epilogue, and how long it takes by each kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from fxquant.compat.values import statically_known_true
from fxquant.formats import QuantSpec
from fxquant.kernels.linear.choice import GemmKernel
from fxquant.kernels.operator import Chosen


@dataclass(frozen=True)
class Problem:
    """A GEMM a [M, K] x b [N, K]^T of specs a and b, and its epilogue."""

    m: int
    k: int
    n: int
    a: str
    b: str
    dtype: torch.dtype
    fast_accum: bool
    bias: bool = False
    activation: str = ""
    residual: bool = False
    record: bool = False

    def __str__(self) -> str:
        return " ".join(map(str, astuple(self)))

    @property
    def size(self) -> str:
        """The sizes as text."""
        return f"{self.m} x {self.k} x {self.n}"

    @property
    def epilogue(self) -> str:
        """The operations behind the product, as text."""
        parts = ("+ bias" * self.bias, self.activation, "+ residual" * self.residual, "amax" * self.record)
        return ", ".join(filter(None, parts))

    @property
    def fuses(self) -> bool:
        """Returns True if anything comes behind it that cuBLAS leaves to another kernel."""
        return bool(self.activation) or self.residual or self.record

    def left_to_others(self, chosen: Chosen[GemmKernel]) -> str:
        """Returns why another kernel does the epilogue, by the kernel that was chosen for the product."""
        why = f" ({chosen.reason})" if chosen.reason else ""
        return f"its kernel, {chosen.kernel}{why}, leaves {self.epilogue} to others"

    @property
    def kernels(self) -> tuple[GemmKernel, ...]:
        """The possible kernels, the default first."""
        by_row = any(QuantSpec.parse(spec).row.family == "per_row" for spec in (self.a, self.b))
        if by_row:
            return GemmKernel.PER_ROW, GemmKernel.TRITON
        rows = (GemmKernel.PER_ROW,) if self.dtype == torch.bfloat16 else ()
        return GemmKernel.PER_TENSOR, *rows, GemmKernel.TRITON


@dataclass(frozen=True)
class Times:
    """Microseconds: of each of a problem's kernels, Triton's with the epilogue, and of a copy of the result."""

    kernels: tuple[float, ...]
    copy: float

    def saved(self, problem: Problem) -> float:
        """Microseconds that an epilogue saves of the kernels that follow.

        A sum that Inductor would fuse with what reads it saves one read and one write of the result, an amax one read.
        An activation is computed by what reads it, at no cost.
        """
        return self.copy * (problem.residual + problem.record / 2)

    def chosen(self, problem: Problem, how: str, margin: float = 1.0) -> Chosen[GemmKernel]:
        """The fastest kernel, and how it compares, by times got somehow; a later one has to win by the margin."""
        saved = self.saved(problem)
        totals = [
            us + saved * (k is not GemmKernel.TRITON) for k, us in zip(problem.kernels, self.kernels, strict=True)
        ]
        kernel, fastest = problem.kernels[0], totals[0]
        for other, total in zip(problem.kernels[1:], totals[1:], strict=True):
            if total * margin < fastest:
                kernel, fastest = other, total
        others = zip(problem.kernels[1:], totals[1:], strict=True)
        names = ((str(other).removeprefix("cuBLAS _scaled_mm, "), us) for other, us in others)
        return Chosen(kernel, f"{how}: " + ", ".join(f"{name} {totals[0] / us:.2f}x as fast" for name, us in names))


def triton_multiplies(
    a: Sequence[Tensor], a_spec: QuantSpec, b: Sequence[Tensor], b_spec: QuantSpec, out_dtype: torch.dtype
) -> bool:
    """Returns True if the Triton GEMM takes these operands: matrices, not empty, with scales per tensor or per row.

    Rows of the result, as all that goes by TMA, are multiples of 16 bytes.
    """
    if any(spec.row.family not in ("per_tensor", "per_row") for spec in (a_spec, b_spec)):
        return False
    if a[0].ndim != 2 or b[0].ndim != 2 or out_dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return False
    (rows, length), columns = a[0].shape, b[0].shape[0]
    some = all(statically_known_true(size > 0) for size in (rows, length, columns))
    return some and all(
        statically_known_true(size * item % 16 == 0) for size, item in ((length, 1), (columns, out_dtype.itemsize))
    )
