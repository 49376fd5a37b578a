"""The attention kernels in Triton's interpreter against plain torch; run by test_triton_attention.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from torch import Tensor

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import attention_rounding as rounding  # noqa: E402
from interpreted_cast import Launcher  # noqa: E402

from fxquant.kernels import triton_attention as attention  # noqa: E402

Builder: Any = interpreter.InterpreterBuilder
dot = Builder.create_dot
patch_tensor = interpreter._patch_lang_tensor


def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
    """The interpreter multiplies the bits of bfloat16."""

    def wide(x: Any) -> Any:
        if x.dtype != tl.bfloat16:
            return x
        return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    return dot(self, wide(a), wide(b), *rest)


def patched(tensor: Any, scope: Any) -> None:
    """With NumPy 2.4 Triton 3.6 cannot use a number of its own as the end of a range."""
    patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


Builder.create_dot = create_dot
interpreter._patch_lang_tensor = patched
attention.wrap_triton = Launcher  # type: ignore[assignment]

FORWARD = (
    # B, H, Hkv, Sq, Sk, D, causal, mask, keys of a tile and bytes of keys and values worked on at a time
    (1, 2, 1, 100, 177, 64, False, None, (64, 4 << 20)),
    (2, 2, 1, 70, 150, 128, True, None, (64, 0)),
    (1, 2, 2, 150, 70, 64, True, None, None),
    (1, 1, 1, 33, 128, 256, False, None, None),
    (2, 2, 1, 40, 50, 64, False, "seen", None),
    (1, 2, 2, 40, 50, 64, True, "added", None),
)
BACKWARD = (
    (1, 2, 1, 100, 77, 64, False, None),
    (1, 2, 2, 70, 150, 128, True, None),
    (2, 2, 1, 40, 50, 64, False, "seen"),
    (1, 2, 1, 40, 50, 64, True, "added"),
)


def make(batches: int, heads: int, kv_heads: int, queries: int, keys: int, width: int, kind: str | None) -> list[Any]:
    """q, k and v, and a mask that hides everything from a row or is added."""
    generator = torch.Generator().manual_seed(queries + keys)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(torch.bfloat16)

    q, v = noise(batches, heads, queries, width), noise(batches, kv_heads, keys, width) * 3
    k = noise(batches, keys, kv_heads, width).transpose(1, 2)
    mask = None
    if kind == "seen":
        mask = torch.rand(batches, 1, queries, keys, generator=generator) > 0.5
        mask[:, :, 3] = False
    elif kind == "added":
        mask = noise(heads, queries, keys)
    return [q, k, v, mask]


def check_casts() -> None:
    for batches, heads, length, width, groups in ((1, 2, 77, 64, 1), (2, 4, 150, 64, 2), (1, 1, 40, 256, 1)):
        x = make(batches, heads, heads, length, length, width, None)[2]
        x[0, 0, 3, 5], x[-1, -1] = float("nan"), 0.0
        for transposed in (False, True):
            got, want = attention.quantize_heads(x, groups, transposed), rounding.quantize(x, groups, transposed)
            assert torch.equal(got[0].view(torch.uint8), want[0].view(torch.uint8)), (x.shape, transposed)
            assert torch.equal(got[1], want[1]), (x.shape, transposed)


def check_forward() -> None:
    for batches, heads, kv_heads, queries, keys, width, causal, kind, chosen in FORWARD:
        q, k, v, mask = make(batches, heads, kv_heads, queries, keys, width, kind)
        parts = [rounding.quantize(x, g, t) for x, g, t in ((q, heads // kv_heads, False), (k, 1, False), (v, 1, True))]
        options = {"causal": causal, "scale": width**-0.5, "mask": mask}
        o, lse = attention.forward(
            *(data for data, _ in parts), *(scale for _, scale in parts), **options, out_dtype=torch.float32,
            config=None if chosen is None else attention._Config(block_n=chosen[0], cached=chosen[1]),
        )  # fmt: skip
        wide = [
            rounding.dequantize(*rounding.quantize(x, g, False)) for x, g in ((q, heads // kv_heads), (k, 1), (v, 1))
        ]
        exact, exact_lse = rounding.forward(*wide, **options)
        rounded, _ = rounding.forward(*wide, **options, rounded=True)
        case = (batches, heads, kv_heads, queries, keys, width, causal, kind, chosen)
        assert rounding.relative(o, exact) < 1.2 * rounding.relative(rounded, exact), case
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5, msg=str(case))
        assert kind != "seen" or not o[:, :, 3].any(), case


def check_backward() -> None:
    for batches, heads, kv_heads, queries, keys, width, causal, kind in BACKWARD:
        q, k, v, mask = make(batches, heads, kv_heads, queries, keys, width, kind)
        do = make(batches, heads, heads, queries, queries, width, None)[0]
        parts = [rounding.quantize(x, g, False) for x, g in ((q, heads // kv_heads), (k, 1), (v, 1))]
        wide = [rounding.dequantize(*part) for part in parts]
        options = {"causal": causal, "scale": width**-0.5, "mask": mask}
        o, lse = (x.float() for x in rounding.forward(*wide, **options))
        got = attention.backward(
            do, *(data for data, _ in parts), o.to(torch.bfloat16), lse, *(scale for _, scale in parts), **options
        )
        want = rounding.backward(do, *wide, o.to(torch.bfloat16), lse, **options)
        for name, a, b in zip(("dq", "dk", "dv"), got, want, strict=True):
            case = (name, batches, heads, kv_heads, queries, keys, width, causal, kind, rounding.relative(a, b))
            assert rounding.relative(a, b) < 2**-6, case


if __name__ == "__main__":
    check_casts()
    check_forward()
    check_backward()
