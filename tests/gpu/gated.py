"""A model of few tokens that has all that kernels for few rows are joined with, and a program as it is served."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

import fxquant
from fxquant import Backend


class Gated(nn.Module):
    """Layers that read one tensor, an activation, a residual, and more features than one program splits."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(features, hidden, bias=False) for _ in range(2))
        self.down, self.wide = nn.Linear(hidden, features), nn.Linear(features, hidden)
        self.to(torch.bfloat16).requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return y, nn.functional.gelu(self.wide(y)) + self.gate(y)


def served(program: ExportedProgram, package: Path | None) -> Callable[..., Any]:
    """A program compiled just in time, or ahead of time into a package at a path."""
    if package is None:
        return torch.compile(program.module(), backend=Backend("high_precision"), fullgraph=True, dynamic=False)
    path = fxquant.aoti_compile_and_package(program, package_path=package)
    return torch._inductor.aoti_load_package(path)  # type: ignore[no-any-return]
