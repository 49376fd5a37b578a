"""Under an `auto` recipe what is slower quantized stays in high precision, with the times as the reason."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from helpers import captured
from torch import Tensor

from fxquant import SkipReason, recipes
from fxquant.cost.estimate import estimate
from fxquant.passes.captured import Captured, drop_unprofitable
from fxquant.passes.find.facts import Match, decisions_of, quantized
from fxquant.passes.find.walk import find_matmuls
from fxquant.passes.plan import weigh as weighing
from fxquant.passes.plan.resolve import resolve
from fxquant.passes.plan.weigh import weigh
from fxquant.passes.settings import Settings

on_h100 = functools.partial(estimate, card="H100")


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weighing, "estimate", on_h100)


def matches(run: Callable[..., object], *shapes: tuple[int, ...], recipe: str = "rowwise") -> list[Match]:
    """The decided products of a function of bfloat16 tensors of these shapes."""
    tensors = [torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True) for shape in shapes]
    torch.compiler.reset()
    (gm,) = captured(run, *tensors)
    return list(resolve(find_matmuls(gm), recipes.resolve(recipe))[0])


def layers(x: Tensor, *weights: Tensor) -> list[Tensor]:
    """Layers of one input."""
    return [F.linear(x, w) for w in weights]


def stay(before: Sequence[Match]) -> list[bool]:
    return [quantized(match) for match in weigh(before)]


LARGE, SMALL = (4096, 4096), (64, 4096)


def test_what_is_faster_is_as_it_was() -> None:
    before = matches(layers, (8192, 4096), LARGE, LARGE)
    assert weigh(before) == before and all(map(quantized, before))


def test_what_is_slower_says_how_much() -> None:
    before = matches(layers, (8192, 4096), LARGE, SMALL)
    large, small = weigh(before)
    assert large == before[0]
    times = str(on_h100(decisions_of(before))[before[1].resolved[0].decisions[0].site])
    for decision in decisions_of([small]):
        assert decision.quantizer is None and decision.skip_reason is SkipReason.NOT_PROFITABLE
        assert decision.detail == times


def test_a_second_weighing_changes_nothing() -> None:
    once = weigh(matches(layers, (8192, 4096), LARGE, SMALL, SMALL))
    assert weigh(once) == once


def test_one_that_stays_leaves_its_cast_to_the_others() -> None:
    """Two layers share the cast of their input, which is worth its time for neither alone."""
    before = matches(layers, (8192, 2048), (1664, 2048), (1024, 2048))
    assert [cost.slower for cost in on_h100(decisions_of(before)).values()] == [False, True]
    assert stay(before) == [False, False]


def test_other_recipes_are_not_weighed() -> None:
    (gm,) = captured(layers, torch.empty(64, 64, device="meta"), torch.empty(64, 64, device="meta"))
    for name, asks in (("rowwise", False), ("auto(rowwise)", True)):
        facts = Captured(gm=gm, recipe=recipes.resolve(name), matches=matches(layers, (64, 64), (64, 64)))
        assert (drop_unprofitable(facts, Settings()) is not facts) is asks
