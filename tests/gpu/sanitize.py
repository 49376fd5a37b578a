"""Launches the Triton kernels of casts, producers, GEMMs, few rows, experts and attention at small and odd sizes, for
compute-sanitizer to watch: `make sanitize`.

    compute-sanitizer --tool memcheck --target-processes all python tests/gpu/sanitize.py [casts | block_casts | ...]

Without names each family runs in a process of its own, all at the same time: most of it is Triton's compilation. What
the kernels compute is for the other tests; here every access must lie within its tensor. torch must not take its
tensors from larger blocks of its own: PYTORCH_NO_CUDA_MEMORY_CACHING=1, which is set here if it is not.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import cycle, islice
from typing import Any

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import torch
from torch import Tensor

from fxquant.compat.device import knows_gluon
from fxquant.formats import QuantSpec
from fxquant.kernels.attention import gluon_op as gluon_attention
from fxquant.kernels.attention import triton_backward, triton_forward
from fxquant.kernels.attention import triton_cast as triton_head_cast
from fxquant.kernels.attention.choice import Scaling
from fxquant.kernels.attention.scores import Scores
from fxquant.kernels.cast import amax as triton_amax
from fxquant.kernels.cast import reference, triton_cast
from fxquant.kernels.cast.choice import supports_groups
from fxquant.kernels.cast.producers import PRODUCERS
from fxquant.kernels.grouped import gluon_op as grouped_gluon_op
from fxquant.kernels.grouped import triton_cast as triton_grouped_cast
from fxquant.kernels.grouped.ops import grouped_scaled_mm
from fxquant.kernels.linear import few_rows, triton_gemm, triton_weight_only
from fxquant.kernels.linear import gluon_op as linear_gluon_op
from fxquant.kernels.linear import triton_few_rows as triton_decode
from fxquant.kernels.linear.few_rows import MULTIPROCESSORS
from fxquant.kernels.linear.weight_only import Direct, is_packed
from fxquant.kernels.state import triton as triton_delayed

DEVICE = "cuda"
SHAPES = ((1, 8), (33, 50), (200, 392))
"""M=1; K that no vector, no block of 32 and none of 128 divides; several tiles of either axis, cut short."""
CASTS = (
    ("per_tensor_e4m3", "per_tensor_e5m2"), ("per_row_e4m3(pow2,torchao)", "per_row_e5m2"), (None, "per_row_e4m3"),
    ("per_row_e4m3", "mxfp8_2d_e4m3"),
)  # fmt: skip
BLOCK_CASTS = (
    ("mxfp8_e4m3", "mxfp8_e5m2"), ("mxfp8_2d_e4m3", "mxfp8_2d_e4m3"), (None, "mxfp8_e4m3"),
    ("block_1x128_e4m3(pow2)", "block_1x128_e4m3"), ("block_128x128_e4m3(pow2)", "block_128x128_e4m3(pow2)"),
)  # fmt: skip
PRODUCED = ("per_tensor_e4m3", "per_tensor_e5m2(slot=1)", "per_row_e4m3", "block_1x128_e4m3(pow2)", "mxfp8_e4m3")
"""The first producer takes all, those behind it one after the other."""
GEMMS = (
    # M, K, N, activation, bias, residual, dtype of the result
    (1, 272, 8, "relu", True, False, torch.bfloat16),
    (8, 128, 136, "silu", False, True, torch.float16),
    (300, 400, 528, "gelu_tanh", True, True, torch.bfloat16),
)
DECODED = (
    ("per_tensor_e4m3", "per_tensor_e4m3"), ("per_row_e4m3(pow2,torchao)", "per_row_e4m3"),
    ("block_1x128_e4m3(pow2)", "block_128x128_e4m3(pow2)"),
)  # fmt: skip
WEIGHT_ONLY = ("per_row_e4m3(torchao)", "nvfp4")
DECODE_SHAPES = ((1, 272, 8), (3, 200, 136), (17, 1100, 8), (64, 392, 264))
"""M, K, N: a product of one row, N down to 8, and K that is split over programs."""
EXPERTS = (
    ("per_tensor_e4m3", "per_tensor_e4m3", "per_tensor_e5m2"), ("per_row_e4m3", "per_row_e4m3", "per_row_e5m2"),
    ("block_1x128_e4m3(pow2)", "block_128x128_e4m3(pow2)", "block_1x128_e4m3(pow2)"),
)  # fmt: skip
SPLITS = ([0, 1, 38, 38, 165], [0, 0, 0], [128, 128, 257])
ATTENTION: tuple[tuple[int, int, int, int, int, int, bool, str | None, Any, float], ...] = (
    # B, H, Hkv, Sq, Sk, D, causal, mask, scales (None: not quantized), dropout
    (1, 2, 1, 100, 77, 64, False, None, "head", 0.0),
    (2, 2, 2, 33, 150, 128, True, None, "block", 0.0),
    (1, 2, 1, 1, 130, 256, True, None, "tensor", 0.0),
    (2, 2, 2, 40, 50, 128, False, "keys", "head", 0.0),
    (1, 2, 2, 40, 50, 128, False, "seen", "block", 0.0),
    (1, 1, 1, 40, 50, 64, True, "added", None, 0.25),
)
ATTENTION_BY_WARPS: tuple[tuple[int, int, int, int, int, bool, Scaling], ...] = (
    # B, H, Hkv, Sq, Sk, causal, scales
    (1, 2, 1, 100, 77, False, "head"), (2, 2, 2, 300, 300, True, "tensor"), (1, 4, 2, 1, 130, True, "head"),
)  # fmt: skip


def noise(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def parsed(text: str | None) -> QuantSpec | None:
    return QuantSpec.parse(text) if text else None


def part(shape: tuple[int, int]) -> Tensor:
    rows, columns = shape
    return noise(rows + 3, columns + 8)[1 : 1 + rows, 5 : 5 + columns]


def quantized(pairs: Iterable[tuple[str | None, str | None]]) -> Iterator[str]:
    """A part of a larger tensor, a dense one, and one that is stored by columns."""
    for texts in pairs:
        row, column = map(parsed, texts)
        for x in (part(SHAPES[0]), noise(*SHAPES[1]), noise(*SHAPES[2][::-1]).t()):
            triton_cast.quantize(x, row, column, amax=triton_amax.tensor_amax)
            yield f"{texts}, {tuple(x.shape)} stored as {x.stride()}"


def casts() -> Iterator[str]:
    yield from quantized(CASTS)
    for text in ("per_tensor_e4m3", "mxfp8_e4m3", "nvfp4"):
        for direction in ("rowwise", "columnwise"):
            torch.ops.fxquant.quantize(noise(0, 64), text, direction)
    yield "empty"


def block_casts() -> Iterator[str]:
    yield from quantized(BLOCK_CASTS)


def produced(texts: dict[str, Iterable[str]]) -> Iterator[str]:
    """Producers by name, with what they are cast to."""
    rows, length = 200, 392
    shapes = {"matrix": (rows, length), "row": (rows, 1), "column": (length,), "heads": (2, 4, rows // 2, 96)}
    for name, formats in texts.items():
        producer = PRODUCERS[name]
        read = producer.read(torch.bfloat16)
        inputs = [noise(*shapes[k], dtype=torch.float32 if k == "row" else read) for k in producer.inputs]
        for text in formats:
            spec = QuantSpec.parse(text)
            scales = [torch.ones(1, device=DEVICE) if spec.is_delayed else None] * producer.results
            triton_cast.produce(name, inputs, spec, spec, scales, scales, spec.is_delayed)
            yield f"{name}, {text}"


def activations() -> Iterator[str]:
    first, *others = (name for name in PRODUCERS if "silu" in name or "gelu" in name)
    yield from produced(
        {first: PRODUCED, **{name: [text] for name, text in zip(others, cycle(PRODUCED), strict=False)}}
    )


def norms() -> Iterator[str]:
    texts = cycle(PRODUCED)
    names = [name for name in PRODUCERS if "silu" not in name and "gelu" not in name]
    yield from produced({name: list(islice(texts, 2)) for name in names})


def gemm() -> Iterator[str]:
    for text, fast in (("per_tensor_e4m3", True), ("per_row_e4m3", True), ("per_tensor_e4m3", False)):
        spec = QuantSpec.parse(text)
        for m, k, n, activation, has_bias, has_residual, dtype in GEMMS:
            a, b = reference.quantize(noise(m, k), spec), reference.quantize(noise(n, k), spec)
            bias = noise(n, dtype=dtype) if has_bias else None
            residual = noise(m, n, dtype=dtype) if has_residual else None
            triton_gemm.scaled_mm(
                a, spec, b, spec, bias, dtype, fast, activation=activation, residual=residual, record=True
            )
            yield f"{text}, {(m, k, n)}, {activation}, fast {fast}"
    for algorithm in ("max", "most_recent"):
        ones, history = torch.ones(7, device=DEVICE), torch.ones(3, 7, device=DEVICE)
        step, backward = (torch.zeros(7, dtype=torch.int64, device=DEVICE) for _ in range(2))
        for run in (triton_delayed.update, triton_delayed.advance):
            run(ones, history, ones.clone(), backward, step, ones, 0.0, algorithm)
        yield f"delayed scales, {algorithm}"


def decode() -> Iterator[str]:
    for texts in DECODED:
        a_spec, b_spec = map(QuantSpec.parse, texts)
        for m, k, n in DECODE_SHAPES:
            x, bias = noise(m, k), noise(n)
            a, b = reference.quantize(x, a_spec), reference.quantize(noise(n, k), b_spec)
            multiplier = [reference.multiplier_from_amax(reference.amax(x), a_spec)]
            sources = [a]
            for given in [[], multiplier] if a_spec.row.family == "per_tensor" else [[]]:
                if few_rows.quantizes_itself(x, a_spec, scaled=bool(given)):
                    sources.append([x, *given])
                else:
                    triton_decode.quantize(x, a_spec, *given)
            for source in sources:
                for term in (None, bias):
                    triton_decode.scaled_mm(source, a_spec, b, b_spec, term, torch.bfloat16, early=term is not None)
            yield f"{texts}, {(m, k, n)}"
    for text in WEIGHT_ONLY:
        spec = QuantSpec.parse(text)
        for m, k, n in DECODE_SHAPES[:3]:
            b = reference.quantize(noise(n, k), spec)
            for term in (None, noise(n)):
                triton_weight_only.scaled_mm(noise(m, k), b, spec, term, torch.bfloat16, early=term is not None)
            yield f"{text} alone, {(m, k, n)}"
        for m, k, n in ((33, 272, 136), (128, 1100, 40)):
            b = reference.quantize(noise(n, k), spec)
            for term in (None, noise(n)):
                triton_weight_only.wide_mm(noise(m, k), b, spec, term, torch.bfloat16)
            yield f"{text} alone, {(m, k, n)}"
        if knows_gluon():
            from fxquant.kernels.linear import gluon

            for m, tiles in ((1, Direct(1, 2, 4, 3)), (9, Direct(2, 3, 8, 5))):
                k, n = 3 * tiles.step, 16 * (MULTIPROCESSORS + 5)  # some programs have two tiles
                b = reference.quantize(noise(n, k * (2 if is_packed(spec) else 1)), spec)
                x, bias, other = noise(m, k * (2 if is_packed(spec) else 1)), noise(n), noise(m, n)
                gluon.scaled_mm(x, b, spec, bias, torch.bfloat16, tiles, "add", other, early=m == 1)
                yield f"{text} alone in Gluon, {(m, k, n)}"


def grouped() -> Iterator[str]:
    k, n = 136, 200
    for input, weight, grad in EXPERTS:
        for ends in SPLITS:
            offs, rows = torch.tensor(ends, dtype=torch.int32, device=DEVICE), ends[-1] + 7
            x, dy, w = noise(rows, k), noise(rows, n), noise(len(ends), n, k)
            for tensor, text, where in ((x, input, offs), (dy, grad, offs), (w, weight, None)):
                spec = QuantSpec.parse(text)
                if supports_groups(spec, ragged=where is not None):
                    triton_grouped_cast.quantize(tensor, where, spec, spec)
            of_x, of_dy, of_w = (x, offs, input), (dy, offs, grad), (w, None, weight)
            for left, right, way in ((of_x, of_w, ("rowwise",) * 2), (of_dy, of_w, ("rowwise", "columnwise")),
                                     (of_dy, of_x, ("columnwise",) * 2)):  # fmt: skip
                a, b = (torch.ops.fxquant.split_quantize(*s, d) for s, d in zip((left, right), way, strict=True))
                for fast in (False, True):
                    grouped_scaled_mm.best(a, b, offs, left[2], right[2], torch.float32, fast)
            triton_grouped_cast.clear(noise(rows, n), offs)
            triton_grouped_cast.clear(noise(len(ends), n, k), offs)
            yield f"{(input, weight, grad)}, groups to {ends}"
    offs = torch.tensor([3, 3, 70], dtype=torch.int32, device=DEVICE)
    spec = QuantSpec.parse("mxfp8_e4m3")
    triton_grouped_cast.quantize(noise(77, 50), offs, spec, spec)
    yield spec.format


def blocks() -> Iterator[str]:
    if not knows_gluon():
        return
    lines, tiles = QuantSpec.parse("block_1x128_e4m3"), QuantSpec.parse("block_128x128_e4m3")
    for m, k, n in ((1, 128, 16), (200, 384, 272), (1000, 256, 144)):
        a = reference.quantize(noise(m, k), lines)
        for spec in (lines, tiles):
            for dtype in (torch.bfloat16, torch.float32):
                linear_gluon_op.block_mm(a, reference.quantize(noise(n, k), spec), spec is tiles, dtype)
        yield f"blocks of 128, {(m, k, n)}"
    for ends in ([5, 37, 165, 200], [0, 128, 128, 1024], [1500, 1500, 3000, 3001]):
        offs, k, n = torch.tensor(ends, dtype=torch.int32, device=DEVICE), 256, 144
        weights = [reference.quantize(noise(n, k), tiles) for _ in ends]
        payload = torch.stack([parts[0].view(torch.uint8) for parts in weights]).view(torch.float8_e4m3fn)
        w = [payload, torch.stack([parts[1] for parts in weights])]
        grouped_gluon_op.grouped_block_mm(reference.quantize(noise(ends[-1] + 7, k), lines), w, offs, torch.bfloat16)
        padded = (offs + 127) // 128 * 128
        sides = [reference.quantize(noise(rows, int(padded[-1])), lines) for rows in (n, k)]
        grouped_gluon_op.grouped_block_mm(sides[0], sides[1], padded, torch.bfloat16)
        yield f"blocks of 128, groups to {ends}"


def attention() -> Iterator[str]:
    for case in ATTENTION:
        batches, heads, kv_heads, queries, keys, width, causal, kind, scaling, dropout = case
        q, k, v = (noise(batches, *s, width) for s in ((heads, queries), (kv_heads, keys), (kv_heads, keys)))
        mask = noise(heads, queries, keys) if kind else None
        if kind == "keys":
            mask = noise(batches, 1, 1, keys) > 0
        elif kind == "seen":
            assert mask is not None
            mask = mask > 0
        seed = torch.ones(1, dtype=torch.int64, device=DEVICE) if dropout else None
        scores = Scores(causal=causal, scale=width**-0.5, mask=mask, dropout=dropout, seed=seed)
        if scaling is None:
            o, lse = triton_forward.forward([[q], [k], [v]], scores, torch.bfloat16)
            triton_backward.wide_backward(noise(*o.shape), (q, k, v), o, lse, scores)
        else:
            if scaling != "tensor":
                for x, transposed in ((q, False), (v.transpose(1, 2).contiguous().transpose(1, 2), True)):
                    triton_head_cast.quantize_heads(x, 1, transposed, scaling)
            s_amax = cast = None
            given: list[torch.Tensor] = []
            if scaling == "tensor":  # delayed
                *given, s_amax, do_amax, dp_amax = torch.ones(5, device=DEVICE).split(1)
                cast = triton_backward.GradientCast(
                    dtype=torch.float8_e5m2, multiplier=given[0], amax=do_amax, scores_amax=dp_amax
                )
            q8, q_scale, k8, k_scale, v8, v_scale = triton_head_cast.quantize_qkv(q, k, v, scaling, *given)
            operands = ((q8, q_scale), (k8, k_scale), (v8, v_scale))
            o, lse = triton_forward.forward(operands, scores, torch.bfloat16, scaling=scaling, s_amax=s_amax)
            triton_backward.backward(noise(*o.shape), operands, o, lse, scores, scaling, cast)
        yield str(case)


def attention_by_warps() -> Iterator[str]:
    if not knows_gluon():
        return
    for case in ATTENTION_BY_WARPS:
        batches, heads, kv_heads, queries, keys, causal, scaling = case
        q, k, v = (noise(batches, *s, 128) for s in ((heads, queries), (kv_heads, keys), (kv_heads, keys)))
        scores = Scores(causal=causal, scale=128**-0.5, mask=None, dropout=0.0, seed=None)
        given = torch.ones(2, device=DEVICE).split(1) if scaling == "tensor" else ()
        parts = triton_head_cast.quantize_qkv(q, k, v, scaling, *given)
        operands = tuple(zip(parts[::2], parts[1::2], strict=True))
        o, lse, _ = gluon_attention.forward(operands, scores, torch.bfloat16, scaling, record=True)
        triton_backward.backward_by_warps(noise(*o.shape), operands, o, lse, scores, scaling)
        yield f"{case} by warps"


FAMILIES = {
    each.__name__: each
    for each in (activations, attention, attention_by_warps, blocks, grouped, norms, casts, block_casts, gemm, decode)
}  # fmt: skip


def main(names: list[str]) -> int:
    if not names:
        children = [subprocess.Popen([sys.executable, __file__, name]) for name in FAMILIES]
        return max(abs(child.wait()) for child in children)
    torch.manual_seed(0)
    start = time.perf_counter()
    for name in names:
        for what in FAMILIES[name]():
            torch.cuda.synchronize()
            print(f"{time.perf_counter() - start:5.0f} s  {name}: {what}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
