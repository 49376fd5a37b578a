"""Weigh: under an `auto` recipe, keeps what is estimated to be slower quantized in high precision.

That is single matmuls, and attention as a whole; one that no FP8 kernel takes is left out wherever it runs on a GPU.

Reads the decisions and changes `match.resolved`, before anything is inserted. What is left out no longer shares the
cast of its input, so the others are weighed again, until nothing changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fxquant.cost.estimate import Estimate, estimate
from fxquant.decisions import Decision, SkipReason
from fxquant.passes.find.facts import Match, Resolved


def weigh(matches: Sequence[Match]) -> list[Decision]:
    """Leaves out what does not pay; returns all decisions."""
    while True:
        decisions = [d for match in matches for resolved in match.resolved for d in resolved.decisions]
        slower = {site: each for site, each in estimate(decisions).items() if each.slower}
        if not slower:
            return decisions
        for match in matches:
            match.resolved = [
                _kept(resolved, slower[site]) if (site := resolved.decisions[0].weighed) in slower else resolved
                for resolved in match.resolved
            ]
            if match.attention is not None and match.resolved[0].decisions[0].weighed in slower:
                match.attention.spec = None


def _kept(resolved: Resolved, found: Estimate) -> Resolved:
    """The same product in high precision."""
    decisions = []
    for d in resolved.decisions:
        if d.quantizer is not None or d.attention is not None:
            plain = None if d.attention is None else replace(d.attention, spec=None)
            d = replace(
                d, quantizer=None, skip_reason=SkipReason.NOT_PROFITABLE, detail=str(found), attention=plain
            )  # fmt: skip
        decisions.append(d)
    return Resolved(quantizers=None, decisions=decisions)
