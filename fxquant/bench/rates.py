"""Measures the rates of a card that estimates take: each by the formula of the estimate, turned round.

What no probe measures is that of the card's row, if one ships, or of how kernels are built, which an H100's row says;
a kernel without a rate has no estimate.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from functools import partial
from json import dumps
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fxquant.backend.backend import Backend
from fxquant.bench import attention as attention_bench
from fxquant.bench.inference import in_a_graph
from fxquant.bench.rounds import failure, timed
from fxquant.compat.device import capability, card_name, knows_gluon, triton_version
from fxquant.compat.private import torch_grouped_mm
from fxquant.cost.gemms import busy_us
from fxquant.cost.kept import SCHEMA, keep
from fxquant.cost.rates import RATES, AttentionRate, AttentionRates, CardRates, CastRate, GemmRate
from fxquant.errors import OptionError
from fxquant.formats import QuantSpec
from fxquant.kernels.attention.choice import AttentionKernel
from fxquant.kernels.attention.ops import attention_forward
from fxquant.kernels.cast.choice import CastKernel
from fxquant.kernels.cast.ops import amax, hybrid_quantize, quantize
from fxquant.kernels.linear.choice import GemmKernel
from fxquant.kernels.linear.ops import fused_scaled_mm, scaled_mm
from fxquant.kernels.operator import Kernel, Operator
from fxquant.report.text import aligned
from fxquant.tools.progress import progress

GEMMS: dict[GemmKernel, tuple[str, str]] = {
    GemmKernel.PER_TENSOR: ("per_tensor_e4m3", "per_tensor_e4m3"),
    GemmKernel.PER_ROW: ("per_row_e4m3", "per_row_e4m3"),
    GemmKernel.TILES: ("block_1x128_e4m3", "block_128x128_e4m3"),
    GemmKernel.BLOCKS: ("block_1x128_e4m3", "block_1x128_e4m3"),
    GemmKernel.TILES_WARPS: ("block_1x128_e4m3", "block_128x128_e4m3"),
    GemmKernel.BLOCKS_WARPS: ("block_1x128_e4m3", "block_1x128_e4m3"),
    GemmKernel.TRITON: ("per_tensor_e4m3", "per_tensor_e4m3"),
    GemmKernel.FEW_ROWS: ("per_tensor_e4m3", "per_tensor_e4m3"),
}
"""The formats by which each kernel is measured."""

CASTS = {
    "per_tensor": "per_tensor_e4m3", "per_row": "per_row_e4m3", "block": "block_1x128_e4m3",
    "block_2d": "block_128x128_e4m3", "mxfp8": "mxfp8_e4m3", "mxfp8_2d": "mxfp8_2d_e4m3",
}  # fmt: skip
"""A format of each family of scalings."""

_WIDTH = 128
"""The head dimension at which attention is measured."""


class Timer(Protocol):
    """Gives the microseconds of a call, of calls that take turns; `what` names the probe."""

    def __call__(self, what: str, calls: Sequence[Callable[[], object]]) -> float: ...


def in_cuda_graphs(what: str, calls: Sequence[Callable[[], object]]) -> float:
    """The median microseconds of a call in a CUDA graph, after a warm-up of 0.15 s."""
    step, count = in_a_graph(calls, True)
    until = time.perf_counter() + 0.15
    while time.perf_counter() < until:
        step()
        torch.cuda.synchronize()
    return statistics.median(timed(step, 9, cuda=True)) * 1e3 / count


def chosen(kernel: Kernel, called: Operator[..., Any], *args: Any) -> Callable[[], object] | None:
    """Returns a call of an operator by a kernel; None on a card for which another one is chosen."""
    if kernel is GemmKernel.TRITON:
        return partial(fused_scaled_mm.run(kernel), *args, "", None, False) if args[0][0].is_cuda else None
    cublas = kernel in (GemmKernel.TILES, GemmKernel.BLOCKS)  # which large products are not, where Gluon has them
    facts = replace(called.facts_of(*args), in_memory=True, triton=not cublas)
    return partial(called.run(kernel), *args) if called.choose(facts).kernel is kernel else None


@dataclass
class Card:
    """A card whose rates are measured, and what was not, with the reason.

    Probes have matrices of `size`, and no probe begins after so many `seconds`. `find` gives the call of an operator by
    a kernel, or None.
    """

    device: str
    timer: Timer
    size: int = 8192
    lengths: tuple[int, int] = (4096, 16384)
    seconds: float = 75.0
    clock: Callable[[], float] = time.monotonic
    find: Callable[..., Callable[[], object] | None] = chosen
    missing: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.until = self.clock() + self.seconds

    def us(self, what: str, make: Callable[[], Callable[[], object] | None]) -> float | None:
        """The microseconds of a probe, or None if its kernel does not run here or time is up."""
        if self.clock() > self.until:
            self.missing[what] = "no time was left"
            return None
        try:
            call = make()
            if call is None:
                self.missing[what] = "another kernel is taken on this card"
                return None
            return self.timer(what, [call])
        except Exception as error:
            self.missing[what] = failure(error)
            return None

    def matrix(self, rows: int, columns: int) -> Tensor:
        """Random numbers in bfloat16."""
        return torch.randn(rows, columns, dtype=torch.bfloat16, device=self.device)

    def heads(self, heads: int, length: int) -> list[Tensor]:
        """Random q, k, v and gradient of an attention of one sequence."""
        return [self.matrix(heads * length, _WIDTH).view(1, heads, length, _WIDTH) for _ in range(4)]


def measure(card: Card) -> CardRates:
    """The rates of a card, with what was not measured in their source."""
    device = torch.device(card.device)
    name = card_name(device)
    rates = RATES.get(name)
    if rates is None or rates.published:
        of_device = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
        rates = replace(
            RATES["NVIDIA H100 80GB HBM3"], capability=capability(device), gemm={}, casts={}, attention={},
            multiprocessors=of_device.multi_processor_count if of_device else 1,
        )  # fmt: skip
    for step in (_copy, _starts, _products, _groups, _casts, _fused, _attention):
        rates = step(card, rates)
    source = f"fxquant rates in CUDA graphs, torch {torch.__version__}, triton {triton_version()}, {date.today()}"
    others = f"; not measured: {', '.join(card.missing)}" if card.missing else ""
    return replace(rates, source=source + others)


def _copy(card: Card, rates: CardRates) -> CardRates:
    source = card.matrix(2 * card.size, card.size)
    target = torch.empty_like(source)
    us = card.us("copy", lambda: partial(target.copy_, source))
    return rates if us is None else replace(rates, copy=4 * source.numel() / us / 1e6)


def _starts(card: Card, rates: CardRates) -> CardRates:
    """Microseconds before data moves, by operands that take none."""
    small, square = card.matrix(128, 256), card.matrix(128, 128)
    target = torch.empty_like(small)
    spec = CASTS["per_row"]
    probes: dict[str, Callable[[], Callable[[], object] | None]] = {
        "launch": lambda: partial(target.copy_, small),
        "gemm_start": lambda: partial(torch.mm, square, square),
        "amax_start": lambda: card.find(CastKernel.TRITON, amax, small),
        "lines_start": lambda: card.find(CastKernel.STORED, hybrid_quantize, small, spec, spec),
    }
    starts = {what: us for what, make in probes.items() if (us := card.us(what, make)) is not None}
    if "lines_start" in starts and "launch" in starts:
        starts["lines_start"] = max(0.0, starts["lines_start"] - starts["launch"])
    return replace(rates, **starts)  # type: ignore[arg-type]


def _products(card: Card, rates: CardRates) -> CardRates:
    large, other = card.matrix(card.size, card.size), card.matrix(card.size, card.size)
    few = card.matrix(16, card.size)
    us = [card.us(f"bf16 GEMM, {what}", partial(partial, torch.mm, x, other)) for what, x in _sizes(large, few)]
    rates = replace(rates, bf16=_gemm_rate(card, rates, rates.bf16, [us[0], us[0], us[1]], 2))
    measured: dict[GemmKernel, GemmRate] = dict(rates.gemm)
    for kernel, (a_spec, b_spec) in GEMMS.items():

        def product(x: Tensor, fast: bool, kernel: GemmKernel = kernel, a: str = a_spec, b: str = b_spec) -> Any:
            parts = quantize.best(x, a, "rowwise"), quantize.best(other, b, "rowwise")
            return card.find(kernel, scaled_mm, *parts, a, b, None, torch.bfloat16, fast)

        uses = (("large", large, True), ("large, summed in float32", large, False), ("16 rows", few, True))
        us = [card.us(f"{kernel}, {what}", partial(product, x, fast)) for what, x, fast in uses]
        reads = kernel is GemmKernel.FEW_ROWS and us[2] is not None  # which is all that bounds it
        if reads or (us[0] is not None and us[1] is not None):
            before = rates.gemm.get(kernel) or RATES["NVIDIA H100 80GB HBM3"].gemm[kernel]
            measured[kernel] = _gemm_rate(card, rates, before, us, 1)
    return replace(rates, gemm=measured)


def _sizes(large: Tensor, few: Tensor) -> tuple[tuple[str, Tensor], ...]:
    return ("large", large), ("16 rows", few)


def _gemm_rate(card: Card, rates: CardRates, before: GemmRate, us: Sequence[float | None], itemsize: int) -> GemmRate:
    """A rate by the times of a large GEMM, fast and not, and of one of 16 rows; what was not measured is as before."""
    n, (fast, slow, few) = card.size, us
    tiles = busy_us(rates, before.smallest, 1.0, 1, n, n, n)
    if fast is not None and slow is not None:
        tflops = [tiles / max(one - rates.gemm_start, 1e-3) for one in (fast, slow, slow)]
        before = before._replace(fprop=tflops[0], dgrad=tflops[1], wgrad=tflops[2])
    if few is not None:
        moved = (itemsize * (16 * n + n * n) + 2 * 16 * n) / rates.copy / 1e6
        before = before._replace(read=min(1.0, moved / max(few - rates.gemm_start, 1e-3)))
    return before


def _groups(card: Card, rates: CardRates) -> CardRates:
    """The grouped GEMM in bfloat16 of 8 experts."""
    groups, rows, width = 8, card.size // 2, card.size // 4
    x, weights = card.matrix(groups * rows, width), card.matrix(groups * width, width).view(groups, width, width)
    offs = torch.arange(1, groups + 1, dtype=torch.int32, device=card.device) * rows
    us = card.us("bf16 grouped GEMM", lambda: partial(torch_grouped_mm, x, weights, offs))
    if us is None:
        return rates
    before = rates.bf16_grouped
    flops = 2 * (groups * rows + groups * 64) * width * width
    tflops = flops / max(us - rates.gemm_start - before.group * groups, 1e-3) / 1e6
    return replace(rates, bf16_grouped=before._replace(fprop=tflops, dgrad=tflops, wgrad=tflops))


def _casts(card: Card, rates: CardRates) -> CardRates:
    x = card.matrix(2 * card.size, card.size)
    us = card.us("amax", lambda: card.find(CastKernel.TRITON, amax, x))
    if us is not None:
        rates = replace(rates, amax=_share(rates, 2 * x.numel(), us - rates.amax_start))
    measured = dict(rates.casts)
    for family, text in CASTS.items():
        spec = QuantSpec.parse(text)
        state = torch.ones(1, device=card.device) if spec.row.family == "per_tensor" else None
        shares = []
        both, one = (text, text, state, state), (text, "columnwise", state)
        for directions, what, called, args in ((2, "both", hybrid_quantize, both), (1, "columnwise", quantize, one)):
            probe = f"{family} cast, {what}"
            us = card.us(probe, partial(card.find, CastKernel.STORED, called, x, *args))
            if us is None:
                break
            us -= rates.launch
            if spec.row.family == "per_row":
                us -= rates.lines_start + 2 * x.numel() / (rates.copy * rates.amax) / 1e6
            if us <= 0:
                card.missing[probe] = "it took less than its amaxes were measured to take"
                break
            shares.append(_share(rates, x.numel() * (2 + directions * spec.row.bytes_per_element), us))
        if len(shares) == 2:
            measured[family] = CastRate(*shares)
    return replace(rates, casts=measured)


def _share(rates: CardRates, moved: float, us: float) -> float:
    """The share of the copy rate at which bytes were moved."""
    return moved / (rates.copy * max(us, 1e-3)) / 1e6


def _fused(card: Card, rates: CardRates) -> CardRates:
    """Casts that Inductor writes: of rows, and of columns."""
    x = card.matrix(2 * card.size, card.size)
    runs = {"rowwise": ("mxfp8_e4m3", "rowwise"), "transposed": ("nvfp4", "columnwise")}
    for what, (text, direction) in runs.items():
        state = torch.ones(1, device=card.device) if text == "nvfp4" else None

        def cast(x: Tensor, text: str = text, direction: str = direction, state: Tensor | None = state) -> Any:
            return torch.ops.fxquant.quantize(x, text, direction, state)

        run = torch.compile(cast, backend=Backend("high_precision"), fullgraph=True, dynamic=False)
        us = card.us(f"cast by Inductor, {what}", partial(partial, run, x))
        if us is not None:
            moved = x.numel() * (2 + QuantSpec.parse(text).row.bytes_per_element)
            rates = replace(rates, **{what: _share(rates, moved, us - rates.launch)})  # type: ignore[arg-type]
    return rates


def _attention(card: Card, rates: CardRates) -> CardRates:
    """Attention of one sequence at two lengths, causal too at the longer, by torch's kernels and those in FP8."""
    heads = 32 if card.size >= 1024 else 2
    points = (*((length, False) for length in card.lengths), (card.lengths[1], True))
    plain: dict[str, list[float | None]] = {"forward": [], "backward": [], "fp8_forward": [], "gluon_forward": []}
    for length, causal in points:
        size = attention_bench.Attention(length, causal, True, heads, heads, _WIDTH)
        q, k, v, do = (
            torch.randn(1, heads, length, _WIDTH, dtype=torch.bfloat16, device=card.device) for _ in range(4)
        )
        where = f"{length} keys{', causal' if causal else ''}"
        torchs = partial(F.scaled_dot_product_attention, is_causal=causal)
        us = card.us(f"attention, {where}", partial(partial, torchs, q, k, v))
        plain["forward"].append(us)
        inputs = tuple(x.requires_grad_() for x in (q, k, v))
        step = partial(_step, torchs, inputs, do)
        both = card.us(f"attention and backward, {where}", partial(partial, step))
        plain["backward"].append(None if us is None or both is None else max(both - us, 1e-3))
        for name, kernel in (("fp8_forward", AttentionKernel.TRITON), ("gluon_forward", AttentionKernel.GLUON)):
            call = partial(_by_kernel, card, kernel, size, *(x.detach() for x in (q, k, v)))
            plain[name].append(card.us(f"attention in FP8 by {kernel}, {where}", call))
    flops = {"backward": 10}
    fitted = {name: _attention_rate(us, card.lengths, heads, flops.get(name, 4)) for name, us in plain.items()}
    fp8 = fitted["gluon_forward"] or fitted["fp8_forward"]
    forward, backward = fitted["forward"], fitted["backward"]
    if forward is None or backward is None or fp8 is None:
        return rates
    before = rates.attention.get(_WIDTH)
    of_backward = _fp8_backward(card, heads)
    in_gluon = knows_gluon() and rates.capability[0] == 9
    by_triton = before.fp8_backward if before else backward._replace(tflops=1.0)
    measured = AttentionRates(
        source=f"one sequence of {heads} heads, {card.lengths[0]} and {card.lengths[1]} keys",
        forward=forward,
        backward=backward,
        fp8_forward=fitted["fp8_forward"] or fp8,
        gluon_forward=fp8,
        fp8_backward=by_triton if in_gluon else of_backward or by_triton,
        gluon_backward=of_backward if in_gluon else None,
        within_step=before.within_step if before else 1.0,
    )
    return replace(rates, attention={**rates.attention, _WIDTH: measured})


def _by_kernel(
    card: Card, kernel: AttentionKernel, size: attention_bench.Attention, *qkv: Tensor
) -> Callable[[], object] | None:
    return card.find(kernel, attention_forward, *attention_bench.kernel_arguments(size, *qkv))


def _step(run: Callable[..., Tensor], inputs: tuple[Tensor, ...], do: Tensor) -> object:
    return torch.autograd.grad(run(*inputs), inputs, do)


def _attention_rate(
    us: Sequence[float | None], lengths: tuple[int, int], heads: int, flops: int
) -> AttentionRate | None:
    """The rate and start of two lengths, and the masked keys of a causal run of the longer one."""
    short, long, causal = us
    if short is None or long is None or causal is None or long <= short:
        return None
    work = [flops * heads * length * length * _WIDTH / 1e6 for length in lengths]
    tflops = (work[1] - work[0]) / (long - short)
    start = max(0.0, short - work[0] / tflops)
    keys = (causal - start) * tflops * 1e6 / (flops * heads * lengths[1] * _WIDTH)
    return AttentionRate(tflops, start, max(0, round(keys - lengths[1] / 2)))


def _fp8_backward(card: Card, heads: int) -> AttentionRate | None:
    """The backward in FP8 with its casts at the longer length, without and with a mask; its start is not told apart."""
    length, us = card.lengths[1], []
    for causal in (False, True):
        times: list[float | None] = []
        for backward in (False, True):
            size = attention_bench.Attention(length, causal, backward, heads, heads, _WIDTH)
            qkvdo = card.heads(heads, length)
            provider = f"fp8 heads{attention_bench.FP8_BACKWARD if backward else ''}"
            what = f"attention{' and backward' if backward else ''} in FP8{', causal' if causal else ''}"
            times.append(card.us(what, partial(attention_bench.prepare, provider, size, *qkvdo)))
        forward, both = times
        if forward is None or both is None:
            return None
        us.append(max(both - forward, 1e-3))
    flops = 10 * heads * length * _WIDTH / 1e6
    tflops = flops * length / us[0]
    return AttentionRate(tflops, 0.0, max(0, round(us[1] * tflops / flops - length / 2)))


def command(seconds: float, *, dry: bool, json: bool) -> str:
    """Measures the GPU at hand, keeps its rates unless `dry`, and returns them as a table or as JSON.

    Raises OptionError where there is no GPU.
    """
    if not torch.cuda.is_available():
        raise OptionError("torch finds no CUDA device: rates are measured of GPUs, and others have no estimates")
    name = card_name(torch.device("cuda"))
    card = Card("cuda", in_cuda_graphs, seconds=seconds)
    with progress("rates", lambda: f"measuring {name}"):
        rates = measure(card)
    if not dry:
        print(f"fxquant: note: kept in {keep(name, rates)}", file=sys.stderr)
    if json:
        return dumps({"schema": SCHEMA, "card": name, "rates": asdict(rates), "missing": card.missing})
    return text(name, rates, card.missing)


def text(name: str, rates: CardRates, missing: dict[str, str]) -> str:
    """The rates of a card as a table, and what was not measured."""
    products: dict[str, GemmRate] = {"bf16": rates.bf16, "bf16, grouped": rates.bf16_grouped}
    products.update((str(kernel), rate) for kernel, rate in rates.gemm.items())
    rows = [("copy", f"{rates.copy:.2f} TB/s"), *((what, _tflops(rate)) for what, rate in products.items())]
    for family, (both, columnwise) in rates.casts.items():
        rows.append((f"cast, {family}", f"{both:.0%} of a copy in both directions, {columnwise:.0%} columnwise"))
    for width, of_width in rates.attention.items():
        for what in ("forward", "backward", "fp8_forward", "gluon_forward", "fp8_backward", "gluon_backward"):
            rate = getattr(of_width, what)
            if rate is not None:
                rows.append((f"attention {width}, {what}", f"{rate.tflops:.0f} TFLOP/s"))
    rows += [(f"not measured: {what}", why) for what, why in missing.items()]
    return aligned([("rate", name), *rows])


def _tflops(rate: GemmRate) -> str:
    fprop, dgrad, wgrad, read, *_ = rate
    return f"{fprop:.0f}, {dgrad:.0f}, {wgrad:.0f} TFLOP/s in fprop, dgrad, wgrad; few rows {read:.0%} of a copy"
