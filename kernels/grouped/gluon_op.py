"""The operator that launches `fxquant.kernels.linear.gluon_blocks` for groups.

Inductor emits the source of Triton kernels that a graph launches anew, which it cannot do with Gluon's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxquant.kernels.linear.block_tiles import Config
from fxquant.kernels.operator import Parts, operator


@operator(namespace="fxquant_kernels", key="CUDA")
def grouped_block_mm(a: Parts, b: Parts, offs: Tensor, out_dtype: torch.dtype) -> Tensor:
    """A product of groups of e4m3 elements with scales of 128: `a` [M, K] x `b` [G, N, K]^T by rows that end at `offs`.

    Or `a` [N, M] x `b` [K, M]^T by columns, which end there at multiples of 128: [G, N, K]. Scales are those of 1x128,
    and of 128x128 of a `b` [G, N, K].
    """
    from fxquant.kernels.grouped import triton_gemm
    from fxquant.kernels.grouped.triton_cast import clear
    from fxquant.kernels.linear import gluon_blocks

    ends, device = offs.to(torch.int32).contiguous(), a[0].device
    with torch.cuda.device(device):
        if b[0].ndim == 2:
            out = torch.empty((len(ends), a[0].shape[0], b[0].shape[0]), dtype=out_dtype, device=device)
            if out.numel():
                config = Config.of_groups(a[0].shape[0], tiled=False)
                gluon_blocks.columns_of_groups(gluon_blocks.left(a), gluon_blocks.left(b), ends, out, config)
            return out
        out = torch.empty((a[0].shape[0], b[0].shape[1]), dtype=out_dtype, device=device)
        if not (out.numel() and a[0].shape[1]):
            return out.zero_()
        config = Config.of_groups(len(out) // len(ends), tiled=True)
        tiles = triton_gemm.tiles_of(ends, len(out), config.rows)
        weights = gluon_blocks.aligned(b[0]), b[1].contiguous()
        gluon_blocks.rows_of_groups(gluon_blocks.left(a), weights, tiles, out, config)
        return clear(out, ends)


@grouped_block_mm.fake
def _fake(a: Parts, b: Parts, offs: Tensor, out_dtype: torch.dtype) -> Tensor:
    shape = (offs.shape[0], a[0].shape[0], b[0].shape[0]) if b[0].ndim == 2 else (a[0].shape[0], b[0].shape[1])
    return a[0].new_empty(shape, dtype=out_dtype)
