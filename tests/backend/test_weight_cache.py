"""Weights that stay quantized from step to step: how often they are quantized, and that none is stale."""

from __future__ import annotations

import ctypes
import functools
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers import assert_same_bits, eager_backend, recomputable_mlp, train_step
from torch import Tensor, fx, nn
from torch.utils import dlpack
from torch.utils.checkpoint import checkpoint

import fxquant
from fxquant.backend import backend as backend_module
from fxquant.backend.backend import Backend
from fxquant.backend.outside import Quantizations
from fxquant.backend.weight_cache import WeightCache
from fxquant.compat import torch_version
from fxquant.errors import FxQuantWarning
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
    cache = WeightCache(Quantizations(transposing))
    cached = cache.of([Taken(0, weight, d) for d in directions]).parts([torch.randn(96, 64)])
    assert [tuple(part.shape) for part in cached] == [(96, 64), (96, 2), (64, 96), (64, 3)]
    assert all(part.is_contiguous() for part in cached)


class WritesMemory(torch.optim.Optimizer):
    """Like kernels that get addresses."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.untyped_storage().copy_(torch.randn(p.shape).untyped_storage())


def merged(layer: nn.Linear, sign: int) -> None:
    """Adds an adapter, as PEFT does."""
    layer.weight.data += sign * torch.ones(96, 4) @ torch.ones(4, 64)


def assigned(layer: nn.Linear, times: int) -> None:
    """The allocator often returns the first address."""
    for _ in range(times):
        layer.weight.data = torch.randn(96, 64)


def swapped_there_and_back(layer: nn.Linear) -> None:
    other = nn.Parameter(torch.randn(96, 64))
    torch.utils.swap_tensors(layer.weight, other)
    with torch.no_grad():
        other.zero_().add_(1)
    torch.utils.swap_tensors(layer.weight, other)


def written_by_a_borrower(layer: nn.Linear) -> None:
    borrower = torch.empty(0)
    borrower.data = layer.weight
    borrower.mul_(2)


def written_by_numpy(layer: nn.Linear) -> None:
    layer.weight.detach().numpy()[:] = 0.5


CHANGES: dict[str, Callable[[nn.Linear], Any]] = {
    "other memory": lambda layer: assigned(layer, 1),
    "other memory twice": lambda layer: assigned(layer, 2),
    "all memory twice": lambda layer: [assigned(layer, 2) for _ in range(3)],
    "merged": lambda layer: merged(layer, 1),
    "unmerged": lambda layer: merged(layer, -1),
    "data in place": lambda layer: layer.weight.data.mul_(2),
    "data of a view": lambda layer: layer.weight.detach()[3].data.copy_(torch.randn(64)),
    "state_dict, in place": lambda layer: layer.load_state_dict({"weight": torch.randn(96, 64)}),
    "state_dict, assigned": lambda layer: layer.load_state_dict({"weight": torch.randn(96, 64)}, assign=True),
    "tensors of state_dict": lambda layer: layer.state_dict()["weight"].copy_(torch.randn(96, 64)),
    "data of state_dict": lambda layer: layer.state_dict()["weight"].data.copy_(torch.randn(96, 64)),
    "in place": lambda layer: nn.init.normal_(layer.weight),
    "a view": lambda layer: layer.weight.detach()[:, 5:].mul_(2),
    "foreach": lambda layer: torch._foreach_mul_([layer.weight.detach()], 2),
    "set_": lambda layer: torch.no_grad()(layer.weight.set_)(torch.randn(96, 64)),
    "swapped": lambda layer: torch.utils.swap_tensors(layer.weight, nn.Parameter(torch.randn(96, 64))),
    "swapped there and back": swapped_there_and_back,
    "a borrower": written_by_a_borrower,
    "a parameter": lambda layer: setattr(layer, "weight", nn.Parameter(torch.randn(96, 64))),
    "the same memory": lambda layer: setattr(layer, "weight", nn.Parameter(layer.weight.data.mul_(2))),
    "optimizer": lambda layer: WritesMemory(layer.parameters(), {}).step(),
}


def test_a_changed_weight_is_quantized_again() -> None:
    layer, x = nn.Linear(64, 96, bias=False), torch.randn(32, 64)
    counted = Counted(layer)
    assert [counted(x), counted(x), counted(x, grad=False), counted(x)] == [1, 0, 0, 0]
    for name, change in CHANGES.items():
        change(layer)
        assert [counted(x), counted(x)] == [1, 0], name
    assert counted.backend.weights is not None
    assert len(counted.backend.weights._entries) == 1, "of a parameter that is gone"


def test_an_unchanged_weight_is_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each place of a graph remembers its parts, until they are forgotten."""
    asked: list[Tensor] = []
    get = WeightCache.get
    monkeypatch.setattr(WeightCache, "get", lambda self, p, taken: asked.append(p) or get(self, p, taken))
    layer, x = nn.Sequential(nn.Linear(64, 96, bias=False), nn.Linear(96, 64, bias=False)), torch.randn(32, 64)
    counted, counts = Counted(layer), []
    for change in (lambda: None, lambda: None, lambda: layer[1].weight.data.add_(1), counted.backend.clear_cache):
        change()
        asked.clear()
        counts.append((counted(x), len(asked)))
    assert counts == [(2, 2), (0, 0), (1, 1), (2, 2)]


def functions_entered(layers: int, *, cached: bool) -> int:
    """Counts the functions of Python that a call enters behind the first calls; the graph itself does nothing."""
    torch.compiler.reset()
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(layers)))
    run, x, entered = torch.compile(model, backend=eager_backend("mxfp8", cache_weights=cached)), torch.randn(32, 32), 0

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal entered
        entered += event == "call"

    with torch.no_grad(), mock.patch.object(fx.graph_module._WrappedCall, "__call__", lambda *_: (x,)):
        run(x)
        run(x)
        sys.setprofile(count)
        try:
            run(x)
        finally:
            sys.setprofile(None)
    return entered


def test_a_call_asks_about_all_weights_at_once() -> None:
    """The host binds short steps, such as those of decoding: no function of Python runs for each weight."""
    few, many = (functions_entered(layers, cached=True) for layers in (2, 6))
    assert few == many <= functions_entered(2, cached=False) + 10


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(self.linear(x))


def test_a_graph_of_several_modules_remembers_the_weights_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are compiled each run one graph. A change of one is seen; freed weights take their parts along."""
    asked: list[Tensor] = []
    get = WeightCache.get
    monkeypatch.setattr(WeightCache, "get", lambda self, p, taken: asked.append(p) or get(self, p, taken))
    blocks = nn.Sequential(*(Block() for _ in range(3)))
    backend, x = eager_backend("mxfp8", cache_weights=True), torch.randn(32, 64)
    for block in blocks:
        block.compile(backend=backend)
    with torch.no_grad():
        first = blocks(x)
        assert torch.equal(blocks(x), first) and len(asked) == 3
        blocks[1].linear.weight.mul_(-1)
        second = blocks(x)
        assert not torch.equal(second, first) and len(asked) == 3 + 1
        assert torch.equal(blocks(x), second) and len(asked) == 3 + 1
    assert backend.captured == 1 and backend.weights is not None
    part = weakref.ref(next(iter(next(iter(backend.weights._entries.values())).parts.values()))[0])
    del blocks, block
    asked.clear()
    gc.collect()
    assert not backend.weights._entries and part() is None


def flat(layer: nn.Linear) -> Tensor:
    buffer = torch.randn(2 * 96 * 64)
    layer.weight.data = buffer[: 96 * 64].view(96, 64)
    return buffer


def inference(layer: nn.Linear) -> Tensor:
    with torch.inference_mode():
        layer.weight = nn.Parameter(torch.randn(96, 64), requires_grad=False)
    return layer.weight


REACHED: dict[str, Callable[[nn.Linear], Any]] = {
    "data": lambda layer: layer.weight.data,
    "a flat buffer": flat,
    "a NumPy array": lambda layer: layer.weight.detach().numpy(),
    "other processes": lambda layer: layer.share_memory().weight.detach(),
    "inference_mode": inference,
}


@pytest.mark.parametrize("name", REACHED)
def test_a_weight_that_others_can_write_is_not_cached(name: str) -> None:
    """What is held from before the first call is written after it; it is said once, of a layer, at the user's line."""
    layer, x = nn.Linear(64, 96, bias=False), torch.randn(32, 64)
    holder = REACHED[name](layer)
    counted = Counted(layer if name == "data" else nn.Sequential(layer))
    where = "<model>" if name == "data" else "0"
    with pytest.warns(FxQuantWarning, match=rf"the weight \[96, 64\] of layer {where} in every call") as told:
        counts = [counted(x, grad=False)]
        for value in (1.0, 2.0):
            if isinstance(holder, Tensor):
                with torch.inference_mode():
                    holder.fill_(value)
            else:
                holder[:] = value
            counts.append(counted(x, grad=False))
    assert counts == [1, 1, 1] and [w.filename for w in told] == [__file__]
    assert counted.backend.weights is not None and not counted.backend.weights._entries
    del holder
    layer.weight = nn.Parameter(layer.weight.clone())
    assert [counted(x), counted(x)] == [1, 0]


def test_what_holds_a_weight_safely_does_not_count() -> None:
    """Several forwards before a backward, other tensors' `.data`, a hook, a saved graph, functional calls."""
    layer, x = nn.Linear(64, 96), torch.randn(32, 64, requires_grad=True)
    counted = Counted(layer)
    assert counted(x) == 1
    outputs = []
    for _ in range(3):
        before = counted.count
        outputs.append(counted.run(x))
        x.data.mul_(1)
        layer.bias.data.add_(1)
        assert counted.count == before
    torch.stack(outputs).sum().backward()
    parameters = dict(layer.named_parameters())
    assert torch.equal(torch.func.functional_call(counted.run, parameters, (x,)), counted.run(x))
    assert counted.count == 1
    other = {name: nn.Parameter(2 * p.detach()) for name, p in parameters.items()}
    doubled = torch.func.functional_call(counted.run, other, (x,))
    assert torch.equal(doubled, torch.func.functional_call(counted.reference, other, (x,)))


def other_view(weight: Tensor) -> Tensor:
    return torch.empty(0).set_(weight.untyped_storage(), 0, (96, 64), (64, 1))  # type: ignore[call-overload]


BESIDE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "storage": lambda weight, new: weight.untyped_storage().copy_(new.untyped_storage()),
    "a part of a storage": lambda weight, new: weight.untyped_storage()[:4096].fill_(0),
    "bytes of a storage": lambda weight, new: weight.untyped_storage().__setitem__(3, 0),
    "typed storage": lambda weight, new: weight.storage().fill_(0.5),
    "set_": lambda weight, new: other_view(weight).copy_(new),
    "DLPack": lambda weight, new: torch.from_dlpack(weight.detach()).copy_(new),
    "a capsule": lambda weight, new: torch.from_dlpack(dlpack.to_dlpack(weight.detach())).copy_(new),
    "NumPy by DLPack": lambda weight, new: np.from_dlpack(weight.detach()).__imul__(2),
}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_writes_that_no_tensor_counts_are_seen() -> None:
    """Each between two calls of one model, through something that is gone by then; also through a storage kept."""
    layer, x = nn.Linear(64, 96, bias=False), torch.randn(32, 64)
    counted, kept = Counted(layer), layer.weight.untyped_storage()
    assert [counted(x, grad=False), counted(x, grad=False)] == [1, 0]
    for name, write in BESIDE.items():
        write(layer.weight, torch.randn(96, 64))
        assert [counted(x, grad=False), counted(x, grad=False)] == [1, 0], name
    kept.fill_(0)
    assert [counted(x, grad=False), counted(x, grad=False)] == [1, 0]


def test_collectives_on_a_weight_are_seen() -> None:
    layer, x = nn.Linear(64, 96, bias=False), torch.randn(32, 64)
    counted = Counted(layer)
    assert [counted(x, grad=False), counted(x, grad=False)] == [1, 0]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for write in (functools.partial(dist.broadcast, src=0), dist.all_reduce, functools.partial(dist.reduce, dst=0)):
            with torch.no_grad():
                write(layer.weight)
            assert [counted(x, grad=False), counted(x, grad=False)] == [1, 0]
    finally:
        dist.destroy_process_group()


def test_writes_by_address_need_clear_cache() -> None:
    layer, x = nn.Linear(64, 96, bias=False), torch.randn(32, 64)
    counted = Counted(layer)
    counted(x)
    ctypes.memset(layer.weight.data_ptr(), 0, layer.weight.nbytes)
    with pytest.raises(AssertionError, match="a stale weight"):
        counted(x)
    counted.backend.clear_cache()
    assert counted(x) == 1


def test_weights_on_the_meta_device_have_no_values() -> None:
    with torch.device("meta"):
        layer, x = nn.Linear(64, 96), torch.empty(32, 64)
    run = torch.compile(layer, backend=eager_backend("mxfp8", cache_weights=True))
    assert run(x).is_meta and run(x).shape == (32, 96)
    layer.to_empty(device="cpu")
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    assert Counted(layer)(torch.randn(32, 64)) == 1


@pytest.mark.skipif(torch_version() < (2, 13), reason="torch 2.11 cannot compile in several threads at once")
def test_threads_share_weights() -> None:
    """The first calls of all quantize while others compile, each for a size of its own."""

    def call(rows: int) -> None:
        try:
            for _ in range(3):
                x = torch.randn(rows, 64)
                with torch.no_grad():
                    results.append(torch.equal(run(x), reference(x)))
        except Exception as error:
            results.append(error)

    for _ in range(4):
        torch.compiler.reset()
        model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32))
        backend = eager_backend("mxfp8", cache_weights=True)
        run, reference = (torch.compile(model, backend=b, dynamic=False) for b in (backend, eager_backend("mxfp8")))
        results: list[Any] = []
        threads = [threading.Thread(target=call, args=(8 * (i + 1),)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        call(8)  # alone: a weight that another thread reads at that moment is not kept
        assert results == [True] * 15
        assert backend.weights is not None and len(backend.weights._entries) == 2


def test_quantizations_run_outside_of_cuda_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a CUDA graph has written is gone when it runs again; payloads stay."""
    settings: list[Mapping[str, Any]] = []

    def compiled(graph: fx.GraphModule, _inputs: Sequence[Any], patches: Mapping[str, Any]) -> Any:
        settings.append(patches)
        return graph.forward

    monkeypatch.setattr(backend_module, "compile_with_inductor", compiled)
    layer, x = nn.Linear(64, 96), torch.randn(32, 64)
    backend = Backend("mxfp8", cache_weights=True, mode="reduce-overhead")
    with torch.no_grad():
        torch.compile(layer, backend=backend)(x)
    graph, quantization = settings
    assert graph["triton.cudagraphs"] and not quantization["triton.cudagraphs"]


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
        p.untyped_storage().copy_(torch.randn(p.shape).untyped_storage())
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
