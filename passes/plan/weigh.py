"""Under an `auto` recipe, keeps in high precision what is estimated to be slower quantized.

It weighs single matmuls, and attention as a whole, after its backward by itself: that may stay in high precision, on
the quantized queries, keys and values. An attention without an FP8 kernel stays in high precision on a GPU. A matmul
that stays no longer shares the cast of its input: the others are weighed again, until nothing changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fxquant.cost.attention import attention_work
from fxquant.cost.estimate import estimate
from fxquant.cost.kept import rates_of
from fxquant.cost.work import Estimate
from fxquant.decisions import Attended, Decision, SkipReason
from fxquant.formats import IDENTITY
from fxquant.passes.find.facts import Match, Resolved, decisions_of
from fxquant.roles import Gemm

_OF_BACKWARD = ("do", "dp")
"""The slots that an attention's backward alone quantizes."""


def weigh(matches: Sequence[Match]) -> list[Match]:
    """Returns the matches; those that are slower when quantized become high precision."""
    matches = list(map(_with_faster_backward, matches))
    while True:
        decisions = decisions_of(matches)
        published = {d.weighed for d in decisions if _is_published(d)}
        costs = estimate(decisions).items()
        slower = {site: cost for site, cost in costs if cost.slower and (cost.reference or site not in published)}
        if not slower:
            return matches
        matches = [_weighed(match, slower) for match in matches]


def _is_published(decision: Decision) -> bool:
    """Returns True if the rates of a decision's card were not measured."""
    problem = decision.matmul or decision.attention
    card = None if problem is None else rates_of(problem.device)
    return card is not None and card.published


def _with_faster_backward(match: Match) -> Match:
    """Returns the match of an attention with its backward in high precision where that is estimated to be faster."""
    attention, decisions = match.attention, decisions_of([match])
    attended = decisions[0].attention if decisions else None
    if attention is None or attended is None or attended.spec is None or not attended.spec.has_fp8_backward:
        return match
    if all(d.gemm is Gemm.FPROP for d in decisions) or _is_published(decisions[0]):
        return match
    plain = replace(attended, spec=replace(attended.spec, do=IDENTITY, dp=IDENTITY))
    quantized, high = (_backward_us(choice) for choice in (attended, plain))
    if quantized is None or high is None or high >= quantized:
        return match
    detail = f"the backward: {high:.3g} us in high precision, {quantized:.3g} us quantized"
    resolved = tuple(
        replace(product, decisions=tuple(_with_plain_backward(d, plain, detail) for d in product.decisions))
        for product in match.resolved
    )
    return replace(match, attention=replace(attention, spec=plain.spec), resolved=resolved)


def _backward_us(attended: Attended) -> float | None:
    """Returns the microseconds of all of a training step's attention but its forward; None if a part has no rate."""
    return Estimate(tuple(work for work in attention_work(attended, True) if "forward" not in work.what)).quantized


def _with_plain_backward(decision: Decision, attended: Attended, detail: str) -> Decision:
    decision = replace(decision, attention=attended)
    if decision.gemm is Gemm.FPROP:
        return decision
    if decision.role.tensor_type in (*_OF_BACKWARD, "s") and decision.quantizer is not None:
        return replace(decision, quantizer=None, skip_reason=SkipReason.NOT_PROFITABLE, detail=detail)
    return decision if decision.quantizer is None else replace(decision, detail="as stored, dequantized")


def _weighed(match: Match, slower: Mapping[int, Estimate]) -> Match:
    resolved = tuple(
        _in_high_precision(product, slower[site]) if (site := product.decisions[0].weighed) in slower else product
        for product in match.resolved
    )
    attention = match.attention
    if attention is not None and resolved[0].decisions[0].weighed in slower:
        attention = replace(attention, spec=None)
    return replace(match, attention=attention, resolved=resolved)


def _in_high_precision(resolved: Resolved, cost: Estimate) -> Resolved:
    """Returns the same product in high precision."""
    decisions = []
    for d in resolved.decisions:
        if d.quantizer is not None or d.attention is not None:
            plain = None if d.attention is None else replace(d.attention, spec=None)
            reason = SkipReason.NOT_PROFITABLE
            d = replace(d, quantizer=None, skip_reason=reason, detail=str(cost), attention=plain)
        decisions.append(d)
    return Resolved(quantizers=None, decisions=tuple(decisions))
