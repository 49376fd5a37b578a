# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""The tile that a Triton cast quantizes: loaded, or computed from what its producer reads.

Arithmetic is float32, and the result is rounded to the dtype of the tensor that is not written. As in the kernels that
Inductor fuses, what the graph rounds within a producer stays unrounded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from fxquant.compat.patches import writes
from fxquant.kernels.cast.codes import INTERPRETED
from fxquant.kernels.cast.producers import IDENTITY, JOINED_HEADS, PRODUCERS, named

UNMADE = tl.constexpr(0)
"""The tensor itself is read."""
_KINDS = {name: i for i, name in enumerate(PRODUCERS, 1)} | {IDENTITY.name: 0}
_SILU_MUL, _SILU_MUL_GRAD, _SILU_MUL_GRAD_GATE = (
    tl.constexpr(_KINDS[name]) for name in ("silu_mul", "silu_mul_grad", "silu_mul_grad_gate")
)
_GELU, _GELU_TANH, _GELU_GRAD, _GELU_TANH_GRAD = (
    tl.constexpr(_KINDS[name]) for name in ("gelu", "gelu_tanh", "gelu_grad", "gelu_tanh_grad")
)
_RMS_NORM, _RMS_NORM_ROUNDED, _LAYER_NORM = (
    tl.constexpr(_KINDS[name]) for name in ("rms_norm", "rms_norm_rounded", "layer_norm")
)
_RMS_NORM_WIDE, _LAYER_NORM_WIDE = (tl.constexpr(_KINDS[name]) for name in ("rms_norm_wide", "layer_norm_wide"))
_JOINED_HEADS = tl.constexpr(_KINDS["joined_heads"])
_SQRT_HALF, _INV_SQRT_2PI = tl.constexpr(0.7071067811865476), tl.constexpr(0.3989422804014327)
_SQRT_2_PI, _CUBE = tl.constexpr(0.7978845608028654), tl.constexpr(0.044715)


def reads(name: str | None) -> bool:
    """Returns True if a producer computes nothing, but reads a tensor."""
    return name in (None, IDENTITY.name, JOINED_HEADS.name)


def kind(name: str | None, x: Tensor) -> tuple[int, int, int]:
    """Returns PRODUCER, S and D of the kernels: the number of a producer, and the sizes of heads in its first input.

    None reads a tensor.
    """
    heads = (x.shape[2], x.shape[3]) if name == JOINED_HEADS.name else (0, 0)
    return (0 if name is None else _KINDS[plain(name)], *heads)


def plain(name: str) -> str:
    """Returns the producer whose arithmetic one has that reads kept inputs: kernels see these by their dtype."""
    return name.removesuffix("_kept") if named(name).kept else name


@triton.jit
def _reciprocal(x):
    """Returns 1 / x to within a unit in the last place, in one instruction; for x of at least 1."""
    if INTERPRETED:
        return 1.0 / x
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _exp(x, SIGN: tl.constexpr = 1.0):
    """Returns e^(SIGN x), 0 where it is subnormal."""
    if INTERPRETED:
        return tl.exp(x * SIGN)
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=r,r", [x * (1.4426950408889634 * SIGN)], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _sigmoid(x):
    return _reciprocal(1.0 + _exp(x, -1.0))  # Triton subtracts to negate


@triton.jit
def _narrow(y, dtype: tl.constexpr):
    """Rounds y; to bfloat16 two at a time, which is many times quicker than one by one."""
    if INTERPRETED or dtype != tl.bfloat16:
        return y.to(dtype)
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [y], dtype=tl.bfloat16, is_pure=True, pack=2
    )


@triton.jit
def _silu_grad(x, grad):
    sigmoid = _sigmoid(x)
    return grad * sigmoid * (1.0 + x * (1.0 - sigmoid))


@triton.jit
def _tanh_half(x):
    """Returns (1 + tanh(y)) / 2 for the y of the tanh approximation, without the cancellation of the sum."""
    return _sigmoid((x + x * _CUBE * x * x) * (2.0 * _SQRT_2_PI))


@triton.jit
def _load(pointer, offsets, mask):
    return tl.load(pointer + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _by_row(first_row, down, across):
    """Returns the rows of a tile for all of its threads.

    For tensors of another size, and where it knew that rows are contiguous, Triton would choose other layouts than that
    of the tile, and go through shared memory to it.
    """
    if len(down.shape) == 6:
        rows = tl.max_contiguous(first_row + down, [1, 1, 1, 1, 1, 1])
        rows = tl.broadcast_to(rows, (across.shape[0], down.shape[1], across.shape[2], down.shape[3], down.shape[4], 1))
    else:
        rows = tl.max_contiguous(first_row + down, [1, 1, 1, 1])
        rows = tl.broadcast_to(rows, (across.shape[0], down.shape[1], down.shape[2], 1))
    return rows


@triton.jit
def _load_kept(pointer, scales, offsets, mask, places, inside, KEPT: tl.constexpr):
    """Loads a matrix as float32; of a KEPT one the bfloat16 values, each the payload times the scale at its place."""
    values = _load(pointer, offsets, mask)
    if KEPT:
        values = _narrow(values * _load(scales, places, inside), tl.bfloat16).to(tl.float32)
    return values


@triton.jit
def load_tile(
    x, in1, in2, in3, in4, x_step, first_row, first_column, down, across, M, K, result, PRODUCER: tl.constexpr,
    S: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Loads elements of x [M, K] as float32, or computes the `result` of a producer whose inputs are x and in1 to in4.

    They are those of rows `first_row + down` and columns `first_column + across`, 0 outside of x. `down` and `across`
    broadcast against each other. They are apart from where the tile begins, since within a tile 32 bits are enough.
    Heads [B, H, S, D] have fewer than 2^31 elements. Kept inputs have one scale for a row of a tile, of six axes then.
    """
    rows, columns = first_row + down, first_column + across
    mask = (rows < M) & (columns < K)
    start, offsets = first_row.to(tl.int64) * x_step + first_column, down * x_step + across
    KEPT: tl.constexpr = PRODUCER != UNMADE and x.dtype.element_ty == tl.float8e4nv
    places, inside = offsets, mask  # of scales
    if KEPT:
        by_row = _by_row(first_row, down, across)
        places, inside = (first_column // 128) * M + by_row, by_row < M
    if PRODUCER == UNMADE:
        y = _load(x + start, offsets, mask)
    elif PRODUCER == _JOINED_HEADS:
        y = _load(x, rows // S * (S * K) + rows % S * D + columns // D * (S * D) + columns % D, mask)
    else:
        if PRODUCER == _SILU_MUL:
            gate = _load_kept(x + start, in2, offsets, mask, places, inside, KEPT)
            y = gate * _sigmoid(gate) * _load_kept(in1 + start, in3, offsets, mask, places, inside, KEPT)
        elif PRODUCER == _SILU_MUL_GRAD_GATE:
            gate = _load_kept(x + start, in3, offsets, mask, places, inside, KEPT)
            up = _load_kept(in1 + start, in4, offsets, mask, places, inside, KEPT)
            y = _silu_grad(gate, _load(in2 + start, offsets, mask) * up)
        elif PRODUCER == _SILU_MUL_GRAD:
            # without a branch: with one the registers of both sides are taken
            gate = _load_kept(x + start, in3, offsets, mask, places, inside, KEPT)
            sigmoid = _sigmoid(gate)
            slope = tl.where(result == 0, 1.0 + gate * (1.0 - sigmoid), 1.0)
            other = tl.where(result == 0, in1, x) + start
            scale = tl.where(result == 0, in4, in3) if KEPT else in3
            y = _load(in2 + start, offsets, mask) * sigmoid
            y = y * _load_kept(other, scale, offsets, mask, places, inside, KEPT) * slope
        elif PRODUCER == _GELU:
            v = _load_kept(x + start, in1, offsets, mask, places, inside, KEPT)
            y = v * 0.5 * (tl.erf(v * _SQRT_HALF) + 1.0)
        elif PRODUCER == _GELU_TANH:
            v = _load_kept(x + start, in1, offsets, mask, places, inside, KEPT)
            y = v * _tanh_half(v)
        elif PRODUCER == _GELU_GRAD:
            v = _load_kept(x + start, in2, offsets, mask, places, inside, KEPT)
            cdf = 0.5 * (tl.erf(v * _SQRT_HALF) + 1.0)
            y = (cdf + v * (_exp(-0.5 * v * v) * _INV_SQRT_2PI)) * _load(in1 + start, offsets, mask)
        elif PRODUCER == _GELU_TANH_GRAD:
            v = _load_kept(x + start, in2, offsets, mask, places, inside, KEPT)
            half = _tanh_half(v)
            slope = (1.0 + v * (3.0 * _CUBE) * v) * (2.0 * _SQRT_2_PI)
            y = half * (1.0 + v * (1.0 - half) * slope) * _load(in1 + start, offsets, mask)
        else:
            v = _load_kept(x + start, in3, offsets, mask, places, inside, KEPT)
            # vectors are loaded for all threads of a tile
            by_row = _by_row(first_row, down, across)
            if len(down.shape) == 6:
                by_column = tl.broadcast_to(
                    columns, (across.shape[0], down.shape[1], across.shape[2], down.shape[3], 1, across.shape[5])
                )
            else:
                by_column = tl.broadcast_to(columns, (across.shape[0], down.shape[1], 1, across.shape[3]))
            in_rows, in_columns = by_row < M, by_column < K
            if PRODUCER == _LAYER_NORM or PRODUCER == _LAYER_NORM_WIDE:
                v = (v - _load(in1, by_row, in_rows)) * _load(in2, by_row, in_rows)
                y = v * _load(in3, by_column, in_columns) + _load(in4, by_column, in_columns)
            else:
                tl.static_assert(PRODUCER == _RMS_NORM or PRODUCER == _RMS_NORM_ROUNDED or PRODUCER == _RMS_NORM_WIDE)
                y = v * _load(in1, by_row, in_rows) * _load(in2, by_column, in_columns)
            y = tl.where(mask, y, 0.0)  # what the others make of zeros is zero
        WIDE: tl.constexpr = KEPT or PRODUCER == _RMS_NORM_WIDE or PRODUCER == _LAYER_NORM_WIDE
        y = _narrow(y, tl.bfloat16 if WIDE else x.dtype.element_ty).to(tl.float32)
    return y


@triton.jit
def load_pair(
    x, in1, in2, in3, in4, x_step, first_row, first_column, down, across, places, inside, M, K, PRODUCER: tl.constexpr,
):  # fmt: skip
    """`load_tile` for both results of a producer of two, in their dtype: it takes half the registers.

    The scales of kept inputs are at `places`, where `inside` says so.
    """
    tl.static_assert(PRODUCER == _SILU_MUL_GRAD)
    KEPT: tl.constexpr = x.dtype.element_ty == tl.float8e4nv
    mask = (first_row + down < M) & (first_column + across < K)
    start, offsets = first_row.to(tl.int64) * x_step + first_column, down * x_step + across
    gate = _load_kept(x + start, in3, offsets, mask, places, inside, KEPT)
    up = _load_kept(in1 + start, in4, offsets, mask, places, inside, KEPT)
    sigmoid = _sigmoid(gate)
    product = _load(in2 + start, offsets, mask) * sigmoid
    first = product * up * (1.0 + gate * (1.0 - sigmoid))
    dtype: tl.constexpr = in2.dtype.element_ty
    return _narrow(first, dtype), _narrow(product * gate, dtype)


@triton.jit
def load_pair_of_tile(
    x, in1, in2, in3, in4, x_step, first_row, first_column, down, across, M, K, PRODUCER: tl.constexpr
):  # fmt: skip
    """`load_pair` of a tile of six axes, 128 columns wide where inputs are kept."""
    places, inside = 0, False
    if x.dtype.element_ty == tl.float8e4nv:
        by_row = _by_row(first_row, down, across)
        places, inside = (first_column // 128) * M + by_row, by_row < M
    return load_pair(
        x, in1, in2, in3, in4, x_step, first_row, first_column, down, across, places, inside, M, K, PRODUCER
    )  # fmt: skip


_AMAX_STEPS, _AMAX_BLOCK, _AMAX_WARPS = 8, 1024, 4


@writes("out")
@triton.jit
def pair_amax_kernel(
    x, in1, in2, in3, in4, out, numel, M, K, STEPS: tl.constexpr, BLOCK: tl.constexpr, PRODUCER: tl.constexpr
):  # fmt: skip
    """Stores the largest magnitudes, NaN ignored, of both results in each STEPS blocks of dense inputs, as float32."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    start = program.to(tl.int64) * (STEPS * BLOCK)
    count = tl.minimum(numel - start, STEPS * BLOCK).to(tl.int32)
    zero = program * 0  # of the type of a row
    first_row, before = (start // K).to(tl.int32), (start % K).to(tl.int32)
    # eight neighbours a thread, which have one scale where inputs are kept
    first_of_eight = tl.arange(0, BLOCK // 8)[:, None] * 8
    across = first_of_eight + tl.arange(0, 8)[None, :]
    down = tl.zeros((1, 1), tl.int32)
    first_largest = tl.zeros((BLOCK // 8, 8), tl.float32)
    second_largest = tl.zeros((BLOCK // 8, 8), tl.float32)
    for step in tl.static_range(STEPS):
        element, inside = before + step * BLOCK + first_of_eight, step * BLOCK + first_of_eight < count
        places = element % K // 128 * M + (first_row + element // K)
        first, second = load_pair(
            x + start, in1 + start, in2 + start, in3, in4, 0, zero, step * BLOCK, down, across, places, inside, 1,
            count, PRODUCER,
        )  # fmt: skip
        first_largest = tl.maximum(first_largest, tl.abs(first.to(tl.float32)))
        second_largest = tl.maximum(second_largest, tl.abs(second.to(tl.float32)))
    tl.store(out + program, tl.max(first_largest))
    tl.store(out + programs + program, tl.max(second_largest))


def pair_amax(name: str, inputs: Sequence[Tensor]) -> Tensor:
    """Returns the amaxes [2] of the results of a producer of two, which are not written; inputs are dense.

    Those of pieces are left to Inductor to reduce, as in `triton_amax`.
    """
    x = inputs[0]
    pieces = triton.cdiv(x.numel(), _AMAX_STEPS * _AMAX_BLOCK)
    out, unread = (torch.empty(shape, dtype=torch.float32, device=x.device) for shape in ((2, pieces), 1))
    scales = inputs[3:] or (unread, unread)
    wrap_triton(pair_amax_kernel)[(pieces,)](
        *inputs[:3],
        *scales,
        out,
        x.numel(),
        *x.shape,
        _AMAX_STEPS,
        _AMAX_BLOCK,
        _KINDS[plain(name)],
        num_warps=_AMAX_WARPS,
    )
    return out.amax(1)
