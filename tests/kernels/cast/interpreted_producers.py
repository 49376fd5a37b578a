"""Casts fused with producers in Triton's interpreter, against the reference; run by test_triton_cast.py.

A producer's float32 arithmetic may differ in the last bit, and so now and then the bfloat16 it is rounded to, and one
code of the payload.
"""

from __future__ import annotations

import itertools

import torch
from interpreted_cast import as_bytes, values
from torch import Tensor

from fxquant.formats import QuantSpec
from fxquant.kernels.cast import reference, triton_cast
from fxquant.kernels.cast.producers import KEPT, PRODUCERS, named

SPECS = (
    "per_tensor_e4m3", "per_tensor_e5m2(slot=3)", "block_1x128_e4m3(pow2)", "mxfp8_e4m3", "per_row_e4m3(pow2,torchao)",
)  # fmt: skip
CASES = (
    ("silu_mul_grad", (70, 160), SPECS[1]), ("silu_mul_grad", (70, 160), SPECS[0]),
    ("joined_heads", (66, 160), SPECS[1]), ("joined_heads", (33, 48), SPECS[4]),
    *((name, (33, 50), spec) for name, spec in zip(PRODUCERS, itertools.cycle(SPECS), strict=False)
      if name != "joined_heads"),
    ("silu_mul_kept", (70, 256), SPECS[1]), ("silu_mul_grad_kept", (33, 128), SPECS[0]),
    ("silu_mul_grad_kept", (70, 256), SPECS[2]), ("silu_mul_grad_kept", (70, 256), SPECS[1]),
    ("rms_norm_kept", (70, 256), SPECS[1]), ("rms_norm_rounded_kept", (33, 128), SPECS[3]),
    ("gelu_tanh_kept", (33, 128), SPECS[1]), ("gelu_grad_kept", (33, 128), SPECS[2]),
)  # fmt: skip
MOST = 0.005
"""The share of a payload's bytes that may differ."""


def inputs_of(name: str, shape: tuple[int, int]) -> list[Tensor]:
    heads = (3, shape[1] // 16, shape[0] // 3, 16)
    shapes = {"matrix": shape, "row": (shape[0], 1), "column": shape[1:], "heads": heads}
    generator = torch.Generator().manual_seed(1)
    made, producer = [], named(name)
    for i, kind in enumerate(producer.inputs[: len(producer.inputs) - producer.kept]):
        x = torch.randn(shapes[kind], generator=generator) * (2.0 if i == 0 else 1.0)
        made.append(x if kind == "row" or producer.wide else x.bfloat16())
    if made[0].ndim == 2:
        made[0][:, 2] = values(torch.bfloat16, shape)[:, 2]
    kept = [reference.quantize(x, QuantSpec.parse(KEPT)) for x in made[: producer.kept]]
    return [*(data for data, _ in kept), *made[producer.kept :], *(scale for _, scale in kept)]


def expected(name: str, inputs: list[Tensor], specs: tuple[QuantSpec | None, ...], scales: list[Tensor | None]):
    """What is cast of each result, computed in float64 and rounded once."""
    producer = named(name)
    plain = [x.double() for x in inputs]
    if producer.kept:
        payloads, scales_of = inputs[: producer.kept], inputs[-producer.kept :]
        values_of = [
            reference.dequantize(parts, QuantSpec.parse(KEPT)) for parts in zip(payloads, scales_of, strict=True)
        ]
        plain = [*(x.bfloat16().double() for x in values_of), *plain[producer.kept : -producer.kept]]
        producer = named(name.removesuffix("_kept"))
    made = [y.bfloat16() for y in producer(plain)]
    parts = []
    for y, scale in zip(made, scales, strict=True):
        for side, spec in zip((y, y.mT), specs, strict=True):
            parts += [] if spec is None else reference.quantize(side, spec, scale)
        parts += [reference.amax(y)] if specs[1].is_delayed else []
    return parts


def main() -> None:
    for i, (name, shape, text) in enumerate(CASES):
        spec, results = QuantSpec.parse(text), named(name).results
        inputs = inputs_of(name, shape)
        scales = [torch.tensor([3.0 + j]) if spec.is_delayed else None for j in range(results)]
        specs = (None if i % 3 else spec, spec)
        at = len(inputs) - named(name).kept
        given = [*inputs[:at], *(scale.t().contiguous() for scale in inputs[at:])]
        got = triton_cast.produce(name, given, *specs, scales, scales, spec.is_delayed)
        for part, (a, b) in enumerate(zip(got, expected(name, inputs, specs, scales), strict=True)):
            case = f"{name} {shape} {text} {specs[0]} part {part}"
            assert a.shape == b.shape and a.dtype == b.dtype, case
            if a.dtype.itemsize > 1:
                torch.testing.assert_close(a, b, rtol=2**-8, atol=0, msg=lambda m, case=case: f"{case}: {m}")
            else:
                share = (as_bytes(a) != as_bytes(b)).float().mean().item()
                assert share <= MOST, f"{case}: {share:.2%} of the bytes differ"


if __name__ == "__main__":
    main()
