"""Ranges of a profiler around products of a GPU, quantized and in high precision: names, and the same gradients."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import fxquant

pytestmark = pytest.mark.gpu


class Mixed(nn.Module):
    """One product that a recipe quantizes beside those that it leaves, attention and a convolution among them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up = nn.Conv2d(4, 256, 3), nn.Linear(256, 256)
        self.head = nn.Linear(256, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(self.conv(x).flatten(2).mT)
        q = x.unflatten(-1, (4, 64)).transpose(1, 2)
        x = nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        return self.head(x.transpose(1, 2).flatten(2))


NAMES = ["conv fprop", "conv backward", "<model> attention", "<model> attention backward"]
NAMES += [f"{name} {gemm}" for name in ("up", "head") for gemm in ("fprop", "dgrad", "wgrad")]


@pytest.mark.parametrize("recipe", ["current_scaling", "high_precision"])
def test_a_trace_of_a_gpu_names_all_products(recipe: str) -> None:
    model = Mixed().cuda().bfloat16()
    x = torch.randn(2, 4, 18, 18, device="cuda", dtype=torch.bfloat16)
    gradients = []
    for ranges in (False, True):
        torch.compiler.reset()
        run = fxquant.compile(model, recipe, options={"ranges": ranges})
        model.zero_grad()
        run(x).float().square().mean().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for plain, named in zip(*gradients, strict=True):
        assert (plain - named).norm() <= 0.02 * plain.norm()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run(x).float().square().mean().backward()
        torch.cuda.synchronize()
    names = Counter(
        event.name for event in profiler.events() if event.name in NAMES and event.device_type.name == "CPU"
    )
    assert names == Counter(NAMES)
