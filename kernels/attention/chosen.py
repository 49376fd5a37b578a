"""Attention whose quantization is chosen when it runs, so that one compiled graph tries any number of recipes.

What stands around the operators of a quantized attention, the quantization of operands and results, happens inside
those of a chosen one. An attention that is not chosen is torch's own, if it has a scale, a mask or causality and no
more; otherwise it is the meaning of `attention_forward`, in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from fxquant.formats import AttentionSpec, QuantSpec
from fxquant.kernels import switched
from fxquant.kernels.attention import reference
from fxquant.kernels.attention.ops import attention_backward, attention_forward, quantize_qkv
from fxquant.kernels.cast.ops import amax
from fxquant.kernels.operator import Parts, operator
from fxquant.kernels.state.step import StepState


@operator(namespace="fxquant_kernels")
def chosen_attention(
    q: Tensor, k: Tensor, v: Tensor, extras: Parts, scale: Tensor | None, spec: str, graph: int
) -> list[Tensor]:
    """[o, lse, amaxes [1] of q, k and v together, of the softmax, and of o before it is quantized].

    `scale` is that of `StepState`, `graph` the number of the graph. lse is zeros where torch's own attention runs.
    """

    def run(chosen: AttentionSpec) -> list[Tensor]:
        if chosen.qkv.is_identity and _is_torch_s(chosen):
            o = _torch_s(q, k, v, extras, chosen)
            return [o, torch.zeros(o.shape[:-1], device=o.device), *(o.new_zeros(1, dtype=torch.float32),) * 3]
        state = StepState(scale=scale)
        of_q, of_k, of_v = _quantized(q, k, v, chosen, state)
        core, width, s_scale = str(_core(chosen)), q.shape[-1], state.of(chosen.s)
        o, lse, of_s = attention_forward.meaning(of_q, of_k, of_v, extras, None, s_scale, core, width, q.dtype)
        largest = reduce(torch.maximum, map(amax, (q, k, v)))
        return [_through(o, chosen.o, state), lse, largest, of_s, amax(o)]

    return [x.contiguous().clone() for x in switched.running().attend(AttentionSpec.parse(spec), graph, run)]


@chosen_attention.fake
def _chosen_attention_fake(
    q: Tensor, k: Tensor, v: Tensor, extras: Parts, scale: Tensor | None, spec: str, graph: int
) -> list[Tensor]:
    *outer, _ = q.shape
    amaxes = [q.new_empty([1], dtype=torch.float32) for _ in range(3)]
    return [q.new_empty([*outer, v.shape[-1]]), q.new_empty(outer, dtype=torch.float32), *amaxes]


@operator(namespace="fxquant_kernels")
def chosen_attention_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, extras: Parts, scale: Tensor | None,
    wanted: Sequence[int], spec: str, graph: int,
) -> list[Tensor]:  # fmt: skip
    """[dq, dk, dv, amaxes [1] of do, of the scores' gradient and of the first three, the gradients of the extras]."""

    def run(chosen: AttentionSpec) -> list[Tensor]:
        if chosen.qkv.is_identity and _is_torch_s(chosen):
            dq, dk, dv, *of_masks = _grads_of_torch_s(do, (q, k, v), extras, wanted, chosen)
            return [dq, dk, dv, *(do.new_zeros(1, dtype=torch.float32),) * 3, *of_masks]
        state = StepState(scale=scale)
        of_q, of_k, of_v = _quantized(q, k, v, chosen, state)
        s_scale, do_scale, dp_scale = map(state.of, (chosen.s, chosen.do, chosen.dp))
        dq, dk, dv, of_do, of_dp, *of_extras = attention_backward.meaning(
            do, of_q, of_k, of_v, o, lse, extras, None, s_scale, do_scale, dp_scale, wanted, str(_core(chosen)),
            q.shape[-1],
        )  # fmt: skip
        grads = [_through(x, chosen.dqkv.shown(), state) for x in (dq, dk, dv)]
        return [*grads, of_do, of_dp, reduce(torch.maximum, map(amax, (dq, dk, dv))), *of_extras]

    return [x.contiguous().clone() for x in switched.running().attend(AttentionSpec.parse(spec), graph, run)]


@chosen_attention_backward.fake
def _chosen_attention_backward_fake(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, extras: Parts, scale: Tensor | None,
    wanted: Sequence[int], spec: str, graph: int,
) -> list[Tensor]:  # fmt: skip
    grads, amaxes = (do.new_empty(x.shape) for x in (q, k, v)), (do.new_empty([1], dtype=torch.float32) for _ in "abc")
    return [*grads, *amaxes, *(extras[i].new_empty(extras[i].shape) for i in wanted)]


class ChosenAttention(torch.autograd.Function):
    """`fxquant::attention` of a graph that is traced to be chosen later, in the arguments of the quantized one."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, spec_text: str, graph: int, state: StepState, *extras: Tensor
    ) -> Tensor:
        spec = AttentionSpec.parse(spec_text)
        o, lse, *amaxes = chosen_attention(q, k, v, extras, state.scale, spec_text, graph)
        for side, largest in zip((spec.qkv, spec.s, spec.o), amaxes, strict=True):
            state.record_forward(side, lambda largest=largest: largest)
        ctx.save_for_backward(q, k, v, o, lse, *extras)
        ctx.spec, ctx.graph, ctx.state = spec_text, graph, state
        return o

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (do,) = grads
        q, k, v, o, lse, *extras = ctx.saved_tensors
        spec, state = AttentionSpec.parse(ctx.spec), ctx.state
        wanted = [i for i in range(len(extras)) if ctx.needs_input_grad[6 + i]]
        dq, dk, dv, *more = chosen_attention_backward(
            do, q, k, v, o, lse, extras, state.scale, wanted, ctx.spec, ctx.graph
        )
        for side, largest in zip((spec.do, spec.dp, spec.dqkv), more, strict=False):
            state.record_backward(side, lambda largest=largest: largest)
        by_extra = dict(zip(wanted, more[3:], strict=True))
        return (dq, dk, dv, None, None, None, *(by_extra.get(i) for i in range(len(extras))))


def _shared(spec: QuantSpec) -> QuantSpec:
    return replace(spec, slot=-1)


def _core(spec: AttentionSpec) -> AttentionSpec:
    return replace(spec.each(_shared), autocast="", name="")


def _quantized(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, state: StepState) -> tuple[Sequence[Tensor], ...]:
    """The parts of q, k and v."""
    if spec.qkv.is_identity:
        return [q], [k], [v]
    parts = quantize_qkv.meaning(q, k, v, str(_shared(spec.qkv)), state.of(spec.qkv))
    return parts[:2], parts[2:4], parts[4:6]


def _through(x: Tensor, spec: QuantSpec, state: StepState) -> Tensor:
    """A result as it is once it has been quantized."""
    if spec.is_identity:
        return x
    parts = reference.quantize_heads(x, _shared(spec), 1, False, state.of(spec))
    return reference.dequantize_heads(parts, _shared(spec), 1, False, x.shape[-2:]).to(x.dtype)


def _is_torch_s(spec: AttentionSpec) -> bool:
    """Returns True for what `scaled_dot_product_attention` computes: a scale, and a mask or causality."""
    scale, *others = [(step.kind, step.extra < 0) for step in spec.steps] or [("", True)]
    return scale == ("mul", True) and others in ([], [("keep", False)], [("add", False)], [("causal", True)])


def _torch_s(q: Tensor, k: Tensor, v: Tensor, extras: Sequence[Tensor], spec: AttentionSpec) -> Tensor:
    scale, *others = spec.steps
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, extras[0] if extras else None, is_causal=any(step.kind == "causal" for step in others),
        scale=scale.value, enable_gqa=reference.heads_of(q) != reference.heads_of(k),
    )  # fmt: skip


def _grads_of_torch_s(
    do: Tensor, operands: Sequence[Tensor], extras: Sequence[Tensor], wanted: Sequence[int], spec: AttentionSpec
) -> tuple[Tensor, ...]:
    """The gradients of q, k and v, and of the mask where it is wanted."""
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in operands)
        masks = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(extras)]
        o = _torch_s(q, k, v, masks, spec)
        return torch.autograd.grad(o, [q, k, v, *(masks[i] for i in wanted)], do)
