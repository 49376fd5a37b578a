# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
"""A kernel for few rows of bfloat16 x on Hopper, in Triton's Gluon: y [M, N] = x [M, K] w [N, K]^T, w quantized.

What `fxquant.kernels.linear.triton_weight_only` computes, with less between memory and tensor cores. `mma.sync` has a
lane hold, of a row, two elements here and two there of 16 that are multiplied at a time. But K may be summed in any
order: a lane reads 16 bytes of a row of the weight side by side, and says that these are its elements of several such
products; of x it reads the same columns. The layout of registers is that of the instruction, which Triton does not
promise for its own tensors; therefore Gluon.

Each multiprocessor has as many programs as any other, of which each has its share of the weight's tiles of 16 rows,
one more or less. The warps of a program share K in pieces of 64 bytes of a row, side by side. A step of a warp is a
piece of a tile, and x is read once for the steps of all tiles. What a step reads comes into a queue of the warp's own
in shared memory, DEPTH - 1 steps ahead, and into registers one step ahead: no warp waits for another before the end.

Tensors are [1, 1, WK warps, 32 lanes, 4 words]. Lane l has rows l // 4 and l // 4 + 8 of a tile; of K, 16 bytes from
(l % 4) * 16 on in each piece.

A kernel that is launched `EARLY` reads the weight's elements and block scales before it waits for the kernel before it.
Those that let it in before they have ended are `EARLY` themselves, here, in `triton_weight_only` and `triton_few_rows`.
Of numbers with one byte they write x alone, where both operands are quantized (`fxquant.passes.lower.few_rows`), so no
weight; and the first of them waited for all before it. Everything else, biases and scales in float32 too, is read
behind the wait.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fxquant.formats import QuantSpec
from fxquant.kernels.linear.few_rows import EPILOGUES
from fxquant.kernels.linear.weight_only import Direct, is_packed
from fxquant.kernels.operator import Parts

_NONE, _ADD, _SILU_MUL, _GELU, _GELU_TANH = (gl.constexpr(i) for i in range(5))
_EPILOGUES = {name: i + 1 for i, name in enumerate(EPILOGUES)}
"""The numbers of what is done with the result; those up to `_SILU_MUL` read another tensor."""
_SQRT_HALF, _SQRT_2_PI, _CUBE = (gl.constexpr(c) for c in (0.7071067811865476, 0.7978845608028654, 0.044715))


def _decode_fp8() -> str:
    """From words of e4m3 $8 to $11: the two low bytes of each as bfloat16 in $0 to $3, the two high in $4 to $7.

    Through float32, as `fxquant.kernels.linear.triton_weight_only.fp8_values`.
    """
    text = ".reg .b16 low, high, a, b, c, d; .reg .b32 p, q; .reg .f32 e, f, g, h;\n"
    for i in range(4):
        text += f"""mov.b32 {{low, high}}, ${8 + i}; cvt.rn.f16x2.e4m3x2 p, low; cvt.rn.f16x2.e4m3x2 q, high;
        mov.b32 {{a, b}}, p; cvt.f32.f16 e, a; cvt.f32.f16 f, b; cvt.rn.bf16x2.f32 ${i}, f, e;
        mov.b32 {{c, d}}, q; cvt.f32.f16 g, c; cvt.f32.f16 h, d; cvt.rn.bf16x2.f32 ${4 + i}, h, g;\n"""
    return f"{{ {text} }}"


def _decode_nvfp4() -> str:
    """From words of 8 elements $16 to $19 and two e4m3 scales in $20: elements j and j + 4 of word i in $(4j + i).

    Times these scales and 2^-7, exactly, as `fxquant.kernels.linear.triton_weight_only.nvfp4_values`.
    """
    text = """.reg .b16 s, a, b; .reg .b32 p, t, u, sa, sb; .reg .f32 e, f;
    mov.b32 {s, a}, $20; cvt.rn.f16x2.e4m3x2 p, s; mov.b32 {a, b}, p; cvt.f32.f16 e, a; cvt.f32.f16 f, b;
    mul.f32 e, e, 0f7B000000; mul.f32 f, f, 0f7B000000; cvt.rn.bf16x2.f32 sa, e, e; cvt.rn.bf16x2.f32 sb, f, f;\n"""
    for i in range(4):
        text += f"shr.u32 u, ${16 + i}, 8;\n"
        for j in range(4):
            word, scale = f"${16 + i}" if j < 2 else "u", "sa" if i < 2 else "sb"
            mask, factor = ("0x000F000F", "0x1040") if j % 2 == 0 else ("0x00F000F0", "0x0104")
            text += f"""and.b32 t, {word}, {mask}; mul.lo.u32 t, t, {factor}; and.b32 t, t, 0x81C081C0;
            mul.rn.bf16x2 ${4 * j + i}, t, {scale};\n"""
    return f"{{ {text} }}"


def _mma(fragments: list[tuple[int, int, int, int, int, int]], c: int) -> str:
    """Products m16n8k16: $0 to $3 become $c to $(c + 3) and the sum of every other, $4 to $7 the sum of those between.

    One sum would have each product wait for the one before it.
    """
    text = ""
    sums = [", ".join(f"${c + i}" for i in range(4)), ", ".join(["0f00000000"] * 4)]
    for i, (*a, b0, b1) in enumerate(fragments):
        out, rows = ("$0, $1, $2, $3", "$4, $5, $6, $7")[i % 2], ", ".join(f"${i}" for i in a)
        text += f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{{out}}}, {{{rows}}}, {{${b0}, ${b1}}}, "
        text += f"{{{sums[i % 2]}}};\n"
        sums[i % 2] = out
    return text


_DECODE_FP8, _DECODE_NVFP4 = gl.constexpr(_decode_fp8()), gl.constexpr(_decode_nvfp4())
_ORDER = gl.constexpr("""prmt.b32 $0, $4, $6, 0x5410; prmt.b32 $1, $4, $6, 0x7632;
prmt.b32 $2, $5, $7, 0x5410; prmt.b32 $3, $5, $7, 0x7632;""")
"""8 elements of x in pairs (0, 1), (2, 3), (4, 5), (6, 7) become (0, 4), (1, 5), (2, 6), (3, 7)."""
_MMA_FP8 = gl.constexpr(_mma([(8 + i, 16 + i, 12 + i, 20 + i, 24 + 2 * i, 25 + 2 * i) for i in range(4)], 32))
"""The words of a row are decoded to $8 to $15, those of the row 8 below to $16 to $23; those of x are $24 to $31."""
_MMA_NVFP4 = gl.constexpr(_mma(
    [(8 + j + i, 24 + j + i, 12 + j + i, 28 + j + i, 40 + 4 * i + j // 4, 41 + 4 * i + j // 4)
     for i in range(4) for j in (0, 8)], 56,
))  # fmt: skip
"""The words of a row are decoded to $8 to $23, those of the row 8 below to $24 to $39; x in its order is $40 to $55."""


def _registers(kind: str, results: int, words: int, floats: int = 0) -> str:
    """The constraints of an instruction's registers; results are written before all else is read."""
    return ",".join([f"=&{kind}"] * results + ["r"] * words + ["f"] * floats)


_OF_DECODE_FP8, _OF_DECODE_NVFP4, _OF_ORDER = (
    gl.constexpr(_registers("r", results, words)) for results, words in ((8, 4), (16, 8), (4, 4))
)
_OF_MMA_FP8, _OF_MMA_NVFP4 = (gl.constexpr(_registers("f", 8, words, 4)) for words in (24, 48))


@gluon.constexpr_function
def _reserve(size):
    return f"{{ .shared .align 16 .b8 queue[{size}]; mov.u32 $0, queue; }}"


@gluon.constexpr_function
def _copy(kind, size, at):
    """Copies `size` bytes from $2 to the shared memory at $1 + `at` if $3 is not 0."""
    copy = f"cp.async.{kind}.shared.global.L2::128B [$1+{at}], [$2], {size};"
    return f"{{ .reg .pred p; setp.ne.s32 p, $3, 0; @p {copy} mov.u32 $0, 0; }}"


@gluon.constexpr_function
def _wait(groups):
    """Waits until at most the last `groups` of copies are under way, of every lane of the warp."""
    return f"cp.async.wait_group {groups}; bar.warp.sync 0xffffffff; // $0"


@gluon.constexpr_function
def _read(at):
    return f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4+{at}];"


@gluon.constexpr_function
def _write(at):
    nothing = "".join(f"mov.u32 ${i}, 0;" for i in range(4))
    return f"st.shared.v4.f32 [$4+{at}], {{$8, $9, $10, $11}}; {nothing}"


@gluon.jit
def _run(text: gl.constexpr):
    """Runs an instruction for what it does; returns a number if it writes one."""
    return gl.inline_asm_elementwise(text, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _copied(text: gl.constexpr, to, source, wanted):
    gl.inline_asm_elementwise(text, "=r,r,l,r", [to, source, wanted], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _ask(
    piece, TILE: gl.constexpr, pieces, tiles, slot, queue, w, blocks, w_row, s_row, WK: gl.constexpr,
    PACKED: gl.constexpr,
):  # fmt: skip
    """Has a step's words of a lane's row of the weight copied, of the row 8 below, and scales; a group, maybe empty."""
    wanted = ((piece < pieces) & (TILE < tiles)).to(gl.int32)
    w += TILE * 16 * w_row + piece * (16 * WK)
    blocks += TILE * 16 * s_row + piece * (4 * WK)
    _copied(_copy("cg", 16, 0), queue[0] + slot, w, wanted)
    _copied(_copy("cg", 16, 512), queue[0] + slot, w + 8 * w_row, wanted)
    if PACKED:
        _copied(_copy("ca", 4, 1024), queue[1] + slot, blocks, wanted)
    _run("cp.async.commit_group; // $0")


@gluon.constexpr_function
def _read_pair(at):
    return f"ld.shared.u16 $0, [$1+{at}];"


@gluon.jit
def _words(at, PLACE: gl.constexpr):
    return gl.inline_asm_elementwise(_read(PLACE), "=r,=r,=r,=r,r,r,r,r", [at], dtype=gl.int32, is_pure=False, pack=4)


@gluon.jit
def _pair(at, PLACE: gl.constexpr):
    """Reads two scales as one number."""
    pair = gl.inline_asm_elementwise(
        _read_pair(PLACE), "=r,r", [at], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip
    return pair.expand_dims(4)


@gluon.jit
def _step(slot, words_at, pairs_at, PACKED: gl.constexpr):
    """Reads what `_ask` had copied: the words of both rows, and their scales."""
    step = (_words(words_at + slot, 0), _words(words_at + slot, 512))
    if PACKED:
        step += (_pair(pairs_at + slot, 1024), _pair(pairs_at + slot, 1088))
    return step


@gluon.jit
def _tokens(x, offset, GROUPS: gl.constexpr, QUADS: gl.constexpr):
    """Loads a piece's columns of x, QUADS times four words of each of GROUPS groups of 8 rows."""
    words = ()
    for t in gl.static_range(GROUPS):
        for i in gl.static_range(QUADS):
            words += (gl.load(x[t] + (offset + 4 * i)),)
    return words


@gluon.jit
def _ordered(words, COUNT: gl.constexpr, PACKED: gl.constexpr):
    """Returns what `_tokens` loaded in the order of the weight's decoded elements."""
    ordered = ()
    for i in gl.static_range(COUNT):
        if PACKED:
            ordered += (gl.inline_asm_elementwise(_ORDER, _OF_ORDER, [words[i]], dtype=gl.int32, is_pure=True, pack=4),)
        else:
            ordered += (words[i],)
    return ordered


@gluon.jit
def _fp8_values(words):
    return gl.inline_asm_elementwise(
        _DECODE_FP8, _OF_DECODE_FP8, [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=4
    )


@gluon.jit
def _nvfp4_values(words, pair):
    return gl.inline_asm_elementwise(
        _DECODE_NVFP4, _OF_DECODE_NVFP4, [words, pair], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True,
        pack=4,
    )  # fmt: skip


@gluon.jit
def _products(sums, step, x, FIRST: gl.constexpr, GROUPS: gl.constexpr, PACKED: gl.constexpr):
    """Returns the sums from FIRST on, one for each group of 8 rows of x, with the products of a step."""
    out = ()
    if PACKED:
        a0, a1, a2, a3 = _nvfp4_values(step[0], step[2])
        b0, b1, b2, b3 = _nvfp4_values(step[1], step[3])
    else:
        a0, a1 = _fp8_values(step[0])
        b0, b1 = _fp8_values(step[1])
    for t in gl.static_range(GROUPS):
        if PACKED:
            more, others = gl.inline_asm_elementwise(
                _MMA_NVFP4, _OF_MMA_NVFP4,
                [a0, a1, a2, a3, b0, b1, b2, b3, x[4 * t], x[4 * t + 1], x[4 * t + 2], x[4 * t + 3], sums[FIRST + t]],
                dtype=(gl.float32, gl.float32), is_pure=True, pack=4,
            )  # fmt: skip
        else:
            more, others = gl.inline_asm_elementwise(
                _MMA_FP8, _OF_MMA_FP8, [a0, a1, b0, b1, x[2 * t], x[2 * t + 1], sums[FIRST + t]],
                dtype=(gl.float32, gl.float32), is_pure=True, pack=4,
            )  # fmt: skip
        out += (more + others,)
    return out


@gluon.jit
def _epilogue(y, other, EPILOGUE: gl.constexpr):
    """`fxquant.kernels.linear.triton_few_rows.epilogue`."""
    if EPILOGUE == _ADD:
        y = y + other
    elif EPILOGUE == _SILU_MUL:
        y = other / (1.0 + gl.exp(-other)) * y
    elif EPILOGUE == _GELU:
        y = y * 0.5 * (gl.erf(y * _SQRT_HALF) + 1.0)
    else:
        gl.static_assert(EPILOGUE == _GELU_TANH)
        y = y / (1.0 + gl.exp(-(y + y * _CUBE * y * y) * (2.0 * _SQRT_2_PI)))
    return y


@gluon.jit
def _added(at, WK: gl.constexpr, APART: gl.constexpr):
    """Adds what the warps left at `at`, each APART bytes behind the one before."""
    out = _words(at, 0).to(gl.float32, bitcast=True)
    for i in gl.static_range(1, WK):
        out = out + _words(at, i * APART).to(gl.float32, bitcast=True)
    return out


@gluon.jit
def _store(
    sums, shared, words_at, n, mine, wk, lane, word, scale, added, other, y, M, N, HAS_BIAS: gl.constexpr,
    EPILOGUE: gl.constexpr, GROUPS: gl.constexpr, TILES: gl.constexpr, WK: gl.constexpr, APART: gl.constexpr,
):  # fmt: skip
    """Adds the sums of the warps and stores them, times `scale`, plus `added`, through an EPILOGUE; a warp has a tile.

    Of a lane's four sums two are of its upper row of the weight `n`, by two rows of x. `mine` says that the tile is one
    of the program's share.
    """
    gl.static_assert((TILES <= WK) & (TILES * 512 <= APART))
    at = shared + (gl.minimum(wk, TILES - 1) * 512 + lane * 16 + word * 0)
    _run("cp.async.wait_all; bar.warp.sync 0xffffffff; // $0")
    for t in gl.static_range(GROUPS):
        if t > 0:
            _run("bar.sync 0; // $0")
        for i in gl.static_range(TILES):
            gl.inline_asm_elementwise(
                _write(512 * i), "=r,=r,=r,=r,r,r,r,r,f,f,f,f", [words_at, sums[i * GROUPS + t]], dtype=gl.int32,
                is_pure=False, pack=4,
            )  # fmt: skip
        _run("bar.sync 0; // $0")
        m = t * 8 + lane % 4 * 2 + word % 2
        stored = (m < M) & mine
        place = m * N + n
        out = _added(at, WK, APART) * scale
        if HAS_BIAS:
            out = out + added
        out = out.to(y.dtype.element_ty)
        if EPILOGUE != _NONE:
            more = out.to(gl.float32)
            if EPILOGUE <= _SILU_MUL:
                more = gl.load(other + place, mask=stored, other=0.0).to(gl.float32)
            out = _epilogue(out.to(gl.float32), more, EPILOGUE).to(y.dtype.element_ty)
        gl.store(y + place, out, mask=stored)


@gluon.jit(
    do_not_specialize=["M", "N", "UNITS"], do_not_specialize_on_alignment=["blocks", "w_scale", "bias", "other", "y"]
)
def direct_kernel(
    x, w, blocks, w_scale, bias, other, y, M, N, UNITS,
    FACTOR: gl.constexpr, PACKED: gl.constexpr, BY_ROW: gl.constexpr, HAS_BIAS: gl.constexpr, EPILOGUE: gl.constexpr,
    GROUPS: gl.constexpr, TILES: gl.constexpr, WK: gl.constexpr, DEPTH: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Computes a program's share of the N / 16 tiles of columns of y [M, N], at most TILES; M is up to 8 x GROUPS.

    x and w are words of four bytes, w [N, 16 x UNITS]; `blocks` has pairs of e4m3 scales, [N, 4 x UNITS], if PACKED.
    UNITS is a multiple of WK. Sums are multiplied by FACTOR and the weight's scales of its tensor or rows.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, 1, 1, 4], [1, 1, 1, 32, 1], [1, 1, WK, 1, 1], [4, 3, 2, 1, 0])
    IN_3: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT))
    IN_2: gl.constexpr = gl.SliceLayout(0, IN_3)
    word = gl.arange(0, 4, gl.SliceLayout(0, IN_2))
    word = word.expand_dims(0).expand_dims(0).expand_dims(0).expand_dims(0)
    lane = gl.arange(0, 32, gl.SliceLayout(1, IN_2))
    lane = lane.expand_dims(1).expand_dims(0).expand_dims(0).expand_dims(0)
    wk = gl.arange(0, WK, gl.SliceLayout(1, gl.SliceLayout(2, IN_3)))
    wk = wk.expand_dims(1).expand_dims(2).expand_dims(0).expand_dims(0)
    QUADS: gl.constexpr = 4 if PACKED else 2
    SLOT: gl.constexpr = 1152 if PACKED else 1024
    w_row = UNITS * 16
    s_row = UNITS * 4
    pieces = UNITS // WK
    first = gl.program_id(0) * (N // 16) // gl.num_programs(0)
    tiles = (gl.program_id(0) + 1) * (N // 16) // gl.num_programs(0) - first
    first *= 16
    k = wk * 16 + lane % 4 * 4
    shared = _run(_reserve(WK * DEPTH * SLOT))
    of_warp = shared + (wk * (DEPTH * SLOT) + word * 0)
    words_at = of_warp + lane * 16
    w += first.to(gl.int64) * w_row + gl.max(lane // 4 * w_row + k + word * 0, 4)
    pairs_at = words_at
    queue = (gl.max(words_at, 4), gl.max(of_warp + lane * 4, 4))
    if PACKED:
        pairs_at = gl.max(of_warp + (lane // 4 * 8 + lane % 4 * 2), 4)
        blocks += first.to(gl.int64) * s_row + gl.max(lane // 2 * s_row + wk * 4 + lane % 2 * 2 + word * 0, 4)
    x_at = ()
    for t in gl.static_range(GROUPS):
        m = gl.minimum(t * 8 + lane // 4, M - 1)
        x_at += (x + (m * (w_row * QUADS) + (k * QUADS + word)),)
    if EARLY:
        _run("griddepcontrol.launch_dependents; // $0")
    for i in gl.static_range(DEPTH - 1):
        _ask(i // TILES, i % TILES, pieces, tiles, i * SLOT, queue, w, blocks, w_row, s_row, WK, PACKED)
    if EARLY:
        _run("griddepcontrol.wait; // $0")
    mine = wk < tiles
    n = first + wk * 16 + lane // 4 + word // 2 * 8
    scale = gl.load(w_scale + n, mask=mine, other=0.0) if BY_ROW else gl.load(w_scale + n * 0)
    sums = ()
    for _ in gl.static_range(GROUPS * TILES):
        sums += (gl.zeros([1, 1, WK, 32, 4], gl.float32, LAYOUT),)
    xs = _tokens(x_at, 0, GROUPS, QUADS)
    _run(_wait(DEPTH - 2))
    now = _step(0, words_at, pairs_at, PACKED)
    read = SLOT
    ask = (DEPTH - 1) * SLOT
    for piece in range(0, pieces):
        ordered = _ordered(xs, GROUPS * QUADS, PACKED)
        xs = _tokens(x_at, gl.minimum(piece + 1, pieces - 1) * (16 * WK * QUADS), GROUPS, QUADS)
        more = ()
        for t in gl.static_range(TILES):
            _ask(
                piece + (t + DEPTH - 1) // TILES, (t + DEPTH - 1) % TILES, pieces, tiles, ask, queue, w, blocks, w_row,
                s_row, WK, PACKED,
            )  # fmt: skip
            _run(_wait(DEPTH - 2))
            ahead = _step(read, words_at, pairs_at, PACKED)
            more += _products(sums, now, ordered, t * GROUPS, GROUPS, PACKED)
            now = ahead
            read = gl.where(read == (DEPTH - 1) * SLOT, 0, read + SLOT)
            ask = gl.where(ask == (DEPTH - 1) * SLOT, 0, ask + SLOT)
        sums = more
    added = gl.load(bias + n, mask=mine, other=0.0).to(gl.float32) if HAS_BIAS else scale
    _store(
        sums, shared, words_at, n, mine, wk, lane, word, scale * FACTOR, added, other, y, M, N, HAS_BIAS, EPILOGUE,
        GROUPS, TILES, WK, DEPTH * SLOT,
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def compiled(
    device: int, types: tuple[torch.dtype, ...], constants: tuple[Any, ...], tiles: Direct, early: bool
) -> Any:
    """The kernel for the types of `w_scale`, `bias`, `other` and `y`, and for the constants before GROUPS and it.

    Whatever the sizes and where tensors lie it is the same, so that Triton need not look for it in each launch.
    """
    with torch.cuda.device(device):
        return direct_kernel.warmup(
            torch.int32, torch.int32, torch.int16, *types, 0, 0, 0, *constants, *tiles, early, grid=(1,),
            num_warps=tiles.warps, launch_pdl=early,
        )  # fmt: skip


def scaled_mm(
    x: Tensor, b: Parts, b_spec: QuantSpec, bias: Tensor | None, out_dtype: torch.dtype, tiles: Direct,
    epilogue: str | None = None, other: Tensor | None = None, early: bool = False,
) -> Tensor:  # fmt: skip
    """`triton_weight_only.scaled_mm` of x in bfloat16, where `Direct.of` gives `tiles`. Launches at once."""
    w, w_scale, packed = _readable(b[0]), b[-1].contiguous(), is_packed(b_spec)
    blocks = _readable(b[1]) if packed else w_scale
    (size_m, size_k), (size_n, row_bytes), x = x.shape, w.shape, _readable(x)
    y = torch.empty((size_m, size_n), dtype=out_dtype, device=x.device)
    bias = None if bias is None else bias.contiguous()
    other = None if other is None else other.contiguous()
    read = [w_scale, w_scale if bias is None else bias, w_scale if other is None else other, y]
    factor = 128 / b_spec.unit_amax if packed else 1.0
    constants = (factor, packed, w_scale.ndim > 1, bias is not None, 0 if epilogue is None else _EPILOGUES[epilogue])
    kernel = compiled(x.device.index, tuple(tensor.dtype for tensor in read), constants, tiles, early)
    assert size_m <= 8 * tiles.groups and size_k == row_bytes * (2 if packed else 1)
    with torch.cuda.device(x.device):
        kernel[(tiles.programs(size_n), 1, 1)](
            x, w, blocks, *read, size_m, size_n, row_bytes // 64, *constants, *tiles, early
        )
    return y


def _readable(x: Tensor) -> Tensor:
    """Returns x dense and aligned to the 16 bytes that a lane reads, as a view of others may not be."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()
