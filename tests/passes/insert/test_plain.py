"""Products that stay in high precision become operators that a probe can measure, to the same bits."""

from __future__ import annotations

from dataclasses import replace

import torch
from expecttest import assert_expected_inline
from helpers import listing
from rewritten import bind, rewrite
from torch import nn

from fxquant.passes.captured import open_products
from fxquant.passes.settings import Settings
from fxquant.probes import Request


def test_before_and_after() -> None:
    """Only the layers that are wanted change; the other one, and the graph that it is a copy of, stay."""
    layer, x = nn.Sequential(nn.Linear(32, 16, bias=False), nn.Linear(16, 16)), torch.randn(8, 32)
    bound = replace(bind(rewrite("high_precision", layer, x), Settings()), request=Request(layers=("0",)))
    before = listing(bound.gm.graph)
    opened = open_products(bound, Settings())
    assert_expected_inline(listing(opened.gm.graph), """\
%0 = input [16, 32]
%1 = input [8, 32]
%2 = input [16, 16]
%3 = input [16]
%4 = linear(%1, %0, None, input=identity weight=identity grad_output=identity name=0)
%5 = linear(%4, %2, %3)
return [%5]""")  # fmt: skip
    assert listing(bound.gm.graph) == before and "fxquant" not in before
    assert listing(open_products(opened, Settings()).gm.graph) == listing(opened.gm.graph)
    inputs = [layer[0].weight, x, *layer[1].parameters()]
    by_shape = {tuple(t.shape): t for t in inputs}
    shapes = [tuple(node.meta["example_value"].shape) for node in opened.gm.graph.find_nodes(op="placeholder")]
    (result,) = opened.gm(*(by_shape[shape] for shape in shapes))
    assert torch.equal(result, layer(x))
