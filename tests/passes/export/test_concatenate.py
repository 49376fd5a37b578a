"""Layers that read one tensor, joined in programs that become packages: the same values from fewer GEMMs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import fxquant
from fxquant.export.program import _concatenated
from fxquant.passes.graph.names import is_fxquant

WEIGHT_ONLY = ("weight_only_fp8", "weight_only_nvfp4")


class Projections(nn.Module):
    """q, k and v, of which v is returned as it is; gate and up; one of another tensor; and two with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(128, n) for n in (256, 128, 128))
        self.gate, self.up = (nn.Linear(256, 128, bias=False) for _ in range(2))
        self.other, self.tied, self.tied_too = (nn.Linear(128, 128, bias=False) for _ in range(3))
        self.tied_too.weight = self.tied.weight
        self.to(torch.bfloat16).requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (p(x).unflatten(-1, (-1, 32)).transpose(1, 2) for p in (self.q, self.k, self.v))
        h = (q * k.repeat_interleave(2, 1)).transpose(1, 2).flatten(2)
        y = self.other(x + 1)
        return self.up(h) * self.gate(h).sigmoid(), v.transpose(1, 2), y, self.tied(y) + self.tied_too(y)


def layers(program: torch.export.ExportedProgram) -> int:
    return sum(is_fxquant(node, "scaled_mm") for node in program.graph.nodes)


@pytest.mark.parametrize("recipe", ["current_scaling", "rowwise", "float8_blockwise", "mxfp8", *WEIGHT_ONLY])
def test_values_and_layouts_stay(recipe: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 5, 128).bfloat16()
    shapes = ({0: Dim("batch", min=2, max=8)},)
    program = fxquant.quantize_program(torch.export.export(Projections(), (x,), dynamic_shapes=shapes), recipe)
    joined = _concatenated(program)
    joined.validate()
    before = layers(program)
    assert layers(joined) == (before if recipe == "mxfp8" else before - 3)
    most = 1.04 if recipe == "weight_only_nvfp4" else 1.02  # an amax for a row of 128 elements
    sizes = [sum(t.nbytes for t in p.state_dict.values()) for p in (joined, program)]
    assert sizes[0] <= most * sizes[1]
    for rows in (3, 4):
        x = torch.randn(rows, 5, 128).bfloat16()
        for got, want in zip(joined.module()(x), program.module()(x), strict=True):
            assert torch.equal(got, want) and got.stride() == want.stride()
    assert layers(program) == before, "the program itself stays as it is"


class Packed(nn.Module):
    """Three linears whose weights and biases are parts of one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(384, 64) / 8), nn.Parameter(torch.randn(384))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        parts = zip(self.weight.split(128), self.bias.split(128), strict=True)
        return tuple(nn.functional.linear(x, weight, bias) for weight, bias in parts)


@pytest.mark.parametrize("decomposed", [False, True], ids=["training_ir", "decomposed"])
def test_parts_of_one_parameter(decomposed: bool) -> None:
    x = torch.randn(8, 64)
    source = torch.export.export(Packed(), (x,))
    program = fxquant.quantize_program(source.run_decompositions() if decomposed else source, "rowwise")
    joined = _concatenated(program)
    joined.validate()
    assert layers(program) == 3 and layers(joined) == 1
    assert set(joined.state_dict) == {"weight_data_joined", "weight_scale_joined", "bias_joined"}
    for got, want in zip(joined.module()(x), program.module()(x), strict=True):
        assert torch.equal(got, want)
