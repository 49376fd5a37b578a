"""A linear layer in training, and the floor of its time.

The floor is the time of its three GEMMs alone, on quantized operands, and of the fewest bytes of its casts at the rate
of a copy, all timed in the same rounds.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from fxquant import recipes
from fxquant.bench.providers import TORCHAO
from fxquant.bench.rounds import Contender, Layer, Turns, failure
from fxquant.bench.training import Training
from fxquant.kernels.linear import cublas
from fxquant.quantizers import Quantizer
from fxquant.roles import GEMM_OPERANDS, Gemm, QuantizerRole


@dataclass(frozen=True)
class Linear(Layer, Training):
    """Sizes of one linear layer: input [m, k], weight [n, k]."""

    def __str__(self) -> str:
        return f"{self.m}x{self.k}x{self.n}"

    def model(self) -> nn.Module:
        return nn.Linear(self.k, self.n, bias=False, dtype=torch.bfloat16)

    def beside(self, providers: Iterable[str], turns: Turns) -> list[Contender]:
        """A copy of the largest tensor, and the GEMMs of each provider alone."""
        x = torch.randn(self.m, max(self.k, self.n), dtype=torch.bfloat16, device=turns.device)
        y = torch.empty_like(x)
        contenders = [Contender("copy", lambda: y.copy_(x))]
        for name in dict.fromkeys(FLOORS.get(provider, provider) for provider in providers):
            try:
                contenders.append(_gemms_contender(name, self, turns.device))
            except Exception as error:
                print(f"no floor for {name}, {self}: {failure(error)}", file=sys.stderr)
        return contenders

    def floor(self, provider: str, ms: Mapping[str, float]) -> float | None:
        gemms = ms.get(f"{FLOORS.get(provider, provider)} GEMMs")
        if gemms is None or "copy" not in ms:
            return None
        bytes_per_ms = 4 * self.m * max(self.k, self.n) / ms["copy"]
        return gemms + least_cast_bytes(provider, self) / bytes_per_ms


SIZES = (
    Linear(16384, 4096, 4096), Linear(16384, 4096, 14336), Linear(16384, 14336, 4096), Linear(16384, 8192, 8192),
    Linear(8192, 8192, 28672),
)  # fmt: skip
TINY = (Linear(32, 64, 96),)
FLOORS = {
    "delayed_scaling": "current_scaling", "torchao tensorwise": "current_scaling", "torchao rowwise": "rowwise",
}  # fmt: skip
"""The recipe whose GEMMs a provider runs, for providers that have no recipe of that name."""


def least_cast_bytes(provider: str, size: Linear) -> int:
    """One read and two writes of input, weight and gradient, and another read where amaxes come first."""
    if provider == "bf16":
        return 0
    takes_amaxes = provider in ("current_scaling", "rowwise", *TORCHAO)
    return (size.m * size.k + size.n * size.k + size.m * size.n) * (6 if takes_amaxes else 4)


def _gemms_contender(recipe: str, size: Linear, device: str) -> Contender:
    """The three GEMMs of a linear alone, on quantized operands, or on bfloat16 for ``bf16``."""
    torch.manual_seed(0)
    with torch.device(device):
        shapes = ((size.m, size.k), (size.n, size.k), (size.m, size.n))
        x, w, dy = (torch.randn(shape, dtype=torch.bfloat16) for shape in shapes)
    if recipe == "bf16":
        return Contender(f"{recipe} GEMMs", lambda: (F.linear(x, w), dy @ w, dy.t() @ x))
    values = {"input": x, "weight": w, "grad_output": dy}
    pairs = []
    for gemm, sides in GEMM_OPERANDS.items():
        parts, specs = [], []
        for operand, direction in sides:
            answer = recipes.get(recipe).quantizer(QuantizerRole("linear", operand))
            assert isinstance(answer, Quantizer)
            specs.append(str(answer.spec(direction)))
            parts.append(torch.ops.fxquant.quantize(values[operand], specs[-1], direction.value))
        pairs.append((*parts, *specs, gemm is Gemm.FPROP))

    def step() -> None:
        for a, b, a_spec, b_spec, fast in pairs:
            cublas.by_cublas(a, b, a_spec, b_spec, None, torch.bfloat16, fast)

    return Contender(f"{recipe} GEMMs", step)


def means(rows: Sequence[dict[str, str]], titles: dict[str, str]) -> list[list[str]]:
    """The titles, and below them the geometric means of the ratios of providers that were timed at several sizes."""
    by_provider: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        by_provider.setdefault(row["provider"], []).append(row)
    lines = []
    for provider, measured in by_provider.items():
        values = {column: [float(row[column].rstrip("x")) for row in measured if row[column]] for column in titles}
        complete = all(len(of_column) in (0, len(measured)) for of_column in values.values())
        if complete and len(measured) > 1:
            lines.append([provider, *(f"{statistics.geometric_mean(v):.2f}x" if v else "" for v in values.values())])
    return [["geometric mean", *titles.values()], *lines] if lines else []
