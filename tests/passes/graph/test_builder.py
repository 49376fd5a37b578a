"""One builder for both dialects of graphs; results in the place of nodes; nodes that nothing reads any more."""

from __future__ import annotations

import pytest
import torch
from helpers import captured
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxquant.passes.graph.builder import Builder, call_key, erase_unused, put_in_place, put_in_places
from fxquant.passes.graph.meta import EXAMPLE_VALUE, VAL
from fxquant.passes.graph.values import value_of

_aten = torch.ops.aten


def model(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).relu()


def graphs(dialect: str) -> tuple[fx.GraphModule, str]:
    args = torch.randn(4, 8), torch.randn(8, 6)
    if dialect == "captured":
        return captured(model, *args, dynamic=True)[0], EXAMPLE_VALUE
    return make_fx(model, tracing_mode="symbolic")(*args), VAL


@pytest.mark.parametrize("dialect", ["captured", "aten"])
def test_a_node_has_its_value_and_its_origin(dialect: str) -> None:
    gm, key = graphs(dialect)
    (output,) = gm.graph.find_nodes(op="output")
    anchor = output.all_input_nodes[0]
    anchor.meta |= {"stack_trace": "here", "tensor_meta": "of the anchor"}
    builder = Builder(anchor)
    node = builder.call(torch.transpose, anchor.all_input_nodes[0], 0, 1)
    assert anchor.prev is node and node.meta["stack_trace"] == "here" and "tensor_meta" not in node.meta
    assert (
        list(node.meta[key].shape) == list(value_of(anchor).shape)[::-1]
        and type(node.meta[key]).__name__ == "FakeTensor"
    )
    size = builder.size(node, 0)
    assert size == value_of(node).shape[0] if isinstance(size, int) else value_of(size) == value_of(node).shape[0]
    gm.graph.lint()


def test_a_builder_with_calls_adds_equal_ones_once() -> None:
    gm, _ = graphs("aten")
    x, w, *_, relu, _ = gm.graph.nodes
    builder = Builder(relu, {})
    first = builder.call(_aten.view.default, x, [8, 4])
    assert builder.call(_aten.view.default, x, (8, 4)) is first
    assert builder.call(_aten.view.default, x, [4, 8]) is not first
    assert Builder(relu).call(_aten.view.default, x, [8, 4]) is not first
    assert call_key(_aten.add, (x, 1), {}) != call_key(_aten.add, (x, 1.0), {}) != call_key(_aten.add, (w, 1.0), {})


def test_a_constant_is_held_once_in_front_of_all_that_is_computed() -> None:
    gm, _ = graphs("aten")
    relu = next(node for node in gm.graph.nodes if node.target is _aten.relu.default)
    builder, table = Builder(relu), torch.arange(4)
    node = builder.constant(table)
    assert builder.constant(table.clone()) is node and builder.constant(table.int()) is not node
    assert next(n for n in gm.graph.nodes if n.op == "call_function") in list(gm.graph.nodes)[4:]
    assert torch.equal(getattr(gm, str(node.target)), table) and node.meta[VAL].shape == (4,)


def test_a_result_takes_the_place_of_a_node_with_what_is_known_of_it() -> None:
    gm, _ = graphs("aten")
    relu = next(node for node in gm.graph.nodes if node.target is _aten.relu.default)
    relu.meta |= {"custom": {"a": 1}, "stack_trace": "of the node"}
    result = Builder(relu).call(_aten.neg.default, relu.args[0])
    del result.meta["custom"]
    result.meta["stack_trace"] = "its own"
    put_in_place(result, relu)
    assert result.meta["custom"] == {"a": 1} and result.meta["stack_trace"] == "its own"
    assert gm.graph.output_node().all_input_nodes == [result] and relu not in gm.graph.nodes


def test_results_take_the_places_of_items() -> None:
    gm = make_fx(lambda x: x.max(0)[0] + 1, tracing_mode="fake")(torch.randn(4, 3))
    node = next(node for node in gm.graph.nodes if node.target is _aten.max.dim)
    item = next(user for user in node.users if user.args[1] == 0)
    other = Builder(node).call(_aten.amax.default, node.args[0], [0])
    put_in_places([other, other], node)
    gm.graph.lint()
    assert node not in gm.graph.nodes and item not in gm.graph.nodes and len(other.users) == 1


def test_the_remover_takes_what_was_computed_for_the_dead_alone() -> None:
    def run(x: Tensor, y: Tensor) -> Tensor:
        shared = x * 2
        dead = (shared + 1).relu()
        torch.ops.aten.copy_.default(y, dead)
        (shared - 1).relu()
        return shared

    gm = make_fx(run)(torch.randn(4), torch.randn(4))
    before = [node.target for node in gm.graph.nodes if node.op == "call_function"]
    kept = next(node for node in gm.graph.nodes if node.target is _aten.sub.Tensor)
    erase_unused(gm.graph.nodes, keep=[kept])
    after = [node.target for node in gm.graph.nodes if node.op == "call_function"]
    assert [t for t in before if t not in after] == [] and len(before) == len(after) + 1, "a relu"
    erase_unused([kept])
    assert kept not in gm.graph.nodes
    erase_unused(gm.graph.nodes)
    assert [node.target for node in gm.graph.nodes if node.op == "call_function"] == [
        _aten.mul.Tensor, _aten.add.Tensor, _aten.relu.default, _aten.copy_.default,
    ]  # fmt: skip
