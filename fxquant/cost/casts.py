"""The estimated time of casts. Equal casts run once, and one kernel casts both directions of a tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from fxquant.cost.gemms import HALVES, elements_of, spec_of
from fxquant.cost.kept import rates_of
from fxquant.cost.rates import CardRates
from fxquant.cost.work import Work
from fxquant.decisions import Decision, Matmul
from fxquant.formats import QuantSpec
from fxquant.kernels.cast.choice import CastFacts, CastKernel
from fxquant.kernels.cast.ops import quantize
from fxquant.kernels.grouped.ops import hybrid_split_quantize
from fxquant.kernels.linear import few_rows
from fxquant.kernels.linear.choice import GemmKernel
from fxquant.kernels.operator import Facts, Operator
from fxquant.roles import GEMM_OPERANDS, Direction, Gemm

_Readers = dict[int, int]
"""The FLOPs of the GEMMs that read a cast, by site."""


class _Tensor(NamedTuple):
    """A tensor that is cast, in the graph of its cast."""

    name: str
    operand: str
    graph: str


@dataclass(frozen=True)
class _Cast:
    """A kernel that casts a tensor in one or both directions; `amax_known` if the forward has taken its amax."""

    matmul: Matmul
    operand: str
    row: QuantSpec | None
    column: QuantSpec | None
    amax_known: bool

    @property
    def specs(self) -> tuple[QuantSpec, ...]:
        return tuple(spec for spec in (self.row, self.column) if spec is not None)

    @property
    def grouped(self) -> bool:
        return bool(self.matmul.groups)

    @property
    def ragged(self) -> bool:
        """True if the groups of the tensor differ in their number of rows."""
        return self.grouped and self.operand != "weight"

    @property
    def of_one_row(self) -> bool:
        """True if a GEMM of one row may read its input unquantized."""
        one_row = self.matmul.m == self.matmul.batch == 1 and "m" not in self.matmul.dynamic
        return one_row and self.column is None and self.operand == "input"

    def needs_amax(self, spec: QuantSpec) -> bool:
        """Returns True if the amax of the whole tensor is taken before the cast."""
        if self.matmul.calibrated and self.operand == "input":
            return False
        if spec.row.family == "nvfp4":
            return True
        return spec.row.family == "per_tensor" and not spec.is_delayed and not self.amax_known

    @property
    def needs_lines(self) -> bool:
        """True if the amaxes of rows or columns are taken before the cast, by a kernel of their own."""
        with_rows = self.grouped and self.operand == "weight" and self.row is None  # the forward took those of columns
        return any(spec.row.family == "per_row" for spec in self.specs) and self.column is not None and not with_rows

    @property
    def by_triton(self) -> bool:
        """True if a Triton kernel does the cast, False if Inductor fuses it."""
        matmul, first = self.matmul, self.specs[0]
        lines = {"input": (matmul.m, matmul.k), "weight": (matmul.n, matmul.k), "grad_output": (matmul.m, matmul.n)}
        batch = (matmul.groups,) if self.grouped and not self.ragged else (matmul.batch,) * (matmul.batch > 1)
        facts = CastFacts(
            capability=matmul.capability, in_memory=self.operand == "weight", shape=(*batch, *lines[self.operand]),
            dtype=matmul.dtype, row=self._as_read(self.row), column=self._as_read(self.column), ragged=self.ragged,
            after_amax=first.row.family == "per_tensor" and self.needs_amax(first),
        )  # fmt: skip
        called: Operator[..., Any] = hybrid_split_quantize if self.grouped else quantize
        return called.choose(facts).kernel is not CastKernel.FUSED

    def _as_read(self, spec: QuantSpec | None) -> QuantSpec | None:
        """The spec with its scales in the order of tensor cores, where these read them."""
        if spec is None or spec.row.family not in ("mxfp8", "nvfp4") or self.matmul.batch > 1:
            return spec
        facts = Facts(capability=self.matmul.capability)
        return replace(spec, swizzled=facts.multiplies_groups_of_blocks if self.grouped else facts.reads_block_scales)

    def kernel_and_us(self) -> tuple[str, float | None]:
        """The kernel of the cast, and its microseconds."""
        specs, matmul = self.specs, self.matmul
        if any(spec.row.family == "custom" for spec in specs):
            return str(GemmKernel.OWN), None
        if self.of_one_row and matmul.capability[0] == 9 and few_rows.casts(specs[0]):
            return "by the GEMM, rowwise", 0.0
        by_triton = self.by_triton
        amax_first = self.needs_lines or any(map(self.needs_amax, specs))
        triton = "Triton cast of groups" if self.grouped else "Triton cast"
        directions = "both directions" if len(specs) == 2 else "rowwise" if self.column is None else "columnwise"
        kernel = f"{triton if by_triton else 'fused by Inductor'}, {directions}"
        kernel += ", after its amaxes" if amax_first else ""
        rates = rates_of(matmul.device)
        if rates is None or matmul.dtype not in HALVES:
            return kernel, None
        elements = elements_of(matmul)[self.operand]
        written = sum(spec.row.bytes_per_element for spec in specs)
        copy = rates.copy * (rates.ragged if self.ragged else 1.0)
        share = self._share(rates, by_triton)
        if share is None:
            return kernel, None
        us = rates.launch + elements * (2 + written) / (copy * share) / 1e6
        if amax_first:
            us += rates.lines_start if self.needs_lines else rates.amax_start
            us += 2 * elements / (copy * rates.amax) / 1e6
        return kernel, us

    def _share(self, rates: CardRates, by_triton: bool) -> float | None:
        """The share of the copy rate; None for a cast that was not measured on the card."""
        if not by_triton:
            return rates.rowwise if self.column is None else rates.transposed
        families = [f"{spec.row.family}_2d" if spec.row.block[0] > 1 else spec.row.family for spec in self.specs]
        if not rates.casts.keys() >= set(families):
            return None
        by_family = [rates.casts[family] for family in families]
        return min(rate.both if len(by_family) == 2 else rate.columnwise for rate in by_family)


def cast_work(sites: Mapping[int, Sequence[Decision]]) -> dict[int, list[Work]]:
    """The casts by site."""
    wanted: dict[_Tensor, dict[Direction, dict[QuantSpec, _Readers]]] = {}
    matmuls: dict[_Tensor, Matmul] = {}
    work: dict[int, list[Work]] = {site: [] for site in sites}
    for site, gemm, operand, decision in _operands(sites):
        spec, matmul = spec_of(decision), decision.matmul
        if spec is None or matmul is None:
            continue
        if operand == "weight" and matmul.stored and not (spec.is_delayed or spec.stochastic):
            continue
        if decision.shared:
            work[site].append(_payload_move(matmul, operand, decision.direction))
            continue
        graph = "backward" if gemm is not Gemm.FPROP and operand != "input" else "forward"
        name = {"input": matmul.input, "weight": matmul.weight, "grad_output": str(site)}[operand]
        tensor = _Tensor(name, operand, graph)
        matmuls[tensor] = matmul
        specs = wanted.setdefault(tensor, {direction: {} for direction in Direction})[decision.direction]
        specs.setdefault(spec, {})[site] = decision.flops
    scaled: set[tuple[str, str]] = set()
    for tensor, directions in wanted.items():
        amax_known = (tensor.operand, tensor.name) in scaled
        for row, column, readers in _pairs(directions[Direction.ROWWISE], directions[Direction.COLUMNWISE]):
            cast = _Cast(matmuls[tensor], tensor.operand, row, column, amax_known)
            if any(spec.row.family == "per_tensor" for spec in cast.specs):
                scaled.add((tensor.operand, tensor.name))
            for site, part in _parts(cast, readers):
                work[site].append(part)
    return work


def _parts(cast: _Cast, readers: _Readers) -> Iterator[tuple[int, Work]]:
    """The share of each reader in a cast, by its FLOPs."""
    kernel, us = cast.kernel_and_us()
    kernel += f", once for {len(readers)} layers" if len(readers) > 1 else ""
    total = sum(readers.values())
    for site, flops in readers.items():
        part = None if us is None else us * flops / total if total else 0.0
        yield site, Work(f"cast {cast.operand}", kernel, None if part is None else 0.0, part)


def _payload_move(matmul: Matmul, operand: str, direction: Direction) -> Work:
    """The kernel that brings bytes quantized by an attention into the order of a linear."""
    rates, us = rates_of(matmul.device), None
    if rates is not None:
        share = rates.rowwise if direction is Direction.ROWWISE else rates.transposed
        us = rates.launch + 2 * elements_of(matmul)[operand] / (rates.copy * share) / 1e6
    return Work(f"move {operand}", f"bytes of the attention's, {direction}", None if us is None else 0.0, us)


def _operands(sites: Mapping[int, Sequence[Decision]]) -> Iterator[tuple[int, Gemm, str, Decision]]:
    for site, decisions in sites.items():
        for gemm, names in GEMM_OPERANDS.items():
            pair = [d for d in decisions if d.gemm == gemm]
            yield from ((site, gemm, operand, d) for d, (operand, _) in zip(pair, names, strict=False))


def _pairs(
    rows: Mapping[QuantSpec, _Readers], columns: Mapping[QuantSpec, _Readers]
) -> Iterator[tuple[QuantSpec | None, QuantSpec | None, _Readers]]:
    """The casts that are one kernel, as `fxquant.passes.lower.directions` pairs them."""
    unpaired = dict(columns)
    for row, readers in rows.items():
        column = row if row in unpaired else next(iter(unpaired), None)
        yield row, column, {**readers, **(unpaired.pop(column) if column is not None else {})}
    for column, readers in unpaired.items():
        yield None, column, readers
