"""Pieces of graphs that compute what a traced pattern does, seen through views."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fxquant.compat.private import inductor_decompositions, make_fx
from fxquant.passes.graph.match import behind_views, matches, pattern_of, readers, shaped
from fxquant.passes.graph.meta import VAL

_aten = torch.ops.aten


def scaled_silu(x: Tensor, y: Tensor) -> Tensor:
    return torch.nn.functional.silu(x) * y


INPUTS = (((4, 8), torch.float32),) * 2
SPELLINGS: dict[str, tuple[Any, bool]] = {
    "as it is": (scaled_silu, True),
    "factors exchanged": (lambda x, y: y * torch.nn.functional.silu(x), True),
    "a view between": (lambda x, y: torch.nn.functional.silu(x.view(4, 8)).view(2, 16) * y, True),
    "one input twice": (lambda x, y: torch.nn.functional.silu(x) * x, False),
    "another activation": (lambda x, y: torch.relu(x) * y, False),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_pattern_in_a_graph(name: str) -> None:
    run, expected = SPELLINGS[name]
    table = dict(inductor_decompositions())
    graph = make_fx(run, tracing_mode="fake", decomposition_table=table)(torch.randn(2, 16), torch.randn(2, 16)).graph
    output, (x, y) = pattern_of(scaled_silu, INPUTS)
    inputs: dict[fx.Node, fx.Node] = {}
    found = matches(output, graph.output_node().args[0], inputs)
    assert found or not expected
    if expected:
        assert [inputs[node] for node in (x, y)] == graph.find_nodes(op="placeholder")
    elif found:
        assert inputs[x] is inputs[y], "two inputs of a pattern may be one tensor"


def test_patterns_are_traced_once_decomposed_or_not() -> None:
    assert pattern_of(scaled_silu, INPUTS) is pattern_of(scaled_silu, INPUTS)
    whole, _ = pattern_of(scaled_silu, INPUTS, decomposed=False)
    assert any(node.target is _aten.silu.default for node in whole.graph.nodes)
    assert not any(node.target is _aten.silu.default for node in pattern_of(scaled_silu, INPUTS)[0].graph.nodes)


def test_views_are_seen_through_in_both_directions() -> None:
    def run(x: Tensor) -> list[Tensor]:
        y = x.exp()
        return [y.view(8, 4).relu(), y.t().relu(), y + 1]

    graph = make_fx(run, tracing_mode="fake")(torch.randn(4, 8)).graph
    (y,) = graph.find_nodes(op="call_function", target=_aten.exp.default)
    first, second = graph.find_nodes(op="call_function", target=_aten.relu.default)
    assert behind_views(first.args[0]) is behind_views(second.args[0]) is y and behind_views(3) == 3
    assert [node.target for node in readers(y)] == [_aten.relu.default, _aten.t.default, _aten.add.Tensor]


def test_a_reshape_is_added_where_the_shape_differs() -> None:
    graph = make_fx(lambda x: x.exp(), tracing_mode="fake")(torch.randn(4, 8)).graph
    _, y, output = graph.nodes
    with graph.inserting_before(output):
        assert shaped(y, [4, 8]) is y
        node = shaped(y, [32])
    assert node.target is _aten.reshape.default and node.meta[VAL].shape == (32,)
