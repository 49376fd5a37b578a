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
from fxquant.kernels.cast.producers import IDENTITY, JOINED_HEADS, PRODUCERS

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
    return (0 if name is None else _KINDS[name], *heads)


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
def load_tile(
    x, in1, in2, in3, in4, x_step, first_row, first_column, down, across, M, K, result, PRODUCER: tl.constexpr,
    S: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Loads elements of x [M, K] as float32, or computes the `result` of a producer whose inputs are x and in1 to in4.

    They are those of rows `first_row + down` and columns `first_column + across`, 0 outside of x. `down` and `across`
    broadcast against each other. They are apart from where the tile begins, since within a tile 32 bits are enough.
    Heads [B, H, S, D] have fewer than 2^31 elements.
    """
    rows, columns = first_row + down, first_column + across
    mask = (rows < M) & (columns < K)
    start, offsets = first_row.to(tl.int64) * x_step + first_column, down * x_step + across
    if PRODUCER == UNMADE:
        y = _load(x + start, offsets, mask)
    elif PRODUCER == _JOINED_HEADS:
        y = _load(x, rows // S * (S * K) + rows % S * D + columns // D * (S * D) + columns % D, mask)
    else:
        if PRODUCER == _SILU_MUL:
            gate = _load(x + start, offsets, mask)
            y = gate * _sigmoid(gate) * _load(in1 + start, offsets, mask)
        elif PRODUCER == _SILU_MUL_GRAD_GATE:
            y = _silu_grad(
                _load(x + start, offsets, mask), _load(in2 + start, offsets, mask) * _load(in1 + start, offsets, mask)
            )
        elif PRODUCER == _SILU_MUL_GRAD:
            # without a branch: with one the registers of both sides are taken
            gate = _load(x + start, offsets, mask)
            sigmoid = _sigmoid(gate)
            slope = tl.where(result == 0, 1.0 + gate * (1.0 - sigmoid), 1.0)
            other = tl.where(result == 0, in1, x) + start
            y = _load(in2 + start, offsets, mask) * sigmoid * _load(other, offsets, mask) * slope
        elif PRODUCER == _GELU:
            v = _load(x + start, offsets, mask)
            y = v * 0.5 * (tl.erf(v * _SQRT_HALF) + 1.0)
        elif PRODUCER == _GELU_TANH:
            v = _load(x + start, offsets, mask)
            y = v * _tanh_half(v)
        elif PRODUCER == _GELU_GRAD:
            v = _load(x + start, offsets, mask)
            cdf = 0.5 * (tl.erf(v * _SQRT_HALF) + 1.0)
            y = (cdf + v * (_exp(-0.5 * v * v) * _INV_SQRT_2PI)) * _load(in1 + start, offsets, mask)
        elif PRODUCER == _GELU_TANH_GRAD:
            v = _load(x + start, offsets, mask)
            half = _tanh_half(v)
            slope = (1.0 + v * (3.0 * _CUBE) * v) * (2.0 * _SQRT_2_PI)
            y = half * (1.0 + v * (1.0 - half) * slope) * _load(in1 + start, offsets, mask)
        else:
            v = _load(x + start, offsets, mask)
            # vectors are loaded for all threads of a tile: for tensors of another size, and where it knew that rows are
            # contiguous, Triton would choose other layouts, and go through shared memory to that of the tile
            if len(down.shape) == 6:
                by_row = tl.max_contiguous(first_row + down, [1, 1, 1, 1, 1, 1])
                by_row = tl.broadcast_to(
                    by_row, (across.shape[0], down.shape[1], across.shape[2], down.shape[3], down.shape[4], 1)
                )
                by_column = tl.broadcast_to(
                    columns, (across.shape[0], down.shape[1], across.shape[2], down.shape[3], 1, across.shape[5])
                )
            else:
                by_row = tl.max_contiguous(first_row + down, [1, 1, 1, 1])
                by_row = tl.broadcast_to(by_row, (across.shape[0], down.shape[1], down.shape[2], 1))
                by_column = tl.broadcast_to(columns, (across.shape[0], down.shape[1], 1, across.shape[3]))
            in_rows, in_columns = by_row < M, by_column < K
            if PRODUCER == _LAYER_NORM or PRODUCER == _LAYER_NORM_WIDE:
                v = (v - _load(in1, by_row, in_rows)) * _load(in2, by_row, in_rows)
                y = v * _load(in3, by_column, in_columns) + _load(in4, by_column, in_columns)
            else:
                tl.static_assert(PRODUCER == _RMS_NORM or PRODUCER == _RMS_NORM_ROUNDED or PRODUCER == _RMS_NORM_WIDE)
                y = v * _load(in1, by_row, in_rows) * _load(in2, by_column, in_columns)
            y = tl.where(mask, y, 0.0)  # what the others make of zeros is zero
        WIDE: tl.constexpr = PRODUCER == _RMS_NORM_WIDE or PRODUCER == _LAYER_NORM_WIDE
        y = _narrow(y, tl.bfloat16 if WIDE else x.dtype.element_ty).to(tl.float32)
    return y


@triton.jit
def load_pair(x, in1, in2, x_step, first_row, first_column, down, across, M, K, PRODUCER: tl.constexpr):
    """`load_tile` for both results of a producer of two, in the dtype of x: it takes half the registers."""
    tl.static_assert(PRODUCER == _SILU_MUL_GRAD)
    mask = (first_row + down < M) & (first_column + across < K)
    start, offsets = first_row.to(tl.int64) * x_step + first_column, down * x_step + across
    gate = _load(x + start, offsets, mask)
    sigmoid = _sigmoid(gate)
    product = _load(in2 + start, offsets, mask) * sigmoid
    first = product * _load(in1 + start, offsets, mask) * (1.0 + gate * (1.0 - sigmoid))
    return _narrow(first, x.dtype.element_ty), _narrow(product * gate, x.dtype.element_ty)


_AMAX_STEPS, _AMAX_BLOCK, _AMAX_WARPS = 8, 1024, 4


@writes("out")
@triton.jit
def pair_amax_kernel(x, in1, in2, out, numel, STEPS: tl.constexpr, BLOCK: tl.constexpr, PRODUCER: tl.constexpr):
    """Stores the largest magnitudes, NaN ignored, of both results in each STEPS blocks of dense inputs, as float32."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    start = program.to(tl.int64) * (STEPS * BLOCK)
    count = tl.minimum(numel - start, STEPS * BLOCK).to(tl.int32)
    zero, down = program * 0, tl.zeros((1, 1), tl.int32)  # of the types of a row and of those below it
    first_largest = tl.zeros((1, BLOCK), tl.float32)
    second_largest = tl.zeros((1, BLOCK), tl.float32)
    for step in tl.static_range(STEPS):
        across = tl.arange(0, BLOCK)[None, :]
        first, second = load_pair(
            x + start, in1 + start, in2 + start, 0, zero, step * BLOCK, down, across, 1, count, PRODUCER
        )
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
    out = torch.empty((2, pieces), dtype=torch.float32, device=x.device)
    wrap_triton(pair_amax_kernel)[(pieces,)](
        *inputs, out, x.numel(), _AMAX_STEPS, _AMAX_BLOCK, _KINDS[name], num_warps=_AMAX_WARPS
    )
    return out.amax(1)
