"""Recipes: a quantizer for each role.

A recipe is a value: it compares, hashes and prints by its settings, and can be copied and pickled. `get("mxfp8")`
gives a named one; `CustomRecipe(qfactory=...)` asks a function of the user's, see also `fxquant.factories`.
"""

from fxquant.checks import did_you_mean
from fxquant.quantizers import Format
from fxquant.recipes.base import (
    RECIPES,
    Answer,
    AutoRecipe,
    QuantizerFactory,
    Recipe,
    auto,
    get,
    of_operands,
    resolve,
)
from fxquant.recipes.custom import CustomRecipe, Rule, Rules, ask
from fxquant.recipes.named import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    Float8WeightOnly,
    HighPrecision,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    NVFP4WeightOnly,
    QParams,
)


def __getattr__(name: str) -> Recipe:
    hint = f": write fxquant.recipes.get({name!r})" if name in RECIPES else did_you_mean(name, __all__)
    raise AttributeError(f"module 'fxquant.recipes' has no attribute {name!r}{hint}")


__all__ = [
    "RECIPES",
    "Answer",
    "AutoRecipe",
    "CustomRecipe",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Float8RowwiseScaling",
    "Float8WeightOnly",
    "Format",
    "HighPrecision",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "NVFP4WeightOnly",
    "QParams",
    "QuantizerFactory",
    "Recipe",
    "Rule",
    "Rules",
    "ask",
    "auto",
    "get",
    "of_operands",
    "resolve",
]
