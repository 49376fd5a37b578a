"""The operator that launches `fxquant.kernels.attention.gluon`.

Inductor emits the source of Triton kernels that a graph launches anew, which it cannot do with Gluon's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxquant.compat.private import fake_kernel, operator_library
from fxquant.kernels.attention.choice import Scaling

_library = operator_library("fxquant_kernels", more=True)
_library.define(
    "attention_fprop(Tensor q, Tensor k, Tensor v, Tensor q_scale_inv, Tensor k_scale_inv, Tensor v_scale_inv,"
    " bool causal, float scale, str scaling, ScalarType dtype, bool record) -> (Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)


def forward(
    q: Tensor, k: Tensor, v: Tensor, q_scale_inv: Tensor, k_scale_inv: Tensor, v_scale_inv: Tensor, *, causal: bool,
    scale: float, out_dtype: torch.dtype, scaling: Scaling = "head", record: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`triton_forward.forward` of e4m3 operands without mask and dropout, where `choice.forward` says so.

    To `record`, the largest weight of each row of the softmax comes third, [B, H, Sq] in float32. Raises ValueError for
    a scale that is not positive.
    """
    if not scale > 0:
        raise ValueError(f"attention in FP8 needs a positive softmax scale, not {scale}")
    parts = (q, k, v, q_scale_inv, k_scale_inv, v_scale_inv)
    return torch.ops.fxquant_kernels.attention_fprop(  # type: ignore[no-any-return]
        *parts, causal, scale, scaling, out_dtype, record
    )


def _launch(
    q: Tensor, k: Tensor, v: Tensor, q_scale_inv: Tensor, k_scale_inv: Tensor, v_scale_inv: Tensor, causal: bool,
    scale: float, scaling: Scaling, dtype: torch.dtype, record: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from fxquant.kernels.attention import gluon as gluon_attention  # which not every Triton can import

    parts = [x.contiguous() for x in (q, k, v, q_scale_inv, k_scale_inv, v_scale_inv)]
    with torch.cuda.device(q.device):
        return gluon_attention.forward(
            *parts, causal=causal, scale=scale, scaling=scaling, out_dtype=dtype, record=record
        )


_library.impl("attention_fprop", _launch, "CUDA")


@fake_kernel(_library, "attention_fprop")
def _fake(
    q: Tensor, k: Tensor, v: Tensor, q_scale_inv: Tensor, k_scale_inv: Tensor, v_scale_inv: Tensor, causal: bool,
    scale: float, scaling: str, dtype: torch.dtype, record: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    return q.new_empty(q.shape, dtype=dtype), lse, torch.empty_like(lse) if record else lse.new_empty(0)
