"""Times the forward and backward of decoder blocks, linear layers and experts, as a step of training runs them."""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxquant.backend.backend import Backend
from fxquant.bench.export import DecoderBlock
from fxquant.bench.providers import CACHED, LEAST, TORCHAO, recipe_of
from fxquant.bench.rounds import Contender, Problem, Row, Turns, compiling, times_text, wait
from fxquant.compat.private import torch_grouped_mm


class Training(Problem):
    """A model whose forward and backward are timed, with `n` output features."""

    n: int

    def model(self) -> nn.Module:
        """The model with bfloat16 weights, on the default device."""
        raise NotImplementedError

    def input(self) -> Tensor:
        """Normal values in bfloat16, on the default device."""
        raise NotImplementedError

    def floor(self, provider: str, ms: Mapping[str, float]) -> float | None:
        """The fewest milliseconds that the step of a provider can take, or None if nobody knows."""
        return None

    def contender(self, provider: str, turns: Turns) -> Contender:
        gc.collect()
        if turns.cuda:
            torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated() if turns.cuda else 0
        torch.manual_seed(0)
        with torch.device(turns.device):
            model, x = self.model(), self.input().requires_grad_()
            grad_output = torch.randn(*x.shape[:-1], self.n, dtype=x.dtype)
        run, backend = prepare(provider, model)

        def step() -> None:
            run(x).backward(grad_output)  # type: ignore[no-untyped-call]
            model.zero_grad(set_to_none=True)  # leaves the memory to the next contender
            x.grad = None

        row: Row = {}
        with compiling(row):
            step()
            wait(turns.device)
        saved = SavedBytes([*model.parameters(), *model.buffers()])
        with saved:
            output = run(x)
        del output
        if turns.cuda:
            torch.cuda.reset_peak_memory_stats()
        step()
        wait(turns.device)
        peak = torch.cuda.max_memory_allocated() - before if turns.cuda else 0
        row |= {"saved_gib": f"{saved.total / 2**30:.2f}", "peak_gib": f"{peak / 2**30:.2f}"}
        row["flops_quantized"] = f"{backend.report().coverage:.0%}" if backend else ""
        return Contender(provider, step, row)

    def columns(self, contender: Contender, ms: Mapping[str, float], turns: Turns) -> Row:
        name = contender.name
        return times_text(contender.times) | ratios(name, ms, self.floor(name, ms))


@dataclass(frozen=True)
class Stack(Training):
    """Sizes of a stack of decoder blocks and of its input [batch, length, hidden]."""

    blocks: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    batch: int
    length: int

    def __str__(self) -> str:
        return f"{self.blocks} blocks {self.hidden}/{self.ffn}, {self.batch}x{self.length} tokens"

    @property
    def n(self) -> int:  # type: ignore[override]
        return self.hidden

    def model(self) -> nn.Module:
        return Blocks(self)

    def input(self) -> Tensor:
        return torch.randn(self.batch, self.length, self.hidden, dtype=torch.bfloat16)


@dataclass(frozen=True)
class Grouped(Training):
    """Sizes of the experts of one layer: weights [experts, n, k], and `m` rows of k features routed to them."""

    experts: int
    m: int
    k: int
    n: int

    def __str__(self) -> str:
        return f"{self.experts} experts {self.m}x{self.k}x{self.n}"

    def model(self) -> nn.Module:
        return Experts(self)

    def input(self) -> Tensor:
        return torch.randn(self.m, self.k, dtype=torch.bfloat16)


LLAMA3_8B = Stack(blocks=4, hidden=4096, ffn=14336, heads=32, kv_heads=8, batch=2, length=8192)
GROUPS = (Grouped(128, 65536, 2048, 768), Grouped(8, 32768, 7168, 2048))
"""Qwen3-30B-A3B, 8192 tokens with 8 experts each, up-projection; and a DeepSeek-like share of 8 local experts."""
TINY_STACK = Stack(blocks=1, hidden=64, ffn=128, heads=4, kv_heads=2, batch=2, length=16)
TINY_GROUPS = Grouped(4, 64, 32, 48)


class Block(DecoderBlock):
    """A block with rotary embedding and causal attention."""

    def __init__(self, size: Stack) -> None:
        super().__init__(size.hidden, size.ffn, size.heads, size.kv_heads)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.before(x)
        y = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
        return self.after(x, y)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of x [batch, heads, length, head_dim] (RoFormer, arXiv 2104.09864, section 3.4)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Blocks(nn.Module):
    """A stack of decoder blocks with bfloat16 weights: [batch, length, hidden] to the same."""

    cos: Tensor
    sin: Tensor

    def __init__(self, size: Stack, block: Callable[[Stack], nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block(size) for _ in range(size.blocks))
        half = size.hidden // size.heads // 2
        angle = torch.arange(size.length)[:, None] * 500000.0 ** (-torch.arange(half) / half)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())
        self.to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return x


class Experts(nn.Module):
    """A weight for each group of rows; the groups differ in size, as behind a router that is not balanced."""

    offs: Tensor

    def __init__(self, size: Grouped) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size.experts, size.n, size.k, dtype=torch.bfloat16) * size.k**-0.5)
        generator = torch.Generator("cpu").manual_seed(0)
        share = torch.rand(size.experts, generator=generator, device="cpu") + 0.5
        ends = (share.cumsum(0) / share.sum() * (size.m // 16)).round() * 16  # torchao takes no other sizes
        self.register_buffer("offs", ends.to(torch.int32).to(self.weight.device))
        self.multiply: Callable[[Tensor, Tensor, Tensor], Tensor] = torch_grouped_mm

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x, self.weight.transpose(-2, -1), self.offs)


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes that a forward keeps for its backward, each storage once and without `parameters`."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(self._pack, lambda tensor: tensor)
        self.uncounted = {t.untyped_storage().data_ptr() for t in parameters}
        self.sizes: dict[int, int] = {}

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.uncounted:
            self.sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    @property
    def total(self) -> int:
        """Bytes."""
        return sum(self.sizes.values())


def prepare(provider: str, model: nn.Module) -> tuple[Callable[[Tensor], Tensor], Backend | None]:
    """The model compiled by a provider, and fxquant's backend if the provider uses it."""
    recipe = recipe_of(provider)
    if recipe is not None:
        backend = Backend(recipe, cache_weights=provider in CACHED, save="least" if provider in LEAST else "quantized")
        return torch.compile(model, backend=backend, fullgraph=True, dynamic=False), backend
    if provider in TORCHAO and isinstance(model, Experts):
        model.multiply = torchao_grouped_mm(provider)
    elif provider in TORCHAO:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # type: ignore[import-not-found]

        config = Float8LinearConfig.from_recipe_name(provider.removeprefix("torchao "))
        model = convert_to_float8_training(nn.Sequential(model), config=config)  # it swaps children, not the root
    return torch.compile(model, fullgraph=True, dynamic=False), None


def torchao_grouped_mm(provider: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """torchao's differentiable grouped GEMM; it has a rowwise one only. Raises ValueError for another."""
    if provider != "torchao rowwise":
        raise ValueError(f"{provider} has no grouped GEMM")
    folder = "torchao.prototype.moe_training"
    new = importlib.util.find_spec(f"{folder}.fp8_grouped_mm")
    module = importlib.import_module(f"{folder}.{'fp8_grouped_mm' if new else 'scaled_grouped_mm'}")
    multiply = module._to_fp8_rowwise_then_scaled_grouped_mm
    pads = "pad_token_groups_for_grouped_mm"
    if pads in inspect.signature(multiply).parameters:
        return functools.partial(multiply, **{pads: False})
    return multiply  # type: ignore[no-any-return]


def ratios(provider: str, medians: Mapping[str, float], floor: float | None) -> Row:
    """The measured ratios of a provider's time to the times of bf16 and torchao, and to its floor."""
    ms, row = medians[provider], {}
    peer = "torchao rowwise" if provider.startswith("rowwise") else "torchao tensorwise"
    if "bf16" in medians:
        row["over_bf16"] = f"{medians['bf16'] / ms:.2f}x"
    if recipe_of(provider) is not None and peer in medians:
        row["over_torchao"] = f"{medians[peer] / ms:.2f}x"
    if floor is not None:
        row |= {"of_floor": f"{ms / floor:.2f}x", "floor_ms": f"{floor:.4g}"}
    return row
