"""Asks the recipe for the slots of an attention, and checks that its answers fit together.

A slot is one tensor of a scaled-dot-product attention: `qkv` its operands, `s` the softmax, `do` the gradient of its
output, `dp` that of its scores. `o` and `dqkv`, the results, are asked for by hints, roles of no module type whose
names end in ``.dpa_output`` and ``.dpa_grad_input``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fxquant.decisions import SkipReason
from fxquant.errors import RecipeError
from fxquant.formats import IDENTITY, AttentionSpec
from fxquant.passes.find.facts import Attention, Match, Skip
from fxquant.quantizers import DelayedScalingRequest, Float8Quantizer, HybridQuantizer, Quantizer, quantizer_text
from fxquant.recipes import Recipe
from fxquant.roles import Direction, Gemm, QuantizerRole
from fxquant.state import Slots

SLOTS = ("qkv", "s", "do", "dp")
HINTS = {"o": "dpa_output", "dqkv": "dpa_grad_input"}
SCORES = {"input": "qkv", "weight": "qkv", "grad_output": "dp"}
CONTEXT = {"input": "s", "weight": "qkv", "grad_output": "do"}
"""The slot of each operand of the first and of the second product."""

_FAMILIES = ("per_tensor", "per_head", "mxfp8")
_REMEDY = "return IdentityQuantizer() for all of qkv, s, do and dp to keep this attention in high precision"

Answer = Quantizer | DelayedScalingRequest
Outcome = tuple[Quantizer | None, SkipReason | None, str]
"""An operand's quantizer in one direction, or the reason why it has none, and a detail."""


def attention_roles(name: str) -> dict[str, QuantizerRole]:
    """Returns the role of every slot and hint of an attention."""
    hints = {slot: QuantizerRole(name=f"{name}.{hint}".strip(".")) for slot, hint in HINTS.items()}
    return {slot: QuantizerRole("dpa", slot, name) for slot in SLOTS} | hints


@dataclass(frozen=True, kw_only=True)
class ResolvedAttention:
    """The spec of an attention and the quantizers by slot; without a spec it stays as it is, and `skip` says why."""

    spec: AttentionSpec | None = None
    quantizers: Mapping[str, Quantizer] = field(default_factory=dict)
    skip: Skip = (SkipReason.HIGH_PRECISION, "")


def resolve_attention(attention: Attention, match: Match, recipe: Recipe, slots: Slots) -> ResolvedAttention:
    """Asks the recipe for every slot of an attention. `match` is the last of its matches.

    An attention is quantized where the recipe returns FP8 for it. Raises RecipeError, naming layer and slot, for what
    cannot stand beside FP8 in its slot, and where the recipe has `fp8_dpa=True` for what is no FP8 at all.
    """
    roles = attention_roles(match.name)
    answers = {slot: recipe.quantizer(roles[slot]) for slot in SLOTS}
    kinds = {slot: _kind(answer) for slot, answer in answers.items()}
    if all(kind == "identity" for kind in kinds.values()):
        return ResolvedAttention()
    for slot, kind in kinds.items():
        if kind == "other" and ("fp8" in kinds.values() or getattr(recipe, "fp8_dpa", None)):
            problem = (
                f"{_text(answers[slot])} is not for attention, which takes FP8 with a scale for the tensor or heads"
            )
            raise _error(match, slot, f"{problem}, and MXFP8. Return one of these, or {_REMEDY}")
    if "fp8" not in kinds.values():
        slot = next(slot for slot, kind in kinds.items() if kind == "other")
        return ResolvedAttention(skip=(SkipReason.ATTENTION, f"{_text(answers[slot])} for {slot} is not for attention"))
    _check(match, answers, kinds)
    answers |= {slot: recipe.quantizer(roles[slot]) for slot in HINTS}
    delayed = [slot for slot, answer in answers.items() if isinstance(answer, DelayedScalingRequest)]
    if delayed and not match.takes_state:
        detail = f"{', '.join(delayed)}: this region is called as a function of its own"
        return ResolvedAttention(skip=(SkipReason.STATE, detail))
    quantizers = {slot: _with_slot(answer, match.name, slot, slots) for slot, answer in answers.items()}
    return ResolvedAttention(spec=_spec(attention, match, quantizers), quantizers=quantizers)


def _spec(attention: Attention, match: Match, quantizers: Mapping[str, Quantizer]) -> AttentionSpec:
    specs = {slot: quantizer.spec(Direction.ROWWISE) for slot, quantizer in quantizers.items()}
    for slot, spec in specs.items():
        unused = spec.row.family not in _FAMILIES or (slot in HINTS and spec.row.family == "mxfp8")
        specs[slot] = IDENTITY if unused else spec
    autocast = str(match.autocast).removeprefix("torch.") if match.autocast else ""
    return AttentionSpec(**specs, steps=attention.steps, dropout=attention.dropout, autocast=autocast, name=match.name)


def _kind(answer: Answer) -> str:
    """Returns ``fp8`` for a quantizer that attention takes, ``identity``, or ``other``."""
    if isinstance(answer, DelayedScalingRequest):
        return "fp8"
    if isinstance(answer, HybridQuantizer):
        return "other"
    spec = answer.spec(Direction.ROWWISE)
    if spec.is_identity:
        return "identity"
    taken = not spec.key and spec.row.family in _FAMILIES and spec.row.block[0] != 32
    return "fp8" if taken else "other"


def _check(match: Match, answers: dict[str, Answer], kinds: dict[str, str]) -> None:
    """Raises RecipeError for quantizers that cannot be used together in one attention."""
    mxfp8 = {slot for slot in SLOTS if _is_mxfp8(answers[slot])}
    for slot in ("qkv", "s"):
        if kinds[slot] == "identity" and not (slot == "s" and "qkv" in mxfp8):
            others = ", ".join(other for other in SLOTS if kinds[other] == "fp8")
            problem = f"{_text(answers[slot])} stands beside FP8 in {others}"
            raise _error(match, slot, f"{problem}. Return an FP8 quantizer, or {_REMEDY}")
    if "qkv" in mxfp8:
        if kinds["do"] == "fp8" and "do" not in mxfp8:
            problem = f"{_text(answers['do'])} stands beside MXFP8 in qkv. Return an MXFP8Quantizer"
            raise _error(match, "do", f"{problem}, or IdentityQuantizer() for a backward in high precision")
        return
    for slot in sorted(mxfp8):
        problem = f"{_text(answers[slot])} stands beside {_text(answers['qkv'])} in qkv"
        raise _error(match, slot, f"{problem}. Return FP8 with a scale for the tensor or for heads")
    if kinds["do"] != kinds["dp"]:
        slot, other = ("do", "dp") if kinds["do"] == "identity" else ("dp", "do")
        problem = f"{_text(answers[slot])} stands beside {_text(answers[other])} in {other}. Return FP8 for both"
        raise _error(match, slot, f"{problem}, or IdentityQuantizer() for both for a backward in high precision")


def _is_mxfp8(answer: Answer) -> bool:
    return not isinstance(answer, DelayedScalingRequest) and answer.spec(Direction.ROWWISE).row.family == "mxfp8"


def _error(match: Match, slot: str, problem: str) -> RecipeError:
    return RecipeError(f"layer {match.name or '<model>'!r}, attention slot {slot}: {problem}.")


def _text(answer: Answer) -> str:
    return repr(answer) if isinstance(answer, DelayedScalingRequest) else quantizer_text(answer)


def _with_slot(answer: Answer, layer: str, slot: str, slots: Slots) -> Quantizer:
    if not isinstance(answer, DelayedScalingRequest):
        return answer
    dtype = answer.fp8_format.dtype("grad_output" if slot in ("do", "dp", "dqkv") else "input")
    return Float8Quantizer(dtype, slots.add(answer, (layer, slot, 0), dtype))


def attention_outcome(
    answer: ResolvedAttention, slot_of: Mapping[str, str], operand: str, gemm: Gemm, _: Direction
) -> Outcome:
    """Decides on an operand of a product of an attention, in one GEMM."""
    slot, spec = slot_of[operand], answer.spec
    if spec is None:
        return None, *answer.skip
    detail, backward = "", gemm is not Gemm.FPROP
    if spec.qkv.row.family == "mxfp8" and slot in ("s", "dp"):
        detail = "MXFP8 attention leaves it unquantized"
    elif backward and slot == "s" and not spec.has_fp8_backward:
        detail = "computed again in high precision"
    elif not getattr(spec, slot).is_identity:
        detail = "as stored, dequantized" if backward and not spec.has_fp8_backward else ""
        return answer.quantizers[slot], None, detail
    return None, SkipReason.HIGH_PRECISION, detail
