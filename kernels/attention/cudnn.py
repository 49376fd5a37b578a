"""Attention in high precision by cuDNN, through torch."""

from __future__ import annotations

from typing import Any

import torch


def cudnn_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns softmax(q k^T * scale) v: o [B, H, Sq, D], and the lse that `cudnn_attention_backward` takes."""
    o, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, scale=scale)
    return o.contiguous(), lse.reshape(q.shape[:3])


def cudnn_attention_backward(
    do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, *,
    causal: bool, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns (dq, dk, dv) of softmax(q k^T * scale) v; all [B, H, S, D] but lse [B, Hq, Sq], a natural logarithm.

    k and v may have fewer heads than q.
    """
    absent: Any = None  # bias, dropout and ragged lengths
    none = torch.zeros([], dtype=torch.int64, device=q.device)
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(  # type: ignore[no-any-return]
        do, q, k, v, o, lse.unsqueeze(-1), none, none, absent, absent, absent, q.shape[2], k.shape[2], 0.0, causal,
        scale=scale,
    )  # fmt: skip
