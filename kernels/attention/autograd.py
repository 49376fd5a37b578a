"""`fxquant::attention`: softmax(steps(q k^T)) v with every tensor quantized as its spec says, forward and backward.

As `fxquant::linear` it is CompositeImplicitAutograd: AOTAutograd traces through it to `fxquant::quantize_qkv`,
`::attention_forward` and `::attention_backward`. What is kept for the backward is q, k and v as they were quantized,
the output and the log-sum-exp of the scores.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fxquant.compat.device import no_autocast
from fxquant.compat.private import operator_library
from fxquant.formats import AttentionSpec, QuantSpec
from fxquant.kernels.attention import ops as attention_ops
from fxquant.kernels.cast.ops import amax
from fxquant.kernels.state.step import STATELESS, StepState

_library = operator_library("fxquant", more=True)

_ops = torch.ops.fxquant


def _shared(spec: QuantSpec) -> QuantSpec:
    """The spec without the place of its scale, so that all layers share one lowering."""
    return replace(spec, slot=-1)


def _quantize(x: Tensor, spec: QuantSpec, groups: int, transposed: bool, state: StepState) -> list[Tensor]:
    if spec.is_identity:
        return [x]
    return _ops.quantize_heads(  # type: ignore[no-any-return]
        x, str(_shared(spec)), groups, transposed, state.of(spec)
    )


def _dequantize(parts: Sequence[Tensor], spec: QuantSpec, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    return _ops.dequantize_heads(parts, str(_shared(spec)), 1, False, size, dtype)  # type: ignore[no-any-return]


class _Attention(torch.autograd.Function):
    """q [*batch, Hq, Sq, D], k [*batch, Hkv, Sk, D], v [*batch, Hkv, Sk, Dv], all of one dtype."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, seed: Tensor | None, spec_text: str, state: StepState,
        *extras: Tensor,
    ) -> Tensor:  # fmt: skip
        spec = AttentionSpec.parse(spec_text)
        if spec.qkv.is_identity:
            parts = [[q], [k], [v]]
        else:
            record = state.records_forward(spec.qkv)
            made = _ops.quantize_qkv(q, k, v, str(_shared(spec.qkv)), state.of(spec.qkv), record)
            parts = [made[:2], made[2:4], made[4:6]]
            state.record_forward(spec.qkv, lambda: made[6])
        core = str(replace(spec.each(_shared), autocast="", name=""))
        o, lse, s_amax = _ops.attention_forward(
            *parts, extras, seed, state.of(spec.s), core, q.shape[-1], q.dtype
        )  # fmt: skip
        state.record_forward(spec.s, lambda: s_amax)
        kept_o = [o]
        if not spec.o.is_identity:
            state.record_forward(spec.o, amax, o)
            kept_o = _quantize(o, spec.o, 1, False, state)
            o = _dequantize(kept_o, spec.o, o.shape[-2:], q.dtype)
        kept = [*parts, [lse], kept_o, extras, [] if seed is None else [seed]]
        ctx.save_for_backward(*(tensor for each in kept for tensor in each))
        ctx.spec, ctx.core, ctx.state, ctx.width, ctx.lengths = spec, core, state, q.shape[-1], list(map(len, kept))
        return o  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (do,) = grads
        spec: AttentionSpec = ctx.spec
        state: StepState = ctx.state
        saved = iter(ctx.saved_tensors)
        q, k, v, (lse,), kept_o, extras, seed = (list(itertools.islice(saved, length)) for length in ctx.lengths)
        o = kept_o[0] if spec.o.is_identity else _dequantize(kept_o, spec.o, do.shape[-2:], do.dtype)
        wanted = [i for i in range(len(extras)) if ctx.needs_input_grad[6 + i]]
        dq, dk, dv, do_amax, dp_amax, *of_extras = _ops.attention_backward(
            do, q, k, v, o, lse, extras, seed[0] if seed else None, state.of(spec.s), state.of(spec.do),
            state.of(spec.dp), wanted, ctx.core, ctx.width,
        )  # fmt: skip
        state.record_backward(spec.do, lambda: do_amax)
        state.record_backward(spec.dp, lambda: dp_amax)
        results = []
        for grad in (dq, dk, dv):
            state.record_backward(spec.dqkv, amax, grad)
            if not spec.dqkv.is_identity:
                grad = _dequantize(_quantize(grad, spec.dqkv, 1, False, state), spec.dqkv, grad.shape[-2:], grad.dtype)
            results.append(grad)
        by_extra = dict(zip(wanted, of_extras, strict=True))
        return (*results, None, None, None, *(by_extra.get(i) for i in range(len(extras))))


def _attention(q: Tensor, k: Tensor, v: Tensor, extras: Sequence[Tensor], spec: str, state: StepState) -> Tensor:
    parsed = AttentionSpec.parse(spec)
    if parsed.autocast:
        q, k, v = (x.to(getattr(torch, parsed.autocast)) for x in (q, k, v))
    with no_autocast(q.device):
        seed = torch.randint_like(q.new_empty(1, dtype=torch.int64), 2**62) if parsed.dropout else None
        return _Attention.apply(q, k, v, seed, spec, state, *extras)  # type: ignore[no-any-return,no-untyped-call]


def attention(q: Tensor, k: Tensor, v: Tensor, extras: Sequence[Tensor], spec: str) -> Tensor:
    """q [*batch, Hq, Sq, D], k [*batch, Hkv, Sk, D], v [*batch, Hkv, Sk, Dv] give [*batch, Hq, Sq, Dv].

    `extras` are the tensors that the steps of `spec`, the text of an `AttentionSpec`, speak of; each broadcasts
    against the scores [*batch, Hq, Sq, Sk]. The autocast dtype of the spec is applied here.
    """
    return _attention(q, k, v, extras, spec, STATELESS)


def attention_stateful(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extras: Sequence[Tensor],
    scale: Tensor | None,
    forward_amax: Tensor | None,
    backward_amax: Tensor | None,
    step: Tensor | None,
    random: Tensor | None,
    spec: str,
) -> Tensor:
    """`attention` with tensors whose specs name slots of the `StepState`."""
    return _attention(q, k, v, extras, spec, StepState(scale, forward_amax, backward_amax, step, random))


_SCHEMAS = {
    "attention": (attention, "(Tensor q, Tensor k, Tensor v, Tensor[] extras, str spec) -> Tensor"),
    "attention_stateful": (
        attention_stateful,
        "(Tensor q, Tensor k, Tensor v, Tensor[] extras, Tensor? scale, Tensor(a!)? forward_amax,"
        " Tensor(b!)? backward_amax, Tensor? step, Tensor? random, str spec) -> Tensor",
    ),
}
for _name, (_kernel, _schema) in _SCHEMAS.items():
    _library.define(_name + _schema, tags=torch.Tag.pt2_compliant_tag)
    _library.impl(_name, _kernel, "CompositeImplicitAutograd")

__all__ = ["attention", "attention_ops", "attention_stateful"]
