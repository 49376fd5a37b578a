"""What matmuls and their casts are estimated to take, in high precision and quantized, from measured rates.

A GEMM takes as long as its arithmetic, in whole waves of tiles over the multiprocessors, or as reading its operands and
writing its result, whichever is more; a cast as long as its fewest bytes at the share of the copy rate that its kernel
reaches; and each launch a little. A linear is weighed with all GEMMs that it runs: without wgrad for a frozen weight,
fprop alone for inference. A tensor that several layers read is cast once, and they share the time by their FLOPs.

Rates were measured, one row of `RATES` a card; the row says when, and with what. There is no estimate for another card.
Biases, and what stands between the matmuls, are not part of it: the same on both sides. Attention is weighed whole, by
`fxquant.cost_attention`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from fxquant.cost.attention import attention_work, runs_the_reference
from fxquant.decisions import Decision, Matmul
from fxquant.errors import OptionError
from fxquant.formats import QuantSpec
from fxquant.kernels.linear import choice
from fxquant.kernels.linear.choice import GemmKernel
from fxquant.kernels.linear.problem import Problem, Times
from fxquant.roles import GEMM_OPERANDS, Direction, Gemm


class GemmRate(NamedTuple):
    """What a GEMM kernel reaches.

    TFLOP/s of large ones, fprop with fast accumulation where there is one; `read` is the share of the copy rate at
    which small ones read their operands, and `smallest` the smallest tile [rows, columns] of a multiprocessor. Of a
    grouped GEMM `group` is the microseconds that each group takes besides.
    """

    fprop: float
    dgrad: float
    wgrad: float
    read: float
    smallest: tuple[int, int] = (64, 64)
    group: float = 0.0


class CastRate(NamedTuple):
    """The share of the copy rate that a cast reaches on its fewest bytes."""

    both: float
    columnwise: float


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What one kind of card was measured to do.

    `copy` is in TB/s, bytes read and written. Rates of GEMMs are those of random data in the steady state under the
    card's power limit; a multiprocessor reaches `headroom` times its part of them while others are idle. `casts` are by
    scaling family, with ``_2d`` for tiles; `rowwise` is what Inductor's fused casts reach, `transposed` what it reaches
    where there is no Triton kernel, `amax` the reading of a tensor for an amax; `ragged` is the part of a cast's rate
    that ragged groups reach.

    Microseconds in a CUDA graph, before anything is moved: `gemm_start` of a GEMM, `launch` of another kernel,
    `amax_start` of the amax of a tensor, and `lines_start` of those of rows and columns.
    """

    source: str
    capability: tuple[int, int]
    multiprocessors: int
    copy: float
    gemm_start: float
    launch: float
    amax_start: float
    lines_start: float
    headroom: float
    bf16: GemmRate
    bf16_grouped: GemmRate
    gemm: Mapping[GemmKernel, GemmRate]
    casts: Mapping[str, CastRate]
    rowwise: float
    transposed: float
    amax: float
    ragged: float


RATES: dict[str, Rates] = {
    "NVIDIA H100 80GB HBM3": Rates(
        source="GEMMs of 38 sizes, M from 1 to 16384, and casts of 6, in CUDA graphs, operands rotated out of L2; "
        "torch 2.11.0+cu130, triton 3.6.0, 2026-11-28",
        capability=(9, 0),
        multiprocessors=132,
        copy=3.0,
        gemm_start=3.3,
        launch=1.8,
        amax_start=3.5,
        lines_start=7.5,
        headroom=1.25,
        bf16=GemmRate(715, 715, 715, 0.95),
        bf16_grouped=GemmRate(759, 759, 759, 0.95, group=0.73),
        gemm={
            GemmKernel.PER_TENSOR: GemmRate(1275, 1285, 1285, 0.95),
            GemmKernel.PER_ROW: GemmRate(1350, 1140, 1140, 0.82, (128, 128)),
            GemmKernel.TRITON: GemmRate(1290, 830, 830, 0.90, (128, 256)),
            GemmKernel.TILES: GemmRate(1140, 1140, 1140, 0.85, (128, 128)),
            GemmKernel.BLOCKS: GemmRate(890, 890, 890, 0.92),
            GemmKernel.FEW_ROWS: GemmRate(1000, 1000, 1000, 1.0, (16, 128)),
            GemmKernel.GROUPED: GemmRate(1227, 1055, 1310, 0.85, group=1.46),
            GemmKernel.GROUPED_FAST: GemmRate(1485, 1300, 1300, 0.85, group=0.4),
            GemmKernel.GROUPED_TRITON: GemmRate(1036, 1008, 839, 0.85, group=0.8),
            GemmKernel.GROUPED_BLOCKS: GemmRate(909, 875, 635, 0.85, group=0.6),
        },
        casts={
            "per_tensor": CastRate(0.96, 0.95),
            "per_row": CastRate(0.93, 0.95),
            "block": CastRate(0.92, 0.95),
            "block_2d": CastRate(0.96, 0.97),
            "mxfp8": CastRate(0.92, 0.93),
            "mxfp8_2d": CastRate(0.92, 0.93),
        },
        rowwise=0.80,
        transposed=0.37,
        amax=1.0,
        ragged=0.88,
    ),
}


def find_card(text: str) -> str:
    """The one card with rates whose name has `text` in it, such as ``H100``. Raises OptionError where there is none."""
    found = [name for name in RATES if text and text in name]
    if text not in RATES and len(found) != 1:
        raise OptionError(f"no measured rates for {text!r}; known cards: {', '.join(RATES)}")
    return text if text in RATES else found[0]


@dataclass(frozen=True)
class Work:
    """A GEMM or a cast of one matmul: the kernel that it is, and microseconds without and with quantization."""

    what: str
    kernel: str
    unquantized: float | None = None
    quantized: float | None = None


@dataclass(frozen=True)
class Estimate:
    """All work of one matmul, or of an attention; `reference` is why that would hold its scores in a GPU's memory."""

    work: tuple[Work, ...]
    reference: str = ""

    @property
    def unquantized(self) -> float | None:
        """Microseconds in high precision, or None where something is not known."""
        return _sum(work.unquantized for work in self.work)

    @property
    def quantized(self) -> float | None:
        """Microseconds as decided."""
        return _sum(work.quantized for work in self.work)

    @property
    def longest(self) -> float:
        """The larger of the two that are known."""
        return max(self.unquantized or 0.0, self.quantized or 0.0)

    @property
    def slower(self) -> bool:
        """Whether quantization is estimated to cost more than it saves."""
        if self.reference:
            return True
        return self.unquantized is not None and self.quantized is not None and self.quantized > self.unquantized

    def __str__(self) -> str:
        if self.reference:
            return f"no FP8 kernel: {self.reference}"
        return f"{self.unquantized:.3g} us in high precision, {self.quantized:.3g} us quantized"


def _sum(times: Iterable[float | None]) -> float | None:
    total = 0.0
    for time in times:
        if time is None:
            return None
        total += time
    return total


def estimate(decisions: Sequence[Decision], card: str = "") -> dict[int, Estimate]:
    """The work of every matmul, by site, on its own device or on another `card`; of attention at its first product's.

    Raises OptionError for a card without rates.
    """
    if card:
        decisions = [_moved(d, find_card(card)) for d in decisions]
    sites: dict[int, list[Decision]] = defaultdict(list)
    for decision in decisions:
        if decision.matmul is not None:
            sites[decision.site].append(decision)
    casts = _casts(sites)
    found = {site: Estimate((*_gemms(own), *casts[site])) for site, own in sites.items()}
    attentions: dict[int, list[Decision]] = defaultdict(list)
    for decision in decisions:
        if decision.attention is not None:
            attentions[decision.weighed].append(decision)
    return found | {site: _attention(own) for site, own in attentions.items()}


def _attention(decisions: Sequence[Decision]) -> Estimate:
    attention = decisions[0].attention
    assert attention is not None
    training = any(d.gemm is not Gemm.FPROP for d in decisions)
    rates = RATES.get(attention.device)
    copy, launch = (rates.copy, rates.launch) if rates is not None else (1.0, 0.0)
    work = tuple(Work(*row) for row in attention_work(attention, training, copy, launch))
    return Estimate(work, runs_the_reference(attention, training))


def _moved(decision: Decision, card: str) -> Decision:
    there: dict[str, Any] = {"device": card, "capability": RATES[card].capability}
    matmul = None if decision.matmul is None else replace(decision.matmul, **there)
    attention = None if decision.attention is None else replace(decision.attention, **there)
    return replace(decision, matmul=matmul, attention=attention)


_AXES = {Gemm.FPROP: "mkn", Gemm.DGRAD: "mnk", Gemm.WGRAD: "nmk"}
"""Of each GEMM, the rows of its left operand, the contracted axis, and the rows of its right one."""

_RESULTS = {Gemm.FPROP: "grad_output", Gemm.DGRAD: "input", Gemm.WGRAD: "weight"}
"""The operand that has the size of each GEMM's result."""


_TILES = ((128, 128), (128, 256), (256, 128))
"""That cuBLAS has besides the smallest, [rows, columns]."""


def _elements(matmul: Matmul) -> dict[str, int]:
    """How many elements each operand has."""
    weights = matmul.groups or matmul.batch
    return {
        "input": matmul.batch * matmul.m * matmul.k,
        "weight": weights * matmul.n * matmul.k,
        "grad_output": matmul.batch * matmul.m * matmul.n,
    }


def _gemm_us(rates: Rates, rate: GemmRate, matmul: Matmul, gemm: Gemm, itemsize: int) -> float:
    """Microseconds of a GEMM whose operands have so many bytes an element."""
    m, k, n = (int(getattr(matmul, axis)) for axis in _AXES[gemm])
    tflops = float(getattr(rate, gemm.value))
    start = rates.gemm_start + rate.group * matmul.groups
    if matmul.groups:  # of the last tile of a group half is used
        busy = 2 * (matmul.m + matmul.groups * _GROUP_TILE / 2) * matmul.k * matmul.n / tflops / 1e6
    else:
        tiles = (rate.smallest, *_TILES)
        busy = min(_waves_us(rates, tflops, matmul.batch, m, k, n, tile) for tile in tiles)
    elements = _elements(matmul)
    read = sum(elements[operand] for operand, _ in GEMM_OPERANDS[gemm])
    moved = (itemsize * read + 2 * elements[_RESULTS[gemm]]) / (rates.copy * rate.read) / 1e6
    return start + max(busy, moved)


def _waves_us(rates: Rates, tflops: float, batch: int, m: int, k: int, n: int, tile: tuple[int, int]) -> float:
    """Microseconds in whole waves of tiles over the multiprocessors; the last is faster where it is not full."""
    rows, columns = tile
    tiles = batch * math.ceil(m / rows) * math.ceil(n / columns)
    waves, rest = divmod(tiles, rates.multiprocessors)
    last = 1 / min(rates.headroom, rates.multiprocessors / rest) if rest else 0
    return (waves + last) * 2 * rows * columns * k * rates.multiprocessors / tflops / 1e6


_GROUP_TILE = 128
"""Rows of a tile of a grouped GEMM."""
_HALVES = (torch.bfloat16, torch.float16)
"""What tensor cores multiply at one rate, that of `Rates.bf16`."""


def _unquantized_us(matmul: Matmul, gemm: Gemm) -> float | None:
    """Microseconds of a GEMM in high precision, where its dtype has a rate."""
    rates = RATES.get(matmul.device)
    if rates is None or matmul.dtype not in _HALVES:
        return None
    return _gemm_us(rates, rates.bf16_grouped if matmul.groups else rates.bf16, matmul, gemm, 2)


def _gemms(decisions: Sequence[Decision]) -> list[Work]:
    return [_gemm(gemm, pair) for gemm in Gemm if (pair := [d for d in decisions if d.gemm == gemm])]


def _gemm(gemm: Gemm, operands: Sequence[Decision]) -> Work:
    matmul = operands[0].matmul
    assert matmul is not None
    unquantized = _unquantized_us(matmul, gemm)
    if any(d.quantizer is None for d in operands):
        return Work(str(gemm), f"{str(matmul.dtype).removeprefix('torch.')} GEMM", unquantized, unquantized)
    left, right = (_spec(d) for d in operands)
    assert left is not None and right is not None
    chosen = _kernel(matmul, gemm, left, right)
    rates = RATES.get(matmul.device)
    if unquantized is None or rates is None:
        return Work(str(gemm), str(chosen))
    return Work(str(gemm), str(chosen), unquantized, _quantized_us(rates, matmul, gemm, chosen.kernel, unquantized))


def choose_gemm(problem: Problem, card: str) -> choice.Chosen:
    """The kernel of a GEMM with an epilogue, by the rates of a card; cuBLAS where there are none.

    An epilogue is not hidden: measured beside a copy of the result, a residual takes 0.9 of its time, an amax 0.35 and
    GELU 0.7.
    """
    rates = RATES.get(card)
    if rates is None or GemmKernel.TRITON not in rates.gemm:
        return choice.Chosen(problem.kernels[0], f"no measured rates for {card}")
    m, k, n = problem.m, problem.k, problem.n
    result = m * n * problem.dtype.itemsize

    def us(kernel: GemmKernel) -> float:
        rate = rates.gemm[kernel]
        tiles = (rate.smallest, *_TILES) if kernel is not GemmKernel.TRITON else (rate.smallest,)
        busy = min(_waves_us(rates, rate.fprop if problem.fast_accum else rate.dgrad, 1, m, k, n, t) for t in tiles)
        wide = _WIDE_US * (kernel is GemmKernel.PER_ROW and kernel is not problem.kernels[0])
        return wide + rates.gemm_start + max(busy, (k * (m + n) + result) / (rates.copy * rate.read) / 1e6)

    copy = 2 * result / rates.copy / 1e6
    behind = 0.9 * problem.residual + 0.35 * problem.record + 0.7 * bool(problem.activation)
    times = Times((*map(us, problem.kernels[:-1]), us(GemmKernel.TRITON) + behind * copy), copy)
    return times.chosen(problem, "estimated", _DOUBT)


_WIDE_US = 20.0
"""Of scales of tensors written once for each row: two launches, counted at what the host takes for them."""
_DOUBT = 1.03
"""How much faster another kernel has to be estimated than the usual one."""


def _kernel(matmul: Matmul, gemm: Gemm, left: QuantSpec, right: QuantSpec) -> choice.Chosen:
    if "custom" in (left.row.family, right.row.family):
        return choice.Chosen(GemmKernel.OWN)
    if matmul.capability == (0, 0):
        return choice.Chosen(GemmKernel.REFERENCE, "the reference")
    if matmul.groups:
        return choice.grouped_gemm(
            left,
            right,
            wgrad=gemm is Gemm.WGRAD,
            dtype=matmul.dtype,
            capability=matmul.capability,
            fast=gemm is Gemm.FPROP or left.torchao,
        )
    if matmul.batch_weights and left.row.family in ("per_tensor", "per_row"):
        return choice.Chosen(GemmKernel.EMULATED, "a batch of weights")
    m, k, n = (None if axis in matmul.dynamic else getattr(matmul, axis) for axis in _AXES[gemm])
    most = matmul.most_m if "m" in matmul.dynamic else matmul.m
    fast = choice.Fast(most, k) if gemm is Gemm.FPROP else None
    return choice.gemm(left, right, (m, n), matrices=matmul.batch == 1, capability=matmul.capability, fast=fast)


def _quantized_us(rates: Rates, matmul: Matmul, gemm: Gemm, kernel: GemmKernel, unquantized: float) -> float | None:
    if kernel is GemmKernel.EMULATED:  # each operand is dequantized: its payload read, bfloat16 written
        elements = _elements(matmul)
        moved = 3 * sum(elements[operand] for operand, _ in GEMM_OPERANDS[gemm])
        return unquantized + 2 * rates.launch + moved / (rates.rowwise * rates.copy) / 1e6
    if kernel not in rates.gemm:
        return None
    time = _gemm_us(rates, rates.gemm[kernel], matmul, gemm, 1)
    return time + (2 * rates.launch if matmul.groups else 0.0)  # zeros where no group wrote, or a table of tiles


def _spec(decision: Decision) -> QuantSpec | None:
    return None if decision.quantizer is None else decision.quantizer.spec(decision.direction)


class _Tensor(NamedTuple):
    """A tensor that is cast, in the graph where that happens."""

    name: str
    operand: str
    graph: str


def _casts(sites: Mapping[int, Sequence[Decision]]) -> dict[int, list[Work]]:
    """The casts by site. Equal ones of a tensor are one, and a rowwise and a columnwise one of it are one kernel."""
    wanted: dict[_Tensor, dict[Direction, dict[QuantSpec, dict[int, int]]]] = {}
    of: dict[_Tensor, Matmul] = {}
    work: dict[int, list[Work]] = {site: [] for site in sites}
    for site, gemm, operand, decision in _operands(sites):
        spec, matmul = _spec(decision), decision.matmul
        if spec is None or matmul is None:
            continue
        if operand == "weight" and matmul.stored and not (spec.is_delayed or spec.stochastic):
            continue
        if decision.shared:
            work[site].append(_moved_payload(matmul, operand, decision.direction))
            continue
        graph = "backward" if gemm is not Gemm.FPROP and operand != "input" else "forward"
        name = {"input": matmul.input, "weight": matmul.weight, "grad_output": str(site)}[operand]
        tensor = _Tensor(name, operand, graph)
        of[tensor] = matmul
        specs = wanted.setdefault(tensor, {direction: {} for direction in Direction})[decision.direction]
        specs.setdefault(spec, {})[site] = decision.flops
    scaled: set[tuple[str, str]] = set()
    for tensor, directions in wanted.items():
        known = (tensor.operand, tensor.name) in scaled
        for row, column, readers in _pairs(directions[Direction.ROWWISE], directions[Direction.COLUMNWISE]):
            kernel, time = _cast(of[tensor], tensor.operand, row, column, amax_known=known)
            if any(spec is not None and spec.row.family == "per_tensor" for spec in (row, column)):
                scaled.add((tensor.operand, tensor.name))
            kernel += f", once for {len(readers)} layers" if len(readers) > 1 else ""
            total = sum(readers.values())
            for site, flops in readers.items():
                part = None if time is None else time * flops / total if total else 0.0
                work[site].append(Work(f"cast {tensor.operand}", kernel, None if part is None else 0.0, part))
    return work


def _moved_payload(matmul: Matmul, operand: str, direction: Direction) -> Work:
    """What it takes to put the bytes that an attention has quantized in the order of a linear."""
    rates, time = RATES.get(matmul.device), None
    if rates is not None:
        share = rates.rowwise if direction is Direction.ROWWISE else rates.transposed
        time = rates.launch + 2 * _elements(matmul)[operand] / (rates.copy * share) / 1e6
    what = f"move {operand}"
    return Work(what, f"bytes of the attention's, {direction}", None if time is None else 0.0, time)


def _operands(sites: Mapping[int, Sequence[Decision]]) -> Iterator[tuple[int, Gemm, str, Decision]]:
    for site, decisions in sites.items():
        for gemm, names in GEMM_OPERANDS.items():
            own = [d for d in decisions if d.gemm == gemm]
            yield from ((site, gemm, operand, d) for d, (operand, _) in zip(own, names, strict=False))


_Readers = dict[int, int]
"""The FLOPs of the GEMMs that read a cast, by site."""


def _pairs(
    rows: Mapping[QuantSpec, _Readers], columns: Mapping[QuantSpec, _Readers]
) -> Iterator[tuple[QuantSpec | None, QuantSpec | None, _Readers]]:
    """The casts that are one kernel, as `fxquant.passes.lower.directions` pairs them."""
    left = dict(columns)
    for row, readers in rows.items():
        column = row if row in left else next(iter(left), None)
        yield row, column, {**readers, **(left.pop(column) if column is not None else {})}
    for column, readers in left.items():
        yield None, column, readers


def _cast(
    matmul: Matmul, operand: str, row: QuantSpec | None, column: QuantSpec | None, *, amax_known: bool
) -> tuple[str, float | None]:
    """The kernel of a cast, and its microseconds. Per-tensor scales need no amax that is known from the forward."""
    specs = tuple(spec for spec in (row, column) if spec is not None)
    if any(spec.row.family == "custom" for spec in specs):
        return str(GemmKernel.OWN), None
    one_row = matmul.m == matmul.batch == 1 and "m" not in matmul.dynamic and column is None and operand == "input"
    if one_row and choice.casts_one_row(specs[0], matmul.capability):
        return "by the GEMM, rowwise", 0.0
    own_amax = [
        not (matmul.calibrated and operand == "input")
        and (spec.row.family == "nvfp4" or (spec.row.family == "per_tensor" and not spec.is_delayed and not amax_known))
        for spec in specs
    ]
    grouped = bool(matmul.groups)
    after_amax = specs[0].row.family == "per_tensor" and own_amax[0] and not grouped
    by_triton = choice.casts_by_triton(
        specs, apart=column is not None or after_amax or (grouped and operand == "weight"), dtype=matmul.dtype,
        fp8=matmul.capability >= (8, 9), matrix=(matmul.batch == 1 or grouped) and matmul.m > 0,
        ragged=grouped and operand != "weight", grouped=grouped,
    )  # fmt: skip
    by_triton |= operand == "weight" and specs[0].row.family == "per_row" and matmul.capability >= (8, 9)
    ways = "both directions" if len(specs) == 2 else "rowwise" if column is None else "columnwise"
    made = "Triton cast of groups" if matmul.groups else "Triton cast"
    kernel = f"{made if by_triton else 'fused by Inductor'}, {ways}"
    whole = any(own_amax)
    known = grouped and operand == "weight" and row is None  # from the forward, with those of rows
    lines = any(spec.row.family == "per_row" for spec in specs) and column is not None and not known
    kernel += ", after its amaxes" if whole or lines else ""
    rates = RATES.get(matmul.device)
    if rates is None or matmul.dtype not in _HALVES:
        return kernel, None
    elements = _elements(matmul)[operand]
    written = sum(spec.row.bytes_per_element for spec in specs)
    ragged = rates.ragged if matmul.groups and operand != "weight" else 1.0
    copy = rates.copy * ragged
    time = rates.launch + elements * (2 + written) / (copy * _share(rates, specs, by_triton, column)) / 1e6
    if whole or lines:
        time += rates.lines_start if lines else rates.amax_start
        time += 2 * elements / (copy * rates.amax) / 1e6
    return kernel, time


def _share(rates: Rates, specs: Sequence[QuantSpec], by_triton: bool, column: QuantSpec | None) -> float:
    if not by_triton:
        return rates.rowwise if column is None else rates.transposed
    by_kind = [rates.casts[f"{spec.row.family}_2d" if spec.row.block[0] > 1 else spec.row.family] for spec in specs]
    return min(rate.both if len(specs) == 2 else rate.columnwise for rate in by_kind)
