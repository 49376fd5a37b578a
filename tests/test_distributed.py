"""Distributed wrappers in one process over gloo: DDP, whose optimizer splits the captured graph, FSDP2, DTensors."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import Block, assert_same_bits, eager_backend
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fxquant
from fxquant import CustomRecipe, factories


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.gelu(layer(x))
        return x


@pytest.fixture
def group(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("recipe", ["mxfp8", "delayed_scaling"])
def test_split_graphs_are_quantized_whole(recipe: str, group: dist.ProcessGroup) -> None:
    backend = eager_backend(recipe, amax_group=group)
    run = torch.compile(nn.parallel.DistributedDataParallel(Stack(), bucket_cap_mb=1.2), backend=backend)
    for _ in range(2):
        run(torch.randn(32, 512)).sum().backward()
    report = backend.report()
    assert report.coverage == 1
    assert sorted({d.layer for d in report.decisions}) == [f"layers.{i}" for i in range(4)]
    scales = sum(t.numel() for key, t in backend.state_dict().items() if key.endswith("scale"))
    assert scales == (12 if recipe == "delayed_scaling" else 0)


def test_split_graphs_take_cached_weights(group: dist.ProcessGroup) -> None:
    gradients = []
    for cached in (False, True):
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(Stack(), bucket_cap_mb=1.2)
        run = fxquant.compile(model, "mxfp8", options={"inner": "aot_eager", "cache_weights": cached})
        for _ in range(2):
            run(torch.ones(32, 512)).sum().backward()
        assert len(run.report().graphs["forward"].split("class ")) > 2, "several buckets"
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert_same_bits(*gradients)


class Blocks(nn.Module):
    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.layers:
            x = block(x)
        return x


def place_rules(model: nn.Module) -> CustomRecipe:
    """The first and the last block in high precision, and MXFP8 for the others but for NVFP4 in one."""
    inner = factories.by_name({r"layers\.2\..*": "nvfp4"}, default=factories.mxfp8)
    return CustomRecipe(qfactory=factories.first_and_last(inner, first=1, last=1, layers=model))


def call_of(blocks: dict[str, list[nn.Module]], x: Tensor) -> Tensor:
    return blocks["one"][0](x)


def one_by_one(model: nn.Module, call: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        for block in model.layers:
            x = call({"one": [block]}, x)
        return x

    return run


WAYS = {
    "whole": lambda model, backend: torch.compile(model, backend=backend),
    "in_place": lambda model, backend: [block.compile(backend=backend) for block in model.layers] and model,
    "in_function": lambda model, backend: one_by_one(model, torch.compile(call_of, backend=backend)),
    "by_class": lambda model, backend: nn.Module.compile(model, backend=backend) or model,
}


def six_blocks() -> tuple[Blocks, Tensor]:
    torch.manual_seed(0)
    return Blocks(6), torch.randn(32, 64, requires_grad=True)


@functools.cache
def block_by_block() -> Tensor:
    """Returns the output of `six_blocks`, each block compiled alone under its recipe of `place_rules`."""
    model, x = six_blocks()
    names = ("high_precision", "mxfp8", "nvfp4", "mxfp8", "mxfp8", "high_precision")
    alone = {name: fxquant.compile(Blocks(1), name, options={"inner": "aot_eager"}) for name in set(names)}
    for name, block in zip(names, model.layers, strict=True):
        alone[name].load_state_dict(block.state_dict(prefix="_orig_mod.layers.0."))
        x = alone[name](x).detach().requires_grad_()
    return x.detach()


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_rules_by_name_hold_in_graphs_that_blocks_share(group: dist.ProcessGroup, way: str, sharded: bool) -> None:
    expected = block_by_block()
    torch.compiler.reset()
    model, x = six_blocks()
    recipe = place_rules(model)
    if sharded:
        for block in model.layers:
            fully_shard(block, mesh=init_device_mesh("cpu", (1,)))
        fully_shard(model)
    backend = eager_backend(recipe, model=model)
    run = WAYS[way](model, backend)
    for _ in range(2):
        assert torch.equal(run(x), expected)
    report = backend.report()
    answers = {d.layer: str(d.quantizer) for d in report.decisions if d.role.tensor_type == "weight"}
    assert list(answers) == [f"layers.{i}.up" for i in range(6)]
    assert [answer == "None" for answer in answers.values()] == [True, False, False, False, False, True]
    assert answers["layers.1.up"] == answers["layers.4.up"] != answers["layers.2.up"]
    assert len({d.site for d in report.decisions}) == 6 and not report.unused
    captured = 1 if way in ("whole", "by_class") and not sharded else 3
    assert backend.captured == captured, "blocks with equal answers share a graph"


def test_payloads_of_gathered_weights_are_not_kept(group: dist.ProcessGroup) -> None:
    model, backend = Blocks(), eager_backend("mxfp8", cache_weights=True)
    for block in model.layers:
        block.compile(backend=backend)
        fully_shard(block, mesh=init_device_mesh("cpu", (1,)), reshard_after_forward=True)
    fully_shard(model)
    model(torch.randn(32, 64)).sum().backward()
    assert backend.report().coverage == 1
    assert backend.weights is not None and not backend.weights._entries


def test_a_backend_with_a_group_can_be_copied(group: dist.ProcessGroup) -> None:
    """Lightning copies the arguments of every torch.compile."""
    copied = copy.deepcopy({"backend": eager_backend("mxfp8", amax_group=group)})["backend"]
    torch.compile(nn.Linear(64, 64), backend=copied)(torch.randn(32, 64))
    assert copied.options.amax_group is group and copied.report().coverage == 1


def test_amax_reduction_over_one_rank_changes_nothing(group: dist.ProcessGroup) -> None:
    states = []
    for ranks in (None, group):
        torch.manual_seed(0)
        layer = nn.Linear(64, 64)
        backend = eager_backend(fxquant.DelayedScaling(amax_history_len=4), amax_group=ranks)
        run = torch.compile(layer, backend=backend)
        for _ in range(3):
            run(torch.randn(16, 64)).sum().backward()
        states.append(backend.state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_products_of_distributed_tensors_are_quantized(group: dist.ProcessGroup) -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    parallelize_module(model, init_device_mesh("cpu", (1,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    report = fxquant.explain(model, "current_scaling", torch.randn(32, 64))
    assert {(d.layer, d.shape) for d in report.decisions if d.role.tensor_type == "weight"} == {
        ("0", (128, 64)), ("2", (64, 128)),
    }  # fmt: skip
    assert report.flops["total"] == 5 * 2 * 32 * 64 * 128
    assert report.coverage == 1
