"""Times quantizations, compiled, beside a copy of their input."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxquant.backend.backend import Backend
from fxquant.bench.rounds import Contender, Row, Turns, attempt, medians, time_in_turn, times_text
from fxquant.compat.private import unlimited_recompiles
from fxquant.formats import QuantSpec

SPECS = (
    "per_tensor_e4m3", "per_row_e4m3(pow2,torchao)", "block_1x128_e4m3(pow2)", "block_128x128_e4m3(pow2)", "mxfp8_e4m3",
    "mxfp8_2d_e4m3",
)  # fmt: skip
PROVIDERS = ("copy", *SPECS)


@dataclass(frozen=True)
class Cast:
    """A matrix to quantize, in both directions from one tensor or in the columnwise one alone."""

    m: int
    k: int
    directions: int

    def __str__(self) -> str:
        return f"{self.m}x{self.k} {'both' if self.directions == 2 else 'columnwise'}"

    def least_bytes(self, spec: str) -> int:
        """One read and one write each, and another read where an amax of the tensor or of a row comes first."""
        reads = 2 if QuantSpec.parse(spec).row.family in ("per_tensor", "per_row") else 1
        return self.m * self.k * (2 * reads + self.directions)


SIZES = tuple(Cast(16384, k, directions) for k in (4096, 14336) for directions in (2, 1))
TINY = (Cast(128, 256, 2), Cast(128, 256, 1))


def measure(providers: Sequence[str], size: Cast, turns: Turns) -> list[Row]:
    """Times quantizations in turn, and the copy whose rate they are held to."""
    torch.compiler.reset()
    x = torch.randn(size.m, size.k, dtype=torch.bfloat16, device=turns.device)
    with unlimited_recompiles():
        contenders = [attempt(provider, lambda p: Contender(p, cast_step(p, size, x))) for provider in providers]
        time_in_turn(contenders, turns)
    ms = medians(contenders)
    rows = []
    for contender in contenders:
        name = contender.name
        row = {"provider": name, **contender.row, **(times_text(contender.times) if contender.times else {})}
        if name != "copy" and name in ms and "copy" in ms:
            least = size.least_bytes(name) / (4 * size.m * size.k)
            row["of_copy"] = f"{least * ms['copy'] / ms[name]:.0%}"
        rows.append(row)
    return rows


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
