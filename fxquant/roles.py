"""Roles: the questions to a quantizer factory, each about one operand of one matmul."""

from __future__ import annotations

from dataclasses import dataclass

from fxquant.checks import Words, checked, did_you_mean
from fxquant.errors import RecipeError

_NAME = "write name=, the path of a layer"


@checked(
    takes={
        **dict.fromkeys(("layer", "fqn", "module", "path"), _NAME),
        **dict.fromkeys(("role", "operand"), "write tensor_type='input', 'weight' or 'grad_output'"),
        "direction": "a role is for both directions of its operand; fxquant.HybridQuantizer answers for each",
    }
)
@dataclass(frozen=True)
class QuantizerRole:
    """One operand, named as TransformerEngine names it.

    `module_type`: ``linear``, ``grouped_linear``, ``dpa`` (attention), or ``matmul`` for the product of two
    activations outside attention. `tensor_type`: ``input``, ``weight``, ``grad_output``; for attention ``qkv``,
    ``s``, ``do``, ``dp``. `name`: the module path, such as ``model.layers.0.mlp.gate_proj``.

    A misspelled type is a RecipeError. A `module_type` that is like none of these is let through, with any
    `tensor_type`, as factories answer for roles that they do not know. Comparing a role with a string such as
    ``linear_input``, TransformerEngine's older roles, is a RecipeError.
    """

    module_type: str = ""
    tensor_type: str = ""
    name: str = ""

    def __post_init__(self) -> None:
        module, kind = self.module_type, self.tensor_type
        if module not in TENSOR_TYPES and (hint := did_you_mean(module, filter(None, TENSOR_TYPES))):
            raise RecipeError(f"no role has module_type={module!r}{hint}")
        if module in TENSOR_TYPES and kind not in (*sum(TENSOR_TYPES.values(), ()), *_RESULTS):
            kinds = dict.fromkeys(TENSOR_TYPES[module] if module else sum(TENSOR_TYPES.values(), ()))
            names = ", ".join(filter(None, kinds))
            raise RecipeError(f"no role has tensor_type={kind!r}{did_you_mean(kind, kinds) or '.'} Known: {names}")

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str) and other.startswith(("linear_", "grouped_linear_", "dpa_")):
            raise RecipeError(
                f"a factory compares the role {self} with {other!r}: a factory for string roles goes through "
                "fxquant.factories.from_string_roles"
            )
        if not isinstance(other, QuantizerRole):
            return NotImplemented
        return (self.module_type, self.tensor_type, self.name) == (other.module_type, other.tensor_type, other.name)

    def __str__(self) -> str:
        return f"{self.name or '<model>'} ({self.module_type}, {self.tensor_type})"


TENSOR_TYPES = {
    "linear": ("input", "weight", "grad_output"),
    "grouped_linear": ("input", "weight", "grad_output"),
    "dpa": ("qkv", "s", "do", "dp"),
    "matmul": ("input", "grad_output"),
    "": ("",),
}
"""The `tensor_type` of the roles of each `module_type`; attention's hints about its results have neither."""


_RESULTS = ("o", "dqkv")
"""Results of an attention: TransformerEngine has roles of them, and `passes/plan/attention.py` asks by hints."""


class Gemm(str, Words):
    """The three matmuls of a linear layer.

    fprop: output[M, N] = input.row[M, K] x weight.row[N, K]. dgrad: grad_input[M, K] = grad_output.row[M, N] x
    weight.col[K, N]. wgrad: grad_weight[N, K] = grad_output.col[N, M] x input.col[K, M]. Both operands of each have
    the contracted axis last.
    """

    FPROP = "fprop"
    DGRAD = "dgrad"
    WGRAD = "wgrad"

    def __str__(self) -> str:
        return self.value


class Direction(str, Words):
    """The contracted axis of an operand [M, K]: rowwise K, columnwise M (the payload is then [K, M])."""

    ROWWISE = "rowwise"
    COLUMNWISE = "columnwise"

    def __str__(self) -> str:
        return self.value


GEMM_OPERANDS: dict[Gemm, tuple[tuple[str, Direction], tuple[str, Direction]]] = {
    Gemm.FPROP: (("input", Direction.ROWWISE), ("weight", Direction.ROWWISE)),
    Gemm.DGRAD: (("grad_output", Direction.ROWWISE), ("weight", Direction.COLUMNWISE)),
    Gemm.WGRAD: (("grad_output", Direction.COLUMNWISE), ("input", Direction.COLUMNWISE)),
}
"""The two operands of each GEMM: (operand, direction), left then right."""

SMALLEST = 16
"""FP8 GEMMs want 16-byte rows: products with fewer input or output features stay as they are."""
