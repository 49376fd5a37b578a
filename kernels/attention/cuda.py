"""Quantized attention on CUDA: Triton kernels where they take it, cuDNN for what is in high precision.

Each function has the meaning, and the arguments, of its namesake in `fxquant.kernels.attention.ops`, whose reference
runs where `choice` says so: where scores are more than scaled and masked. MXFP8, which Hopper does not multiply, is
dequantized, exactly to bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxquant.compat.device import capability
from fxquant.compat.values import size_hint
from fxquant.formats import AttentionSpec, QuantSpec
from fxquant.kernels.attention import choice, gluon_op, triton_backward, triton_cast, triton_forward
from fxquant.kernels.attention import ops as attention_ops
from fxquant.kernels.attention import reference as attention_reference
from fxquant.kernels.attention.choice import SCALINGS, AttentionFacts, AttentionKernel
from fxquant.kernels.attention.cudnn import cudnn_attention, cudnn_attention_backward
from fxquant.kernels.attention.triton_dequantize import dequantize_qkv
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


def _facts(
    spec: AttentionSpec,
    q: Sequence[Tensor],
    k: Sequence[Tensor],
    v: Sequence[Tensor],
    width: int,
    dtype: torch.dtype,
    *,
    learned: bool = False,
) -> AttentionFacts:
    """The facts of an attention of these operands; a device that is not there is a Hopper GPU."""
    keys, device = k[0].shape[-2], k[0].device
    return AttentionFacts(
        spec=spec,
        axes=k[0].ndim,
        width=width,
        features=attention_reference.features_of(v, spec),
        dtype=dtype,
        capability=capability(device) if torch.cuda.is_available() else (9, 0),
        keys=keys,
        flops=4 * math.prod(map(size_hint, (*q[0].shape, keys))),
        learned=learned,
    )


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def quantize_heads(x: Tensor, spec: str, groups: int, transposed: bool, scale: Tensor | None = None) -> list[Tensor]:
    """Payload and scale of x [B, H, S, D], where `choice.casts` says so."""
    scaling: Any = SCALINGS[spec]
    return list(triton_cast.quantize_heads(_dense(x), groups, transposed, scaling))


def quantize_qkv(
    q: Tensor, k: Tensor, v: Tensor, spec: str, scale: Tensor | None = None, record: bool = False
) -> list[Tensor]:
    """Payloads and scales of q, k and v, where `choice.casts_qkv` says so."""
    amax = torch.zeros(1, device=q.device) if record else None
    parts = triton_cast.quantize_qkv(_dense(q), _dense(k), _dense(v), SCALINGS[spec], scale, amax)
    return parts if amax is None else [*parts, amax]


def quantize_qkv_into(q: Tensor, k: Tensor, v: Tensor, spec: str, scale: Tensor, amaxes: Tensor) -> list[Tensor]:
    """`quantize_qkv` whose amax goes into the state."""
    return triton_cast.quantize_qkv(_dense(q), _dense(k), _dense(v), SCALINGS[spec], scale, amaxes)


def _dequantized(
    q: Sequence[Tensor], k: Sequence[Tensor], v: Sequence[Tensor], spec: QuantSpec, width: int, dtype: torch.dtype
) -> list[Tensor]:
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
    q: Sequence[Tensor], k: Sequence[Tensor], v: Sequence[Tensor], extras: Sequence[Tensor], seed: Tensor | None,
    s_scale: Tensor | None, spec: str, width: int, dtype: torch.dtype,
) -> list[Tensor]:  # fmt: skip
    """[o, lse, amax of the softmax, which only a delayed scale asks for]."""
    parsed = AttentionSpec.parse(spec)
    kernel = choice.forward(_facts(parsed, q, k, v, width, dtype)).kernel
    if kernel is AttentionKernel.REFERENCE:
        run: Any = attention_ops.IMPLEMENTATIONS["attention_forward"]
        return run(q, k, v, extras, seed, s_scale, spec, width, dtype)  # type: ignore[no-any-return]
    amax = torch.zeros(1, device=q[0].device) if s_scale is not None else None
    results = _forward(kernel, q, k, v, extras, seed, parsed, width, dtype, amax)
    return [*results, torch.ones(1, device=q[0].device) if amax is None else amax]


def attention_forward_into(
    q: Sequence[Tensor], k: Sequence[Tensor], v: Sequence[Tensor], extras: Sequence[Tensor], seed: Tensor | None,
    s_scale: Tensor | None, spec: str, width: int, dtype: torch.dtype, amaxes: Tensor,
) -> list[Tensor]:  # fmt: skip
    """[o, lse]; the amax of the softmax goes into the state."""
    parsed = AttentionSpec.parse(spec)
    kernel = choice.forward(_facts(parsed, q, k, v, width, dtype)).kernel
    if kernel is AttentionKernel.REFERENCE:
        run: Any = attention_ops.IMPLEMENTATIONS["attention_forward_into"]
        return run(q, k, v, extras, seed, s_scale, spec, width, dtype, amaxes)  # type: ignore[no-any-return]
    return list(_forward(kernel, q, k, v, extras, seed, parsed, width, dtype, amaxes))


def _forward(
    kernel: AttentionKernel, q: Sequence[Tensor], k: Sequence[Tensor], v: Sequence[Tensor], extras: Sequence[Tensor],
    seed: Tensor | None, spec: AttentionSpec, width: int, dtype: torch.dtype, s_amax: Tensor | None,
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
    do: Tensor, q: Sequence[Tensor], k: Sequence[Tensor], v: Sequence[Tensor], o: Tensor, lse: Tensor,
    extras: Sequence[Tensor], seed: Tensor | None, s_scale: Tensor | None, do_scale: Tensor | None,
    dp_scale: Tensor | None, wanted: Sequence[int], spec: str, width: int,
) -> list[Tensor]:  # fmt: skip
    """[dq, dk, dv, amaxes of do and the scores' gradient, the gradients of the `wanted` extras].

    Of the amaxes only those have a meaning that a delayed scale asks for.
    """
    parsed = AttentionSpec.parse(spec)
    kernel = choice.backward(_facts(parsed, q, k, v, width, do.dtype, learned=bool(wanted))).kernel
    if kernel is AttentionKernel.REFERENCE:
        run: Any = attention_ops.IMPLEMENTATIONS["attention_backward"]
        return run(  # type: ignore[no-any-return]
            do, q, k, v, o, lse, extras, seed, s_scale, do_scale, dp_scale, wanted, spec, width
        )
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


IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "attention_forward": attention_forward,
    "attention_forward_into": attention_forward_into,
    "attention_backward": attention_backward,
}
"""The operators that run so on CUDA whatever they are given; `choice.casts` and `choice.casts_qkv` decide on casts."""
