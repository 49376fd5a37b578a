"""FXQUANT_VERIFY=1 names the first value that is not finite, by layer and line, in forward and backward."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from helpers import TwoLinears
from torch import Tensor, nn

import fxquant
from fxquant import NonFiniteWarning
from fxquant.backend import finite


class Model(nn.Module):
    """Overflows in `second` where `scale` is large; the gradient of a square root at 0 is infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(32, 32) for _ in range(3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, scale: float, root: bool) -> Tensor:
        self.calls += 1
        mask = torch.full((32, 32), float("-inf")).triu(1)
        y = (self.first(x) + mask).softmax(-1)
        y = self.second(y * scale) * scale  # the line that overflows
        if root:
            y = (y - y.detach()).abs().sqrt()  # the line of the gradient
        return self.third(y)


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXQUANT_VERIFY", "1")


def compiled(model: nn.Module, recipe: str = "mxfp8") -> Callable[..., Tensor]:
    return fxquant.compile(model, recipe, options={"inner": "aot_eager"})  # type: ignore[no-any-return]


@pytest.mark.usefixtures("verified")
def test_the_first_of_a_forward_is_named_once() -> None:
    model, x = Model(), torch.randn(32, 32)
    run = compiled(model)
    with pytest.warns(NonFiniteWarning) as told:
        run(x, 3e38, False)
        run(x, 3e38, False)
    (message,) = [str(w.message) for w in told if w.category is NonFiniteWarning]
    assert message.startswith("Model: the forward has its first ") and "test_finite.py" in message
    assert "the line that overflows" in message and told[0].filename == __file__
    assert model.calls == 2, "it ran again on copies"


@pytest.mark.usefixtures("verified")
def test_the_first_of_a_backward_is_named() -> None:
    model, x = Model(), torch.randn(32, 32)
    with pytest.warns(NonFiniteWarning, match=r"the backward has its first gradient .*sqrt .*the line of the gradient"):
        compiled(model)(x, 1.0, True).square().mean().backward()
    assert model.calls == 1 and all(p.grad is not None for p in model.parameters())
    with pytest.warns(NonFiniteWarning, match="a gradient that enters the backward of its graph"):
        (compiled(model)(x, 1.0, False).sum() * float("inf")).backward()


@pytest.mark.usefixtures("verified")
def test_what_comes_in_is_not_the_layers_fault() -> None:
    model, x = nn.Sequential(nn.Linear(32, 32)), torch.randn(32, 32)
    model[0].weight.data[3, 3] = float("nan")
    with pytest.warns(NonFiniteWarning, match="an input of its graph is not finite already: .*weight"):
        compiled(model)(x)


@pytest.mark.usefixtures("verified")
def test_a_layer_of_a_quantized_product_is_named() -> None:
    class Two(TwoLinears):
        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            return self.b(x)  # the line of the sum

    model = Two()
    with torch.no_grad():
        model.a.weight.copy_(torch.eye(32) * 0.5)
        model.b.weight.fill_(1.0)
    message = "the forward has its first (NaN|Inf) in fxquant::linear of b .*the line of the sum"
    with pytest.warns(NonFiniteWarning, match=message):
        compiled(model, "rowwise")(torch.full((32, 32), 2e38))


def test_finite_runs_and_runs_without_the_variable_are_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Model(), torch.randn(32, 32)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NonFiniteWarning)
        monkeypatch.setattr(finite, "FiniteCheck", None)
        compiled(model)(x, 3e38, False)
        monkeypatch.undo()
        monkeypatch.setenv("FXQUANT_VERIFY", "1")
        compiled(Model())(x, 1.0, False).square().mean().backward()
