"""Weigh: under an `auto` recipe, keeps the matmuls in high precision that are estimated to be slower quantized.

Reads the decisions and changes `match.resolved`, before anything is inserted. What is left out no longer shares the
cast of its input, so the others are weighed again, until nothing changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fxquant.cost import Estimate, estimate
from fxquant.decisions import Decision, SkipReason
from fxquant.passes.facts import Match, Resolved


def weigh(matches: Sequence[Match]) -> list[Decision]:
    """Leaves out what does not pay; returns all decisions."""
    while True:
        decisions = [d for match in matches for resolved in match.resolved for d in resolved.decisions]
        slower = {site: each for site, each in estimate(decisions).items() if each.slower}
        if not slower:
            return decisions
        for match in matches:
            match.resolved = [
                _kept(resolved, slower[site]) if (site := resolved.decisions[0].site) in slower else resolved
                for resolved in match.resolved
            ]


def _kept(resolved: Resolved, found: Estimate) -> Resolved:
    """The same product in high precision."""
    detail = f"{found.unquantized:.3g} us in high precision, {found.quantized:.3g} us quantized"
    decisions = [
        d if d.quantizer is None
        else replace(d, quantizer=None, skip_reason=SkipReason.NOT_PROFITABLE, detail=detail)
        for d in resolved.decisions
    ]  # fmt: skip
    return Resolved(quantizers=None, decisions=decisions)
