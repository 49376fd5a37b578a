"""Gathers of weights that stand in the captured graph: DTensors that a model redistributes by itself (SimpleFSDP)."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import assert_same_bits
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fxquant

_COLLECTIVES = torch.ops._c10d_functional


class Linear(nn.Module):
    """A linear layer that gathers its weight, again in the backward if `reshard`."""

    def __init__(self, k: int, n: int, reshard: bool) -> None:
        super().__init__()
        self.weight, self.reshard = nn.Parameter(torch.randn(n, k) / k**0.5), reshard

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self.weight, "placements"):
            return nn.functional.linear(x, self.weight)
        weight = self.weight
        if self.reshard:
            weight = checkpoint(gathered, weight, use_reentrant=False, context_fn=contexts)
        else:
            weight = gathered(weight)
        return nn.functional.linear(x, weight)


def gathered(weight: Any) -> Tensor:
    return weight.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial(reduce_op="sum")])


def policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    again = (_COLLECTIVES.all_gather_into_tensor.default, _COLLECTIVES.wait_tensor.default)
    return CheckpointPolicy.MUST_RECOMPUTE if operator in again else CheckpointPolicy.PREFER_SAVE


def contexts() -> Any:
    return create_selective_checkpoint_contexts(policy)


class Model(nn.Module):
    def __init__(self, reshard: bool) -> None:
        super().__init__()
        self.up, self.down = Linear(256, 256, reshard), Linear(256, 256, reshard)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


def trained(run: nn.Module, inputs: list[Tensor]) -> dict[str, Tensor]:
    results = {}
    for i, x in enumerate(inputs):
        results[f"output {i}"] = output = run(x)
        (output.square().sum() / dist.get_world_size()).backward()
    return results | {name: p.grad for name, p in run.named_parameters()}


def traced(recipe: str, reshard: bool) -> list[float]:
    """Holds bits to those of one process; returns the bytes an element that forward and backward gather."""
    torch.manual_seed(0)
    run, x = Model(reshard), [torch.randn(32, 256, requires_grad=True) for _ in range(2)]
    ranks = dist.get_rank(), 1 - dist.get_rank()
    plain = fxquant.compile(run, recipe, options={"inner": "aot_eager"})
    expected = trained(plain, [x[rank] for rank in ranks])
    run.zero_grad()
    torch.compiler.reset()
    mesh = init_device_mesh("cpu", (2,))
    for layer in (run.up, run.down):
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))
    sharded = fxquant.compile(run, recipe, options={"inner": "aot_eager"})
    results = trained(sharded, [x[ranks[0]]])
    report = sharded.report()
    assert report.coverage == 1 and {d.layer for d in report.decisions} == {"up", "down"}
    both = {**results, **{name: results[name].full_tensor() for name in results if name.endswith("weight")}}
    assert_same_bits({"output": both["output 0"]}, {"output": expected["output 0"]})
    for name in ("up", "down"):
        torch.testing.assert_close(both[f"_orig_mod.{name}.weight"], expected[f"_orig_mod.{name}.weight"])
    return [bytes_an_element(report.graphs[phase]) for phase in ("forward", "backward")]


def bytes_an_element(text: str) -> float:
    """The bytes of all gathers in a graph, over the elements of both weights."""
    found = re.findall(r'"(u8|f32)\[(\d+), (\d+)\]" = torch.ops._c10d_functional.all_gather_into_tensor', text)
    assert len(found) == text.count("all_gather_into_tensor.default(")
    return sum({"u8": 1, "f32": 4}[dtype] * int(rows) * int(columns) for dtype, rows, columns in found) / (2 * 256**2)


SIZES = {
    "mxfp8": ([1 + 1 / 32] * 2, [2 + 2 / 32, 0]),
    "current_scaling": ([1] * 2, [1, 0]),
    "float8_blockwise": ([1 + 4 / 128**2] * 2, [2 + 8 / 128**2, 0]),
    "rowwise": ([1 + 4 / 256, 1], [2 + 4 / 256, 0]),
}
"""The bytes an element in forward and backward, where each gathers for itself and where the forward does for both."""


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("recipe", SIZES)
def test_payloads_are_gathered(ranks: Ranks, recipe: str, reshard: bool) -> None:
    for sizes in ranks.run(traced, recipe, reshard):
        assert sizes == SIZES[recipe][not reshard]
