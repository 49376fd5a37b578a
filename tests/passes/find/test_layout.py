"""The views around a product keep strides, dynamic sizes and tied weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from rewriting import Calls, Rewrite, check, randn
from torch import Tensor, fx, nn


def test_dynamic_sizes_stay_dynamic() -> None:
    def function(x: Tensor, y: Tensor, v: Tensor, w: Tensor, kernel: Tensor) -> Tensor:
        x = torch.einsum("bsi,hid->bhsd", x, w) @ torch.einsum("bsi,hid->bhds", y, w)
        x = F.conv2d(x, kernel) @ torch.matmul(y, v)[:, None]
        return torch.baddbmm(x[:, 0], x[:, 1], x[:, 2].mT @ x[:, 3], beta=0.5)

    model = Calls(function, (24, 40), (4, 24, 16), (4, 4, 1, 1))
    inputs = [(randn(b, rows, 24), randn(b, others, 24)) for b, rows, others in ((3, 5, 7), (2, 9, 4), (5, 6, 6))]
    graphs = 0

    def count(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        return gm.forward

    def run(backend: Callable[..., Any]) -> list[Tensor]:
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
        return [compiled(x, y) for x, y in inputs]

    backend = Rewrite()
    for expected, actual in zip(run(count), run(backend), strict=True):
        scale = expected.abs().max().item()
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5 * scale)
    assert len(backend.graphs) == graphs


def test_strided_inputs_and_results() -> None:
    model = Calls(lambda x, w, v: (x.transpose(1, 2) @ w).transpose(0, 1) @ v, (24, 40), (40, 16))
    check(model, [randn(3, 24, 5)], Rewrite())
    channels_last = torch.randn(3, 24, 7, 5).to(memory_format=torch.channels_last).requires_grad_()
    check(Calls(lambda x, w, b: F.conv2d(x, w, b), (40, 24, 1, 1), (40,)), [channels_last], Rewrite())
    check(Calls(lambda x, w: (w @ x).view(-1), (40, 24)), [randn(24, 5)], Rewrite())


def test_tied_weight_is_used_as_it_is() -> None:
    model = Calls(lambda x, w: F.linear(x, w) @ w + x.mm(w.t()).mm(w), (40, 24))
    backend = check(model, [randn(5, 24)], Rewrite())
    nodes = backend.graphs[0].graph.nodes
    (weight,) = (node for node in nodes if isinstance(node.meta.get("example_value"), nn.Parameter))
    direct = [n for n in nodes if n.target is F.linear and n.args[1] is weight]
    assert len(direct) == 2  # and two products that want it transposed
