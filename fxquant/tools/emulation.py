"""A model whose operands are quantized, or not, without compiling it again: all candidates of a search in one graph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fxquant.formats import OperandSpec
from fxquant.kernels import custom, switched
from fxquant.kernels.cast import ops, reference
from fxquant.kernels.state.step import StepState
from fxquant.quantizers import (
    DelayedScalingRequest,
    Float8CurrentScalingQuantizer,
    IdentityQuantizer,
    QuantizedTensor,
    Quantizer,
)
from fxquant.quantizers.base import QuantizedOperand
from fxquant.recipes import Recipe
from fxquant.recipes.operands import Operand
from fxquant.roles import Direction, QuantizerRole
from fxquant.tools.trials import Trials

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
    """Numbers every operand that it is asked for."""

    operands: dict[Operand, int] = field(default_factory=dict)
    roles: dict[Operand, QuantizerRole] = field(default_factory=dict)

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        if role.module_type not in ROLES:
            return IdentityQuantizer()
        numbers = []
        for direction in Direction:
            operand = Operand(role.name, role.tensor_type, str(direction))
            self.roles[operand] = role
            numbers.append(self.operands.setdefault(operand, len(self.operands)))
        return _Numbered(*numbers)

    def fingerprint(self) -> str:
        return f"Switchable({id(self)})"


def spec_of(recipe: Recipe, role: QuantizerRole) -> OperandSpec:
    """The formats that a recipe has for an operand; delayed scaling counts as current scaling."""
    answer = recipe.quantizer(role)
    if isinstance(answer, DelayedScalingRequest):
        answer = Float8CurrentScalingQuantizer(answer.fp8_format.dtype(role.tensor_type))
    return answer.operand_spec()


def quantized_values(x: Tensor, spec: OperandSpec, direction: str) -> Tensor:
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
        self.specs: dict[int, tuple[OperandSpec, str]] = {}

    def choose(self, recipes: Sequence[Recipe], chosen: Mapping[Operand, int]) -> None:
        """Quantizes operands from now on by the recipes that are chosen for them."""
        self.specs = {
            self.numbered.operands[operand]: (spec_of(recipes[i], self.numbered.roles[operand]), operand.direction)
            for operand, i in chosen.items()
            if operand in self.numbered.operands
        }

    def __call__(
        self, a: tuple[Tensor, int], b: tuple[Tensor, int], bias: Tensor | None, out_dtype: torch.dtype
    ) -> Tensor:
        left, right = (self._values(*operand) for operand in (a, b))
        if left is None and right is None:
            return product(a[0], b[0], bias, out_dtype)
        left = a[0].float() if left is None else left
        return product(left, b[0].float() if right is None else right, bias, out_dtype)

    def _values(self, x: Tensor, number: int) -> Tensor | None:
        chosen = self.specs.get(number)
        return None if chosen is None else quantized_values(x, *chosen)

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


class Sensitivity(Emulation):
    """Multiplies without quantization, and adds up what each candidate would do to each operand on the same tensors.

    `effects` has, by the number of an operand and of a candidate, the estimated change of the loss in each of its
    products: that of forward products in first and second order, by the gradient of their results (the second order by
    the squares of gradients of single rows, the Fisher matrix), and for products of the backward the squared relative
    error, which counts as a share of `progress`, what training gains, times the share of parameters behind them.
    """

    def __init__(self, numbered: Switchable, options: Mapping[int, Mapping[int, OperandSpec]]) -> None:
        super().__init__(numbered)
        self.options = options
        self.forward: defaultdict[tuple[int, int], float] = defaultdict(float)
        self.backward: defaultdict[tuple[int, int], float] = defaultdict(float)
        self.errors: defaultdict[tuple[int, int], float] = defaultdict(float)
        """The largest relative errors of products, by operand and candidate."""
        self._by_number = {number: operand for operand, number in numbered.operands.items()}
        self._compared: dict[str, int] = {}
        self._waiting: dict[str, list[tuple[tuple[Tensor, int], tuple[Tensor, int]]]] = defaultdict(list)

    def __call__(
        self, a: tuple[Tensor, int], b: tuple[Tensor, int], bias: Tensor | None, out_dtype: torch.dtype
    ) -> Tensor:
        out = product(a[0], b[0], bias, out_dtype)
        first = self._by_number[a[1]]
        if first.role != "grad_output":
            self._waiting[first.layer].append((a, b))
            return out
        gradient = a[0] if first.direction == "rowwise" else a[0].mT
        self._fprop(first.layer, gradient)
        exact = a[0].float() @ b[0].float().mT
        self._compare(a, b, exact, None)
        return out

    def _fprop(self, layer: str, gradient: Tensor) -> None:
        """Compares the forward product whose result has this gradient, which both products of the backward read."""
        place = gradient.untyped_storage().data_ptr()
        if self._compared.get(layer) == place:
            return
        self._compared[layer] = place
        waiting = self._waiting[layer]
        for index in reversed(range(len(waiting))):
            (a, b) = waiting[index]
            if (a[0].shape[-2], b[0].shape[-2]) == gradient.shape[-2:]:
                del waiting[index]
                self._compare(a, b, a[0].float() @ b[0].float().mT, gradient.float())
                return

    def _compare(self, a: tuple[Tensor, int], b: tuple[Tensor, int], exact: Tensor, gradient: Tensor | None) -> None:
        norm = exact.norm().square().clamp_min(1e-30)
        for (x, number), other, left in ((a, b[0], True), (b, a[0], False)):
            for i, spec in self.options.get(number, {}).items():
                lost = quantized_values(x, spec, self._by_number[number].direction) - x.float()
                error = lost @ other.float().mT if left else other.float() @ lost.mT
                relative = float(error.norm().square() / norm)
                key = (number, i)
                self.errors[key] = max(self.errors[key], relative**0.5) if relative == relative else float("inf")
                if gradient is None:
                    self.backward[key] += relative if relative == relative else float("inf")
                    continue
                change = (gradient * error).sum(-1)
                effect = float(change.sum().abs() + change.square().sum() * change.numel() / 2)
                self.forward[key] += effect if effect == effect else float("inf")

    def finish(self) -> None:
        """Compares the products of a forward without a backward."""
        for pairs in self._waiting.values():
            for a, b in pairs:
                self._compare(a, b, a[0].float() @ b[0].float().mT, None)
        self.forget()

    def forget(self) -> None:
        """Drops the operands of products whose results have had no gradient."""
        self._waiting.clear()
        self._compared.clear()


def errors_of(trials: Trials, recipe: Recipe, run: Callable[[Any], object]) -> dict[Operand, float]:
    """The relative errors of products with each operand quantized by a recipe, while `run` runs a model."""
    numbered = Switchable()

    def use(compiled: Any) -> dict[Operand, float]:
        with Emulation(numbered).running():
            run(compiled)  # captures the graphs, and numbers all operands
        options = {number: {0: spec_of(recipe, numbered.roles[o])} for o, number in numbered.operands.items()}
        watcher = Sensitivity(numbered, options)
        with watcher.running():
            run(compiled)
        watcher.finish()
        return {operand: watcher.errors[number, 0] for operand, number in numbered.operands.items()}

    return trials.run(numbered, use)
