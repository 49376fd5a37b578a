"""What the attention kernels compute, in plain torch, rounding where they round."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fxquant.formats import ELEMENTS
from fxquant.kernels.attention import reference as attention_reference
from fxquant.kernels.cast import reference

KEYS = 16


def key_order(keys: int) -> Tensor:
    """The key in each place of a transposed v: of every 16 the order is 0 1 8 9, 2 3 10 11, 4 5 12 13, 6 7 14 15."""
    sixteen = torch.tensor([0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15])
    return (torch.arange(0, keys, KEYS)[:, None] + sixteen).flatten()


def cast(x: Tensor) -> Tensor:
    """float32 to e4m3, saturating."""
    return reference.cast_fp8(x, ELEMENTS["e4m3"])


def quantize(x: Tensor, groups: int, transposed: bool) -> tuple[Tensor, Tensor]:
    """`triton_cast.quantize_heads`."""
    batches, heads, length, _ = x.shape
    magnitude = torch.where(x.isnan(), 0.0, x.float().abs())
    amax = magnitude.view(batches, heads // groups, groups, *x.shape[2:]).amax((2, 3, 4))
    scale = torch.where((amax > 1e-12) & (amax < math.inf), torch.full_like(amax, 448.0) / amax, 1.0)
    data = cast(x.float() * scale.repeat_interleave(groups, 1)[:, :, None, None])
    if transposed:
        rows = torch.nn.functional.pad(data.view(torch.uint8).mT, (0, -length % KEYS))
        data = rows[..., key_order(rows.shape[-1]).to(x.device)].view(torch.float8_e4m3fn)
    return data.contiguous(), 1 / scale


def dequantize(data: Tensor, scale_inv: Tensor) -> Tensor:
    """float32 [B, H, S, D] of a payload that is not transposed; scales may be fewer than heads."""
    groups = data.shape[1] // scale_inv.shape[1]
    return data.float() * scale_inv.repeat_interleave(groups, 1)[:, :, None, None]


def scores(q: Tensor, k: Tensor, causal: bool, scale: float, mask: Tensor | None) -> Tensor:
    """[B, H, Sq, Sk], -inf where a key is not seen."""
    s = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale
    if causal:
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).tril(), -math.inf)
    if mask is None:
        return s
    return s.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else s + mask.to(s.dtype)


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, mask: Tensor | None = None, rounded: bool = False,
    dropout: float = 0.0, seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output and log-sum-exp of dequantized operands in float64; `rounded` casts P, times 256, to e4m3."""
    s = scores(q.double(), k.double(), causal, scale, mask)
    most = s.amax(-1, keepdim=True)
    p = torch.exp(s - torch.where(most == -math.inf, 0.0, most))
    total = p.sum(-1, keepdim=True)
    if rounded:
        p = cast((p * 256).float()).double() / 256
    p = dropped(p, dropout, seed)
    o = p @ v.double().repeat_interleave(q.shape[1] // v.shape[1], 1)
    return o / torch.where(total == 0, 1.0, total), (most + total.log()).squeeze(-1)


def softmax_amax(q: Tensor, k: Tensor, *, causal: bool, scale: float, mask: Tensor | None, **_: object) -> Tensor:
    """The largest weight of dequantized operands, float32 [1]: what a delayed scale of the softmax records."""
    return torch.softmax(scores(q.double(), k.double(), causal, scale, mask), -1).nan_to_num().amax().float()[None]


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *, causal: bool, scale: float,
    mask: Tensor | None = None, dropout: float = 0.0, seed: Tensor | None = None, wide: bool = False,
    do_values: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`triton_backward.backward`, or `wide_backward`, in float32, given dequantized q, k and v.

    `do_values` is what do is quantized to, if that is not e4m3 with a scale for each head.
    """

    def rounded(x: Tensor) -> Tensor:
        return x.to(torch.bfloat16).float()

    def of_keys(x: Tensor) -> Tensor:
        return x.view(x.shape[0], k.shape[1], -1, *x.shape[2:]).sum(2)

    wide_k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    if do_values is None:
        do_values = do.float() if wide else dequantize(*quantize(do, 1, False))
    more: Any = {"causal": causal, "scale": scale, "mask": mask}
    ds = rounded(scores_gradient(do, q, k, v, o, lse, **more, dropout=dropout, seed=seed, do_values=do_values) / scale)
    p = dropped(weights(q, k, lse, **more), dropout, seed)
    return ds @ rounded(wide_k) * scale, of_keys(ds.mT @ rounded(q)) * scale, of_keys(rounded(p).mT @ do.float())


def weights(q: Tensor, k: Tensor, lse: Tensor, *, causal: bool, scale: float, mask: Tensor | None) -> Tensor:
    """The softmax, from the log-sum-exp."""
    return torch.exp(scores(q, k, causal, scale, mask) - torch.where(lse == -math.inf, math.inf, lse)[..., None])


def scores_gradient(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *, causal: bool, scale: float,
    mask: Tensor | None, dropout: float, seed: Tensor | None, do_values: Tensor,
) -> Tensor:  # fmt: skip
    """The gradient of q k^T."""
    dp = do_values @ v.repeat_interleave(q.shape[1] // k.shape[1], 1).mT
    change = dropped(dp, dropout, seed) - (do.float() * o.float()).sum(-1, keepdim=True)
    return weights(q, k, lse, causal=causal, scale=scale, mask=mask) * change * scale


def dropped(x: Tensor, dropout: float, seed: Tensor | None) -> Tensor:
    """What dropout leaves of weights or their gradients."""
    if seed is None:
        return x
    return torch.where(attention_reference.kept(seed, x.shape, dropout), x / (1 - dropout), 0.0)


def relative(got: Tensor, want: Tensor) -> float:
    """The norm of the difference over that of `want`."""
    return ((got.double() - want.double()).norm() / want.double().norm()).item()
