"""Recipes that choose for every operand of every product on its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from fxquant.quantizers import DelayedScalingRequest, HybridQuantizer, IdentityQuantizer, Quantizer
from fxquant.recipes.base import AutoRecipe, Recipe, is_attention
from fxquant.roles import TENSOR_TYPES, Direction, QuantizerRole


class Operand(NamedTuple):
    """One operand of a layer in one direction, such as ``("layers.3.up", "weight", "rowwise")``."""

    layer: str
    role: str
    direction: str

    def __str__(self) -> str:
        return f"{self.layer or '<model>'} {self.role} {self.direction}"


_HINTS = ("dpa_output", "dpa_grad_input")


@dataclass(frozen=True, repr=False)
class PerOperand(Recipe):
    """Asks one of several recipes for each operand, and keeps all others in high precision.

    `chosen` pairs operands with the number of their recipe. The slots of an attention answer together, by its `qkv`,
    and so do both directions of an operand with delayed scaling.
    """

    recipes: tuple[Recipe, ...]
    chosen: tuple[tuple[Operand, int], ...] = ()

    @classmethod
    def of(cls, recipes: Iterable[Recipe], chosen: Mapping[Operand, int]) -> PerOperand:
        """Makes a recipe that compares equal for equal choices; operands of ``auto`` recipes are chosen already."""
        plain = (recipe.recipe if isinstance(recipe, AutoRecipe) else recipe for recipe in recipes)
        return cls(tuple(plain), tuple(sorted(chosen.items())))

    @cached_property
    def _by_operand(self) -> dict[Operand, int]:
        return dict(self.chosen)

    def recipe_of(self, layer: str, role: str, direction: str) -> Recipe | None:
        """The recipe of an operand; None if it stays in high precision."""
        index = self._by_operand.get(Operand(layer, role, direction))
        return None if index is None else self.recipes[index]

    def quantizer(self, role: QuantizerRole) -> Quantizer | DelayedScalingRequest:
        if is_attention(role):
            return self._attention(role)
        row, column = (self.recipe_of(role.name, role.tensor_type, str(direction)) for direction in Direction)
        if row is None and column is None:
            return IdentityQuantizer()
        answers = [None if recipe is None else recipe.quantizer(role) for recipe in (row, column)]
        request = next((answer for answer in answers if isinstance(answer, DelayedScalingRequest)), None)
        if request is not None:
            return request
        if row is not None and row == column and isinstance(answers[0], Quantizer):
            return answers[0]
        rowwise, columnwise = (
            answer.side(direction).copy() if isinstance(answer, Quantizer) else IdentityQuantizer()
            for answer, direction in zip(answers, Direction, strict=True)
        )
        return HybridQuantizer(rowwise, columnwise)

    def _attention(self, role: QuantizerRole) -> Quantizer | DelayedScalingRequest:
        name = role.name
        for hint in _HINTS if role.module_type == "" else ():
            name = name.removesuffix(hint).removesuffix(".")
        recipe = self.recipe_of(name, "qkv", str(Direction.ROWWISE))
        return IdentityQuantizer() if recipe is None else recipe.quantizer(role)


def units(operands: Iterable[Operand], delayed: Iterable[tuple[str, str]] = ()) -> list[tuple[Operand, ...]]:
    """Joins the operands that are quantized together or not at all: those of an attention, and of a delayed scale.

    `delayed` has the layers and roles of the second kind.
    """
    together, joined = set(delayed), dict[tuple[str, ...], dict[Operand, None]]()
    for operand in operands:
        key: tuple[str, ...] = operand
        if operand.role in TENSOR_TYPES["dpa"]:
            key = (operand.layer,)
        elif (operand.layer, operand.role) in together:
            key = (operand.layer, operand.role)
        joined.setdefault(key, {})[operand] = None
    return [tuple(members) for members in joined.values()]
