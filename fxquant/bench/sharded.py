"""Training steps of blocks that are spread over ranks: FSDP2, and tensor parallelism with parts of sequences.

    python -m fxquant bench sharded                                   # a rank for each GPU that is visible
    torchrun --nproc-per-node=2 -m fxquant bench sharded --parts "losses of fsdp,fsdp"

First come the losses of a few steps of a small model on all ranks, against those of one process. Then steps are timed,
of which a trace tells what was sent and what of it was hidden. With FSDP2 each rank has its own batch, float32 weights
that are computed with in bfloat16, and gradients that are reduced in float32; a step ends with one of SGD and what
agrees on scales. Tensor parallel ranks share a batch and have bfloat16 weights and no optimizer, as `alone` has.
"""

from __future__ import annotations

import functools
import gc
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxquant
from fxquant.bench import parallel
from fxquant.bench.providers import GATHERED, QUANTIZED, TORCHAO, WITH_GATHER, recipe_of
from fxquant.bench.ranks import TurnsOfRanks, is_first
from fxquant.bench.rounds import Contender, Problem, Row, Turns, failure, timed, times_text, wait
from fxquant.bench.traffic import Traffic, traffic_of
from fxquant.bench.training import LLAMA3_8B, Blocks, Stack

PROVIDERS = ("bf16", TORCHAO[0], *WITH_GATHER, *QUANTIZED)
DEFAULT = (
    "bf16", WITH_GATHER[0], "current_scaling + gather", "mxfp8 + gather", "rowwise + gather",
    "delayed_scaling + gather", "current_scaling", TORCHAO[0], "delayed_scaling", "rowwise", "mxfp8",
)  # fmt: skip
"""In the order in which they are compiled: the first ones matter most where time ends."""
STEPS = 10
MOST = 2e-2
"""The largest relative difference of losses that rounding explains."""


@dataclass
class Measured(Contender):
    """A contender with more columns, measured once all are timed and the rest is quiet."""

    more: Callable[[], Row] = dict


class Spread(Problem):
    """A stack of blocks on all ranks; `part` names the way."""

    part: str
    size: Stack

    def __str__(self) -> str:
        return f"{self.part}, {dist.get_world_size()} ranks, {self.size}"

    def contender(self, provider: str, turns: Turns) -> Contender:
        """A contender of which all ranks have one, or none has: another failed there."""
        assert isinstance(turns, TurnsOfRanks)
        turns.check_time()
        started, problem, contender = time.perf_counter(), None, None
        try:
            contender = self.prepared(provider, turns)
        except Exception as error:
            problem = error
        if turns.agreed(problem is not None) or contender is None:
            raise problem or RuntimeError("it failed on another rank")
        contender.row["compile_s"] = f"{time.perf_counter() - started:.1f}"
        about = f"{min(timed(contender.step, 3, turns.cuda)):.4g} ms" if self.timed else ""
        self.say("ready", provider, about, contender.row)
        return contender

    def say(self, what: str, provider: str, text: str, row: Row) -> None:
        """Tells what is there already, should the rest not end."""
        if is_first():
            print(f"{what}:", self.part, provider, text, row, file=sys.stderr, flush=True)

    def prepared(self, provider: str, turns: Turns) -> Contender:
        """The contender of this rank."""
        raise NotImplementedError

    def blocks(self, device: str) -> Blocks:
        """The blocks with weights that are equal on all ranks."""
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        torch.manual_seed(0)
        with torch.device(device):
            return Blocks(self.size, parallel.Block)

    def columns(self, contender: Contender, ms: Mapping[str, float], turns: Turns) -> Row:
        row = times_text(contender.times)
        name, step = contender.name, ms[contender.name]
        if "bf16" in ms:
            row["over_bf16"] = f"{ms['bf16'] / step:.2f}x"
        peers = [peer for peer in (WITH_GATHER[0], TORCHAO[0]) if peer in ms]
        if peers and recipe_of(name) is not None:
            row["over_torchao"] = f"{min(ms[peer] for peer in peers) / step:.2f}x"
        self.say("timed", name, "", row)
        return row | (contender.more() if isinstance(contender, Measured) else {})


@dataclass(frozen=True)
class Step(Spread):
    """A timed step; `part` is ``fsdp``, ``tensor`` or ``alone``."""

    part: str
    size: Stack

    def takes(self, provider: str) -> bool:
        return self.part == "fsdp" or not provider.endswith(GATHERED)

    def prepared(self, provider: str, turns: Turns) -> Contender:
        before = torch.cuda.memory_allocated() if turns.cuda else 0
        model, ranks = self.blocks(turns.device), dist.get_world_size()
        elements, length, after = sum(p.numel() for p in model.parameters()), self.size.length, _nothing
        if self.part == "fsdp":
            after = parallel.sharded(provider, model, parallel.mesh_of(turns.device), mixed=True)
        elif self.part == "tensor":
            parallel.split(provider, model, parallel.mesh_of(turns.device))
            length //= ranks
        elif parallel.is_torchao(provider):
            parallel.to_torchao(provider, model)
        parallel.compiled(provider, model)
        shape = self.size.batch, length, self.size.hidden
        x, grad_output = (torch.randn(shape, dtype=torch.bfloat16, device=turns.device) for _ in range(2))
        optimizer = torch.optim.SGD(model.parameters(), 1e-4) if self.part == "fsdp" else None
        step = functools.partial(_step, model, x.requires_grad_(), grad_output, optimizer, after)
        row: Row = {}
        for _ in range(2):
            step()
        if turns.cuda:
            torch.cuda.reset_peak_memory_stats()
        step()
        wait(turns.device)
        peak = torch.cuda.max_memory_allocated() - before if turns.cuda else 0
        row["peak_gib"] = f"{peak / 2**30:.2f}"
        if recipe_of(provider) is not None:
            row["flops_quantized"] = f"{fxquant.report(model).coverage:.0%}"
        return Measured(provider, step, row, more=functools.partial(self.more, provider, step, elements, turns))

    def more(self, provider: str, step: Callable[[], object], elements: int, turns: Turns) -> Row:
        """The columns of what a step sends, and of a gather alone."""
        try:
            row = self.traffic(traffic_of(step, turns.device, dist.get_world_size()), elements)
            return row | (self.gather(provider, turns) if self.part == "fsdp" else {})
        except Exception as error:
            return {"gemms": failure(error)}

    def traffic(self, sent: Traffic, elements: int) -> Row:
        """The columns of what a step sends: a weight is gathered twice, for the forward and for the backward."""
        row = {"wire_gib": f"{sent.received / 2**30:.3g}"}
        if self.part == "fsdp" and sent.gathered:
            row["gather_bytes"] = f"{sent.gathered / elements / 2:.3f}"
        for name, ms, hidden in (
            ("gathers", sent.gathers_ms, sent.gathers_hidden_ms), ("wire", sent.all_ms, sent.all_hidden_ms)
        ):  # fmt: skip
            if ms:
                row |= {f"{name}_ms": f"{ms:.2f}", f"{name}_hidden": f"{hidden / ms:.0%}"}
        return row

    def gather(self, provider: str, turns: Turns) -> Row:
        """The column of one gather alone: of a block's weights, for a forward, quantization included."""
        torch.manual_seed(0)
        with torch.device(turns.device):
            held = parallel.Held(self.size).to(torch.bfloat16)
        after = parallel.sharded(provider, held, parallel.mesh_of(turns.device), mixed=True)
        after()
        x = torch.zeros(1, device=turns.device)
        with torch.no_grad():
            return {"gather_ms": f"{gather_ms(functools.partial(held, x), turns):.3f}"}


def gather_ms(run: Callable[[], object], turns: Turns) -> float:
    """Milliseconds of one gather: the fastest of three runs of some that follow each other."""
    repeats = 20 if turns.cuda else 1
    best = float("inf")
    for _ in range(3):
        run()
        wait(turns.device)
        started = time.perf_counter()
        for _ in range(repeats):
            run()
        wait(turns.device)
        best = min(best, 1e3 * (time.perf_counter() - started) / repeats)
    return best


def _nothing() -> object:
    """The step after an optimizer that needs none."""


def _step(
    model: nn.Module,
    x: Tensor,
    grad_output: Tensor,
    optimizer: torch.optim.Optimizer | None,
    after: Callable[[], object],
) -> None:
    model(x).backward(grad_output)
    if optimizer is not None:
        optimizer.step()
    model.zero_grad(set_to_none=True)  # leaves the memory to the next contender
    x.grad = None
    after()


@dataclass(frozen=True)
class Losses(Spread):
    """The losses of steps of a small model on all ranks, against those of one process, which has it whole.

    With FSDP2 all ranks have one batch, whose gradients average to themselves, so that losses are equal to the last
    bit; tensor parallel ranks sum parts of products, which rounds otherwise.
    """

    part: str
    size: Stack
    timed = False

    def takes(self, provider: str) -> bool:
        gathered = provider.endswith(GATHERED)
        return not parallel.is_torchao(provider) and (provider == "bf16" or gathered == (self.part == "losses of fsdp"))

    def prepared(self, provider: str, turns: Turns) -> Contender:
        expected = self.trained(provider, turns, spread=False)
        spread = self.trained(provider, turns, spread=True)
        worst = max(abs(a - b) / abs(b) for a, b in zip(spread, expected, strict=True))
        losses = f"{spread[0]:.5f} to {spread[-1]:.5f}, {expected[0]:.5f} to {expected[-1]:.5f} in one process"
        if turns.agreed(not worst <= MOST):
            raise RuntimeError(f"losses differ by {worst:.1e} of their values: {losses}")
        if is_first():
            print(f"losses of {provider}: {losses}", file=sys.stderr, flush=True)
        return Contender(provider, _nothing, {"loss_diff": f"{worst:.1e}"})

    def trained(self, provider: str, turns: Turns, *, spread: bool) -> list[float]:
        """The losses of all steps."""
        model, after, ranks = self.blocks(turns.device), _nothing, dist.get_world_size()
        generator = torch.Generator().manual_seed(1)
        shape = self.size.batch, self.size.length, self.size.hidden
        x, target = (torch.randn(shape, generator=generator).to(turns.device, torch.bfloat16) for _ in range(2))
        if spread and self.part == "losses of fsdp":
            after = parallel.sharded(provider, model, parallel.mesh_of(turns.device), mixed=False)
        elif spread:
            parallel.split(provider, model, parallel.mesh_of(turns.device))
            x, target = (tensor.chunk(ranks, dim=1)[dist.get_rank()] for tensor in (x, target))
        share = ranks if spread and self.part != "losses of fsdp" else 1  # gradients of ranks are averaged, or summed
        parallel.compiled(provider, model)
        optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
        losses = []
        for _ in range(STEPS):
            loss = (model(x).float() - target).square().mean()
            (loss / share).backward()
            optimizer.step()
            optimizer.zero_grad()
            after()
            value = loss.detach()
            dist.all_reduce(value)
            losses.append(value.item() / ranks)
        return losses


SMALL_STACK = Stack(blocks=2, hidden=256, ffn=512, heads=4, kv_heads=4, batch=2, length=128)
TINY_STACK = Stack(blocks=1, hidden=128, ffn=256, heads=4, kv_heads=2, batch=2, length=32)
PARTS = ("losses of fsdp", "fsdp", "losses of tensor", "tensor", "alone")


def problems(size: Stack, small: Stack) -> tuple[Spread, ...]:
    """All parts, in the order in which they run."""
    return tuple(Losses(part, small) if part.startswith("losses") else Step(part, size) for part in PARTS)


SIZES = problems(LLAMA3_8B, SMALL_STACK)
TINY = problems(TINY_STACK, TINY_STACK)


def chosen(sizes: Sequence[Spread], parts: Sequence[str], length: int | None, blocks: int | None) -> list[Spread]:
    """The parts that are asked for, whose timed steps have a length of sequences and a number of blocks."""
    changed = {name: value for name, value in (("length", length), ("blocks", blocks)) if value is not None}
    return [
        replace(problem, size=replace(problem.size, **changed)) if isinstance(problem, Step) and changed else problem
        for problem in sizes
        if problem.part in parts
    ]
