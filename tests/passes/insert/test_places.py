"""The places of matmuls, by nodes of the captured graph."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from helpers import eager_backend
from torch import Tensor, fx

from fxquant import Float8CurrentScaling
from fxquant.passes.graph.meta import places_of


def places(recipe: object, *inputs: Tensor) -> list[tuple[int, ...]]:
    """The places of all nodes of a captured and rewritten graph that have some."""

    class Looking(type(eager_backend("mxfp8"))):  # type: ignore[misc]
        def compile(self, gm: fx.GraphModule, example_inputs: object) -> object:
            them.extend(dict.fromkeys(filter(None, map(places_of, gm.graph.nodes))))
            return gm.forward

    them: list[tuple[int, ...]] = []
    torch.compile(step, backend=Looking(recipe, inner="aot_eager"))(*inputs)
    return them


def step(x: Tensor, w: Tensor) -> Tensor:
    y = F.linear(x, w)
    return F.scaled_dot_product_attention(y, y, y) @ w


def test_an_operator_has_the_places_of_all_its_products() -> None:
    x, w = torch.randn(2, 32, 64), torch.nn.Parameter(torch.randn(64, 64))
    for recipe in ("mxfp8", Float8CurrentScaling(fp8_dpa=True)):
        torch.compiler.reset()
        assert places(recipe, x, w) == [(0,), (1, 2), (3,)]
