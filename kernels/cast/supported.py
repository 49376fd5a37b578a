"""The formats that the Triton casts take."""

from __future__ import annotations

from fxquant.formats import QuantSpec


def supports(spec: QuantSpec) -> bool:
    """Returns True if the Triton casts know a format with its options."""
    row = spec.row
    if row.family not in ("per_tensor", "per_row", "block", "mxfp8") or spec.rht:
        return False
    return not spec.torchao or (row.family != "block" and not spec.eps)
