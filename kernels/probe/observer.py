"""The measuring of one linear: its vectors are added to the tensors of a step, in the forward and in the backward.

fxquant.scaled_mm(quantize(x), quantize(w))
# has beside it
v0, v1 = fxquant.probe_operand(x, quantize(x), ..), fxquant.probe_operand(w, quantize(w), ..)
forward.copy_(fxquant.probe_merge(forward, stack([v0, v1, ..])))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fxquant.formats import OperandSpec, QuantSpec
from fxquant.kernels.probe import reference
from fxquant.kernels.probe.ops import probe_groups, probe_merge, probe_operand, probe_product
from fxquant.kernels.probe.plan import GEMMS, Plan, Slot

Quantized = tuple[list[Tensor], QuantSpec]
Operands = Mapping[tuple[str, str], tuple[Tensor, Tensor | None, Quantized]]
"""Operands as they are, the ends of their groups, and their quantized forms, by role and direction."""
Quantize = Callable[[Tensor, Tensor | None, OperandSpec, str], Quantized]
"""Quantizes a tensor, or its groups of rows, in one direction."""

_PLAIN = QuantSpec(format="identity")


@dataclass(frozen=True)
class Observer:
    """The plan of a linear, and the tensors [slots, COLUMNS] to which a forward and a backward add what they measure.

    Experts have `grouped` operands. Gradients are taken `of_input` and `of_weight`: what no backward multiplies is not
    measured.
    """

    plan: Plan
    forward: Tensor
    backward: Tensor
    grouped: bool = False
    of_input: bool = False
    of_weight: bool = False

    def add_forward(self, operands: Operands, quantize: Quantize) -> None:
        """Adds what a forward measures of the operands that it, or its backward, multiplies."""
        self._add(self.forward, self.plan.forward(), operands, quantize)

    def add_backward(self, operands: Operands, quantize: Quantize) -> None:
        """Adds what a backward measures of gradients, and of the products with them."""
        self._add(self.backward, self.plan.backward(), operands, quantize)

    def _add(self, total: Tensor, slots: Sequence[Slot], operands: Operands, quantize: Quantize) -> None:
        if not slots:
            return
        nothing = reference.neutral(total.device)
        tried: dict[tuple[str, str, int], Quantized] = {}

        def quantized(slot: Slot) -> Quantized:
            """The quantized form of a slot's operand."""
            key = (slot.role, slot.direction, slot.candidate)
            x, offs, parts = operands[key[:2]]
            spec = self.plan.specs(slot.role)[slot.candidate] if slot.candidate >= 0 else None
            if spec is not None and key not in tried:
                tried[key] = quantize(x, offs, spec, slot.direction)
            return parts if spec is None else tried[key]

        vectors, counted = [], set[str]()
        for slot in slots:
            needed = GEMMS[slot.gemm] if slot.gemm else ((slot.role, slot.direction),)
            if any(operand not in operands for operand in needed):
                vectors.append(nothing)
            elif slot.gemm:
                vectors.append(_product(slot, operands, quantized))
            else:
                groups = self.plan.of_operands(slot.role not in counted)
                vectors.append(self._operand(slot, operands, quantized(slot), groups))
                counted.add(slot.role)
        total.copy_(probe_merge(total, torch.stack(vectors)))

    def _operand(self, slot: Slot, operands: Operands, quantized: Quantized, groups: str) -> Tensor:
        x, offs, _ = operands[slot.role, slot.direction]
        parts, spec = quantized
        if self.grouped:
            return probe_groups(x, offs, parts, str(spec), slot.direction, groups)
        return probe_operand(_oriented(x, slot.direction), parts, str(spec), groups)


def _product(slot: Slot, operands: Operands, quantized: Callable[[Slot], Quantized]) -> Tensor:
    xs, seen = [], []
    for role, direction in GEMMS[slot.gemm]:
        x = _oriented(operands[role, direction][0], direction)
        xs.append(x)
        if slot.candidate < 0 or (role, direction) == (slot.role, slot.direction):
            seen.append(quantized(Slot(role, direction, "", slot.candidate)))
        else:
            seen.append(([x], _PLAIN))
    (a, a_spec), (b, b_spec) = seen
    left, right = xs
    return probe_product(left, right, a, b, str(a_spec), str(b_spec))


def _oriented(x: Tensor, direction: str) -> Tensor:
    return x.mT if direction == "columnwise" else x
