"""The text view of a report: the summary, an overview of the layers, and tables of all operands and kernels."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from typing import Annotated

from fxquant.checks import AtLeast, checked
from fxquant.cost.kept import known_cards, rates_of
from fxquant.cost.work import NOTHING_MULTIPLIES
from fxquant.decisions import Decision, SentQuantized
from fxquant.errors import ArgumentError
from fxquant.report.data import MODEL, ReportData, folded, layer_pattern, result, role_text, shape_text
from fxquant.report.fusions import epilogues, in_short, unfused

COLUMNS = ("layer", "role", "gemm", "direction", "shape", "quantizer")
EPILOGUE_COLUMNS = ("layer", "graph", "M x K x N", "epilogue", "kernel")
LOSS_COLUMNS = ("layer", "result", "relative error", "elements that became zero")
WORK_COLUMNS = ("layer", "work", "kernel", "unquantized us", "quantized us")
OVERVIEW_COLUMNS = ("layer", "M x K x N", "unquantized us", "quantized us", "operands")

MOST_ROWS = 30
"""The rows of the overview."""
MOST_REASONS = 5
"""The lines of one kind in a summary: reasons against fusions, graph breaks and the like."""


@checked(ArgumentError, called="report.text")
def text(report: ReportData, layer: str = "", *, collapse: bool = False, full: bool = False) -> str:
    """The summary, then a row for each kind of layer; with `full` a row for each operand and kernel instead.

    So it is too with `layer` or `collapse`, of which `table` tells.
    """
    full = full or bool(layer) or collapse
    lines = [f"recipe: {report.recipe}", *_summary(report, sys.maxsize if full else MOST_REASONS)]
    if not report.decisions:
        return "\n".join([*lines, *filter(None, [loss_table(report, layer)])])
    if not full:
        hint = "every operand, kernel and time: report.text(full=True), or --full in the command line"
        return "\n".join([*lines, *filter(None, [loss_table(report, most=MOST_REASONS)]), overview(report), hint])
    layers = report.layers(layer, collapse=collapse)
    lines.append(table(report, layer, collapse=collapse) if layers else _no_such_layer(report, layer))
    tables = (
        work_table(report, layer, collapse=collapse),
        epilogue_table(report, layer, collapse=collapse),
        loss_table(report, layer),
    )
    return "\n".join([*lines, *filter(None, tables)])


def _summary(report: ReportData, most: int) -> list[str]:
    """Totals, kernels, estimate, then reasons: against fusions, unused rules, graph breaks, `most` lines of each."""
    lines = [totals(report), *_kernels(report), *verdict(report)]
    lines += _first("sent quantized", [*map(sent_text, report.sent_quantized)], most)
    lines += _first("not fused", [*map(str, unfused(report))], most)
    if report.again:
        layer_names = some(in_short(report.again))
        lines.append(f'with save="least" the backward computes again, besides casts: {layer_names}')
    lines += kept_text(report)
    lines += _first("unused in the recipe", report.unused, most)
    lines += _first("graph break", report.breaks, most)
    lines += _first("compiled again", report.recompilations, most)
    return lines + _first("not compiled", report.uncompiled, most)


def kept_text(report: ReportData) -> list[str]:
    """One line on what is kept in FP8 for the backward: its bytes, its error, and the operators that gave it."""
    if not report.kept_fp8:
        return []
    after, before = (bytes_text(sum(getattr(kept, name) for kept in report.kept_fp8)) for name in ("bytes", "instead"))
    counts = Counter(kept.what for kept in report.kept_fp8)
    what = some([f"{count} x {what}" for what, count in counts.most_common()])
    return [f"kept in FP8 for the backward, {after} in place of {before}, {ERROR_OF_KEPT}: {what}"]


ERROR_OF_KEPT = "off by up to 6.25% an element, 2.6% rms of normal values"
"""The error of e4m3 in blocks of 1x128."""


def sent_text(sent: SentQuantized) -> str:
    """A line on an operand that ranks exchange quantized."""
    layers = ", ".join(layer or MODEL for layer in sent.layers)
    text = f"{sent.operand} of {layers} as {sent.spec}, {sent.bits:.4g} bits an element in place of {sent.instead}"
    return f"{text}; its columns are quantized from what arrives" if sent.dequantized else text


def _first(kind: str, reasons: Sequence[str], most: int) -> list[str]:
    """A line for each of the first reasons of a kind, and one for the count of the others."""
    lines = [f"{kind}: {reason}" for reason in reasons[:most]]
    return lines + ([f"{kind}: and {len(reasons) - most} more"] if len(reasons) > most else [])


def _kernels(report: ReportData) -> list[str]:
    """One line: how many products run in each kernel."""
    counts = Counter(work.kernel for _, _, work in report.work() if not work.what.startswith("cast"))
    return [f"kernels: {some([f'{count} x {kernel}' for kernel, count in counts.most_common()])}"] if counts else []


def overview(report: ReportData) -> str:
    """One row for each kind of layer, folded as by `collapse`: sizes, time where it is known, and operands."""
    rows = overview_rows(report)
    hidden = len(rows) - MOST_ROWS
    shown = aligned([overview_columns(rows), *rows[:MOST_ROWS]])
    return f"{shown}\nand {hidden} more kinds of layers" if hidden > 0 else shown


def overview_columns(rows: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """The names of the columns that `overview_rows` have."""
    timed = len(rows[0]) == len(OVERVIEW_COLUMNS) if rows else False
    return OVERVIEW_COLUMNS if timed else (*OVERVIEW_COLUMNS[:2], OVERVIEW_COLUMNS[-1])


def overview_rows(report: ReportData) -> list[tuple[str, ...]]:
    """The rows of `overview`, all of them; without the times where none is known."""
    estimates, rows = report.estimates(), []
    for name, _, decisions in report.layers(collapse=True):
        for site in dict.fromkeys(d.site for d in decisions):
            operands = [d for d in decisions if d.site == site]
            estimated = estimates.get(site)
            times = ("", "") if estimated is None else (us_text(estimated.unquantized), us_text(estimated.quantized))
            rows.append((name, size_text(operands), *times, _operands_text(operands)))
    timed = any(row[2] or row[3] for row in rows)
    return list(dict.fromkeys(row if timed else (*row[:2], row[-1]) for row in rows))


def size_text(operands: Sequence[Decision]) -> str:
    """The sizes of a product as text, ``32 of M x K x N`` for one in a batch; the operands' where it is not known."""
    left, right = (d.shape for d in operands[:2])
    if min(len(left), len(right)) < 2 or left[-1] != right[-1]:
        return " and ".join(shape_text(d) for d in operands[:2])
    batch = " x ".join(map(str, left[:-2]))
    return (f"{batch} of " if batch else "") + f"{left[-2]} x {left[-1]} x {right[-2]}"


def _operands_text(operands: Sequence[Decision]) -> str:
    """The result of all operands, or of each where they differ; of each direction where these do."""
    results: dict[str, dict[str, str]] = {}
    for d in operands:
        results.setdefault(d.role.tensor_type, {}).setdefault(result(d), str(d.direction))
    if len({text for by_text in results.values() for text in by_text}) == 1:
        return next(iter(results[operands[0].role.tensor_type]))
    return ", ".join(
        f"{tensor_type} {text}" + (f" {direction}" if len(by_text) > 1 else "")
        for tensor_type, by_text in results.items()
        for text, direction in by_text.items()
    )


@checked(ArgumentError, called="report.table")
def table(report: ReportData, layer: str = "", *, collapse: bool = False) -> str:
    """One row per operand and GEMM, of the layers in whose name the regular expression `layer` is found.

    `collapse` folds layers that differ in nothing but a number of their name, written as ``layers.{0..11}.mlp``.
    """
    rows = [
        (name, role_text(d), str(d.gemm), str(d.direction), shape_text(d), result(d))
        for name, _, decisions in report.layers(layer, collapse=collapse)
        for d in decisions
    ]
    return aligned([COLUMNS, *rows])


@checked(ArgumentError, called="report.work_table")
def work_table(report: ReportData, layer: str = "", *, collapse: bool = False) -> str:
    """One row for each GEMM and cast with its kernel and, where rates exist, its estimated time.

    See `table` for the arguments; times are those of one layer.
    """
    rows = [
        (name, work.what, work.kernel, *(us_text(us) for us in (work.unquantized, work.quantized)))
        for name, _, work in report.work(layer, collapse=collapse)
    ]
    timed = any(row[-1] for row in rows)
    return aligned([row if timed else row[:3] for row in (WORK_COLUMNS, *rows)]) if rows else ""


@checked(ArgumentError, called="report.epilogue_table")
def epilogue_table(report: ReportData, layer: str = "", *, collapse: bool = False) -> str:
    """One row for each GEMM on a GPU that has an epilogue, with the kernel that runs it; see `table` for the arguments.

    Triton fuses the epilogue into the GEMM. Beside cuBLAS it is part of a kernel that Inductor makes.
    """
    rows: list[tuple[str, ...]] = [
        (gemm.layer or MODEL, gemm.graph, gemm.problem.size, gemm.problem.epilogue, str(gemm.chosen(report.card)))
        for gemm in epilogues(report, layer)
    ]
    if collapse:
        by_layer: dict[str, list[tuple[str, ...]]] = {}
        for name, *facts in rows:
            by_layer.setdefault(name, []).append(tuple(facts))
        of_layers = list(by_layer.values())
        merged = folded(list(by_layer), [tuple(sorted(of_layer)) for of_layer in of_layers])
        rows = [(name, *facts) for name, places in merged for facts in of_layers[places[0]]]
    return aligned([EPILOGUE_COLUMNS, *rows]) if rows else ""


@checked(ArgumentError, called="report.loss_table")
def loss_table(report: ReportData, layer: str = "", *, most: Annotated[int, AtLeast(0)] = sys.maxsize) -> str:
    """One row for each measured product: the error of its result, and how much of each operand became zero.

    Of more than `most` those with the largest errors.
    """
    losses = [loss for loss in report.losses if layer_pattern(layer).search(loss.layer)]
    if len(losses) > most:
        losses = sorted(losses, key=lambda loss: loss.error, reverse=True)[:most]
    rows = []
    for loss in losses:
        lost = ", ".join(f"{name} {share:.1%}" for name, share in loss.lost.items())
        rows.append((loss.layer or MODEL, loss.what, f"{loss.error:.2%}", lost))
    return aligned([LOSS_COLUMNS, *rows]) if rows else ""


def verdict(report: ReportData) -> list[str]:
    """The estimate in one line, then a warning for each kind of layer that becomes slower or has no kernel."""
    time = report.time()
    if not time["card"]:
        return []
    if unquantized := sorted({d.detail for d in report.decisions if d.detail.startswith(NOTHING_MULTIPLIES)}):
        return [f"auto: {reason}" for reason in unquantized]
    if time["quantized_us"] is None:
        unrated = f"these dtypes or kernels on {time['card']}" if time["card"] in known_cards() else ""
        subject = unrated or f"{time['card']} (known: {', '.join(known_cards())})"
        return [f"estimate: none, no measured rates for {subject}", *_warnings(report)]
    before, after = time["unquantized_us"], time["quantized_us"]
    card = rates_of(time["card"])
    basis = " (computed from published rates, not measured)" if card is not None and card.published else ""
    line = f"estimate for {time['card']}{basis}: matmuls and casts {time_text(before)} unquantized, "
    line += f"{time_text(after)} quantized ({before / after:.2f}x)"
    if time["unknown"]:
        line += f"; without {some(in_short(time['unknown']))}, for which no rates were measured"
    return [line, *_warnings(report)]


def _warnings(report: ReportData) -> list[str]:
    slower = {site: e for site, e in report.estimates().items() if e.slower and not e.reference}
    slow = {site: e for site, e in slower.items() if not e.emulated_on}
    warnings = []
    for where in sorted({e.emulated_on for e in slower.values()} - {""}):
        names = in_short(report.layers_of({site: e for site, e in slower.items() if e.emulated_on == where}))
        warnings.append(f"{NOTHING_MULTIPLIES} {where}, where they are only emulated: {some(names)}")
    if slow:
        lost = time_text(sum((estimate.quantized or 0) - (estimate.unquantized or 0) for estimate in slow.values()))
        layers = some(in_short(report.layers_of(slow)))
        warnings.append(f"estimated to be slower than unquantized, by {lost}: {layers}")
    for reason, names in report.unkernelled().items():
        warnings.append(
            f"no FP8 kernel for the attention of {some(in_short(names))} ({reason}): the reference keeps its scores in "
            "float32 in memory, many times slower"
        )
    return [f"warning: {warning}; recipes.auto(recipe) leaves them as they are" for warning in warnings]


def totals(report: ReportData) -> str:
    """One line: matmuls, operands quantized, share of FLOPs, and the skipped by reason."""
    s = report.summary()
    if not report.decisions:
        return "no matmuls"
    line = f"{count_text(s['matmuls'], 'matmul')}, {s['quantized_operands']}/{s['operands']} operands quantized, "
    line += f"{100 * s['coverage']:.1f}% of matmul FLOPs"
    if s["one_sided"]:
        before, after = s["weights"]["unquantized"], s["weights"]["quantized"]
        line += f" with both operands quantized, {100 * s['one_sided']:.1f}% with one"
        line += f"; weights {bytes_text(before)} unquantized, {bytes_text(after)} quantized" if before != after else ""
    if s["skipped"]:
        reasons = ", ".join(f"{count} {reason}" for reason, count in s["skipped"].items())
        line += f"; {sum(s['skipped'].values())} skipped: {reasons}"
    return line


def _no_such_layer(report: ReportData, layer: str) -> str:
    names = [folded.name for folded in report.layers(collapse=True)]
    return f"no layer's name has {layer!r} in it; the layers are {some(names, 20)}"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text in aligned columns; the last column keeps its widths."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    )


def time_text(us: float) -> str:
    """Microseconds as text of three digits with a unit."""
    return f"{us:.3g} us" if us < 999.5 else f"{us / 1e3:.3g} ms"


def bytes_text(count: int) -> str:
    """A number of bytes as text of three digits with a unit."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = max(0, min(len(units) - 1, (count.bit_length() - 1) // 10))
    return f"{count / 1024**power:.3g} {units[power]}"


def us_text(us: float | None) -> str:
    """Microseconds in a column; a dash for 0, empty for None."""
    return "" if us is None else f"{us:.1f}" if us else "-"


def some(names: Sequence[str], most: int = 5) -> str:
    """The names, or the first of many."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def count_text(number: int, noun: str) -> str:
    """A number with its noun."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def shortened(text: str, most: int) -> str:
    """A text of `most` characters at the most."""
    return text if len(text) <= most else f"{text[: most - 1]}…"
