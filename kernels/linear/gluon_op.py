"""The operators that launch `fxquant.kernels.linear.gluon` and `gluon_blocks`.

Inductor emits the source of Triton kernels that a graph launches anew, which it cannot do with Gluon's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxquant.compat.values import upper_bound
from fxquant.formats import QuantSpec
from fxquant.kernels.linear.weight_only import Direct
from fxquant.kernels.operator import Parts, operator


@operator(namespace="fxquant_kernels", key="CUDA")
def weight_only_mm(
    x: Tensor, w: Parts, w_spec: str, bias: Tensor | None, out_dtype: torch.dtype, most_rows: int,
    epilogue: str | None, other: Tensor | None, early: bool,
) -> Tensor:  # fmt: skip
    """`triton_weight_only.scaled_mm` of up to `most_rows` rows, where `Direct.of` has tiles."""
    from fxquant.kernels.linear import gluon  # which not every Triton can import

    spec = QuantSpec.parse(w_spec)
    size_n, row_bytes = w[0].shape
    tiles = Direct.of(most_rows, size_n, row_bytes, spec)
    assert tiles is not None
    return gluon.scaled_mm(x, w, spec, bias, out_dtype, tiles, epilogue, other, early)


@weight_only_mm.fake
def _fake(
    x: Tensor, w: Parts, w_spec: str, bias: Tensor | None, out_dtype: torch.dtype, most_rows: int,
    epilogue: str | None, other: Tensor | None, early: bool,
) -> Tensor:  # fmt: skip
    return x.new_empty((x.shape[0], w[0].shape[0]), dtype=out_dtype)


def scaled_mm(
    x: Tensor, w: Parts, w_spec: str, bias: Tensor | None, out_dtype: torch.dtype, epilogue: str | None = None,
    other: Tensor | None = None, early: bool = False,
) -> Tensor:  # fmt: skip
    """`triton_weight_only.scaled_mm` as an operator."""
    return weight_only_mm(x, w, w_spec, bias, out_dtype, upper_bound(x.shape[0]), epilogue, other, early)


@operator(namespace="fxquant_kernels", key="CUDA")
def block_mm(a: Parts, b: Parts, tiled: bool, out_dtype: torch.dtype) -> Tensor:
    """a [M, K] x b [N, K]^T of e4m3 elements, scales [M, K / 128] and [N, K / 128] or, `tiled`, [N / 128, K / 128]."""
    from fxquant.kernels.linear import gluon_blocks

    return gluon_blocks.scaled_mm(a, b, tiled, out_dtype)


@block_mm.fake
def _block_mm_fake(a: Parts, b: Parts, tiled: bool, out_dtype: torch.dtype) -> Tensor:
    return a[0].new_empty((a[0].shape[0], b[0].shape[0]), dtype=out_dtype)
