"""Errors reach the caller of a compiled model as this package raised them, through every door."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxquant
from fxquant import CustomRecipe, RecipeError
from fxquant.compat.private import own_errors
from fxquant.errors import ArgumentError, GraphVerificationError, OptionError
from fxquant.passes import pipeline


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 48)
        self.down = nn.Linear(48, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


def fails(role: Any) -> Any:
    raise KeyError("wrong")


def in_place(model: nn.Module, backend: Any) -> nn.Module:
    model.compile(backend=backend)
    return model


DOORS: dict[str, Callable[..., Callable[..., Any]]] = {
    "named": lambda model, inner: torch.compile(
        model, backend="fxquant", options={"recipe": CustomRecipe(qfactory=fails), "inner": inner}
    ),
    "object": lambda model, inner: torch.compile(
        model, backend=fxquant.Backend(CustomRecipe(qfactory=fails), inner=inner)
    ),
    "in place": lambda model, inner: in_place(model, fxquant.Backend(CustomRecipe(qfactory=fails), inner=inner)),
    "function": lambda model, inner: torch.compile(
        lambda x: model(x), backend=fxquant.Backend(CustomRecipe(qfactory=fails), inner=inner)
    ),
    "compile": lambda model, inner: fxquant.compile(
        model, CustomRecipe(qfactory=fails), options={"inner": inner}
    ),
    "explain": lambda model, inner: lambda x: fxquant.explain(model, CustomRecipe(qfactory=fails), x),
    "measure": lambda model, inner: lambda x: fxquant.measure(model, CustomRecipe(qfactory=fails), x),
}  # fmt: skip


@pytest.mark.parametrize("door", DOORS)
def test_an_error_reaches_the_user_as_it_is(door: str) -> None:
    """torch wraps the errors of a backend, and advises to report them to PyTorch."""
    with pytest.raises(RecipeError) as caught:
        DOORS[door](Mlp(), "aot_eager")(torch.randn(8, 32))
    text = str(caught.value)
    assert text.startswith("qfactory failed for role up (linear, input): KeyError 'wrong'") and "\n" not in text
    assert "test_errors.py:" in text and text.endswith('raise KeyError("wrong"))')
    assert type(caught.value) is RecipeError and caught.value.args == (text,)


@pytest.mark.usefixtures("without_cpp")
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_an_error_behind_autograd_does_too(inner: str, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, places = Mlp(), ("fxquant.backend.backend", "fxquant.passes.pipeline")
    calls = []

    def run(stages: Any, graph: Any, settings: Any) -> Any:
        if stages is pipeline.MEANING or stages is pipeline.SPLIT:
            calls.append(stages)
            if len(calls) == (1 if stage == "forward" else 2):
                raise GraphVerificationError("a fault of this test's")
        return pipeline_run(stages, graph, settings)

    pipeline_run = pipeline.run
    for place in places:
        monkeypatch.setattr(f"{place}.run", run)
    step = torch.compile(model, backend=fxquant.Backend("mxfp8", inner=inner, inductor={"force_disable_caches": True}))
    with pytest.raises(GraphVerificationError, match=r"^a fault of this test's$"):
        step(torch.randn(8, 32)).sum().backward()


def test_an_error_that_is_passed_on_is_one_of_its_kind() -> None:
    """Code between the backend and the caller, a DDPOptimizer for example, sees it before Dynamo gives it back."""
    with pytest.raises(RecipeError, match=r"^of two kinds$") as caught, own_errors():
        raise RecipeError("of two kinds") from KeyError("its cause")
    error = caught.value
    assert isinstance(error.__cause__, KeyError) and type(error).__name__ == "RecipeError"
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is RecipeError and str(again) == "of two kinds"


ELSEWHERE: dict[str, tuple[Callable[[], Any], str]] = {
    "Inductor's, by name": (
        lambda: torch.compile(
            Mlp(), backend="fxquant", options={"recipe": "mxfp8", "triton.cudagraphs": True}
        )(torch.randn(8, 32)),
        "options={'inductor': {'triton.cudagraphs': ...}}",
    ),
    "Inductor's, as a keyword": (
        lambda: fxquant.compile(Mlp(), "mxfp8", triton_cudagraphs=True), "{'inductor': {'triton.cudagraphs'"
    ),
    "Inductor's, of a Backend": (lambda: fxquant.Backend("mxfp8", max_autotune=True), "{'inductor': {'max_autotune'"),
    "Inductor's, misspelled": (
        lambda: fxquant.Backend("mxfp8", inductor={"max_autotun": True}), "did you mean 'max_autotune'?"
    ),
    "a mode": (
        lambda: fxquant.compile(Mlp(), "mxfp8", options={"mode": "max-autotune"}),
        "fxquant.compile(model, recipe, mode=...)",
    ),
    "a mode for Inductor": (
        lambda: fxquant.Backend("mxfp8", inductor={"mode": "max-autotune"}), "Backend(recipe, mode=...)"
    ),
    "torch's": (lambda: fxquant.Backend("mxfp8", dynamic=True), "argument of fxquant.compile and of torch.compile"),
    "a model": (lambda: fxquant.compile(Mlp(), "mxfp8", options={"model": Mlp()}), "Backend(recipe, model=...)"),
    "options": (lambda: fxquant.Backend("mxfp8", options={}), "fxquant.Backend(recipe, **options)"),
}  # fmt: skip


@pytest.mark.parametrize("spelling", ELSEWHERE)
def test_what_belongs_elsewhere_is_told_where(spelling: str) -> None:
    call, hint = ELSEWHERE[spelling]
    with pytest.raises((OptionError, ArgumentError)) as caught:
        call()
    assert hint in str(caught.value)
