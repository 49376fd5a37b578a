# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""A forward of attention on FP8 operands for Hopper whose warps have different work, in Triton's Gluon.

One warp copies tiles of keys and values to shared memory, two or three groups of four warps have 64 queries each and
read every tile of the same memory. What Triton's own kernel (`triton_forward`) computes without masks and dropout,
with the same operands and the same rounding; keys are read from the last to the first, so that the tile that is hidden
in part comes before the loop.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
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
from fxquant.kernels.gluon_ring import next_stage

_P_LOG = gl.constexpr(8.0)
"""log2 of what probabilities are multiplied by before their cast, as in `triton_forward`."""
_LN_2 = gl.constexpr(math.log(2))
_TENSOR, _HEAD, _BLOCK = (gl.constexpr(i) for i in range(3))
_BLOCK_LEN = gl.constexpr(128)
_ROWS = gl.constexpr(64)
"""Queries of a group of four warps: the fewest that Hopper multiplies."""
_FIRST, _SECOND, _THIRD = (gl.constexpr(i) for i in range(3))
_LOADING_REGISTERS = gl.constexpr(24)


@gluon.jit
def _own_tiles(tiles):
    """Returns the number of tiles of this program."""
    programs = gl.num_programs(0)
    rounds = tiles // programs
    place = gl.where(rounds % 2 == 0, gl.program_id(0), programs - 1 - gl.program_id(0))
    return rounds + gl.where(rounds * programs + place < tiles, 1, 0)


@gluon.jit
def _tile_at(turn, q_len, heads, kv_heads, batch_heads, together, CAUSAL: gl.constexpr, BM: gl.constexpr):
    """(head, key-value head, first query) of a tile. Tiles are dealt to the programs forth and back.

    Those of `together` heads come first, and of these, where it is causal, the ones that see most keys.
    """
    programs = gl.num_programs(0)
    tile = turn * programs + gl.where(turn % 2 == 0, gl.program_id(0), programs - 1 - gl.program_id(0))
    blocks = (q_len + BM - 1) // BM
    first_head = tile // (blocks * together) * together
    within = tile - first_head * blocks
    width = gl.minimum(batch_heads - first_head, together)
    head = first_head + within % width
    block = within // width
    if CAUSAL:
        block = blocks - 1 - block
    kv_head = head // heads * kv_heads + head % heads // (heads // kv_heads)
    return head, kv_head, block * BM


@gluon.jit
def _key_tiles(first, kv_len, CAUSAL: gl.constexpr, ROWS: gl.constexpr, BN: gl.constexpr):
    """Returns the number of tiles of keys that ROWS queries from `first` on see."""
    end = kv_len
    if CAUSAL:
        end = gl.minimum(kv_len, first + ROWS)
    return (end + BN - 1) // BN


@gluon.jit
def _load_tiles(
    q, k, v, shared, sizes, CAUSAL: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, BN: gl.constexpr,
    D: gl.constexpr,
):  # fmt: skip
    """Copies tiles, as the loading warp."""
    q_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty = shared
    tiles, heads, kv_heads, batch_heads, q_len, kv_len, together = sizes
    stage = 0
    phase = 1  # a barrier that nothing has arrived at yet counts as past its last round
    q_phase = 1
    for turn in range(_own_tiles(tiles)):
        head, kv_head, first = _tile_at(turn, q_len, heads, kv_heads, batch_heads, together, CAUSAL, GROUPS * _ROWS)
        for i in gl.static_range(GROUPS):
            mbarrier.wait(q_empty.index(i), q_phase)
            mbarrier.expect(q_full.index(i), _ROWS * D)
            tma.async_copy_global_to_shared(q, [head, first + _ROWS * i, 0], q_full.index(i), q_tiles.index(i))
        q_phase ^= 1
        count = _key_tiles(first, kv_len, CAUSAL, GROUPS * _ROWS, BN)
        for i in range(count):
            j = (count - 1 - i) * BN
            mbarrier.wait(k_empty.index(stage), phase)
            mbarrier.expect(k_full.index(stage), BN * D)
            tma.async_copy_global_to_shared(k, [kv_head, j, 0], k_full.index(stage), k_tiles.index(stage))
            mbarrier.wait(v_empty.index(stage), phase)
            mbarrier.expect(v_full.index(stage), BN * D)
            tma.async_copy_global_to_shared(v, [kv_head, 0, j], v_full.index(stage), v_tiles.index(stage))
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _scale_at(place):
    """Loads a scale, which nothing waits for before it is used."""
    return gl.inline_asm_elementwise(
        "ld.global.nc.f32 $0, [$1];", "=f,l", [place.to(gl.int64)], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _not_before(x):
    """x, by an instruction that ptxas does not move up across a branch, as it does what is computed from x."""
    return gl.inline_asm_elementwise(
        "shfl.sync.bfly.b32 $0, $1, 0, 31, -1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def _own_sums(p, BN: gl.constexpr):
    """The sums [64, 4] of what each thread holds of the rows of p."""
    return gl.sum(gl.sum(p.reshape([_ROWS, BN // 8, 4, 2]), 3), 1)


@gluon.jit
def _words(p, LAYOUT: gl.constexpr, BN: gl.constexpr):
    """p [64, BN] in e4m3 with its columns in the order of v's keys, four to a word: [64, BN / 4].

    No thread gives anything to another. Bytes that stay from one step to the next would each take a register.
    """
    p = p.reshape([_ROWS, BN // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([_ROWS, BN])
    p = gl.convert_layout(p, LAYOUT, assert_trivial=True)
    even, odd = gl.split(p.reshape([_ROWS, BN // 4, 2, 2]))
    a, c = gl.split(even)
    b, d = gl.split(odd)
    return gl.inline_asm_elementwise(
        """{ .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
        mov.b32 $0, {low, high}; }""",
        "=r,f,f,f,f", [a, b, c, d], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _payload(words, LAYOUT: gl.constexpr, BN: gl.constexpr):
    """The e4m3 [64, BN] of `_words`, which takes no instruction."""
    a, b, c, d = words.to(gl.int8), (words >> 8).to(gl.int8), (words >> 16).to(gl.int8), (words >> 24).to(gl.int8)
    p = gl.join(gl.join(a, c), gl.join(b, d)).reshape([_ROWS, BN])
    return gl.convert_layout(p, LAYOUT, assert_trivial=True).to(gl.float8e4nv, bitcast=True)


@gluon.jit
def _attend(
    shared, data, sizes, GROUP: gl.constexpr, SCALING: gl.constexpr, CAUSAL: gl.constexpr, EVEN: gl.constexpr,
    RECORD: gl.constexpr, Q_HELD: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, BN: gl.constexpr,
    D: gl.constexpr,
):  # fmt: skip
    """Attends with a group of four warps.

    A step gives the tensor cores the scores of a tile of keys and then the product with v of the tile before, and takes
    exponentials of those scores while the second is computed. ptxas moves what only computes across everything but a
    branch: the waits for copies, which are loops, stand where an order matters.
    """
    q_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty = shared
    out, lse, weights, q_scale, k_scale, v_scale, scale = data
    tiles, heads, kv_heads, batch_heads, q_len, kv_len, together = sizes
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 32])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 32])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 4)
    Q_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, S_LAYOUT, 4)
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    OUT_ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    STORED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    stage = 0
    phase = 0
    q_phase = 0
    for turn in range(_own_tiles(tiles)):
        head, kv_head, block_first = _tile_at(
            turn, q_len, heads, kv_heads, batch_heads, together, CAUSAL, GROUPS * _ROWS
        )
        first = block_first + _ROWS * GROUP
        count = _key_tiles(first, kv_len, CAUSAL, _ROWS, BN)
        if SCALING == _BLOCK:
            q_blocks = (q_len + _BLOCK_LEN - 1) // _BLOCK_LEN
            kv_blocks = (kv_len + _BLOCK_LEN - 1) // _BLOCK_LEN
            k_places = k_scale + kv_head * kv_blocks
            v_places = v_scale + kv_head * kv_blocks
            q_place = q_scale + kv_head * q_blocks + gl.minimum(first, q_len - 1) // _BLOCK_LEN
            q_factor = gl.load(q_place) * scale
            factor = q_factor * _scale_at(k_places + (count - 1) * BN // _BLOCK_LEN)
            unit = _scale_at(v_places + (count - 1) * BN // _BLOCK_LEN)
        else:
            place = kv_head
            if SCALING == _TENSOR:
                place = kv_head * 0
            factor = gl.load(q_scale + place) * scale * gl.load(k_scale + place)
            unit = gl.load(v_scale + place)
        if CAUSAL and BN < GROUPS * _ROWS:  # tiles that only groups with later queries see
            for _ in range(_key_tiles(block_first, kv_len, CAUSAL, GROUPS * _ROWS, BN) - count):
                mbarrier.wait(k_full.index(stage), phase)
                mbarrier.arrive(k_empty.index(stage))
                mbarrier.wait(v_full.index(stage), phase)
                mbarrier.arrive(v_empty.index(stage))
                stage, phase = next_stage(stage, phase, STAGES)
        mbarrier.wait(q_full.index(GROUP), q_phase)
        q_phase ^= 1
        query = q_tiles.index(GROUP).reshape([_ROWS, D])
        if Q_HELD:
            query = query.load(Q_LAYOUT)
            mbarrier.arrive(q_empty.index(GROUP))
        zeros = gl.full([_ROWS, BN], 0.0, gl.float32, S_LAYOUT)
        mbarrier.wait(k_full.index(stage), phase)
        key = k_tiles.index(stage).reshape([BN, D]).permute((1, 0))
        s = warpgroup_mma(query, key, zeros, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_empty.index(stage))
        rows = first + gl.arange(0, _ROWS, ROW)
        if CAUSAL or not EVEN:
            columns = (count - 1) * BN + gl.arange(0, BN, gl.SliceLayout(0, S_LAYOUT))
            seen = (columns < kv_len)[None, :]
            if CAUSAL:
                seen = seen & (columns[None, :] <= rows[:, None])
            s = gl.where(seen, s, float("-inf"))
        most = gl.max(s, 1) * factor
        p = gl.exp2(s * factor - (most - _P_LOG)[:, None])
        total = _own_sums(p, BN)
        OWN_ROW: gl.constexpr = gl.SliceLayout(1, total.type.layout)
        words = _words(p, P_LAYOUT, BN)
        alpha = gl.full([_ROWS], 0.0, gl.float32, ROW)
        acc = gl.full([_ROWS, D], 0.0, gl.float32, O_LAYOUT)
        v_stage = stage
        v_phase = phase
        stage, phase = next_stage(stage, phase, STAGES)
        mbarrier.wait(k_full.index(stage), phase, pred=count > 1)
        for i in range(1, count):
            v_before = v_stage
            key = k_tiles.index(stage).reshape([BN, D]).permute((1, 0))
            s = warpgroup_mma(query, key, zeros, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(v_stage), v_phase)
            acc = acc * gl.convert_layout(_not_before(alpha), OUT_ROW, assert_trivial=True)[:, None]
            value = v_tiles.index(v_stage).reshape([D, BN]).permute((1, 0))
            acc = warpgroup_mma(_payload(words, P_LAYOUT, BN), value, acc, is_async=True)
            if SCALING == _BLOCK:
                j = (count - 1 - i) * BN
                factor = q_factor * _scale_at(k_places + j // _BLOCK_LEN)
                new_unit = _scale_at(v_places + j // _BLOCK_LEN)
            s = warpgroup_mma_wait(1, deps=[s])
            mbarrier.arrive(k_empty.index(stage))
            new = gl.maximum(most, gl.max(s, 1) * factor)
            alpha = gl.exp2(most - new)
            p = gl.exp2(s * factor - (new - _P_LOG)[:, None])
            total = total * gl.convert_layout(alpha, OWN_ROW, assert_trivial=True)[:, None] + _own_sums(p, BN)
            most = new
            if SCALING == _BLOCK:  # acc is in units of the scale of the v it met last
                alpha *= unit / new_unit
                unit = new_unit
            v_stage = stage
            v_phase = phase
            stage, phase = next_stage(stage, phase, STAGES)
            mbarrier.wait(k_full.index(stage), phase, pred=i + 1 < count)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(v_empty.index(v_before))
            words = _words(p, P_LAYOUT, BN)
        mbarrier.wait(v_full.index(v_stage), v_phase)
        acc = acc * gl.convert_layout(alpha, OUT_ROW, assert_trivial=True)[:, None]
        value = v_tiles.index(v_stage).reshape([D, BN]).permute((1, 0))
        acc = warpgroup_mma(_payload(words, P_LAYOUT, BN), value, acc, is_async=True)
        if not Q_HELD:
            mbarrier.arrive(q_empty.index(GROUP))
        total = gl.convert_layout(gl.sum(total, 1), ROW, assert_trivial=True)
        inverse = unit / total
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index(v_stage))
        acc = acc * gl.convert_layout(inverse, OUT_ROW, assert_trivial=True)[:, None]
        result = gl.convert_layout(acc.to(out.dtype.element_ty), STORED)
        row = gl.arange(0, _ROWS, gl.SliceLayout(1, STORED))
        column = gl.arange(0, D, gl.SliceLayout(0, STORED))
        at = out + (head.to(gl.int64) * q_len + first) * D
        gl.store(at + (row[:, None] * D + column[None, :]), result, mask=(first + row < q_len)[:, None])
        gl.store(lse + head.to(gl.int64) * q_len + rows, (most + gl.log2(total) - _P_LOG) * _LN_2, mask=rows < q_len)
        if RECORD:  # the largest of a row is exp2(_P_LOG) over their sum
            gl.store(weights + head.to(gl.int64) * q_len + rows, gl.minimum(256.0 / total, 1.0), mask=rows < q_len)


@gluon.jit(do_not_specialize=["tiles", "heads", "kv_heads", "batch_heads", "q_len", "kv_len", "together"])
def fprop_warps_kernel(
    q, k, v, out, lse, weights, q_scale, k_scale, v_scale, scale, tiles, heads, kv_heads, batch_heads, q_len, kv_len,
    together,
    SCALING: gl.constexpr, CAUSAL: gl.constexpr, EVEN: gl.constexpr, RECORD: gl.constexpr, Q_HELD: gl.constexpr,
    GROUPS: gl.constexpr, REGISTERS: gl.constexpr, STAGES: gl.constexpr, BN: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Tiles of GROUPS x 64 queries of one head, by GROUPS groups of four warps that have REGISTERS each.

    q, k and v are descriptors of [B * H, Sq, D], [B * Hkv, Sk, D] and [B * Hkv, D, Sp], `scale` is in units of log2,
    and `tiles` are dealt to as many programs as there are. RECORD stores the largest weight of each row. Q_HELD keeps
    queries in registers. Nothing is specialized on lengths: the same code runs for all.
    """
    q_tiles = gl.allocate_shared_memory(gl.float8e4nv, [GROUPS, 1, _ROWS, D], q.layout)
    k_tiles = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 1, BN, D], k.layout)
    v_tiles = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 1, D, BN], v.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(GROUPS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=GROUPS)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=GROUPS)
    fence_async_shared()
    shared = (q_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty)
    data = (out, lse, weights, q_scale, k_scale, v_scale, scale)
    sizes = (tiles, heads, kv_heads, batch_heads, q_len, kv_len, together)
    if GROUPS == 2:  # constants of a tuple that is a variable, or a sum, would become values of the run
        gl.warp_specialize(
            [
                (_attend, (shared, data, sizes, _FIRST, SCALING, CAUSAL, EVEN, RECORD, Q_HELD, GROUPS, STAGES, BN, D)),
                (_attend, (shared, data, sizes, _SECOND, SCALING, CAUSAL, EVEN, RECORD, Q_HELD, GROUPS, STAGES, BN, D)),
                (_load_tiles, (q, k, v, shared, sizes, CAUSAL, GROUPS, STAGES, BN, D)),
            ],
            [4, 1], [REGISTERS, _LOADING_REGISTERS],
        )  # fmt: skip
    else:
        gl.static_assert(GROUPS == 3)
        gl.warp_specialize(
            [
                (_attend, (shared, data, sizes, _FIRST, SCALING, CAUSAL, EVEN, RECORD, Q_HELD, GROUPS, STAGES, BN, D)),
                (_attend, (shared, data, sizes, _SECOND, SCALING, CAUSAL, EVEN, RECORD, Q_HELD, GROUPS, STAGES, BN, D)),
                (_attend, (shared, data, sizes, _THIRD, SCALING, CAUSAL, EVEN, RECORD, Q_HELD, GROUPS, STAGES, BN, D)),
                (_load_tiles, (q, k, v, shared, sizes, CAUSAL, GROUPS, STAGES, BN, D)),
            ],
            [4, 4, 1], [REGISTERS, REGISTERS, _LOADING_REGISTERS],
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Config:
    """The tiles of a forward. Shared memory and registers hold one program a multiprocessor."""

    groups: int = 2
    block_n: int = 128
    stages: int = 3
    q_held: bool = False
    cached: int = 4 << 20
    """Bytes of keys and values that are worked on at a time, where that leaves no program with more work."""

    @property
    def registers(self) -> int:
        """Registers of a thread that multiplies; one that loads has 24, a multiprocessor 65536, given out by eights."""
        return 240 if self.groups == 2 else 160


CONFIGS = {
    64: Config(groups=3),
    128: Config(q_held=True),
    256: Config(stages=2),
}
"""The quickest of those tried on an H100, by head dimension."""


def forward(
    operands: Sequence[Tensor], *, causal: bool, scale: float, out_dtype: torch.dtype, scaling: Scaling = "head",
    record: bool = False, config: Config | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """softmax(q k^T * scale) v: `triton_forward.forward` of e4m3 operands without mask and dropout. Launches at once.

    o [B, H, Sq, D], the log-sum-exp [B, H, Sq] in float32 and, to `record`, the largest weight of each row likewise, of
    contiguous q [B, H, Sq, D], k [B, Hkv, Sk, D] and v [B, Hkv, D, Sp] with Sp a multiple of 16, keys ordered by
    `triton_cast`. The scales of q, k and v follow these.
    """
    q, k, v, q_scale, k_scale, v_scale = operands
    batches, heads, q_len, head_dim = q.shape
    kv_heads, kv_len = k.shape[1:3]
    out = torch.empty((batches, heads, q_len, head_dim), dtype=out_dtype, device=q.device)
    lse = torch.empty((batches, heads, q_len), dtype=torch.float32, device=q.device)
    weights = torch.empty_like(lse) if record else lse.new_empty(0)
    if not out.numel():
        return out, lse, weights
    if not kv_len:
        return out.zero_(), lse.fill_(-math.inf), weights.zero_()
    config = config or CONFIGS[head_dim]
    rows = config.groups * _ROWS.value
    blocks = (q_len + rows - 1) // rows
    tiles = blocks * batches * heads
    cached = max(config.cached // (2 * head_dim * kv_len), 1) * (heads // kv_heads)
    programs, together = tiles, cached
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    if not causal:
        programs = min(tiles, processors)
    else:
        most = max(_IN_CACHE // (2 * head_dim * kv_len), 1) * (heads // kv_heads)
        even = _dealt_evenly(blocks, rows, kv_len, config.block_n, batches * heads, cached, most, processors)
        if even is not None:
            programs, together = min(tiles, processors), even
    fprop_warps_kernel[(programs,)](
        _descriptor(q.view(-1, q_len, head_dim), _ROWS.value, head_dim),
        _descriptor(k.view(-1, kv_len, head_dim), config.block_n, head_dim),
        _descriptor(v.view(-1, head_dim, v.shape[3]), head_dim, config.block_n), out, lse, weights, q_scale,
        k_scale, v_scale, scale / math.log(2), tiles, heads, kv_heads, batches * heads, q_len, kv_len, together,
        SCALING=KINDS[scaling], CAUSAL=causal, EVEN=not causal and kv_len % config.block_n == 0, RECORD=record,
        Q_HELD=config.q_held, GROUPS=config.groups, REGISTERS=config.registers, STAGES=config.stages, BN=config.block_n,
        D=head_dim, num_warps=4,
    )  # fmt: skip
    return out, lse, weights


def _descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Returns the descriptor for copies of boxes [1, rows, columns] of x [heads, S, D], zeros past its ends."""
    box = [1, rows, columns]
    layout = gl.NVMMASharedLayout.get_default_for(box, gl.float8e4nv)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), box, layout)


_IN_CACHE = 34 << 20
"""Bytes of keys and values that may be worked on at a time: what stays in an L2 cache of 50 MiB."""
_MOST_OVER_MEAN = 1.04
"""The most work of the busiest program, as a multiple of the mean; above, the device deals out tiles in turn."""
_OF_A_TILE = 0.7
"""Steps that a tile of queries takes beside those of its keys."""


@functools.lru_cache(maxsize=256)
def _dealt_evenly(
    blocks: int, rows: int, kv_len: int, block_n: int, heads: int, least: int, most: int, programs: int
) -> int | None:
    """Returns the number of heads to work on together, so that programs have about equal work; None if there is none.

    The attention is causal, with `blocks` tiles of `rows` queries a head, in the order of `_tile_at`. It is the fewest
    between `least` and `most`, whose keys and values are read again soonest.
    """
    ends = (min(kv_len, (block + 1) * rows) for block in reversed(range(blocks)))
    lengths = [(end + block_n - 1) // block_n + _OF_A_TILE for end in ends]
    together = min(least, most, heads)
    while together < 2 * min(most, heads):
        width = min(together, most, heads)
        sums = [0.0] * programs
        tile = 0
        for first in range(0, heads, width):
            for length in lengths:
                for _ in range(min(width, heads - first)):
                    turn, place = divmod(tile, programs)
                    sums[place if turn % 2 == 0 else programs - 1 - place] += length
                    tile += 1
        if max(sums) <= _MOST_OVER_MEAN * sum(sums) / programs:
            return width
        together *= 2
    return None
