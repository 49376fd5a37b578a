"""The operator that launches `fxquant.kernels.attention.gluon`.

Inductor emits the source of Triton kernels that a graph launches anew, which it cannot do with Gluon's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from fxquant.kernels.attention.choice import Scaling
from fxquant.kernels.attention.scores import Scores
from fxquant.kernels.operator import Parts, operator


def forward(
    operands: Sequence[Parts], scores: Scores, out_dtype: torch.dtype, scaling: Scaling = "head", record: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """`triton_forward.forward` of e4m3 operands without mask and dropout, where `choice.forward` says so.

    To `record`, the largest weight of each row of the softmax comes third, [B, H, Sq] in float32. Raises ValueError for
    a scale that is not positive.
    """
    if not scores.scale > 0:
        raise ValueError(f"attention in FP8 needs a positive softmax scale, not {scores.scale}")
    (q, q_scale), (k, k_scale), (v, v_scale) = operands
    return attention_fprop(q, k, v, q_scale, k_scale, v_scale, scores.causal, scores.scale, scaling, out_dtype, record)


@operator(namespace="fxquant_kernels", key="CUDA")
def attention_fprop(
    q: Tensor, k: Tensor, v: Tensor, q_scale_inv: Tensor, k_scale_inv: Tensor, v_scale_inv: Tensor, causal: bool,
    scale: float, scaling: str, dtype: torch.dtype, record: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`forward` as an operator."""
    from fxquant.kernels.attention import gluon  # which not every Triton can import

    parts = [x.contiguous() for x in (q, k, v, q_scale_inv, k_scale_inv, v_scale_inv)]
    with torch.cuda.device(q.device):
        return gluon.forward(
            parts, causal=causal, scale=scale, scaling=cast(Scaling, scaling), out_dtype=dtype, record=record
        )


@attention_fprop.fake
def _fake(
    q: Tensor, k: Tensor, v: Tensor, q_scale_inv: Tensor, k_scale_inv: Tensor, v_scale_inv: Tensor, causal: bool,
    scale: float, scaling: str, dtype: torch.dtype, record: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    return q.new_empty(q.shape, dtype=dtype), lse, torch.empty_like(lse) if record else lse.new_empty(0)
