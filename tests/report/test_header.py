from __future__ import annotations

import functools
import json
from typing import Any

import pytest
import torch
from torch import nn

import fxquant
from fxquant import (
    CustomRecipe,
    DelayedScaling,
    Format,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Recipe,
    Rule,
    Rules,
    recipes,
)
from fxquant.recipes.source import python_of
from fxquant.report.report import Report

RECIPES: dict[str, Recipe] = {
    **recipes.RECIPES,
    "auto": recipes.auto("nvfp4"),
    "settings": DelayedScaling(fp8_format=Format.E4M3, amax_history_len=16),
    "factory": CustomRecipe(qfactory=fxquant.factories.mxfp8),
    "rules": CustomRecipe(
        qfactory=Rules(
            [
                Rule(IdentityQuantizer(), name=r"head|.*\.router"),
                Rule(MXFP8Quantizer(fp8_dtype=torch.float8_e5m2), tensor_type="grad_output"),
                Rule(HybridQuantizer(MXFP8Quantizer(), NVFP4Quantizer()), name="layers.0.*"),
            ],
            default="mxfp8",
        )
    ),
}


def keep_heads(role: fxquant.QuantizerRole, head: str = "head") -> fxquant.Quantizer:
    return IdentityQuantizer() if role.name == head else MXFP8Quantizer()


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_recipe_reads_as_the_python_that_makes_it(recipe: Recipe) -> None:
    scope: dict[str, Any] = {}
    exec(python_of(recipe), scope)
    assert scope["recipe"] == recipe and max(map(len, python_of(recipe).splitlines())) < 120


def test_the_source_of_a_factory_stands_before_its_recipe() -> None:
    for factory in (keep_heads, functools.partial(keep_heads, head="lm_head")):
        text = python_of(CustomRecipe(qfactory=factory))
        assert "from fxquant import CustomRecipe\n\n\ndef keep_heads(" in text and "== head" in text
    assert text.endswith('recipe = CustomRecipe(qfactory=partial(keep_heads, head="lm_head"))')


class Keep(Recipe):
    def __init__(self, head: str) -> None:
        self.head = head

    def quantizer(self, role: fxquant.QuantizerRole) -> fxquant.Quantizer:
        return keep_heads(role, self.head)


def test_recipes_and_factories_that_python_cannot_write_are_named() -> None:
    """A class of recipes that is no dataclass prints, and reports name it."""
    recipe = Keep("0")
    assert repr(recipe) == recipe.fingerprint() == "Keep(head='0')" and python_of(recipe) == "recipe = Keep(...)"
    report = fxquant.explain(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), recipe, torch.randn(32, 64))
    assert report.recipe == "Keep(head='0')" and report.coverage == pytest.approx(0.5, abs=0.1)
    unnamed = python_of(CustomRecipe(qfactory=lambda role: NVFP4Quantizer()))
    assert unnamed.endswith("recipe = CustomRecipe(qfactory=lambda role: ...)") and "\n# " in unnamed
    assert python_of(CustomRecipe(qfactory=recipe.quantizer)).endswith("(qfactory=Keep(...).quantizer)")


def test_the_header_says_what_was_asked_and_when() -> None:
    model, x = nn.Sequential(nn.Linear(64, 32)), torch.randn(32, 64)
    compiled = fxquant.compile(model, "mxfp8", options={"inner": "aot_eager"})
    compiled(x)
    for report in (fxquant.report(compiled), fxquant.explain(model, "mxfp8", x)):
        header = json.loads(report.to_json())["header"]
        assert (header["model"], header["parameters"], header["device"]) == ("Sequential", 64 * 32 + 32, "cpu")
        assert header["versions"]["torch"] == torch.__version__ and header["date"][:4] >= "2026"
        assert "recipe = MXFP8BlockScaling()" in header["recipe"]
    assert fxquant.explain(lambda x: x @ x.T, "mxfp8", x).header.model.endswith("<lambda>")
    assert json.loads(Report(recipe="mxfp8").to_json())["header"]["date"] == ""
