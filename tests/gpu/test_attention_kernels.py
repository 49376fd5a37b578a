"""The attention kernels on CUDA: bytes of the casts, and values against plain torch that rounds where they do."""

from __future__ import annotations

import attention_rounding as rounding
import pytest
import torch
from torch import Tensor

from fxquant.kernels import triton_attention as attention

pytestmark = pytest.mark.gpu

CASES = (
    # B, H, Hkv, Sq, Sk, D, causal, mask
    (1, 32, 32, 1024, 1024, 128, False, None),
    (2, 8, 2, 1024, 1024, 128, True, None),
    (2, 4, 2, 333, 777, 64, False, None),
    (1, 4, 1, 1000, 1000, 64, True, None),
    (1, 2, 2, 300, 513, 256, True, None),
    (1, 4, 2, 500, 1024, 256, False, None),
    (1, 4, 2, 700, 130, 128, True, None),
    (1, 2, 1, 1, 77, 128, False, None),
    (1, 4, 2, 300, 400, 128, False, "seen"),
    (1, 4, 4, 300, 400, 64, True, "added"),
    (1, 2, 1, 100, 50, 256, False, "added"),
)


def noise(*shape: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    return torch.randn(shape, device="cuda", generator=generator).to(torch.bfloat16)


def make_mask(kind: str | None, heads: int, queries: int, keys: int) -> Tensor | None:
    if kind is None:
        return None
    if kind == "added":
        return noise(heads, queries, keys)
    mask = noise(1, 1, queries, keys) > 0
    mask[..., 7, :] = False
    return mask


@pytest.mark.parametrize("transposed", (False, True))
@pytest.mark.parametrize("shape", ((2, 4, 333, 64, 2), (1, 8, 1000, 128, 4), (1, 2, 77, 256, 1), (1, 32, 4096, 128, 1)))
def test_casts_have_the_bytes_of_the_reference(shape: tuple[int, ...], transposed: bool) -> None:
    batches, heads, length, width, groups = shape
    x = noise(batches, length, heads, width).transpose(1, 2) * 3
    x[0, 0, 3, 5] = float("nan")
    x[-1, -1] = 0.0
    got, want = attention.quantize_heads(x, groups, transposed), rounding.quantize(x, groups, transposed)
    assert torch.equal(got[1], want[1])
    assert torch.equal(got[0].view(torch.uint8), want[0].view(torch.uint8))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values(case: tuple[int, int, int, int, int, int, bool, str | None]) -> None:
    batches, heads, kv_heads, queries, keys, width, causal, kind = case
    q, k, v = (noise(batches, *shape, width) for shape in ((heads, queries), (kv_heads, keys), (kv_heads, keys)))
    v, do = v * 3, noise(batches, heads, queries, width)
    mask = make_mask(kind, heads, queries, keys)
    groups = heads // kv_heads
    (q8, q_scale), (k8, k_scale), (v8, v_scale) = (
        attention.quantize_heads(x, g, False) for x, g in ((q, groups), (k, 1), (v, 1))
    )
    transposed, _ = attention.quantize_heads(v, 1, True)
    scales, options = (q_scale, k_scale, v_scale), {"causal": causal, "scale": width**-0.5, "mask": mask}
    o, lse = attention.forward(q8, k8, transposed, *scales, **options, out_dtype=torch.bfloat16)
    wide = [rounding.dequantize(*part) for part in ((q8, q_scale), (k8, k_scale), (v8, v_scale))]
    exact, exact_lse = rounding.forward(*wide, **options)
    rounded, _ = rounding.forward(*wide, **options, rounded=True)
    assert rounding.relative(o, exact) < 1.2 * rounding.relative(rounded, exact) + 2**-8
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-3, atol=1e-3)
    if kind == "seen":
        assert not o[:, :, 7].any()
    got = attention.backward(do, q8, k8, v8, o, lse, *scales, **options)
    want = rounding.backward(do, *wide, o, lse, **options)
    for name, a, b in zip(("dq", "dk", "dv"), got, want, strict=True):
        assert rounding.relative(a, b) < 2**-6, name
