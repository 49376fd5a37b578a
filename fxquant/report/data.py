"""The data of a report: the decisions for every matmul of a compiled model, with their counts and estimates."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from fxquant.checks import checked
from fxquant.cost.estimate import estimate
from fxquant.cost.gemms import choose_gemm
from fxquant.cost.kept import rates_of
from fxquant.cost.work import Estimate, Work
from fxquant.decisions import Decision, KeptInFp8, Matmul, NotFused, Saved, SentQuantized
from fxquant.errors import ArgumentError, OptionError
from fxquant.report.header import Header
from fxquant.roles import Direction, Gemm
from fxquant.snapshots import Snapshot, Step

if TYPE_CHECKING:
    from fxquant.kernels.linear.choice import GemmKernel
    from fxquant.kernels.linear.problem import Problem
    from fxquant.kernels.operator import Chosen


class EpilogueGemm(NamedTuple):
    """A GEMM of a `graph`, ``forward`` or ``backward``, with an epilogue that a Triton kernel could fuse on a GPU."""

    layer: str
    graph: str
    problem: Problem
    card: str

    def chosen(self, card: str = "") -> Chosen[GemmKernel]:
        """The kernel on its own device, or on another `card`, by measured rates."""
        return choose_gemm(self.problem, card or self.card)


class Layer(NamedTuple):
    """The decisions of one layer, or of `repeats` layers that differ only in numbers of their names."""

    name: str
    repeats: int
    decisions: list[Decision]


@dataclass(frozen=True, kw_only=True)
class Loss:
    """The error of a quantized product or attention, which `what` names; see `fxquant.measure`."""

    layer: str
    what: str
    error: float
    lost: dict[str, float]
    spread: dict[str, tuple[float, float]] = field(default_factory=dict)
    """The root of the mean square and the amax of each operand."""


@checked(ArgumentError)
@dataclass(kw_only=True)
class ReportData:
    """The decisions of one or several compiled graphs.

    `graphs` maps ``forward`` and ``backward`` to the texts of the rewritten graphs. `unused` names the parts of the
    recipe that matched no operand, `breaks` the reasons for graph breaks. `epilogues` are the GEMMs whose results are
    activated, added to something or measured by their readers. `again` are the layers whose product a backward computes
    again with the option ``save="least"``. Kernels and times are those of `card`, or of the tensors' own device if that
    is empty; see `on`. `losses` are the measurements of `fxquant.measure`. `not_fused` has the reasons of the passes
    behind autograd, as far as they have run: `fxquant.explain` compiles no kernels; those of a graph that comes from a
    cache are kept beside it. `sent_quantized` has what they let ranks exchange quantized. `uncompiled` says what ran as
    it was, in no graph, and `recompilations` why torch has compiled the same code again. `header` says what was asked,
    and when; `saved` is what all forwards keep for their backwards, None where none was differentiated, and `kept_fp8`
    has what of it is in FP8 with the option ``save="fp8"``. A report that was read from JSON has the estimates as they
    were written (`estimated`), and says the same under other rates. `views` has the nodes of the forward and backward
    graphs, `steps` those before and after each pass, where `fxquant.explain(.., stages=True)` was asked for them;
    `drawn` has the pictures of a report that was read.
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
    not_fused: list[NotFused] = field(default_factory=list)
    sent_quantized: list[SentQuantized] = field(default_factory=list)
    uncompiled: list[str] = field(default_factory=list)
    recompilations: list[str] = field(default_factory=list)
    header: Header = field(default_factory=Header)
    estimated: dict[int, Estimate] = field(default_factory=dict)
    saved: Saved | None = None
    kept_fp8: list[KeptInFp8] = field(default_factory=list)
    views: dict[str, list[Snapshot]] = field(default_factory=dict, repr=False)
    steps: list[Step] = field(default_factory=list, repr=False)
    drawn: dict[str, dict[str, str]] = field(default_factory=dict, repr=False)

    @property
    def from_cache(self) -> bool:
        """True if torch took a quantized graph from its cache, beside which its facts were not kept."""
        return "captured" in self.graphs and any(d.quantizer is not None for d in self.decisions)

    def estimates(self) -> dict[int, Estimate]:
        """Kernels and times by the site of a matmul or of an attention's first product; see `fxquant.cost`."""
        return self.estimated or estimate(self.decisions, self.card)

    def slower(self) -> list[str]:
        """The layers that are estimated to be slower than in high precision."""
        return self.layers_of({site for site, estimated in self.estimates().items() if estimated.slower})

    def layers_of(self, sites: Collection[int]) -> list[str]:
        """The names of the layers of these matmuls."""
        return list(dict.fromkeys(d.layer or MODEL for d in self.decisions if d.site in sites))

    def unkernelled(self) -> dict[str, list[str]]:
        """The layers whose quantized attention would hold its scores in the memory of a GPU, by the reason."""
        sites: dict[str, list[int]] = defaultdict(list)
        for site, estimated in self.estimates().items():
            if estimated.reference:
                sites[estimated.reference].append(site)
        return {reason: self.layers_of(same_reason) for reason, same_reason in sites.items()}

    def time(self) -> dict[str, Any]:
        """The estimate by name: ``card``, microseconds of all matmuls and their casts, and the layers without one.

        ``published`` says that the card's rates were not measured. ``unquantized_us`` and ``quantized_us`` are None on
        a device without rates.
        """
        timed = {site: estimated for site, estimated in self.estimates().items() if estimated.quantized is not None}
        problems = [(d, d.matmul or d.attention) for d in self.decisions]
        devices = {problem.device for _, problem in problems if problem is not None}
        missing = (
            d.layer or MODEL
            for d, problem in problems
            if (isinstance(problem, Matmul) or (problem is not None and problem.spec is not None))
            and d.weighed not in timed
        )
        card = self.card or ", ".join(sorted(devices))
        return {
            "card": card,
            "published": (rates := rates_of(card)) is not None and rates.published,
            "unquantized_us": sum(work.unquantized or 0 for work in timed.values()) if timed else None,
            "quantized_us": sum(work.quantized or 0 for work in timed.values()) if timed else None,
            "unknown": list(dict.fromkeys(missing)),
            "slower": self.slower(),
        }

    def work(self, layer: str = "", *, collapse: bool = False) -> list[tuple[str, int, Work]]:
        """Each GEMM and cast with its layer and how many equal layers there are; see `layers` for the arguments."""
        estimates = self.estimates()
        return [
            (name, repeats, work)
            for name, repeats, decisions in self.layers(layer, collapse=collapse)
            for site in dict.fromkeys(d.site for d in decisions)
            for work in (estimates[site].work if site in estimates else ())
        ]

    def gemms(self) -> dict[tuple[int, Gemm], list[Decision]]:
        """The decisions by (site, gemm): normally two, left operand then right."""
        return by_gemm(self.decisions)

    @property
    def flops(self) -> dict[str, int]:
        """The FLOPs of all GEMMs (``total``), and of GEMMs with both operands quantized (``quantized``)."""
        gemms = self.gemms().values()
        quantized = sum(operands[0].flops for operands in gemms if _quantized(operands))
        return {"total": sum(operands[0].flops for operands in gemms), "quantized": quantized}

    @property
    def coverage(self) -> float:
        """Share of matmul FLOPs in graphs that run with both operands quantized; 1 for a model without matmuls.

        Without FLOPs it is 1 if everything is quantized, else 0, and 0 as long as no graph has run.
        """
        if self.flops["total"]:
            return self.flops["quantized"] / self.flops["total"]
        if not self.decisions and self.uncompiled:
            return 0.0
        return float(all(decision.quantizer is not None for decision in self.decisions))

    @property
    def one_sided(self) -> float:
        """Share of matmul FLOPs whose GEMM reads one quantized operand, and one in high precision.

        They are no part of `coverage`: a GEMM in high precision multiplies, of what is dequantized before or as it is
        read; `work` says which.
        """
        gemms = [operands for operands in self.gemms().values() if not _quantized(operands)]
        flops = sum(operands[0].flops for operands in gemms if any(d.quantizer is not None for d in operands))
        return flops / self.flops["total"] if flops else 0.0

    @property
    def weights(self) -> dict[str, int]:
        """The bytes of all weights as forwards read them: ``unquantized`` in their GEMM's dtype, and ``quantized``.

        A weight counts once, also one of several layers or graphs. Those of a matmul without facts do not count.
        """
        sizes: dict[str, tuple[int, int]] = {}
        graphs: dict[object, str] = {}
        for d in self.decisions:
            matmul = d.matmul
            if matmul is None or (d.gemm, d.role.tensor_type) != (Gemm.FPROP, "weight"):
                continue
            if d.role.module_type not in ("linear", "grouped_linear"):
                continue
            graph = matmul.weight.partition(".")[0]
            if graphs.setdefault((d.layer, d.part, matmul.n, matmul.k), graph) == graph:
                sizes.setdefault(matmul.weight or str(d.site), _weight_bytes(d, matmul))
        return {
            "unquantized": sum(before for before, _ in sizes.values()),
            "quantized": sum(after for _, after in sizes.values()),
        }

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
            "one_sided": self.one_sided,
            "weights": self.weights,
            "explained": self.explained,
            "not_fused": dict(Counter(f"{fusion.reason} ({fusion.step})" for fusion in self.not_fused).most_common()),
            "skipped": dict(Counter(str(d.skip_reason) for d in self.decisions if d.skip_reason).most_common()),
        }

    def layers(self, layer: str = "", *, collapse: bool = False) -> list[Layer]:
        """The layers in whose name the regular expression `layer` is found, in graph order; see `names`.

        `collapse` folds layers that differ in nothing but a number of their name, written as ``layers.{0..11}.mlp``.
        """
        pattern = layer_pattern(layer)
        names, by_name = self.names(), defaultdict[str, list[Decision]](list)
        for decision in self.decisions:
            name = names[decision.site]
            if pattern.search(decision.layer) or pattern.search(name):
                by_name[name].append(decision)
        return _fold(by_name) if collapse else [Layer(name or MODEL, 1, rows) for name, rows in by_name.items()]

    def names(self) -> dict[int, str]:
        """The name of each product by its site: that of its layer, and in a layer of several one for each.

        Such as ``experts.gate_up_proj`` by the weight, ``self_attn QK^T``, and ``head #2`` where nothing else is known.
        """
        parts: dict[str, dict[object, int]] = defaultdict(dict)
        part_of: dict[int, object] = {}
        for (site, _), operands in self.gemms().items():
            if site not in part_of:
                first = operands[0]
                shapes = tuple((role_text(d), d.shape) for d in operands)
                part_of[site] = first.part or (site if first.role.module_type == "matmul" else shapes)
                parts[first.layer].setdefault(part_of[site], 1 + len(parts[first.layer]))
        names = {}
        for d in self.decisions:
            of_layer = parts[d.layer]
            if len(of_layer) == 1:
                names[d.site] = d.layer
            elif d.part and d.attention is None:
                names[d.site] = f"{d.layer}.{d.part}".strip(".")
            else:
                names[d.site] = f"{d.layer or MODEL} " + (d.part or f"#{of_layer[part_of[d.site]]}")
        return names


def by_gemm(decisions: Iterable[Decision]) -> dict[tuple[int, Gemm], list[Decision]]:
    """Returns the operands of each (site, gemm): normally two, left then right."""
    groups: dict[tuple[int, Gemm], list[Decision]] = defaultdict(list)
    for decision in decisions:
        groups[decision.site, decision.gemm].append(decision)
    return dict(groups)


def layer_pattern(layer: str, argument: str = "layer") -> re.Pattern[str]:
    """The filter for names of layers. Raises OptionError for what is no regular expression, as this `argument`."""
    try:
        return re.compile(layer)
    except (re.error, TypeError) as error:
        raise OptionError(f"{argument}={layer!r} is not a regular expression: {error}") from error


MODEL = "<model>"
"""The name of the layer that is the model itself."""


def role_text(decision: Decision) -> str:
    """The tensor type, with the module type in front when it is not linear."""
    role = decision.role
    return role.tensor_type if role.module_type == "linear" else f"{role.module_type}.{role.tensor_type}"


def shape_text(decision: Decision) -> str:
    """The operand's shape, such as ``[64, 4096]``."""
    return f"[{', '.join(str(size) for size in decision.shape)}]"


def result(decision: Decision) -> str:
    """The operand's format in its direction, or ``skipped: REASON``; with the detail in parentheses."""
    bits = f"{decision.bits:.4g} bits an element" if decision.bits else ""
    shown = "; ".join(filter(None, (bits, decision.detail)))
    detail = f" ({shown})" if shown else ""
    if decision.quantizer is None:
        return f"skipped: {decision.skip_reason}{detail}"
    return f"{plain_spec(str(decision.quantizer.spec(decision.direction)))}{detail}"


def plain_spec(text: str) -> str:
    """The text of a spec without the parts that only tell one layer or process from another.

    A slot number becomes ``delayed``, and a custom quantizer's key the name of its class, or of its format.
    """
    named = re.sub(r"custom\(key=([^()]*)-\w+\)", r"\1", re.sub(r"slot=\d+", "delayed", text))
    return re.sub(r"custom\(([^()]*),key=([^()]*)-\w+\)", r"\2(\1)", named)


def operand_bytes(decision: Decision) -> tuple[int, int] | None:
    """The bytes of an operand in high precision, and as it was decided; None where its sizes are not known."""
    facts, shape = decision.matmul or decision.attention, decision.shape
    sizes = [size for size in shape if isinstance(size, int)]
    if facts is None or len(sizes) != len(shape) or len(sizes) < 2:
        return None
    count, (rows, columns) = math.prod(sizes[:-2]), sizes[-2:]
    before = count * rows * columns * facts.dtype.itemsize
    if decision.quantizer is None:
        return before, before
    if decision.bits:
        return before, int(count * rows * columns * decision.bits / 8)
    turned = (rows, columns) if decision.direction is Direction.ROWWISE else (columns, rows)
    return before, count * decision.quantizer.spec(decision.direction).stored_bytes(*turned)


def _weight_bytes(decision: Decision, matmul: Matmul) -> tuple[int, int]:
    """The bytes of a weight in high precision, and as it was decided."""
    count, elements = matmul.groups or matmul.batch, matmul.n * matmul.k
    before = count * elements * matmul.dtype.itemsize
    if decision.quantizer is None:
        return before, before
    if decision.bits:
        return before, int(count * elements * decision.bits / 8)
    return before, count * decision.quantizer.spec(decision.direction).stored_bytes(matmul.n, matmul.k)


def _quantized(operands: Sequence[Decision]) -> bool:
    return all(d.quantizer is not None for d in operands)


def _fold(layers: dict[str, list[Decision]]) -> list[Layer]:
    """Merges layers that differ in nothing but numbers of their names."""
    names, rows = list(layers), list(layers.values())
    contents = [tuple((role_text(d), d.gemm, d.direction, d.shape, result(d)) for d in of_layer) for of_layer in rows]
    return [Layer(name or MODEL, len(members), rows[members[0]]) for name, members in folded(names, contents)]


def folded(names: Sequence[str], contents: Sequence[Any]) -> list[tuple[str, list[int]]]:
    """The names whose contents are equal, merged where they differ in one number, one position after another.

    Each comes as ``layers.{0..11}.mlp``, with the places of those that it stands for.
    """
    merged = [(name.split("."), [place]) for place, name in enumerate(names)]
    for position in range(max((len(parts) for parts, _ in merged), default=0)):
        groups: dict[Any, list[tuple[list[str], list[int]]]] = defaultdict(list)
        for parts, places in merged:
            same = list(parts)
            if position < len(parts) and parts[position].isdecimal():
                same[position] = "{}"
            groups[tuple(same), contents[places[0]]].append((parts, places))
        merged = []
        for members in groups.values():
            parts = members[0][0]
            if len(members) > 1:
                numbers = ranges([int(member[0][position]) for member in members])
                parts = [*parts[:position], numbers, *parts[position + 1 :]]
            merged.append((parts, [place for _, places in members for place in places]))
    return [(".".join(parts), places) for parts, places in merged]


def ranges(numbers: Sequence[int]) -> str:
    """Numbers in short, ``{0..11}`` or ``{0,2,5..7}``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return "{" + ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}..{r[-1]}" for r in runs) + "}"
