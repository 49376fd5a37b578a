"""A graph with delayed scales or random numbers takes the tensors of its state as inputs, and updates them."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from helpers import listing, recomputable_mlp
from rewritten import bind, rewrite
from torch import nn

from fxquant import DelayedScaling
from fxquant.passes.graph.meta import EXAMPLE_VALUE
from fxquant.passes.graph.names import is_fxquant
from fxquant.passes.insert.bind_state import stateful_graphs
from fxquant.passes.settings import Settings


def layer() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(32, 16, bias=False)


def test_before_and_after() -> None:
    facts = rewrite(DelayedScaling(amax_history_len=2), layer(), torch.randn(8, 32))
    assert_expected_inline(listing(facts.gm.graph), """\
%0 = input [16, 32]
%1 = input [8, 32]
%2 = linear(%1, %0, None, input=per_tensor_e4m3(slot=0) weight=per_tensor_e4m3(slot=1)
    grad_output=per_tensor_e5m2(slot=2) name=)
return [%2]""")  # fmt: skip
    bound = bind(facts, Settings())
    assert_expected_inline(listing(bound.gm.graph), """\
%0 = input [16, 32]
%1 = input [8, 32]
%2 = input [3]
%3 = input [2, 3]
%4 = input [3]
%5 = input [3]
%6 = input [3]
%7 = input [3]
%8 = input [3]
%9 = delayed_update(%2, %3, %4, %5, %6, %8, 0.0, max)
%10 = getitem(%9, 0)
%11 = getitem(%9, 1)
%12 = add(%6, 1)
%13 = zeros_like(%4)
%14 = copy_(%2, %10)
%15 = copy_(%3, %11)
%16 = copy_(%4, %13)
%17 = copy_(%6, %12)
%18 = linear_stateful(%1, %0, None, %10, %4, %5, %7, None, input=per_tensor_e4m3(slot=0)
    weight=per_tensor_e4m3(slot=1) grad_output=per_tensor_e5m2(slot=2) name=)
return [%18]""")  # fmt: skip
    assert [len(facts.gm.graph.find_nodes(op="placeholder")) + len(bound.tensors)] == [
        len(bound.gm.graph.find_nodes(op="placeholder"))
    ]
    assert all(EXAMPLE_VALUE in node.meta for node in bound.gm.graph.nodes if node.op != "output")


def test_inference_reads_scales_and_writes_nothing() -> None:
    facts = rewrite(DelayedScaling(amax_history_len=2), layer(), torch.randn(8, 32))
    with torch.no_grad():
        bound = bind(facts, Settings())
    assert not bound.gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    (node,) = (node for node in bound.gm.graph.nodes if is_fxquant(node, "linear_stateful"))
    assert [argument is None for argument in node.args[3:8]] == [False, True, True, True, True]


def test_without_state_a_graph_stays() -> None:
    facts = rewrite("mxfp8", layer(), torch.randn(8, 32))
    assert bind(facts, Settings()).gm is facts.gm


def test_bodies_of_checkpoints_get_the_state_as_operands() -> None:
    facts = rewrite(DelayedScaling(), recomputable_mlp(recompute=True), torch.randn(8, 64))
    assert len(stateful_graphs(facts.gm)) == 2
    gm = bind(facts, Settings()).gm
    (body,) = stateful_graphs(gm) - {gm.graph}
    assert [node.target for node in body.find_nodes(op="placeholder")][-4:] == [
        "fxquant_scale", "fxquant_forward_amax", "fxquant_backward_amax", "fxquant_step",
    ]  # fmt: skip
