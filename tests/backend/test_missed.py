"""Inputs without a graph, under the stance of torch that compiles nothing for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import eager_backend
from torch import Tensor, nn

import fxquant
from fxquant import UnquantizedWarning

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
