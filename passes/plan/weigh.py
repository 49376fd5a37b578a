"""Under an `auto` recipe, keeps in high precision what is estimated to be slower quantized.

It weighs single matmuls, and attention as a whole. An attention without an FP8 kernel stays in high precision on a GPU.
A matmul that stays no longer shares the cast of its input: the others are weighed again, until nothing changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fxquant.cost.estimate import estimate
from fxquant.cost.kept import rates_of
from fxquant.cost.work import Estimate
from fxquant.decisions import Decision, SkipReason
from fxquant.passes.find.facts import Match, Resolved, decisions_of


def weigh(matches: Sequence[Match]) -> list[Match]:
    """Returns the matches; those that are slower when quantized become high precision."""
    matches = list(matches)
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
