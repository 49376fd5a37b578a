"""A graph that measures takes two tensors for each product; the graph that it is a copy of stays as it is."""

from __future__ import annotations

from dataclasses import replace

import torch
from expecttest import assert_expected_inline
from helpers import listing
from rewritten import bind, rewrite
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fxquant.kernels.probe.plan import Plan
from fxquant.passes.captured import Bound, add_observers
from fxquant.passes.graph.meta import EXAMPLE_VALUE
from fxquant.passes.graph.names import is_fxquant
from fxquant.passes.pipeline import PROBED, run
from fxquant.passes.settings import Settings
from fxquant.probes import WIDTH, Request


class Two(nn.Module):
    """Two layers, the second in a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 16, bias=False), nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.second, self.first(x), use_reentrant=False)


def bound_graph() -> Bound:
    return bind(rewrite("mxfp8", Two(), torch.randn(8, 32)), Settings())


def test_before_and_after() -> None:
    bound = bound_graph()
    before = listing(bound.gm.graph)
    probed = run(PROBED, replace(bound, request=Request.of(None, "weight", "amax", ())), Settings())
    assert listing(bound.gm.graph) == before
    assert_expected_inline(listing(probed.gm.graph), """\
%0 = input [16, 32]
%1 = input [8, 32]
%2 = input [16, 16]
%3 = input [2, 90]
%4 = input [0, 90]
%5 = input [2, 90]
%6 = input [0, 90]
%7 = linear_stateful(%1, %0, None, None, None, None, None, None, input=mxfp8_e4m3 weight=mxfp8_e4m3
    grad_output=mxfp8_e4m3 name=first, None, None, %3, %4, {"candidates": {"weight": []}, "groups":
    ["values"], "tensors": ["weight"]})
%8 = wrap_body_0
%9 = tag_activation_checkpoint(%8, %7, %2, %5, %6, use_reentrant=False)
%10 = getitem(%9, 0)
return [%10]""")  # fmt: skip
    assert [(o.layer, o.number) for o in probed.observed] == [("first", 0), ("second", 0)]
    inputs = probed.gm.graph.find_nodes(op="placeholder")[-4:]
    assert [node.meta[EXAMPLE_VALUE].shape[1] for node in inputs] == [WIDTH] * 4
    assert Plan.parse(probed.observed[0].text).forward()[0].role == "weight"


def test_a_checkpoint_passes_its_tensors_on() -> None:
    probed = run(PROBED, replace(bound_graph(), request=Request()), Settings())
    (body,) = (m for m in probed.gm.children() if isinstance(m, torch.fx.GraphModule))
    (node,) = (node for node in body.graph.nodes if is_fxquant(node, "linear_stateful"))
    assert all(taken.op == "placeholder" and taken.graph is body.graph for taken in node.args[-3:-1])


def test_only_what_is_wanted_is_measured_and_a_shared_graph_as_a_whole() -> None:
    bound = replace(bound_graph(), request=Request(layers=("second",)))
    assert [o.layer for o in add_observers(bound, Settings()).observed] == ["second"]
    assert len(add_observers(replace(bound, shared=True), Settings()).observed) == 2
    assert add_observers(replace(bound, request=None), Settings()).gm is bound.gm
