"""Axes that are followed through views, in both dialects of graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers import captured
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxquant.passes.graph.axes import Parts, order_before, order_of, same, same_sizes

ORDERS: dict[str, tuple[Callable[[Tensor], Tensor], list[int] | None]] = {
    "transpose": (lambda x: x.transpose(0, -1), [3, 1, 2, 0]),
    "permute": (lambda x: x.permute(0, -1, 1, 2), [0, 3, 1, 2]),
    "permute of a list": (lambda x: x.permute([0, 3, 1, 2]), [0, 3, 1, 2]),
    "mT": (lambda x: x.mT, [0, 1, 3, 2]),
    "reshape": (lambda x: x.reshape(3, 2, 4, 5), None),
    "exp": (lambda x: x.exp(), None),
}


def last(graph: fx.Graph) -> fx.Node:
    return graph.output_node().all_input_nodes[0]


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("dialect", ["captured", "aten"])
def test_orders(name: str, dialect: str) -> None:
    run, order = ORDERS[name]

    def doubled(x: Tensor) -> Tensor:  # torch.compile captures no graph of attributes alone
        return run(x) * 2

    x = torch.randn(2, 3, 4, 5)
    gm = captured(doubled, x)[0] if dialect == "captured" else make_fx(doubled, tracing_mode="fake")(x)
    assert order_of(last(gm.graph).all_input_nodes[0], 4) == order


def parts_after(run: Callable[[Tensor], Tensor], *shape: int) -> Parts | None:
    """The parts of an input after all the views of a function; None if one is unknown."""
    graph = make_fx(run, tracing_mode="fake")(torch.randn(shape)).graph
    nodes = list(graph.nodes)
    parts = Parts(nodes[0])
    return parts if all(map(parts.view, nodes[1:-1])) else None


def test_a_split_axis_has_its_parts_in_source_and_view() -> None:
    parts = parts_after(lambda x: x.view(2, 4, 3, 5).transpose(1, 2), 2, 4, 15)
    assert parts is not None
    *_, whole = parts.source
    assert len(whole) == 2 and parts.axes[1] + parts.axes[3] == whole
    assert [parts.sizes[part] for part in whole] == [3, 5]


def test_joined_axes_of_size_one_and_repeated_ones() -> None:
    parts = parts_after(lambda x: x.unsqueeze(1).expand(2, 6, 3, 5).reshape(2, 6, 15), 2, 3, 5)
    assert parts is not None
    assert parts.axes[2] == parts.source[1] + parts.source[2] and parts.axes[1] not in parts.source
    assert parts_after(lambda x: x.exp().view(6), 2, 3) is None
    assert parts_after(lambda x: x.view(3, 2), 2, 3) is None


def test_the_order_before_a_view() -> None:
    graph = make_fx(lambda x: x.view(2, 3, 4, 5), tracing_mode="fake")(torch.randn(6, 4, 5)).graph
    assert order_before(last(graph), (0, 1, 2, 3)) == (0, 1, 2)
    assert order_before(last(graph), (0, 1, 3, 2)) == (0, 2, 1)
    assert order_before(last(graph), (1, 0, 2, 3)) is None, "batches in another order than they lie"


def test_sizes() -> None:
    assert same(3, 3) and not same(3, 4)
    assert same_sizes((1, 2), (1, 2)) and not same_sizes((1, 2), (1, 2, 3)) and not same_sizes((1,), (2,))
