"""The estimated time of a GEMM, and the kernel that runs it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from fxquant.cost.kept import rates_of
from fxquant.cost.rates import CardRates, GemmRate
from fxquant.cost.work import Work
from fxquant.decisions import Decision, Matmul
from fxquant.formats import IDENTITY, QuantSpec
from fxquant.kernels.grouped.choice import GroupedGemmFacts
from fxquant.kernels.grouped.ops import grouped_scaled_mm
from fxquant.kernels.linear.choice import GemmFacts, GemmKernel
from fxquant.kernels.linear.ops import scaled_mm
from fxquant.kernels.linear.problem import Problem, Times
from fxquant.kernels.operator import Chosen
from fxquant.roles import GEMM_OPERANDS, Gemm

_AXES = {Gemm.FPROP: "mkn", Gemm.DGRAD: "mnk", Gemm.WGRAD: "nmk"}
"""The axes of each GEMM: rows of its left operand, the contracted axis, rows of its right operand."""

_RESULTS = {Gemm.FPROP: "grad_output", Gemm.DGRAD: "input", Gemm.WGRAD: "weight"}
"""The operand that has the size of each GEMM's result."""

_CUBLAS_TILES = ((128, 128), (128, 256), (256, 128))
"""[rows, columns] of the tiles of cuBLAS, without the smallest."""


def elements_of(matmul: Matmul) -> dict[str, int]:
    """The number of elements of each operand."""
    weights = matmul.groups or matmul.batch
    return {
        "input": matmul.batch * matmul.m * matmul.k,
        "weight": weights * matmul.n * matmul.k,
        "grad_output": matmul.batch * matmul.m * matmul.n,
    }


def _gemm_us(rates: CardRates, rate: GemmRate, matmul: Matmul, gemm: Gemm, itemsizes: tuple[float, float]) -> float:
    """Microseconds of a GEMM whose left and right operands have so many bytes an element."""
    m, k, n = (int(getattr(matmul, axis)) for axis in _AXES[gemm])
    tflops = float(getattr(rate, gemm.value))
    start = rates.gemm_start + rate.group * matmul.groups
    if matmul.groups:  # half of the last tile of a group is used
        busy = 2 * (matmul.m + matmul.groups * _GROUP_TILE / 2) * matmul.k * matmul.n / tflops / 1e6
    else:
        busy = busy_us(rates, rate.smallest, tflops, matmul.batch, m, k, n)
    elements = elements_of(matmul)
    read = sum(size * elements[operand] for size, (operand, _) in zip(itemsizes, GEMM_OPERANDS[gemm], strict=True))
    moved = (read + 2 * elements[_RESULTS[gemm]]) / (rates.copy * rate.read) / 1e6
    return start + max(busy, moved)


def busy_us(
    rates: CardRates, smallest: tuple[int, int], tflops: float, batch: int, m: int, k: int, n: int
) -> float:  # fmt: skip
    """Microseconds of a GEMM's arithmetic, in the tiles that take the least."""
    return min(_waves_us(rates, tflops, batch, m, k, n, tile) for tile in (smallest, *_CUBLAS_TILES))


def _waves_us(rates: CardRates, tflops: float, batch: int, m: int, k: int, n: int, tile: tuple[int, int]) -> float:
    """Microseconds in whole waves of tiles over the multiprocessors; a last wave that is not full is faster."""
    rows, columns = tile
    tiles = batch * math.ceil(m / rows) * math.ceil(n / columns)
    waves, rest = divmod(tiles, rates.multiprocessors)
    last = 1 / min(rates.headroom, rates.multiprocessors / rest) if rest else 0
    return (waves + last) * 2 * rows * columns * k * rates.multiprocessors / tflops / 1e6


_EMULATED = (GemmKernel.EMULATED, GemmKernel.REFERENCE, GemmKernel.ONE_SIDED)
_FIRST_FP8 = (8, 9)
"""The first compute capability that multiplies FP8."""
_GROUP_TILE = 128
"""Rows of a tile of a grouped GEMM."""
HALVES = (torch.bfloat16, torch.float16)
"""The dtypes that tensor cores multiply at the rate `CardRates.bf16`."""


def _unquantized_us(matmul: Matmul, gemm: Gemm) -> float | None:
    """Microseconds of a GEMM in high precision, or None if its dtype has no rate."""
    rates = rates_of(matmul.device)
    if rates is None or matmul.dtype not in HALVES:
        return None
    return _gemm_us(rates, rates.bf16_grouped if matmul.groups else rates.bf16, matmul, gemm, (2, 2))


def gemm_work(decisions: Sequence[Decision]) -> list[Work]:
    """The GEMMs of one matmul."""
    return [_gemm(gemm, pair) for gemm in Gemm if (pair := [d for d in decisions if d.gemm == gemm])]


def _gemm(gemm: Gemm, operands: Sequence[Decision]) -> Work:
    matmul = operands[0].matmul
    assert matmul is not None
    unquantized = _unquantized_us(matmul, gemm)
    left, right = (spec_of(d) or IDENTITY for d in operands)
    if left.is_identity and right.is_identity:
        return Work(str(gemm), f"{str(matmul.dtype).removeprefix('torch.')} GEMM", unquantized, unquantized)
    chosen = _kernel(matmul, gemm, left, right)
    rates = rates_of(matmul.device)
    emulated = chosen.kernel in _EMULATED or matmul.capability < _FIRST_FP8
    if unquantized is None or rates is None:
        return Work(str(gemm), str(chosen), emulated=emulated)
    us = _quantized_us(rates, matmul, gemm, chosen.kernel, (left, right), unquantized)
    return Work(str(gemm), str(chosen), unquantized, us, emulated)


def choose_gemm(problem: Problem, card: str) -> Chosen[GemmKernel]:
    """The kernel of a GEMM with an epilogue, by the rates of a card; cuBLAS without rates.

    An epilogue takes time: by measurements a residual 0.9 of a copy of the result, an amax 0.35 and GELU 0.7.
    """
    rates = rates_of(card)
    if rates is None or GemmKernel.TRITON not in rates.gemm:
        return Chosen(problem.kernels[0], f"no measured rates for {card}")
    m, k, n = problem.m, problem.k, problem.n
    result = m * n * problem.dtype.itemsize

    def us(kernel: GemmKernel) -> float:
        rate = rates.gemm[kernel]
        tiles = (rate.smallest, *_CUBLAS_TILES) if kernel is not GemmKernel.TRITON else (rate.smallest,)
        busy = min(_waves_us(rates, rate.fprop if problem.fast_accum else rate.dgrad, 1, m, k, n, t) for t in tiles)
        wide = _ROW_SCALES_US * (kernel is GemmKernel.PER_ROW and kernel is not problem.kernels[0])
        return wide + rates.gemm_start + max(busy, (k * (m + n) + result) / (rates.copy * rate.read) / 1e6)

    copy = 2 * result / rates.copy / 1e6
    behind = 0.9 * problem.residual + 0.35 * problem.record + 0.7 * bool(problem.activation)
    times = Times((*map(us, problem.kernels[:-1]), us(GemmKernel.TRITON) + behind * copy), copy)
    return times.chosen(problem, "estimated", _DOUBT)


_ROW_SCALES_US = 20.0
"""Microseconds to write the scales of tensors once for each row: two launches by the host."""
_DOUBT = 1.03
"""The factor by which the estimate of another kernel must beat the usual one."""


def _kernel(matmul: Matmul, gemm: Gemm, left: QuantSpec, right: QuantSpec) -> Chosen[GemmKernel]:
    if "custom" in (left.row.family, right.row.family):
        return Chosen(GemmKernel.OWN)
    forward, capability = gemm is Gemm.FPROP, matmul.capability
    if matmul.groups or matmul.batch_weights:
        return grouped_scaled_mm.choose(
            GroupedGemmFacts(
                a=left, b=right, dtype=matmul.dtype, batch=not matmul.groups, wgrad=gemm is Gemm.WGRAD,
                fast_accum=forward or left.torchao, capability=capability,
                features=None if _AXES[gemm][2] in matmul.dynamic else getattr(matmul, _AXES[gemm][2]),
                flops=2 * matmul.m * matmul.k * matmul.n,
            )
        )  # fmt: skip
    m, k, n = (None if axis in matmul.dynamic else getattr(matmul, axis) for axis in _AXES[gemm])
    one_sided = left.is_identity or right.is_identity
    most = matmul.most_m if "m" in matmul.dynamic else matmul.m
    return scaled_mm.choose(
        GemmFacts(
            a=left, b=right, m=m, n=n, k=k, most_rows=most, matrices=matmul.batch == 1, fast_accum=forward,
            capability=capability, high_precision=matmul.dtype if one_sided else None,
        )
    )  # fmt: skip


def _quantized_us(
    rates: CardRates, matmul: Matmul, gemm: Gemm, kernel: GemmKernel, pair: tuple[QuantSpec, QuantSpec],
    unquantized: float,
) -> float | None:  # fmt: skip
    sizes = [spec.row.bytes_per_element for spec in pair]
    if kernel in (GemmKernel.EMULATED, GemmKernel.ONE_SIDED):
        # what is quantized is dequantized: its payload read, bfloat16 written
        elements = elements_of(matmul)
        dequantized = [
            (size + 2) * elements[operand]
            for size, spec, (operand, _) in zip(sizes, pair, GEMM_OPERANDS[gemm], strict=True)
            if not spec.is_identity
        ]
        moved = sum(dequantized)
        return unquantized + len(dequantized) * rates.launch + moved / (rates.rowwise * rates.copy) / 1e6
    if kernel not in rates.gemm:
        return None
    read = (sizes[0], sizes[1]) if kernel in _READ_AS_STORED else (1, 1)
    time = _gemm_us(rates, rates.gemm[kernel], matmul, gemm, read)
    return time + (2 * rates.launch if matmul.groups else 0.0)  # zeros where no group wrote, or a table of tiles


_READ_AS_STORED = (
    GemmKernel.WEIGHT_ONLY, GemmKernel.WEIGHT_ONLY_DIRECT, GemmKernel.MXFP8, GemmKernel.NVFP4,
    GemmKernel.GROUPED_MXFP8, GemmKernel.GROUPED_NVFP4,
)  # fmt: skip
"""Kernels whose operands are not a byte an element, or that read scales of blocks too."""


def spec_of(decision: Decision) -> QuantSpec | None:
    """The spec of an operand in its direction, None in high precision."""
    return None if decision.quantizer is None else decision.quantizer.spec(decision.direction)
