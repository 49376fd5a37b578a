"""A scale and the amax that it is made of are one operator, of which each card has its kernels."""

from __future__ import annotations

import pytest
import torch
from bits import same
from helpers import listing
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fxquant.compat.private import make_fx, triton_kernel_wrapper_functional
from fxquant.kernels.cast.choice import CastKernel
from fxquant.kernels.operator import OPERATORS
from fxquant.passes.lower.lower import facts_of, lower
from fxquant.passes.lower.scale_at_once import scale_at_once
from fxquant.passes.settings import Settings

ops = torch.ops.fxquant
E4M3, E5M2 = "per_tensor_e4m3", "per_tensor_e5m2"


def scaled(x: Tensor) -> list[Tensor]:
    y, both = x.exp(), ops.amax(x)
    own = ops.scale_from_amax(ops.amax(y), E4M3)
    return [*ops.quantize(y, E4M3, "rowwise", own), ops.scale_from_amax(both, E4M3), ops.scale_from_amax(both, E5M2)]


def test_the_same_scale_of_an_amax_that_nothing_else_reads() -> None:
    x = torch.randn(8, 32, dtype=torch.bfloat16)
    gm = make_fx(scaled, tracing_mode="fake")(x)
    before = gm(x)
    assert scale_at_once(gm.graph, Settings(kernels=False, device="cpu")) == 0, "it has no kernel"
    assert scale_at_once(gm.graph, Settings()) == 0, "another device"
    assert scale_at_once(gm.graph, Settings(device="cpu")) == 1
    gm.recompile()
    assert all(map(same, before, gm(x)))
    assert "%3 = tensor_scale(%1, per_tensor_e4m3)" in listing(gm.graph)
    assert len(gm.graph.find_nodes(op="call_function", target=ops.amax.default)) == 1
    assert scale_at_once(gm.graph, Settings(device="cpu")) == 0


@pytest.mark.parametrize(
    ("shape", "made", "kernel"),
    [
        ((64, 32), False, CastKernel.STORED),
        ((64, 32), True, CastKernel.TRITON),
        ((1, 32), True, CastKernel.FUSED),
        ((32,), True, CastKernel.FUSED),
    ],
)
def test_kernels(shape: tuple[int, ...], made: bool, kernel: CastKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxquant.kernels.cast.choice.capability", lambda device: (9, 0))
    with FakeTensorMode():
        x = torch.empty(shape, device="cuda", dtype=torch.bfloat16)
        gm = make_fx(lambda x: ops.tensor_scale(x.exp() if made else x, E4M3))(x)
    (node,) = gm.graph.find_nodes(op="call_function", target=ops.tensor_scale.default)
    assert OPERATORS["tensor_scale"].choose(facts_of(node, Settings())).kernel is kernel
    if kernel is CastKernel.FUSED:
        return
    lower(gm.graph, Settings())
    launches = gm.graph.find_nodes(op="call_function", target=triton_kernel_wrapper_functional)
    assert len(launches) == (1 if made else 2)
    assert len(gm.graph.nodes) < 30
