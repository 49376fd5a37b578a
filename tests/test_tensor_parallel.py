"""Tensor and sequence parallelism over two gloo processes: what `parallelize_module` spreads is quantized.

Each rank multiplies parts; together they have the results of one process that quantizes the whole model.
"""

from __future__ import annotations

import copy
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import fxquant
from fxquant import Float8CurrentScalingQuantizer, NVFP4Quantizer
from fxquant.recipes import NVFP4BlockScaling

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


def linears_of(run: Any) -> list[tuple[Any, ...]]:
    """Returns what is quantized of linear layers."""
    decisions = [d for d in run.report().decisions if d.role.module_type != "dpa"]
    return [(d.layer, d.role, d.gemm, d.direction, d.quantizer) for d in decisions]


@functools.cache
def alone(compile: Callable[..., Any], recipe: str, bias: bool) -> tuple[dict[str, Tensor], list[tuple[Any, ...]]]:
    """A step of the whole model, and what is quantized of it: the same beside every plan."""
    torch.compiler.reset()
    model = language(bias)
    run = compile(model, recipe, options=EAGER)
    return trained(run, model), linears_of(run)


def beside_unsharded(plan: str, recipe: str, bias: bool, blocks: bool = False) -> tuple[float, Any, Any]:
    """How far a plan is from the whole model, what is quantized of both, and in which words."""
    compile = fxquant.compile_blocks if blocks else fxquant.compile
    model = language(bias)
    PLANS[plan](model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    run = compile(model, recipe, options=EAGER)
    parallel = trained(run, model, plan == "loss")
    expected, quantized = alone(compile, recipe, bias)
    details = {(d.layer, d.role.tensor_type): (d.shape, d.detail) for d in run.report().decisions}
    return distance(parallel, expected), (linears_of(run), quantized), details


@pytest.mark.parametrize("recipe", ["mxfp8", "float8_blockwise", "current_scaling", "delayed_scaling"])
@pytest.mark.parametrize("plan", PLANS)
def test_plans_have_the_results_of_the_whole_model(plan: str, recipe: str, ranks: Ranks) -> None:
    for far, (parallel, whole_model), _ in ranks.run(beside_unsharded, plan, recipe, True):
        assert far < 1e-5
        assert parallel == whole_model


def reduced(recipe: Any, options: Mapping[str, Any]) -> Any:
    """The scales of a layer of columns and one of rows: the text of the graphs, the details and the saved states."""
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    with torch.no_grad():
        model[0].weight[100:] *= 7
        model[2].weight[:, 3] *= 9
    unsharded = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    group = {"amax_group": mesh.get_group()} if "amax_group" in options else {}
    x, runs = torch.randn(4, 32, 64, requires_grad=True), []
    for net in (model, unsharded):
        torch.compiler.reset()
        runs.append(fxquant.compile(net, recipe, options=EAGER | options | group))
        for _ in range(3):
            net.zero_grad()
            runs[-1](x).square().mean().backward()
    far = distance(*({name: whole(p.grad) for name, p in net.named_parameters()} for net in (model, unsharded)))
    report = runs[0].report()
    graphs = "".join(report.graphs[half] for half in ("forward", "backward"))
    details = {(d.layer, d.role.tensor_type, d.direction.value): d.detail for d in report.decisions}
    return far, graphs.count("'max'"), details


@pytest.mark.parametrize("recipe", ["current_scaling", NVFP4BlockScaling(disable_stochastic_rounding=True)], ids=str)
def test_scales_of_a_whole_tensor_are_made_of_the_amaxes_of_all_ranks(recipe: Any, ranks: Ranks) -> None:
    """Each of two weights, the gradient of the first layer and the input of the second are reduced, once."""
    for far, count, details in ranks.run(reduced, recipe, {}):
        assert far < 1e-5
        # the columnwise half of what is transformed has an amax of its own
        assert count == (4 if recipe == "current_scaling" else 6)
        assert details["0", "input", "rowwise"] == ""
        assert details["0", "weight", "rowwise"] == details["2", "input", "columnwise"]
        assert details["2", "input", "columnwise"] == "part over tp; amax over tp"
        assert details["2", "grad_output", "rowwise"] == ""


def test_scales_of_rows_are_made_of_the_amaxes_of_ranks_that_have_parts_of_them(ranks: Ranks) -> None:
    for far, count, details in ranks.run(reduced, "rowwise", {}):
        assert far < 1e-5
        # input and weight of the second layer, the gradient and the weight of the first one
        assert count == 4
        assert details["2", "weight", "rowwise"] == "part over tp; amax over tp"
        assert details["2", "weight", "columnwise"] == "part over tp"
        assert details["0", "weight", "rowwise"] == "part over tp"


@pytest.mark.parametrize("options", [{}, {"amax_group": "of the mesh"}], ids=["all", "group"])
def test_delayed_scales_are_those_of_the_whole_tensor(options: Mapping[str, str], ranks: Ranks) -> None:
    for far, count, details in ranks.run(reduced, "delayed_scaling", options):
        assert far < 1e-5
        assert details["2", "input", "rowwise"] == "part over tp; amax over " + ("tp" if options else "all ranks")
        assert count == (5 if options else 1), "what is recorded is reduced at the next update too"


def by_hand(direction: str) -> Any:
    """A tensor in two parts of columns, each quantized by a quantizer that asks the other rank."""
    x = torch.randn(32, 64) * torch.linspace(0.1, 9, 64)
    part = x.chunk(2, 1)[dist.get_rank()]
    results = []
    for kind in (Float8CurrentScalingQuantizer, NVFP4Quantizer):
        both = {name: name == direction for name in ("rowwise", "columnwise")}
        reduced = kind(with_amax_reduction=True).quantize(part, **both)
        results.append((reduced.dequantize(direction), kind().quantize(x, **both).dequantize(direction)))
    return dist.get_rank(), results


@pytest.mark.parametrize("direction", ["rowwise", "columnwise"])
def test_quantizers_take_the_amax_of_a_group(direction: str, ranks: Ranks) -> None:
    for rank, results in ranks.run(by_hand, direction):
        for part, all_columns in results:
            assert torch.equal(part, all_columns.chunk(2, 1)[rank])


class Norms(nn.Module):
    """A norm on parts of a text, and two layers on all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 256), nn.Linear(256, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))


def gathered(recipe: Any, settings: Mapping[str, bool]) -> Any:
    """How far a model is that gathers payloads, bytes an element that are gathered in each half, and the reasons."""
    torch.manual_seed(0)
    model = Norms()
    unsharded = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, {
        "norm": SequenceParallel(), "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    })  # fmt: skip
    x = torch.randn(2, 256, WIDTH)
    with torch.set_grad_enabled(settings["train"]):
        run = fxquant.compile(model, recipe, options=EAGER)
        y = run(distribute_tensor(x, mesh, [Shard(1)])).full_tensor()
        torch.compiler.reset()
        alone = fxquant.compile(unsharded, recipe, options=EAGER)
        z = alone(x)
    results = {"y": y.detach()}, {"y": z.detach()}
    if settings["train"]:
        for loss in (y, z):
            loss.square().mean().backward()
        for result, net in zip(results, (model, unsharded), strict=True):
            result.update({name: whole(p.grad) for name, p in net.named_parameters()})
    sent = {}
    report = run.report()
    for half, graph in report.graphs.items():
        shapes = re.findall(r"all_gather_into_tensor\w*: \"(\w+)\[([\d, ]+)\]\"", graph)
        sizes = {"u8": 1, "f32": 4}
        sent[half] = sum(sizes[d] * math.prod(map(int, s.split(", "))) for d, s in shapes) / x.numel()
    return distance(*results), sent, [str(n.reason) for n in report.not_fused if n.step == "gather_payloads"]


@pytest.mark.parametrize("recipe", ["current_scaling", "delayed_scaling", "mxfp8", "float8_blockwise"])
def test_what_is_gathered_to_be_multiplied_is_gathered_quantized(recipe: str, ranks: Ranks) -> None:
    whole_scale = recipe in ("current_scaling", "delayed_scaling")
    for far, sent, reasons in ranks.run(gathered, recipe, {"train": True}):
        assert far < (1e-3 if recipe == "current_scaling" else 1e-5), "few elements are rounded the other way"
        assert not reasons
        a_direction = {"mxfp8": 1 + 1 / 32, "float8_blockwise": 1 + 4 / 128}.get(recipe, 1)
        directions = 1 if whole_scale else 2
        assert sent == {"forward": a_direction * directions, "backward": a_direction * directions}


def test_inference_gathers_one_direction(ranks: Ranks) -> None:
    for far, sent, reasons in ranks.run(gathered, "mxfp8", {"train": False}):
        assert far < 1e-5 and sent == {"forward": 1 + 1 / 32} and not reasons


def on_two_dimensions(plan: str, recipe: str) -> Any:
    """How far a model is whose blocks are compiled and spread over a mesh of 2 x 2."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, unsharded = language(), language()
    PLANS[plan](model, mesh["tp"])
    run = fxquant.compile_blocks(model, recipe, blocks=Block, options=EAGER)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh["dp"])
    spread = trained(run, model)
    torch.compiler.reset()
    alone = trained(fxquant.compile_blocks(unsharded, recipe, blocks=Block, options=EAGER), unsharded)
    for result in (spread, alone):
        result.pop("embed.weight")  # torch's own gradient of a spread embedding is another under FSDP2
    decisions = fxquant.report(model).decisions
    layers = {d.layer for d in decisions if d.role.module_type == "linear" and d.quantizer is not None}
    return distance(spread, alone), layers, {d.detail for d in decisions}


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[Ranks]:
    processes = Ranks(4)
    yield processes
    processes.end()


@pytest.mark.parametrize(("plan", "recipe"), [("tensor", "current_scaling"), ("sequence", "mxfp8")])
def test_two_dimensions(plan: str, recipe: str, four_ranks: Ranks) -> None:
    for far, layers, details in four_ranks.run(on_two_dimensions, plan, recipe):
        assert far < 1e-5
        assert layers == {*LINEARS}
        assert "part over tp" + ("; amax over tp" if recipe == "current_scaling" else "") in details


def cached() -> Any:
    """The results of three micro-batches with cached weights and without, and how many weights were kept."""
    results = []
    for keep in (False, True):
        torch.compiler.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        backend = fxquant.Backend("mxfp8", inner="aot_eager", cache_weights=keep)
        run, optimizer = torch.compile(model, backend=backend), torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in range(3):
            run(torch.full((32, 64), 0.1 * (batch + 1))).square().mean().backward()
            if batch == 1:
                optimizer.step()
        results.append({name: whole(p.grad) for name, p in model.named_parameters()})
    assert backend.weights is not None
    return distance(*results), len(backend.weights._entries)


def test_parts_of_weights_are_cached(ranks: Ranks) -> None:
    assert ranks.run(cached) == [(0, 2), (0, 2)]
