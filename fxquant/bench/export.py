"""Times a decoder block compiled ahead of time: the prefill of a prompt, and decode steps with keys and values kept.

Beside it, the block in bfloat16, compiled likewise. On CUDA calls run in a graph; weights of a block are larger than
the L2 cache. The constants of a package are counted as its weights.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxquant.bench.inference import Inference, quantized_program
from fxquant.bench.providers import CALIBRATED
from fxquant.bench.rounds import Row, compiling
from fxquant.compat.patches import compile_package
from fxquant.compat.private import aoti_load_package
from fxquant.export.program import aoti_compile_and_package

PROVIDERS = ("bf16", "current_scaling", CALIBRATED, "rowwise", "float8_blockwise")


@dataclass(frozen=True)
class Served(Inference):
    """Sizes of one decoder block and of a call of it: `tokens` of one prompt, or one each of sequences with `context`
    tokens before it."""

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    tokens: int
    context: int = 0

    def __str__(self) -> str:
        call = f"decode {self.tokens} after {self.context}" if self.context else f"prefill {self.tokens}"
        return f"{call}, block {self.hidden}/{self.ffn}"

    def prepared(self, provider: str, device: str) -> tuple[list[Callable[[], Any]], Row]:
        torch.manual_seed(0)
        with torch.device(device):
            model, args = Block(self), arguments(self)
        program = torch.export.export(model, args)
        if provider != "bf16":
            program = quantized_program(provider, program, args)
        weights = sum(tensor.nbytes for tensor in program.state_dict.values())
        row = {"weights_gib": f"{weights / 2**30:.3f}"}
        with compiling(row):
            run = package(provider, program)
        return [torch.no_grad()(functools.partial(run, *args))], row


_LLAMA = {"hidden": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8}
SIZES = (Served(**_LLAMA, tokens=4096), *(Served(**_LLAMA, tokens=m, context=1024) for m in (1, 4, 16)))
TINY = (Served(64, 128, 4, 2, tokens=16), Served(64, 128, 4, 2, tokens=2, context=8))


class DecoderBlock(nn.Module):
    """The layers of a Llama decoder block (RMSNorm, grouped-query attention, SwiGLU) around its attention."""

    def __init__(self, hidden: int, ffn: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_dim = hidden // heads
        kv = kv_heads * self.head_dim
        self.attention_norm, self.ffn_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.q, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(hidden, kv, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(hidden, ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(ffn, hidden, bias=False)

    def before(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [batch, length, hidden] as queries, keys and values [batch, heads, length, head_dim]."""
        h = self.attention_norm(x)
        q, k, v = (p(h).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in (self.q, self.k, self.v))
        return q, k, v

    def after(self, x: Tensor, y: Tensor) -> Tensor:
        """The block's output, from its input x and its attention's output y [batch, heads, length, head_dim]."""
        x = x + self.o(y.transpose(1, 2).flatten(2))
        h = self.ffn_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))  # type: ignore[no-any-return]


class Block(DecoderBlock):
    """A block whose earlier keys and values are inputs; it returns its output and the new ones."""

    def __init__(self, size: Served) -> None:
        super().__init__(size.hidden, size.ffn, size.heads, size.kv_heads)
        self.to(torch.bfloat16).requires_grad_(False)

    def forward(self, x: Tensor, keys: Tensor | None = None, values: Tensor | None = None) -> tuple[Tensor, ...]:
        """x [batch, length, hidden]; keys and values [batch, kv_heads, context, head_dim] are attended to alone."""
        q, k, v = self.before(x)
        if keys is None or values is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            y = F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)
        return self.after(x, y), k, v


def arguments(size: Served) -> tuple[Tensor, ...]:
    """Normal values for one call, on the default device."""
    if not size.context:
        return (torch.randn(1, size.tokens, size.hidden, dtype=torch.bfloat16),)
    cached = (size.tokens, size.kv_heads, size.context, size.hidden // size.heads)
    x = torch.randn(size.tokens, 1, size.hidden, dtype=torch.bfloat16)
    return (x, *(torch.randn(cached, dtype=torch.bfloat16) for _ in range(2)))


def package(provider: str, program: torch.export.ExportedProgram) -> Callable[..., Any]:
    """The program compiled ahead of time, and loaded again."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "block.pt2")
        if provider == "bf16":
            compile_package(program, path, {})
        else:
            aoti_compile_and_package(program, package_path=path)
        # locks between threads cannot be captured in a graph
        return aoti_load_package(path, run_single_threaded=True)
