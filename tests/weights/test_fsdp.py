"""FSDP2 that gathers weights quantized, two gloo processes: the bits of one process that runs each rank's batch.

Every shard has whole blocks, so that shards behind each other are the quantized whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import assert_same_bits
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import fxquant
from fxquant import RecipeError

EAGER = {"inner": "aot_eager"}
STEPS = 3


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Checkpointed(Block):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class Model(nn.Module):
    def __init__(self, kind: type[Block] = Block, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Linear(32, width)
        self.layers = nn.ModuleList(kind(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x


def model(width: int = 64, kind: type[Block] = Block) -> Model:
    torch.manual_seed(0)
    return Model(kind, width)


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(32, 32, generator=torch.Generator().manual_seed(10 * step + rank))


@contextlib.contextmanager
def counted() -> Iterator[list[tuple[torch.dtype, int]]]:
    """Gives the dtype and the bytes of each all-gather's input in this scope."""
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    gather, sent = getattr(dist, name), []

    def count(*args: Any, **kwargs: Any) -> Any:
        shard = kwargs["input_tensor"] if "input_tensor" in kwargs else args[1]
        sent.append((shard.dtype, shard.numel() * shard.element_size()))
        return gather(*args, **kwargs)

    setattr(dist, name, count)
    try:
        yield sent
    finally:
        setattr(dist, name, gather)


def sharded(run: Model, recipe: str, **keywords: Any) -> Model:
    fxquant.prepare_fsdp(run, recipe, run.layers)
    for layer in run.layers:
        fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), **keywords)
    fully_shard(run, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), **keywords)
    fxquant.compile_blocks(run, recipe, run.layers, options=EAGER)
    return run


def trained(run: Model, parts: Callable[[int], list[Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs of the last part of each step, and the parameters after the last one."""
    optimizer, outputs = torch.optim.AdamW(run.parameters(), 1e-2), []
    for step in range(STEPS):
        inputs = parts(step)
        for x in inputs:
            output = run(x)
            (output.square().mean() / len(inputs)).backward()
        outputs.append(output.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    return outputs, [p.detach() for p in run.state_dict().values()]


def reference(recipe: str, kind: type[Block] = Block) -> tuple[list[Tensor], list[Tensor]]:
    """The same of one process with both batches, this rank's last: sums of two do not depend on the order."""
    run = fxquant.compile_blocks(model(kind=kind), recipe, options=EAGER)
    return trained(run, lambda step: [batch(step, 1 - dist.get_rank()), batch(step, dist.get_rank())])


def compare(recipe: str, keywords: dict[str, Any]) -> list[tuple[torch.dtype, int]]:
    """Holds bits to those of the reference; returns what the last forward and backward gathered."""
    outputs, parameters = reference(recipe)
    torch.compiler.reset()
    run = sharded(model(), recipe, **keywords)
    own, shards = trained(run, lambda step: [batch(step, dist.get_rank())])
    assert fxquant.report(run).decisions and not [d for d in fxquant.report(run).decisions if d.quantizer is None]
    assert all(type(shard._local_tensor) is Tensor for shard in shards)
    assert_same_bits(dict(enumerate(own)), dict(enumerate(outputs)))
    assert_same_bits(dict(enumerate(s.full_tensor() for s in shards)), dict(enumerate(parameters)))
    with counted() as sent:
        run(batch(0, dist.get_rank())).sum().backward()
    return sent


ELEMENTS = 2 * 2 * 64 * 64 // 2
"""The elements of the weights in a shard of a block; the rest is a bias and a norm."""
REST = 4 * (128 + 64 + 64) // 2


def test_a_shard_sends_one_byte_an_element_in_the_direction_of_the_pass(ranks: Ranks) -> None:
    for sent in ranks.run(compare, "mxfp8", {}):
        quantized = [count - REST for dtype, count in sent if dtype == torch.uint8]
        assert len(quantized) == 4, "a gather for each block in each pass"
        assert {count / ELEMENTS for count in quantized} == {1 + 1 / 32}


def test_what_is_kept_is_gathered_once_in_both_directions(ranks: Ranks) -> None:
    for sent in ranks.run(compare, "mxfp8", {"reshard_after_forward": False}):
        quantized = [count - REST for dtype, count in sent if dtype == torch.uint8]
        assert len(quantized) == 2 and {count / ELEMENTS for count in quantized} == {2 + 2 / 32}


def checkpointed(reentrant: bool, outside: bool) -> list[tuple[torch.dtype, int]]:
    Checkpointed.reentrant = reentrant
    outputs, parameters = reference("mxfp8", Checkpointed)
    torch.compiler.reset()
    run = model(kind=Checkpointed)
    if outside:  # the checkpoint is around what is sharded and compiled
        run = sharded(model(), "mxfp8")
        for i, layer in enumerate(run.layers):
            layer.register_forward_pre_hook(lambda *_: None)
            run.layers[i] = Around(layer, reentrant)
    else:
        run = sharded(run, "mxfp8")
    own, shards = trained(run, lambda step: [batch(step, dist.get_rank())])
    assert_same_bits(dict(enumerate(own)), dict(enumerate(outputs)))
    assert_same_bits(dict(enumerate(s.full_tensor() for s in shards)), dict(enumerate(parameters)))


class Around(nn.Module):
    def __init__(self, layer: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.layer, self.reentrant = layer, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_run_again_with_what_the_first_run_had(ranks: Ranks, reentrant: bool, outside: bool) -> None:
    ranks.run(checkpointed, reentrant, outside)


def cut_blocks() -> str:
    run = sharded(model(width=48), "mxfp8")
    with pytest.raises(RecipeError) as caught:
        run(batch(0, 0))
    return str(caught.value)


def test_a_cut_through_a_block_is_refused_with_its_layer(ranks: Ranks) -> None:
    for message in ranks.run(cut_blocks):
        assert message.startswith("layers.0.up.weight [96, 48] is cut into 2 shards of 48 along axis 0"), message
        assert "multiples of 32" in message
