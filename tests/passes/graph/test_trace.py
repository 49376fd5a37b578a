"""Functions that become graphs, and graphs that take the place of nodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from helpers import captured, listing
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fxquant.passes.graph.builder import Builder, put_in_place
from fxquant.passes.graph.meta import VAL
from fxquant.passes.graph.names import calls
from fxquant.passes.graph.trace import inline, trace
from fxquant.passes.graph.values import value_of


def test_inputs_are_the_tensors_and_symbols_among_the_arguments() -> None:
    def run(pair: list[Tensor], scale: float, *, name: str, other: Tensor) -> Tensor:
        assert name == "a name"
        return pair[0] * scale + pair[1] - other

    body = trace(run, ([torch.ones(2), torch.ones(2)], 3.0), {"name": "a name", "other": torch.ones(2)})
    assert_expected_inline(listing(body.graph), """\
%0 = input [2]
%1 = input [2]
%2 = input [2]
%3 = mul(%0, 3.0)
%4 = add(%3, %1)
%5 = sub(%4, %2)
return %5""")  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_call_of_a_captured_graph_is_written_out(dynamic: bool) -> None:
    x = torch.randn(3, 8)
    (gm,) = captured(lambda x: torch.nn.functional.rms_norm(x, [8], eps=0.0) + 1, x, dynamic=dynamic)
    (node,) = (node for node in gm.graph.nodes if calls(node, ("rms_norm",)))
    inputs = [3, x][-len(gm.graph.find_nodes(op="placeholder")) :]
    (expected,) = gm(*inputs)
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), value_of)
    body = trace(torch.nn.functional.rms_norm, args, kwargs)
    result, copies = inline(Builder(node), body)
    assert all(copy.graph is gm.graph and "example_value" in copy.meta for copy in copies.values())
    put_in_place(result, node)
    gm.graph.lint()
    gm.recompile()
    assert torch.equal(gm(*inputs)[0], expected)


def test_one_trace_serves_several_nodes_with_values_of_their_own() -> None:
    gm = make_fx(lambda x, y: x.relu() + y.relu(), tracing_mode="fake")(torch.randn(4), torch.randn(4))
    first, second = (node for node in gm.graph.nodes if node.target is torch.ops.aten.relu.default)
    body = trace(lambda x: x * 2 + 1, [value_of(first.args[0])])
    storages = []
    for node in (first, second):
        result, copies = inline(Builder(node), body)
        storages += [copy.meta[VAL].untyped_storage() for copy in copies.values() if copy.op == "call_function"]
        put_in_place(result, node)
    assert len(set(map(id, storages))) == 4, "Inductor takes equal storages for aliases"


def test_constants_of_a_trace_are_held_by_the_graph() -> None:
    table = torch.tensor([1.0, 2.0, 4.0])
    gm = make_fx(lambda x: x.relu().relu(), tracing_mode="fake")(torch.randn(3))
    body = trace(lambda x: x * table, [torch.randn(3)])
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default):
        result, _ = inline(Builder(node), body)
        put_in_place(result, node)
    assert len(gm.graph.find_nodes(op="get_attr")) == 1
    gm.recompile()
    assert torch.equal(gm(torch.ones(3)), table * table)


def test_several_results_keep_their_structure() -> None:
    def run(x: Tensor) -> list[Any]:
        return [x + 1, [x, x - 1]]

    gm = make_fx(lambda x: x.relu(), tracing_mode="fake")(torch.randn(3))
    (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
    first, (same, last) = inline(Builder(node), trace(run, [value_of(node.args[0])]))[0]
    assert same is node.args[0] and {first.target, last.target} == {
        torch.ops.aten.add.Tensor,
        torch.ops.aten.sub.Tensor,
    }


def test_inputs_keep_the_strides_that_an_operator_was_traced_with() -> None:
    """Inductor gives an operator that wants exact strides those of `eager_input_vals`, and else may choose others."""

    def product(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
        return torch.ops.aten._scaled_mm.default(a, b.t(), scale, scale, out_dtype=torch.bfloat16)

    with FakeTensorMode():
        a, b, scale = torch.empty(32, 64), torch.empty(48, 64), torch.ones(())
        a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        gm = make_fx(lambda a, b, scale: torch.ops.aten.clone.default(a))(a, b, scale)
        places = gm.graph.find_nodes(op="placeholder")
        (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
        node.args = (*places,)
        _, copies = inline(Builder(node), trace(product, (a, b, scale)))
    (call,) = (copy for inner, copy in copies.items() if inner.target is torch.ops.aten._scaled_mm.default)
    assert call.meta["eager_input_vals"][0][1].stride() == (1, 64)
