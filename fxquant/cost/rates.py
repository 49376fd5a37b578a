"""The rates of cards on random data, one row of `RATES` a card, measured or computed from what its maker publishes.

`fxquant.cost.kept` has those that a user has measured. Other cards have no estimate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from fxquant.kernels.linear.choice import GemmKernel


class GemmRate(NamedTuple):
    """The speed of a GEMM kernel.

    `fprop`, `dgrad` and `wgrad` are the TFLOP/s of large GEMMs, fprop with fast accumulation if the kernel has it.
    `read` is the share of the copy rate at which small GEMMs read their operands, `smallest` the smallest tile
    [rows, columns] of a multiprocessor, and `group` the microseconds that a grouped GEMM adds for each group.
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


class AttentionRate(NamedTuple):
    """TFLOP/s of large attention, microseconds before the first product, and keys a query in masked tiles."""

    tflops: float
    start: float
    diagonal: int


@dataclass(frozen=True, kw_only=True)
class AttentionRates:
    """The rates of one kind of card for one head dimension; those of backwards in FP8 include their casts.

    A forward and backward in FP8 take `within_step` times as long in a training step as their kernels by themselves.
    """

    source: str
    forward: AttentionRate
    backward: AttentionRate
    fp8_forward: AttentionRate
    gluon_forward: AttentionRate
    fp8_backward: AttentionRate
    gluon_backward: AttentionRate | None = None
    """None where nobody measured it: as `fp8_backward`."""
    within_step: float = 1.0


@dataclass(frozen=True, kw_only=True)
class CardRates:
    """The rates of one kind of card.

    `source` says how, when and with which versions the rates were measured; or what they were computed from, where they
    are `published` alone, by which nothing is decided. `copy` is in TB/s, bytes read and written.
    GEMMs run in the steady state under the card's power limit; a multiprocessor reaches `headroom` times its part of
    their rates while others are idle. Shares of the copy rate: `casts` by scaling family, with ``_2d`` for tiles,
    `rowwise` of Inductor's fused casts, `transposed` of its columnwise casts, `amax` of reading a tensor for its amax.
    Ragged groups reach the part `ragged` of a cast's rate. `attention` is by head dimension.

    Microseconds in a CUDA graph before data moves: `gemm_start` for a GEMM, `launch` for another kernel, `amax_start`
    for the amax of a tensor, `lines_start` for the amaxes of rows and columns.
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
    attention: Mapping[int, AttentionRates]
    published: bool = False


_H100 = CardRates(
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
        # not measured here: 1.13 and 1.08 times cuBLAS's, as on an H200, whose chip is the same
        GemmKernel.TILES_WARPS: GemmRate(1290, 1290, 1290, 0.85, (128, 128)),
        GemmKernel.BLOCKS_WARPS: GemmRate(960, 960, 960, 0.92, (128, 128)),
        GemmKernel.FEW_ROWS: GemmRate(1000, 1000, 1000, 1.0, (16, 128)),
        # not measured here: 1.25 times the time of reading the weight
        GemmKernel.WEIGHT_ONLY: GemmRate(600, 600, 600, 0.8, (16, 32)),
        GemmKernel.WEIGHT_ONLY_DIRECT: GemmRate(600, 600, 600, 0.8, (16, 32)),
        # decoding bounds it: 0.45 of reading a byte an element on an H200 for FP8, 0.33 to 0.4 for NVFP4
        GemmKernel.WEIGHT_ONLY_WIDE: GemmRate(600, 600, 600, 0.45, (64, 64)),
        GemmKernel.GROUPED: GemmRate(1227, 1055, 1310, 0.85, group=1.46),
        GemmKernel.GROUPED_FAST: GemmRate(1485, 1300, 1300, 0.85, group=0.4),
        GemmKernel.GROUPED_TRITON: GemmRate(1036, 1008, 839, 0.85, group=0.8),
        GemmKernel.GROUPED_WARPS: GemmRate(1170, 1170, 880, 0.85, group=0.6),  # on an H200
        GemmKernel.GROUPED_BLOCKS: GemmRate(909, 875, 635, 0.85, group=0.6),
    },
    casts={
        "per_tensor": CastRate(0.96, 0.95),
        "per_row": CastRate(0.93, 0.95),
        "block": CastRate(0.92, 0.95),
        "block_2d": CastRate(0.96, 0.97),
        "mxfp8": CastRate(0.92, 0.93),
        "mxfp8_2d": CastRate(0.92, 0.93),
        # on an H200, whose chip is the same, 16384 x 8192 (torch 2.11.0+cu130, triton 3.6.0, 2026-11-30)
        "nvfp4": CastRate(0.09, 0.17),
        "nvfp4_2d": CastRate(0.095, 0.17),
    },
    rowwise=0.80,
    transposed=0.37,
    amax=1.0,
    ragged=0.88,
    attention={
        128: AttentionRates(
            source="one batch of 32 heads, 4096 and 16384 keys, causal and not, cuDNN and the kernels of this "
            "project in CUDA graphs; torch 2.11.0+cu130, triton 3.6.0, 2026-11-28",
            forward=AttentionRate(625, 10, 480),
            backward=AttentionRate(545, 55, 400),
            fp8_forward=AttentionRate(830, 45, 200),
            gluon_forward=AttentionRate(880, 15, 200),
            fp8_backward=AttentionRate(534, 200, 450),
        ),
    },
)

RATES: dict[str, CardRates] = {
    "NVIDIA H100 80GB HBM3": _H100,
    "NVIDIA B200": replace(
        _H100,
        source="NVIDIA's data sheet of HGX B200 (dense TFLOP/s: 2250 bfloat16, 4500 FP8, 9000 FP4; 8 TB/s; 148 "
        "multiprocessors) times the part of its own data sheet that the H100 above reached, with its starts of kernels",
        published=True,
        capability=(10, 0),
        multiprocessors=148,
        copy=7.2,
        bf16=GemmRate(1630, 1630, 1630, 0.95),
        bf16_grouped=GemmRate(1730, 1730, 1730, 0.95, group=0.73),
        gemm={
            GemmKernel.PER_TENSOR: GemmRate(2900, 2900, 2900, 0.95),
            GemmKernel.PER_ROW: GemmRate(2900, 2900, 2900, 0.82, (128, 128)),
            GemmKernel.MXFP8: GemmRate(2900, 2900, 2900, 0.9, (128, 128)),
            GemmKernel.NVFP4: GemmRate(5800, 5800, 5800, 0.9, (128, 128)),
            GemmKernel.GROUPED: GemmRate(2800, 2400, 2900, 0.85, group=1.46),
            GemmKernel.GROUPED_MXFP8: GemmRate(2800, 2400, 2900, 0.85, group=1.46),
            GemmKernel.GROUPED_NVFP4: GemmRate(5600, 4800, 5800, 0.85, group=1.46),
        },
        casts={**_H100.casts, "nvfp4": CastRate(0.92, 0.93), "nvfp4_2d": CastRate(0.92, 0.93)},
        attention={},
    ),
    "NVIDIA H200": replace(
        _H100,
        source="the copy rate measured on an H200 (torch 2.11.0+cu130, triton 3.6.0, 2026-11-29); the rest not, but on "
        "an H100, whose chip and power limit are the same",
        copy=4.2,
        attention={
            128: replace(
                _H100.attention[128],
                source="kernels as on an H100, but for the backward in Gluon (16384 keys and 2 x 8192, 2026-11-30); "
                "within a step by four Llama3-8B blocks, 2 x 8192 causal tokens, 32 heads on 8, delayed scales, "
                "backward by cuDNN: 117.3 ms, and 113.4 with attention in bfloat16 (torch 2.11.0+cu130, triton 3.6.0, "
                "2026-11-29)",
                gluon_backward=AttentionRate(570, 200, 200),
                within_step=1.21,
            )
        },
    ),
}
