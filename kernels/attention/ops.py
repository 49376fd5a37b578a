"""The operators of quantized attention.

A quantized operand is [payload, scale] as `fxquant.kernels.attention.reference.quantize_heads` lays it out; v is
`transposed`. `width` is D before it was padded. Specs cross as the text of a `QuantSpec` or an `AttentionSpec`. What
ends in `_into` takes its amax into `amaxes`, one entry of the state of delayed scaling, and does not return it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from fxquant.compat.values import statically_known_true
from fxquant.formats import AttentionSpec, QuantSpec
from fxquant.kernels.attention import choice, reference
from fxquant.kernels.attention.choice import AttentionFacts, AttentionKernel, HeadFacts
from fxquant.kernels.cast.choice import CastKernel
from fxquant.kernels.cast.reference import amax
from fxquant.kernels.operator import Parts, Traits, operator
from fxquant.kernels.state import reference as delayed


@operator(reference=CastKernel.FUSED, traits=Traits(reads_values=1))
def quantize_heads(x: Tensor, spec: str, groups: int, transposed: bool, scale: Tensor | None = None) -> list[Tensor]:
    """Payload and scale of x [*, H, S, D]; `groups` heads of queries have one of keys, and with it a scale."""
    parts = reference.quantize_heads(x, QuantSpec.parse(spec), groups, transposed, scale)
    return [part.contiguous() for part in parts]


@quantize_heads.fake
def _quantize_heads_fake(
    x: Tensor, spec: str, groups: int, transposed: bool, scale: Tensor | None = None
) -> list[Tensor]:
    parsed = QuantSpec.parse(spec)
    row, batch = parsed.row, x.shape[:-2]
    assert row.element is not None and row.scale_dtype is not None
    rows, columns = (x.shape[-1], x.shape[-2]) if transposed else (x.shape[-2], x.shape[-1])
    padded = (columns + row.alignment - 1) // row.alignment * row.alignment
    if row.family == "per_tensor":
        shape = [1]
    elif row.family == "per_head":
        heads = [*batch[:-1], batch[-1] // groups] if batch else []
        shape = [*heads, (x.shape[-2] + row.block[0] - 1) // row.block[0]] if row.block[0] else heads
    else:
        shape = [*batch, rows, padded // row.block[1]]
    sizes = [*batch, rows, padded], shape
    return [x.new_empty(size, dtype=dtype) for size, dtype in zip(sizes, row.dtypes, strict=True)]


quantize_heads.facts(lambda x, spec, *_: HeadFacts.of(spec, x))


@quantize_heads.implementation(CastKernel.TRITON, when=choice.casts_alone)
def _triton_quantize_heads(x: Tensor, spec: str, groups: int, transposed: bool, _: object = None) -> list[Tensor]:
    from fxquant.kernels.attention import triton_cast

    scaling: Any = choice.SCALINGS[spec]
    return list(triton_cast.quantize_heads(_dense(x), groups, transposed, scaling))


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _sides(q: Tensor, k: Tensor, v: Tensor) -> tuple[tuple[Tensor, int, bool], ...]:
    """q, k and v with their groups, and whether they are transposed."""
    return (q, reference.heads_of(q) // reference.heads_of(k), False), (k, 1, False), (v, 1, True)


def _facts_of_qkv(q: Tensor, k: Tensor, v: Tensor, spec: str, *_: object) -> HeadFacts:
    return HeadFacts.of(spec, q, v)


@operator(mutates=["amaxes"], reference=CastKernel.FUSED, traits=Traits(reads_values=3))
def quantize_qkv_into(q: Tensor, k: Tensor, v: Tensor, spec: str, scale: Tensor, amaxes: Tensor) -> list[Tensor]:
    """`quantize_qkv` that takes its amax into the state."""
    *parts, largest = quantize_qkv.meaning(q, k, v, spec, scale, True)
    delayed.take(amaxes, largest)
    return parts


@quantize_qkv_into.fake
def _quantize_qkv_into_fake(q: Tensor, k: Tensor, v: Tensor, spec: str, *_: object) -> list[Tensor]:
    return _quantize_qkv_fake(q, k, v, spec)


quantize_qkv_into.facts(_facts_of_qkv)


@quantize_qkv_into.implementation(CastKernel.TRITON, when=choice.casts)
def _triton_quantize_qkv_into(
    q: Tensor, k: Tensor, v: Tensor, spec: str, scale: Tensor | None, amaxes: Tensor | None
) -> list[Tensor]:
    from fxquant.kernels.attention import triton_cast

    return triton_cast.quantize_qkv(_dense(q), _dense(k), _dense(v), choice.SCALINGS[spec], scale, amaxes)


@operator(reference=CastKernel.FUSED, traits=Traits(reads_values=3, recording=quantize_qkv_into))
def quantize_qkv(
    q: Tensor, k: Tensor, v: Tensor, spec: str, scale: Tensor | None = None, record: bool = False
) -> list[Tensor]:
    """`quantize_heads` of q, k and v; to `record`, the largest of their amaxes [1] comes behind their parts."""
    parts = [part for x, g, turned in _sides(q, k, v) for part in quantize_heads.meaning(x, spec, g, turned, scale)]
    return [*parts, reduce(torch.maximum, map(amax, (q, k, v)))] if record else parts


@quantize_qkv.fake
def _quantize_qkv_fake(
    q: Tensor, k: Tensor, v: Tensor, spec: str, scale: Tensor | None = None, record: bool = False
) -> list[Tensor]:
    parts = [part for x, g, turned in _sides(q, k, v) for part in _quantize_heads_fake(x, spec, g, turned)]
    return [*parts, q.new_empty([1], dtype=torch.float32)] if record else parts


quantize_qkv.facts(_facts_of_qkv)


@quantize_qkv.implementation(CastKernel.TRITON, when=choice.casts)
def _triton_quantize_qkv(
    q: Tensor, k: Tensor, v: Tensor, spec: str, scale: Tensor | None = None, record: bool = False
) -> list[Tensor]:
    amax = torch.zeros(1, device=q.device) if record else None
    parts = _triton_quantize_qkv_into(q, k, v, spec, scale, amax)
    return parts if amax is None else [*parts, amax]


@operator()
def dequantize_heads(
    parts: Parts, spec: str, groups: int, transposed: bool, size: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """The values of a tensor of heads whose last axes are `size`."""
    return reference.dequantize_heads(parts, QuantSpec.parse(spec), groups, transposed, size).to(dtype).contiguous()


@operator()
def transpose_codes(codes: Tensor, alignment: int) -> Tensor:
    """The bytes [M, K] of a payload as [K, Mp], M padded with zeros to a multiple of `alignment`."""
    rows = codes.shape[-2]
    padding = (rows + alignment - 1) // alignment * alignment - rows
    turned = codes.mT if statically_known_true(padding == 0) else torch.nn.functional.pad(codes.mT, (0, padding))
    return turned.contiguous()


@operator(mutates=["amaxes"], reference=AttentionKernel.REFERENCE)
def attention_forward_into(
    q: Parts, k: Parts, v: Parts, extras: Parts, seed: Tensor | None, s_scale: Tensor | None, spec: str, width: int,
    dtype: torch.dtype, amaxes: Tensor,
) -> list[Tensor]:  # fmt: skip
    """[o, lse]; the amax of the softmax goes into the state."""
    *results, largest = attention_forward.meaning(q, k, v, extras, seed, s_scale, spec, width, dtype)
    delayed.take(amaxes, largest)
    return results


@attention_forward_into.fake
def _forward_into_fake(*args: Any) -> list[Tensor]:
    return _forward_fake(*args[:-1])[:2]


@operator(reference=AttentionKernel.REFERENCE, traits=Traits(recording=attention_forward_into))
def attention_forward(
    q: Parts, k: Parts, v: Parts, extras: Parts, seed: Tensor | None, s_scale: Tensor | None, spec: str, width: int,
    dtype: torch.dtype,
) -> list[Tensor]:  # fmt: skip
    """[o, lse, amax of the softmax, which only a delayed scale asks for]."""
    parsed = AttentionSpec.parse(spec)
    return [t.contiguous() for t in reference.forward(q, k, v, extras, seed, s_scale, parsed, width, dtype)]


@attention_forward.fake
def _forward_fake(
    q: Parts, k: Parts, v: Parts, extras: Parts, seed: object, s_scale: object, spec: str, width: int,
    dtype: torch.dtype,
) -> list[Tensor]:  # fmt: skip
    *outer, _ = q[0].shape
    features = reference.features_of(v, AttentionSpec.parse(spec))
    o, lse = q[0].new_empty([*outer, features], dtype=dtype), q[0].new_empty(outer, dtype=torch.float32)
    return [o, lse, q[0].new_empty([1], dtype=torch.float32)]


@operator(reference=AttentionKernel.REFERENCE, traits=Traits(reads_values=1))
def attention_backward(
    do: Tensor, q: Parts, k: Parts, v: Parts, o: Tensor, lse: Tensor, extras: Parts, seed: Tensor | None,
    s_scale: Tensor | None, do_scale: Tensor | None, dp_scale: Tensor | None, wanted: Sequence[int], spec: str,
    width: int,
) -> list[Tensor]:  # fmt: skip
    """[dq, dk, dv, amaxes of do and the scores' gradient, the gradients of the `wanted` extras].

    Only the amaxes that a delayed scale asks for have a meaning.
    """
    scales, parsed = (s_scale, do_scale, dp_scale), AttentionSpec.parse(spec)
    results = reference.backward(do, q, k, v, o, lse, extras, seed, scales, wanted, parsed, width)
    return [t.contiguous() for t in results]


@attention_backward.fake
def _backward_fake(
    do: Tensor, q: Parts, k: Parts, v: Parts, o: object, lse: object, extras: Parts, seed: object, s_scale: object,
    do_scale: object, dp_scale: object, wanted: Sequence[int], spec: str, width: int,
) -> list[Tensor]:  # fmt: skip
    (*of_q, _), (*of_k, _) = q[0].shape, k[0].shape
    shapes = ([*of_q, width], [*of_k, width], [*of_k, reference.features_of(v, AttentionSpec.parse(spec))])
    grads = [do.new_empty(shape) for shape in shapes]
    amaxes = [do.new_empty([1], dtype=torch.float32) for _ in range(2)]
    return [*grads, *amaxes, *(extras[i].new_empty(extras[i].shape) for i in wanted)]


def _facts_of_forward(q: Parts, k: Parts, v: Parts, *more: Any) -> AttentionFacts:
    _, _, _, spec, width, dtype, *_ = more
    return AttentionFacts.of(q, k, v, spec, width, dtype)


@attention_backward.facts
def _facts_of_backward(do: Tensor, q: Parts, k: Parts, v: Parts, *more: Any) -> AttentionFacts:
    *_, wanted, spec, width = more
    return AttentionFacts.of(q, k, v, spec, width, do.dtype, bool(wanted))


def _launch_forward(kernel: AttentionKernel, *args: Any) -> list[Tensor]:
    from fxquant.kernels.attention import cuda

    return cuda.attention_forward(kernel, *args)


def _launch_backward(kernel: AttentionKernel, *args: Any) -> list[Tensor]:
    from fxquant.kernels.attention import cuda

    return cuda.attention_backward(kernel, *args)


for _kernel in AttentionKernel:
    if _kernel is not AttentionKernel.REFERENCE:
        for _called in (attention_forward, attention_forward_into):
            _called.facts(_facts_of_forward)
            _called.implementation(_kernel, when=partial(choice.forward, _kernel))(partial(_launch_forward, _kernel))
        attention_backward.implementation(_kernel, when=partial(choice.backward, _kernel))(
            partial(_launch_backward, _kernel)
        )
