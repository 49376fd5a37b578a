"""Quantized attention on CUDA: Triton kernels where they take it, cuDNN for what is in high precision.

Each function has the meaning, and the arguments, of its namesake in `fxquant.kernels.attention.ops`, whose reference
runs where no kernel does: for what scores may be besides scaled and masked. MXFP8, which Hopper does not multiply, is
dequantized, exactly to bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxquant.formats import AttentionSpec, QuantSpec
from fxquant.kernels.attention import gluon_op as warp_attention
from fxquant.kernels.attention import ops as attention_ops
from fxquant.kernels.attention import reference as attention_reference
from fxquant.kernels.attention import triton as triton_attention
from fxquant.kernels.attention import triton_cast as triton_head_cast
from fxquant.kernels.attention.choice import SCALINGS
from fxquant.kernels.attention.cudnn import cudnn_attention, cudnn_attention_backward
from fxquant.kernels.state import reference as delayed

_GRADIENTS = {
    **dict.fromkeys(SCALINGS, torch.float8_e4m3fn), "per_tensor_e5m2": torch.float8_e5m2,
    "per_head_e5m2": torch.float8_e5m2,
}  # fmt: skip
"""The formats of the gradients, and what do is cast to."""


class _Plain(NamedTuple):
    """Steps that are a scale, a mask of a kind, and causality."""

    scale: float
    causal: bool
    mask: Tensor | None


def _plain(spec: AttentionSpec, extras: Sequence[Tensor]) -> _Plain | None:
    scale, causal, mask = 1.0, False, None
    for step in spec.steps:
        if step.kind == "mul" and step.extra < 0 and mask is None:
            scale *= step.value
        elif step.kind == "causal":
            causal = True
        elif step.kind in ("add", "keep") and step.extra >= 0 and mask is None:
            mask = extras[step.extra]
        elif step.kind == "fill" and step.value == -math.inf and mask is None:
            mask = torch.logical_not(extras[step.extra])
        else:
            return None
    return _Plain(scale, causal, mask) if scale > 0 else None


def _known(
    spec: AttentionSpec, extras: Sequence[Tensor], dtype: torch.dtype, k: Tensor, v: Tensor, width: int
) -> _Plain | None:
    """The steps, where the kernels take an attention of these payloads."""
    plain = _plain(spec, extras)
    if plain is None or k.ndim != 4 or v.shape[-2] != width:
        return None
    softmax = spec.s.row
    if str(spec.qkv) in SCALINGS:
        taken = softmax.family in ("per_tensor", "per_head") and softmax.element == spec.qkv.row.element
    else:
        taken = _is_mx(spec.qkv) and softmax.family in attention_reference.UNQUANTIZED_SOFTMAX
    taken = taken and triton_attention.supports(
        head_dim=width, kv_len=k.shape[-2], dropout=spec.dropout, dtype=dtype, device=k.device
    )
    return plain if taken else None


def _is_mx(spec: QuantSpec) -> bool:
    return spec.row.family == "mxfp8"


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def quantize_heads(x: Tensor, spec: str, groups: int, transposed: bool, scale: Tensor | None = None) -> list[Tensor]:
    """Payload and scale of x [B, H, S, D], where `choice.casts` says so."""
    scaling: Any = SCALINGS[spec]
    return list(triton_head_cast.quantize_heads(_dense(x), groups, transposed, scaling))


def quantize_qkv(
    q: Tensor, k: Tensor, v: Tensor, spec: str, scale: Tensor | None = None, record: bool = False
) -> list[Tensor]:
    """Payloads and scales of q, k and v, where `choice.casts_qkv` says so."""
    amax = torch.zeros(1, device=q.device) if record else None
    parts = triton_head_cast.quantize_qkv(_dense(q), _dense(k), _dense(v), SCALINGS[spec], scale, amax)
    return parts if amax is None else [*parts, amax]


def quantize_qkv_into(q: Tensor, k: Tensor, v: Tensor, spec: str, scale: Tensor, amaxes: Tensor) -> list[Tensor]:
    """`quantize_qkv` whose amax goes into the state."""
    return triton_head_cast.quantize_qkv(_dense(q), _dense(k), _dense(v), SCALINGS[spec], scale, amaxes)


def _dequantized(
    q: Sequence[Tensor], k: Sequence[Tensor], v: Sequence[Tensor], spec: QuantSpec, width: int, dtype: torch.dtype
) -> list[Tensor]:
    """q, k and v in a 16-bit dtype."""
    scaling = SCALINGS.get(str(spec))
    if scaling is not None:
        return triton_head_cast.dequantize_qkv(q, k, v, scaling, dtype)
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
    amax = torch.zeros(1, device=q[0].device) if s_scale is not None else None
    made = _forward(q, k, v, extras, seed, spec, width, dtype, amax)
    if made is None:
        run: Any = attention_ops.IMPLEMENTATIONS["attention_forward"]
        return run(q, k, v, extras, seed, s_scale, spec, width, dtype)  # type: ignore[no-any-return]
    return [*made, torch.ones(1, device=q[0].device) if amax is None else amax]


def attention_forward_into(
    q: Sequence[Tensor], k: Sequence[Tensor], v: Sequence[Tensor], extras: Sequence[Tensor], seed: Tensor | None,
    s_scale: Tensor | None, spec: str, width: int, dtype: torch.dtype, amaxes: Tensor,
) -> list[Tensor]:  # fmt: skip
    """[o, lse]; the amax of the softmax goes into the state."""
    made = _forward(q, k, v, extras, seed, spec, width, dtype, amaxes)
    if made is None:
        run: Any = attention_ops.IMPLEMENTATIONS["attention_forward_into"]
        return run(q, k, v, extras, seed, s_scale, spec, width, dtype, amaxes)  # type: ignore[no-any-return]
    return list(made)


def _forward(
    q: Sequence[Tensor], k: Sequence[Tensor], v: Sequence[Tensor], extras: Sequence[Tensor], seed: Tensor | None,
    spec: str, width: int, dtype: torch.dtype, s_amax: Tensor | None,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """o and lse, where a kernel takes the attention; the amax of the softmax goes into `s_amax`."""
    parsed = AttentionSpec.parse(spec)
    plain = _known(parsed, extras, dtype, k[0], v[0], width)
    if plain is None:
        return None
    options: dict[str, Any] = {"causal": plain.causal, "scale": plain.scale}
    more: dict[str, Any] = {"mask": plain.mask, "dropout": parsed.dropout, "seed": seed, "out_dtype": dtype}
    unmasked = plain.mask is None and not parsed.dropout
    if not _is_mx(parsed.qkv):
        (q8, q_scale), (k8, k_scale), (v8, v_scale) = q, k, v
        options["scaling"] = SCALINGS[str(parsed.qkv)]
        if unmasked and warp_attention.takes(q8, k8):
            o, lse, weights = warp_attention.forward(
                q8, k8, v8, q_scale, k_scale, v_scale, **options, out_dtype=dtype, record=s_amax is not None
            )
            if s_amax is not None:
                delayed.take(s_amax, weights.amax().reshape(1))
            return o, lse
        return triton_attention.forward(q8, k8, v8, q_scale, k_scale, v_scale, **options, **more, s_amax=s_amax)
    wide_q, wide_k, wide_v = _dequantized(q, k, v, parsed.qkv, width, dtype)
    if unmasked:
        return cudnn_attention(wide_q, wide_k, wide_v, **options)
    return triton_attention.forward(wide_q, wide_k, wide_v, None, None, None, **options, **more)


def attention_backward(
    do: Tensor, q: Sequence[Tensor], k: Sequence[Tensor], v: Sequence[Tensor], o: Tensor, lse: Tensor,
    extras: Sequence[Tensor], seed: Tensor | None, s_scale: Tensor | None, do_scale: Tensor | None,
    dp_scale: Tensor | None, wanted: Sequence[int], spec: str, width: int,
) -> list[Tensor]:  # fmt: skip
    """[dq, dk, dv, amaxes of do and the scores' gradient, the gradients of the `wanted` extras].

    Of the amaxes only those have a meaning that a delayed scale asks for.
    """
    parsed = AttentionSpec.parse(spec)
    plain = None if wanted else _known(parsed, extras, do.dtype, k[0], v[0], width)
    if plain is not None:
        do_amax, dp_amax = (
            None if scale is None else torch.zeros(1, device=do.device) for scale in (do_scale, dp_scale)
        )
        options: dict[str, Any] = {"causal": plain.causal, "scale": plain.scale}
        more: dict[str, Any] = {"mask": plain.mask, "dropout": parsed.dropout, "seed": seed}
        grads: Sequence[Tensor] | None = None
        unquantized = attention_reference.UNQUANTIZED_SOFTMAX
        if not parsed.has_fp8_backward:
            wide_q, wide_k, wide_v = _dequantized(q, k, v, parsed.qkv, width, do.dtype)
            if plain.mask is None and not parsed.dropout:
                grads = cudnn_attention_backward(do, wide_q, wide_k, wide_v, o, lse, **options)
            else:
                grads = triton_attention.wide_backward(do, wide_q, wide_k, wide_v, o, lse, **options, **more)
        elif _is_mx(parsed.qkv) and _is_mx(parsed.do) and parsed.dp.row.family in unquantized:
            wide_q, wide_k, wide_v = _dequantized(q, k, v, parsed.qkv, width, do.dtype)
            rows, columns = attention_reference.rows_and_columns(do, parsed.do)
            grads = triton_attention.wide_backward(
                do, wide_q, wide_k, wide_v, o, lse, **options, **more, rounded=(rows.to(do.dtype), columns.to(do.dtype))
            )
        elif str(parsed.do) in _GRADIENTS and str(parsed.dp) in _GRADIENTS and not _is_mx(parsed.qkv):
            (q8, q_scale), (k8, k_scale), (v8, v_scale) = q, k, v
            more |= {"do_dtype": _GRADIENTS[str(parsed.do)], "do_multiplier": do_scale}
            more |= {"do_amax": do_amax, "dp_amax": dp_amax, "scaling": SCALINGS[str(parsed.qkv)]}
            grads = triton_attention.backward(do, q8, k8, v8, o, lse, q_scale, k_scale, v_scale, **options, **more)
        if grads is not None:
            amaxes = (torch.ones(1, device=do.device) if amax is None else amax for amax in (do_amax, dp_amax))
            return [*grads, *amaxes]
    run: Any = attention_ops.IMPLEMENTATIONS["attention_backward"]
    return run(  # type: ignore[no-any-return]
        do, q, k, v, o, lse, extras, seed, s_scale, do_scale, dp_scale, wanted, spec, width
    )


IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "attention_forward": attention_forward,
    "attention_forward_into": attention_forward_into,
    "attention_backward": attention_backward,
}
"""The operators that run so on CUDA whatever they are given; `choice.casts` and `choice.casts_qkv` decide on casts."""
