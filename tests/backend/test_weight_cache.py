"""Weights that stay quantized from step to step: how often they are quantized, and that none is stale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers import assert_same_bits, eager_backend, recomputable_mlp, train_step
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import fxquant
from fxquant.backend.weight_cache import WeightCache
from fxquant.passes.insert.cache_weights import Taken, Weight


class Counted:
    """A model whose weights are cached, and how many of them each call quantizes."""

    def __init__(self, model: nn.Module, recipe: Any = "mxfp8", **kwargs: Any) -> None:
        self.backend = eager_backend(recipe, cache_weights=True)
        self.run, self.count = torch.compile(model, backend=self.backend, **kwargs), 0
        assert self.backend.weights is not None
        quantize = self.backend.weights._quantize

        def counted(*args: Any) -> Any:
            self.count += 1
            return quantize(*args)

        self.backend.weights._quantize = counted  # type: ignore[method-assign]
        self.reference = torch.compile(model, backend=eager_backend(recipe))

    def __call__(self, x: Tensor, *, grad: bool = True) -> int:
        before = self.count
        with torch.set_grad_enabled(grad):
            y = self.run(x.requires_grad_(grad))
        with torch.no_grad():
            assert torch.equal(y, self.reference(x.detach())), "a stale weight"
        if grad:
            y.sum().backward()
        return self.count - before


def test_cached_weights_are_as_dense_as_graphs_expect_them() -> None:
    """Whatever strides the kernels give to scales."""

    def transposing(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., list[Tensor]]:
        return lambda *values: [part.mT.contiguous().mT for part in graph(*values)]

    weight = Weight((), torch.float32, "mxfp8_e4m3", False)
    directions = ("rowwise", "columnwise")
    cached = WeightCache(transposing).parts([Taken(0, weight, d) for d in directions], [torch.randn(96, 64)])
    assert [tuple(part.shape) for part in cached] == [(96, 64), (96, 2), (64, 96), (64, 3)]
    assert all(part.is_contiguous() for part in cached)


class WritesData(torch.optim.Optimizer):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.data.add_(1)


def test_a_changed_weight_is_quantized_again() -> None:
    layer, x = nn.Linear(64, 96, bias=False), torch.randn(32, 64)
    counted = Counted(layer)
    assert [counted(x), counted(x), counted(x, grad=False), counted(x)] == [1, 0, 0, 0]

    def swap_data() -> None:
        layer.weight.data = layer.weight.data * 2

    def write_in_place() -> None:
        with torch.no_grad():
            layer.weight.mul_(2)

    def new_parameter() -> None:
        layer.weight = nn.Parameter(torch.randn(96, 64))

    changes: dict[str, Callable[[], Any]] = {
        "memory": swap_data,
        "in place": write_in_place,
        "state_dict": lambda: layer.load_state_dict({"weight": torch.randn(96, 64)}),
        "parameter": new_parameter,
        "optimizer without versions": lambda: WritesData(layer.parameters(), {}).step(),
    }
    for name, change in changes.items():
        change()
        assert [counted(x), counted(x)] == [1, 0], name
    assert counted.backend.weights is not None
    assert len(counted.backend.weights._entries) == 1, "of a parameter that is gone"


def test_writes_without_a_version_need_clear_cache() -> None:
    layer, x = nn.Linear(64, 96, bias=False), torch.randn(32, 64)
    counted = Counted(layer)
    counted(x)
    layer.weight.data.mul_(2)
    with pytest.raises(AssertionError, match="a stale weight"):
        counted(x)
    counted.backend.clear_cache()
    assert counted(x) == 1


@pytest.mark.parametrize("write", ["parameter", "view", "data", "in a checkpoint"])
def test_weights_that_a_graph_writes_into_are_not_cached(write: str) -> None:
    """What was quantized before the call is not what the product reads."""

    def halve(weight: Tensor) -> Tensor:
        with torch.no_grad():
            {"view": weight[:], "data": weight.data}.get(write, weight).mul_(0.5)
        return weight

    class Halving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

        def body(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, halve(self.first.weight))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            x = checkpoint(self.body, x, use_reentrant=False) if write == "in a checkpoint" else self.body(x)
            return self.last(x)

    results = []
    for cached in (False, True):
        torch.compiler.reset()
        model, backend = Halving(), eager_backend("mxfp8", cache_weights=cached)
        run = torch.compile(model, backend=backend)
        x = torch.ones(32, 64)
        with torch.no_grad():
            results.append([run(x), run(x), model.first.weight])
    assert len(backend.weights._entries) == 1  # type: ignore[union-attr]
    for plain, cached_result in zip(*results, strict=True):
        assert torch.equal(plain, cached_result)


def test_weights_seen_through_views_and_casts_are_cached() -> None:
    """Autocast over float32 weights, a transposed parameter, and one that two layers share."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(64, 64), nn.Parameter(torch.randn(64, 96) / 8)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.a(self.a(x)) @ self.b

    results = []
    for options in ({}, {"cache_weights": True}):
        torch.compiler.reset()
        torch.manual_seed(0)
        net, backend = Net(), eager_backend("mxfp8", **options)
        run = torch.compile(net, backend=backend, fullgraph=True)
        x = torch.randn(32, 64, requires_grad=True)
        results.append(train_step(net, run, x) | train_step(net, run, x))
    assert_same_bits(*results)
    assert backend.weights is not None and len(backend.weights._entries) == 2


def test_set_recipe_keeps_a_cache_for_each() -> None:
    torch.manual_seed(0)
    net, x = recomputable_mlp(), torch.randn(8, 64)
    options = {"inner": "aot_eager", "cache_weights": True}
    run = fxquant.compile(net, "mxfp8", options=options)
    first = run(x).detach()
    run.set_recipe("current_scaling")
    other = run(x).detach()
    run.set_recipe("mxfp8")
    assert torch.equal(run(x), first) and not torch.equal(first, other)
    with torch.no_grad():
        net.up.weight.mul_(2)
    doubled = run(x).detach()
    assert torch.equal(doubled, torch.compile(net, backend=eager_backend("mxfp8"))(x))
    for p in net.parameters():
        p.data.mul_(2)
    run.clear_cache()
    assert torch.equal(run(x), torch.compile(net, backend=eager_backend("mxfp8"))(x))


def test_graphs_of_the_backend_by_name_share_their_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training, and evaluation of another size: the first quantizes."""
    made: list[list[str]] = []
    quantize = WeightCache._quantize
    monkeypatch.setattr(WeightCache, "_quantize", lambda self, p, w, d: made.append(d) or quantize(self, p, w, d))
    options = {"recipe": "mxfp8", "inner": "aot_eager", "cache_weights": True}
    layer = nn.Linear(64, 96, bias=False)
    run = torch.compile(layer, backend="fxquant", options=options)
    run(torch.randn(32, 64, requires_grad=True)).sum().backward()
    with torch.no_grad():
        run(torch.randn(16, 64))
    assert made == [["rowwise", "columnwise"]]
