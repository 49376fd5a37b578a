"""Blocks whose weights or tokens are spread over ranks, by FSDP2 and by tensor parallelism, for each provider."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import fxquant
from fxquant.bench.providers import GATHERED, recipe_of
from fxquant.bench.training import Blocks, Stack, rotate

INNER = "inductor"
"""The backend that compiles what all providers run."""


class Attention(nn.Module):
    """Causal attention with rotary embedding, of as many heads as its weights have."""

    def __init__(self, size: Stack) -> None:
        super().__init__()
        self.head_dim = size.hidden // size.heads
        kv = size.kv_heads * self.head_dim
        self.q, self.o = (nn.Linear(size.hidden, size.hidden, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(size.hidden, kv, bias=False) for _ in range(2))

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (p(h).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.o(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, size: Stack) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(size.hidden, size.ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(size.ffn, size.hidden, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(h)) * self.up(h))  # type: ignore[no-any-return]


class Block(nn.Module):
    """A Llama decoder block in two modules, in front of which tensor parallelism gathers tokens."""

    def __init__(self, size: Stack) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(size.hidden), nn.RMSNorm(size.hidden)
        self.attention, self.feed_forward = Attention(size), FeedForward(size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))  # type: ignore[no-any-return]


class Held(nn.Module):
    """A module that computes nothing: its forward is the gather of its block's weights, where FSDP2 has sharded it."""

    def __init__(self, size: Stack) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(size)])

    def forward(self, x: Tensor) -> Tensor:
        return x


def mesh_of(device: str) -> DeviceMesh:
    """All ranks, along one axis."""
    return init_device_mesh(device, (dist.get_world_size(),))


def is_torchao(provider: str) -> bool:
    """Returns True for a provider of torchao."""
    return provider.startswith("torchao ")


def sharded(provider: str, model: nn.Module, mesh: DeviceMesh, *, mixed: bool) -> Callable[[], object]:
    """Shards a model by FSDP2, each block by itself, and returns what has to run after each step of the optimizer.

    With `mixed`, weights are float32 and computed with in bfloat16, and gradients are reduced in float32.
    """
    after: Callable[[], object] = _nothing
    gathered = provider.endswith(GATHERED)
    blocks: Any = model.blocks
    if mixed:
        for parameter in model.parameters():
            parameter.data = parameter.data.float()
    if is_torchao(provider):
        to_torchao(provider, model, gathered=gathered)
        if gathered:
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp  # type: ignore[import-not-found]

            after = functools.partial(precompute_float8_dynamic_scale_for_fsdp, model)
    elif gathered and (recipe := recipe_of(provider)) is not None:
        fxquant.prepare_fsdp(model, recipe, list(blocks))
        after = functools.partial(fxquant.precompute_scales, model)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
    if isinstance(model, Held):
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        return after
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return after


def _nothing() -> None:
    """The step after an optimizer that needs none."""


def to_torchao(provider: str, model: nn.Module, *, gathered: bool = False) -> None:
    """Gives a model torchao's linear layers, which scale tensors and gather weights in FP8 if they shall."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    emulate = next(model.parameters()).device.type == "cpu"
    convert_to_float8_training(
        model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=gathered, emulate=emulate)
    )


def split(provider: str, model: Blocks, mesh: DeviceMesh) -> None:
    """Spreads each block over ranks: heads and features within its two modules, tokens outside of them."""
    columns: type[ColwiseParallel] = ColwiseParallel
    rows: type[RowwiseParallel] = RowwiseParallel
    prepared: type[PrepareModuleInput] = PrepareModuleInput
    if is_torchao(provider):
        from torchao.float8 import float8_tensor_parallel as styles

        to_torchao(provider, model)
        columns, rows = styles.Float8ColwiseParallel, styles.Float8RowwiseParallel
        prepared = styles.PrepareFloat8ModuleInput
    for block in model.blocks:
        plan: Mapping[str, ParallelStyle] = {
            "attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel(),
            "attention": prepared(
                input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
            ),
            "feed_forward": prepared(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            **{f"attention.{name}": columns() for name in "qkv"}, "attention.o": rows(output_layouts=Shard(1)),
            "feed_forward.gate": columns(), "feed_forward.up": columns(),
            "feed_forward.down": rows(output_layouts=Shard(1)),
        }  # fmt: skip
        parallelize_module(block, mesh, dict(plan))


def compiled(provider: str, model: Blocks) -> None:
    """Compiles the blocks of a model in place, behind the hooks of FSDP2, into code that all of them share."""
    recipe = recipe_of(provider)
    if recipe is not None:
        fxquant.compile_blocks(model, recipe, list(model.blocks), options={"inner": INNER}, dynamic=False)
        return

    def call(block: nn.Module, *args: Tensor) -> Any:
        return type(block).forward(block, *args)

    run = torch.compile(call, backend=INNER, fullgraph=True, dynamic=False)
    for block in model.blocks:
        setattr(block, "forward", functools.partial(run, block))  # noqa: B010
