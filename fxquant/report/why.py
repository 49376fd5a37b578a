"""The part of the page that says what is not quantized, by reason, and what to do about it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from html import escape

from fxquant.decisions import Decision, SkipReason
from fxquant.report.data import ReportData
from fxquant.report.markup import anchor, count_text, percent, sentence, si, times
from fxquant.report.tree import Leaf, title

Leaves = Sequence[tuple[str, int, Leaf]]
"""Leaves of the tree, each with the path of its layer and its count."""


class Skipped:
    """The GEMMs that one reason keeps in high precision: FLOPs, and by leaf the operands and details."""

    def __init__(self) -> None:
        self.flops = self.half = 0
        self.matmuls = 0
        self.rows: dict[tuple[str, int], tuple[int, dict[str, None], dict[str, None]]] = {}

    def add(self, place: tuple[str, int], operands: Sequence[Decision], flops: int) -> None:
        total, roles, details = self.rows.get(place, (0, {}, {}))
        for d in operands:
            if d.skip_reason is not None:
                roles[f"{d.role.tensor_type}"] = None
                details.update({d.detail: None} if d.detail else {})
        self.rows[place] = (total + flops, roles, details)
        self.flops += flops
        self.half += flops if any(d.quantizer is not None for d in operands) else 0


def by_reason(leaves: Leaves) -> dict[str, Skipped]:
    """The GEMMs that are not quantized, by the reason of their first such operand; most FLOPs first."""
    groups: dict[str, Skipped] = defaultdict(Skipped)
    for path, count, leaf in leaves:
        for operands in leaf.products().values():
            reasons = [str(d.skip_reason) for d in operands if d.skip_reason is not None]
            if reasons:
                groups[reasons[0]].add((title(path, leaf), count), operands, operands[0].flops * count)
    return dict(sorted(groups.items(), key=lambda item: -item[1].flops))


def unquantized(report: ReportData, leaves: Leaves) -> str:
    """The part that says which layers are not quantized, how many FLOPs that is, why, and what to do."""
    groups, total = by_reason(leaves), report.flops["total"]
    if not groups:
        return "<h2 id='why'>Not quantized</h2><p>Every operand of every matmul is quantized.</p>"
    parts = [
        "<h2 id='why'>Not quantized</h2>",
        f"<p class='soft'>{percent(sum(s.flops for s in groups.values()), total)} of all FLOPs, by reason.</p>",
    ]
    for i, (name, skipped) in enumerate(groups.items()):
        reason = SkipReason(name)
        layers = sum(count for _, count in skipped.rows)
        half = f"; {percent(skipped.half, total)} with the other operand quantized" if skipped.half else ""
        rows = sorted(skipped.rows.items(), key=lambda item: -item[1][0])
        detailed = any(details for _, (_, _, details) in rows)
        lines = "".join(
            f"<tr><td><a class='mono' href='#{anchor(path)}'>{escape(path)}</a>{times(count)}</td>"
            f"<td>{escape(', '.join(roles))}</td>{_detail(details) if detailed else ''}"
            f"<td class='num'>{si(flops)}FLOP, {percent(flops, total)}</td></tr>"
            for (path, count), (flops, roles, details) in rows
        )
        parts.append(
            f"<details class='group'{' open' if i < 3 and len(rows) < 40 else ''}><summary><b>{name}</b>"
            f"<span class='soft'>{count_text(layers, 'layer')}</span><span class='num'>{si(skipped.flops)}FLOP, "
            f"{percent(skipped.flops, total)}{half}</span></summary><div><dl class='fact'><dt>Why</dt>"
            f"<dd>{escape(sentence(reason.meaning))}</dd><dt>What to do</dt><dd>{escape(reason.remedy)}</dd></dl>"
            "<div class='scroll'><table class='list why'><thead><tr><th scope='col'>layer</th>"
            f"<th scope='col'>operands</th>{DETAIL_HEAD if detailed else ''}"
            f"<th scope='col' class='num'>FLOPs</th></tr></thead><tbody>{lines}</tbody></table></div></div></details>"
        )
    return "".join(parts)


DETAIL_HEAD = "<th scope='col'>detail</th>"


def _detail(details: Iterable[str]) -> str:
    return f"<td>{escape('; '.join(details))}</td>"
