"""The state of delayed scaling goes on to its next step in one operator, where nothing else is done with it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from helpers import listing
from torch import Tensor, fx

from fxquant.compat.private import make_fx
from fxquant.passes.lower.state.advance import advance_state
from fxquant.passes.settings import Settings

N = 2
_ops = torch.ops.fxquant


def step_of_training(
    scale: Tensor, history: Tensor, amaxes: Tensor, since: Tensor, step: Tensor, fp8_max: Tensor, x: Tensor
) -> list[Tensor]:
    scales, following = _ops.delayed_update(scale, history, amaxes, since, step, fp8_max, 0.0, "max")
    recorded = _ops.record(torch.zeros_like(amaxes), [_ops.amax(x)], [1])
    counted = step + 1
    for state, value in ((scale, scales), (history, following), (amaxes, recorded), (step, counted)):
        state.copy_(value)
    return [x * scales.narrow(0, 1, 1), *scales.split(1)]


def inputs() -> list[Tensor]:
    since = torch.rand(N).view(torch.int32) + torch.tensor([2, 3]) * 2**32
    state = [torch.rand(N), torch.rand(4, N), torch.rand(N), since, torch.tensor(3)]
    return [*state, torch.full((N,), 448.0), torch.randn(4, 8)]


def traced(run: Callable[..., list[Tensor]]) -> fx.GraphModule:
    """A graph with zeros as Inductor has them."""
    gm = make_fx(run)(*inputs())
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.zeros_like.default):
        node.target, node.args, node.kwargs = torch.ops.aten.full.default, ([N], 0), {}
    return gm


def test_a_step_before_and_after() -> None:
    """A second run changes nothing."""
    gm = traced(step_of_training)
    for advanced in (1, 0):
        assert advance_state(gm.graph, Settings(device="cpu")) == advanced
        gm.graph.lint()
        assert_expected_inline(listing(gm.graph), """\
%0 = input [2]
%1 = input [4, 2]
%2 = input [2]
%3 = input [2]
%4 = input []
%5 = input [2]
%6 = input [4, 8]
%7 = delayed_advance(%0, %1, %2, %3, %4, %5, 0.0, max)
%8 = getitem(%7, 0)
%9 = getitem(%7, 1)
%10 = cat([%8, %9])
%11 = full([2], 0)
%12 = amax(%6)
%13 = record(%2, [%12], [1])
%14 = copy_(%2, %13)
%15 = mul(%6, %9)
%16 = split(%10, 1)
%17 = getitem(%16, 0)
%18 = getitem(%16, 1)
return [%15, %17, %18]""")  # fmt: skip


def test_results_and_state_are_what_they_were() -> None:
    gm = traced(step_of_training)
    expected, got = inputs(), inputs()
    for a, b in zip(expected, got, strict=True):
        b.copy_(a)
    results = step_of_training(*expected)
    assert advance_state(gm.graph, Settings(device="cpu")) == 1
    gm.recompile()
    for a, b in zip([*gm(*got), *got], [*results, *expected], strict=True):
        assert torch.equal(a, b)


def evaluation(*tensors: Tensor) -> list[Tensor]:
    return [*_ops.delayed_update(*tensors[:6], 0.0, "max")]


def reader(*tensors: Tensor) -> list[Tensor]:
    return [tensors[2] * 2, *step_of_training(*tensors)]


def counts_twice(*tensors: Tensor) -> list[Tensor]:
    results = step_of_training(*tensors)
    tensors[4].copy_(tensors[4] + 1)
    return results


@pytest.mark.parametrize("run", [evaluation, reader, counts_twice])
def test_what_is_no_step_of_training_stays(run: Callable[..., list[Tensor]]) -> None:
    gm = traced(run)
    before = listing(gm.graph)
    assert advance_state(gm.graph, Settings(device="cpu")) == 0
    assert listing(gm.graph) == before


def test_another_device_keeps_its_update() -> None:
    assert advance_state(traced(step_of_training).graph, Settings(device="cuda")) == 0
