"""What became of every matmul of a compiled model: counts, a text table, JSON and HTML."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fxquant.decisions import Decision, Matmul
from fxquant.roles import Gemm

if TYPE_CHECKING:
    from fxquant.cost.estimate import Estimate, Work
    from fxquant.kernels.linear.choice import Chosen
    from fxquant.kernels.linear.timing import Problem

COLUMNS = ("layer", "role", "gemm", "direction", "shape", "quantizer")
EPILOGUE_COLUMNS = ("layer", "graph", "M x K x N", "epilogue", "kernel")
LOSS_COLUMNS = ("layer", "result", "relative error", "elements that became zero")
WORK_COLUMNS = ("layer", "work", "kernel", "unquantized us", "quantized us")


class EpilogueGemm(NamedTuple):
    """A GEMM of a `graph`, ``forward`` or ``backward``, with what a Triton kernel could do behind it on a GPU."""

    layer: str
    graph: str
    problem: Problem
    card: str

    def chosen(self, card: str = "") -> Chosen:
        """The kernel on its own device, or on another `card`, by measured rates."""
        from fxquant.cost.estimate import choose_gemm

        return choose_gemm(self.problem, card or self.card)


class Layer(NamedTuple):
    """The decisions of one layer, or of `repeats` layers that differ only in numbers of their names."""

    name: str
    repeats: int
    decisions: list[Decision]


@dataclass(frozen=True, kw_only=True)
class Loss:
    """What a quantized product or attention (`what`) loses: see `fxquant.measure`."""

    layer: str
    what: str
    error: float
    lost: dict[str, float]


@dataclass(kw_only=True)
class Report:
    """The decisions of one or several compiled graphs.

    `graphs` maps ``forward`` and ``backward`` to the text of the rewritten graphs, several of them under one header
    each. `unused` names the parts of the recipe that matched no operand, `breaks` the reasons for graph breaks.
    `epilogues` are the GEMMs whose results are activated, added to something or measured by what reads them. `again`
    are the layers whose product a backward computes again with the option ``save="least"``. `card` is the one to tell
    kernels and times of, in the place of the device that the tensors are on; see `on`. `losses` are what
    `fxquant.measure` has measured.
    """

    recipe: str
    decisions: list[Decision] = field(default_factory=list)
    graphs: dict[str, str] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)
    breaks: list[str] = field(default_factory=list)
    epilogues: list[EpilogueGemm] = field(default_factory=list)
    again: list[str] = field(default_factory=list)
    card: str = ""
    losses: list[Loss] = field(default_factory=list)

    def on(self, card: str) -> Report:
        """The same report with the kernels and estimated times of another card, named in part, such as ``H100``.

        Raises OptionError for a card without measured rates.
        """
        from fxquant.cost.estimate import find_card

        return replace(self, card=find_card(card))

    def estimates(self) -> dict[int, Estimate]:
        """Kernels and times of every matmul, by site, of attention at its first product's; see `fxquant.cost`."""
        from fxquant.cost.estimate import estimate

        return estimate(self.decisions, self.card)

    def slower(self) -> list[str]:
        """The layers that are estimated to be slower than in high precision."""
        return self._layers({site for site, each in self.estimates().items() if each.slower})

    def _layers(self, sites: Collection[int]) -> list[str]:
        return list(dict.fromkeys(d.layer or "<model>" for d in self.decisions if d.site in sites))

    def unkernelled(self) -> dict[str, list[str]]:
        """The layers whose quantized attention would hold its scores in the memory of a GPU, by why it would."""
        sites: dict[str, list[int]] = defaultdict(list)
        for site, each in self.estimates().items():
            if each.reference:
                sites[each.reference].append(site)
        return {reason: self._layers(each) for reason, each in sites.items()}

    def time(self) -> dict[str, Any]:
        """The estimate by name: ``card``, microseconds of all matmuls and their casts, and the layers without one.

        ``unquantized_us`` and ``quantized_us`` are None on a device without measured rates.
        """
        known = {site: each for site, each in self.estimates().items() if each.quantized is not None}
        work = [(d, d.matmul or d.attention) for d in self.decisions]
        devices = {each.device for _, each in work if each is not None}
        missing = (
            d.layer or "<model>" for d, each in work
            if (isinstance(each, Matmul) or (each is not None and each.spec is not None)) and d.weighed not in known
        )  # fmt: skip
        return {
            "card": self.card or ", ".join(sorted(devices)),
            "unquantized_us": sum(each.unquantized or 0 for each in known.values()) if known else None,
            "quantized_us": sum(each.quantized or 0 for each in known.values()) if known else None,
            "unknown": list(dict.fromkeys(missing)),
            "slower": self.slower(),
        }

    def verdict(self) -> list[str]:
        """What the estimate says, in a line, and in others warnings where layers become slower or have no kernel."""
        from fxquant.cost.estimate import RATES

        time = self.time()
        if not time["card"]:
            return []
        if time["quantized_us"] is None:
            known = f"these dtypes or kernels on {time['card']}" if time["card"] in RATES else ""
            line = f"estimate: none, no measured rates for {known or time['card']}"
            line += "" if known else f" (known: {', '.join(RATES)})"
            return [line, *self._warnings()]
        before, after = time["unquantized_us"], time["quantized_us"]
        line = f"estimate for {time['card']}: matmuls and casts {time_text(before)} unquantized, "
        line += f"{time_text(after)} quantized ({before / after:.2f}x)"
        if time["unknown"]:
            line += f"; without {_some(time['unknown'])}, for which no rates were measured"
        return [line, *self._warnings()]

    def _warnings(self) -> list[str]:
        slow = {site: e for site, e in self.estimates().items() if e.slower and not e.reference}
        lost = time_text(sum((each.quantized or 0) - (each.unquantized or 0) for each in slow.values()))
        warnings = [f"estimated to be slower than unquantized, by {lost}: {_some(self._layers(slow))}"] if slow else []
        for reason, layers in self.unkernelled().items():
            warnings.append(
                f"no FP8 kernel for the attention of {_some(layers)} ({reason}): the reference keeps its scores in "
                "float32 in memory, many times slower"
            )
        return [f"warning: {each}; recipes.auto(recipe) leaves them as they are" for each in warnings]

    def work_table(self, layer: str = "", *, collapse: bool = False) -> str:
        """One row for each GEMM and cast with its kernel and, where rates are known, its estimated time.

        See `table` for the arguments; times are those of one layer.
        """
        rows = [
            (name, work.what, work.kernel, *(us_text(us) for us in (work.unquantized, work.quantized)))
            for name, _, work in self.work(layer, collapse=collapse)
        ]
        timed = any(row[-1] for row in rows)
        return aligned([row if timed else row[:3] for row in (WORK_COLUMNS, *rows)]) if rows else ""

    def loss_table(self, layer: str = "") -> str:
        """One row for each measured product: the error of its result, and how much of each operand became zero."""
        rows = []
        for each in self.losses:
            if re.search(layer, each.layer):
                lost = ", ".join(f"{name} {share:.1%}" for name, share in each.lost.items())
                rows.append((each.layer or "<model>", each.what, f"{each.error:.2%}", lost))
        return aligned([LOSS_COLUMNS, *rows]) if rows else ""

    def work(self, layer: str = "", *, collapse: bool = False) -> list[tuple[str, int, Work]]:
        """Each GEMM and cast with its layer and how many equal layers there are; see `table` for the arguments."""
        estimates = self.estimates()
        return [
            (name, repeats, work)
            for name, repeats, decisions in self.layers(layer, collapse=collapse)
            for site in dict.fromkeys(d.site for d in decisions)
            for work in (estimates[site].work if site in estimates else ())
        ]

    def epilogue_table(self, layer: str = "") -> str:
        """One row for each GEMM on a GPU with something behind it, and which kernel runs it; see `table` for `layer`.

        With Triton the epilogue is part of the GEMM, with cuBLAS of what Inductor makes of the rest.
        """
        rows = [
            (each.layer or "<model>", each.graph, each.problem.size, each.problem.epilogue, str(each.chosen(self.card)))
            for each in self.epilogues
            if each.problem.fuses and (self.card or each.card != "cpu") and re.search(layer, each.layer)
        ]
        return aligned([EPILOGUE_COLUMNS, *rows]) if rows else ""

    def gemms(self) -> dict[tuple[int, Gemm], list[Decision]]:
        """The decisions by (site, gemm): normally two, left operand then right."""
        groups: dict[tuple[int, Gemm], list[Decision]] = defaultdict(list)
        for decision in self.decisions:
            groups[decision.site, decision.gemm].append(decision)
        return dict(groups)

    @property
    def flops(self) -> dict[str, int]:
        """FLOPs of all GEMMs (``total``), and of those with both operands quantized (``quantized``)."""
        total = quantized = 0
        for operands in self.gemms().values():
            flops = operands[0].flops
            total += flops
            quantized += flops if _quantized(operands) else 0
        return {"total": total, "quantized": quantized}

    @property
    def coverage(self) -> float:
        """Share of matmul FLOPs that run with both operands quantized; 1 for a model without matmuls.

        Where no FLOPs are known, or none are done, it is 1 or 0: whether everything is quantized.
        """
        if self.flops["total"]:
            return self.flops["quantized"] / self.flops["total"]
        return float(all(decision.quantizer is not None for decision in self.decisions))

    @property
    def explained(self) -> float:
        """Share of matmul FLOPs that are quantized or carry a written reason why not."""
        total = self.flops["total"]
        explained = sum(
            operands[0].flops
            for operands in self.gemms().values()
            if _quantized(operands) or any(d.skip_reason is not None for d in operands)
        )
        return explained / total if total else 1.0

    def summary(self) -> dict[str, Any]:
        """The counts of the totals line, by name."""
        return {
            "matmuls": len({d.site for d in self.decisions}),
            "operands": len(self.decisions),
            "quantized_operands": sum(d.quantizer is not None for d in self.decisions),
            "flops": self.flops,
            "coverage": self.coverage,
            "explained": self.explained,
            "skipped": dict(Counter(str(d.skip_reason) for d in self.decisions if d.skip_reason).most_common()),
        }

    def totals(self) -> str:
        """One line: matmuls, operands quantized, share of FLOPs, and the skipped by reason."""
        s = self.summary()
        if not self.decisions:
            return "no matmuls"
        line = f"{_count(s['matmuls'], 'matmul')}, {s['quantized_operands']}/{s['operands']} operands quantized, "
        line += f"{100 * s['coverage']:.1f}% of matmul FLOPs"
        if s["skipped"]:
            reasons = ", ".join(f"{count} {reason}" for reason, count in s["skipped"].items())
            line += f"; {sum(s['skipped'].values())} skipped: {reasons}"
        return line

    def table(self, layer: str = "", *, collapse: bool = False) -> str:
        """One row per operand and GEMM, of the layers whose name the regular expression `layer` finds.

        `collapse` folds layers that differ in nothing but a number of their name, written as ``layers.{0..11}.mlp``.
        """
        rows = [
            (name, role_text(d), str(d.gemm), str(d.direction), shape_text(d), result(d))
            for name, _, decisions in self.layers(layer, collapse=collapse)
            for d in decisions
        ]
        return aligned([COLUMNS, *rows])

    def layers(self, layer: str = "", *, collapse: bool = False) -> list[Layer]:
        """Every layer in graph order; see `table` for the arguments."""
        pattern = re.compile(layer)
        found: dict[str, list[Decision]] = defaultdict(list)
        for decision in self.decisions:
            if pattern.search(decision.layer):
                found[decision.layer].append(decision)
        return _fold(found) if collapse else [Layer(name or "<model>", 1, rows) for name, rows in found.items()]

    def _none_called(self, layer: str) -> str:
        names = [each.name for each in self.layers(collapse=True)]
        return f"no layer's name has {layer!r} in it; the layers are {_some(names, 20)}"

    def to_json(self) -> str:
        """Everything in the report as a JSON object."""
        content = {
            "recipe": self.recipe,
            "summary": self.summary(),
            "unused": self.unused,
            "breaks": self.breaks,
            "estimate": self.time(),
            "work": [
                {
                    "layer": name,
                    "what": work.what,
                    "kernel": work.kernel,
                    "unquantized_us": work.unquantized,
                    "quantized_us": work.quantized,
                }
                for name, _, work in self.work()
            ],
            "epilogues": [
                {
                    "layer": each.layer,
                    "graph": each.graph,
                    "size": each.problem.size,
                    "epilogue": each.problem.epilogue,
                    "kernel": str(each.chosen(self.card)),
                }
                for each in self.epilogues
            ],
            "again": self.again,
            "losses": [asdict(each) for each in self.losses],
            "decisions": [_plain(d) for d in self.decisions],
            "graphs": self.graphs,
        }
        return json.dumps(content, indent=1)

    def to_html(self, path: str | Path) -> None:
        """Writes one file that needs no other, and follows the reader's light or dark setting.

        It is written as a whole or not at all. Raises ProgramError where no file can be.
        """
        from fxquant.export import files as program_files
        from fxquant.report import html as report_html

        text = report_html.page(f"fxquant: {self.recipe}", report_html.section(self))
        program_files.write_whole(path, lambda file: file.write(text.encode()))

    def _repr_html_(self) -> str:
        from fxquant.report import html as report_html

        return report_html.fragment(self)

    def text(self, layer: str = "", *, collapse: bool = False) -> str:
        """Tables, estimate, totals, unused parts of the recipe, graph breaks; see `table` for the arguments."""
        lines = [f"recipe: {self.recipe}"]
        if self.decisions:
            found = self.layers(layer, collapse=collapse)
            lines.append(self.table(layer, collapse=collapse) if found else self._none_called(layer))
        tables = (self.work_table(layer, collapse=collapse), self.epilogue_table(layer), self.loss_table(layer))
        lines += filter(None, tables)
        lines += self.verdict()
        lines.append(self.totals())
        if self.again:
            layers = _some([name or "<model>" for name in self.again])
            lines.append(f'with save="least" the backward computes again, besides casts: {layers}')
        lines += [f"unused in the recipe: {part}" for part in self.unused]
        lines += [f"graph break: {reason}" for reason in self.breaks]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()


def role_text(decision: Decision) -> str:
    """The tensor type, with the module type in front when it is not linear."""
    role = decision.role
    return role.tensor_type if role.module_type == "linear" else f"{role.module_type}.{role.tensor_type}"


def shape_text(decision: Decision) -> str:
    """The operand's shape, such as ``[64, 4096]``."""
    return f"[{', '.join(str(size) for size in decision.shape)}]"


def result(decision: Decision) -> str:
    """How the operand is quantized in its direction, or ``skipped: REASON``; with the detail in parentheses."""
    detail = f" ({decision.detail})" if decision.detail else ""
    if decision.quantizer is None:
        return f"skipped: {decision.skip_reason}{detail}"
    return f"{plain_spec(str(decision.quantizer.spec(decision.direction)))}{detail}"


def plain_spec(text: str) -> str:
    """The text of a spec without what only tells one layer or process from another.

    A slot number becomes ``delayed``, and a custom quantizer's key the name of its class.
    """
    return re.sub(r"custom\(key=(.*)-\w+\)", r"\1", re.sub(r"slot=\d+", "delayed", text))


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text in columns; the last one keeps its own width."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    )


def time_text(us: float) -> str:
    """Microseconds as text of three digits with a unit."""
    return f"{us:.3g} us" if us < 999.5 else f"{us / 1e3:.3g} ms"


def us_text(us: float | None) -> str:
    """Microseconds in a column; a dash for none, empty where they are not known."""
    return "" if us is None else f"{us:.1f}" if us else "-"


def _some(names: Sequence[str], most: int = 5) -> str:
    """The names, or the first of many."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _quantized(operands: Sequence[Decision]) -> bool:
    return all(d.quantizer is not None for d in operands)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _plain(decision: Decision) -> dict[str, Any]:
    """A decision in the types of JSON."""
    return {
        "layer": decision.layer,
        "module_type": decision.role.module_type,
        "tensor_type": decision.role.tensor_type,
        "gemm": str(decision.gemm),
        "direction": str(decision.direction),
        "shape": list(decision.shape),
        "quantizer": None if decision.quantizer is None else result(decision),
        "skip_reason": decision.skip_reason and str(decision.skip_reason),
        "detail": decision.detail,
        "form": decision.form,
        "site": decision.site,
        "flops": decision.flops,
    }


def _fold(layers: dict[str, list[Decision]]) -> list[Layer]:
    """Merges layers that differ in one number of their name, one position of the name after another."""
    folded = [(name.split("."), 1, rows) for name, rows in layers.items()]
    for position in range(max((len(parts) for parts, _, _ in folded), default=0)):
        groups: dict[Any, list[tuple[list[str], int, list[Decision]]]] = defaultdict(list)
        for parts, count, rows in folded:
            same = list(parts)
            if position < len(parts) and parts[position].isdecimal():
                same[position] = "{}"
            content = tuple((role_text(d), d.gemm, d.direction, d.shape, result(d)) for d in rows)
            groups[tuple(same), content].append((parts, count, rows))
        folded = []
        for members in groups.values():
            parts, count, rows = members[0]
            if len(members) > 1:
                numbers = _ranges([int(member[0][position]) for member in members])
                parts = [*parts[:position], numbers, *parts[position + 1 :]]
            folded.append((parts, count * len(members), rows))
    return [Layer(".".join(parts) or "<model>", count, rows) for parts, count, rows in folded]


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers as ``{0..11}`` or ``{0,2,5..7}``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return "{" + ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}..{r[-1]}" for r in runs) + "}"
