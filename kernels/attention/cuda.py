"""Quantized attention on CUDA: Triton kernels where they take it, cuDNN for what is in high precision.

Each function has the meaning, and the arguments, of its namesake in `fxquant.kernels.attention.ops`, where
`fxquant.kernels.attention.choice` says so. MXFP8, which Hopper does not multiply, is dequantized, exactly to bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxquant.formats import AttentionSpec, QuantSpec
from fxquant.kernels.attention import gluon_op, triton_backward, triton_forward
from fxquant.kernels.attention import reference as attention_reference
from fxquant.kernels.attention.choice import SCALINGS, AttentionKernel
from fxquant.kernels.attention.cudnn import cudnn_attention, cudnn_attention_backward
from fxquant.kernels.attention.triton_dequantize import dequantize_qkv
from fxquant.kernels.operator import Parts
from fxquant.kernels.state import reference as delayed

_GRADIENTS = {
    **dict.fromkeys(SCALINGS, torch.float8_e4m3fn), "per_tensor_e5m2": torch.float8_e5m2,
    "per_head_e5m2": torch.float8_e5m2,
}  # fmt: skip
"""The dtypes that do is cast to, by its format."""


class _Scores(NamedTuple):
    """The steps on the scores, which kernels do: a scale, a mask of a kind, and causality."""

    scale: float
    causal: bool
    mask: Tensor | None

    @classmethod
    def of(cls, spec: AttentionSpec, extras: Sequence[Tensor]) -> _Scores:
        scale, causal, mask = 1.0, False, None
        for step in spec.steps:
            if step.kind == "mul":
                scale *= step.value
            elif step.kind == "causal":
                causal = True
            else:
                mask = torch.logical_not(extras[step.extra]) if step.kind == "fill" else extras[step.extra]
        return cls(scale, causal, mask)


def _dequantized(q: Parts, k: Parts, v: Parts, spec: QuantSpec, width: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k and v in a 16-bit dtype."""
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
    """[o, lse, amax of the softmax, which only a delayed scale asks for], or [o, lse] where it goes into `amaxes`."""
    s_amax = torch.zeros(1, device=q[0].device) if amaxes is None and s_scale is not None else amaxes
    results = list(_forward(kernel, q, k, v, extras, seed, AttentionSpec.parse(spec), width, dtype, s_amax))
    if amaxes is not None:
        return results
    return [*results, torch.ones(1, device=q[0].device) if s_amax is None else s_amax]


def _forward(
    kernel: AttentionKernel, q: Parts, k: Parts, v: Parts, extras: Parts, seed: Tensor | None, spec: AttentionSpec,
    width: int, dtype: torch.dtype, s_amax: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """o and lse by a kernel; the amax of the softmax goes into `s_amax`."""
    scores = _Scores.of(spec, extras)
    options: dict[str, Any] = {"causal": scores.causal, "scale": scores.scale}
    more: dict[str, Any] = {"mask": scores.mask, "dropout": spec.dropout, "seed": seed, "out_dtype": dtype}
    if kernel in (AttentionKernel.CUDNN, AttentionKernel.WIDE):
        wide_q, wide_k, wide_v = _dequantized(q, k, v, spec.qkv, width, dtype)
        if kernel is AttentionKernel.CUDNN:
            return cudnn_attention(wide_q, wide_k, wide_v, **options)
        return triton_forward.forward(wide_q, wide_k, wide_v, None, None, None, **options, **more)
    (q8, q_scale), (k8, k_scale), (v8, v_scale) = q, k, v
    options["scaling"] = SCALINGS[str(spec.qkv)]
    if kernel is AttentionKernel.TRITON:
        return triton_forward.forward(q8, k8, v8, q_scale, k_scale, v_scale, **options, **more, s_amax=s_amax)
    options |= {"out_dtype": dtype, "record": s_amax is not None}
    o, lse, weights = gluon_op.forward(q8, k8, v8, q_scale, k_scale, v_scale, **options)
    if s_amax is not None:
        delayed.take(s_amax, weights.amax().reshape(1))
    return o, lse


def attention_backward(
    kernel: AttentionKernel, do: Tensor, q: Parts, k: Parts, v: Parts, o: Tensor, lse: Tensor, extras: Parts,
    seed: Tensor | None, s_scale: Tensor | None, do_scale: Tensor | None, dp_scale: Tensor | None,
    wanted: Sequence[int], spec: str, width: int,
) -> list[Tensor]:  # fmt: skip
    """[dq, dk, dv, amaxes of do and the scores' gradient], where the gradients of no extras are `wanted`."""
    parsed = AttentionSpec.parse(spec)
    do_amax, dp_amax = (None if scale is None else torch.zeros(1, device=do.device) for scale in (do_scale, dp_scale))
    scores = _Scores.of(parsed, extras)
    options: dict[str, Any] = {"causal": scores.causal, "scale": scores.scale}
    more: dict[str, Any] = {"mask": scores.mask, "dropout": parsed.dropout, "seed": seed}
    grads: Sequence[Tensor]
    if kernel is AttentionKernel.TRITON:
        (q8, q_scale), (k8, k_scale), (v8, v_scale) = q, k, v
        more |= {"do_dtype": _GRADIENTS[str(parsed.do)], "do_multiplier": do_scale}
        more |= {"do_amax": do_amax, "dp_amax": dp_amax, "scaling": SCALINGS[str(parsed.qkv)]}
        grads = triton_backward.backward(do, q8, k8, v8, o, lse, q_scale, k_scale, v_scale, **options, **more)
    else:
        wide_q, wide_k, wide_v = _dequantized(q, k, v, parsed.qkv, width, do.dtype)
        if kernel is AttentionKernel.CUDNN:
            grads = cudnn_attention_backward(do, wide_q, wide_k, wide_v, o, lse, **options)
        else:
            if parsed.has_fp8_backward:
                rows, columns = attention_reference.rows_and_columns(do, parsed.do)
                more["rounded"] = (rows.to(do.dtype), columns.to(do.dtype))
            grads = triton_backward.wide_backward(do, wide_q, wide_k, wide_v, o, lse, **options, **more)
    return [*grads, *(torch.ones(1, device=do.device) if amax is None else amax for amax in (do_amax, dp_amax))]
