"""Policies of selective checkpoints that name products of ATen mean fxquant's: inside and around compiled code."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from helpers import Recorder, assert_same_bits, eager_backend, phase
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fxquant.backend.selective import PolicyOfProducts
from fxquant.compat.private import RunsBesideDynamo

aten = torch.ops.aten
SAVE, AGAIN = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE

PRODUCTS = {
    "mm": aten.mm.default,
    "addmm": aten.addmm.default,
    "linear": aten.linear.default,
    "_scaled_mm": aten._scaled_mm.default,
    "fxquant": torch.ops.fxquant.scaled_mm.default,
}


class Checkpointed(nn.Module):
    """Two linears, whose backward needs the output of the first."""

    def __init__(self, policy: Any, *, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(64, 96, bias=bias), nn.GELU(), nn.Linear(96, 64, bias=bias))
        self.contexts = functools.partial(create_selective_checkpoint_contexts, policy)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layers, x, use_reentrant=False, context_fn=self.contexts)


def products_of_backward(policy: Any, recipe: str = "mxfp8", *, bias: bool = True) -> int:
    """How many products the backward of two layers has: four, and those of the forward that it repeats."""
    torch.compiler.reset()
    backend = Recorder(recipe)
    torch.compile(Checkpointed(policy, bias=bias), backend=backend)(torch.randn(32, 64)).sum().backward()
    (backward,) = (gm for gm in backend.graphs if phase(gm) == "backward:")
    return len(backward.graph.find_nodes(op="call_function", target=torch.ops.fxquant.scaled_mm.default))


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_by_name(name: str) -> None:
    """As a list, a function that answers by policies, and one that answers True."""
    operator = PRODUCTS[name]

    def by_policy(context: Any, asked: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return SAVE if asked is operator else AGAIN

    def by_truth(context: Any, asked: Any, *args: Any, **kwargs: Any) -> bool:
        return asked in {operator}

    assert [products_of_backward(policy) for policy in ([operator], by_policy, by_truth)] == [3, 3, 3]


def test_other_policies_mean_what_they_say() -> None:
    assert products_of_backward([aten.convolution.default]) == 4
    assert products_of_backward(lambda context, operator, *args, **kwargs: CheckpointPolicy.MUST_RECOMPUTE) == 4


@pytest.mark.parametrize("recipe", ["nvfp4", "delayed_scaling", "float8_blockwise", "weight_only_fp8"])
def test_every_recipe_has_products(recipe: str) -> None:
    assert products_of_backward([aten.mm.default], recipe, bias=False) < products_of_backward([], recipe, bias=False)


def test_policies_see_the_operands_and_count_each_product_once() -> None:
    """As trainers do that save every second product, but never one of some weight."""
    shapes: Counter[Any] = Counter()

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator not in (aten.mm.default, aten.linear.default) or context.is_recompute:
            return AGAIN
        shapes[tuple(args[0].shape), tuple(args[1].shape)] += 1
        return SAVE if shapes.total() % 2 else AGAIN

    products_of_backward(policy, "nvfp4", bias=False)
    assert len(set(shapes.values())) == 1, "torch traces the body more than once"
    assert shapes.keys() == {((32, 64), (64, 96)), ((32, 96), (96, 64))}


def test_a_policy_is_asked_about_batches_experts_and_attention() -> None:
    asked: list[str] = []

    def policy(context: Any, operator: Any, *args: Any) -> CheckpointPolicy:
        asked.append(operator.name().removeprefix("aten::"))
        return AGAIN

    batch = [torch.zeros(2, 4, 8), torch.zeros(2, 4, 1)]
    products = PolicyOfProducts(policy)
    spec, rest = "per_row_e4m3", (None, torch.float32, False)
    assert products(None, torch.ops.fxquant.scaled_mm.default, batch, batch, spec, spec, *rest) is AGAIN
    products(None, torch.ops.fxquant.grouped_scaled_mm.default)
    products(None, torch.ops.fxquant.attention_forward.default)
    products(None, aten.add.Tensor)
    assert asked[1:3] == ["bmm", "baddbmm"] and "_grouped_mm" in asked and asked[-1] == "add.Tensor"
    assert "_scaled_dot_product_flash_attention" in asked


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "delayed_scaling"])
def test_around_compiled_code(recipe: str) -> None:
    """What the policy saves is not computed again, and the bits are the same."""
    operator = PRODUCTS["fxquant"]

    def trained(policy: Any) -> tuple[dict[str, Tensor], int]:
        torch.compiler.reset()
        model, calls = Checkpointed(policy), Counter[Any]()
        backend = eager_backend(recipe)
        run = torch.compile(model.layers, backend=backend)

        class Count(RunsBesideDynamo):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                calls[func] += 1
                return func(*args, **(kwargs or {}))

        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
        for _ in range(2):
            y = checkpoint(run, x, use_reentrant=False, context_fn=model.contexts)
            calls.clear()
            with Count():
                y.square().sum().backward()
        return {name: p.grad for name, p in model.named_parameters()} | backend.state_dict(), calls[operator]

    (expected, again), (got, saved) = trained([]), trained([aten.addmm.default])
    assert_same_bits(got, expected)
    assert saved < again
