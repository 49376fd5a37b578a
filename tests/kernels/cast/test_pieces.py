"""Casts that are compiled once for their format: the reference's bytes at every size, and few kernels for a graph."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_same_bits
from torch import Tensor, nn

from fxquant.backend.backend import Backend
from fxquant.formats import QuantSpec
from fxquant.kernels.cast import pieces, reference
from fxquant.kernels.cast.pieces import dequantize_piece, quantize_piece

SHAPES = ((64, 256), (1, 32), (33, 70), (5, 7, 130), (0, 64), (2, 3, 1, 16))


def sample(shape: tuple[int, ...]) -> Tensor:
    """Random numbers among which NaN, infinity and a subnormal stand."""
    x = torch.randn(shape)
    if x.numel():
        x.view(-1)[:3] = torch.tensor([torch.nan, torch.inf, 1e-39])
    return x


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8) if x.numel() else x


@pytest.mark.parametrize("text", ["mxfp8_e4m3", "block_128x128_e4m3(pow2)", "nvfp4_2d(stochastic)"])
def test_pieces_give_the_bytes_of_the_reference(text: str) -> None:
    """One row, ragged sizes, batches, nothing at all, and a transposed tensor, by one compilation each."""
    spec, before = QuantSpec.parse(text), len(pieces._pieces)
    state = torch.tensor([5, 6, 7]) if spec.stochastic else None
    for x in (*map(sample, SHAPES), sample((96, 64)).mT):
        parts, expected = quantize_piece(x, text, state), reference.quantize(x, spec, state)
        assert len(parts) == len(expected) and all(part.is_contiguous() for part in parts)
        assert_same_bits(*(dict(enumerate(map(bits, tensors))) for tensors in (parts, expected)))
        values, wanted = dequantize_piece(parts, text), reference.dequantize(expected, spec)
        torch.testing.assert_close(values, wanted, rtol=0, atol=0, equal_nan=True)
    assert len(pieces._pieces) - before <= 2 + spec.stochastic  # whose random bits have one of their own


def test_graphs_of_a_cpu_share_pieces() -> None:
    """Two graphs of other sizes compile no cast again, and train as their operators' meanings do."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, n), nn.GELU(), nn.Linear(n, 64)) for n in (96, 160)]
    compiled, results = [], []
    for layer in layers:
        for inner in ("inductor", "aot_eager"):
            torch.compiler.reset()
            x = torch.randn(40, 64, generator=torch.Generator().manual_seed(1), requires_grad=True)
            torch.compile(layer, backend=Backend("mxfp8", inner=inner))(x).square().sum().backward()
            results.append(x.grad)
        compiled.append(len(pieces._pieces))
    assert compiled[0] == compiled[1]
    torch.testing.assert_close(results[::2], results[1::2], rtol=0.02, atol=0.02)
