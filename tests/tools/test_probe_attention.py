"""Probes of quantized attention: q, k, v, rows of the softmax, the output's gradient, and why others are not there."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from probed import EAGER, assert_row, by_operand, expected, seen
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxquant
from fxquant import (
    CustomRecipe,
    Float8CurrentScaling,
    IdentityQuantizer,
    MXFP8BlockScaling,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from fxquant.kernels.attention.reference import dequantize_heads, quantize_heads, through
from fxquant.recipes import Recipe


class Attention(nn.Module):
    """Grouped-query attention, in a checkpoint if that is wanted."""

    def __init__(self, inner: bool = False) -> None:
        super().__init__()
        self.attn, self.inner = Attend(), inner

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return checkpoint(self.attn, q, k, v, use_reentrant=False) if self.inner else self.attn(q, k, v)


class Attend(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (1, 4, 144, 32), "k": (1, 2, 144, 32), "v": (1, 2, 144, 32), "do": (1, 4, 144, 32)}
    made = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    made["q"][..., 3] *= 2.0**8
    return made


def probed(recipe: Recipe, inner: bool = False, **kwargs: Any) -> Any:
    given = tensors()
    run = fxquant.compile(Attention(inner), recipe, options=EAGER)
    with fxquant.probe(run, every=1, **kwargs) as log:
        run(*(given[name].clone().requires_grad_() for name in "qkv")).backward(given["do"])
    return log


RECIPES = {"mxfp8": MXFP8BlockScaling(fp8_dpa=True), "current_scaling": Float8CurrentScaling(fp8_dpa=True)}


@pytest.mark.parametrize("name", RECIPES)
def test_statistics_are_those_of_an_eager_computation(name: str) -> None:
    recipe = RECIPES[name]
    given, log = tensors(), probed(recipe, whatif=NVFP4Quantizer())
    rows = by_operand(log.rows)
    assert {row["layer"] for row in log.rows} == {"attn"} and [o.role for o in log.unmeasured] == ["dp"]
    role = fxquant.QuantizerRole
    specs = {}
    for slot in ("qkv", "s", "do"):
        quantizer = recipe.quantizer(role("dpa", slot, "attn"))
        assert isinstance(quantizer, fxquant.Quantizer)
        specs[slot] = quantizer.operand_spec().rowwise
    values = {}
    for operand, direction in (("q", "rowwise"), ("k", "rowwise"), ("v", "columnwise"), ("do", "rowwise")):
        x, spec, turned = given[operand], specs[operand if operand == "do" else "qkv"], direction == "columnwise"
        groups = 2 if operand == "q" else 1
        q = dequantize_heads(quantize_heads(x, spec, groups, turned), spec, groups, turned, x.shape[-2:])
        values[operand] = q
        assert_row(rows[operand, direction], expected(x, q))
        tried = by_operand(log.rows, whatif=True)[operand, direction]
        assert_row(tried, expected(x.mT if turned else x, seen(NVFP4Quantizer(), x, direction)))
    scores = values["q"] @ values["k"].repeat_interleave(2, 1).mT / 32**0.5
    scores = scores.masked_fill(torch.ones(144, 144, dtype=torch.bool).triu(1), -torch.inf)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))[..., ::2, :]  # 72 of 144 rows of a head
    if name == "mxfp8":
        assert rows["s", "rowwise"]["quantizer"] == "identity" and rows["s", "rowwise"]["sqnr"] == math.inf
    else:
        assert_row(rows["s", "rowwise"], expected(weights, through(weights, specs["s"], torch.tensor([448.0]))))


def test_checkpoints_count_once() -> None:
    recipe = RECIPES["mxfp8"]
    assert probed(recipe, inner=True).rows == probed(recipe).rows


def test_attention_in_high_precision_has_a_reason() -> None:
    def qfactory(role: fxquant.QuantizerRole) -> fxquant.Quantizer:
        return MXFP8Quantizer() if role.module_type == "linear" else IdentityQuantizer()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn, self.out = Attend(), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.attn(x, x, x))

    run = fxquant.compile(Model(), CustomRecipe(qfactory=qfactory), options=EAGER)
    with fxquant.probe(run, every=1) as log:
        run(torch.randn(1, 2, 16, 32))
    assert [(o.layer, o.role) for o in log.unmeasured] == [("attn", role) for role in ("q", "k", "v", "s", "do")]
    assert "stays in high precision" in log.unmeasured[0].reason and {row["layer"] for row in log.rows} == {"out"}
