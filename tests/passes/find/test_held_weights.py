"""Weights that a module holds without declaring them parameters: every spelling of a product treats them alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rewriting import Rewrite
from torch import Tensor, nn

from fxquant import quantize_program
from fxquant.export.program import report_of

PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": F.linear,
    "@": lambda x, w: x @ w.T,
    "mm": lambda x, w: torch.mm(x, w.t()),
    "left": lambda x, w: (w @ x.mT).mT,
    "einsum": lambda x, w: torch.einsum("bi,oi->bo", x, w),
}


class Holds(nn.Module):
    """A product with a weight that is held as a buffer, or as an attribute."""

    def __init__(self, product: Callable[[Tensor, Tensor], Tensor], buffer: bool, written: bool = False) -> None:
        super().__init__()
        self.product, self.written = product, written
        if buffer:
            self.register_buffer("w", torch.randn(64, 32))
        else:
            self.w = torch.randn(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        if self.written:
            self.w.copy_(x.sum() + self.w)
        return self.product(x, self.w)


@pytest.mark.parametrize("buffer", [True, False], ids=["buffer", "attribute"])
@pytest.mark.parametrize("product", PRODUCTS)
def test_every_spelling_finds_the_weight(product: str, buffer: bool) -> None:
    model, x, backend = Holds(PRODUCTS[product], buffer), torch.randn(16, 32), Rewrite()
    torch.testing.assert_close(torch.compile(model, backend=backend)(x), model(x), rtol=1e-4, atol=1e-4)
    program = torch.export.export(model, (x,))
    for source in (program, program.run_decompositions()):
        decisions = report_of(quantize_program(source, "mxfp8")).decisions
        assert [(d.role.module_type, d.role.tensor_type) for d in decisions] == [
            ("linear", "input"), ("linear", "weight")
        ]  # fmt: skip
    (match,) = backend.found
    assert (match.module_type, match.products[0].rhs_is_weight) == ("linear", True)


class Adapted(nn.Module):
    """A product with a weight to which the product of two adapters is added."""

    def __init__(self, product: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.product, self.w = product, nn.Parameter(torch.randn(64, 32))
        self.a, self.b = nn.Parameter(torch.randn(16, 32)), nn.Parameter(torch.randn(64, 16))

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.w + self.b @ self.a)


class Turned(nn.Module):
    """A product with a weight that is itself a product of two."""

    def __init__(self, product: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.product, self.w, self.q = product, nn.Parameter(torch.randn(64, 32)), nn.Parameter(torch.randn(32, 32))

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.w @ self.q)


class Parametrized(nn.Module):
    """A product with the weight of a layer that computes it from its parameters."""

    def __init__(self, product: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.product, self.layer = product, nn.utils.parametrizations.weight_norm(nn.Linear(32, 64))

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.layer.weight)


class Joined(Parametrized):
    """A product with two weights in one, of which one is computed."""

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, torch.cat([self.layer.weight, self.layer.weight.tanh()]))


@pytest.mark.parametrize("kind", [Adapted, Turned, Parametrized, Joined])
@pytest.mark.parametrize("product", PRODUCTS)
def test_every_spelling_finds_a_weight_that_is_computed_from_weights(product: str, kind: Any) -> None:
    model, x, backend = kind(PRODUCTS[product]), torch.randn(16, 32), Rewrite()
    torch.testing.assert_close(torch.compile(model, backend=backend)(x), model(x), rtol=1e-4, atol=1e-4)
    (match,) = [match for match in backend.found if match.products[0].m == 16]
    assert (match.module_type, match.products[0].rhs_is_weight) == ("linear", True)


def test_what_is_computed_from_an_input_or_projected_is_no_weight() -> None:
    """A table of positions that a layer projects is an activation, by which queries are multiplied."""
    w, backend = nn.Parameter(torch.randn(32, 32)), Rewrite()
    torch.compile(lambda x: x @ (w * x.sum()) + x @ F.linear(w, w), backend=backend)(torch.randn(16, 32))
    assert sorted(match.module_type for match in backend.found) == ["linear", "matmul", "matmul"]


def test_what_a_call_writes_is_no_weight() -> None:
    model, x, backend = Holds(PRODUCTS["@"], buffer=True, written=True), torch.randn(16, 32), Rewrite()
    torch.compile(model, backend=backend)(x)
    assert [match.module_type for match in backend.found] == ["matmul"]


def test_an_argument_is_no_weight() -> None:
    backend = Rewrite()
    torch.compile(lambda x, w: x @ w.T, backend=backend)(torch.randn(16, 32), torch.randn(64, 32))
    assert [match.module_type for match in backend.found] == ["matmul"]
