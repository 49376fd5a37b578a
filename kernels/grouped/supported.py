"""The quantizations of groups that Triton kernels take."""

from __future__ import annotations

from torch import Tensor, float64

from fxquant.formats import QuantSpec
from fxquant.kernels.cast import supported


def supports(spec: QuantSpec, *, ragged: bool) -> bool:
    """Returns True if the kernels know a format with its options, for `ragged` groups or a batch of matrices."""
    if not supported.supports(spec) or (ragged and spec.row.block[0] > 1):
        return False
    return spec.row.family != "mxfp8" or spec.row.block[0] == 1


def takes(x: Tensor, offs: Tensor | None, row: QuantSpec | None, column: QuantSpec | None) -> bool:
    """Returns True if the kernels quantize x, in one direction or both."""
    known = all(supports(spec, ragged=offs is not None) for spec in (row, column) if spec is not None)
    return known and x.dtype != float64 and x.ndim == (2 if offs is not None else 3)
