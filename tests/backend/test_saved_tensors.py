"""What a forward saves for its backward, moved by hooks, computed again for a budget or captured: the same bits."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
from helpers import assert_same_bits, eager_backend, per_role
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks

import fxquant

Scope = Callable[[], AbstractContextManager[Any]]

RECIPES = ("current_scaling", "delayed_scaling", "mxfp8", "nvfp4", "float8_blockwise")
WITH_STATE = ("delayed_scaling", "nvfp4")
"""The recipes whose forward changes what its backward must see unchanged; the others, in full, are for the sweep."""
PER_TENSOR = fxquant.Float8CurrentScalingQuantizer()
FOR_INDUCTOR = {
    "state": "delayed_scaling",
    "random": per_role(
        input=PER_TENSOR, weight=PER_TENSOR, grad_output=fxquant.NVFP4Quantizer(stochastic_rounding=True)
    ),
}
"""A state that a forward changes, and random numbers, in as little code as may be."""


def as_they_are() -> AbstractContextManager[Any]:
    return contextlib.nullcontext()


def copied() -> AbstractContextManager[Any]:
    """As tensors that come from another device lie: each in memory of its own, one row behind another."""
    return saved_tensors_hooks(lambda t: torch.empty(t.shape, dtype=t.dtype).copy_(t), lambda t: t.clone())


def captured() -> AbstractContextManager[Any]:
    return torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager"))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Small(nn.Module):
    """One layer between two producers, for Inductor and for compiled autograd, which take long over each."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.RMSNorm(64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(torch.nn.functional.gelu(self.norm(x)))


def trained(
    recipe: Any,
    *,
    forward: Scope = as_they_are,
    backward: Scope = as_they_are,
    inner: str = "aot_eager",
    kind: type[nn.Module] = Residual,
    steps: int = 3,
) -> dict[str, Tensor]:
    """Outputs, gradients and state of steps of two forwards each, whose backwards come behind both."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = Small() if inner == "inductor" else kind()
    backend = fxquant.Backend(recipe, inner=inner)
    run = torch.compile(model, backend=backend)
    generator, result = torch.Generator().manual_seed(1), {}
    for step in range(steps):
        inputs = [(torch.randn(32, 64, generator=generator) * 4**step).requires_grad_() for _ in range(2)]
        with forward():
            outputs = [run(x) for x in inputs]
        for i, (x, y) in enumerate(zip(inputs, outputs, strict=True)):
            with backward():
                y.square().mean().backward()
            result |= {f"output {step}.{i}": y.detach(), f"input {step}.{i}": x.grad}
    return result | {name: p.grad for name, p in model.named_parameters()} | backend.state_dict()


@functools.cache
def plain(recipe: str) -> dict[str, Tensor]:
    """Returns the result of `trained` without hooks and budget."""
    return trained(recipe)


def with_state(*settings: Any) -> list[Any]:
    """Each recipe with each setting; of recipes without a state the first setting always runs."""
    return [
        pytest.param(recipe, setting, marks=[] if recipe in WITH_STATE or i == 0 else pytest.mark.sweep)
        for recipe in RECIPES
        for i, setting in enumerate(settings)
    ]


@pytest.mark.parametrize(("recipe", "hooks"), with_state(copied, save_on_cpu))
def test_hooks_may_move_what_is_saved(recipe: str, hooks: Scope) -> None:
    """Invariant 46."""
    assert_same_bits(trained(recipe, forward=hooks), plain(recipe))


@pytest.mark.slow
@pytest.mark.usefixtures("casts_as_meant")
@pytest.mark.parametrize("recipe", FOR_INDUCTOR.values(), ids=[*FOR_INDUCTOR])
def test_inductor_takes_what_hooks_have_moved_and_computes_again_for_a_budget(recipe: Any) -> None:
    """Invariants 45 and 46; what is drawn again are the same numbers."""
    want = trained(recipe, inner="inductor", steps=2)
    assert_same_bits(trained(recipe, forward=save_on_cpu, inner="inductor", steps=2), want)
    with functorch_config.patch(activation_memory_budget=0.0):
        assert_same_bits(trained(recipe, inner="inductor", steps=2), want)


@pytest.mark.parametrize("recipe", ["delayed_scaling", "nvfp4"])
def test_a_backward_alone_may_be_captured(recipe: str) -> None:
    """One recipe has it as it is, one with tensors that hooks have moved: a capture takes longer than all else here."""
    forward = as_they_are if recipe == "nvfp4" else copied
    got = trained(recipe, forward=forward, backward=captured, kind=Small, steps=2)
    assert_same_bits(got, trained(recipe, kind=Small, steps=2))


@pytest.mark.parametrize("recipe", WITH_STATE)
def test_hooks_on_saved_tensors_may_be_disabled(recipe: str) -> None:
    def disabled() -> AbstractContextManager[Any]:
        return disable_saved_tensors_hooks("there are none here")

    assert_same_bits(trained(recipe, forward=disabled), plain(recipe))


@pytest.mark.parametrize(("recipe", "budget"), with_state(0.0, 0.5))
def test_a_memory_budget_leaves_the_bits(recipe: str, budget: float) -> None:
    """Invariant 45: what is computed again begins with the state of its forward, which that has changed since."""
    with functorch_config.patch(activation_memory_budget=budget):
        got = trained(recipe)
    assert_same_bits(got, plain(recipe))


def repeated(recipe: Any, donated: bool, inner: str) -> dict[str, Tensor]:
    """Gradients and state of steps whose graphs are kept for a second backward, one of them not."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model, backend = Small(), fxquant.Backend(recipe, inner=inner)
    run, result = torch.compile(model, backend=backend), {}
    with functorch_config.patch(donated_buffer=donated):
        for step, count in enumerate((2, 1, 2)):
            # of other sizes than elsewhere: a backward from torch's cache was not asked whether its graph is kept
            x = torch.randn(48, 64, generator=torch.Generator().manual_seed(step)).requires_grad_()
            y = run(x).square().mean()
            for i in range(count):
                y.backward(retain_graph=i < count - 1)
            result[f"input {step}"] = x.grad
    return result | {name: p.grad for name, p in model.named_parameters()} | backend.state_dict()


@pytest.mark.slow
@pytest.mark.usefixtures("casts_as_meant")
@pytest.mark.parametrize(
    ("recipe", "inner"),
    [
        pytest.param(FOR_INDUCTOR["state"], "aot_eager", id="state-aot_eager"),
        pytest.param(FOR_INDUCTOR["state"], "inductor", id="state-inductor"),
        pytest.param(FOR_INDUCTOR["random"], "aot_eager", id="random-aot_eager"),
        pytest.param(FOR_INDUCTOR["random"], "inductor", id="random-inductor", marks=pytest.mark.sweep),
    ],
)
def test_a_kept_graph_goes_backward_again_with_donated_buffers(recipe: Any, inner: str) -> None:
    """torch gives the memory of what is saved to the backward, unless the first one keeps its graph."""
    assert_same_bits(repeated(recipe, True, inner), repeated(recipe, False, inner))


@pytest.mark.skipif(not hasattr(torch.autograd.graph, "region_activation_memory_budget"), reason="torch 2.13")
def test_a_region_may_have_a_memory_budget() -> None:
    def gradients(budget: float) -> dict[str, Tensor]:
        torch.compiler.reset()
        torch.manual_seed(0)
        model = Residual()

        def run(x: Tensor) -> Tensor:
            with torch.autograd.graph.region_activation_memory_budget(budget):
                return model(x)

        torch.compile(run, backend=eager_backend("delayed_scaling"))(torch.randn(32, 64)).square().mean().backward()
        return {name: p.grad for name, p in model.named_parameters()}

    assert_same_bits(gradients(0.0), gradients(1.0))
