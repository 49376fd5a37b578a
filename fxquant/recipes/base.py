"""The base of recipes, the named ones by name, and the rules that named and custom recipes share."""

from __future__ import annotations

import copyreg
import pickle
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from torch import nn
from torch.export import ExportedProgram

from fxquant.checks import article, checked, did_you_mean
from fxquant.errors import ArgumentError, RecipeError
from fxquant.formats import LINEAR_OPERANDS
from fxquant.quantizers import (
    DelayedScalingRequest,
    Float8Quantizer,
    HybridQuantizer,
    IdentityQuantizer,
    Quantizer,
    value_text,
)
from fxquant.roles import Direction, QuantizerRole

if TYPE_CHECKING:
    from typing_extensions import Self

QuantizerFactory = Callable[[QuantizerRole], Quantizer | DelayedScalingRequest]


def _scales_by(*scalings: str) -> classmethod[Recipe, [], bool]:
    """A class method that returns True for a recipe with one of these scalings."""
    return classmethod(lambda cls: cls._scaling in scalings)


class Recipe:
    """Base of all recipes: `quantizer(role)` answers. Nobody asks it for the boundary roles, output and grad_input."""

    _scaling: ClassVar[str] = ""
    """The scaling of a named recipe: delayed, current, row, block, mxfp8 or nvfp4; custom for `CustomRecipe`."""
    only_profitable: bool = False
    """True keeps layers in high precision that are estimated to be slower quantized; see `auto`."""

    def quantizer(self, role: QuantizerRole) -> Quantizer | DelayedScalingRequest:
        """The quantizer of a role. Raises RecipeError when a user's factory gives none."""
        raise RecipeError(
            f"{type(self).__name__} has no answer for {role}: a recipe of one's own defines quantizer(self, role), or "
            "is CustomRecipe(qfactory=...)"
        )

    def fingerprint(self) -> str:
        """A text that is equal for equal recipes, in every process."""
        if is_dataclass(self):
            return value_text(self)
        settings = (f"{name}={value_text(value)}" for name, value in sorted(vars(self).items()))
        return f"{type(self).__name__}({', '.join(settings)})"

    def __repr__(self) -> str:
        return self.fingerprint()

    def __copy__(self) -> Self:
        return self  # nothing in a recipe changes

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        for name, value in vars(self).items():
            if callable(value):
                _check_importable(f"{type(self).__name__} with {name}={value_text(value)}", value)
        return copyreg.__newobj__, (type(self),), vars(self)  # type: ignore[attr-defined]

    def __str__(self) -> str:
        return next((name for name, recipe in RECIPES.items() if recipe == self), self.fingerprint())

    def unused(self, roles: Iterable[QuantizerRole]) -> list[str]:
        """The parts of the recipe that none of these roles reached."""
        return []

    def by_name(self, role: QuantizerRole) -> list[str]:
        """The parts of the recipe that would answer for this role if its layer had a name that they match."""
        return []

    # TransformerEngine's questions about a class of recipes; `custom` says that a factory of the user's decides
    delayed = _scales_by("delayed")
    float8_current_scaling = _scales_by("current")
    float8_per_tensor_scaling = _scales_by("delayed", "current")
    float8_block_scaling = _scales_by("block")
    mxfp8 = _scales_by("mxfp8")
    nvfp4 = _scales_by("nvfp4")
    custom = _scales_by("custom")
    fp8 = _scales_by("delayed", "current", "row", "block", "mxfp8")
    block_scaling = _scales_by("block", "mxfp8", "nvfp4")


Answer: TypeAlias = Quantizer | DelayedScalingRequest | Recipe | str | QuantizerFactory
"""An answer of a rule, or the recipe or factory that gives it."""


def _check_importable(what: str, value: object) -> None:
    try:
        pickle.dumps(value)
    except Exception as error:  # pickle raises AttributeError, TypeError or PicklingError
        raise RecipeError(
            f"{what} cannot be pickled: {error}. Define the function with def at the top level of a module, or make "
            "the factory of Rules"
        ) from error


@dataclass(frozen=True, repr=False)
class AutoRecipe(Recipe):
    """Another recipe without the layers that `fxquant.cost` estimates to be slower quantized than in high precision.

    The report calls them NOT_PROFITABLE, with the estimate. Attention is weighed as a whole, after its backward by
    itself, and stays in high precision wherever no FP8 kernel of a GPU takes it. Without measured rates a GPU keeps
    what it could only emulate in high precision too, and all other layers are quantized.
    """

    recipe: Recipe
    only_profitable = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "recipe", resolve(self.recipe))

    def quantizer(self, role: QuantizerRole) -> Quantizer | DelayedScalingRequest:
        return self.recipe.quantizer(role)

    def unused(self, roles: Iterable[QuantizerRole]) -> list[str]:
        return self.recipe.unused(roles)

    def by_name(self, role: QuantizerRole) -> list[str]:
        return self.recipe.by_name(role)

    def __str__(self) -> str:
        return f"auto({self.recipe})"


@checked(ArgumentError, called="fxquant.recipes.auto", takes={"recipe": "a recipe or its name"})
def auto(recipe: Any) -> AutoRecipe:
    """Keeps the layers in high precision that `recipe` makes slower, see `AutoRecipe`; by name ``"auto(mxfp8)"``.

    Raises RecipeError for an unknown recipe.
    """
    inner = resolve(recipe)
    return inner if isinstance(inner, AutoRecipe) else AutoRecipe(inner)


RECIPES: dict[str, Recipe] = {}
"""The named recipes; `fxquant.recipes.named` fills it."""


FOREIGN = {
    "tensorwise": "current_scaling",
    "fp8": "current_scaling",
    "float8": "current_scaling",
    "fp8_current_scaling": "current_scaling",
    "fp8_delayed_scaling": "delayed_scaling",
    "fp8_block_scaling": "float8_blockwise",
    "blockwise": "float8_blockwise",
    "rowwise_with_gw_hp": "rowwise",
    "mxfp8_cublas": "mxfp8",
    "mxfp8_emulated": "mxfp8",
    "fp4": "nvfp4",
    "bf16": "high_precision",
}
"""Names that other libraries, and classes of recipes, have for the named recipes."""


@checked(called="fxquant.recipes.get", takes={"name": "the name of a recipe, such as 'mxfp8'"})
def get(name: str) -> Recipe:
    """A named recipe, ``mxfp8`` or ``auto(mxfp8)``. Raises RecipeError, with the known names, for another one."""
    if wrapped := re.fullmatch(r"auto\((.*)\)", name):
        return auto(wrapped[1])
    if name not in RECIPES:
        hint = did_you_mean(name, RECIPES, FOREIGN) or "."
        raise RecipeError(f"unknown recipe {name!r}{hint} Known recipes: {', '.join(RECIPES)}")
    return RECIPES[name]


def resolve(recipe: Recipe | str) -> Recipe:
    """A recipe from itself or its name."""
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, str):
        return get(recipe)
    if isinstance(recipe, type) and issubclass(recipe, Recipe):
        raise RecipeError(f"{recipe.__name__} is a class of recipes: pass an instance, {recipe.__name__}()")
    if isinstance(recipe, Quantizer):
        raise RecipeError("a quantizer is not a recipe: pass CustomRecipe(qfactory=...) with a factory that returns it")
    if callable(recipe) and not isinstance(recipe, nn.Module | ExportedProgram):  # one of those is out of order
        raise RecipeError("a factory is not a recipe by itself: pass CustomRecipe(qfactory=...)")
    raise RecipeError(f"a recipe is a Recipe or one of {', '.join(RECIPES)}, not {article(type(recipe).__name__)}")


def of_operands(recipe: Recipe) -> dict[str, Quantizer]:
    """The quantizers of a linear's operands; delayed scaling has quantizers of its format with a slot of state."""
    quantizers = {}
    for operand in LINEAR_OPERANDS:
        answer = recipe.quantizer(QuantizerRole("linear", operand))
        if isinstance(answer, DelayedScalingRequest):
            answer = Float8Quantizer(answer.fp8_format.dtype(operand), 0)
        quantizers[operand] = answer
    return quantizers


def is_attention(role: QuantizerRole) -> bool:
    """Returns True for the slots of an attention, and for the hints for its results."""
    hint = not role.module_type and role.name.endswith(("dpa_output", "dpa_grad_input"))
    return role.module_type == "dpa" or hint


Override: TypeAlias = Literal["high_precision", "dequantized"] | None
"""The backward in high precision: from the original operands, or from what the forward multiplied."""

NO_FP8_MHA = "fp8_mha=True is not supported: no FP8 tensor leaves a layer. fp8_dpa=True is for attention"


def override_backward(quantizer: Quantizer, role: QuantizerRole, override: Override) -> Quantizer:
    """The quantizer of an operand whose backward runs in high precision and whose forward stays as it is."""
    if override is None:
        return quantizer
    if role.tensor_type == "grad_output":
        return IdentityQuantizer()
    row, column = quantizer.side(Direction.ROWWISE), IdentityQuantizer()
    if override == "high_precision":
        return HybridQuantizer(row, column)
    return HybridQuantizer(row, column, columnwise_source="rowwise_dequantized")
