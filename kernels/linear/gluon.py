# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
"""A kernel for few rows of bfloat16 x on Hopper, in Triton's Gluon: y [M, N] = x [M, K] w [N, K]^T, w quantized.

What `fxquant.kernels.linear.triton_weight_only` computes, with less between memory and tensor cores. `mma.sync` has a
lane hold, of a row, two elements here and two there of 16 that are multiplied at a time. But K may be summed in any
order: a lane reads 16 bytes of a row of the weight side by side, and says that these are its elements of several such
products; of x it reads the same columns. So the weight goes from memory to registers in whole sectors, and nothing
through shared memory but sums. The layout of registers is that of the instruction, which Triton does not promise for
its own tensors; therefore Gluon.

Tensors are [TILES, WN, WK, 32 lanes, 4 words]: WN warps side by side have TILES tiles of 16 rows of the weight each, WK
share K. Lane l has rows l // 4 and l // 4 + 8 of a tile; of K, 16 bytes from (l % 4) * 16 on in each of PIECES pieces
of 64.

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
    """Products m16n8k16 one after another: $0 to $3 become $c to $(c + 3) and the sum of all."""
    text, sums = "", ", ".join(f"${c + i}" for i in range(4))
    for *a, b0, b1 in fragments:
        rows = ", ".join(f"${i}" for i in a)
        text += "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, "
        text += f"{{{rows}}}, {{${b0}, ${b1}}}, {{{sums}}};\n"
        sums = "$0, $1, $2, $3"
    return text


_DECODE_FP8, _DECODE_NVFP4 = gl.constexpr(_decode_fp8()), gl.constexpr(_decode_nvfp4())
_ORDER = gl.constexpr("""prmt.b32 $0, $4, $6, 0x5410; prmt.b32 $1, $4, $6, 0x7632;
prmt.b32 $2, $5, $7, 0x5410; prmt.b32 $3, $5, $7, 0x7632;""")
"""8 elements of x in pairs (0, 1), (2, 3), (4, 5), (6, 7) become (0, 4), (1, 5), (2, 6), (3, 7)."""
_MMA_FP8 = gl.constexpr(_mma([(4 + i, 12 + i, 8 + i, 16 + i, 20 + 2 * i, 21 + 2 * i) for i in range(4)], 28))
"""The words of a row are decoded to $4 to $11, those of the row 8 below to $12 to $19; those of x are $20 to $27."""
_MMA_NVFP4 = gl.constexpr(_mma(
    [(4 + j + i, 20 + j + i, 8 + j + i, 24 + j + i, 36 + 4 * i + j // 4, 37 + 4 * i + j // 4)
     for i in range(4) for j in (0, 8)], 52,
))  # fmt: skip
"""The words of a row are decoded to $4 to $19, those of the row 8 below to $20 to $35; x in its order is $36 to $51."""


def _registers(kind: str, results: int, words: int, floats: int = 0) -> str:
    """The constraints of an instruction's registers; results are written before all else is read."""
    return ",".join([f"=&{kind}"] * results + ["r"] * words + ["f"] * floats)


_OF_DECODE_FP8, _OF_DECODE_NVFP4, _OF_ORDER = (
    gl.constexpr(_registers("r", results, words)) for results, words in ((8, 4), (16, 8), (4, 4))
)
_OF_MMA_FP8, _OF_MMA_NVFP4 = (gl.constexpr(_registers("f", 4, words, 4)) for words in (24, 48))


@gluon.jit
def _weights(w, below, PIECES: gl.constexpr):
    """Loads the words of each piece of a lane's row, and of the row 8 below, `below` words further on."""
    words = ()
    for c in gl.static_range(PIECES):
        words += (
            gl.load(w + c * 16, eviction_policy="evict_first"),
            gl.load(w + below + c * 16, eviction_policy="evict_first"),
        )
    return words


@gluon.jit
def _scales(blocks, below, PIECES: gl.constexpr, PACKED: gl.constexpr):
    """Loads the two scales of each piece likewise, one number."""
    pairs = ()
    if PACKED:
        for c in gl.static_range(PIECES):
            pairs += (gl.load(blocks + c * 4), gl.load(blocks + below + c * 4))
    return pairs


@gluon.jit
def _tokens(x, offset, GROUPS: gl.constexpr, PIECES: gl.constexpr, QUADS: gl.constexpr):
    """Loads the same columns of x, QUADS times four words for each piece of each of GROUPS groups of 8 rows."""
    words = ()
    for t in gl.static_range(GROUPS):
        for c in gl.static_range(PIECES):
            for i in gl.static_range(QUADS):
                words += (gl.load(x[t] + (offset + (c * 16 * QUADS + 4 * i))),)
    return words


@gluon.jit
def _fp8_values(words):
    return gl.inline_asm_elementwise(
        _DECODE_FP8, _OF_DECODE_FP8, [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=4
    )


@gluon.jit
def _nvfp4_values(words, pair):
    return gl.inline_asm_elementwise(
        _DECODE_NVFP4, _OF_DECODE_NVFP4, [words, pair.to(gl.int32)], dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def _ordered(words):
    return gl.inline_asm_elementwise(_ORDER, _OF_ORDER, [words], dtype=gl.int32, is_pure=True, pack=4)


@gluon.jit
def _products(sums, w, pairs, x, GROUPS: gl.constexpr, PIECES: gl.constexpr, PACKED: gl.constexpr):
    """Adds to the sums of each group of 8 rows of x the products of what `_weights`, `_scales` and `_tokens` loaded."""
    for c in gl.static_range(PIECES):
        if PACKED:
            a0, a1, a2, a3 = _nvfp4_values(w[2 * c], pairs[2 * c])
            b0, b1, b2, b3 = _nvfp4_values(w[2 * c + 1], pairs[2 * c + 1])
        else:
            a0, a1 = _fp8_values(w[2 * c])
            b0, b1 = _fp8_values(w[2 * c + 1])
        out = ()
        for t in gl.static_range(GROUPS):
            if PACKED:
                x0 = _ordered(x[(t * PIECES + c) * 4])
                x1 = _ordered(x[(t * PIECES + c) * 4 + 1])
                x2 = _ordered(x[(t * PIECES + c) * 4 + 2])
                x3 = _ordered(x[(t * PIECES + c) * 4 + 3])
                more = gl.inline_asm_elementwise(
                    _MMA_NVFP4, _OF_MMA_NVFP4, [a0, a1, a2, a3, b0, b1, b2, b3, x0, x1, x2, x3, sums[t]],
                    dtype=gl.float32, is_pure=True, pack=4,
                )  # fmt: skip
            else:
                x0 = x[(t * PIECES + c) * 2]
                x1 = x[(t * PIECES + c) * 2 + 1]
                more = gl.inline_asm_elementwise(
                    _MMA_FP8, _OF_MMA_FP8, [a0, a1, b0, b1, x0, x1, sums[t]], dtype=gl.float32, is_pure=True, pack=4
                )
            out += (more,)
        sums = out
    return sums


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
def _all_products(
    sums, ahead, w, blocks, x, w_row, s_row, steps, PACKED: gl.constexpr, GROUPS: gl.constexpr, PIECES: gl.constexpr,
    W_STEP: gl.constexpr, UNROLLED: gl.constexpr,
):  # fmt: skip
    """Adds the products of all steps, W_STEP words apart, to `sums`. What a step reads is asked for in the one before.

    `ahead` is what the first reads. UNROLLED steps take turns with two sets of registers, which are never copied.
    """
    QUADS: gl.constexpr = 4 if PACKED else 2
    ws, ss, xs = ahead
    if UNROLLED:
        for half in range(0, (steps - 1) // 2):
            at = half * (2 * W_STEP) + W_STEP
            ws2 = _weights(w + at, 8 * w_row, PIECES)
            ss2 = _scales(blocks + at // 4, 8 * s_row, PIECES, PACKED)
            xs2 = _tokens(x, at * QUADS, GROUPS, PIECES, QUADS)
            sums = _products(sums, ws, ss, xs, GROUPS, PIECES, PACKED)
            at += W_STEP
            ws = _weights(w + at, 8 * w_row, PIECES)
            ss = _scales(blocks + at // 4, 8 * s_row, PIECES, PACKED)
            xs = _tokens(x, at * QUADS, GROUPS, PIECES, QUADS)
            sums = _products(sums, ws2, ss2, xs2, GROUPS, PIECES, PACKED)
        if steps % 2 == 0:
            at = (steps - 1) * W_STEP
            ws2 = _weights(w + at, 8 * w_row, PIECES)
            ss2 = _scales(blocks + at // 4, 8 * s_row, PIECES, PACKED)
            xs2 = _tokens(x, at * QUADS, GROUPS, PIECES, QUADS)
            sums = _products(sums, ws, ss, xs, GROUPS, PIECES, PACKED)
            sums = _products(sums, ws2, ss2, xs2, GROUPS, PIECES, PACKED)
        else:
            sums = _products(sums, ws, ss, xs, GROUPS, PIECES, PACKED)
    else:
        for step in range(1, steps):
            at = step * W_STEP
            ws2 = _weights(w + at, 8 * w_row, PIECES)
            ss2 = _scales(blocks + at // 4, 8 * s_row, PIECES, PACKED)
            xs2 = _tokens(x, at * QUADS, GROUPS, PIECES, QUADS)
            sums = _products(sums, ws, ss, xs, GROUPS, PIECES, PACKED)
            ws = ws2
            ss = ss2
            xs = xs2
        sums = _products(sums, ws, ss, xs, GROUPS, PIECES, PACKED)
    return sums


@gluon.jit
def _store(
    sums, n, lane, word, scale, added, other, y, M, N, HAS_BIAS: gl.constexpr, EPILOGUE: gl.constexpr,
    GROUPS: gl.constexpr,
):  # fmt: skip
    """Adds the sums of the warps that share K and stores them, times `scale`, plus `added`, through an EPILOGUE.

    Of a lane's four sums two are of its upper row of the weight `n`, by two rows of x.
    """
    n = gl.max(n, 2)
    scale = gl.max(scale, 2)
    added = gl.max(added, 2)
    for t in gl.static_range(GROUPS):
        m = gl.max(t * 8 + lane % 4 * 2 + word % 2, 2)
        place = m * N + n
        out = gl.sum(sums[t], 2) * scale
        if HAS_BIAS:
            out = out + added
        out = out.to(y.dtype.element_ty)
        if EPILOGUE != _NONE:
            more = out.to(gl.float32)
            if EPILOGUE <= _SILU_MUL:
                more = gl.load(other + place, mask=m < M, other=0.0).to(gl.float32)
            out = _epilogue(out.to(gl.float32), more, EPILOGUE).to(y.dtype.element_ty)
        gl.store(y + place, out, mask=m < M)


@gluon.jit(
    do_not_specialize=["M", "N", "UNITS"], do_not_specialize_on_alignment=["blocks", "w_scale", "bias", "other", "y"]
)
def direct_kernel(
    x, w, blocks, w_scale, bias, other, y, M, N, UNITS,
    FACTOR: gl.constexpr, PACKED: gl.constexpr, BY_ROW: gl.constexpr, HAS_BIAS: gl.constexpr, EPILOGUE: gl.constexpr,
    GROUPS: gl.constexpr, TILES: gl.constexpr, PIECES: gl.constexpr, WN: gl.constexpr, WK: gl.constexpr,
    UNROLLED: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Computes 16 x TILES x WN columns of y [M, N], M up to 8 x GROUPS, N a multiple of the columns.

    x and w are words of four bytes, w [N, 16 x UNITS]; `blocks` has pairs of e4m3 scales, [N, 4 x UNITS], if PACKED.
    UNITS is a multiple of PIECES x WK. Sums are multiplied by FACTOR and the weight's scales of its tensor or rows.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, 1, 1, 4], [1, 1, 1, 32, 1], [1, WN, WK, 1, 1], [4, 3, 2, 1, 0])
    IN_4: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    IN_3: gl.constexpr = gl.SliceLayout(0, IN_4)
    IN_2: gl.constexpr = gl.SliceLayout(0, IN_3)
    word = gl.arange(0, 4, gl.SliceLayout(0, IN_2))
    word = word.expand_dims(0).expand_dims(0).expand_dims(0).expand_dims(0)
    lane = gl.arange(0, 32, gl.SliceLayout(1, IN_2))
    lane = lane.expand_dims(1).expand_dims(0).expand_dims(0).expand_dims(0)
    wk = gl.arange(0, WK, gl.SliceLayout(1, gl.SliceLayout(2, IN_3)))
    wk = wk.expand_dims(1).expand_dims(2).expand_dims(0).expand_dims(0)
    wn = gl.arange(0, WN, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, IN_4))))
    wn = wn.expand_dims(1).expand_dims(2).expand_dims(3).expand_dims(0)
    tile = gl.arange(0, TILES, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, LAYOUT)))))
    tile = tile.expand_dims(1).expand_dims(2).expand_dims(3).expand_dims(4)
    W_STEP: gl.constexpr = 16 * PIECES * WK
    QUADS: gl.constexpr = 4 if PACKED else 2
    w_row = UNITS * 16
    s_row = UNITS * 4
    first = gl.program_id(0) * (16 * TILES * WN)
    down = (wn * TILES + tile) * 16 + lane // 4
    k = wk * (16 * PIECES) + lane % 4 * 4
    w_at = w + first.to(gl.int64) * w_row + (down * w_row + (k + word))
    s_at = blocks
    if PACKED:
        s_at = blocks + first.to(gl.int64) * s_row + (down * s_row + (wk * (4 * PIECES) + lane % 4))
    x_at = ()
    for t in gl.static_range(GROUPS):
        m = gl.minimum(t * 8 + lane // 4, M - 1)
        x_at += (x + (m * (w_row * QUADS) + (k * QUADS + word)),)
    if EARLY:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    ws = _weights(w_at, 8 * w_row, PIECES)
    ss = _scales(s_at, 8 * s_row, PIECES, PACKED)
    if EARLY:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    n = first + down + word // 2 * 8
    scale = gl.load(w_scale + n) if BY_ROW else gl.load(w_scale + n * 0)
    added = gl.load(bias + n).to(gl.float32) if HAS_BIAS else scale
    sums = ()
    for _ in gl.static_range(GROUPS):
        sums += (gl.zeros([TILES, WN, WK, 32, 4], gl.float32, LAYOUT),)
    xs = _tokens(x_at, 0, GROUPS, PIECES, QUADS)
    ahead = (ws, ss, xs)
    sums = _all_products(
        sums, ahead, w_at, s_at, x_at, w_row, s_row, UNITS // (PIECES * WK), PACKED, GROUPS, PIECES, W_STEP, UNROLLED
    )
    _store(sums, n, lane, word, scale * FACTOR, added, other, y, M, N, HAS_BIAS, EPILOGUE, GROUPS)


@functools.lru_cache(maxsize=256)
def compiled(
    device: int, types: tuple[torch.dtype, ...], constants: tuple[Any, ...], tiles: Direct, early: bool
) -> Any:
    """The kernel for the types of `w_scale`, `bias`, `other` and `y`, and for the constants before GROUPS and it.

    Whatever the sizes and where tensors lie it is the same, so that Triton need not look for it in each launch.
    """
    warps = tiles.warps_n * tiles.warps_k
    with torch.cuda.device(device):
        return direct_kernel.warmup(
            torch.int32, torch.int32, torch.int16, *types, 0, 0, 0, *constants, *tiles, early, grid=(1,),
            num_warps=warps, launch_pdl=early,
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
        kernel[(size_n // tiles.columns, 1, 1)](
            x, w, blocks, *read, size_m, size_n, row_bytes // 64, *constants, *tiles, early
        )
    return y


def _readable(x: Tensor) -> Tensor:
    """Returns x dense and aligned to the 16 bytes that a lane reads, as a view of others may not be."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()
