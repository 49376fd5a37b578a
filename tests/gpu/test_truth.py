"""What a report says is what a GPU ran: operators one by one, and the GEMMs that Inductor's code launches."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from truth import Counted, Layered, differences, reported

from fxquant import Backend
from fxquant.roles import Gemm

pytest.importorskip("transformers")
import flops
from corpus.models import CASES
from gpu.recipes import RECIPES, resolved

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

MODELS = ("llama_gqa", "gpt2", "bert", "qwen3_moe_bf16")
LAUNCHED = {
    "aten::_scaled_mm": ("cuBLAS _scaled_mm, per tensor", "cuBLAS _scaled_mm, rowwise"),
    "aten::_scaled_grouped_mm": ("_scaled_grouped_mm",),
    "gemm_kernel": ("Triton, few rows",),
}
"""The names that a profiler and reports have for the GEMMs of `test_launches`, on a card that multiplies FP8."""


def case(name: str) -> tuple[nn.Module, dict[str, Any]]:
    model, kwargs = CASES[name]()
    return model.cuda(), {key: value.cuda() for key, value in kwargs.items()}


def step(run: Any, kwargs: dict[str, Any]) -> None:
    flops.to_loss(run(**kwargs)).backward()
    torch.cuda.synchronize()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", MODELS)
def test_operators(name: str, recipe: str) -> None:
    model, kwargs = case(name)
    backend = Layered(resolved(recipe), model=model)
    with Counted(flops._counter().flop_registry) as counted:
        step(torch.compile(model, backend=backend), kwargs)
    problems = differences(counted.quantized, reported(backend.report()))
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("recipe", ["current_scaling", "rowwise"])
@pytest.mark.parametrize("name", MODELS)
def test_launches(name: str, recipe: str) -> None:
    """Counted by the profiler in the second step: in the first, Inductor may measure kernels."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this card multiplies no FP8")
    model, kwargs = case(name)
    backend = Backend(recipe, model=model, gemm="cublas")
    run = torch.compile(model, backend=backend)
    step(run, kwargs)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step(run, kwargs)
    launched = Counter(event.name for event in profile.events() if event.name in LAUNCHED)
    report = backend.report()
    kernels = Counter(work.kernel for _, _, work in report.work() if work.what in set(Gemm))
    for name_of_event, names in LAUNCHED.items():
        assert launched[name_of_event] == sum(kernels[kernel] for kernel in names), (launched, kernels)
    multiplied = {key: operands for key, operands in report.gemms().items() if operands[0].matmul is not None}
    quantized = {gemm for (_, gemm), operands in multiplied.items() if all(d.quantizer for d in operands)}
    assert sum(kernels.values()) == len(multiplied) and quantized == set(Gemm)
    assert launched["aten::_scaled_mm"] > 0
    if recipe == "rowwise" and "moe" in name:  # with a scale for each tensor, experts have kernels of ours
        assert launched["aten::_scaled_grouped_mm"] > 0
