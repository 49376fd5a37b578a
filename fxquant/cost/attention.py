"""The estimated time of attention, in high precision and quantized, from measured rates.

A kernel takes a start and its FLOPs at its rate. Causal attention has half of them, and a strip of `diagonal` keys for
each query, of tiles that are masked in part. Casts, and tensors dequantized for a backward in high precision, take
their bytes at the rate of a copy. In training all that is quantized takes `within_step` times as long, as measured in a
model. Masks, unmeasured head dimensions and attention written by hand have no estimate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from fxquant.cost.kept import rates_of
from fxquant.cost.rates import AttentionRate, AttentionRates
from fxquant.cost.work import Work
from fxquant.decisions import Attended
from fxquant.kernels.attention.choice import AttentionFacts, AttentionKernel
from fxquant.kernels.attention.ops import attention_backward, attention_forward
from fxquant.kernels.operator import Chosen


def attention_work(attention: Attended, training: bool) -> tuple[Work, ...]:
    """The kernels of an attention and of its casts."""
    rates = _rates(attention)
    plain: Sequence[float | None] = (None, None)
    fp8: Sequence[float | None] = (None, None)
    gluon: Sequence[float | None] = (None, None)
    if rates is not None:
        plain = _times(attention, rates.forward, rates.backward)
        fp8 = _times(attention, rates.fp8_forward, rates.fp8_backward)
        gluon = _times(attention, rates.gluon_forward, rates.gluon_backward or rates.fp8_backward)
    names = ("attention, forward", "attention, backward")[: 1 + training]
    if attention.spec is None:
        return tuple(Work(name, "torch's own", us, us) for name, us in zip(names, plain, strict=False))
    kernels = chosen(attention, training)
    work = []
    for name, kernel, before, triton, warps in zip(names, kernels, plain, fp8, gluon, strict=False):
        by_kernel = {AttentionKernel.TRITON: triton, AttentionKernel.GLUON: warps, AttentionKernel.CUDNN: before}
        work.append(Work(name, str(kernel), before, by_kernel.get(kernel.kernel)))
    card = rates_of(attention.device)
    for what, cast, moved, launches in _casts(attention, kernels):
        if rates is None or card is None:
            work.append(Work(what, cast))
        else:
            work.append(Work(what, cast, 0.0, launches * card.launch + moved / card.copy / 1e6))
    slower = 1.0 if rates is None or not training else rates.within_step
    return tuple(replace(part, quantized=part.quantized and part.quantized * slower) for part in work)


def chosen(attention: Attended, training: bool) -> list[Chosen[AttentionKernel]]:
    """The kernels of a quantized attention: of its forward, and in training of its backward."""
    spec = attention.spec
    assert spec is not None
    facts = AttentionFacts(
        spec=spec,
        axes=attention.axes,
        width=attention.width,
        features=attention.features,
        dtype=attention.dtype,
        capability=attention.capability,
        keys=attention.keys,
        flops=4 * attention.batch * attention.heads * attention.queries * attention.keys * attention.width,
        learned=attention.learned,
        repeats=torch.are_deterministic_algorithms_enabled(),
    )
    return [called.choose(facts) for called in (attention_forward, attention_backward)[: 1 + training]]


def runs_the_reference(attention: Attended, training: bool) -> str:
    """The reason why a quantized attention would hold its scores in the memory of a CUDA device; empty for none."""
    if attention.spec is None or attention.capability == (0, 0):
        return ""
    return next((choice.reason for choice in chosen(attention, training) if choice.reason), "")


def _rates(attention: Attended) -> AttentionRates | None:
    """The rates of an attention, quantized or not, or None if nobody measured them."""
    half = attention.dtype in (torch.bfloat16, torch.float16)
    plain = all(step.kind in ("mul", "causal") for step in attention.steps) and attention.width == attention.features
    if not (attention.fused and half and plain):
        return None
    card = rates_of(attention.device)
    return None if card is None else card.attention.get(attention.width)


def _times(attention: Attended, *rates: AttentionRate) -> list[float]:
    """Microseconds of a forward (two products), and of a backward (five), at these rates."""
    return [_us(attention, rate, flops) for rate, flops in zip(rates, (4, 10), strict=False)]


def _us(attention: Attended, rate: AttentionRate, flops: int) -> float:
    keys: float = attention.keys
    if any(step.kind == "causal" for step in attention.steps):
        keys = min(attention.keys, attention.keys / 2 + rate.diagonal)
    pairs = attention.batch * attention.heads * attention.queries * keys
    return rate.start + flops * pairs * attention.width / rate.tflops / 1e6


def _casts(attention: Attended, kernels: Sequence[Chosen[AttentionKernel]]) -> Iterator[tuple[str, str, int, int]]:
    """The casts: name, kernel, bytes moved and launches. An element has two bytes, one in FP8."""
    spec = attention.spec
    assert spec is not None
    rows = {"q": attention.heads * attention.queries, "k": attention.kv_heads * attention.keys}
    elements = {name: attention.batch * size * attention.width for name, size in {**rows, "v": rows["k"]}.items()}
    read_first = 0 if spec.qkv.is_delayed or spec.qkv.row.block[0] or spec.qkv.row.family == "mxfp8" else 2
    by_triton = kernels[0].kernel in (AttentionKernel.TRITON, AttentionKernel.GLUON)
    how = "Triton cast" if by_triton else "fused by Inductor"
    how += ", after their amaxes" if read_first else ""
    yield "cast q, k, v", how, (3 + read_first) * sum(elements.values()), 2 if read_first else 1
    if not spec.o.is_identity:
        yield "cast o", "fused by Inductor", 5 * elements["q"], 2
    for kernel in kernels:
        if kernel.kernel in (AttentionKernel.CUDNN, AttentionKernel.WIDE):
            yield "dequantize q, k, v", how.partition(",")[0], 3 * sum(elements.values()), 1
    if len(kernels) > 1 and not spec.dqkv.is_identity:
        yield "cast dq, dk, dv", "fused by Inductor", 5 * sum(elements.values()), 6
