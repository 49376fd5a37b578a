"""Delayed scales as tensors of their own."""

from __future__ import annotations

import operator

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fxquant.kernels.cast import ops
from fxquant.passes.graph.names import is_fxquant
from fxquant.passes.lower.state.split_scales import split_scales
from fxquant.passes.settings import Settings

SPEC = "per_tensor_e4m3"


def quantizes(x: Tensor, scales: Tensor) -> list[Tensor]:
    entries = [scales.narrow(0, i, 1) for i in (2, 0, 0)]
    return [*(part for each in entries for part in ops.quantize(x, SPEC, "rowwise", each)), scales[1:2]]


def test_entries_that_scale_come_out_of_one_kernel_with_the_bits_they_had() -> None:
    x, scales = torch.randn(16, 32), torch.tensor([0.5, 3.0, 7.0])
    gm = make_fx(quantizes)(x, scales)
    assert split_scales(gm.graph, Settings(device="cpu")) == 3
    gm.graph.lint()
    gm.recompile()
    parted = gm.graph.find_nodes(op="call_function", target=torch.ops.aten._foreach_mul.Scalar)
    assert len(parted) == 1 and len(parted[0].args[0]) == 3
    for node in gm.graph.nodes:
        if is_fxquant(node, "quantize"):
            assert node.args[3].target is operator.getitem, node.format_node()
    for got, expected in zip(gm(x, scales), quantizes(x, scales), strict=True):
        assert torch.equal(got, expected) and got.dtype == expected.dtype


def test_what_is_no_scale_stays() -> None:
    def run(x: Tensor, values: Tensor) -> list[Tensor]:
        return [values[:1] * x, values[1:2], values[2:], *ops.quantize(x, SPEC, "rowwise", values.new_ones(1))]

    gm = make_fx(run)(torch.randn(16, 32), torch.randn(3))
    assert split_scales(gm.graph, Settings(device="cpu")) == 0
    with FakeTensorMode():
        on_cpu = make_fx(quantizes)(torch.randn(16, 32), torch.ones(3))
    assert split_scales(on_cpu.graph, Settings()) == 0, "C++ has no kernel of many"
