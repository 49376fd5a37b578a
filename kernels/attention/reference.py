"""The meaning of quantized attention in plain torch operations: forward and backward, on any device.

q is [*batch, Hq, Sq, D], k and v [*batch, Hkv, Sk, D] (v may have another D), and Hq a multiple of Hkv: consecutive
query heads share a key head, and their scale. Operands are dequantized to float32, which holds every product of two
8-bit elements exactly; products, sums, softmax and gradients are float32, rounded once to the output's dtype. Rows
with nothing to attend to are zero and get no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fxquant.compat.values import statically_known_true
from fxquant.formats import AttentionSpec, QuantSpec
from fxquant.kernels.cast import philox, reference

UNQUANTIZED_SOFTMAX = ("identity", "mxfp8")
"""Families under which `s` and `dp` are not quantized. (TransformerEngine's MXFP8 attention.)"""


def quantize_heads(
    x: Tensor, spec: QuantSpec, groups: int, transposed: bool, multiplier: Tensor | None = None
) -> list[Tensor]:
    """Quantizes x [*batch, H, S, D]; returns [payload, scale], the scale what dequantization multiplies by.

    The payload is [*batch, H, S, Dp], `transposed` [*batch, H, D, Sp] with keys in `key_order`, the last axis padded
    with zeros to the format's alignment. `groups` consecutive heads share their scale:

    =============  ==========================================
    per_tensor     float32 [1], by `multiplier` [1] if given
    per_head       float32 [*batch, H/groups]
    per_head_128   float32 [*batch, H/groups, ceil(S/128)]
    mxfp8          uint8 E8M0 codes, along the payload's last axis
    =============  ==========================================

    A per-head scale is 448 / amax, and 1 where the amax is not above 1e-12. (torchao's FP8 attention.)
    """
    x = x.float() if x.dtype == torch.float64 else x
    if spec.row.family != "per_head":
        data, scale = reference.quantize(x.mT if transposed else x, spec, multiplier)
        return [key_order(data) if transposed else data, scale]
    assert spec.row.element is not None
    amax = reference.amax(x, -1)
    block = spec.row.block[0]
    if block:
        amax = torch.unflatten(_pad(amax, block), -1, (-1, block))
    amax = amax.amax(-1)
    heads = amax.ndim - 2 if block else amax.ndim - 1
    if groups > 1:
        amax = torch.unflatten(amax, heads, (-1, groups)).amax(heads + 1)
    multiplier = reference.multiplier_from_amax(torch.where(amax > 1e-12, amax, 0.0), spec)
    y = x.float() * _spread(multiplier, spec, groups, x.shape[-2])
    y = y.mT if transposed else y
    y = _pad(y, spec.row.alignment)
    data = reference.cast_fp8(y, spec.row.element)
    return [key_order(data) if transposed else data, reference.reciprocal(multiplier)]


def key_order(x: Tensor, *, back: bool = False) -> Tensor:
    """x [..., Sp], Sp a multiple of 16, in the order 0 1 8 9, 2 3 10 11, 4 5 12 13, 6 7 14 15 of every 16; or `back`.

    Hopper's FP8 multiplication wants four neighbouring columns of its left operand in a thread, where the product that
    computes them leaves two pairs 8 apart: with the keys of v in this order they are neighbours. (FlashAttention-3,
    section 3.3.)
    """
    return torch.unflatten(x, -1, (-1, 4, 2, 2) if back else (-1, 2, 4, 2)).transpose(-3, -2).flatten(-4)


def dequantize_heads(
    parts: Sequence[Tensor], spec: QuantSpec, groups: int, transposed: bool, size: Sequence[int | torch.SymInt]
) -> Tensor:
    """The float32 values [*batch, H, S, D] (`size` is [S, D]) of what `quantize_heads` gave."""
    if spec.is_identity:
        return parts[0].float()
    data, scale = parts
    data = key_order(data, back=True) if transposed else data
    per_head = spec.row.family == "per_head"
    values = data.float() if per_head else reference.dequantize([data, scale], spec)
    values = values.narrow(-1, 0, size[0 if transposed else 1])  # a slice may be shorter, for all that torch knows
    values = values.mT if transposed else values
    return values * _spread(scale, spec, groups, size[0]) if per_head else values


def _pad(x: Tensor, multiple: int) -> Tensor:
    """Pads the last axis with zeros to a multiple."""
    size = x.shape[-1]
    if statically_known_true(size % multiple == 0):
        return x
    return torch.nn.functional.pad(x, (0, (size + multiple - 1) // multiple * multiple - size))


def _spread(scale: Tensor, spec: QuantSpec, groups: int, length: int | torch.SymInt) -> Tensor:
    """Scales of heads or of their blocks, repeated to broadcast against [*batch, H, S, D]."""
    if spec.row.block[0]:
        scale = repeated(scale, spec.row.block[0], -1).narrow(-1, 0, length)
        return repeated(scale, groups, -2).unsqueeze(-1)
    return (repeated(scale, groups, -1) if groups > 1 else scale).unsqueeze(-1).unsqueeze(-1)


def repeated(x: Tensor, times: int, axis: int) -> Tensor:
    """Every entry of an axis `times` times in a row."""
    if times == 1:
        return x
    axis = axis % x.ndim
    shape = list(x.shape)
    return x.unsqueeze(axis + 1).expand(*shape[: axis + 1], times, *shape[axis + 1 :]).flatten(axis, axis + 1)


@dataclass(frozen=True)
class Operands:
    """q, k and v as float32, k and v with as many heads as q."""

    q: Tensor
    k: Tensor
    v: Tensor
    groups: int

    @classmethod
    def of(
        cls, q: Sequence[Tensor], k: Sequence[Tensor], v: Sequence[Tensor], spec: AttentionSpec, width: int
    ) -> Operands:
        """Takes quantized operands, of which v is transposed; `width` is D."""
        queries, keys, features = q[0].shape[-2], k[0].shape[-2], features_of(v, spec)
        groups = heads_of(q[0]) // heads_of(k[0])
        return cls(
            dequantize_heads(q, spec.qkv, groups, False, (queries, width)),
            repeated(dequantize_heads(k, spec.qkv, 1, False, (keys, width)), groups, -3),
            repeated(dequantize_heads(v, spec.qkv, 1, True, (keys, features)), groups, -3),
            groups,
        )


def features_of(v: Sequence[Tensor], spec: AttentionSpec) -> int:
    """Dv of a quantized v, which is transposed, or of one that is not quantized."""
    return v[0].shape[-1 if spec.qkv.is_identity else -2]


def heads_of(x: Tensor) -> int:
    """The number of heads of [*batch, H, S, D]; 1 where there is no such axis."""
    return x.shape[-3] if x.ndim > 2 else 1


def scores(q: Tensor, k: Tensor, spec: AttentionSpec, extras: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The logits [*batch, H, Sq, Sk] and, for each step, what its gradient needs."""
    x = q @ k.mT
    tape = []
    for step in spec.steps:
        tape.append(x)
        if step.kind == "mul":
            x = x * (step.value if step.extra < 0 else extras[step.extra].float())
        elif step.kind == "tanh":
            x = torch.tanh(x)
            tape[-1] = x
        elif step.kind == "add":
            x = x + (step.value if step.extra < 0 else extras[step.extra].float())
        elif step.kind == "keep":
            x = torch.where(extras[step.extra], x, -math.inf)
        elif step.kind == "fill":
            x = torch.where(extras[step.extra], step.value, x)
        elif step.kind == "causal":
            x = torch.where(causal(x), x, -math.inf)
    return x, tape


def causal(x: Tensor) -> Tensor:
    """Returns True for the keys that a query may see: up to its own position, counted from the start of both."""
    rows = torch.arange(x.shape[-2], device=x.device).unsqueeze(-1)
    return rows >= torch.arange(x.shape[-1], device=x.device)


def kept(seed: Tensor, shape: torch.Size, dropout: float) -> Tensor:
    """Returns True for the weights [*batch, H, Sq, Sk] that survive dropout: a function of seed [1] and place alone."""
    *outer, columns = shape
    rows = 1
    for size in outer:
        rows = rows * size
    seed = seed.reshape(1)
    keys = philox.round_keys((seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF))
    place = torch.arange((columns + 3) // 4, device=seed.device)
    row = torch.arange(rows, device=seed.device).unsqueeze(-1)
    words = torch.stack(philox.philox4x32((place, row, 0, 0), keys), -1).flatten(-2).narrow(-1, 0, columns)
    return (words >= round(dropout * 2**32)).reshape(shape)


def forward(
    q: Sequence[Tensor], k: Sequence[Tensor], v: Sequence[Tensor], extras: Sequence[Tensor], seed: Tensor | None,
    s_scale: Tensor | None, spec: AttentionSpec, width: int, dtype: torch.dtype,
) -> list[Tensor]:  # fmt: skip
    """[o [*batch, Hq, Sq, Dv] in `dtype`, lse [*batch, Hq, Sq] float32 (natural), amax [1] of the softmax].

    Without a delayed scale, `s` is quantized as exp(x - max), of which each row's largest is 1 and the multiplier the
    format's own maximum; a delayed one multiplies the softmax itself. Dropout comes after quantization.
    """
    operands = Operands.of(q, k, v, spec, width)
    x, _ = scores(operands.q, operands.k, spec, extras)
    p, total, lse = softmax(x, spec, extras)
    amax = reference.amax(p / total)
    if s_scale is not None:
        p, total = through(p / total, spec.s, s_scale), torch.ones_like(total)
    elif spec.s.row.family not in UNQUANTIZED_SOFTMAX:
        p = through(p, spec.s, unit_multiplier(p, spec.s))
    if seed is not None:
        p = torch.where(kept(seed, p.shape, spec.dropout), p, 0.0) * (1 / (1 - spec.dropout) if spec.dropout < 1 else 0)
    return [(p @ operands.v / total).to(dtype), lse.squeeze(-1), amax]


def softmax(x: Tensor, spec: AttentionSpec, extras: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """exp(x - max) of logits, its sums over keys and sinks, 1 where these are 0, and the logarithm of sum exp(x)."""
    sinks = [extras[step.extra].float() for step in spec.steps if step.kind == "sink"]
    largest = x.amax(-1, keepdim=True)
    for sink in sinks:
        largest = torch.maximum(largest, sink)
    largest = torch.where(largest == -math.inf, 0.0, largest)
    p = torch.exp(x - largest)
    total = p.sum(-1, keepdim=True)
    for sink in sinks:
        total = total + torch.exp(sink - largest)
    return p, torch.where(total == 0, 1.0, total), largest + torch.log(total)


def unit_multiplier(p: Tensor, spec: QuantSpec) -> Tensor:
    """The multiplier of weights p of which none is above 1, of the same shape but for one column."""
    return reference.multiplier_from_amax(torch.ones_like(p[..., :1]), spec)


def through(x: Tensor, spec: QuantSpec, multiplier: Tensor | None = None) -> Tensor:
    """x quantized and dequantized, in float32: per tensor or head, or by a multiplier that broadcasts against it."""
    if spec.is_identity:
        return x.float()
    if multiplier is not None and spec.row.family != "mxfp8":
        assert spec.row.element is not None
        y = reference.times_given(x, multiplier, spec)
        return reference.cast_fp8(y, spec.row.element).float() * reference.reciprocal(multiplier)
    return dequantize_heads(quantize_heads(x, spec, 1, False), spec, 1, False, x.shape[-2:])


def backward(
    do: Tensor, q: Sequence[Tensor], k: Sequence[Tensor], v: Sequence[Tensor], o: Tensor, lse: Tensor,
    extras: Sequence[Tensor], seed: Tensor | None, scales: Sequence[Tensor | None], wanted: Sequence[int],
    spec: AttentionSpec, width: int,
) -> list[Tensor]:  # fmt: skip
    """[dq, dk, dv in do's dtype, amaxes [1] of do and the scores' gradient, the gradients of the `wanted` extras].

    With `do` quantized all five products are: of the recomputed softmax, whose multiplier is the format's maximum, and
    of the scores' gradient before scale and mask. Else all is float32 of the stored q, k and v. `scales` are the
    delayed ones of s, do and dp.
    """
    operands = Operands.of(q, k, v, spec, width)
    x, tape = scores(operands.q, operands.k, spec, extras)
    lse = lse.unsqueeze(-1)
    p = torch.where(lse == -math.inf, 0.0, torch.exp(x - lse))
    delta = (do.float() * o.float()).sum(-1, keepdim=True)
    s_scale, do_scale, dp_scale = scales
    row = column = do.float()
    weights = p
    if spec.has_fp8_backward:
        row, column = rows_and_columns(do, spec.do, do_scale)
        if spec.s.row.family not in UNQUANTIZED_SOFTMAX:
            weights = through(p, spec.s, unit_multiplier(p, spec.s) if s_scale is None else s_scale)
    dp = row @ operands.v.mT
    if seed is not None:
        keep = kept(seed, p.shape, spec.dropout)
        factor = 1 / (1 - spec.dropout) if spec.dropout < 1 else 0
        weights, dp = torch.where(keep, weights, 0.0) * factor, torch.where(keep, dp, 0.0) * factor
    dv = weights.mT @ column
    g = p * (dp - delta)
    grads: dict[int, Tensor] = {}
    for step, kept_value in zip(reversed(spec.steps), reversed(tape), strict=True):
        if step.kind == "sink":
            column_weight = torch.where(lse == -math.inf, 0.0, torch.exp(extras[step.extra].float() - lse))
            _add(grads, step.extra, -column_weight * delta)
        elif step.kind == "mul":
            if step.extra >= 0:
                _add(grads, step.extra, g * kept_value)
            g = g * (step.value if step.extra < 0 else extras[step.extra].float())
        elif step.kind == "tanh":
            g = g * (1 - kept_value * kept_value)
        elif step.kind == "add" and step.extra >= 0:
            _add(grads, step.extra, g)
        elif step.kind == "keep":
            g = torch.where(extras[step.extra], g, 0.0)
        elif step.kind == "fill":
            g = torch.where(extras[step.extra], 0.0, g)
    amax = reference.amax(g)
    if spec.has_fp8_backward and spec.dp.row.family not in UNQUANTIZED_SOFTMAX:
        g = through(g, spec.dp.shown(), dp_scale)
    dq, dk = g @ operands.k, g.mT @ operands.q
    if operands.groups > 1:
        dk, dv = (torch.unflatten(t, -3, (-1, operands.groups)).sum(-3) for t in (dk, dv))
    results = [t.to(do.dtype) for t in (dq, dk, dv)]
    return [*results, reference.amax(do), amax, *(_sum_to(grads[i], extras[i]) for i in wanted)]


def rows_and_columns(do: Tensor, spec: QuantSpec, multiplier: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """do [*batch, H, S, D] as its two products read it: with MXFP8's blocks along D, and along S."""
    spec = spec.shown()
    row = through(do, spec, multiplier)
    if spec.row.family != "mxfp8":
        return row, row
    return row, dequantize_heads(quantize_heads(do, spec, 1, True), spec, 1, True, do.shape[-2:])


def _add(grads: dict[int, Tensor], extra: int, grad: Tensor) -> None:
    grads[extra] = grads[extra] + grad if extra in grads else grad


def _sum_to(grad: Tensor, x: Tensor) -> Tensor:
    """The sum over whatever x was broadcast along."""
    outer = grad.ndim - x.ndim
    if outer:
        grad = grad.sum(tuple(range(outer)))
    axes = [i for i, size in enumerate(x.shape) if isinstance(size, int) and size == 1]
    return (grad.sum(axes, keepdim=True) if axes else grad).to(x.dtype)
