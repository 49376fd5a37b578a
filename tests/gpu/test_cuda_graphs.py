"""Training in CUDA graphs (``mode="reduce-overhead"``): nothing is left out of them, and the values are the same."""

from __future__ import annotations

import pytest
import torch
from helpers import GatedBlock
from torch import Tensor
from torch._dynamo.utils import counters

from fxquant import Backend

pytestmark = pytest.mark.gpu


def gradients(recipe: str, mode: str | None) -> list[Tensor]:
    """Those of the last of six steps, between which the weights change."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = GatedBlock(256).bfloat16().cuda()
    x = torch.randn(4, 128, 256).bfloat16().cuda()
    run = torch.compile(model, backend=Backend(recipe, mode=mode), dynamic=False)
    for _ in range(6):
        torch.compiler.cudagraph_mark_step_begin()
        model.zero_grad()
        run(x).float().square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad.sign()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("recipe", ["delayed_scaling", "current_scaling", "rowwise"])
def test_values_are_those_without(recipe: str) -> None:
    plain = gradients(recipe, None)
    counters.clear()
    for a, b in zip(gradients(recipe, "reduce-overhead"), plain, strict=True):
        assert torch.equal(a, b)
    assert not counters["inductor"]["cudagraph_skips"]
