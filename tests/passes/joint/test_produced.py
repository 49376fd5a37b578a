"""The inputs of which a producer makes a tensor, in a graph that Inductor has decomposed."""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import silu

from fxquant.compat.private import inductor_decompositions
from fxquant.passes.joint.produced import inputs_of, last_operator


def traced(gate: Tensor, up: Tensor) -> list[fx.Node]:
    """The inputs of a graph, and SiLU of the first times the second."""
    make = make_fx(
        lambda g, u: (silu(g) * u).reshape(-1), tracing_mode="fake", decomposition_table=dict(inductor_decompositions())
    )
    graph = make(gate, up).graph
    return [*graph.find_nodes(op="placeholder"), *graph.output_node().all_input_nodes]


def test_a_product_is_made_of_its_factors_through_views() -> None:
    x = torch.randn(4, 8)
    gate, up, result = traced(x.bfloat16(), x.bfloat16())
    root = result.args[0]
    assert isinstance(root, fx.Node) and inputs_of("silu_mul", root) == (gate, up)
    assert inputs_of("gelu", root) is None and inputs_of("silu_mul", gate) is None
    assert root.target is last_operator("silu_mul") is torch.ops.aten.mul.Tensor


def test_float32_and_other_layouts_are_not_taken() -> None:
    x = torch.randn(4, 8)
    for inputs in ((x, x), (x.bfloat16().t(), x.bfloat16().t())):
        *_, result = traced(*inputs)
        assert inputs_of("silu_mul", result.args[0]) is None
