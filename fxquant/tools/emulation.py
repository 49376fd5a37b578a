"""A model whose operands are quantized, or not, without compiling it again: all candidates of a search in one graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fxquant.formats import OperandSpec
from fxquant.kernels import custom, switched
from fxquant.kernels.cast import ops, reference
from fxquant.kernels.state.step import StepState
from fxquant.quantizers import (
    DelayedScalingRequest,
    Float8CurrentScalingQuantizer,
    QuantizedTensor,
    Quantizer,
)
from fxquant.quantizers.base import QuantizedOperand
from fxquant.recipes import HighPrecision, Recipe
from fxquant.recipes.operands import Operand
from fxquant.roles import Direction, QuantizerRole

ROLES = ("linear", "matmul")
"""The modules whose products are run so: experts and attention have kernels of their own."""


@dataclass(frozen=True)
class _Numbered(Quantizer):
    """Keeps an operand as it is, with its number in either direction beside it."""

    rowwise_number: int
    columnwise_number: int

    def quantize(self, x: Tensor, *, rowwise: bool = True, columnwise: bool = True) -> QuantizedTensor:
        def half(t: Tensor, number: int) -> QuantizedOperand:
            return QuantizedOperand(t, torch.full((1,), number, dtype=torch.int64, device=t.device))

        row = half(x, self.rowwise_number) if rowwise else None
        return QuantizedTensor(row, half(x.mT, self.columnwise_number) if columnwise else None)

    def dequantize(self, operand: QuantizedOperand) -> Tensor:
        return operand.data

    def qgemm(self, a: QuantizedOperand, b: QuantizedOperand, *, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        assert a.scale is not None and b.scale is not None
        return switched.switched_mm(a.data, a.scale, b.data, b.scale, bias, out_dtype)


@dataclass(frozen=True, repr=False, eq=False)
class Switchable(Recipe):
    """Numbers every operand that it is asked for; `others`, which have kernels of their own, are as in that recipe."""

    others: Recipe = field(default_factory=HighPrecision)
    operands: dict[Operand, int] = field(default_factory=dict)
    roles: dict[Operand, QuantizerRole] = field(default_factory=dict)

    def quantizer(self, role: QuantizerRole) -> Quantizer | DelayedScalingRequest:
        if role.module_type not in ROLES:
            return self.others.quantizer(role)
        numbers = []
        for direction in Direction:
            operand = Operand(role.name, role.tensor_type, str(direction))
            self.roles[operand] = role
            numbers.append(self.operands.setdefault(operand, len(self.operands)))
        return _Numbered(*numbers)

    def fingerprint(self) -> str:
        return f"Switchable({id(self)})"


@dataclass(frozen=True, repr=False)
class WithoutHistory(Recipe):
    """A recipe under which delayed scaling is current scaling."""

    recipe: Recipe

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        answer = self.recipe.quantizer(role)
        if isinstance(answer, DelayedScalingRequest):
            return Float8CurrentScalingQuantizer(answer.fp8_format.dtype(role.tensor_type))
        return answer

    def fingerprint(self) -> str:
        return f"WithoutHistory({self.recipe.fingerprint()})"


def _spec_of(recipe: Recipe, role: QuantizerRole) -> OperandSpec:
    return WithoutHistory(recipe).quantizer(role).operand_spec()


def _quantized_values(x: Tensor, spec: OperandSpec, direction: str) -> Tensor:
    """The float32 values of an operand [*, R, C], its contracted axis last, quantized in one direction."""
    random: Tensor | None = None
    if spec.is_stochastic:
        random = torch.randint(2**63 - 1, (2,)).to(x.device)
        spec = spec.numbered(0)
    whole = x.mT if direction == "columnwise" else x
    parts, side = ops.quantize_operand(whole, spec, direction, StepState(random=random))
    if side.key:
        return custom.get(side).dequantize_side(parts, x.shape[-1]).float()
    return reference.plain_basis(reference.dequantize(parts, side), side).narrow(-1, 0, x.shape[-1])


class Emulation:
    """Multiplies as the formats say that are chosen for operands by number; all others stay as they are."""

    def __init__(self, numbered: Switchable) -> None:
        self.numbered = numbered
        self._recipes: Sequence[Recipe] = ()
        self._chosen: Mapping[Operand, int] = {}
        self._specs: dict[int, tuple[OperandSpec, str] | None] = {}

    def choose(self, recipes: Sequence[Recipe], chosen: Mapping[Operand, int]) -> None:
        """Quantizes operands from now on by the recipes that are chosen for them."""
        self._recipes, self._chosen = recipes, dict(chosen)
        self._specs.clear()

    def _spec(self, number: int) -> tuple[OperandSpec, str] | None:
        """The formats of an operand, with its direction: of one that no graph had when the choice was made, too."""
        if number not in self._specs:
            operand = [*self.numbered.operands][number]
            i = self._chosen.get(operand)
            role = self.numbered.roles[operand]
            self._specs[number] = None if i is None else (_spec_of(self._recipes[i], role), operand.direction)
        return self._specs[number]

    def __call__(
        self, a: tuple[Tensor, int], b: tuple[Tensor, int], bias: Tensor | None, out_dtype: torch.dtype
    ) -> Tensor:
        left, right = (self._values(*operand) for operand in (a, b))
        if left is None and right is None:
            return product(a[0], b[0], bias, out_dtype)
        left = a[0].float() if left is None else left
        return product(left, b[0].float() if right is None else right, bias, out_dtype)

    def _values(self, x: Tensor, number: int) -> Tensor | None:
        chosen = self._spec(number)
        return None if chosen is None else _quantized_values(x, *chosen)

    @contextmanager
    def running(self) -> Iterator[None]:
        """A scope in which models compiled under the numbered recipe run."""
        with switched.multiplying(self):
            yield


def product(a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """a x b^T + bias in the wider dtype of both, rounded once."""
    dtype = torch.promote_types(a.dtype, b.dtype)
    out = a.to(dtype) @ b.to(dtype).mT
    return (out if bias is None else out + bias.to(dtype)).to(out_dtype)
