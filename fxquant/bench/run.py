"""Benchmarks: training steps of Llama blocks, and single layers, beside bf16 Inductor and torchao.

    python -m fxquant bench block   [--providers NAME,NAME] [--length 8192] [--csv FILE]
    python -m fxquant bench linear  [--providers NAME,NAME] [--csv FILE]
    python -m fxquant bench grouped [--providers NAME,NAME] [--csv FILE]
    python -m fxquant bench decode  [--providers NAME,NAME] [--csv FILE]
    python -m fxquant bench attention [--providers NAME,NAME] [--csv FILE]
    python -m fxquant bench export  [--providers NAME,NAME] [--csv FILE]
    python -m fxquant bench cast    [--providers SPEC,SPEC] [--csv FILE]

A step is a forward and a backward of bfloat16 weights on random data, without an optimizer, compiled with static
shapes. Providers are timed in turn, round after round; times are medians after a second of warm-up, from CUDA events.
Compilations start with Inductor's caches off. The floor of a linear layer is the time of its three GEMMs alone, on
quantized operands, and of the fewest bytes of its casts at the rate of a copy, all in the same rounds.
A cast is one quantization, compiled, beside a copy of its input. Decoding and exported blocks are inference, in CUDA
graphs, as attention is; see `fxquant.bench_decode`, `fxquant.bench_export` and `fxquant.bench_attention`.
Each finished row is appended to the CSV file. On the CPU the sizes are tiny and the numbers mean nothing.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import functools
import gc
import importlib
import importlib.metadata
import importlib.util
import inspect
import itertools
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxquant import recipes
from fxquant.backend.backend import Backend
from fxquant.bench import attention as bench_attention
from fxquant.bench import decode as bench_decode
from fxquant.bench import export as bench_export
from fxquant.bench.attention import Attention
from fxquant.bench.decode import Decode
from fxquant.bench.export import DecoderBlock, Served
from fxquant.compat.private import inductor_config, unlimited_recompiles
from fxquant.formats import QuantSpec
from fxquant.kernels.linear import cublas as gemm
from fxquant.quantizers import Float8HeadQuantizer, Quantizer
from fxquant.report.text import aligned
from fxquant.roles import GEMM_OPERANDS, Gemm, QuantizerRole

QUANTIZED = ("current_scaling", "delayed_scaling", "rowwise", "float8_blockwise", "mxfp8", "nvfp4")
CACHED = ("rowwise cached", "float8_blockwise cached")
"""Recipes whose weights stay quantized: all micro-batches of a step but the first."""
LEAST = ("current_scaling least", "delayed_scaling least")
"""Recipes whose forward keeps the least for its backward (docs/memory.md)."""
TORCHAO = ("torchao tensorwise", "torchao rowwise")
ATTENTION = " + attention"
"""What follows a recipe's name in the name of a provider whose attention is quantized as well."""
WITH_ATTENTION = tuple(f"{name}{ATTENTION}" for name in QUANTIZED)
PROVIDERS = ("bf16", *QUANTIZED, *CACHED, *LEAST, *TORCHAO, *WITH_ATTENTION)
COLUMNS = (
    "benchmark", "size", "provider", "ms", "ms_20", "ms_80", "us", "over_bf16", "over_torchao", "of_floor", "floor_ms",
    "over_read", "of_copy", "saved_gib", "peak_gib", "weights_gib", "compile_s", "flops_quantized", "gemms",
    "card", "torch", "triton", "torchao", "date", "command",
)  # fmt: skip
SHOWN = {
    "size": "size", "provider": "what", "ms": "step ms", "us": "us", "over_bf16": "over bf16",
    "over_torchao": "over torchao", "of_floor": "of floor", "over_read": "over reading the weight",
    "of_copy": "of copy rate", "saved_gib": "saved GiB", "peak_gib": "peak GiB", "weights_gib": "weights GiB",
    "compile_s": "compile s", "flops_quantized": "FLOPs quantized", "gemms": "GEMMs",
}  # fmt: skip
"""The columns that tables show, and their titles."""
Row = dict[str, str]


@dataclass(frozen=True)
class Stack:
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

    def model(self) -> nn.Module:
        """The stack, on the default device."""
        return Blocks(self)

    def input(self) -> Tensor:
        """Normal values."""
        return torch.randn(self.batch, self.length, self.hidden, dtype=torch.bfloat16)


@dataclass(frozen=True)
class Linear:
    """Sizes of one linear layer: input [m, k], weight [n, k]."""

    m: int
    k: int
    n: int

    def __str__(self) -> str:
        return f"{self.m}x{self.k}x{self.n}"

    def model(self) -> nn.Module:
        """The layer, on the default device."""
        return nn.Linear(self.k, self.n, bias=False, dtype=torch.bfloat16)

    def input(self) -> Tensor:
        """Normal values."""
        return torch.randn(self.m, self.k, dtype=torch.bfloat16)


@dataclass(frozen=True)
class Grouped:
    """Sizes of the experts of one layer: weights [experts, n, k], and `m` rows of k features routed to them."""

    experts: int
    m: int
    k: int
    n: int

    def __str__(self) -> str:
        return f"{self.experts} experts {self.m}x{self.k}x{self.n}"

    def model(self) -> nn.Module:
        """The experts, on the default device."""
        return Experts(self)

    def input(self) -> Tensor:
        """Normal values."""
        return torch.randn(self.m, self.k, dtype=torch.bfloat16)


LLAMA3_8B = Stack(blocks=4, hidden=4096, ffn=14336, heads=32, kv_heads=8, batch=2, length=8192)
LINEARS = (
    Linear(16384, 4096, 4096), Linear(16384, 4096, 14336), Linear(16384, 14336, 4096), Linear(16384, 8192, 8192),
    Linear(8192, 8192, 28672),
)  # fmt: skip
GROUPS = (Grouped(128, 65536, 2048, 768), Grouped(8, 32768, 7168, 2048))
"""Qwen3-30B-A3B, 8192 tokens with 8 experts each, up-projection; and a DeepSeek-like share of 8 local experts."""
TINY_STACK = Stack(blocks=1, hidden=64, ffn=128, heads=4, kv_heads=2, batch=2, length=16)
TINY_LINEAR = Linear(32, 64, 96)
TINY_GROUPS = Grouped(4, 64, 32, 48)
Size = Stack | Linear | Grouped
SPECS = (
    "per_tensor_e4m3", "per_row_e4m3(pow2,torchao)", "block_1x128_e4m3(pow2)", "block_128x128_e4m3(pow2)", "mxfp8_e4m3",
    "mxfp8_2d_e4m3",
)  # fmt: skip


@dataclass(frozen=True)
class Cast:
    """A matrix to quantize, in both directions from one tensor or in the columnwise one alone."""

    m: int
    k: int
    directions: int

    def __str__(self) -> str:
        return f"{self.m}x{self.k} {'both' if self.directions == 2 else 'columnwise'}"

    def least_bytes(self, spec: str) -> int:
        """One read and one write each, and another read where an amax of the tensor or of a row comes first."""
        reads = 2 if QuantSpec.parse(spec).row.family in ("per_tensor", "per_row") else 1
        return self.m * self.k * (2 * reads + self.directions)


CASTS = tuple(Cast(16384, k, directions) for k in (4096, 14336) for directions in (2, 1))
TINY_CASTS = (Cast(128, 256, 2), Cast(128, 256, 1))


class Block(DecoderBlock):
    """One with rotary embedding and causal attention."""

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

    def __init__(self, size: Stack) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.blocks))
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
    """A weight for each group of rows; the groups differ in size as those of a router that is not balanced do."""

    offs: Tensor

    def __init__(self, size: Grouped) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size.experts, size.n, size.k, dtype=torch.bfloat16) * size.k**-0.5)
        generator = torch.Generator("cpu").manual_seed(0)
        share = torch.rand(size.experts, generator=generator, device="cpu") + 0.5
        ends = (share.cumsum(0) / share.sum() * (size.m // 16)).round() * 16  # torchao takes no other sizes
        self.register_buffer("offs", ends.to(torch.int32).to(self.weight.device))
        self.multiply: Callable[[Tensor, Tensor, Tensor], Tensor] = torch._grouped_mm

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x, self.weight.transpose(-2, -1), self.offs)


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Counts what a forward keeps for its backward: each storage once, those of `known` tensors not."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__(self._pack, lambda tensor: tensor)
        self.known = {t.untyped_storage().data_ptr() for t in known}
        self.sizes: dict[int, int] = {}

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.known:
            self.sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    @property
    def total(self) -> int:
        """Bytes."""
        return sum(self.sizes.values())


def prepare(provider: str, model: nn.Module) -> tuple[Callable[[Tensor], Tensor], Backend | None]:
    """The model compiled as a provider does it, and fxquant's backend where that is the provider."""
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


def recipe_of(provider: str) -> recipes.Recipe | None:
    """The recipe of a provider, or None for one that is not fxquant's.

    With attention, its forward is in FP8 with a scale for each head, or with delayed scales where those of the linears
    are, its backward in high precision.
    """
    name = _recipe_name(provider)
    if name not in QUANTIZED or not provider.endswith(ATTENTION):
        return recipes.get(name) if name in QUANTIZED else None
    of_linears = recipes.get(name)
    answer = of_linears.request() if isinstance(of_linears, recipes.DelayedScaling) else Float8HeadQuantizer()
    forward = recipes.Rule(answer, module_type="dpa", tensor_type="qkv|s")
    return recipes.CustomRecipe(qfactory=recipes.Rules([forward], default=name))


def _recipe_name(provider: str) -> str:
    """A training provider's name without what its recipe is combined with."""
    for more in (ATTENTION, " cached", " least"):
        provider = provider.removesuffix(more)
    return provider


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


@dataclass
class Contender:
    """Something to time in turn with others: what to run, what is known of it already, and its times."""

    name: str
    step: Callable[[], None]
    row: Row
    times: list[float]


def contender(provider: str, size: Size, device: str) -> Contender:
    """Compiles forward and backward of one provider, beside whatever is on the device already."""
    gc.collect()
    cuda = device == "cuda"
    if cuda:
        torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated() if cuda else 0
    torch.manual_seed(0)
    with torch.device(device):
        model, x = size.model(), size.input().requires_grad_()
    known = [*model.parameters(), *model.buffers()]
    run, backend = prepare(provider, model)
    grad_output = torch.randn_like(x if isinstance(size, Stack) else x[:, :1].expand(-1, size.n).contiguous())

    def step() -> None:
        run(x).backward(grad_output)  # type: ignore[no-untyped-call]
        model.zero_grad(set_to_none=True)  # leaves the memory to whose turn is next
        x.grad = None

    started = time.perf_counter()
    with inductor_config.patch(force_disable_caches=True):
        step()
    wait(device)
    compile_seconds = time.perf_counter() - started
    saved = SavedBytes(known)
    with saved:
        output = run(x)
    del output
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    step()
    wait(device)
    peak = torch.cuda.max_memory_allocated() - before if cuda else 0
    row = {
        "saved_gib": f"{saved.total / 2**30:.2f}",
        "peak_gib": f"{peak / 2**30:.2f}",
        "compile_s": f"{compile_seconds:.1f}",
        "flops_quantized": f"{backend.report().coverage:.0%}" if backend else "",
    }
    return Contender(provider, step, row, [])


def wait(device: str) -> None:
    """Until the device is idle."""
    if device == "cuda":
        torch.cuda.synchronize()


ROUNDS = 3


def time_in_turn(contenders: Sequence[Contender], device: str, seconds: float, repeats: int) -> None:
    """Fills in `times`: in each of `ROUNDS` everyone has its turn, so that a card that grows warm slows all alike.

    `repeats` steps and `seconds` of warm-up in all for each. One that fails is left with no times and why.
    """
    for _ in range(ROUNDS):
        for each in contenders:
            if "gemms" in each.row:
                continue
            try:
                until = time.perf_counter() + seconds / ROUNDS
                while time.perf_counter() < until:
                    each.step()
                    wait(device)
                each.times += timed(each.step, max(1, repeats // ROUNDS), device == "cuda")
            except Exception as error:
                each.times.clear()
                each.row["gemms"] = failure(error)


def attempt(provider: str, make: Callable[[str], Contender]) -> Contender:
    """A provider ready to be timed, or one that is left out of the turns and says why."""
    try:
        return make(provider)
    except Exception as error:
        return Contender(provider, lambda: None, {"gemms": failure(error)}, [])


def failure(error: Exception) -> str:
    """An error as a table shows it."""
    return f"failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}"


FLOORS = {
    "delayed_scaling": "current_scaling", "torchao tensorwise": "current_scaling", "torchao rowwise": "rowwise",
}  # fmt: skip
"""Whose GEMMs a provider runs, where they are not its own recipe's."""


def floor_contender(recipe: str, size: Linear, device: str) -> Contender:
    """The three GEMMs of a linear alone, on operands that are quantized already; of bfloat16 for ``bf16``."""
    torch.manual_seed(0)
    with torch.device(device):
        x, w, dy = (
            torch.randn(shape, dtype=torch.bfloat16) for shape in ((size.m, size.k), (size.n, size.k), (size.m, size.n))
        )
    if recipe == "bf16":

        def plain() -> None:
            F.linear(x, w), dy @ w, dy.t() @ x

        return Contender(f"{recipe} GEMMs", plain, {}, [])
    values = {"input": x, "weight": w, "grad_output": dy}
    pairs = []
    for kind, sides in GEMM_OPERANDS.items():
        parts, specs = [], []
        for operand, direction in sides:
            answer = recipes.get(recipe).quantizer(QuantizerRole("linear", operand))
            assert isinstance(answer, Quantizer)
            specs.append(str(answer.spec(direction)))
            parts.append(torch.ops.fxquant.quantize(values[operand], specs[-1], direction.value))
        pairs.append((*parts, *specs, kind is Gemm.FPROP))

    def step() -> None:
        for a, b, a_spec, b_spec, fast in pairs:
            gemm.scaled_mm(a, b, a_spec, b_spec, None, torch.bfloat16, fast)

    return Contender(f"{recipe} GEMMs", step, {}, [])


def copy_contender(size: Linear, device: str) -> Contender:
    """A copy of the largest tensor of a linear."""
    x = torch.randn(size.m, max(size.k, size.n), dtype=torch.bfloat16, device=device)
    y = torch.empty_like(x)

    def step() -> None:
        y.copy_(x)

    return Contender("copy", step, {}, [])


def least_cast_bytes(provider: str, size: Linear) -> int:
    """One read and two writes of input, weight and gradient, and another read where amaxes come first."""
    if provider == "bf16":
        return 0
    takes_amaxes = provider in ("current_scaling", "rowwise", *TORCHAO)
    return (size.m * size.k + size.n * size.k + size.m * size.n) * (6 if takes_amaxes else 4)


def floors(
    size: Linear, contenders: Sequence[Contender], device: str
) -> tuple[list[Contender], Callable[[str], float | None]]:
    """What to time besides for the floor of each provider, and the floors in milliseconds once that has been done."""
    names = dict.fromkeys(FLOORS.get(each.name, each.name) for each in contenders)
    copy = copy_contender(size, device)
    gemms_alone: dict[str, Contender] = {}
    for name in names:
        try:
            gemms_alone[name] = floor_contender(name, size, device)
        except Exception as error:
            print(f"no floor for {name}, {size}: {failure(error)}", file=sys.stderr)

    def floor(provider: str) -> float | None:
        alone = gemms_alone.get(FLOORS.get(provider, provider))
        if alone is None or not alone.times or not copy.times:
            return None
        bytes_per_ms = 4 * size.m * max(size.k, size.n) / statistics.median(copy.times)
        return statistics.median(alone.times) + least_cast_bytes(provider, size) / bytes_per_ms

    return [copy, *gemms_alone.values()], floor


def measure_casts(providers: Sequence[str], size: Cast, device: str, seconds: float, repeats: int) -> list[Row]:
    """Times quantizations in turn, and the copy whose rate they are held to."""
    torch.compiler.reset()
    x = torch.randn(size.m, size.k, dtype=torch.bfloat16, device=device)
    contenders = []
    with unlimited_recompiles():
        for provider in providers:
            contenders.append(attempt(provider, lambda p: Contender(p, cast_step(p, size, x), {}, [])))
        time_in_turn(contenders, device, seconds, repeats)
    medians = {each.name: statistics.median(each.times) for each in contenders if each.times}
    rows = []
    for each in contenders:
        row = {"provider": each.name, **each.row, **(times_text(each.times) if each.times else {})}
        if each.name != "copy" and each.name in medians and "copy" in medians:
            least = size.least_bytes(each.name) / (4 * size.m * size.k)
            row["of_copy"] = f"{least * medians['copy'] / medians[each.name]:.0%}"
        rows.append(row)
    return rows


def cast_step(provider: str, size: Cast, x: Tensor) -> Callable[[], Any]:
    """One quantization, compiled, or a copy."""
    target = torch.empty_like(x)
    if provider == "copy":
        return lambda: target.copy_(x)

    def quantized(x: Tensor) -> Any:
        if size.directions == 2:
            return torch.ops.fxquant.hybrid_quantize(x, provider, provider)
        return torch.ops.fxquant.quantize(x, provider, "columnwise")

    run = torch.compile(quantized, backend=Backend("high_precision"), fullgraph=True, dynamic=False)
    run(x)
    return functools.partial(run, x)


def times_text(times: Sequence[float]) -> Row:
    """Median and spread."""
    return {name: f"{quantile(times, q):.4g}" for name, q in (("ms", 0.5), ("ms_20", 0.2), ("ms_80", 0.8))}


def timed(step: Callable[[], None], repeats: int, cuda: bool) -> list[float]:
    """Milliseconds of each of `repeats` steps; on CUDA the queue is never empty between them."""
    if not cuda:
        marks = [time.perf_counter()]
        for _ in range(repeats):
            step()
            marks.append(time.perf_counter())
        return [1e3 * (b - a) for a, b in itertools.pairwise(marks)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]  # type: ignore[no-untyped-call]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]


def quantile(values: Sequence[float], q: float) -> float:
    """The median of a few values, or another quantile of them."""
    return statistics.median(values) if q == 0.5 else sorted(values)[round(q * (len(values) - 1))]


def setting(device: str, command: str) -> Row:
    """The columns that say where and when."""
    return {
        "card": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "triton": version("triton"),
        "torchao": version("torchao"),
        "date": datetime.date.today().isoformat(),
        "command": command,
    }


def version(package: str) -> str:
    """The version of an installed package; empty for none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def gemms(provider: str, device: str) -> str:
    """Whether the GEMMs of a provider have instructions of their own on the device."""
    from fxquant.__main__ import runs_as

    name = _recipe_name(provider.removesuffix(" calibrated"))
    if name not in QUANTIZED:
        return "native"
    return runs_as(
        recipes.get(name),
        "Hopper" if device == "cuda" and torch.cuda.get_device_capability()[0] == 9 else "the CPU",
    )


def run_benchmark(options: argparse.Namespace, command: str) -> list[Row]:
    """Measures every size and provider; a provider that fails leaves a row that says why in its last shown column."""
    device, cuda = options.device, options.device == "cuda"
    sizes: Sequence[Size | Cast | Decode | Served | Attention] = options.sizes(cuda, options)
    where = setting(device, command)
    how = (device, options.seconds if cuda else 0.0, options.repeats if cuda else ROUNDS)
    rows = []
    for size in sizes:
        providers = options.providers
        if isinstance(size, Cast):
            measured = measure_casts(providers, size, *how)
        elif isinstance(size, (Decode, Served, Attention)):
            measured = measure_inference(providers, size, *how)
        else:
            measured = measure(providers, size, *how)
        for row in measured:
            row = dict.fromkeys(COLUMNS, "") | {"benchmark": options.benchmark, "size": str(size)} | row | where
            print(" ".join(filter(None, (row[column] for column in SHOWN))), file=sys.stderr, flush=True)
            rows.append(row)
            if options.csv:
                append(options.csv, row)
    return rows


def measure(providers: Sequence[str], size: Size, device: str, seconds: float, repeats: int) -> list[Row]:
    """Times forward and backward of all providers in turn, and for a linear layer the floors of their times."""
    torch.compiler.reset()
    contenders: list[Contender] = []
    with unlimited_recompiles():
        for provider in providers:
            contenders.append(attempt(provider, lambda p: contender(p, size, device)))
        alone, floor = floors(size, contenders, device) if isinstance(size, Linear) else ([], lambda _: None)
        time_in_turn([*contenders, *alone], device, seconds, repeats)
    medians = {each.name: statistics.median(each.times) for each in contenders if each.times}
    rows = []
    for each in contenders:
        row = {"provider": each.name, "gemms": gemms(each.name, device), **each.row}
        if each.times:
            row |= times_text(each.times)
            row |= ratios(each.name, medians, floor(each.name))
        rows.append(row)
    return rows


def measure_inference(
    providers: Sequence[str], size: Decode | Served | Attention, device: str, seconds: float, repeats: int
) -> list[Row]:
    """Times inference, or an attention, of all providers in turn."""
    torch.compiler.reset()
    contenders: list[Contender] = []
    calls_of: dict[str, int] = {}

    def ready(provider: str) -> Contender:
        calls, row = prepared(provider, size, device)
        step, calls_of[provider] = bench_decode.in_a_graph(calls, device == "cuda")
        return Contender(provider, step, row, [])

    with unlimited_recompiles():
        for provider in providers:
            if isinstance(size, Attention) and not size.takes(provider):
                continue
            contenders.append(attempt(provider, ready))
        time_in_turn(contenders, device, seconds, repeats)
    us = {c.name: 1e3 * statistics.median(c.times) / calls_of[c.name] for c in contenders if c.times}
    rows = []
    for each in contenders:
        row = {"provider": each.name, "gemms": gemms(each.name, device), **each.row}
        if each.times:
            row["us"] = f"{us[each.name]:.1f}"
            row["over_bf16"] = f"{us['bf16'] / us[each.name]:.2f}x" if "bf16" in us else ""
            if isinstance(size, Decode) and device == "cuda":
                row["over_read"] = f"{us[each.name] / (size.n * size.k / bench_decode.copy_rate()):.2f}x"
        rows.append(row)
    return rows


def prepared(
    provider: str, size: Decode | Served | Attention, device: str
) -> tuple[list[Callable[[], Any]], dict[str, str]]:
    """What is timed of a provider, and what is known of it before."""
    if isinstance(size, Decode):
        return bench_decode.prepared(provider, size, device)
    if isinstance(size, Attention):
        return bench_attention.prepared(provider, size, device)
    return bench_export.prepared(provider, size, device)


def ratios(provider: str, medians: Mapping[str, float], floor: float | None) -> Row:
    """What a provider's time is to those of bf16 and torchao and to its floor, where these were measured."""
    own, row = medians[provider], {}
    peer = "torchao rowwise" if provider.startswith("rowwise") else "torchao tensorwise"
    if "bf16" in medians:
        row["over_bf16"] = f"{medians['bf16'] / own:.2f}x"
    if recipe_of(provider) is not None and peer in medians:
        row["over_torchao"] = f"{medians[peer] / own:.2f}x"
    if floor is not None:
        row |= {"of_floor": f"{own / floor:.2f}x", "floor_ms": f"{floor:.4g}"}
    return row


def means(rows: Iterable[Row]) -> list[list[str]]:
    """The geometric means of the ratios of providers that were measured at several sizes, with a head."""
    columns = ("over_bf16", "over_torchao", "of_floor")
    by_provider: dict[str, list[Row]] = {}
    for row in rows:
        by_provider.setdefault(row["provider"], []).append(row)
    found = []
    for provider, own in by_provider.items():
        values = {c: [float(row[c].rstrip("x")) for row in own if row[c]] for c in columns}
        if all(len(each) in (0, len(own)) for each in values.values()) and len(own) > 1:
            found.append([provider, *(f"{statistics.geometric_mean(v):.2f}x" if v else "" for v in values.values())])
    return [["geometric mean", *(SHOWN[c] for c in columns)], *found] if found else []


def append(path: Path, row: Row) -> None:
    """Adds a row to a CSV file, with a header where the file is new."""
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if new:
            writer.writeheader()
        writer.writerow(row)


def table_rows(rows: Iterable[Row]) -> list[Row]:
    """What tables show of measured rows, by title; columns in which nothing was measured are left out."""
    rows = list(rows)
    columns = [column for column in SHOWN if any(row[column] for row in rows)]
    return [{SHOWN[column]: row[column] for column in columns} for row in rows]


def read_table(path: Path) -> list[Row]:
    """`table_rows` of a CSV file."""
    with path.open(newline="", encoding="utf-8") as file:
        return table_rows(csv.DictReader(file))


def caption(path: Path) -> str:
    """Card, versions, date and command of a CSV file, as a sentence for each setting that occurs in it."""
    with path.open(newline="", encoding="utf-8") as file:
        settings = {tuple(row[key] for key in COLUMNS[-6:]) for row in csv.DictReader(file)}
    return " ".join(
        f"{card}, torch {torch_version}, triton {triton}"
        + (f", torchao {torchao}" if torchao else "")
        + f", {date}: `{command}`."
        for card, torch_version, triton, torchao, date, command in sorted(settings)
    )


def _stack(cuda: bool, options: argparse.Namespace) -> list[Stack]:
    if not cuda:
        return [TINY_STACK]
    return [Stack(**{**vars(LLAMA3_8B), "length": options.length, "blocks": options.blocks})]


def _linears(cuda: bool, _options: argparse.Namespace) -> Sequence[Linear]:
    return LINEARS if cuda else [TINY_LINEAR]


def _groups(cuda: bool, _options: argparse.Namespace) -> Sequence[Grouped]:
    return GROUPS if cuda else [TINY_GROUPS]


def _casts(cuda: bool, _options: argparse.Namespace) -> Sequence[Cast]:
    return CASTS if cuda else TINY_CASTS


def _decodes(cuda: bool, _options: argparse.Namespace) -> Sequence[Decode]:
    return bench_decode.SIZES if cuda else bench_decode.TINY


def _served(cuda: bool, _options: argparse.Namespace) -> Sequence[Served]:
    return bench_export.SIZES if cuda else bench_export.TINY


def _attentions(cuda: bool, _options: argparse.Namespace) -> Sequence[Attention]:
    return bench_attention.SIZES if cuda else bench_attention.TINY


def _providers(text: str) -> list[str]:
    names = re.split(r",(?![^(]*\))", text)  # a spec has commas of its own, in parentheses
    known = dict.fromkeys((*PROVIDERS, *bench_decode.PROVIDERS, *bench_attention.PROVIDERS, "copy", *SPECS))
    unknown = [name for name in names if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown {unknown}; known: {', '.join(known)}")
    return names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fxquant bench", description="Times fxquant, bf16 and torchao.")
    kinds = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    known = [p for p in PROVIDERS[: -len(WITH_ATTENTION)] if p not in TORCHAO or importlib.util.find_spec("torchao")]
    block = kinds.add_parser(
        "block", help=f"training steps of Llama3-8B blocks; those of RECIPE{ATTENTION} quantize attention too"
    )
    block.add_argument(
        "--length", type=int, default=LLAMA3_8B.length, help="tokens in a sequence (default: %(default)s)"
    )
    block.add_argument("--blocks", type=int, default=LLAMA3_8B.blocks, help="decoder blocks (default: %(default)s)")
    block.set_defaults(sizes=_stack, providers=[*(p for p in known if p not in CACHED + LEAST[1:]), WITH_ATTENTION[0]])
    linear = kinds.add_parser("linear", help="forward and backward of one linear layer")
    linear.set_defaults(sizes=_linears, providers=[p for p in known if p not in ("mxfp8", "nvfp4", *CACHED, *LEAST)])
    grouped = kinds.add_parser("grouped", help="forward and backward of the experts of one layer")
    grouped.set_defaults(sizes=_groups, providers=[p for p in known if p not in ("torchao tensorwise", *LEAST)])
    decode = kinds.add_parser("decode", help="inference of one linear layer with few tokens")
    decode.set_defaults(sizes=_decodes, providers=[p for p in bench_decode.PROVIDERS if p not in TORCHAO or p in known])
    export = kinds.add_parser("export", help="inference of a decoder block compiled ahead of time")
    export.set_defaults(sizes=_served, providers=bench_export.PROVIDERS)
    attention = kinds.add_parser("attention", help="attention in FP8, forward and backward")
    attention.set_defaults(sizes=_attentions, providers=bench_attention.PROVIDERS)
    cast = kinds.add_parser("cast", help="quantizations, beside a copy")
    cast.set_defaults(sizes=_casts, providers=["copy", *SPECS])
    for kind in (block, linear, grouped, decode, export, attention, cast):
        own = {cast: ["copy", *SPECS], decode: bench_decode.PROVIDERS, export: bench_export.PROVIDERS}
        own[attention] = bench_attention.PROVIDERS
        names = own.get(kind, known)
        kind.add_argument("--providers", type=_providers, help=f"names, separated by commas, of {', '.join(names)}")
        kind.add_argument("--csv", type=Path, help="append the rows to this file")
        kind.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
        kind.add_argument("--repeats", type=int, default=30, help="timed steps on CUDA (default: %(default)s)")
        kind.add_argument("--seconds", type=float, default=1.0, help="warm-up on CUDA (default: %(default)s)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one benchmark, prints its table and returns an exit code: 1 when a provider failed."""
    argv = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(argv)
    rows = run_benchmark(options, f"python -m fxquant bench {' '.join(argv)}".partition(" --csv ")[0])
    shown = table_rows(rows)
    print(aligned([list(shown[0]), *(list(row.values()) for row in shown)]))
    if options.benchmark == "linear" and (table := means(rows)):
        print(f"\n{aligned(table)}")
    return int(any(not row["ms"] and not row["us"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
