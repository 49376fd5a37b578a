"""Weights stored quantized over two gloo processes: replicated by DDP, and sharded by FSDP2."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers import assert_same_bits
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fxquant
from fxquant.weights import QuantizedWeight, parts

EAGER = {"inner": "aot_eager"}


def model() -> nn.Sequential:
    torch.manual_seed(dist.get_rank())  # replicas begin with the values of the first
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64, bias=False))


def trained(run: nn.Module, called: nn.Module) -> dict[str, Tensor]:
    optimizer = torch.optim.AdamW(run.parameters(), 1e-2)
    for step in range(2):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        y = called(x)
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {**run.state_dict(), "output": y.detach()}


def replicated() -> None:
    results = []
    for store in (False, True):
        torch.compiler.reset()
        run = model()
        if store:
            fxquant.quantize_parameters(run, "mxfp8")
        parallel = DistributedDataParallel(run)
        results.append(trained(run, torch.compile(parallel, backend=fxquant.Backend("mxfp8", inner="aot_eager"))))
    assert isinstance(run[0].weight, QuantizedWeight) and run[0].weight.is_stored
    assert_same_bits(*results)


def test_replicas_have_the_bits_of_plain_ones(ranks: Ranks) -> None:
    ranks.run(replicated)


def sharded_on(card: tuple[int, int]) -> list[str]:
    with mock.patch.object(parts, "capability", lambda device: card):
        return sharded()


def sharded() -> list[str]:
    results, holds = [], []
    for store in (False, True):
        torch.compiler.reset()
        torch.manual_seed(0)
        run = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64, bias=False))
        (fxquant.quantize_parameters if store else fxquant.prepare_fsdp)(run, "mxfp8")
        fully_shard(run, mesh=init_device_mesh("cpu", (2,)))
        run.compile(backend=fxquant.Backend("mxfp8", model=run, inner="aot_eager"))
        state = trained(run, run)
        results.append({name: getattr(value, "_local_tensor", value) for name, value in state.items()})
        holds.append(repr(run[0].weight.to_local()))
    assert_same_bits(*results)
    return holds


@pytest.mark.parametrize("card", [(10, 0), (0, 0)], ids=str)
def test_shards_of_stored_weights_are_those_of_prepared_ones(ranks: Ranks, card: tuple[int, int]) -> None:
    """On a card that reads scales of blocks too, whose order those of a shard of 128 rows have."""
    for prepared, stored in ranks.run(sharded_on, card):
        assert prepared == stored and stored.endswith("holds master)"), stored
