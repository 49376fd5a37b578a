"""Gradients that are not finite: each recipe shows them in those of weights and inputs, for a GradScaler to skip."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bits import same
from helpers import NAMES, OneGroupedWeight, compiled, per_role
from test_docs import tables
from torch import Tensor, nn

import fxquant
from fxquant import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8CurrentScalingQuantizer,
    Float8HeadQuantizer,
    Float8RowwiseQuantizer,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    NVFP4Quantizer,
    QuantizedTensor,
    Quantizer,
    Recipe,
)
from fxquant.formats import FORMATS, QuantSpec
from fxquant.kernels.cast import reference
from fxquant.quantizers import QuantizedOperand


@dataclass(frozen=True)
class Saturating(Quantizer):
    """Integers of 8 bits, which have no code for NaN or infinity, under a scale that ignores both."""

    def _half(self, x: Tensor) -> QuantizedOperand:
        scale = x.float().nan_to_num(0, 0, 0).abs().amax().clamp(min=1e-12) / 127
        return QuantizedOperand((x.float() / scale).nan_to_num().clamp(-127, 127).round().to(torch.int8), scale)

    def quantize(self, x: Tensor, *, rowwise: bool = True, columnwise: bool = True) -> QuantizedTensor:
        return QuantizedTensor(self._half(x) if rowwise else None, self._half(x.mT) if columnwise else None)

    def dequantize(self, operand: QuantizedOperand) -> Tensor:
        return operand.data.float() * operand.scale


def uniform(quantizer: Quantizer) -> CustomRecipe:
    return per_role(input=quantizer, weight=quantizer, grad_output=quantizer)


def crossed(row: Quantizer, column: Quantizer) -> CustomRecipe:
    """Of the gradients one half, or what the other is made of, is of a user's own."""
    hybrid = fxquant.HybridQuantizer(row, column, columnwise_source="rowwise_dequantized")
    return per_role(input=row, weight=column, grad_output=hybrid)


RECIPES: dict[str, Callable[[], Recipe | str]] = {
    **{name: (lambda name=name: name) for name in NAMES},
    "delayed_scaling": DelayedScaling,
    "hybrid mxfp8": lambda: MXFP8BlockScaling(fp8_format=fxquant.Format.HYBRID),
    "blocks of float32 scales": lambda: Float8BlockScaling(use_f32_scales=True),
    "rows": lambda: uniform(Float8RowwiseQuantizer()),
    "nvfp4, nearest": lambda: NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True),
    "nvfp4 of rows": lambda: uniform(NVFP4Quantizer(row_scaled_nvfp4=True)),
    "own": lambda: uniform(Saturating()),
    "own for a half": lambda: crossed(Saturating(), Float8CurrentScalingQuantizer()),
}

ATTENTIONS: dict[str, Callable[[], Recipe | str]] = {
    "current": lambda: Float8CurrentScaling(fp8_dpa=True),
    "delayed": lambda: DelayedScaling(fp8_dpa=True),
    "mxfp8": lambda: MXFP8BlockScaling(fp8_dpa=True),
    "heads": lambda: CustomRecipe(qfactory=lambda role: Float8HeadQuantizer()),
}


def gradients(run: Callable[..., Any], wanted: list[Tensor], *args: Tensor) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """What a gradient of the output makes of those of the `wanted` tensors."""
    output = run(*args)
    return lambda grad: torch.autograd.grad(output, wanted, grad, retain_graph=True)


def assert_shows(
    of: Callable[[Tensor], tuple[Tensor, ...]], shape: tuple[int, ...], places: list[tuple[int, ...]],
    dtype: torch.dtype = torch.float32,
) -> None:  # fmt: skip
    grad = torch.randn(shape, dtype=dtype)
    assert all(g.isfinite().all() for g in of(grad)), "nothing is hidden by what is finite"
    for value in (math.inf, -math.inf, math.nan):
        for place in places:
            hit = grad.clone()
            hit[place] = value
            shown = [not g.isfinite().all() for g in of(hit)]
            assert all(shown), f"{value} at {place}: seen in {shown}"
    assert any(not g.isfinite().all() for g in of(torch.full_like(grad, math.inf)))


@pytest.mark.parametrize("sizes", [(48, 80, 160), (128, 128, 128)], ids=["rectangular", "square"])
@pytest.mark.parametrize("name", RECIPES)
def test_a_linear_shows_what_is_not_finite(name: str, sizes: tuple[int, int, int]) -> None:
    torch.compiler.reset()
    m, k, n = sizes
    layer, x = nn.Linear(k, n, bias=False), torch.randn(m, k, requires_grad=True)
    run = compiled(layer, RECIPES[name]())
    assert_shows(gradients(run, [x, layer.weight], x), (m, n), [(0, 0), (m - 1, n - 1), (m // 2, 5)])


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("name", [name for name in RECIPES if "own" not in name])
def test_experts_show_what_is_not_finite(name: str, batched: bool) -> None:
    torch.compiler.reset()
    offs = torch.tensor([20, 20, 48], dtype=torch.int32)
    model = OneGroupedWeight(3, 64, 80, dtype=torch.bfloat16)
    x = torch.randn(48, 64, dtype=torch.bfloat16, requires_grad=True)
    run, args, shape = compiled(model, RECIPES[name]()), (x, offs), (48, 80)
    places: list[tuple[int, ...]] = [(0, 0), (47, 79), (30, 7)]
    if batched:
        x = torch.randn(3, 16, 64, dtype=torch.bfloat16, requires_grad=True)
        run, args, shape = compiled(torch.bmm, RECIPES[name]()), (x, model.weight), (3, 16, 80)  # type: ignore[assignment]
        places = [(0, 0, 0), (2, 15, 79), (1, 3, 7)]
    assert_shows(gradients(run, [x, model.weight], *args), shape, places, torch.bfloat16)


@pytest.mark.parametrize("keys", [24, 64])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_an_attention_shows_what_is_not_finite(name: str, keys: int) -> None:
    torch.compiler.reset()
    q, k, v = (torch.randn(2, 4, size, 32, requires_grad=True) for size in (64, keys, keys))
    run = compiled(lambda *qkv: F.scaled_dot_product_attention(*qkv), ATTENTIONS[name]())
    assert_shows(gradients(run, [q, k, v], q, k, v), tuple(q.shape), [(0, 0, 0, 0), (1, 3, 63, 31), (1, 2, 30, 7)])


@pytest.mark.parametrize("name", [name for name in RECIPES if "own" not in name])
def test_a_scaler_skips_the_step_of_a_model_without_biases(name: str) -> None:
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(64, 96, bias=False), nn.ReLU(), nn.Linear(96, 64, bias=False))
    run, x = compiled(model, RECIPES[name]()), torch.randn(32, 64)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    before = [p.detach().clone() for p in model.parameters()]
    scaler.scale(run(x)[0, 0] * math.inf).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**9 and all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("format", [name for name in FORMATS if name != "identity"])
def test_only_what_is_not_finite_has_other_bytes(format: str) -> None:
    """Gradients that are finite, huge and tiny ones too, are those of any other tensor; infinities are NaN elements."""
    spec = QuantSpec(format=format)
    x = torch.randn(40, 272) * torch.logspace(-40, 37, 40).unsqueeze(1)
    for given in (x, x.bfloat16(), x.half().nan_to_num()):
        for a, b in zip(reference.quantize(given, spec.shown()), reference.quantize(given, spec), strict=True):
            assert same(a, b)
    x = torch.randn(40, 272)
    x[3, 5], x[4, 6], x[17, 40] = math.inf, -math.inf, math.nan
    values = reference.dequantize(reference.quantize(x, spec.shown()), spec)[:, :272]
    assert not values[~x.isfinite()].isfinite().any()
    torchao = QuantSpec(format=format, torchao=True)
    assert not spec.row.family.startswith("per_") or torchao.shown() == torchao


@pytest.mark.parametrize("text", tables.RANGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_finite_stays_finite_in_the_range_of_its_format(text: str, dtype: torch.dtype) -> None:
    """Beside others of any size, and with subnormals; behind the end of the documented range nothing is promised."""
    spec, generator = QuantSpec.parse(text), torch.Generator().manual_seed(0)
    largest = min(tables.range_of(spec)[0], torch.finfo(dtype).max)
    for exponent in (0, 1, 10, 100, 150, 200, 250, 276):
        amax = largest * 2.0**-exponent
        x = (2 * torch.rand(32, 144, generator=generator, dtype=torch.float64) - 1) * amax
        x = x * torch.exp2(-torch.randint(0, 60, (32, 144), generator=generator).double())
        x[3, 7], x[4, 8] = amax, -amax
        x = torch.where(x.to(dtype).abs().double() > amax, 0, x).to(dtype)
        parts = reference.quantize(x, spec)
        assert reference.dequantize(parts, spec).isfinite().all(), (amax, x.abs().max())
    if largest < torch.finfo(dtype).max:
        x[0, 0] = torch.finfo(dtype).max
        assert not reference.dequantize(reference.quantize(x, spec), spec).isfinite().all()
