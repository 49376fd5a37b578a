"""Times attention in FP8 beside torch's own in bfloat16, forward alone and with its backward, casts included.

Attention is compiled from `scaled_dot_product_attention`, which in bfloat16 is cuDNN's on Hopper; ``fp8 kernel`` is the
forward kernel alone, on operands that are quantized already. On CUDA calls run in a graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fxquant import recipes
from fxquant.backend.backend import Backend
from fxquant.bench.inference import Inference
from fxquant.bench.rounds import Row, compiling
from fxquant.formats import AttentionSpec, QuantSpec, Step
from fxquant.kernels.attention.ops import attention_forward
from fxquant.quantizers import DelayedScalingRequest, Float8HeadQuantizer, IdentityQuantizer

KERNEL = "fp8 kernel"
FP8_BACKWARD = " + fp8 backward"
"""The suffix of a provider that quantizes the gradients too."""
_BLOCKS: dict[str, Literal[128] | None] = {"fp8 heads": None, "fp8 blocks": 128}
"""The positions that share a scale, by provider; None for all of a head."""
DELAYED = "fp8 delayed"
_FP8 = (*_BLOCKS, DELAYED)
PROVIDERS = ("bf16", KERNEL, *_FP8, *(f"{name}{FP8_BACKWARD}" for name in _FP8))


@dataclass(frozen=True)
class Attention(Inference):
    """Sizes of an attention of one sequence; `backward` times its backward too."""

    length: int
    causal: bool
    backward: bool
    heads: int = 32
    kv_heads: int = 32
    width: int = 128

    def __str__(self) -> str:
        return (
            f"{self.length}{' causal' if self.causal else ''}, {self.heads}/{self.kv_heads} heads of {self.width}, "
            f"forward{' and backward' if self.backward else ''}"
        )

    def takes(self, provider: str) -> bool:
        return provider != KERNEL if self.backward else not provider.endswith(FP8_BACKWARD)

    def prepared(self, provider: str, device: str) -> tuple[list[Callable[[], Any]], Row]:
        torch.manual_seed(0)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        q, k, v, do = (torch.randn(1, h, self.length, self.width, dtype=torch.bfloat16, device=device) for h in heads)
        row: Row = {}
        with compiling(row):
            call = prepare(provider, self, q, k, v, do)
            call()
        return [call], row


_CASES = [(length, causal, 32) for length in (4096, 16384) for causal in (False, True)]
_CASES += [(length, True, 8) for length in (4096, 16384)]
SIZES = tuple(Attention(*case[:2], backward, kv_heads=case[2]) for backward in (False, True) for case in _CASES)
TINY = tuple(Attention(32, True, backward, 4, 2, 16) for backward in (False, True))


def recipe(provider: str) -> recipes.Recipe:
    """Attention in FP8 with scales of heads, of 128 positions or delayed; without `FP8_BACKWARD` only its forward."""
    name = provider.removesuffix(FP8_BACKWARD)
    answer = DelayedScalingRequest() if name == DELAYED else Float8HeadQuantizer(block_len=_BLOCKS[name])
    slots = ("qkv", "s", "do", "dp") if provider.endswith(FP8_BACKWARD) else ("qkv", "s")

    def qfactory(role: Any) -> Any:
        return answer if role.module_type == "dpa" and role.tensor_type in slots else IdentityQuantizer()

    return recipes.CustomRecipe(qfactory=qfactory)


def compiler(provider: str) -> Any:
    """The backend of a provider's attention."""
    return "inductor" if provider == "bf16" else Backend(recipe(provider))


def prepare(provider: str, size: Attention, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> Callable[[], Any]:
    """One call to time."""
    if provider == KERNEL:
        return functools.partial(attention_forward.best, *kernel_arguments(size, q, k, v))

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=size.causal, enable_gqa=size.heads != size.kv_heads)

    run = torch.compile(attention, backend=compiler(provider), fullgraph=True, dynamic=False)
    if not size.backward:
        return functools.partial(run, q, k, v)
    inputs = tuple(x.requires_grad_() for x in (q, k, v))
    return lambda: torch.autograd.grad(run(*inputs), inputs, do)


def kernel_arguments(size: Attention, q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    """The arguments of `fxquant::attention_forward` for operands that are quantized by head."""
    head = QuantSpec(format="per_head_e4m3")
    steps = (Step("mul", size.width**-0.5), *([Step("causal")] if size.causal else []))
    parts = torch.ops.fxquant.quantize_qkv(q, k, v, str(head))
    spec = str(AttentionSpec(qkv=head, s=head, steps=steps))
    return parts[:2], parts[2:4], parts[4:], [], None, None, spec, size.width, q.dtype
