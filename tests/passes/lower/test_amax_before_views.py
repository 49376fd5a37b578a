"""Amaxes are taken of tensors as they are made."""

from __future__ import annotations

import torch
from bits import same
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fxquant.compat.private import make_fx
from fxquant.kernels.cast import reference
from fxquant.passes.graph.names import is_fxquant
from fxquant.passes.lower.amax_before_views import amax_before_views
from fxquant.passes.settings import Settings

ops = torch.ops.fxquant
E4M3, E5M2 = "per_tensor_e4m3", "per_tensor_e5m2"


def amaxes(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if is_fxquant(node, "amax")]


def test_the_same_parts_from_amaxes_of_what_is_viewed() -> None:
    def run(x: Tensor, given: Tensor) -> list[Tensor]:
        y = x.exp()
        flat = y.view(-1, 32)
        scale = ops.scale_from_amax(ops.amax(flat), E4M3)
        return [
            *ops.quantize(flat, E5M2, "columnwise"),
            *ops.hybrid_quantize(flat, E4M3, E5M2),
            *ops.hybrid_quantize(flat, E4M3, E4M3, None, given),
            *ops.quantize(flat, E4M3, "rowwise", scale),
        ]

    inputs = torch.randn(3, 8, 32, dtype=torch.bfloat16), torch.tensor([2.0])
    gm = make_fx(run, tracing_mode="fake")(*inputs)
    before = gm(*inputs)
    assert amax_before_views(gm.graph, Settings(device="cpu")) == 4
    gm.recompile()
    for want, got in zip(before, gm(*inputs), strict=True):
        assert same(want, got)
    taken = amaxes(gm.graph)
    assert len(taken) == 5 and all(node.args[0].target is torch.ops.aten.exp.default for node in taken)
    assert torch.equal(reference.amax(inputs[0].exp()), reference.amax(inputs[0].exp().view(-1, 32)))


def test_what_is_in_memory_and_other_scales_stay() -> None:
    def run(x: Tensor, w: Tensor, given: Tensor) -> list[Tensor]:
        y = x.exp().view(-1, 32)
        return [
            *ops.quantize(x.view(-1, 32), E4M3, "rowwise"),
            *ops.quantize((x.view(-1, 32) @ w).view(-1, 32), E4M3, "rowwise"),
            *ops.quantize(x.exp(), E4M3, "rowwise"),
            *ops.quantize(y, E4M3, "rowwise", given),
            *ops.quantize(y, "per_row_e4m3", "rowwise"),
        ]

    with FakeTensorMode():
        shapes = (2, 4, 32), (32, 64), (1,)
        graph = make_fx(run)(*(torch.empty(shape, device="cuda") for shape in shapes)).graph
    assert amax_before_views(graph, Settings()) == 0 and not amaxes(graph)
