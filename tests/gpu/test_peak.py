"""How much memory a training step takes at most."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch

from fxquant import Backend
from fxquant.bench.training import Stack
from fxquant.compat.private import inductor_config

pytestmark = pytest.mark.gpu

SIZE = Stack(blocks=3, hidden=1024, ffn=4096, heads=8, kv_heads=2, batch=2, length=2048)


def peak(recipe: str, size: Stack = SIZE, **options: Any) -> int:
    """Bytes, of a second step."""
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    with torch.device("cuda"):
        model, x = size.model(), size.input().requires_grad_()
    run = torch.compile(model, backend=Backend(recipe, **options), fullgraph=True, dynamic=False)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        run(x).sum().backward()
        model.zero_grad()
    return torch.cuda.max_memory_allocated() - before


def test_buffers_are_not_held_and_the_least_takes_less() -> None:
    held = peak("delayed_scaling", inductor={"allow_buffer_reuse": True})
    quantized = peak("delayed_scaling")
    assert quantized < held
    more = replace(SIZE, blocks=6)  # what the last block computes again is as much as what three others save
    assert peak("delayed_scaling", more, save="least") < 0.95 * peak("delayed_scaling", more)


def test_what_is_made_again_in_the_backward_is_not_held() -> None:
    with inductor_config.patch(disabled_passes="produce_again"):
        held = peak("current_scaling")
    assert peak("current_scaling") < held


def test_what_is_kept_in_fp8_is_restored_where_it_is_read() -> None:
    """Not before: under current_scaling Inductor's own order held the tensors of all blocks."""
    assert peak("current_scaling", save="fp8") < 0.95 * peak("current_scaling")
