"""Times quantizations, compiled, beside a copy of their input. On CUDA calls run in a graph: the host takes longer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxquant.backend.backend import Backend
from fxquant.bench.inference import in_a_graph
from fxquant.bench.rounds import Contender, Problem, Row, Turns
from fxquant.formats import QuantSpec

SPECS = (
    "per_tensor_e4m3", "per_row_e4m3(pow2,torchao)", "block_1x128_e4m3(pow2)", "block_128x128_e4m3(pow2)", "mxfp8_e4m3",
    "mxfp8_2d_e4m3",
)  # fmt: skip
PROVIDERS = ("copy", *SPECS)


@dataclass(frozen=True)
class Cast(Problem):
    """A matrix to quantize in both directions or in the columnwise one alone."""

    m: int
    k: int
    directions: int

    def __str__(self) -> str:
        return f"{self.m}x{self.k} {'both' if self.directions == 2 else 'columnwise'}"

    def contender(self, provider: str, turns: Turns) -> Contender:
        x = torch.randn(self.m, self.k, dtype=torch.bfloat16, device=turns.device)
        step, count = in_a_graph([cast_step(provider, self, x)], turns.cuda)
        return Contender(provider, step, calls=count)

    def gemms(self, provider: str, turns: Turns) -> str:
        return ""

    def columns(self, contender: Contender, ms: Mapping[str, float], turns: Turns) -> Row:
        name = contender.name
        row = {"us": f"{1e3 * ms[name]:.1f}"}
        if name != "copy" and "copy" in ms:
            least = self.least_bytes(name) / (4 * self.m * self.k)
            row["of_copy"] = f"{least * ms['copy'] / ms[name]:.0%}"
        return row

    def least_bytes(self, spec: str) -> int:
        """One read, a write for each direction, and another read if the amax of the tensor or of rows comes first."""
        reads = 2 if QuantSpec.parse(spec).row.family in ("per_tensor", "per_row") else 1
        return self.m * self.k * (2 * reads + self.directions)


SIZES = tuple(Cast(16384, k, directions) for k in (4096, 14336) for directions in (2, 1))
TINY = (Cast(128, 256, 2), Cast(128, 256, 1))


def cast_step(provider: str, size: Cast, x: Tensor) -> Callable[[], Any]:
    """One quantization, compiled, or a copy."""
    target = torch.empty_like(x)
    if provider == "copy":
        return lambda: target.copy_(x)

    def quantized(x: Tensor) -> Any:
        if size.directions == 2:
            return torch.ops.fxquant.hybrid_quantize(x, provider, provider)
        return torch.ops.fxquant.quantize(x, provider, "columnwise")

    run = torch.compile(quantized, backend=Backend("high_precision"), fullgraph=True, dynamic=False)
    run(x)
    return functools.partial(run, x)
