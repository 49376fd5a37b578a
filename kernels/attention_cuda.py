"""Quantized attention on CUDA: Triton kernels where they take it, cuDNN for a high-precision backward.

Each function has the meaning, and the arguments, of its namesake in `fxquant.kernels.attention_ops`, whose reference
runs where no kernel does: for scales of blocks, MXFP8, dropout, and what scores may be besides scaled and masked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxquant.compat import cudnn_attention_backward
from fxquant.formats import AttentionSpec
from fxquant.kernels import attention_ops, attention_reference, triton_attention

_HEAD = "per_head_e4m3"
_TAKEN = (_HEAD, "per_tensor_e4m3")


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
    if plain is None or k.ndim != 4 or str(spec.qkv) not in _TAKEN or v.shape[-2] != width:
        return None
    softmax = spec.s.row
    taken = softmax.family in ("per_tensor", "per_head") and softmax.element == spec.qkv.row.element
    taken = taken and triton_attention.supports(
        head_dim=width, kv_len=k.shape[-2], causal=plain.causal, has_mask=plain.mask is not None, dropout=spec.dropout,
        dtype=dtype, device=k.device,
    )  # fmt: skip
    return plain if taken else None


def casts(x: Tensor, spec: str) -> bool:
    """Whether a kernel quantizes x [B, H, S, D]."""
    known = spec == _HEAD and x.ndim == 4 and x.dtype in (torch.bfloat16, torch.float16)
    return known and x.shape[-1] in triton_attention.HEAD_DIMS


def quantize_heads(x: Tensor, spec: str, groups: int, transposed: bool, scale: Tensor | None = None) -> list[Tensor]:
    """Payload and scale of x [B, H, S, D], where `casts` says so."""
    return list(triton_attention.quantize_heads(x if x.stride(-1) == 1 else x.contiguous(), groups, transposed))


def attention_forward(
    q: Sequence[Tensor], k: Sequence[Tensor], v: Sequence[Tensor], extras: Sequence[Tensor], seed: Tensor | None,
    s_scale: Tensor | None, spec: str, width: int, dtype: torch.dtype,
) -> list[Tensor]:  # fmt: skip
    """[o, lse, amax of the softmax, which only a delayed scale asks for]."""
    parsed = AttentionSpec.parse(spec)
    plain = None if s_scale is not None else _known(parsed, extras, dtype, k[0], v[0], width)
    if plain is None:
        run: Any = attention_ops.IMPLEMENTATIONS["attention_forward"]
        return run(q, k, v, extras, seed, s_scale, spec, width, dtype)  # type: ignore[no-any-return]
    (q8, q_scale), (k8, k_scale), (v8, v_scale) = q, k, v
    o, lse = triton_attention.forward(
        q8, k8, v8, q_scale, k_scale, v_scale, causal=plain.causal, scale=plain.scale, out_dtype=dtype, mask=plain.mask
    )
    return [o, lse, torch.ones(1, device=o.device)]


def attention_backward(
    do: Tensor, q: Sequence[Tensor], k: Sequence[Tensor], v: Sequence[Tensor], o: Tensor, lse: Tensor,
    extras: Sequence[Tensor], seed: Tensor | None, s_scale: Tensor | None, do_scale: Tensor | None,
    dp_scale: Tensor | None, wanted: Sequence[int], spec: str, width: int,
) -> list[Tensor]:  # fmt: skip
    """[dq, dk, dv, amax of the scores' gradient, the gradients of the `wanted` extras]."""
    parsed = AttentionSpec.parse(spec)
    delayed = any(scale is not None for scale in (s_scale, do_scale, dp_scale))
    plain = None if delayed or wanted else _known(parsed, extras, do.dtype, k[0], v[0], width)
    one = torch.ones(1, device=do.device)
    if plain is not None and not parsed.has_fp8_backward and plain.mask is None:
        groups = q[0].shape[1] // k[0].shape[1]
        queries, keys = q[0].shape[-2], k[0].shape[-2]
        sides = ((q, groups, False, queries), (k, 1, False, keys), (v, 1, True, keys))
        q_wide, k_wide, v_wide = (
            attention_reference.dequantize_heads(parts, parsed.qkv, g, transposed, (length, width))
            .to(do.dtype)
            .contiguous()
            for parts, g, transposed, length in sides
        )
        grads = cudnn_attention_backward(
            do, q_wide, k_wide, v_wide, o, lse, causal=plain.causal, scale=plain.scale
        )  # fmt: skip
        return [*grads, one]
    if plain is not None and str(parsed.do) in _TAKEN and str(parsed.dp) in _TAKEN:
        (q8, q_scale), (k8, k_scale), (v8, v_scale) = q, k, v
        rows = attention_reference.key_order(v8, back=True)[..., : k8.shape[-2]].mT.contiguous()
        grads = triton_attention.backward(
            do, q8, k8, rows, o, lse, q_scale, k_scale, v_scale, causal=plain.causal, scale=plain.scale,
            mask=plain.mask,
        )  # fmt: skip
        return [*grads, one]
    run: Any = attention_ops.IMPLEMENTATIONS["attention_backward"]
    return run(  # type: ignore[no-any-return]
        do, q, k, v, o, lse, extras, seed, s_scale, do_scale, dp_scale, wanted, spec, width
    )


IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "attention_forward": attention_forward,
    "attention_backward": attention_backward,
}
"""What runs on CUDA in the place of the operators of these names; see `quantize_heads` for the third."""
