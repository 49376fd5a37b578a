"""The measuring of one linear: its vectors are added to the tensors of a step, in the forward and in the backward.

fxquant.scaled_mm(quantize(x), quantize(w))
# has beside it
v0, v1 = fxquant.probe_operand(x, quantize(x), ..), fxquant.probe_operand(w, quantize(w), ..)
forward.copy_(fxquant.probe_merge(forward, [v0, v1, ..]))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fxquant.formats import AttentionSpec, OperandSpec, QuantSpec
from fxquant.kernels.attention.ops import quantize_heads
from fxquant.kernels.attention.reference import heads_of
from fxquant.kernels.cast.ops import quantize_operand
from fxquant.kernels.probe import reference
from fxquant.kernels.probe.ops import (
    probe_groups,
    probe_heads,
    probe_loss,
    probe_merge,
    probe_operand,
    probe_product,
    probe_rows,
    probe_softmax,
    probe_turned,
)
from fxquant.kernels.probe.plan import GEMMS, LOSS, Plan, Slot
from fxquant.kernels.state.step import StepState

Quantized = tuple[list[Tensor], QuantSpec]
Observation = tuple[Tensor, Tensor | None, Quantized, OperandSpec]
"""An operand as it is, the ends of its groups, its quantized form, and the formats of both directions."""
Operands = Mapping[tuple[str, str], Observation]
"""Operands by role and direction."""
Quantize = Callable[[Tensor, Tensor | None, OperandSpec, str], Quantized]
"""Quantizes a tensor, or its groups of rows, in one direction."""

_PLAIN = QuantSpec(format="identity")

GRADIENT = ("grad_output", "")
"""The key of the gradient of a forward's result."""


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

    @property
    def of_loss(self) -> bool:
        """True if a backward takes the operands of its forward as they are, and measures what the loss changes by."""
        return LOSS in self.plan.groups

    def _add(self, total: Tensor, slots: Sequence[Slot], operands: Operands, quantize: Quantize) -> None:
        tried: dict[tuple[str, str, int], Quantized] = {}

        def quantized(slot: Slot) -> Quantized:
            """The quantized form of a slot's operand."""
            key = (slot.role, slot.direction, slot.candidate)
            x, offs, parts, _ = operands[key[:2]]
            spec = self.plan.specs(slot.role)[slot.candidate] if slot.candidate >= 0 else None
            if spec is not None and key not in tried:
                tried[key] = quantize(x, offs, spec, slot.direction)
            return parts if spec is None else tried[key]

        counted, alike = _Counted(self.plan), dict[tuple[str, int], Tensor]()

        def vector(slot: Slot) -> Tensor | None:
            if any(operand not in operands for operand in _needed(slot)):
                return None
            if slot.gemm == LOSS:
                return _loss(slot, operands, quantized(slot))
            if slot.gemm:
                return _product(slot, operands, quantized)
            x, groups, same = operands[slot.role, slot.direction][0], counted.groups(slot), (slot.role, slot.candidate)
            if same in alike and slot.direction == "columnwise":
                return _turned(alike[same], quantized(slot), _oriented(x, slot.direction), groups)
            measured = self._operand(slot, operands, quantized(slot), groups)
            if not self.grouped and _alike(self._spec(slot, operands)):
                alike[same] = measured
            return measured

        add(total, slots, vector)

    def _spec(self, slot: Slot, operands: Operands) -> OperandSpec | None:
        """The format of a slot's operand."""
        if slot.candidate < 0:
            return operands[slot.role, slot.direction][3]
        return self.plan.specs(slot.role)[slot.candidate]

    def _operand(self, slot: Slot, operands: Operands, quantized: Quantized, groups: str) -> Tensor:
        x, offs, *_ = operands[slot.role, slot.direction]
        parts, spec = quantized
        if self.grouped:
            return probe_groups(x, offs, parts, str(spec), slot.direction, groups)
        return probe_operand(_oriented(x, slot.direction), parts, str(spec), groups)


@dataclass(frozen=True)
class AttentionObserver:
    """The plan of an attention, and the tensors to which its forward and backward add what they measure."""

    plan: Plan
    forward: Tensor
    backward: Tensor

    def add_forward(
        self, tensors: Mapping[str, Tensor], parts: Mapping[str, Sequence[Tensor]], extras: Sequence[Tensor],
        scale: Tensor | None, core: str,
    ) -> None:  # fmt: skip
        """Adds what a forward measures of q, k and v, beside their parts, and of its softmax, which `scale` is for."""
        width, spec = tensors["q"].shape[-1], AttentionSpec.parse(core).qkv
        counted = _Counted(self.plan)

        def vector(slot: Slot) -> Tensor:
            groups, tried = counted.groups(slot), self._tried(slot)
            if slot.role == "s":
                text = "" if tried is None else str(tried)
                return probe_softmax(parts["q"], parts["k"], extras, scale, core, width, text, groups)
            heads = heads_of(tensors["q"]) // heads_of(tensors["k"]) if slot.role == "q" else 1
            return _heads(slot, tensors[slot.role], (parts[slot.role], spec), tried, heads, groups)

        add(self.forward, self.plan.forward(), vector)

    def add_backward(self, do: Tensor, spec: QuantSpec, scale: Tensor | None) -> None:
        """Adds what a backward measures of the gradient of the output."""
        counted = _Counted(self.plan)

        def vector(slot: Slot) -> Tensor:
            turned = slot.direction == "columnwise"
            parts = [do] if spec.is_identity else quantize_heads(do, str(spec), 1, turned, scale)
            return _heads(slot, do, (parts, spec), self._tried(slot), 1, counted.groups(slot))

        add(self.backward, self.plan.backward(), vector)

    def _tried(self, slot: Slot) -> OperandSpec | None:
        return self.plan.specs(slot.role)[slot.candidate] if slot.candidate >= 0 else None


def _heads(
    slot: Slot, x: Tensor, quantized: tuple[Sequence[Tensor], QuantSpec], tried: OperandSpec | None, heads: int,
    groups: str,
) -> Tensor:  # fmt: skip
    """The vector of a tensor of heads, beside its quantized form, or that of a candidate that is tried."""
    (parts, spec), turned = quantized, slot.direction == "columnwise"
    if tried is None:
        return probe_heads(x, parts, str(spec), heads, turned, groups)
    spec = tried.columnwise if turned else tried.rowwise
    if spec.row.family.startswith("per_head"):
        return probe_heads(x, quantize_heads(x, str(spec), heads, turned), str(spec), heads, turned, groups)
    random = torch.zeros(2, dtype=torch.int64, device=x.device) if tried.is_stochastic else None
    parts, spec = quantize_operand(x, tried, slot.direction, StepState(random=random))
    return probe_operand(_oriented(x, slot.direction), parts, str(spec), groups)


def add(total: Tensor, slots: Sequence[Slot], vector: Callable[[Slot], Tensor | None]) -> None:
    """Adds the vectors of slots to what a step has measured; None is that of nothing."""
    if slots:
        vectors = [*map(vector, slots)]
        nothing = reference.neutral(total.device) if any(measured is None for measured in vectors) else total
        total.copy_(probe_merge(total, [nothing if measured is None else measured for measured in vectors]))


def _alike(spec: OperandSpec | None) -> bool:
    """True if both directions of an operand have the same values: one is the other, transposed."""
    if spec is None or spec.from_rowwise or spec.is_stochastic or spec.rowwise != spec.columnwise:
        return False
    return spec.rowwise.row.family == "per_tensor"


def _turned(vector: Tensor, quantized: Quantized, x: Tensor, groups: str) -> Tensor:
    parts, spec = quantized
    return probe_turned(x, vector, parts, str(spec)) if "blocks" in groups.split("+") else vector


class _Counted:
    """The groups of statistics of each slot: those of the tensor alone are measured once."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._roles = set[str]()

    def groups(self, slot: Slot) -> str:
        """The groups of a slot, whose tensor counts from now on."""
        first = slot.role not in self._roles
        self._roles.add(slot.role)
        return self._plan.of_operands(first)


def _needed(slot: Slot) -> Sequence[tuple[str, str]]:
    """The operands that a slot is measured of."""
    if slot.gemm == LOSS:
        return (*GEMMS["fprop"], GRADIENT)
    return GEMMS[slot.gemm] if slot.gemm else ((slot.role, slot.direction),)


def _loss(slot: Slot, operands: Operands, quantized: Quantized) -> Tensor | None:
    parts, spec = quantized
    if spec.is_identity:
        return None
    grad, x, w = (operands[key][0] for key in (GRADIENT, *GEMMS["fprop"]))
    return probe_loss(grad, x, w, parts, str(spec), slot.role)


def _product(slot: Slot, operands: Operands, quantized: Callable[[Slot], Quantized]) -> Tensor:
    xs, seen = [], []
    for role, direction in GEMMS[slot.gemm]:
        x = _oriented(operands[role, direction][0], direction)
        if slot.gemm != "fprop" and role != "grad_output":
            x = probe_rows(x)  # which the forward can pick: a backward would keep all of x otherwise
        xs.append(x)
        if slot.candidate < 0 or (role, direction) == (slot.role, slot.direction):
            seen.append(quantized(Slot(role, direction, "", slot.candidate)))
        else:
            seen.append(([x], _PLAIN))
    (a, a_spec), (b, b_spec) = seen
    left, right = xs
    return probe_product(left, right, a, b, str(a_spec), str(b_spec), slot.gemm)


def _oriented(x: Tensor, direction: str) -> Tensor:
    return x.mT if direction == "columnwise" else x
