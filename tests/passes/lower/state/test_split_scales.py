"""Delayed scales as tensors of their own, and amaxes that are taken into the state together."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fxquant.kernels.cast import ops
from fxquant.passes.graph.names import is_fxquant
from fxquant.passes.lower.state.batch_amaxes import batch_amaxes
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


def taken_one_by_one(amaxes: Tensor, since: Tensor, step: Tensor, new: list[Tensor]) -> list[Tensor]:
    for amax, slot in zip(new, (3, 0, 3, 3, 12), strict=True):
        amaxes = torch.ops.fxquant.record(amaxes, [amax], [slot])
        since = torch.ops.fxquant.record_since(since, step, [amax], [slot])
    return [amaxes, since]


def since_step(amaxes: Tensor, steps: Tensor) -> Tensor:
    """Amaxes with the steps that wrote them, as the state holds them."""
    return amaxes.view(torch.int32) + steps * 2**32


def magnitudes(since: Tensor) -> Tensor:
    return (since % 2**32).to(torch.int32).view(torch.float32)


def expected_of(amaxes: Tensor, since: Tensor, step: Tensor, new: list[Tensor]) -> list[Tensor]:
    amaxes, since = amaxes.clone(), since.clone()
    for amax, slot in zip(new, (3, 0, 3, 3, 12), strict=True):
        for i, value in enumerate(amax, slot):
            amaxes[i] = torch.maximum(amaxes[i], value)
            kept = magnitudes(since)[i] if since[i] >> 32 == step[i] else torch.zeros(())
            since[i] = since_step(torch.maximum(kept, value), step[i])
    return [amaxes, since]


@pytest.mark.parametrize("nan", [False, True])
def test_amaxes_are_taken_in_together(nan: bool) -> None:
    amaxes = torch.rand(15) * 2
    since = since_step(torch.rand(15) * 2, torch.randint(3, 5, (15,)))
    step, new = torch.full((15,), 4), [torch.rand(1) * 2 for _ in range(4)] + [torch.rand(2)]
    if nan:
        new[1], amaxes[3] = torch.full((1,), torch.nan), torch.nan
        since[12] = since_step(torch.tensor(torch.nan), step[12])
    gm = make_fx(taken_one_by_one)(amaxes, since, step, [*new[:3], new[0], new[4]])
    given = [amaxes, since, step, [*new[:3], new[0], new[4]]]
    assert batch_amaxes(gm.graph, Settings()) == 8
    gm.graph.lint()
    gm.recompile()
    assert [n.name for n in gm.graph.nodes if is_fxquant(n)] == ["record_4", "record_since_4"]
    for got in (gm(*given), taken_one_by_one(*given)):
        for value, expected in zip(got, expected_of(*given), strict=True):
            torch.testing.assert_close(value, expected, rtol=0, atol=0, equal_nan=True)


def test_amaxes_that_something_reads_in_between_stay() -> None:
    def run(amaxes: Tensor, new: Tensor) -> list[Tensor]:
        first = torch.ops.fxquant.record(amaxes, [new], [0])
        return [first, torch.ops.fxquant.record(first, [new], [1])]

    gm = make_fx(run)(torch.rand(2), torch.rand(1))
    assert batch_amaxes(gm.graph, Settings()) == 0
