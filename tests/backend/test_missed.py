"""What ran without a graph: new inputs under a stance of torch that compiles nothing for them, and trainings."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import eager_backend
from torch import Tensor, nn

import fxquant
from fxquant import UnquantizedWarning
from fxquant.backend import notices

STANCE = "eager_on_recompile"


class Two(nn.Module):
    """Two layers for one input each, in frames of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        first = self.first(x)
        torch._dynamo.graph_break()
        return first, self.second(y)


def in_place(model: nn.Module, backend: fxquant.Backend) -> nn.Module:
    model.compile(backend=backend)
    return model


FORMS: dict[str, Callable[[nn.Module, fxquant.Backend], Any]] = {
    "in place": in_place,
    "module": lambda model, backend: torch.compile(model, backend=backend),
    "function": lambda model, backend: torch.compile(lambda x, y: model(x, y), backend=backend),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_call_without_a_graph_is_told_once(form: str) -> None:
    backend = eager_backend("mxfp8")
    compiled = FORMS[form](Two(), backend)
    x, more = torch.randn(32, 64), torch.randn(48, 64)
    with torch.no_grad(), torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        compiled(x, x)
        with torch.compiler.set_stance(STANCE):
            compiled(x, x)
            with fxquant.autocast(enabled=False):
                compiled(x, x)  # asked for
            with pytest.warns(UnquantizedWarning, match=f"^a call of .* ran no compiled graph.*set_stance.'{STANCE}'"):
                compiled(more, more)
            compiled(more, more)
    assert any(f"had no graph, since the call was made under torch.compiler.set_stance('{STANCE}')" in text
               for text in backend.report().uncompiled)  # fmt: skip


def test_a_part_of_a_call_without_a_graph_is_told() -> None:
    backend = eager_backend("mxfp8")
    compiled = in_place(Two(), backend)
    x, more = torch.randn(32, 64), torch.randn(48, 64)
    with torch.no_grad(), torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        for _ in range(2):  # which are watched
            compiled(x, x)
        with torch.compiler.set_stance(STANCE):
            with pytest.warns(UnquantizedWarning, match="^a part of a call of .* ran no compiled graph"):
                compiled(x, more)
    assert any(text.startswith("parts of calls") for text in backend.report().uncompiled)


class Disabled(nn.Linear):
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@pytest.mark.parametrize("named", [False, True])
def test_a_training_without_a_graph_is_told_behind_its_second_step(
    named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "_steps", weakref.WeakKeyDictionary())
    monkeypatch.setattr(notices, "_told_idle", set())
    options = {"recipe": "rowwise", "inner": "aot_eager"}
    model, other = Disabled(64, 64), nn.Linear(64, 64)
    compiled = (
        torch.compile(model, backend="fxquant", options=options)
        if named
        else torch.compile(model, backend=eager_backend("rowwise"))
    )
    x = torch.randn(32, 64)

    def step(optimizer: torch.optim.Optimizer) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            (compiled(x) + other(x)).sum().backward()
            optimizer.step()
        ours = [str(one.message) for one in caught if issubclass(one.category, UnquantizedWarning)]
        return [text for text in ours if "has run in two steps of its optimizer" in text]

    its, others = torch.optim.SGD(model.parameters()), torch.optim.SGD(other.parameters())
    assert not any(step(others) for _ in range(3)), "it trains another model"
    assert [len(step(its)) for _ in range(4)] == [0, 1, 0, 0]
