"""Writes products that stay in high precision as operators of fxquant, so that a probe can measure them too.

linear = torch._C._nn.linear(x, w, b)
# becomes, in the copy of a graph that measures
linear = fxquant.linear(x, w, b, "input=identity weight=identity grad_output=identity name=head")
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from fxquant.decisions import SkipReason
from fxquant.formats import LINEAR_OPERANDS
from fxquant.passes.find.facts import Match, Resolved
from fxquant.passes.insert.linear import insert
from fxquant.probes import Request, Unmeasured
from fxquant.quantizers import IdentityQuantizer

MODULE_TYPES = ("linear", "grouped_linear", "matmul")
"""The kinds of products that are measured."""


def open_products(gm: fx.GraphModule, matches: Sequence[Match]) -> int:
    """Rewrites the products of matches, which no recipe has quantized; returns how many matches there were."""
    count = insert([replace(match, resolved=tuple(map(_written, match.resolved))) for match in matches])
    for module in gm.modules():
        if count and isinstance(module, fx.GraphModule):
            module.recompile()
    return count


def closed(matches: Sequence[Match], request: Request) -> list[Unmeasured]:
    """Returns the operands of attention in high precision, whose kernel is torch's own, and of what is no matmul."""
    reasons = dict[tuple[str, str, str], None]()
    for match in matches:
        decisions = [decision for resolved in match.resolved for decision in resolved.decisions]
        skipped = [(decision.skip_reason, decision.detail) for decision in decisions]
        others = [(skip.value, detail) for skip, detail in skipped if skip and skip is not SkipReason.HIGH_PRECISION]
        if match.module_type == "dpa":
            reasons[match.module_type, match.name, ""] = None
        elif others:
            reasons[match.module_type, match.name, ": ".join(filter(None, others[0]))] = None
    return [one for key in reasons for one in request.closed(*key)]


def _written(resolved: Resolved) -> Resolved:
    """A product that is written with identities, unless its tensors are none that an operator takes."""
    kept = all(decision.skip_reason is SkipReason.HIGH_PRECISION for decision in resolved.decisions)
    return replace(resolved, quantizers=dict.fromkeys(LINEAR_OPERANDS, IdentityQuantizer())) if kept else resolved
