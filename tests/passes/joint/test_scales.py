"""One scale of a tensor for forward and backward, and amaxes of columns that the forward takes along."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from expecttest import assert_expected_inline
from helpers import listing
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxquant.compat.patches import must_save
from fxquant.passes.graph.names import op_name
from fxquant.passes.joint.scales import nodes_of_backward, save_column_amaxes, save_scales
from fxquant.passes.settings import Settings

_ops = torch.ops.fxquant


def joint(run: Callable[..., Any], *shape: int) -> fx.GraphModule:
    """A graph of a weight and the gradients of a result."""
    return make_fx(lambda w, tangents: run(w, tangents), tracing_mode="fake")(torch.randn(shape), torch.randn(16, 32))


def saved(graph: fx.Graph) -> list[str]:
    must = fx.Graph().placeholder("x")
    must_save(must)
    return [op_name(node) for node in graph.nodes if node.meta.get("recompute") is must.meta["recompute"]]


def both_directions(w: Tensor, tangents: Tensor) -> list[Tensor]:
    sides = [_ops.quantize(w, "per_tensor_e4m3", direction) for direction in ("rowwise", "columnwise")]
    return [part for parts in (*sides, _ops.quantize(tangents, "per_tensor_e5m2", "rowwise")) for part in parts]


def test_one_scale_for_both_directions() -> None:
    gm = joint(both_directions, 16, 32)
    x = (torch.randn(16, 32), torch.randn(16, 32))
    before = gm(*x)
    assert save_scales(gm.graph, Settings()) == 2
    gm.recompile()
    assert_expected_inline(listing(gm.graph), """\
%0 = input [16, 32]
%1 = input [16, 32]
%2 = amax(%0)
%3 = scale_from_amax(%2, per_tensor_e4m3)
%4 = quantize(%0, per_tensor_e4m3, rowwise, %3)
%5 = getitem(%4, 0)
%6 = getitem(%4, 1)
%7 = quantize(%0, per_tensor_e4m3, columnwise, %3)
%8 = getitem(%7, 0)
%9 = getitem(%7, 1)
%10 = quantize(%1, per_tensor_e5m2, rowwise)
%11 = getitem(%10, 0)
%12 = getitem(%10, 1)
return [%5, %6, %8, %9, %11, %12]""")  # fmt: skip
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(gm(*x), before, strict=True))
    assert saved(gm.graph) == ["fxquant::scale_from_amax"]


def test_states_of_quantizations_are_saved_and_inputs_stay() -> None:
    def run(w: Tensor, tangents: Tensor) -> list[Tensor]:
        scale = tangents.new_ones(1)
        return [*_ops.quantize(w, "per_tensor_e4m3", "rowwise", scale[:1]), *_ops.quantize(w, "mxfp8_e4m3", "rowwise")]

    gm = joint(run, 16, 32)
    assert save_scales(gm.graph, Settings()) == 0
    assert saved(gm.graph) == [], "made of gradients"
    assert len(nodes_of_backward(gm.graph)) > 1


def test_amaxes_of_columns_come_with_the_rows() -> None:
    def run(w: Tensor, tangents: Tensor) -> list[Tensor]:
        sides = [_ops.split_quantize(w, None, "per_row_e4m3", direction) for direction in ("rowwise", "columnwise")]
        return [part for parts in sides for part in parts]

    gm = joint(run, 2, 16, 32)
    assert_expected_inline(listing(gm.graph), """\
%0 = input [2, 16, 32]
%1 = input [16, 32]
%2 = split_quantize(%0, None, per_row_e4m3, rowwise)
%3 = getitem(%2, 0)
%4 = getitem(%2, 1)
%5 = split_quantize(%0, None, per_row_e4m3, columnwise)
%6 = getitem(%5, 0)
%7 = getitem(%5, 1)
return [%3, %4, %6, %7]""")  # fmt: skip
    assert save_column_amaxes(gm.graph, Settings()) == 1
    assert_expected_inline(listing(gm.graph), """\
%0 = input [2, 16, 32]
%1 = input [16, 32]
%2 = split_quantize_and_amax(%0, per_row_e4m3)
%3 = getitem(%2, 2)
%4 = getitem(%2, 0)
%5 = getitem(%2, 1)
%6 = split_quantize(%0, None, per_row_e4m3, columnwise, %3)
%7 = getitem(%6, 0)
%8 = getitem(%6, 1)
return [%4, %5, %7, %8]""")  # fmt: skip
    assert saved(gm.graph) == ["getitem"]


def test_groups_of_rows_and_computed_weights_take_no_amaxes_along() -> None:
    def run(w: Tensor, tangents: Tensor) -> list[Tensor]:
        sides = [_ops.split_quantize(w * 2, None, "per_row_e4m3", direction) for direction in ("rowwise", "columnwise")]
        return [part for parts in sides for part in parts]

    assert save_column_amaxes(joint(run, 2, 16, 32).graph, Settings()) == 0
