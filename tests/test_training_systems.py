"""Training as trainers do it on one host, two gloo processes: every way has the bits of the plain loop beside it.

The plain loop runs the model alone, and adds and averages the gradients of parts and ranks by hand. Sums of two do not
depend on the order, and halving is exact, so that nothing is left to rounding.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import Block, assert_same_bits
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fxquant
from fxquant.compat.inside.ranks import rank

sys.path.append(str(Path(__file__).parent.parent / "docs" / "demo"))
from model import Transformer

EAGER = {"inner": "aot_eager"}
RECIPES = ("current_scaling", "delayed_scaling", "mxfp8", "nvfp4")
OTHERS = ("current_scaling", "mxfp8", "nvfp4")
STEPS = 6
"""As many as it takes for scales, moments and random numbers of a step to depend on those of several before."""


def demo() -> Transformer:
    torch.manual_seed(0)
    return Transformer(dim=32, depth=2, heads=2, hidden=64, vocabulary=64)


def batch(step: int, part: int = 0) -> tuple[Tensor, Tensor]:
    """The text of one step, other text on each rank."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * part + rank())
    text = torch.randint(0, 64, (2, 17), generator=generator)
    return text[:, :-1], text[:, 1:]


def whole(model: nn.Module, recipe: str) -> Any:
    return fxquant.compile(model, recipe, options=EAGER)


def in_blocks(model: nn.Module, recipe: str) -> Any:
    return fxquant.compile_blocks(model, recipe, options=EAGER)


def sharded(model: nn.Module, compile: Callable[..., Any], recipe: str) -> Any:
    for block in model.blocks:
        fully_shard(block, mesh=init_device_mesh("cpu", (2,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return compile(model, recipe)


class Checkpointed(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


def checkpointed(model: nn.Module, recipe: str) -> Any:
    run = in_blocks(model, recipe)
    model.blocks = nn.ModuleList(Checkpointed(block) for block in model.blocks)
    return run


WAYS: Mapping[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "ddp": (lambda model, recipe: whole(DistributedDataParallel(model), recipe), whole),
    "fsdp2 in blocks": (lambda model, recipe: sharded(model, in_blocks, recipe), in_blocks),
    "fsdp2 whole": (lambda model, recipe: sharded(model, whole, recipe), in_blocks),
    "checkpoint": (checkpointed, in_blocks),
    "offload": (in_blocks, in_blocks),
    "accumulation": (in_blocks, in_blocks),
    "ddp, accumulation": (lambda model, recipe: DistributedDataParallel(in_blocks(model, recipe)), in_blocks),
}
"""How a model is wrapped and compiled, and how the plain loop compiles it."""

ALONE = ("checkpoint", "offload", "accumulation")
"""The ways that need one process only."""


PLAIN = "plain"


def backward(run: Any, way: str, step: int, parts: int) -> list[Tensor]:
    """The losses of the parts of a batch, whose gradients are added up: by hand in the plain loop."""
    parameters, losses = [*run.parameters()], []
    by_hand: list[list[Tensor]] = []
    for part in range(parts):
        hooks = torch.autograd.graph.save_on_cpu() if way == "offload" else contextlib.nullcontext()
        alone = way == "ddp, accumulation" and part == 0
        with hooks, run.no_sync() if alone else contextlib.nullcontext():
            loss = run(*batch(step, part)) / parts
            loss.backward()
        losses.append(loss.detach())
        if way == PLAIN:
            by_hand.append([p.grad.clone() for p in parameters])
            run.zero_grad()
    for parameter, *gradients in zip(parameters, *by_hand, strict=True) if by_hand else ():
        parameter.grad = sum(gradients[1:], start=gradients[0])
    if by_hand and dist.is_initialized():
        mean = torch.cat([parameter.grad.flatten() for parameter in parameters])
        dist.all_reduce(mean)
        for parameter, part in zip(parameters, (mean / 2).split([p.numel() for p in parameters]), strict=True):
            parameter.grad = part.view_as(parameter)
    return losses


def train(model: nn.Module, run: Any, way: str, parts: int) -> dict[str, Tensor]:
    """The losses of all steps, and the last gradients and parameters, whole and under the names of the demo."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    results = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        results |= {f"loss {step}.{part}": loss for part, loss in enumerate(backward(run, way, step, parts))}
        optimizer.step()
    for name, parameter in model.named_parameters():
        for kind, tensor in (("", parameter), (" gradient", parameter.grad)):
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            results[name.replace(".block.", ".") + kind] = full.detach().clone()
    return results


@functools.cache
def plain(compile: Callable[..., Any], recipe: str, parts: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model = demo()
    run = compile(model, recipe)
    return train(model, run, PLAIN, parts), fxquant.quantization_state_dict(run)


def compare(way: str, recipe: str) -> int:
    """Trains in one way beside the plain loop; returns how many operands were quantized."""
    wrap, compile = WAYS[way]
    parts = 2 if "accumulation" in way else 1
    expected, expected_state = plain(compile, recipe, parts)
    torch.compiler.reset()
    model = demo()
    run = wrap(model, recipe)
    assert_same_bits(train(model, run, way, parts), expected)
    state = {name.replace(".block.", "."): value for name, value in fxquant.quantization_state_dict(run).items()}
    unused = state.keys() - expected_state.keys()  # of what FSDP2's root calls, which no graph has
    assert all(name.startswith("head.") for name in unused) and (not unused or way == "fsdp2 whole")
    assert_same_bits({name: value for name, value in state.items() if name not in unused}, expected_state)
    return sum(decision.quantizer is not None for decision in fxquant.report(run).decisions)


CASES = [
    pytest.param(way, recipe, marks=[] if recipe in ("delayed_scaling", OTHERS[i % 3]) else pytest.mark.sweep)
    for i, way in enumerate(WAYS)
    for recipe in (RECIPES if way != "ddp, accumulation" else ("delayed_scaling",))
]
"""Every way with the recipe whose state ranks share; the others take turns, and all are for the sweep."""


@pytest.mark.parametrize(("way", "recipe"), CASES)
def test_steps_have_the_bits_of_the_plain_loop(ranks: Ranks, way: str, recipe: str) -> None:
    counts = [compare(way, recipe)] if way in ALONE else ranks.run(compare, way, recipe)
    assert min(counts) >= 2 * 7 * 6


def by_inductor(recipe: str) -> int:
    """Two steps in blocks under FSDP2 beside those of the plain loop; returns how many graphs were compiled."""
    tensors: list[dict[str, Tensor]] = []
    for shards in (False, True):
        torch.compiler.reset()
        torch.manual_seed(0)
        model = Chain(Block(), Block())
        for module in (*model, model) if shards else ():
            fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
        fxquant.compile_blocks(model, recipe)
        optimizer, results = torch.optim.SGD(model.parameters(), lr=0.1), {}
        for step in range(2):
            optimizer.zero_grad()
            x = torch.randn(32, 64, generator=torch.Generator().manual_seed(2 * step + rank()))
            loss = model(x).square().mean()
            loss.backward()
            for parameter in () if shards else model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= 2
            optimizer.step()
            results[f"loss {step}"] = loss.detach()
        for name, parameter in model.named_parameters():
            results[name] = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
        tensors.append(results)
        report = fxquant.report(model)
        assert report.coverage == 1 and len({decision.layer for decision in report.decisions}) == 2
    assert_same_bits(*tensors)
    return len(report.graphs)


@pytest.mark.slow
def test_inductor_compiles_blocks_on_two_ranks(ranks: Ranks) -> None:
    """Under a recipe whose graphs hold collectives of their own."""
    assert min(ranks.run(by_inductor, "delayed_scaling", seconds=180)) >= 1


class Chain(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = block(x)
        return x


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def pipeline(schedule: str, per_rank: int, in_place: bool, recipe: str) -> list[str]:
    """Runs two batches of four through a pipeline and through the model alone; returns what was told."""
    from torch.distributed.pipelining import PipelineStage, schedules

    torch.manual_seed(0)
    model, count = nn.ModuleList(Chain(Block(), Block()) for _ in range(2 * per_rank)), 2 * per_rank
    alone = copy.deepcopy(model)
    places = range(dist.get_rank(), count, 2)
    compile = in_blocks if in_place else whole
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stages = [PipelineStage(compile(model[i], recipe), i, count, torch.device("cpu")) for i in places]
        steps = getattr(schedules, schedule)(stages if per_rank > 1 else stages[0], 4, loss_fn=loss_of)
        run = nn.Sequential(*(compile(part, recipe) for part in alone))
        for step in range(2):
            model.zero_grad()
            alone.zero_grad()
            x, losses = torch.randn(64, 64, generator=torch.Generator().manual_seed(step)), []
            if dist.get_rank() == 0:
                steps.step(x)
            else:
                steps.step(target=torch.ones(64, 64), losses=losses)
            if recipe == "delayed_scaling":  # its scales depend on the order of the micro-batches
                continue
            for part in x.chunk(4):
                loss = loss_of(run(part), torch.ones(16, 64)) / 4
                loss.backward()
    if recipe != "delayed_scaling":
        expected = {f"{i}.{name}": p.grad for i in places for name, p in alone[i].named_parameters()}
        assert_same_bits({f"{i}.{name}": p.grad for i in places for name, p in model[i].named_parameters()}, expected)
    assert all(p.grad.isfinite().all() for i in places for p in model[i].parameters())
    return [str(warning.message) for warning in caught if warning.category is fxquant.FxQuantWarning]


@pytest.mark.parametrize(
    ("schedule", "per_rank", "in_place", "recipe"),
    [
        ("ScheduleGPipe", 1, False, "mxfp8"),
        ("Schedule1F1B", 1, True, "current_scaling"),
        ("ScheduleInterleaved1F1B", 2, True, "mxfp8"),
        ("Schedule1F1B", 1, False, "delayed_scaling"),
    ],
)
def test_stages_of_a_pipeline(ranks: Ranks, schedule: str, per_rank: int, in_place: bool, recipe: str) -> None:
    for told in ranks.run(pipeline, schedule, per_rank, in_place, recipe):
        assert len(told) == (recipe == "delayed_scaling")
        assert all("takes its amaxes from this rank alone. The option amax_group names" in text for text in told)


def steps_of(optimizer: torch.optim.Optimizer, model: nn.Module, losses: Iterator[Tensor]) -> None:
    for loss in losses:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def of(kind: str, **settings: Any) -> Callable[..., None]:
    def loop(model: nn.Module, losses: Iterator[Tensor]) -> None:
        steps_of(getattr(torch.optim, kind)(model.parameters(), lr=0.01, **settings), model, losses)

    return loop


def clipped(model: nn.Module, losses: Iterator[Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for loss in losses:
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def muon(model: nn.Module, losses: Iterator[Tensor]) -> None:
    steps_of(torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.01), model, losses)


def in_backward(model: nn.Module, losses: Iterator[Tensor]) -> None:
    hooks = []
    for parameter in model.parameters():
        optimizer = torch.optim.AdamW([parameter], lr=0.01)

        def step(parameter: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        hooks.append(parameter.register_post_accumulate_grad_hook(step))
    for loss in losses:
        loss.backward()
    for hook in hooks:
        hook.remove()


def averaged(model: nn.Module, losses: Iterator[Tensor]) -> None:
    """The last steps go on from the running mean of the weights."""
    mean = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, loss in enumerate(losses):
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean.update_parameters(model)
        if step == 2:
            model.load_state_dict(mean.module.state_dict())


def scaled(model: nn.Module, losses: Iterator[Tensor]) -> None:
    """A loss scale that overflows once, so that a step is skipped."""
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for step, loss in enumerate(losses):
        scaler.scale(loss * (float("inf") if step == 1 else 1)).backward()
        before = [p.detach().clone() for p in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert all(map(torch.equal, before, model.parameters())) == (step == 1)
    assert scaler.get_scale() == 2.0**7


def accumulated(model: nn.Module, losses: Iterator[Tensor]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step, loss in enumerate(losses):
        loss.backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()


def low_bit(name: str) -> Callable[..., None]:
    def loop(model: nn.Module, losses: Iterator[Tensor]) -> None:
        optimizers = pytest.importorskip("torchao.optim")
        steps_of(getattr(optimizers, name)(model.parameters(), lr=0.01), model, losses)

    return loop


LOOPS: Mapping[str, Callable[..., None]] = {
    "AdamW": of("AdamW", foreach=False),
    "foreach": of("AdamW", foreach=True),
    "fused": of("AdamW", fused=True),
    "fused SGD": of("SGD", fused=True, momentum=0.9),
    "Adafactor": of("Adafactor"),
    "Muon": muon,
    "clipped": clipped,
    "in the backward": in_backward,
    "running mean": averaged,
    "GradScaler": scaled,
    "accumulation": accumulated,
    "AdamW8bit": low_bit("AdamW8bit"),
    "AdamW4bit": low_bit("AdamW4bit"),
    "AdamWFp8": low_bit("AdamWFp8"),
}


@pytest.mark.parametrize("name", LOOPS)
def test_loops_are_the_same_with_cached_weights(name: str, shared: dict[bool, nn.Module]) -> None:
    """Whatever an optimizer writes by, the weight that is multiplied by next is the new one."""
    begin, x, results = Chain(Block(), Block()).state_dict(), torch.randn(32, 64), []
    for cached in (False, True):
        if cached not in shared:
            shared[cached] = Chain(Block(), Block())
            fxquant.compile_blocks(shared[cached], "mxfp8", options={**EAGER, "cache_weights": cached})
        model = shared[cached]
        model.load_state_dict(begin)
        model.zero_grad()
        LOOPS[name](model, (model((1 + step) * x).square().mean() for step in range(5)))
        assert fxquant.report(model).coverage == 1
        results.append({key: tensor.clone() for key, tensor in model.state_dict().items()})
    assert_same_bits(*results)
    assert not torch.equal(results[0]["0.up.weight"], begin["0.up.weight"])


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_that_overflows_is_skipped_and_forgotten(recipe: str) -> None:
    torch.manual_seed(0)
    model, x = Chain(Block(), Block()), torch.randn(32, 64)
    fxquant.compile_blocks(model, recipe, options=EAGER)
    scaled(model, (model(x).square().mean() for _ in range(5)))
    assert all(parameter.isfinite().all() for parameter in model.parameters())
