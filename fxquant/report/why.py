"""The part of the page that says what is not quantized, by reason, and what to do about it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

from fxquant.decisions import Decision, SkipReason
from fxquant.report.data import ReportData
from fxquant.report.markup import Anchors, percent, sentence, si, times
from fxquant.report.text import count_text
from fxquant.report.tree import Leaf, title

Leaves = Sequence[tuple[str, int, Leaf]]
"""Leaves of the tree, each with the path of its layer and its count."""


@dataclass
class Row:
    """A layer in which a reason holds, with its `count`: FLOPs, the operands and what is said of them."""

    path: str
    count: int
    flops: int = 0
    operands: dict[str, None] = field(default_factory=dict)
    details: dict[str, None] = field(default_factory=dict)


@dataclass
class Skipped:
    """The GEMMs that one reason keeps in high precision, by layer; `half` of the FLOPs have one operand quantized."""

    flops: int = 0
    half: int = 0
    rows: dict[str, Row] = field(default_factory=dict)

    def add(self, path: str, count: int, leaf: Leaf, operands: Sequence[Decision]) -> None:
        """Adds one GEMM of a matmul."""
        row = self.rows.setdefault(path, Row(path, count))
        skipped = [d for d in operands if d.skip_reason is not None]
        whole = all(d.skip_reason is not None for d in leaf.decisions)
        row.operands.update({"all": None} if whole else {d.role.tensor_type: None for d in skipped})
        row.details.update({d.detail: None for d in skipped if d.detail})
        flops = operands[0].flops * count
        row.flops += flops
        self.flops += flops
        self.half += flops if len(skipped) < len(operands) else 0


def by_reason(leaves: Leaves) -> dict[str, Skipped]:
    """The GEMMs that are not quantized, by the reason of their first such operand; most FLOPs first."""
    groups: dict[str, Skipped] = defaultdict(Skipped)
    for path, count, leaf in leaves:
        for operands in leaf.products().values():
            reasons = [str(d.skip_reason) for d in operands if d.skip_reason is not None]
            if reasons:
                groups[reasons[0]].add(title(path, leaf), count, leaf, operands)
    return dict(sorted(groups.items(), key=lambda item: -item[1].flops))


def unquantized(report: ReportData, leaves: Leaves, anchors: Anchors) -> str:
    """The part that says which layers are not quantized, how many FLOPs that is, why, and what to do."""
    groups, total = by_reason(leaves), report.flops["total"]
    if not groups:
        return f"<h2 id='{anchors.why}'>Not quantized</h2><p>Every operand of every matmul is quantized.</p>"
    breaks = f" <a href='#{anchors.also}'>{count_text(len(report.breaks), 'graph break')}</a>" if report.breaks else ""
    parts = [
        f"<h2 id='{anchors.why}'>Not quantized</h2>",
        f"<p class='soft'>{percent(sum(s.flops for s in groups.values()), total)} of all FLOPs, by reason.</p>",
    ]
    for i, (name, skipped) in enumerate(groups.items()):
        reason = SkipReason(name)
        remedy = escape(reason.remedy) + (breaks if reason is SkipReason.NOT_CAPTURED else "")
        rows = sorted(skipped.rows.values(), key=lambda row: -row.flops)
        half = f"; {percent(skipped.half, total)} with the other operand quantized" if skipped.half else ""
        count = count_text(sum(row.count for row in rows), "layer")
        detailed = any(row.details for row in rows)
        lines = "".join(
            f"<tr><td><a class='mono' href='#{anchors.row(row.path)}'>{escape(row.path)}</a>{times(row.count)}</td>"
            f"<td>{escape(', '.join(row.operands))}</td>{_detail(row.details) if detailed else ''}"
            f"<td class='num'>{si(row.flops)}FLOP, {percent(row.flops, total)}</td></tr>"
            for row in rows
        )
        parts.append(
            f"<details class='group'{' open' if i < 3 and len(rows) < 40 else ''}><summary><b>{name}</b>"
            f"<span class='soft'>{count}</span><span class='num'>{si(skipped.flops)}FLOP, "
            f"{percent(skipped.flops, total)}{half}</span></summary><div><dl class='fact'><dt>Why</dt>"
            f"<dd>{escape(sentence(reason.meaning))}</dd><dt>What to do</dt><dd>{remedy}</dd></dl>"
            "<div class='scroll'><table class='list why'><thead><tr><th scope='col'>layer</th>"
            f"<th scope='col'>operands</th>{DETAIL_HEAD if detailed else ''}"
            f"<th scope='col' class='num'>FLOPs</th></tr></thead><tbody>{lines}</tbody></table></div></div></details>"
        )
    return "".join(parts)


DETAIL_HEAD = "<th scope='col'>detail</th>"


def _detail(details: Iterable[str]) -> str:
    return f"<td>{escape('; '.join(details))}</td>"
