"""The estimated time of matmuls and their casts, in high precision and quantized, from measured rates.

A GEMM takes the time of its arithmetic, in whole waves of tiles over the multiprocessors, or of reading its operands
and writing its result, whichever is longer. A cast moves its fewest bytes at its kernel's share of the copy rate. Each
launch adds a little. A linear counts all GEMMs that it runs: no wgrad for a frozen weight, fprop alone for inference. A
tensor that several layers read is cast once, and they share the time by their FLOPs.

An estimate leaves out biases and the operators between the matmuls, which are the same on both sides.
`fxquant.cost.rates` has the measured rates, `fxquant.cost.kept` the user's own; `fxquant.cost.attention` estimates an
attention as a whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fxquant.cost.attention import attention_work, runs_the_reference
from fxquant.cost.casts import cast_work
from fxquant.cost.gemms import gemm_work
from fxquant.cost.kept import find_card, rates_of
from fxquant.cost.work import Estimate, Work
from fxquant.decisions import Decision
from fxquant.roles import Gemm


def estimate(decisions: Sequence[Decision], card: str = "") -> dict[int, Estimate]:
    """The work of every matmul, by site, on its own device or on another `card`.

    An attention has the site of its first product. Raises OptionError for a card without rates.
    """
    if card:
        decisions = [_on_card(d, find_card(card)) for d in decisions]
    decisions = [d for d in decisions if not d.merged]
    sites: dict[int, list[Decision]] = defaultdict(list)
    for decision in decisions:
        if decision.matmul is not None:
            sites[decision.site].append(decision)
    casts = cast_work(sites)
    estimates = {site: _matmul(of_site, casts[site]) for site, of_site in sites.items()}
    attentions: dict[int, list[Decision]] = defaultdict(list)
    for decision in decisions:
        if decision.attention is not None:
            attentions[decision.weighed].append(decision)
    return estimates | {site: _attention(of_site) for site, of_site in attentions.items()}


def _matmul(decisions: Sequence[Decision], casts: Sequence[Work]) -> Estimate:
    gemms, matmul = gemm_work(decisions), decisions[0].matmul
    assert matmul is not None
    quantized = [work.emulated for work in gemms if work.emulated is not None]
    native = not quantized or not all(quantized) or matmul.capability == (0, 0) or rates_of(matmul.device) is not None
    major, minor = matmul.capability
    where = "" if native else f"{matmul.device} (compute capability {major}.{minor})"
    return Estimate((*gemms, *casts), emulated_on=where)


def _attention(decisions: Sequence[Decision]) -> Estimate:
    attention = decisions[0].attention
    assert attention is not None
    training = any(d.gemm is not Gemm.FPROP for d in decisions)
    return Estimate(attention_work(attention, training), runs_the_reference(attention, training))


def _on_card(decision: Decision, card: str) -> Decision:
    rates = rates_of(card)
    assert rates is not None
    device: dict[str, Any] = {"device": card, "capability": rates.capability}
    matmul = None if decision.matmul is None else replace(decision.matmul, **device)
    attention = None if decision.attention is None else replace(decision.attention, **device)
    return replace(decision, matmul=matmul, attention=attention)
