"""What attention is estimated to take, in high precision and quantized, from measured rates.

A kernel takes a start and its FLOPs at its rate. Causal attention is half of them, and a strip of `diagonal` keys for
each query, of tiles that are masked in part. Casts, and what is dequantized for a backward in high precision, take
their bytes at the rate of a copy. Nothing is known of masks, of head dimensions that were not measured, and of
attention written by hand, which torch has no kernel for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fxquant.decisions import Attended
from fxquant.kernels.attention import choice as attention_choice
from fxquant.kernels.attention.choice import AttentionFacts, AttentionKernel, Chosen


class KernelRate(NamedTuple):
    """TFLOP/s of large attention, microseconds before anything is multiplied, and keys a query in masked tiles."""

    tflops: float
    start: float
    diagonal: int


@dataclass(frozen=True, kw_only=True)
class AttentionRates:
    """What one kind of card was measured to do with one head dimension; `fp8_backward` has its casts in it."""

    source: str
    forward: KernelRate
    backward: KernelRate
    fp8_forward: KernelRate
    gluon_forward: KernelRate
    fp8_backward: KernelRate


RATES: Mapping[tuple[str, int], AttentionRates] = {
    ("NVIDIA H100 80GB HBM3", 128): AttentionRates(
        source="one batch of 32 heads, 4096 and 16384 keys, causal and not, cuDNN and the kernels of this project in "
        "CUDA graphs; torch 2.11.0+cu130, triton 3.6.0, 2026-11-28",
        forward=KernelRate(625, 10, 480),
        backward=KernelRate(545, 55, 400),
        fp8_forward=KernelRate(830, 45, 200),
        gluon_forward=KernelRate(880, 15, 200),
        fp8_backward=KernelRate(534, 200, 450),
    ),
}
"""By card and head dimension; rates of random data."""

Row = tuple[str, str, float | None, float | None]
"""What it is, the kernel, and microseconds without and with quantization."""


def attention_work(attention: Attended, training: bool, copy: float, launch: float) -> list[Row]:
    """The kernels of an attention and of its casts, at a copy's TB/s and a launch's microseconds."""
    rates = _rates(attention)
    plain: Sequence[float | None] = (None, None)
    times: list[float | None] = [None, None]
    gluon = None
    if rates is not None:
        plain = _times(attention, rates.forward, rates.backward)
        times = [*_times(attention, rates.fp8_forward, rates.fp8_backward)]
        (gluon,) = _times(attention, rates.gluon_forward)
    names = ("attention, forward", "attention, backward")[: 1 + training]
    if attention.spec is None:
        return [(name, "torch's own", time, time) for name, time in zip(names, plain, strict=False)]
    kernels = chosen(attention, training)
    rows: list[Row] = []
    for name, each, before, fp8 in zip(names, kernels, plain, times, strict=False):
        by_kernel = {AttentionKernel.TRITON: fp8, AttentionKernel.GLUON: gluon, AttentionKernel.CUDNN: before}
        after = by_kernel.get(each.kernel)
        rows.append((name, str(each), before, after))
    for what, kernel, moved, launches in _moved(attention, kernels):
        time = launches * launch + moved / copy / 1e6
        rows.append((what, kernel, None if rates is None else 0.0, None if rates is None else time))
    return rows


def chosen(attention: Attended, training: bool) -> list[Chosen]:
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
    )
    run = [attention_choice.forward(facts)]
    return [*run, attention_choice.backward(facts)] if training else run


def runs_the_reference(attention: Attended, training: bool) -> str:
    """Why a quantized attention would hold its scores in the memory of a CUDA device; empty where it does not."""
    if attention.spec is None or attention.capability == (0, 0):
        return ""
    return next((each.reason for each in chosen(attention, training) if each.reason), "")


def _rates(attention: Attended) -> AttentionRates | None:
    """The rates that hold for an attention, quantized or not."""
    half = attention.dtype in (torch.bfloat16, torch.float16)
    plain = all(step.kind in ("mul", "causal") for step in attention.steps) and attention.width == attention.features
    if not (attention.fused and half and plain):
        return None
    return RATES.get((attention.device, attention.width))


def _times(attention: Attended, *rates: KernelRate) -> list[float]:
    """Microseconds of a forward, and of a backward, at these rates: two products, and five."""
    return [_us(attention, rate, flops) for rate, flops in zip(rates, (4, 10), strict=False)]


def _us(attention: Attended, rate: KernelRate, flops: int) -> float:
    keys: float = attention.keys
    if any(step.kind == "causal" for step in attention.steps):
        keys = min(attention.keys, attention.keys / 2 + rate.diagonal)
    pairs = attention.batch * attention.heads * attention.queries * keys
    return rate.start + flops * pairs * attention.width / rate.tflops / 1e6


def _moved(attention: Attended, kernels: Sequence[Chosen]) -> Iterator[tuple[str, str, int, int]]:
    """What is cast and dequantized, by which kernel, with bytes and launches: two bytes an element, and one in FP8."""
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
