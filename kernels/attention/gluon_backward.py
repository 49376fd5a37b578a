# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""A backward of attention on FP8 operands for Hopper whose warps have different work, in Triton's Gluon.

A program has 128 keys of one head, and reads the queries that see them, 64 at a time, of all heads that share them.
One warp copies. Two groups of four warps have 64 keys each, and keep the sums of dk and dv in registers. For dq, dS
goes through shared memory, and each group adds half of the head's columns to float32 memory, where the programs of all
keys meet: in any order, so that dq does not repeat to the bit. Masks and dropout are left to `triton_backward`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fxquant.kernels.attention.choice import Scaling
from fxquant.kernels.attention.triton_cast import KINDS
from fxquant.kernels.attention.triton_terms import gather_kernel, row_terms_kernel
from fxquant.kernels.gluon_ring import next_stage

_TENSOR, _HEAD, _BLOCK = (gl.constexpr(i) for i in range(3))
_BLOCK_LEN = gl.constexpr(128)
_ROWS = gl.constexpr(64)
"""Queries of a step, and keys of a group of four warps."""
_KEYS = gl.constexpr(128)
"""Keys of a program."""
_FIRST, _SECOND = (gl.constexpr(i) for i in range(2))
_REGISTERS, _LOADING_REGISTERS = gl.constexpr(240), gl.constexpr(24)
_PART = gl.constexpr(256)
"""Elements of a row of a part of dq as it is added: 16 rows have what a group computes in a step."""


@builtin
def _add_to_global(target, place, source, _semantic=None):
    """Adds a tile in shared memory to global memory, which `tma.store_wait` waits for."""
    place = _semantic._convert_to_ir_values(place, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, target.handle, place, source.handle)


@gluon.jit
def _work(sizes, CAUSAL: gl.constexpr):
    """(key-value head, first key, first tile of queries, tiles of queries a head) of a program.

    Programs of `together` heads come first, and of these, where it is causal, the ones that most queries see.
    """
    _, _, batch_heads, q_len, kv_len, together = sizes
    blocks = (kv_len + _KEYS - 1) // _KEYS
    first_head = gl.program_id(0) // (blocks * together) * together
    within = gl.program_id(0) - first_head * blocks
    width = gl.minimum(batch_heads - first_head, together)
    first = within // width * _KEYS
    start = 0
    if CAUSAL:
        start = first // _ROWS
    tiles = gl.maximum((q_len + _ROWS - 1) // _ROWS - start, 0)
    return first_head + within % width, first, start, tiles


@gluon.jit
def _next_tile(head, tile, start, end):
    """The tile of queries behind one: the first of the next head behind the last."""
    last = tile + 1 == end
    return head + gl.where(last, 1, 0), gl.where(last, start, tile + 1)


@gluon.jit
def _load_tiles(
    sources, buffers, barriers, sizes, CAUSAL: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr
):  # fmt: skip
    """Copies tiles, as the loading warp: those of keys once, those of queries in a ring."""
    q8, k8, v, do8, q, k, do, log_sum, delta = sources
    q8_t, k8_t, v_t, do8_t, q_t, k_t, do_t, log_sum_t, delta_t, _, _ = buffers
    k_full, full, rest_full, empty, _, _ = barriers
    kv_head, first, start, tiles = _work(sizes, CAUSAL)
    mbarrier.expect(k_full, _KEYS * D * 4)
    for i in gl.static_range(2):
        tma.async_copy_global_to_shared(k8, [kv_head, first + _ROWS * i, 0], k_full, k8_t.index(i))
        tma.async_copy_global_to_shared(v, [kv_head, first + _ROWS * i, 0], k_full, v_t.index(i))
        tma.async_copy_global_to_shared(k, [kv_head, first, D // 2 * i], k_full, k_t.index(i))
    stage = 0
    phase = 1  # a barrier that nothing has arrived at yet counts as past its last round
    group = sizes[0] // sizes[1]
    head = kv_head * group
    tile = start
    for _ in range(group * tiles):
        row = tile * _ROWS
        ready = full.index(stage)
        mbarrier.wait(empty.index(stage), phase)
        mbarrier.expect(ready, _ROWS * (D + 4))
        tma.async_copy_global_to_shared(q8, [head, row, 0], ready, q8_t.index(stage))
        tma.async_copy_global_to_shared(log_sum, [head, row], ready, log_sum_t.index(stage))
        ready = rest_full.index(stage)
        mbarrier.expect(ready, _ROWS * (D * 5 + 4))
        tma.async_copy_global_to_shared(do8, [head, row, 0], ready, do8_t.index(stage))
        tma.async_copy_global_to_shared(do, [head, row, 0], ready, do_t.index(stage))
        tma.async_copy_global_to_shared(delta, [head, row], ready, delta_t.index(stage))
        tma.async_copy_global_to_shared(q, [head, row, 0], ready, q_t.index(stage))
        head, tile = _next_tile(head, tile, start, start + tiles)
        stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _begin_scores(buffers, stage, GROUP: gl.constexpr, LAYOUT: gl.constexpr, D: gl.constexpr):
    """Begins the scores [64 keys, 64 queries] of a group."""
    query = buffers[0].index(stage).reshape([_ROWS, D]).permute((1, 0))
    zeros = gl.full([_ROWS, _ROWS], 0.0, gl.float32, LAYOUT)
    return warpgroup_mma(buffers[1].index(GROUP).reshape([_ROWS, D]), query, zeros, use_acc=False, is_async=True)


@gluon.jit
def _weights(
    s, factor, buffers, stage, first, row, kv_len, GROUP: gl.constexpr, CAUSAL: gl.constexpr, EVEN: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """The softmax [64 keys, 64 queries] of scores."""
    log_sum = buffers[7].index(stage).reshape([_ROWS]).load(gl.SliceLayout(0, LAYOUT))
    s = s * factor - log_sum[None, :]
    if CAUSAL or not EVEN:
        hides = first + _KEYS > kv_len
        if CAUSAL:
            hides = hides | (row < first + _KEYS)
        if hides:
            key = first + GROUP * _ROWS + gl.arange(0, _ROWS, gl.SliceLayout(1, LAYOUT))
            seen = (key < kv_len)[:, None]
            if CAUSAL:
                query = row + gl.arange(0, _ROWS, gl.SliceLayout(0, LAYOUT))
                seen = seen & (key[:, None] <= query[None, :])
            s = gl.where(seen, s, float("-inf"))
    return gl.exp2(s)


@gluon.jit
def _add(dq, place, tile, part):
    """Adds a part [64, 64] of dq, by way of a tile of shared memory.

    It stays in the order in which threads have it, (8 columns, warp, 8 rows, pair of columns, half of 16 rows, column),
    so that each stores 16 bytes at a time.
    """
    part = part.reshape([4, 2, 8, 8, 4, 2]).permute([3, 0, 2, 4, 1, 5]).reshape([16, _PART])
    tma.store_wait(0)
    tile.store(part)
    fence_async_shared()
    _add_to_global(dq, [place * 16, 0], tile)


@gluon.jit
def _query_factor(factor, q_scale, tile, SCALING: gl.constexpr):
    """The factor of the scores of a tile of queries."""
    if SCALING == _BLOCK:
        factor = factor * gl.load(q_scale + tile * _ROWS // _BLOCK_LEN)
    return factor


@gluon.jit
def _differentiate(
    buffers, barriers, data, sizes, GROUP: gl.constexpr, SCALING: gl.constexpr, CAUSAL: gl.constexpr,
    EVEN: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Computes with a group of four warps.

    A step has five products. While the tensor cores have the last, of dq, the softmax of the next step is taken; while
    they have that of dv, dS is computed. The other group's products fill what is left.
    """
    _q8_t, _k8_t, v_t, do8_t, q_t, k_t, do_t, _log_sum_t, delta_t, ds_t, dq_t = buffers
    k_full, full, rest_full, empty, ds_full, ds_empty = barriers
    dq, dk_out, dv_out, q_scale, k_scale, v_scale, do_scale, scale = data
    heads, kv_heads, _batch_heads, q_len, kv_len, _together = sizes
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _ROWS, 32])
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D // 2, 16])
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, D_LAYOUT, 2)
    dtype: gl.constexpr = do_t.dtype
    kv_head, first, start, tiles = _work(sizes, CAUSAL)
    group = heads // kv_heads
    count = group * tiles
    q_tiles = (q_len + _ROWS - 1) // _ROWS
    place = kv_head
    if SCALING == _TENSOR:
        place = kv_head * 0
    if SCALING == _BLOCK:
        place = kv_head * ((kv_len + _BLOCK_LEN - 1) // _BLOCK_LEN) + first // _BLOCK_LEN
        q_scale += kv_head * ((q_len + _BLOCK_LEN - 1) // _BLOCK_LEN)
    factor = scale * 1.4426950408889634 * gl.load(k_scale + place)
    if SCALING == _HEAD:
        factor = factor * gl.load(q_scale + kv_head)
    if SCALING == _TENSOR:
        factor = factor * gl.load(q_scale)
    v_factor = gl.load(v_scale + place)
    dk = gl.full([_ROWS, D], 0.0, gl.float32, D_LAYOUT)
    dv = gl.full([_ROWS, D], 0.0, gl.float32, D_LAYOUT)
    stage = 0
    phase = 0
    ds_phase = 0
    head = kv_head * group
    tile = start
    place = 0
    part = gl.full([_ROWS, D // 2], 0.0, gl.float32, DQ_LAYOUT)
    mbarrier.wait(k_full, 0)
    mbarrier.wait(full.index(0), 0, pred=count > 0)
    s = _begin_scores(buffers, 0, GROUP, S_LAYOUT, D)
    s = warpgroup_mma_wait(0, deps=[s])
    s_factor = _query_factor(factor, q_scale, gl.minimum(tile, q_tiles - 1), SCALING)
    p = _weights(s, s_factor, buffers, 0, first, tile * _ROWS, kv_len, GROUP, CAUSAL, EVEN, S_LAYOUT).to(dtype)
    p = gl.convert_layout(p, P_LAYOUT, assert_trivial=True)
    for i in range(count):
        next_head, next_tile = _next_tile(head, tile, start, start + tiles)
        s_factor = _query_factor(factor, q_scale, next_tile, SCALING)
        value = v_t.index(GROUP).reshape([_ROWS, D])
        zeros = gl.full([_ROWS, _ROWS], 0.0, gl.float32, S_LAYOUT)
        dp_factor = v_factor * gl.load(do_scale + head)
        grad = do8_t.index(stage).reshape([_ROWS, D])
        mbarrier.wait(rest_full.index(stage), phase)
        dp = warpgroup_mma(value, grad.permute((1, 0)), zeros, use_acc=False, is_async=True)
        dv = warpgroup_mma(p, do_t.index(stage).reshape([_ROWS, D]), dv, is_async=True)
        if i > 0:
            _add(dq, place, dq_t.index(GROUP), part)
        delta = delta_t.index(stage).reshape([_ROWS]).load(gl.SliceLayout(0, S_LAYOUT))
        dp = warpgroup_mma_wait(1, deps=[dp])
        weights = gl.convert_layout(p, S_LAYOUT, assert_trivial=True).to(gl.float32)
        ds = weights * (dp * dp_factor - delta[None, :])
        mbarrier.wait(ds_empty, ds_phase ^ 1)
        half = ds_t.slice(GROUP * _ROWS, _ROWS)
        half.store(ds.to(dtype))
        fence_async_shared()
        mbarrier.arrive(ds_full)
        now = stage
        dk = warpgroup_mma(half, q_t.index(stage).reshape([_ROWS, D]), dk, is_async=True)
        stage, phase = next_stage(stage, phase, STAGES)
        mbarrier.wait(full.index(stage), phase, pred=i + 1 < count)
        s = _begin_scores(buffers, stage, GROUP, S_LAYOUT, D)  # behind the last step, of what lies there
        mbarrier.wait(ds_full, ds_phase)
        key = k_t.index(GROUP).reshape([_KEYS, D // 2])
        part = warpgroup_mma(ds_t.permute((1, 0)), key, gl.zeros_like(part), use_acc=False, is_async=True)
        s, dk, dv = warpgroup_mma_wait(1, deps=[s, dk, dv])
        mbarrier.arrive(empty.index(now))
        p = _weights(s, s_factor, buffers, stage, first, next_tile * _ROWS, kv_len, GROUP, CAUSAL, EVEN, S_LAYOUT)
        p = gl.convert_layout(p.to(dtype), P_LAYOUT, assert_trivial=True)
        part = warpgroup_mma_wait(0, deps=[part])
        mbarrier.arrive(ds_empty)
        ds_phase ^= 1
        place = (head * q_tiles + tile) * 2 + GROUP
        head = next_head
        tile = next_tile
    if count > 0:
        _add(dq, place, dq_t.index(GROUP), part)
    rows = first + GROUP * _ROWS + gl.arange(0, _ROWS, gl.SliceLayout(1, D_LAYOUT))
    columns = gl.arange(0, D, gl.SliceLayout(0, D_LAYOUT))
    at = kv_head.to(gl.int64) * kv_len * D + (rows[:, None].to(gl.int64) * D + columns[None, :])
    gl.store(dk_out + at, (dk * scale).to(dtype), mask=rows[:, None] < kv_len)
    gl.store(dv_out + at, dv.to(dtype), mask=rows[:, None] < kv_len)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "kv_heads", "batch_heads", "q_len", "kv_len", "together"])
def bprop_warps_kernel(
    q8, k8, v, do8, q, k, do, log_sum, delta, dq, dk, dv, q_scale, k_scale, v_scale, do_scale, scale, heads, kv_heads,
    batch_heads, q_len, kv_len, together, SCALING: gl.constexpr, CAUSAL: gl.constexpr, EVEN: gl.constexpr,
    STAGES: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Adds dq to float32 [B * H, Sq up to a multiple of 64, D], in units of the scale; stores dk and dv of 16 bits.

    Descriptors: e4m3 q8, k8 and v, do8 in FP8, the values of q and k, and do, in 16 bits, the log-sum-exp in units of
    log2 and rowsum(do o) in float32 [B * H, Sq up to a multiple of 64]. `batch_heads` are those of keys.
    """
    q8_t = gl.allocate_shared_memory(q8.dtype, [STAGES, 1, _ROWS, D], q8.layout)
    k8_t = gl.allocate_shared_memory(k8.dtype, [2, 1, _ROWS, D], k8.layout)
    v_t = gl.allocate_shared_memory(v.dtype, [2, 1, _ROWS, D], v.layout)
    q_t = gl.allocate_shared_memory(q.dtype, [STAGES, 1, _ROWS, D], q.layout)
    k_t = gl.allocate_shared_memory(k.dtype, [2, 1, _KEYS, D // 2], k.layout)
    do_t = gl.allocate_shared_memory(do.dtype, [STAGES, 1, _ROWS, D], do.layout)
    do8_t = gl.allocate_shared_memory(do8.dtype, [STAGES, 1, _ROWS, D], do8.layout)
    log_sum_t = gl.allocate_shared_memory(gl.float32, [STAGES, 1, _ROWS], log_sum.layout)
    delta_t = gl.allocate_shared_memory(gl.float32, [STAGES, 1, _ROWS], delta.layout)
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_KEYS, _ROWS], do.dtype)
    ds_t = gl.allocate_shared_memory(do.dtype, [_KEYS, _ROWS], DS_LAYOUT)
    dq_t = gl.allocate_shared_memory(gl.float32, [2, 16, _PART], dq.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    rest_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ds_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ds_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(k_full, count=1)
    mbarrier.init(ds_full, count=2)
    mbarrier.init(ds_empty, count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(rest_full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    buffers = (q8_t, k8_t, v_t, do8_t, q_t, k_t, do_t, log_sum_t, delta_t, ds_t, dq_t)
    barriers = (k_full, full, rest_full, empty, ds_full, ds_empty)
    sources = (q8, k8, v, do8, q, k, do, log_sum, delta)
    data = (dq, dk, dv, q_scale, k_scale, v_scale, do_scale, scale)
    sizes = (heads, kv_heads, batch_heads, q_len, kv_len, together)
    gl.warp_specialize(
        [
            (_differentiate, (buffers, barriers, data, sizes, _FIRST, SCALING, CAUSAL, EVEN, STAGES, D)),
            (_differentiate, (buffers, barriers, data, sizes, _SECOND, SCALING, CAUSAL, EVEN, STAGES, D)),
            (_load_tiles, (sources, buffers, barriers, sizes, CAUSAL, STAGES, D)),
        ],
        [4, 1], [_REGISTERS, _LOADING_REGISTERS],
    )  # fmt: skip


STAGES = 2
"""Tiles of queries in shared memory."""
TOGETHER = 4
"""Heads of keys that are worked on at a time."""


def backward(
    do: Sequence[Tensor], wide: Sequence[Tensor], operands: Sequence[Tensor], scales: Sequence[Tensor], o: Tensor,
    lse: Tensor, *, causal: bool, scale: float, scaling: Scaling,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients (dq, dk, dv) of attention, of the dtype of do. Launches at once.

    `do` is [B, H, Sq, 128] and the same in FP8, `wide` the values of q [B, H, Sq, 128] and k [B, Hkv, Sk, 128] in the
    dtype of do, `operands` are these and v in e4m3, `scales` those of q, k and v, and [B, H] of do. lse is float32
    [B, H, Sq], -inf where there is nothing.
    """
    (grad, do8), (q, k), (q8, k8, v) = do, wide, operands
    batches, heads, q_len, head_dim = q8.shape
    kv_heads, kv_len = k8.shape[1:3]
    tiles = (q_len + _ROWS.value - 1) // _ROWS.value
    dq, dk, dv = (torch.empty(x.shape, dtype=grad.dtype, device=grad.device) for x in (q8, k8, k8))
    if not dq.numel() or not kv_len:
        return dq.zero_(), dk.zero_(), dv.zero_()
    log_sum, delta = torch.empty((2, batches * heads, tiles * _ROWS.value), dtype=torch.float32, device=grad.device)
    parts = torch.zeros((batches * heads * tiles * 32, _PART.value), dtype=torch.float32, device=grad.device)
    row_terms_kernel[(batches * heads * tiles,)](
        grad, o, lse, log_sum, delta, q_len, tiles, _ROWS.value, head_dim, num_warps=4
    )
    rows, halves = (_ROWS.value, head_dim), (_KEYS.value, head_dim // 2)
    boxes = ((q8, rows), (k8, rows), (v, rows), (do8, rows), (q, rows), (k, halves), (grad, rows))
    blocks = (kv_len + _KEYS.value - 1) // _KEYS.value
    bprop_warps_kernel[(blocks * batches * kv_heads,)](
        *(_descriptor(x.flatten(0, 1), (1, *box)) for x, box in boxes),
        *(_descriptor(x, (1, _ROWS.value)) for x in (log_sum, delta)), _descriptor(parts, (16, _PART.value)), dk, dv,
        *scales, scale, heads, kv_heads, batches * kv_heads, q_len, kv_len, TOGETHER, SCALING=KINDS[scaling],
        CAUSAL=causal, EVEN=not causal and kv_len % _KEYS.value == 0, STAGES=STAGES, D=head_dim, num_warps=4,
    )  # fmt: skip
    gather_kernel[(batches * heads * tiles * 2,)](parts, dq, scale, q_len, tiles, num_warps=4)
    return dq, dk, dv


def _descriptor(x: Tensor, box: tuple[int, ...]) -> TensorDescriptor:
    """Returns the descriptor for copies of boxes of x, zeros past its ends."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(box), _layout(box, x.dtype))


@functools.cache
def _layout(box: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """Returns how a box lies in shared memory: in the order that tensor cores want, or as it comes."""
    if len(box) == 2:
        return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return gl.NVMMASharedLayout.get_default_for(list(box), _DTYPES[dtype])


_DTYPES = {
    torch.float8_e4m3fn: gl.float8e4nv, torch.float8_e5m2: gl.float8e5, torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
}  # fmt: skip
