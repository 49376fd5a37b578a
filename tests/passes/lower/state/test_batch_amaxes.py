"""Amaxes that are taken into the state together."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fxquant.passes.graph.names import is_fxquant
from fxquant.passes.lower.state.batch_amaxes import batch_amaxes
from fxquant.passes.settings import Settings


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
