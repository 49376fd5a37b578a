"""Tensor and sequence parallelism over two gloo processes: what `parallelize_module` spreads is quantized.

Each rank multiplies parts; together they have the results of one process that quantizes the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import fxquant

EAGER = {"inner": "aot_eager"}
WIDTH, LENGTH, WORDS = 128, 32, 64


class Attention(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (linear(x).unflatten(-1, (-1, 32)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(attended.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=bias) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.mlp = Attention(bias), Gated(bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Language(nn.Module):
    """A small language model, whose loss is that of its own text."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(bias)])
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=bias)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


LINEARS = ["blocks.0.attention." + name for name in "qkvo"] + ["blocks.0.mlp." + n for n in ("gate", "up", "down")]


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Columns, then rows, with whole tensors in between."""
    columns = {name: ColwiseParallel() for name in LINEARS if name[-1] not in "on"}
    rows = {name: RowwiseParallel() for name in LINEARS if name[-1] in "on"}
    parallelize_module(model, mesh, {**columns, **rows})


def sequence_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """The same with parts of the text between blocks, gathered in front of them."""
    tensor_parallel_rows = RowwiseParallel(output_layouts=Shard(1))
    gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    parallelize_module(model, mesh, {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "blocks.0.norm1": SequenceParallel(), "blocks.0.norm2": SequenceParallel(), "norm": SequenceParallel(),
        "blocks.0.attention": gathered, "blocks.0.mlp": gathered,
        **{name: ColwiseParallel() for name in LINEARS if name[-1] not in "on"},
        **{name: tensor_parallel_rows for name in LINEARS if name[-1] in "on"},
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    })  # fmt: skip


def loss_in_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Columns, then rows, and parts of the scores of words, of which the loss is computed."""
    tensor_parallel(model, mesh)
    parallelize_module(model, mesh, {"head": ColwiseParallel(use_local_output=False)})


PLANS: Mapping[str, Callable[[nn.Module, DeviceMesh], None]] = {
    "tensor": tensor_parallel, "sequence": sequence_parallel, "loss": loss_in_parallel,
}  # fmt: skip


def language(bias: bool = False) -> Language:
    torch.manual_seed(0)
    return Language(bias)


def text(step: int = 0) -> Tensor:
    return torch.randint(0, WORDS, (2, LENGTH + 1), generator=torch.Generator().manual_seed(step))


def loss_of(run: Callable[..., Tensor], step: int = 0) -> Tensor:
    words = text(step)
    return F.cross_entropy(run(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


def whole(x: Any) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def trained(run: Callable[..., Tensor], model: nn.Module, parallel_loss: bool = False) -> dict[str, Tensor]:
    """The loss of one step and all gradients."""
    if parallel_loss:
        with loss_parallel():
            loss = loss_of(run)
            loss.backward()
    else:
        loss = loss_of(run)
        loss.backward()
    gradients = {name: whole(p.grad) for name, p in model.named_parameters()}
    return {"loss": whole(loss).detach(), **gradients}


def distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).norm() / b[name].norm()) for name in b)


def beside_unsharded(plan: str, recipe: str, bias: bool, blocks: bool = False) -> tuple[float, Any, Any]:
    """How far a plan is from the whole model, what is quantized of both, and in which words."""
    compile = fxquant.compile_blocks if blocks else fxquant.compile
    model, unsharded = language(bias), language(bias)
    PLANS[plan](model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    run = compile(model, recipe, options=EAGER)
    parallel = trained(run, model, plan == "loss")
    torch.compiler.reset()
    alone = compile(unsharded, recipe, options=EAGER)
    far = distance(parallel, trained(alone, unsharded))
    found = [
        [
            (d.layer, d.role, d.gemm, d.direction, d.quantizer)
            for d in r.report().decisions
            if d.role.module_type != "dpa"
        ]
        for r in (run, alone)
    ]
    return far, found, {(d.layer, d.role.tensor_type): (d.shape, d.detail) for d in run.report().decisions}


@pytest.mark.parametrize("recipe", ["mxfp8", "float8_blockwise"])
@pytest.mark.parametrize("plan", PLANS)
def test_plans_have_the_results_of_the_whole_model(plan: str, recipe: str, ranks: Ranks) -> None:
    for far, (parallel, alone), _ in ranks.run(beside_unsharded, plan, recipe, True):
        assert far < 1e-5
        assert parallel == alone
