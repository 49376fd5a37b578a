# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
"""A Triton FP8 GEMM for Hopper whose epilogue can do operations that would read its result again.

y = activation(a x b^T * scales + bias) + residual, of payloads a [M, K] and b [N, K] that come by TMA. One program a
multiprocessor takes tiles in turn, and loads the first blocks of the next while it stores the last.

Arithmetic behind the product is float32, and the result is rounded once: what the graph rounds in between stays
unrounded, as in the kernels that Inductor fuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from fxquant.compat.device import triton_workspace
from fxquant.compat.patches import writes
from fxquant.formats import QuantSpec
from fxquant.kernels.cast.codes import magnitude
from fxquant.kernels.linear.epilogues import ACTIVATIONS

_KINDS = {"": 0, **{name: i + 1 for i, name in enumerate(ACTIVATIONS)}}
_GELU, _GELU_TANH, _SILU, _RELU = (tl.constexpr(_KINDS[name]) for name in ("gelu", "gelu_tanh", "silu", "relu"))
_SQRT_HALF, _SQRT_2_PI, _CUBE = (
    tl.constexpr(0.7071067811865476),
    tl.constexpr(0.7978845608028654),
    tl.constexpr(0.044715),
)


@triton.jit
def activated(y, ACTIVATION: tl.constexpr):
    """Applies an activation to float32 values; 0 is none."""
    if ACTIVATION == _GELU:
        y = y * 0.5 * (tl.erf(y * _SQRT_HALF) + 1.0)
    elif ACTIVATION == _GELU_TANH:
        y = y / (1.0 + tl.exp((y + y * _CUBE * y * y) * (-2.0 * _SQRT_2_PI)))
    elif ACTIVATION == _SILU:
        y = y / (1.0 + tl.exp(-y))
    elif ACTIVATION == _RELU:
        y = tl.where(y < 0.0, 0.0, y)
    return y


@triton.jit
def tile_place(tile, M, N, BM: tl.constexpr, BN: tl.constexpr, DOWN: tl.constexpr):
    """Returns the first row and column of a tile, of which DOWN are walked down before those beside them."""
    across, down = tl.cdiv(N, BN), tl.cdiv(M, BM)
    walked = across * DOWN
    first = tile // walked * DOWN
    height = tl.minimum(down - first, DOWN)
    within = tile % walked
    return (first + within % height) * BM, within // height * BN


@triton.jit
def finish_tile(
    acc, first_m, first_n, a_scale, b_scale, bias, residual, y, amax, M, N,
    A_ROWS: tl.constexpr, B_ROWS: tl.constexpr, ACTIVATION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Finishes a tile [BM, BN], or of a part of one. `residual` is a descriptor or None, `y` a descriptor."""
    m, n = first_m + tl.arange(0, BM), first_n + tl.arange(0, BN)
    if A_ROWS:
        acc = acc * tl.load(a_scale + m, mask=m < M, other=0.0)[:, None]
    else:
        acc = acc * tl.load(a_scale)
    if B_ROWS:
        acc = acc * tl.load(b_scale + n, mask=n < N, other=0.0)[None, :]
    else:
        acc = acc * tl.load(b_scale)
    if bias is not None:
        acc = acc + tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    acc = activated(acc, ACTIVATION)
    if residual is not None:
        acc = acc + residual.load([first_m, first_n]).to(tl.float32)
    rounded = acc.to(y.dtype)
    y.store([first_m, first_n], rounded)
    if amax is not None:
        seen = tl.where((m < M)[:, None] & (n < N)[None, :], magnitude(rounded.to(tl.float32)), 0.0)
        bits = tl.max(tl.max(seen, axis=1), axis=0).to(tl.int32, bitcast=True)
        tl.atomic_max(amax.to(tl.pointer_type(tl.int32), bitcast=True), bits, sem="relaxed")


@writes("y", amax="amax")
@triton.jit
def scaled_mm_kernel(
    a, b, a_scale, b_scale, bias, residual, y, amax, M, N, K, a_step, b_step, residual_step,
    A_ROWS: tl.constexpr, B_ROWS: tl.constexpr, ACTIVATION: tl.constexpr, FAST: tl.constexpr, PROGRAMS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr, DOWN: tl.constexpr,
):  # fmt: skip
    """Computes y [M, N] of a [M, K] and b [N, K] whose rows are a_step and b_step apart; None arguments are left out.

    The tile is finished in PARTS (2 or 4) of its columns, one after the other: so shared memory for a part is
    enough beside the blocks of a and b that are on their way.
    """
    a_blocks = tl.make_tensor_descriptor(a, [M, K], [a_step, 1], [BM, BK])
    b_blocks = tl.make_tensor_descriptor(b, [N, K], [b_step, 1], [BN, BK])
    PART: tl.constexpr = BN // PARTS
    residual_blocks = None
    if residual is not None:
        residual_blocks = tl.make_tensor_descriptor(residual, [M, N], [residual_step, 1], [BM, PART])
    y_blocks = tl.make_tensor_descriptor(y, [M, N], [N, 1], [BM, PART])
    tiles = tl.cdiv(M, BM) * tl.cdiv(N, BN)
    finished = tl.program_id(0) - PROGRAMS
    for tile in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=True):
        first_m, first_n = tile_place(tile, M, N, BM, BN, DOWN)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            a_block, b_block = a_blocks.load([first_m, k]), b_blocks.load([first_n, k])
            if FAST:
                acc = tl.dot(a_block, b_block.T, acc)
            else:
                acc += tl.dot(a_block, b_block.T)
        # counted anew, so that the coordinates do not outlive the loads of the next tile
        finished += PROGRAMS
        first_m, first_n = tile_place(finished, M, N, BM, BN, DOWN)
        if PARTS == 2:
            parts = tl.split(tl.permute(tl.reshape(acc, (BM, 2, PART)), (0, 2, 1)))
        else:
            left, right = tl.split(tl.permute(tl.reshape(acc, (BM, 2, 2 * PART)), (0, 2, 1)))
            first, second = tl.split(tl.permute(tl.reshape(left, (BM, 2, PART)), (0, 2, 1)))
            third, fourth = tl.split(tl.permute(tl.reshape(right, (BM, 2, PART)), (0, 2, 1)))
            parts = (first, second, third, fourth)
        for i in tl.static_range(PARTS):
            finish_tile(
                parts[i], first_m, first_n + i * PART, a_scale, b_scale, bias, residual_blocks, y_blocks, amax, M, N,
                A_ROWS, B_ROWS, ACTIVATION, BM, PART,
            )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """The tiles and the launch of a GEMM: tiles [block_m, block_n], finished in `parts` of their columns.

    As many as `down` lie below each other among those that run at a time, so that b is read from the L2 cache.
    """

    block_m: int = 128
    block_n: int = 256
    block_k: int = 128
    parts: int = 2
    down: int = 8
    warps: int = 8
    stages: int = 4


_SHARED = 232448 - 1024
"""Bytes of shared memory of a Hopper multiprocessor, less what barriers and reductions take."""


def tiling(fast_accum: bool, itemsize: int) -> Tiling:
    """Returns the largest tiles whose accumulators fit the registers, and the most stages that fit shared memory.

    `itemsize` is how many bytes an element of the result brings through shared memory, that of a residual included. An
    accumulator that is promoted takes the registers of two.
    """
    how = Tiling() if fast_accum else Tiling(block_n=128, stages=5)
    block = (how.block_m + how.block_n) * how.block_k
    for parts in (how.parts, 2 * how.parts):
        stages = (_SHARED - how.block_m * how.block_n // parts * itemsize) // block
        if stages >= how.stages:
            return replace(how, parts=parts)
    return replace(how, parts=parts, stages=stages)


def scaled_mm(
    a: Sequence[Tensor],
    a_spec: QuantSpec,
    b: Sequence[Tensor],
    b_spec: QuantSpec,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
    *,
    activation: str = "",
    residual: Tensor | None = None,
    record: bool = False,
) -> list[Tensor]:
    """Returns activation(a x b^T + bias) + residual [M, N] in `out_dtype`, of what `problem.triton_multiplies`.

    With `record` its amax [1] follows. `residual` is [M, N], N being a multiple of 16 bytes.
    """
    (a_data, a_scale), (b_data, b_scale) = a, b
    a_data, b_data = a_data.contiguous(), b_data.contiguous()
    (size_m, size_k), size_n = a_data.shape, b_data.shape[0]
    how = tiling(fast_accum, out_dtype.itemsize * (2 if residual is not None else 1))
    bias = None if bias is None else bias.contiguous()
    residual = None if residual is None else residual.contiguous()
    y = torch.empty((size_m, size_n), dtype=out_dtype, device=a_data.device)
    amax = torch.zeros(1, dtype=torch.float32, device=a_data.device) if record else None
    programs = _programs(a_data.device)
    by_rows = a_spec.row.family == "per_row", b_spec.row.family == "per_row"
    with triton_workspace(a_data.device):
        wrap_triton(scaled_mm_kernel)[(programs,)](
            a_data, b_data, a_scale.contiguous(), b_scale.contiguous(), bias, residual, y, amax, size_m, size_n, size_k,
            size_k, size_k, size_n, *by_rows, _KINDS[activation], fast_accum, programs, how.block_m, how.block_n,
            how.block_k, how.parts, how.down, num_warps=how.warps, num_stages=how.stages,
        )  # fmt: skip
    return [y] if amax is None else [y, amax]


def _programs(device: torch.device) -> int:
    """Returns the number of multiprocessors, one for each program; without a driver those of an H100."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count
