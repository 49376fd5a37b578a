"""The attention kernels in Triton's interpreter against plain torch; run by test_triton.py."""

from __future__ import annotations

import math
from typing import Any

import attention_rounding as rounding
import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from interpreting import interpret
from torch import Tensor

from fxquant.formats import QuantSpec
from fxquant.kernels.attention import reference, triton_backward, triton_dequantize, triton_forward, triton_terms
from fxquant.kernels.attention import triton_cast as head_cast
from fxquant.kernels.attention.scores import Scores

Builder: Any = interpreter.InterpreterBuilder
dot = Builder.create_dot


def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
    """The interpreter multiplies the bits of bfloat16."""

    def wide(x: Any) -> Any:
        if x.dtype != tl.bfloat16:
            return x
        return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    return dot(self, wide(a), wide(b), *rest)


Builder.create_dot = create_dot
interpret(triton_backward, triton_dequantize, triton_forward, triton_terms, head_cast)

SPECS: dict[Any, QuantSpec] = {
    "tensor": QuantSpec(format="per_tensor_e4m3"), "head": QuantSpec(format="per_head_e4m3"),
    "block": QuantSpec(format="per_head_128_e4m3"),
}  # fmt: skip
CASTS = (
    ("tensor", 1, 2, 2, 77, 140, 256), ("head", 2, 4, 2, 50, 270, 64), ("block", 1, 2, 1, 140, 150, 64),
    ("block", 1, 1, 1, 40, 33, 256),
)  # fmt: skip
FORWARD = (
    # B, H, Hkv, Sq, Sk, D, causal, mask, scales, dropout, keys of a tile and bytes of keys and values at a time
    (1, 2, 1, 100, 177, 64, False, None, "head", 0.0, (64, 4 << 20)),
    (2, 2, 1, 70, 150, 128, True, None, "tensor", 0.0, (64, 0)),
    (1, 2, 2, 150, 70, 64, True, None, "head", 0.0, None),
    (1, 1, 1, 33, 128, 256, False, None, "block", 0.0, None),
    (1, 2, 1, 140, 400, 64, False, None, "block", 0.0, None),
    (2, 2, 1, 40, 50, 64, False, "seen", "head", 0.0, None),
    (1, 2, 2, 40, 50, 64, True, "added", "head", 0.0, None),
    (3, 2, 1, 40, 150, 64, False, "keys", "block", 0.3, None),
    (3, 2, 1, 170, 150, 64, True, "keys", "block", 0.0, None),
    (2, 2, 1, 40, 70, 64, True, None, None, 0.3, None),
    (1, 2, 1, 40, 150, 64, False, "keys of heads", "head", 0.0, None),
    (2, 2, 1, 40, 150, 64, False, "batches", "head", 0.0, None),
)
BACKWARD = (
    (1, 2, 1, 100, 77, 64, False, None, "head", 0.0),
    (1, 2, 2, 70, 150, 128, True, None, "tensor", 0.0),
    (2, 2, 1, 40, 50, 64, False, "seen", "head", 0.0),
    (1, 2, 1, 40, 50, 64, True, "added", "head", 0.0),
    (1, 2, 1, 140, 150, 64, False, None, "block", 0.0),
    (3, 2, 1, 40, 150, 64, False, "keys", "block", 0.3),
    (2, 2, 1, 40, 70, 64, True, None, None, 0.3),
    (1, 2, 2, 40, 70, 64, False, "seen", None, 0.0),
    (1, 2, 1, 40, 150, 64, False, "keys of heads", "head", 0.0),
    (2, 2, 1, 40, 150, 64, False, "batches", "head", 0.0),
)


def make(batches: int, heads: int, kv_heads: int, queries: int, keys: int, width: int, kind: str | None) -> list[Any]:
    """q, k and v, and a mask that hides everything from a row, or from the last of the batch, or is added."""
    generator = torch.Generator().manual_seed(queries + keys)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(torch.bfloat16)

    q, v = noise(batches, heads, queries, width), noise(batches, kv_heads, keys, width) * 3
    v[:, :, : keys // 2] *= 8
    k = noise(batches, keys, kv_heads, width).transpose(1, 2)
    mask = None
    if kind == "seen":
        mask = torch.rand(batches, 1, queries, keys, generator=generator) > 0.5
        mask[:, :, 3] = False
    elif kind == "added":
        mask = noise(heads, queries, keys)
    elif kind == "keys":
        ranges = torch.tensor([[0, 70], [135, keys], [0, 0]])[:batches, None, None]
        place = torch.arange(keys)
        mask = (place >= ranges[..., :1]) & (place < ranges[..., 1:])
    elif kind == "keys of heads":
        mask = torch.arange(keys) < torch.tensor([20, keys])[:, None, None]
    elif kind == "batches":
        mask = torch.tensor([True, False])[:, None, None, None]
    return [q, k, v, mask]


def check_casts() -> None:
    for scaling, batches, heads, kv_heads, queries, keys, width in CASTS:
        q, k, v, _ = make(batches, heads, kv_heads, queries, keys, width, None)
        q[0, 0, 3, 5], v[-1, -1] = float("nan"), 0.0
        sides = ((q, heads // kv_heads, False), (k, 1, False), (v, 1, True))
        spec = SPECS[scaling]
        case = (queries, width, scaling)
        got = head_cast.quantize_qkv(q, k, v, scaling)
        want = [part for x, groups, t in sides for part in reference.quantize_heads(x, spec, groups, t)]
        assert all(map(same, got, want)), case
        pairs = (got[:2], got[2:4], got[4:])
        back = triton_dequantize.dequantize_qkv(*pairs, scaling, torch.float32)
        codes = triton_dequantize.dequantize_qkv(*pairs, scaling, torch.float32, True)[2]
        assert same(codes, reference.key_order(got[4], back=True)[..., :keys].mT), case
        for values, parts, (x, groups, t) in zip(back, pairs, sides, strict=True):
            exact = reference.dequantize_heads(parts, spec, groups, t, x.shape[-2:])
            there = ~exact.isnan()  # the interpreter knows no NaN of e4m3
            assert torch.equal(values[there], exact[there]), case
        if scaling != "tensor":
            for x, groups, t in (*sides, (v, 1, False)):
                assert all(map(same, head_cast.quantize_heads(x, groups, t, scaling),
                               reference.quantize_heads(x, spec, groups, t))), case  # fmt: skip


def check_given_scales() -> None:
    """One read, whose amax is taken along, NaN ignored; a state that has seen more keeps that."""
    q, k, v, _ = make(2, 4, 2, 50, 70, 64, None)
    q[0, 0, 3, 5], k[1, 0, 7] = float("nan"), 9e4
    multiplier, sides = torch.tensor([0.7]), ((q, 2, False), (k, 1, False), (v, 1, True))
    for known in (0.0, 1e6):
        amax = torch.tensor([0.0, known])[1:]
        got = head_cast.quantize_qkv(q, k, v, "tensor", multiplier, amax)
        want = [part for x, g, t in sides for part in reference.quantize_heads(x, SPECS["tensor"], g, t, multiplier)]
        assert all(map(same, got, want)) and amax.item() == max(known, k.float().abs().max().item())
    for dtype, name in ((torch.float8_e4m3fn, "e4m3"), (torch.float8_e5m2, "e5m2")):
        amax, spec = torch.zeros(1), QuantSpec(format=f"per_tensor_{name}")
        data, scales = head_cast.quantize_heads(q, 1, False, dtype=dtype, multiplier=multiplier, recorded=amax)
        want = reference.quantize_heads(q, spec, 1, False, multiplier)
        assert same(data, want[0]) and same(scales, want[1].expand(2, 4)) and amax.item() == q.nan_to_num().abs().max()
        own = head_cast.quantize_heads(q, 1, False, dtype=dtype)
        assert all(map(same, own, reference.quantize_heads(q, QuantSpec(format=f"per_head_{name}"), 1, False)))


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.view(torch.uint8), b.contiguous().view(torch.uint8))


def prepared(q: Tensor, k: Tensor, v: Tensor, scaling: Any) -> tuple[list[Any], list[Tensor]]:
    """Arguments of the kernels, and the values that they stand for."""
    if scaling is None:
        return [[q], [k.contiguous()], [v]], [q.float(), k.float(), v.float()]
    spec, groups = SPECS[scaling], q.shape[1] // k.shape[1]
    sides = ((q, groups, False), (k, 1, False), (v, 1, True))
    parts = [reference.quantize_heads(x, spec, g, t) for x, g, t in sides]
    values = [
        reference.dequantize_heads(part, spec, g, t, x.shape[-2:]) for part, (x, g, t) in zip(parts, sides, strict=True)
    ]
    return [(data.contiguous(), scale) for data, scale in parts], values


def check_forward() -> None:
    for batches, heads, kv_heads, queries, keys, width, causal, kind, scaling, dropout, chosen in FORWARD:
        q, k, v, mask = make(batches, heads, kv_heads, queries, keys, width, kind)
        given, wide = prepared(q, k, v, scaling)
        seed = torch.tensor([2**40 + 5]) if dropout else None
        options: dict[str, Any] = {
            "causal": causal, "scale": width**-0.5, "mask": mask, "dropout": dropout, "seed": seed
        }  # fmt: skip
        s_amax = None if scaling is None else torch.zeros(1)
        o, lse = triton_forward.forward(
            given, Scores(**options), torch.float32, scaling=scaling or "head", s_amax=s_amax,
            config=None if chosen is None else triton_forward._Config(block_n=chosen[0], cached=chosen[1]),
        )  # fmt: skip
        exact, exact_lse = rounding.forward(*wide, **options)
        rounded, _ = rounding.forward(*wide, **options, rounded=scaling is not None)
        case = (batches, heads, kv_heads, queries, keys, width, causal, kind, scaling, dropout, chosen)
        error = rounding.relative(o, exact), rounding.relative(rounded, exact)
        assert error[0] < 1.2 * error[1] + (0 if scaling else 2**-7), (case, error)
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5, msg=str(case))
        if s_amax is not None:
            torch.testing.assert_close(s_amax, rounding.softmax_amax(*wide[:2], **options), rtol=1e-5, atol=0)
        assert kind != "seen" or not o[:, :, 3].any(), case
        assert kind != "keys" or not o[2].any(), case


def check_backward() -> None:
    for batches, heads, kv_heads, queries, keys, width, causal, kind, scaling, dropout in BACKWARD:
        q, k, v, mask = make(batches, heads, kv_heads, queries, keys, width, kind)
        do = make(batches, heads, heads, queries, queries, width, None)[0]
        given, wide = prepared(q, k, v, scaling)
        seed = torch.tensor([2**40 + 5]) if dropout else None
        options: dict[str, Any] = {
            "causal": causal, "scale": width**-0.5, "mask": mask, "dropout": dropout, "seed": seed
        }  # fmt: skip
        o, lse = (x.float() for x in rounding.forward(*wide, **options))
        o = o.to(torch.bfloat16)
        do_values = None
        if scaling is None:
            rounded = None if causal else (do, do.clone())
            got = triton_backward.wide_backward(do, [x for (x,) in given], o, lse, Scores(**options), rounded)
        elif scaling == "tensor":  # do and the gradient of the scores as delayed scaling has them
            do_amax, dp_amax, multiplier = torch.zeros(1), torch.zeros(1), torch.tensor([37.0])
            cast = triton_backward.GradientCast(
                dtype=torch.float8_e5m2, multiplier=multiplier, amax=do_amax, scores_amax=dp_amax
            )
            got = triton_backward.backward(do, given, o, lse, Scores(**options), scaling, cast)
            do_values = reference.through(do, QuantSpec(format="per_tensor_e5m2"), multiplier)
            assert do_amax.item() == do.float().abs().max().item()
            torch.testing.assert_close(
                dp_amax, rounding.scores_gradient(do, *wide, o, lse, **options, do_values=do_values).abs().amax()[None],
                rtol=1e-4, atol=0,
            )  # fmt: skip
        else:
            got = triton_backward.backward(do, given, o, lse, Scores(**options), scaling)
        want = rounding.backward(do, *wide, o, lse, **options, wide=scaling is None, do_values=do_values)
        for name, a, b in zip(("dq", "dk", "dv"), got, want, strict=True):
            case = (
                name,
                batches,
                heads,
                kv_heads,
                queries,
                keys,
                width,
                causal,
                kind,
                scaling,
                rounding.relative(a, b),
            )
            assert rounding.relative(a, b) < 2**-6, case


def check_terms() -> None:
    """The kernels around the backward in Gluon: sums of rows, and dq from the order in which threads have it."""
    heads, tiles, length, ordered = 3, 2, 100, (0, 1, 5, 6, 2, 4, 7, 3, 8)
    do, o, lse = torch.randn(heads, length, 128), torch.randn(heads, length, 128), torch.randn(heads, length)
    lse[0, 5] = -torch.inf
    log_sum, delta = torch.empty(2, heads, tiles * 64)
    triton_terms.row_terms_kernel[(heads * tiles,)](do, o, lse, log_sum, delta, length, tiles, 64, 128)
    torch.testing.assert_close(delta[:, :length], (do * o).sum(-1), rtol=0, atol=1e-4)
    assert not delta[:, length:].any() and (log_sum[:, length:] == torch.inf).all() and log_sum[0, 5] == torch.inf
    torch.testing.assert_close(log_sum[1:, :length], lse[1:] / math.log(2))
    x = torch.randn(heads, tiles, 4, 2, 8, 2, 8, 4, 2)
    dq = torch.empty(heads, length, 128)
    triton_terms.gather_kernel[(heads * tiles * 2,)](x.permute(ordered).contiguous(), dq, 2.0, length, tiles)
    assert torch.equal(dq, 2 * x.reshape(heads, -1, 128)[:, :length])


if __name__ == "__main__":
    check_terms()
    check_casts()
    check_given_scales()
    check_forward()
    check_backward()
