"""The base of recipes, the named ones by name, and the rules that named and custom recipes share."""

from __future__ import annotations

import copyreg
import difflib
import pickle
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from fxquant.errors import RecipeError
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
Answer: TypeAlias = "Quantizer | DelayedScalingRequest | Recipe | str | QuantizerFactory"
"""What a rule can hold: an answer, or whom to ask for it."""


class Recipe:
    """Base of all recipes. `quantizer(role)` answers; the boundary roles (output, grad_input) are never asked for."""

    _scaling: ClassVar[str] = ""
    """The scaling of a named recipe: delayed, current, row, block, mxfp8 or nvfp4; custom for `CustomRecipe`."""
    only_profitable: bool = False
    """True keeps layers in high precision that are estimated to be slower quantized; see `auto`."""

    def quantizer(self, role: QuantizerRole) -> Quantizer | DelayedScalingRequest:
        """The quantizer of a role. Raises RecipeError when a user's factory gives none."""
        raise NotImplementedError

    def fingerprint(self) -> str:
        """A text that is equal for equal recipes, in every process."""
        return value_text(self)

    def __repr__(self) -> str:
        return value_text(self)

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

    @classmethod
    def delayed(cls) -> bool:
        """True for delayed scaling."""
        return cls._scaling == "delayed"

    @classmethod
    def float8_current_scaling(cls) -> bool:
        """True for per-tensor current scaling."""
        return cls._scaling == "current"

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        """True if tensors have one scale, from this step or from earlier ones."""
        return cls._scaling in ("delayed", "current")

    @classmethod
    def float8_block_scaling(cls) -> bool:
        """True for FP8 block scaling."""
        return cls._scaling == "block"

    @classmethod
    def mxfp8(cls) -> bool:
        """True for MXFP8."""
        return cls._scaling == "mxfp8"

    @classmethod
    def nvfp4(cls) -> bool:
        """True for NVFP4."""
        return cls._scaling == "nvfp4"

    @classmethod
    def custom(cls) -> bool:
        """True if a factory of the user's decides."""
        return cls._scaling == "custom"

    @classmethod
    def fp8(cls) -> bool:
        """True for a named recipe whose elements have 8 bits, whatever their scaling."""
        return cls._scaling in ("delayed", "current", "row", "block", "mxfp8")

    @classmethod
    def block_scaling(cls) -> bool:
        """True for a named recipe with scales for blocks of a tensor: FP8 blocks, MXFP8 or NVFP4."""
        return cls._scaling in ("block", "mxfp8", "nvfp4")


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

    They are reported as NOT_PROFITABLE, with the estimate. Attention is left out as a whole, and always where no FP8
    kernel of a GPU takes it; of all else nothing is left out on a device without measured rates.
    """

    recipe: Recipe
    only_profitable = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "recipe", resolve(self.recipe))

    def quantizer(self, role: QuantizerRole) -> Quantizer | DelayedScalingRequest:
        return self.recipe.quantizer(role)

    def unused(self, roles: Iterable[QuantizerRole]) -> list[str]:
        return self.recipe.unused(roles)

    def __str__(self) -> str:
        return f"auto({self.recipe})"


def auto(recipe: Recipe | str) -> AutoRecipe:
    """The recipe for the layers that it makes faster; others stay in high precision, see `AutoRecipe`.

    Also by name, ``"auto(mxfp8)"``. Raises RecipeError for an unknown recipe.
    """
    inner = resolve(recipe)
    return inner if isinstance(inner, AutoRecipe) else AutoRecipe(inner)


RECIPES: dict[str, Recipe] = {}
"""The named recipes; `fxquant.recipes.named` fills it."""


def get(name: str) -> Recipe:
    """A named recipe, ``mxfp8`` or ``auto(mxfp8)``. Raises RecipeError, with the known names, for another one."""
    if wrapped := re.fullmatch(r"auto\((.*)\)", name):
        return auto(wrapped[1])
    if name not in RECIPES:
        close = difflib.get_close_matches(name, RECIPES, 1)
        hint = f"; did you mean {close[0]!r}?" if close else "."
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
    if callable(recipe):
        raise RecipeError("a factory is not a recipe by itself: pass CustomRecipe(qfactory=...)")
    raise RecipeError(f"a recipe is a Recipe or one of {', '.join(RECIPES)}, not a {type(recipe).__name__}")


def of_operands(recipe: Recipe) -> dict[str, Quantizer]:
    """The quantizers of a linear's operands; delayed scaling has those of its format with a slot of state."""
    answers = {
        operand: recipe.quantizer(QuantizerRole("linear", operand)) for operand in ("input", "weight", "grad_output")
    }
    return {
        operand: Float8Quantizer(answer.fp8_format.dtype(operand), 0)
        if isinstance(answer, DelayedScalingRequest)
        else answer
        for operand, answer in answers.items()
    }


def runs_as(recipe: Recipe, place: str) -> str:
    """``native`` if ``Hopper`` or ``the CPU`` has instructions for the GEMMs of all its formats, else ``emulated``."""
    formats = [quantizer.spec(direction).row for quantizer in of_operands(recipe).values() for direction in Direction]
    kinds = {(row.hopper if place == "Hopper" else row.cpu).partition(":")[0] for row in formats}
    return "emulated" if "emulated" in kinds else "native"


def is_attention(role: QuantizerRole) -> bool:
    """Returns True for the slots of an attention, and for the hints for its results."""
    hint = not role.module_type and role.name.endswith(("dpa_output", "dpa_grad_input"))
    return role.module_type == "dpa" or hint


NO_FP8_MHA = "fp8_mha=True is not supported: no FP8 tensor leaves a layer. fp8_dpa=True is for attention"


def override_backward(quantizer: Quantizer, role: QuantizerRole, override: str | None) -> Quantizer:
    """The quantizer for a forward as before and a backward in high precision."""
    if override is None:
        return quantizer
    if role.tensor_type == "grad_output":
        return IdentityQuantizer()
    source: Literal["original", "rowwise_dequantized"] = (
        "original" if override == "high_precision" else "rowwise_dequantized"
    )
    return HybridQuantizer(quantizer.side(Direction.ROWWISE), IdentityQuantizer(), columnwise_source=source)


def check_override(override: str | None, name: str) -> None:
    """Raises RecipeError for an unknown `backward_override`."""
    if override not in (None, "high_precision", "dequantized"):
        raise RecipeError(
            f"backward_override of {name} must be None, 'high_precision' or 'dequantized', not {override!r}"
        )
