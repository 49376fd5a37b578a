"""The statistics of what a quantized attention multiplies: q, k, v, rows of its softmax, and its output's gradient.

Layouts are those of `fxquant.kernels.attention.reference`. The softmax lies in no memory: of every head some rows are
computed again, of the quantized q and k, as the forward does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fxquant.compat.values import statically_known_true
from fxquant.formats import AttentionSpec, OperandSpec, QuantSpec, Step
from fxquant.kernels.attention import reference as attention
from fxquant.kernels.cast import reference as cast
from fxquant.kernels.cast.ops import quantize_operand
from fxquant.kernels.probe.reference import SAMPLE, Compared, compared, elements, factors, measured
from fxquant.kernels.state.step import StepState

_AS_A_WHOLE = ("per_tensor", "per_head", "per_head_128")
"""The families under which a softmax, whose largest number is known, has one scale."""


def statistics(
    x: Tensor, parts: Sequence[Tensor], spec: QuantSpec, heads: int, transposed: bool, groups: Sequence[str]
) -> Tensor:  # fmt: skip
    """The vector [COLUMNS] of x [*, H, S, D] beside its quantized form; `heads` of it share a scale."""
    x = x.float()
    original = x.mT if transposed else x
    if spec.is_identity:
        return measured(Compared(original, original, original, None, None, exact=True), None, groups)
    row = spec.row
    assert row.element is not None
    q = attention.dequantize_heads(parts, spec, heads, transposed, x.shape[-2:])
    data = attention.key_order(parts[0], back=True) if transposed else parts[0]
    code = elements(data, row.element).narrow(-1, 0, original.shape[-1])
    seen = Compared(original, original, q.mT if transposed else q, code, row)
    return measured(seen, factors(parts, spec, row), groups)


def softmax_statistics(
    q: Sequence[Tensor], k: Sequence[Tensor], extras: Sequence[Tensor], scale: Tensor | None, spec: AttentionSpec,
    width: int, tried: OperandSpec | None, groups: Sequence[str],
) -> Tensor:  # fmt: skip
    """The vector [COLUMNS] of every n-th row of the softmax, `SAMPLE` of a head at most, as its product reads it.

    Without a delayed `scale` that is exp(x - max). `tried` is a format in the place of that of `spec`.
    """
    weights, total, valid = sampled_softmax(q, k, extras, spec, width)
    x = torch.where(valid, weights if scale is None else weights / total, 0.0)
    counted = valid.expand(*x.shape[:-1], 1)
    if tried is not None and tried.rowwise.row.family not in _AS_A_WHOLE:
        random = torch.zeros(2, dtype=torch.int64, device=x.device) if tried.is_stochastic else None
        parts, side = quantize_operand(x, tried, "rowwise", StepState(random=random))
        seen = compared(x, parts, side)
        return measured(replace(seen, valid=counted), factors(parts, side, seen.row), groups)
    used = spec.s if tried is None else tried.rowwise
    if scale is None and used.row.family in attention.UNQUANTIZED_SOFTMAX:
        return measured(Compared(x, x, x, None, None, counted, exact=True), None, groups)
    row = used.row
    assert row.element is not None
    multiplier = attention.unit_multiplier(x, used) if scale is None or tried is not None else scale
    code = cast.cast_fp8(cast.times_given(x, multiplier, used), row.element).float()
    factor = cast.reciprocal(multiplier)
    return measured(Compared(x, x, code * factor, code, row, counted), factor.flatten().narrow(0, 0, 1), groups)


def sampled_softmax(
    q: Sequence[Tensor], k: Sequence[Tensor], extras: Sequence[Tensor], spec: AttentionSpec, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """exp(x - max) and its sums for every n-th query, the last again behind it, and which are new: [SAMPLE, 1]."""
    rows, keys = q[0].shape[-2], k[0].shape[-2]
    apart = (rows + SAMPLE - 1) // SAMPLE
    places = torch.arange(SAMPLE, device=q[0].device) * apart
    chosen, valid = places.clamp(max=rows - 1), (places < rows).unsqueeze(-1)
    together = attention.heads_of(q[0]) // attention.heads_of(k[0])
    queries = attention.dequantize_heads(q, spec.qkv, together, False, (rows, width))
    of_keys = attention.repeated(attention.dequantize_heads(k, spec.qkv, 1, False, (keys, width)), together, -3)
    taken = [e if e.ndim < 2 or statically_known_true(e.shape[-2] == 1) else e.index_select(-2, chosen) for e in extras]
    causal = chosen.unsqueeze(-1) >= torch.arange(keys, device=q[0].device)
    steps = [Step("keep", extra=len(taken)) if step.kind == "causal" else step for step in spec.steps]
    x, _ = attention.scores(
        queries.index_select(-2, chosen), of_keys, replace(spec, steps=tuple(steps)), [*taken, causal]
    )
    weights, total, _ = attention.softmax(x, spec, extras)
    return weights, total, valid
