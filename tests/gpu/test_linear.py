"""One linear layer, forward and backward, on CUDA under every recipe: what the CPU's reference path gives."""

from __future__ import annotations

import pytest
import torch
from gpu.recipes import RECIPES, resolved
from torch import Tensor, nn

from fxquant import Backend

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


def step(recipe: str, inner: str, device: str, shape: tuple[int, int, int], dtype: torch.dtype) -> dict[str, Tensor]:
    """Output and gradients of one nn.Linear of the same values on any device, on the CPU in the end."""
    m, k, n = shape
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(k, n, dtype=dtype)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.1)
    x, dy = (torch.randn(m, size, generator=generator).to(dtype) for size in (k, n))
    layer, x, dy = layer.to(device), x.to(device).requires_grad_(), dy.to(device)
    y = torch.compile(layer, backend=Backend(resolved(recipe), inner=inner), fullgraph=True, dynamic=False)(x)
    y.backward(dy)
    assert x.grad is not None and layer.weight.grad is not None and layer.bias.grad is not None
    result = {"output": y.detach(), "input": x.grad, "weight": layer.weight.grad, "bias": layer.bias.grad}
    return {name: value.cpu().double() for name, value in result.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(64, 96, 160), (33, 50, 40), (256, 256, 256)])
@pytest.mark.parametrize("recipe", RECIPES)
def test_linear(recipe: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """The operands are the same bytes, so only accumulation and the rounding of the output may differ."""
    expected = step(recipe, "aot_eager", "cpu", shape, dtype)
    got = step(recipe, "inductor", DEVICE, shape, dtype)
    tolerance = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-10
    errors = {name: ((got[name] - e).norm() / e.norm()).item() for name, e in expected.items()}
    print(recipe, shape, dtype, {name: f"{error:.1e}" for name, error in errors.items()})
    assert all(error < tolerance for error in errors.values()), errors


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_rows(recipe: str) -> None:
    layer = nn.Linear(64, 32, device=DEVICE, dtype=torch.bfloat16)
    x = torch.empty(0, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    y = torch.compile(layer, backend=Backend(resolved(recipe)), fullgraph=True, dynamic=False)(x)
    y.sum().backward()
    assert y.shape == (0, 32) and x.grad is not None and x.grad.shape == (0, 64)
    assert layer.weight.grad is not None and not layer.weight.grad.any()


@pytest.mark.parametrize("recipe", RECIPES)
def test_any_number_of_rows(recipe: str) -> None:
    """One compilation with a symbolic number of rows, right for each."""
    layer = nn.Linear(96, 48, device=DEVICE, dtype=torch.bfloat16)
    run = torch.compile(layer, backend=Backend(resolved(recipe)), fullgraph=True, dynamic=True)
    for rows in (7, 64, 130):
        x = torch.randn(rows, 96, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        y = run(x)
        y.sum().backward()
        plain = layer(x.detach())
        assert x.grad is not None and torch.cosine_similarity(y.flatten(), plain.flatten(), dim=0) > 0.98
