"""The operators that launch `fxquant.kernels.attention.gluon` and `gluon_backward`.

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


@operator(namespace="fxquant_kernels", key="CUDA")
def attention_bprop(
    do: Tensor, do_fp8: Tensor, wide_q: Tensor, wide_k: Tensor, q: Tensor, k: Tensor, v: Tensor, q_scale_inv: Tensor,
    k_scale_inv: Tensor, v_scale_inv: Tensor, do_scale_inv: Tensor, o: Tensor, lse: Tensor, causal: bool, scale: float,
    scaling: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`triton_backward.backward_by_warps` as an operator, of quantized tensors and values; v is laid out as k is."""
    from fxquant.kernels.attention import gluon_backward  # which not every Triton can import

    tensors = (do, do_fp8, wide_q, wide_k, q, k, v, q_scale_inv, k_scale_inv, v_scale_inv, do_scale_inv, o, lse)
    dense = [x.contiguous() for x in tensors]
    with torch.cuda.device(do.device):
        return gluon_backward.backward(
            dense[:2], dense[2:4], dense[4:7], dense[7:11], *dense[11:], causal=causal, scale=scale,
            scaling=cast(Scaling, scaling),
        )  # fmt: skip


@attention_bprop.fake
def _bprop_fake(
    do: Tensor, do_fp8: object, wide_q: object, wide_k: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(do), torch.empty_like(wide_k), torch.empty_like(wide_k)
