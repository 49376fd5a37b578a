"""What matmuls and their casts are estimated to take, in high precision and quantized, from measured rates.

A GEMM takes as long as its arithmetic, in whole waves of tiles over the multiprocessors, or as reading its operands and
writing its result, whichever is more; a cast as long as its fewest bytes at the share of the copy rate that its kernel
reaches; and each launch a little. A linear is weighed with all GEMMs that it runs: without wgrad for a frozen weight,
fprop alone for inference. A tensor that several layers read is cast once, and they share the time by their FLOPs.

Rates were measured, one row of `RATES` a card; the row says when, and with what. There is no estimate for another card.
Biases, and what stands between the matmuls, are not part of it: the same on both sides, as is attention.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from fxquant.decisions import Decision, Matmul
from fxquant.errors import OptionError
from fxquant.formats import QuantSpec
from fxquant.kernels import choice
from fxquant.kernels.choice import GemmKernel
from fxquant.roles import GEMM_OPERANDS, Direction, Gemm


class GemmRate(NamedTuple):
    """What a GEMM kernel reaches.

    TFLOP/s of large ones, fprop with fast accumulation where there is one; `read` is the share of the copy rate at
    which small ones read their operands, and `smallest` the smallest tile [rows, columns] of a multiprocessor.
    """

    fprop: float
    dgrad: float
    wgrad: float
    read: float
    smallest: tuple[int, int] = (64, 64)


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
    where there is no Triton kernel, `amax` the reading of a tensor for an amax, and `masked` the clearing of rows that
    belong to no group.

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
    masked: float


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
        bf16_grouped=GemmRate(720, 720, 720, 0.95),
        gemm={
            GemmKernel.PER_TENSOR: GemmRate(1340, 1290, 1290, 0.95),
            GemmKernel.PER_ROW: GemmRate(1320, 1170, 1170, 0.82, (128, 128)),
            GemmKernel.TILES: GemmRate(1140, 1140, 1140, 0.85, (128, 128)),
            GemmKernel.BLOCKS: GemmRate(890, 890, 890, 0.92),
            GemmKernel.FEW_ROWS: GemmRate(1000, 1000, 1000, 1.0, (16, 128)),
            GemmKernel.GROUPED: GemmRate(1234, 1055, 1046, 0.85),
            GemmKernel.GROUPED_TRITON: GemmRate(860, 858, 575, 0.85),
            GemmKernel.GROUPED_BLOCKS: GemmRate(810, 814, 311, 0.85),
        },
        casts={
            "per_tensor": CastRate(0.88, 0.92),
            "per_row": CastRate(0.83, 0.92),
            "block": CastRate(0.60, 0.73),
            "block_2d": CastRate(0.81, 0.81),
            "mxfp8": CastRate(0.58, 0.80),
            "mxfp8_2d": CastRate(0.77, 0.88),
        },
        rowwise=0.80,
        transposed=0.37,
        amax=0.83,
        masked=0.6,
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
    """All work of one matmul."""

    work: tuple[Work, ...]

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
        return self.unquantized is not None and self.quantized is not None and self.quantized > self.unquantized


def _sum(times: Iterable[float | None]) -> float | None:
    total = 0.0
    for time in times:
        if time is None:
            return None
        total += time
    return total


def estimate(decisions: Sequence[Decision], card: str = "") -> dict[int, Estimate]:
    """The work of every matmul outside attention, by site, on its own device or on another `card`.

    Raises OptionError for a card without rates.
    """
    if card:
        decisions = [_moved(d, find_card(card)) for d in decisions]
    sites: dict[int, list[Decision]] = defaultdict(list)
    for decision in decisions:
        if decision.matmul is not None:
            sites[decision.site].append(decision)
    casts = _casts(sites)
    return {site: Estimate((*_gemms(own), *casts[site])) for site, own in sites.items()}


def _moved(decision: Decision, card: str) -> Decision:
    if decision.matmul is None:
        return decision
    return replace(decision, matmul=replace(decision.matmul, device=card, capability=RATES[card].capability))


_AXES = {Gemm.FPROP: "mkn", Gemm.DGRAD: "mnk", Gemm.WGRAD: "nmk"}
"""Of each GEMM, the rows of its left operand, the contracted axis, and the rows of its right one."""

_RESULTS = {Gemm.FPROP: "grad_output", Gemm.DGRAD: "input", Gemm.WGRAD: "weight"}
"""The operand that has the size of each GEMM's result."""


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
    if matmul.groups:
        busy = 2 * m * k * n / tflops / 1e6
    else:
        tiles = (rate.smallest, (128, 128), (128, 256), (256, 128))
        busy = min(_waves_us(rates, tflops, matmul.batch, m, k, n, tile) for tile in tiles)
    elements = _elements(matmul)
    read = sum(elements[operand] for operand, _ in GEMM_OPERANDS[gemm])
    moved = (itemsize * read + 2 * elements[_RESULTS[gemm]]) / (rates.copy * rate.read) / 1e6
    return rates.gemm_start + max(busy, moved)


def _waves_us(rates: Rates, tflops: float, batch: int, m: int, k: int, n: int, tile: tuple[int, int]) -> float:
    """Microseconds in whole waves of tiles over the multiprocessors; the last is faster where it is not full."""
    rows, columns = tile
    tiles = batch * math.ceil(m / rows) * math.ceil(n / columns)
    waves, rest = divmod(tiles, rates.multiprocessors)
    last = 1 / min(rates.headroom, rates.multiprocessors / rest) if rest else 0
    return (waves + last) * 2 * rows * columns * k * rates.multiprocessors / tflops / 1e6


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


def _kernel(matmul: Matmul, gemm: Gemm, left: QuantSpec, right: QuantSpec) -> choice.Chosen:
    if "custom" in (left.row.family, right.row.family):
        return choice.Chosen(GemmKernel.OWN)
    if matmul.capability == (0, 0):
        return choice.Chosen(GemmKernel.REFERENCE, "the reference")
    if matmul.groups:
        return choice.grouped_gemm(
            left, right, wgrad=gemm is Gemm.WGRAD, dtype=matmul.dtype, capability=matmul.capability
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
    if kernel is GemmKernel.GROUPED:
        time += rates.launch + 4 * _elements(matmul)[_RESULTS[gemm]] / (rates.copy * rates.masked) / 1e6
    return time


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
    for site, gemm, operand, decision in _operands(sites):
        spec, matmul = _spec(decision), decision.matmul
        if spec is None or matmul is None or (operand == "weight" and matmul.stored):
            continue
        graph = "backward" if gemm is not Gemm.FPROP and operand != "input" else "forward"
        name = {"input": matmul.input, "weight": matmul.weight, "grad_output": str(site)}[operand]
        tensor = _Tensor(name, operand, graph)
        of[tensor] = matmul
        specs = wanted.setdefault(tensor, {direction: {} for direction in Direction})[decision.direction]
        specs.setdefault(spec, {})[site] = decision.flops
    work: dict[int, list[Work]] = {site: [] for site in sites}
    for tensor, directions in wanted.items():
        for row, column, readers in _pairs(directions[Direction.ROWWISE], directions[Direction.COLUMNWISE]):
            kernel, time = _cast(of[tensor], tensor.operand, row, column)
            kernel += f", once for {len(readers)} layers" if len(readers) > 1 else ""
            total = sum(readers.values())
            for site, flops in readers.items():
                part = None if time is None else time * flops / total if total else 0.0
                work[site].append(Work(f"cast {tensor.operand}", kernel, None if part is None else 0.0, part))
    return work


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
    """The casts that are one kernel, as `fxquant.passes.merge` pairs them."""
    left = dict(columns)
    for row, readers in rows.items():
        column = row if row in left else next(iter(left), None)
        yield row, column, {**readers, **(left.pop(column) if column is not None else {})}
    for column, readers in left.items():
        yield None, column, readers


def _cast(matmul: Matmul, operand: str, row: QuantSpec | None, column: QuantSpec | None) -> tuple[str, float | None]:
    """The kernel of a cast, and its microseconds."""
    specs = tuple(spec for spec in (row, column) if spec is not None)
    if any(spec.row.family == "custom" for spec in specs):
        return str(GemmKernel.OWN), None
    one_row = matmul.m == matmul.batch == 1 and "m" not in matmul.dynamic and column is None and operand == "input"
    if one_row and choice.casts_one_row(specs[0], matmul.capability):
        return "by the GEMM, rowwise", 0.0
    after_amax = specs[0].row.family == "per_tensor" and not specs[0].is_delayed
    by_triton = choice.casts_by_triton(
        specs, apart=column is not None or after_amax, dtype=matmul.dtype, fp8=matmul.capability >= (8, 9),
        matrix=matmul.batch == 1 and not matmul.groups and matmul.m > 0,
    )  # fmt: skip
    ways = "both directions" if len(specs) == 2 else "rowwise" if column is None else "columnwise"
    kernel = f"{'Triton cast' if by_triton else 'fused by Inductor'}, {ways}"
    whole = any(spec.row.family in ("per_tensor", "nvfp4") and not spec.is_delayed for spec in specs)
    lines = any(spec.row.family == "per_row" for spec in specs) and column is not None
    kernel += ", after its amaxes" if whole or lines else ""
    rates = RATES.get(matmul.device)
    if rates is None or matmul.dtype not in _HALVES:
        return kernel, None
    elements = _elements(matmul)[operand]
    written = sum(spec.row.bytes_per_element for spec in specs)
    time = rates.launch + elements * (2 + written) / (rates.copy * _share(rates, specs, by_triton, column)) / 1e6
    if whole or lines:
        time += rates.lines_start if lines else rates.amax_start
        time += 2 * elements / (rates.copy * rates.amax) / 1e6
    return kernel, time


def _share(rates: Rates, specs: Sequence[QuantSpec], by_triton: bool, column: QuantSpec | None) -> float:
    if not by_triton:
        return rates.rowwise if column is None else rates.transposed
    by_kind = [rates.casts[f"{spec.row.family}_2d" if spec.row.block[0] > 1 else spec.row.family] for spec in specs]
    return min(rate.both if len(specs) == 2 else rate.columnwise for rate in by_kind)
