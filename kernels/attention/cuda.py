"""Quantized attention on CUDA: Triton kernels where they take it, cuDNN for what is in high precision.

Each function has the meaning, and the arguments, of its namesake in `fxquant.kernels.attention.ops`, where
`fxquant.kernels.attention.choice` says so. MXFP8, which Hopper does not multiply, is dequantized, exactly to bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxquant.formats import AttentionSpec, QuantSpec
from fxquant.kernels.attention import gluon_op, triton_backward, triton_forward
from fxquant.kernels.attention import reference as attention_reference
from fxquant.kernels.attention.choice import SCALINGS, AttentionKernel
from fxquant.kernels.attention.cudnn import cudnn_attention, cudnn_attention_backward
from fxquant.kernels.attention.scores import Scores
from fxquant.kernels.attention.triton_backward import GradientCast
from fxquant.kernels.attention.triton_dequantize import dequantize_qkv
from fxquant.kernels.operator import Parts
from fxquant.kernels.state import reference as delayed

_GRADIENTS = {
    **dict.fromkeys(SCALINGS, torch.float8_e4m3fn), "per_tensor_e5m2": torch.float8_e5m2,
    "per_head_e5m2": torch.float8_e5m2,
}  # fmt: skip
"""The dtypes that do is cast to, by its format."""


def _scores(spec: AttentionSpec, extras: Parts, seed: Tensor | None) -> Scores:
    """Returns the steps of a spec as kernels do them."""
    scale, causal, mask = 1.0, False, None
    for step in spec.steps:
        if step.kind == "mul":
            scale *= step.value
        elif step.kind == "causal":
            causal = True
        else:
            mask = torch.logical_not(extras[step.extra]) if step.kind == "fill" else extras[step.extra]
    return Scores(scale=scale, causal=causal, mask=mask, dropout=spec.dropout, seed=seed)


def _dequantized(operands: Sequence[Parts], spec: QuantSpec, width: int, dtype: torch.dtype) -> list[Tensor]:
    """Returns q, k and v in a 16-bit dtype."""
    q, k, v = operands
    scaling = SCALINGS.get(str(spec))
    if scaling is not None:
        return dequantize_qkv(q, k, v, scaling, dtype)
    groups = q[0].shape[1] // k[0].shape[1]
    queries, keys = q[0].shape[-2], k[0].shape[-2]
    sides = ((q, groups, False, queries), (k, 1, False, keys), (v, 1, True, keys))
    wide = (attention_reference.dequantize_heads(x, spec, g, t, (length, width)) for x, g, t, length in sides)
    return [x.to(dtype).contiguous() for x in wide]


def attention_forward(
    kernel: AttentionKernel, q: Parts, k: Parts, v: Parts, extras: Parts, seed: Tensor | None, s_scale: Tensor | None,
    spec: str, width: int, dtype: torch.dtype, amaxes: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """Returns [o, lse, amax of the softmax, which only a delayed scale asks for], or [o, lse] with it in `amaxes`."""
    s_amax = torch.zeros(1, device=q[0].device) if amaxes is None and s_scale is not None else amaxes
    parsed = AttentionSpec.parse(spec)
    scores = _scores(parsed, extras, seed)
    results = list(_forward(kernel, (q, k, v), scores, parsed.qkv, width, dtype, s_amax))
    if amaxes is not None:
        return results
    return [*results, torch.ones(1, device=q[0].device) if s_amax is None else s_amax]


def _forward(
    kernel: AttentionKernel, operands: Sequence[Parts], scores: Scores, spec: QuantSpec, width: int,
    dtype: torch.dtype, s_amax: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns o and lse by a kernel; the amax of the softmax goes into `s_amax`."""
    if kernel in (AttentionKernel.CUDNN, AttentionKernel.WIDE):
        wide = _dequantized(operands, spec, width, dtype)
        if kernel is AttentionKernel.CUDNN:
            return cudnn_attention(*wide, causal=scores.causal, scale=scores.scale)
        return triton_forward.forward([[x] for x in wide], scores, dtype)
    scaling = SCALINGS[str(spec)]
    if kernel is AttentionKernel.TRITON:
        return triton_forward.forward(operands, scores, dtype, scaling=scaling, s_amax=s_amax)
    o, lse, weights = gluon_op.forward(operands, scores, dtype, scaling, record=s_amax is not None)
    if s_amax is not None:
        delayed.take(s_amax, weights.amax().reshape(1))
    return o, lse


def attention_backward(
    kernel: AttentionKernel, do: Tensor, q: Parts, k: Parts, v: Parts, o: Tensor, lse: Tensor, extras: Parts,
    seed: Tensor | None, s_scale: Tensor | None, do_scale: Tensor | None, dp_scale: Tensor | None,
    wanted: Sequence[int], spec: str, width: int,
) -> list[Tensor]:  # fmt: skip
    """Returns [dq, dk, dv, amaxes of do and the scores' gradient], where the gradients of no extras are `wanted`."""
    parsed = AttentionSpec.parse(spec)
    do_amax, dp_amax = (None if scale is None else torch.zeros(1, device=do.device) for scale in (do_scale, dp_scale))
    scores = _scores(parsed, extras, seed)
    grads: Sequence[Tensor]
    if kernel in (AttentionKernel.TRITON, AttentionKernel.GLUON):
        cast = GradientCast(dtype=_GRADIENTS[str(parsed.do)], multiplier=do_scale, amax=do_amax, scores_amax=dp_amax)
        by_warps = kernel is AttentionKernel.GLUON
        run = triton_backward.backward_by_warps if by_warps else triton_backward.backward
        grads = run(do, (q, k, v), o, lse, scores, SCALINGS[str(parsed.qkv)], cast)
    else:
        wide_q, wide_k, wide_v = wide = _dequantized((q, k, v), parsed.qkv, width, do.dtype)
        if kernel is AttentionKernel.CUDNN:
            grads = cudnn_attention_backward(
                do, wide_q, wide_k, wide_v, o, lse, causal=scores.causal, scale=scores.scale
            )
        else:
            rounded = None
            if parsed.has_fp8_backward:
                rows, columns = attention_reference.rows_and_columns(do, parsed.do)
                rounded = (rows.to(do.dtype), columns.to(do.dtype))
            grads = triton_backward.wide_backward(do, wide, o, lse, scores, rounded)
    return [*grads, *(torch.ones(1, device=do.device) if amax is None else amax for amax in (do_amax, dp_amax))]
