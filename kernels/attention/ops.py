"""The operators of quantized attention: schemas, fake kernels, and their meaning on any device.

A quantized operand is [payload, scale] as `fxquant.kernels.attention.reference.quantize_heads` lays it out; v is
`transposed`. `width` is D before it was padded. Specs cross as the text of a `QuantSpec` or an `AttentionSpec`.
`quantize_qkv` can `record` the largest of the amaxes of its operands, [1], behind their parts. What ends in `_into`
takes its amax into `amaxes`, one entry of the state of delayed scaling, and does not return it.
`transpose_codes` gives the bytes [M, K] of a payload as [K, Mp], M padded with zeros to a multiple of `alignment`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fxquant.compat.private import fake_kernel, operator_library
from fxquant.compat.values import statically_known_true
from fxquant.formats import AttentionSpec, QuantSpec
from fxquant.kernels.attention import reference
from fxquant.kernels.cast.reference import amax
from fxquant.kernels.state import reference as delayed

_library = operator_library("fxquant", more=True)

_SCHEMAS = {
    "quantize_heads": "(Tensor x, str spec, SymInt groups, bool transposed, Tensor? scale=None) -> Tensor[]",
    "quantize_qkv": ("(Tensor q, Tensor k, Tensor v, str spec, Tensor? scale=None, bool record=False) -> Tensor[]"),
    "quantize_qkv_into": ("(Tensor q, Tensor k, Tensor v, str spec, Tensor scale, Tensor(a!) amaxes) -> Tensor[]"),
    "dequantize_heads": (
        "(Tensor[] parts, str spec, SymInt groups, bool transposed, SymInt[] size, ScalarType dtype) -> Tensor"
    ),
    "transpose_codes": "(Tensor codes, SymInt alignment) -> Tensor",
    "attention_forward": (
        "(Tensor[] q, Tensor[] k, Tensor[] v, Tensor[] extras, Tensor? seed, Tensor? s_scale, str spec,"
        " SymInt width, ScalarType dtype) -> Tensor[]"
    ),
    "attention_forward_into": (
        "(Tensor[] q, Tensor[] k, Tensor[] v, Tensor[] extras, Tensor? seed, Tensor? s_scale, str spec,"
        " SymInt width, ScalarType dtype, Tensor(a!) amaxes) -> Tensor[]"
    ),
    "attention_backward": (
        "(Tensor do, Tensor[] q, Tensor[] k, Tensor[] v, Tensor o, Tensor lse, Tensor[] extras, Tensor? seed,"
        " Tensor? s_scale, Tensor? do_scale, Tensor? dp_scale, int[] wanted, str spec, SymInt width) -> Tensor[]"
    ),
}
for _name, _schema in _SCHEMAS.items():
    _library.define(_name + _schema, tags=torch.Tag.pt2_compliant_tag)


def _quantize_heads(x: Tensor, spec: str, groups: int, transposed: bool, scale: Tensor | None = None) -> list[Tensor]:
    parts = reference.quantize_heads(x, QuantSpec.parse(spec), groups, transposed, scale)
    return [part.contiguous() for part in parts]


def _quantize_qkv(
    q: Tensor, k: Tensor, v: Tensor, spec: str, scale: Tensor | None = None, record: bool = False
) -> list[Tensor]:
    groups = reference.heads_of(q) // reference.heads_of(k)
    sides = ((q, groups, False), (k, 1, False), (v, 1, True))
    parts = [part for x, g, transposed in sides for part in _quantize_heads(x, spec, g, transposed, scale)]
    return [*parts, functools.reduce(torch.maximum, map(amax, (q, k, v)))] if record else parts


def _quantize_qkv_into(q: Tensor, k: Tensor, v: Tensor, spec: str, scale: Tensor, amaxes: Tensor) -> list[Tensor]:
    *parts, largest = _quantize_qkv(q, k, v, spec, scale, True)
    delayed.take(amaxes, largest)
    return parts


def _dequantize_heads(
    parts: Sequence[Tensor], spec: str, groups: int, transposed: bool, size: Sequence[int], dtype: torch.dtype
) -> Tensor:
    return reference.dequantize_heads(parts, QuantSpec.parse(spec), groups, transposed, size).to(dtype).contiguous()


def _transpose_codes(codes: Tensor, alignment: int) -> Tensor:
    rows = codes.shape[-2]
    padding = (rows + alignment - 1) // alignment * alignment - rows
    turned = codes.mT if statically_known_true(padding == 0) else torch.nn.functional.pad(codes.mT, (0, padding))
    return turned.contiguous()


def _forward(
    q: Sequence[Tensor], k: Sequence[Tensor], v: Sequence[Tensor], extras: Sequence[Tensor], seed: Tensor | None,
    s_scale: Tensor | None, spec: str, width: int, dtype: torch.dtype,
) -> list[Tensor]:  # fmt: skip
    parsed = AttentionSpec.parse(spec)
    return [t.contiguous() for t in reference.forward(q, k, v, extras, seed, s_scale, parsed, width, dtype)]


def _forward_into(
    q: Sequence[Tensor], k: Sequence[Tensor], v: Sequence[Tensor], extras: Sequence[Tensor], seed: Tensor | None,
    s_scale: Tensor | None, spec: str, width: int, dtype: torch.dtype, amaxes: Tensor,
) -> list[Tensor]:  # fmt: skip
    o, lse, largest = _forward(q, k, v, extras, seed, s_scale, spec, width, dtype)
    delayed.take(amaxes, largest)
    return [o, lse]


def _backward(
    do: Tensor, q: Sequence[Tensor], k: Sequence[Tensor], v: Sequence[Tensor], o: Tensor, lse: Tensor,
    extras: Sequence[Tensor], seed: Tensor | None, s_scale: Tensor | None, do_scale: Tensor | None,
    dp_scale: Tensor | None, wanted: Sequence[int], spec: str, width: int,
) -> list[Tensor]:  # fmt: skip
    scales, parsed = (s_scale, do_scale, dp_scale), AttentionSpec.parse(spec)
    results = reference.backward(do, q, k, v, o, lse, extras, seed, scales, wanted, parsed, width)
    return [t.contiguous() for t in results]


IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "quantize_heads": _quantize_heads,
    "quantize_qkv": _quantize_qkv,
    "quantize_qkv_into": _quantize_qkv_into,
    "dequantize_heads": _dequantize_heads,
    "transpose_codes": _transpose_codes,
    "attention_forward": _forward,
    "attention_forward_into": _forward_into,
    "attention_backward": _backward,
}
"""The meaning of each operator in plain torch, by name."""

for _name, _kernel in IMPLEMENTATIONS.items():
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")


@fake_kernel(_library, "quantize_heads")
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


@fake_kernel(_library, "quantize_qkv")
def _quantize_qkv_fake(
    q: Tensor, k: Tensor, v: Tensor, spec: str, scale: Tensor | None = None, record: bool = False
) -> list[Tensor]:
    groups = reference.heads_of(q) // reference.heads_of(k)
    sides = ((q, groups, False), (k, 1, False), (v, 1, True))
    parts = [part for x, g, transposed in sides for part in _quantize_heads_fake(x, spec, g, transposed)]
    return [*parts, q.new_empty([1], dtype=torch.float32)] if record else parts


@fake_kernel(_library, "quantize_qkv_into")
def _quantize_qkv_into_fake(q: Tensor, k: Tensor, v: Tensor, spec: str, scale: Tensor, amaxes: Tensor) -> list[Tensor]:
    return _quantize_qkv_fake(q, k, v, spec)


@fake_kernel(_library, "dequantize_heads")
def _dequantize_heads_fake(
    parts: Sequence[Tensor], spec: str, groups: int, transposed: bool, size: Sequence[int], dtype: torch.dtype
) -> Tensor:
    return parts[0].new_empty([*parts[0].shape[:-2], *size], dtype=dtype)


@fake_kernel(_library, "transpose_codes")
def _transpose_codes_fake(codes: Tensor, alignment: int) -> Tensor:
    *batch, rows, columns = codes.shape
    return codes.new_empty([*batch, columns, (rows + alignment - 1) // alignment * alignment])


@fake_kernel(_library, "attention_forward")
def _forward_fake(
    q: Sequence[Tensor], k: Sequence[Tensor], v: Sequence[Tensor], extras: Sequence[Tensor], seed: Tensor | None,
    s_scale: Tensor | None, spec: str, width: int, dtype: torch.dtype,
) -> list[Tensor]:  # fmt: skip
    *outer, _ = q[0].shape
    features = reference.features_of(v, AttentionSpec.parse(spec))
    o, lse = q[0].new_empty([*outer, features], dtype=dtype), q[0].new_empty(outer, dtype=torch.float32)
    return [o, lse, q[0].new_empty([1], dtype=torch.float32)]


@fake_kernel(_library, "attention_forward_into")
def _forward_into_fake(
    q: Sequence[Tensor], k: Sequence[Tensor], v: Sequence[Tensor], extras: Sequence[Tensor], seed: Tensor | None,
    s_scale: Tensor | None, spec: str, width: int, dtype: torch.dtype, amaxes: Tensor,
) -> list[Tensor]:  # fmt: skip
    return _forward_fake(q, k, v, extras, seed, s_scale, spec, width, dtype)[:2]


@fake_kernel(_library, "attention_backward")
def _backward_fake(
    do: Tensor, q: Sequence[Tensor], k: Sequence[Tensor], v: Sequence[Tensor], o: Tensor, lse: Tensor,
    extras: Sequence[Tensor], seed: Tensor | None, s_scale: Tensor | None, do_scale: Tensor | None,
    dp_scale: Tensor | None, wanted: Sequence[int], spec: str, width: int,
) -> list[Tensor]:  # fmt: skip
    (*of_q, _), (*of_k, _) = q[0].shape, k[0].shape
    shapes = ([*of_q, width], [*of_k, width], [*of_k, reference.features_of(v, AttentionSpec.parse(spec))])
    grads = [do.new_empty(shape) for shape in shapes]
    amaxes = [do.new_empty([1], dtype=torch.float32) for _ in range(2)]
    return [*grads, *amaxes, *(extras[i].new_empty(extras[i].shape) for i in wanted)]
