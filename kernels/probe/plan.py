"""The statistics that are wanted of one linear, and the order of its vectors; a `Plan` crosses into graphs as text."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from fxquant.formats import IDENTITY, LINEAR_OPERANDS, AttentionSpec, LinearSpec, OperandSpec, QuantSpec
from fxquant.kernels.attention.reference import UNQUANTIZED_SOFTMAX
from fxquant.kernels.probe.reference import GROUPS
from fxquant.roles import GEMM_OPERANDS

GEMMS = {
    str(gemm): tuple((role, str(direction)) for role, direction in operands) for gemm, operands in GEMM_OPERANDS.items()
}
"""The operands of the three products of a linear, left and right, with their directions."""

FORWARD = (("input", "rowwise"), ("weight", "rowwise"), ("input", "columnwise"), ("weight", "columnwise"))
"""The operands that the forward has: those of the backward too, which would have to be saved for it unquantized."""

LOSS = "loss"
"""In the place of a GEMM: what the loss changes by, which a backward measures of the forward's operands."""

BACKWARD = (("grad_output", "rowwise"), ("grad_output", "columnwise"))

ATTENTION_FORWARD = (("q", "rowwise"), ("k", "rowwise"), ("v", "columnwise"), ("s", "rowwise"))
"""The operands of both products of an attention's forward."""

ATTENTION_BACKWARD = (("do", "rowwise"), ("do", "columnwise"))

ATTENTION_ROLES = {"q": "qkv", "k": "qkv", "v": "qkv", "s": "s", "do": "do"}
"""The operands of attention that are measured, with the `tensor_type` of their roles."""


@dataclass(frozen=True)
class Slot:
    """One vector: of an operand in a direction, of the product `gemm` that it is in, or of the `LOSS` that it costs.

    `candidate` is the number of the quantizer that is tried, -1 for the one that there is; a product of a candidate has
    its other operand unquantized.
    """

    role: str
    direction: str
    gemm: str = ""
    candidate: int = -1


@dataclass(frozen=True)
class Plan:
    """The tensors of a linear, or an attention, that are measured, the groups, and the candidates of each tensor."""

    tensors: Sequence[str] = LINEAR_OPERANDS
    groups: Sequence[str] = GROUPS
    candidates: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def __str__(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    @functools.lru_cache(maxsize=4096)
    def parse(cls, text: str) -> Plan:
        """The inverse of `str(plan)`."""
        return cls(**json.loads(text))

    def of_operands(self, first: bool) -> str:
        """The groups of statistics of single operands, as `probe_operand` takes them.

        Those of the tensor alone are taken from the `first` of its vectors.
        """
        apart = ("product", "loss", *([] if first else ["exponents"]))
        return "+".join(group for group in self.groups if group not in apart)

    def specs(self, role: str) -> list[OperandSpec | None]:
        """The candidates of a tensor; None in the place of one that keeps it in high precision."""
        return [OperandSpec.parse(text) if text else None for text in self.candidates.get(role, ())]

    def forward(self) -> list[Slot]:
        """The vectors that a forward gives, in order."""
        return [*self._slots(FORWARD), *self._slots(ATTENTION_FORWARD), *self._products("fprop")]

    def backward(self) -> list[Slot]:
        """The vectors that a backward gives, in order."""
        products = [*self._products("dgrad"), *self._products("wgrad"), *self._losses()]
        return [*self._slots(BACKWARD), *self._slots(ATTENTION_BACKWARD), *products]

    def _slots(self, operands: Sequence[tuple[str, str]]) -> Iterator[Slot]:
        for role, direction in operands:
            if role in self.tensors:
                yield Slot(role, direction)
                yield from (Slot(role, direction, "", i) for i in self._tried(role))

    def _products(self, gemm: str) -> Iterator[Slot]:
        measured = [(role, direction) for role, direction in GEMMS[gemm] if role in self.tensors]
        if "product" not in self.groups or not measured:
            return
        yield Slot(*measured[0], gemm)
        for role, direction in measured:
            yield from (Slot(role, direction, gemm, i) for i in self._tried(role))

    def _losses(self) -> Iterator[Slot]:
        for role, direction in GEMMS["fprop"] if LOSS in self.groups else ():
            if role in self.tensors:
                yield from (Slot(role, direction, LOSS, i) for i in (-1, *self._tried(role)))

    def _tried(self, role: str) -> list[int]:
        return [i for i, spec in enumerate(self.specs(role)) if spec is not None]


def spec_of(spec: LinearSpec | AttentionSpec, plan: Plan, slot: Slot) -> QuantSpec:
    """The format of an operand in the direction of a slot: its own, or that of a candidate."""
    if isinstance(spec, AttentionSpec) and slot.candidate < 0:
        side: QuantSpec = getattr(spec, ATTENTION_ROLES[slot.role])
        return IDENTITY if slot.role == "s" and side.row.family in UNQUANTIZED_SOFTMAX else side
    operand: OperandSpec | None = None if isinstance(spec, AttentionSpec) else getattr(spec, slot.role)
    if slot.candidate >= 0:
        operand = plan.specs(slot.role)[slot.candidate]
    assert operand is not None
    return operand.columnwise if slot.direction == "columnwise" else operand.rowwise
