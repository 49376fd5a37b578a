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
from fxquant.formats import AttentionSpec, QuantSpec
from fxquant.kernels import switched
from fxquant.kernels.attention.chosen import ChosenAttention
from fxquant.kernels.attention.ops import (
    attention_backward,
    attention_forward,
    dequantize_heads,
    quantize_heads,
    quantize_qkv,
)
from fxquant.kernels.cast.ops import amax
from fxquant.kernels.operator import TRACED, Traits, operator
from fxquant.kernels.probe.observer import AttentionObserver
from fxquant.kernels.probe.plan import Plan
from fxquant.kernels.state.step import STATELESS, StepState


def _shared(spec: QuantSpec) -> QuantSpec:
    """The spec without the place of its scale, so that all layers share one lowering."""
    return replace(spec, slot=-1)


def _quantize(x: Tensor, spec: QuantSpec, groups: int, transposed: bool, state: StepState) -> list[Tensor]:
    if spec.is_identity:
        return [x]
    return quantize_heads(x, str(_shared(spec)), groups, transposed, state.of(spec))


def _dequantize(parts: Sequence[Tensor], spec: QuantSpec, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    return dequantize_heads(parts, str(_shared(spec)), 1, False, size, dtype)


class _Attention(torch.autograd.Function):
    """q [*batch, Hq, Sq, D], k [*batch, Hkv, Sk, D], v [*batch, Hkv, Sk, Dv], all of one dtype."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, seed: Tensor | None, spec_text: str, state: StepState,
        observer: AttentionObserver | None, *extras: Tensor,
    ) -> Tensor:  # fmt: skip
        spec = AttentionSpec.parse(spec_text)
        if spec.qkv.is_identity:
            parts = [q], [k], [v]
        else:
            record = state.records_forward(spec.qkv)
            quantized = quantize_qkv(q, k, v, str(_shared(spec.qkv)), state.of(spec.qkv), record)
            parts = quantized[:2], quantized[2:4], quantized[4:6]
            state.record_forward(spec.qkv, lambda: quantized[6])
        core = str(replace(spec.each(_shared), autocast="", name=""))
        if observer is not None:
            tensors = {"q": q, "k": k, "v": v}
            observer.add_forward(tensors, dict(zip(tensors, parts, strict=True)), extras, state.of(spec.s), core)
        o, lse, s_amax = attention_forward(*parts, extras, seed, state.of(spec.s), core, q.shape[-1], q.dtype)
        state.record_forward(spec.s, lambda: s_amax)
        kept_o = [o]
        if not spec.o.is_identity:
            state.record_forward(spec.o, amax, o)
            kept_o = _quantize(o, spec.o, 1, False, state)
            o = _dequantize(kept_o, spec.o, o.shape[-2:], q.dtype)
        kept = [*parts, [lse], kept_o, extras, [] if seed is None else [seed]]
        ctx.save_for_backward(*itertools.chain(*kept))
        ctx.spec, ctx.core, ctx.state, ctx.width, ctx.lengths = spec, core, state, q.shape[-1], list(map(len, kept))
        ctx.observer = observer
        return o

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (do,) = grads
        spec: AttentionSpec = ctx.spec
        state: StepState = ctx.state
        saved = iter(ctx.saved_tensors)
        q, k, v, (lse,), kept_o, extras, seed = (list(itertools.islice(saved, length)) for length in ctx.lengths)
        if ctx.observer is not None:
            ctx.observer.add_backward(do, _shared(spec.do).shown(), state.of(spec.do))
        o = kept_o[0] if spec.o.is_identity else _dequantize(kept_o, spec.o, do.shape[-2:], do.dtype)
        wanted = [i for i in range(len(extras)) if ctx.needs_input_grad[7 + i]]
        dq, dk, dv, do_amax, dp_amax, *of_extras = attention_backward(
            do, q, k, v, o, lse, extras, seed[0] if seed else None, state.of(spec.s), state.of(spec.do),
            state.of(spec.dp), wanted, ctx.core, ctx.width,
        )  # fmt: skip
        state.record_backward(spec.do, lambda: do_amax)
        state.record_backward(spec.dp, lambda: dp_amax)
        results, of_grad = [], spec.dqkv.shown()
        for grad in (dq, dk, dv):
            state.record_backward(spec.dqkv, amax, grad)
            if not spec.dqkv.is_identity:
                grad = _dequantize(_quantize(grad, of_grad, 1, False, state), of_grad, grad.shape[-2:], grad.dtype)
            results.append(grad)
        by_extra = dict(zip(wanted, of_extras, strict=True))
        return (*results, None, None, None, None, *(by_extra.get(i) for i in range(len(extras))))


def _attention(
    q: Tensor, k: Tensor, v: Tensor, extras: Sequence[Tensor], spec: str, state: StepState,
    observer: AttentionObserver | None = None,
) -> Tensor:  # fmt: skip
    parsed = AttentionSpec.parse(spec)
    if parsed.autocast:
        q, k, v = (x.to(getattr(torch, parsed.autocast)) for x in (q, k, v))
    graph = switched.traced_graph()
    with no_autocast(q.device):
        if graph is not None:
            return ChosenAttention.apply(q, k, v, spec, graph, state, *extras)  # type: ignore[no-any-return,no-untyped-call]
        seed = torch.randint_like(q.new_empty(1, dtype=torch.int64), 2**62) if parsed.dropout else None
        return _Attention.apply(q, k, v, seed, spec, state, observer, *extras)  # type: ignore[no-any-return,no-untyped-call]


@operator(key=TRACED, mutates=["forward_amax", "backward_amax", "probe_forward", "probe_backward"])
def attention_stateful(
    q: Tensor, k: Tensor, v: Tensor, extras: Sequence[Tensor], scale: Tensor | None, forward_amax: Tensor | None,
    backward_amax: Tensor | None, step: Tensor | None, random: Tensor | None, spec: str,
    probe_forward: Tensor | None = None, probe_backward: Tensor | None = None, probe: str = "",
) -> Tensor:  # fmt: skip
    """`attention` with tensors whose specs name slots of the `StepState`.

    `probe` says what is measured of the operands, and added to the two tensors before it.
    """
    state, observer = StepState(scale, forward_amax, backward_amax, step, random), None
    if probe_forward is not None and probe_backward is not None:
        observer = AttentionObserver(Plan.parse(probe), probe_forward, probe_backward)
    return _attention(q, k, v, extras, spec, state, observer)


@operator(key=TRACED, traits=Traits(stateful=attention_stateful))
def attention(q: Tensor, k: Tensor, v: Tensor, extras: Sequence[Tensor], spec: str) -> Tensor:
    """q [*batch, Hq, Sq, D], k [*batch, Hkv, Sk, D], v [*batch, Hkv, Sk, Dv] give [*batch, Hq, Sq, Dv].

    `extras` are the tensors that the steps of `spec`, the text of an `AttentionSpec`, speak of; each broadcasts
    against the scores [*batch, Hq, Sq, Sk]. The autocast dtype of the spec is applied here.
    """
    return _attention(q, k, v, extras, spec, STATELESS)
