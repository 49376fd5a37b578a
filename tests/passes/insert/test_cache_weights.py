"""A graph takes its weights quantized, as more inputs, where they last longer than a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from helpers import hybrid, listing, per_role, recomputable_mlp
from rewritten import bind, rewrite
from torch import Tensor, nn

from fxquant import DelayedScaling, NVFP4Quantizer
from fxquant.passes.insert import cache_weights
from fxquant.passes.settings import Settings

STORED = Settings(stored_weights=True)


def layer() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(32, 64, bias=False)


def test_before_and_after() -> None:
    facts = rewrite("mxfp8", layer(), torch.randn(8, 32, requires_grad=True))
    assert_expected_inline(listing(facts.gm.graph), """\
%0 = input [64, 32]
%1 = input [8, 32]
%2 = linear(%1, %0, None, input=mxfp8_e4m3 weight=mxfp8_e4m3 grad_output=mxfp8_e4m3 name=)
return [%2]""")  # fmt: skip
    bound = bind(facts, STORED)
    assert_expected_inline(listing(bound.gm.graph), """\
%0 = input [64, 32]
%1 = input [8, 32]
%2 = input [64, 32]
%3 = input [64, 1]
%4 = input [32, 64]
%5 = input [32, 2]
%6 = linear_stateful(%1, %0, None, None, None, None, None, None, input=mxfp8_e4m3 weight=mxfp8_e4m3
    grad_output=mxfp8_e4m3 name=, [%2, %3], [%4, %5])
return [%6]""")  # fmt: skip
    assert [taken.direction for taken in bound.taken] == ["rowwise", "columnwise"]
    row, column = bound.taken
    assert row.weight == column.weight and row.place == column.place
    parts = [part for parts in row.weight.quantize(layer().weight, ("rowwise", "columnwise")) for part in parts]
    assert [(x.shape, x.dtype) for x in parts] == [(x.shape, x.dtype) for x in bound.parts]


def test_inference_takes_rows_alone() -> None:
    facts = rewrite("mxfp8", layer(), torch.randn(8, 32))
    with torch.no_grad():
        assert [taken.direction for taken in bind(facts, STORED).taken] == ["rowwise"]


def test_graphs_without_stored_weights_stay() -> None:
    facts = rewrite("mxfp8", layer(), torch.randn(8, 32))
    assert bind(facts, Settings()).gm is facts.gm


RECIPES: dict[str, tuple[Any, int]] = {
    "rows of any format": ("current_scaling", 2),
    "scaled by state": (DelayedScaling(), 0),
    "columns that are rounded at random": (
        per_role(
            input=NVFP4Quantizer(), grad_output=NVFP4Quantizer(),
            weight=hybrid(
                NVFP4Quantizer(), NVFP4Quantizer(stochastic_rounding=True)
            ),
        ),
        1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
def test_directions_that_last(name: str) -> None:
    recipe, count = RECIPES[name]
    facts = rewrite(recipe, layer(), torch.randn(8, 32, requires_grad=True))
    assert len(bind(facts, STORED).taken) == count


def test_views_on_the_way_from_the_parameter_are_kept_and_computed_weights_are_not_taken() -> None:
    weight = nn.Parameter(torch.randn(32, 64))

    def run(x: Tensor) -> Tensor:
        return x @ weight.view(64, 32).t() + x @ (weight * 2)

    (taken,) = bind(rewrite("mxfp8", run, torch.randn(8, 32)), STORED).taken
    assert taken.weight.steps and not taken.weight.grouped


def test_bodies_of_checkpoints_get_them_as_operands() -> None:
    facts = rewrite("mxfp8", recomputable_mlp(recompute=True), torch.randn(8, 64, requires_grad=True))
    bound = bind(facts, STORED)
    assert len(bound.taken) == 4 and len(bound.parts) == 8
    names = [node.name for node in bound.gm.graph.find_nodes(op="placeholder")]
    assert len([name for name in names if name.startswith("fxquant_weight")]) == 8


@pytest.mark.parametrize("grouped", [False, True])
def test_scales_that_tensor_cores_read_are_kept_in_their_order(grouped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_weights, "capability", lambda device: (10, 0))
    weight = nn.Parameter((torch.randn(2, 64, 32) if grouped else torch.randn(64, 32)).bfloat16())
    offs = torch.tensor([3, 8], dtype=torch.int32)

    def run(x: Tensor) -> Tensor:
        return torch._grouped_mm(x, weight.mT, offs=offs) if grouped else torch.nn.functional.linear(x, weight)

    facts = rewrite("mxfp8", run, torch.randn(8, 32, dtype=torch.bfloat16, requires_grad=True))
    bound = bind(facts, STORED)
    assert {taken.weight.spec for taken in bound.taken} == {"mxfp8_e4m3(swizzled)"}
    assert [tuple(part.shape[-2:]) for part in bound.parts[1::2]] == [(128, 4), (128, 4)]
    assert "weight=mxfp8_e4m3(swizzled)" in listing(bound.gm.graph)
    monkeypatch.setattr(cache_weights, "capability", lambda device: (12, 0))
    on_others = {taken.weight.spec for taken in bind(facts, STORED).taken}
    assert on_others == {"mxfp8_e4m3" if grouped else "mxfp8_e4m3(swizzled)"}
