"""Tests of probes compare these: the rows of a log, and an eager computation of statistics."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxquant import QuantizedTensor, Quantizer
from fxquant.quantizers import QuantizedOperand

EAGER = {"inner": "aot_eager"}


@dataclass(frozen=True)
class Own(Quantizer):
    """int8 with a scale a row."""

    def quantize(self, x: Tensor, *, rowwise: bool = True, columnwise: bool = True) -> QuantizedTensor:
        def half(t: Tensor) -> QuantizedOperand:
            scale = t.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / 127
            return QuantizedOperand((t / scale).round().to(torch.int8), scale)

        return QuantizedTensor(half(x) if rowwise else None, half(x.mT) if columnwise else None)

    def dequantize(self, operand: QuantizedOperand) -> Tensor:
        assert operand.scale is not None
        return operand.data.float() * operand.scale


class Heavy(torch.autograd.Function):
    """Gives a gradient the tails of a Cauchy distribution."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, factors: Tensor) -> Tensor:
        ctx.save_for_backward(factors)
        return y.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.saved_tensors[0], None


def seen(quantizer: Quantizer, x: Tensor, direction: str) -> Tensor:
    """The values of one quantized direction, the contracted axis last."""
    if isinstance(quantizer, Own):
        half = getattr(quantizer.quantize(x), direction)
        return quantizer.dequantize(half)
    q = quantizer.quantize(x).dequantize(direction)
    return q.mT if direction == "columnwise" else q


def expected(x: Tensor, q: Tensor) -> dict[str, Any]:
    """Statistics of x and q, by another computation than that of probes."""
    x, q = x.double().flatten(), q.double().flatten()
    counts = Counter(min(max(math.frexp(value)[1] - 1, -48), 15) for value in x.abs().tolist() if value)
    return {
        "amax": x.abs().max().item(),
        "zeros": (x == 0).double().mean().item(),
        "underflow": ((x != 0) & (q == 0)).double().mean().item(),
        "overflow": 0,
        "nonfinite": 0,
        "sqnr": 10 * math.log10(x.square().sum() / (x - q).square().sum()),
        "relative_error": ((x - q).abs() / x.abs())[x != 0].clamp(max=1).mean().item(),
        "crest": (x.abs().max() / x.square().mean().sqrt()).item(),
        "kurtosis": (x.pow(4).mean() / x.square().mean().square()).item(),
        "exponents": dict(counts),
    }


def cosine(a: Tensor, b: Tensor) -> float:
    return nn.functional.cosine_similarity(a.double().flatten(), b.double().flatten(), 0).item()


def error(y: Tensor, z: Tensor, *, both: bool) -> float:
    """The root of the mean square of relative errors of columns, or of rows if they are worse."""
    axes = (0, 1) if both else (0,)
    return max(float(((y - z).norm(dim=axis) / y.norm(dim=axis)).square().mean().sqrt()) for axis in axes)


def assert_row(row: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name, value in wanted.items():
        near = pytest.approx(value, rel=1e-5, abs=1e-9) if isinstance(value, float) else value
        assert row[name] == near, name


def by_operand(rows: list[dict[str, Any]], **chosen: Any) -> dict[tuple[str, str], dict[str, Any]]:
    chosen = {"whatif": False} | chosen
    return {(row["role"], row["direction"]): row for row in rows if all(row.get(k) == v for k, v in chosen.items())}
