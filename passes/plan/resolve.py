"""Asks the recipe for the quantizers of every product and checks that each GEMM's pair can multiply.

Everything that could go wrong in a GEMM, in the backward included, is found here, before anything runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import NoneType
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.compat.device import capability, card_name
from fxquant.compat.private import tree_leaves
from fxquant.compat.values import size_hint, upper_bound
from fxquant.decisions import Attended, Decision, Matmul, Size, SkipReason
from fxquant.errors import RecipeError
from fxquant.formats import LINEAR_OPERANDS, OperandSpec, QuantSpec, gemm_mismatch, is_mixed
from fxquant.passes.find.facts import Attention, Match, Product, Resolved, Skip, product_of
from fxquant.passes.graph.values import Dim, value_of
from fxquant.passes.plan.attention import (
    CONTEXT,
    SCORES,
    Answer,
    Outcome,
    ResolvedAttention,
    attention_outcome,
    attention_roles,
    resolve_attention,
)
from fxquant.passes.plan.layers import product_name
from fxquant.passes.plan.spread import Spread, shared_by, spread_of, tensor_of
from fxquant.passes.plan.trial import Tried, bits_an_element
from fxquant.quantizers import DelayedScalingRequest, Float8Quantizer, Quantizer, quantizer_text
from fxquant.recipes import Recipe
from fxquant.roles import GEMM_OPERANDS, SMALLEST, Direction, Gemm, QuantizerRole
from fxquant.state import Slots
from fxquant.weights import QuantizedWeight
from fxquant.weights.parts import plain_spec
from fxquant.weights.weight import fits, mismatch

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _rows(operand: str, product: Product) -> tuple[Any, Any]:
    """Returns the rows and columns of an operand."""
    m, k, n = product.m, product.k, product.n
    return {"input": (m, k), "weight": (n, k), "grad_output": (m, n)}[operand]


def _shape(operand: str, match: Match, product: Product) -> tuple[Size, ...]:
    sizes: Sequence[Any]
    if product.counted is None:
        groups = () if product.groups is None or operand != "weight" else (product.groups,)
        sizes = (*product.batch, *groups, *_rows(operand, product))
    else:
        node = {"input": product.lhs, "weight": product.rhs, "grad_output": match.node}[operand]
        sizes = next(leaf.shape for leaf in tree_leaves(value_of(node)) if isinstance(leaf, Tensor))
    return tuple(dim if isinstance(dim, int) else str(dim) for dim in sizes)


def _matmul(match: Match, product: Product, sources: Mapping[fx.Node, str], stored: bool) -> Matmul | None:
    """Returns all that a product's time depends on; None if it is unknown, as of attention, which is one kernel."""
    lhs, rhs = value_of(product.lhs), value_of(product.rhs)
    if (
        match.module_type == "dpa"
        or product.counted is not None
        or not isinstance(lhs, Tensor)
        or not isinstance(rhs, Tensor)
    ):
        return None
    dims = {"m": product.m, "k": product.k, "n": product.n}
    return Matmul(
        m=size_hint(product.m), k=size_hint(product.k), n=size_hint(product.n),
        most_m=upper_bound(product.m), batch=int(product_of(map(size_hint, product.batch))),
        batch_weights=bool(product.batch) and product.rhs_is_weight, groups=size_hint(product.groups or 0),
        dynamic="".join(name for name, dim in dims.items() if not isinstance(dim, int)),
        dtype=match.autocast or (lhs.dtype if lhs.dtype.itemsize == 1 else torch.promote_types(lhs.dtype, rhs.dtype)),
        input=sources[tensor_of(product.lhs)], weight=sources[product.rhs], stored=stored and product.rhs_is_weight,
        input_strides=_strides(lhs, product.m, product.k), weight_strides=_strides(rhs, product.n, product.k),
        device=card_name(lhs.device), capability=capability(lhs.device),
    )  # fmt: skip


def _strides(matrix: Tensor, rows: Dim, columns: Dim) -> tuple[int, ...]:
    """Returns the strides of a matrix [rows, columns] that is stored as one, maybe transposed; none if by rows."""
    shape, strides = tuple(matrix.shape), tuple(matrix.stride())
    if not all(isinstance(size, int) for size in (*shape, *strides, rows, columns)) or len(shape) != 2:
        return ()
    if shape != (rows, columns):
        shape, strides = shape[::-1], strides[::-1]
    return strides if shape == (rows, columns) and strides != (columns, 1) else ()


def gemms(needs_grad: tuple[bool, bool]) -> list[Gemm]:
    """Returns the GEMMs of a product; `needs_grad` is true for lhs, and for rhs, where it gets a gradient."""
    return [Gemm.FPROP] + [Gemm.DGRAD] * needs_grad[0] + [Gemm.WGRAD] * needs_grad[1]


def _unusable_tensors(match: Match, product: Product, allow_float64: bool) -> Skip | None:
    """Returns the reason why the tensors themselves cannot be quantized, if there is one."""
    if match.skip is not None:
        return match.skip
    for node in (product.lhs, product.rhs):
        value = value_of(node)
        if not isinstance(value, Tensor):
            continue
        if value.layout != torch.strided:
            return SkipReason.LAYOUT, f"{node.name} is {value.layout}"
        if value.dtype not in _FLOATS and not (allow_float64 and value.dtype == torch.float64):
            return SkipReason.DTYPE, f"{node.name} is {str(value.dtype).removeprefix('torch.')}"
    for label, size in (("K", product.k), ("N", product.n)):
        if isinstance(size, int) and size < SMALLEST:
            return SkipReason.TOO_SMALL, f"{label}={size}"
    return None


def _check_pairs(match: Match, quantizers: Mapping[str, Quantizer], needed: Sequence[Gemm]) -> None:
    """Raises RecipeError for a GEMM whose operands cannot multiply."""
    for gemm in needed:
        sides = GEMM_OPERANDS[gemm]
        problem = gemm_mismatch(*(quantizers[operand].spec(side) for operand, side in sides))
        if problem is not None:
            left, right = (f"{op}.{side} {quantizer_text(quantizers[op].side(side))}" for op, side in sides)
            raise RecipeError(
                f"layer {match.name or '<model>'!r}: {gemm} cannot multiply {left} by {right}: {problem}. "
                f"Give both operands of {gemm} quantizers of one kind; HybridQuantizer sets each direction by itself."
            )


def _stored(product: Product) -> QuantizedWeight | None:
    """The weight of a product, if it is stored quantized."""
    weight = value_of(product.rhs)
    return weight if isinstance(weight, QuantizedWeight) and weight.is_stored else None


def _check_stored(match: Match, product: Product, quantizers: Mapping[str, Quantizer]) -> None:
    """Raises RecipeError for a weight that is stored in another format than the recipe wants, if it wants any."""
    weight = _stored(product)
    if weight is None or "weight" not in quantizers or quantizers["weight"].is_identity:
        return
    wanted = quantizers["weight"].operand_spec()
    if not fits(weight.spec, wanted):
        raise RecipeError(mismatch(match.name, weight.spec, wanted))


def _as_stored(weight: QuantizedWeight, quantizer: Quantizer | None, direction: Direction, cached: bool) -> str:
    """Says what a GEMM does with a weight that is stored quantized; with `cached`, that no cache is needed."""
    if quantizer is None:
        read = "dequantized" if weight.master is None else "its master is read"
        return f"stored as {plain_spec(OperandSpec.parse(weight.spec))}: {read}"
    if weight.parts(direction):
        text = "stored quantized: no cast"
    elif weight.is_one:
        text = "stored quantized, in rows: transposed"
    else:
        return "stored quantized in rows alone: dequantized and quantized in columns"
    return f"{text}, and cache_weights has nothing to do" if cached else text


def _unusable_answers(match: Match, product: Product, answers: Mapping[str, Answer]) -> Skip | None:
    """Returns the reason why the recipe's answers cannot be used for this product, if there is one."""
    quantizers = {op: answer for op, answer in answers.items() if not isinstance(answer, DelayedScalingRequest)}
    delayed = len(quantizers) < len(answers)
    if delayed and not isinstance(product.weights, (int, NoneType)):
        return SkipReason.STATE, "the number of groups is not known"
    stateful = delayed or any(quantizer.operand_spec().is_stochastic for quantizer in quantizers.values())
    if stateful and not match.takes_state:
        return SkipReason.STATE, "this region is called as a function of its own"
    for operand, quantizer in quantizers.items() if product.weights is not None else ():
        for direction in Direction:
            if quantizer.spec(direction).key:
                name = type(quantizer.side(direction)).__name__
                return SkipReason.GROUPED, f"{name}, a quantizer of your own for {operand}, takes one matrix at a time"
    return None


@dataclass(frozen=True)
class _Spread:
    """The parts of the operands of a product, and those of them that delayed scales are common to in other ways."""

    parts: Spread = field(default_factory=dict)
    delayed: str = ""

    @classmethod
    def of(cls, match: Match, product: Product, answers: Mapping[str, Answer], all_ranks: bool) -> _Spread:
        """Returns how a product is spread; `all_ranks` says that delayed scaling takes the largest amaxes of all."""
        request = next((a for a in answers.values() if isinstance(a, DelayedScalingRequest)), None)
        delayed = ""
        if request is not None:
            delayed = "amax of this rank" if not request.reduce_amax else "amax over all ranks" if all_ranks else ""
        return cls({} if product.weights is not None else spread_of(match), delayed)

    def groups(self, quantizers: Mapping[str, Quantizer]) -> dict[str, dict[Direction, list[str]]]:
        """Returns the process groups over which amaxes are taken, by operand and direction."""
        return {
            operand: {
                direction: [part.group for part in shared_by(self.parts, operand, direction, spec)]
                for direction in Direction
                if not ((spec := quantizers[operand].spec(direction)).is_delayed and self.delayed)
            }
            for operand in self.parts.keys() & quantizers.keys()
        }

    def details(self, operand: str, direction: Direction, spec: QuantSpec) -> Iterator[str]:
        """Yields what an operand is a part of, and whose amaxes its scale is made of."""
        names = dict.fromkeys(part.name for part in self.parts.get(operand, ()))
        if names:
            yield f"part over {' and '.join(names)}"
        shared = dict.fromkeys(part.name for part in shared_by(self.parts, operand, direction, spec))
        if shared:
            yield (self.delayed if spec.is_delayed else "") or f"amax over {' and '.join(shared)}"


def _outcome(
    quantizers: Mapping[str, Quantizer], remark: str, skip: Skip | None, spread: _Spread, operand: str, gemm: Gemm,
    direction: Direction,
) -> Outcome:  # fmt: skip
    quantizer = quantizers.get(operand)
    if quantizer is None:
        return None, *(skip or (SkipReason.HIGH_PRECISION, ""))
    derived = direction is Direction.COLUMNWISE and quantizer.operand_spec().from_rowwise
    details = ["from the dequantized rowwise half"] if derived else []
    if quantizer.spec(direction).is_identity:
        return None, SkipReason.ATTENTION if remark else SkipReason.HIGH_PRECISION, remark or "".join(details)
    details += _emulated_beside(quantizers, operand, gemm, direction)
    details += spread.details(operand, direction, quantizer.spec(direction))
    return quantizer.side(direction), None, "; ".join(details) or remark


def _emulated_beside(
    quantizers: Mapping[str, Quantizer], operand: str, gemm: Gemm, direction: Direction
) -> Iterator[str]:
    """Says that no GEMM multiplies a quantized operand by the other one, which is of another kind."""
    ((other, side),) = (pair for pair in GEMM_OPERANDS[gemm] if pair != (operand, direction))
    spec, beside = quantizers[operand].spec(direction), quantizers[other].spec(side)
    if beside.is_identity:
        yield "emulated: dequantized, beside an operand in high precision"
    elif is_mixed(spec, beside):
        yield f"emulated: dequantized, beside {beside.row.name}"


def _attended(whole: Sequence[Match], attention: Attention, site: int) -> Attended:
    """Returns all that the time of an attention depends on; its first product has this site."""
    products = [product for match in whole for product in match.products]
    first, last = products[0], products[-1]
    q, k = value_of(first.lhs), value_of(first.rhs)
    entries = product_of(map(size_hint, first.batch))
    fused = len(whole) == 1
    heads, kv_heads = ((size_hint(x.shape[-3]) if x.ndim > 2 else 1) for x in (q, k)) if fused else (1, 1)
    return Attended(
        site=site, batch=entries // heads, heads=heads, kv_heads=kv_heads, queries=size_hint(first.m),
        keys=size_hint(first.n), width=size_hint(first.k), features=size_hint(last.n), axes=attention.axes,
        steps=attention.steps, fused=fused, learned=attention.learned, spec=attention.spec,
        dtype=whole[-1].autocast or q.dtype, device=card_name(q.device), capability=capability(q.device),
    )  # fmt: skip


@dataclass(kw_only=True)
class _Resolver:
    """Resolves the matches of one graph, in order; `site` counts their products."""

    matches: Sequence[Match]
    recipe: Recipe
    slots: Slots
    site: int
    allow_float64: bool
    stored_weights: bool
    all_ranks: bool
    sources: Mapping[fx.Node, str]
    """A name for each node that is an operand, unlike those in other graphs."""
    roles: list[QuantizerRole] = field(default_factory=list)
    shared: dict[object, int] = field(default_factory=dict)
    """The slots of tensors that several products may read, by the tensor."""
    attentions: dict[fx.Node, tuple[ResolvedAttention, Attended]] = field(default_factory=dict)

    def match(self, match: Match) -> Match:
        if match.module_type == "dpa" and not match.can_open:
            return self.attention(match)
        pairs = zip(match.products, match.needs_grad, strict=True)
        return replace(match, resolved=tuple(self.product(match, product, grads) for product, grads in pairs))

    def product(self, match: Match, product: Product, needs_grad: tuple[bool, bool]) -> Resolved:
        """Asks for the quantizers of a product."""
        matmul = _matmul(match, product, self.sources, self.stored_weights or _stored(product) is not None)
        skip = _unusable_tensors(match, product, self.allow_float64)
        operands = LINEAR_OPERANDS[: 3 if any(needs_grad) else 2]
        kinds = {"weight": "input"} if not product.rhs_is_weight else {}  # both operands are activations
        roles = {op: QuantizerRole(match.module_type, kinds.get(op, op), match.name) for op in operands}
        self.roles += roles.values()
        answers = {} if skip else {operand: self.recipe.quantizer(role) for operand, role in roles.items()}
        skip = skip or _unusable_answers(match, product, answers)
        quantizers: dict[str, Quantizer] = {}
        numbers: dict[str, int] = {}
        bits: dict[tuple[str, Direction], float] = {}
        if skip is None:
            quantizers = self.with_slots(answers, match, product)
            _check_stored(match, product, quantizers)
            _check_pairs(match, quantizers, gemms(needs_grad))
            bits = self.tried(match, product, quantizers, needs_grad)
            for operand, quantizer in quantizers.items():
                if quantizer.operand_spec().is_stochastic:
                    numbers[operand] = self.slots.add_rounded((match.name, operand, 0))
            if "grad_output" not in roles and not torch.is_grad_enabled() and match.takes_state:
                # the streams stay those of the training graph
                answer = self.recipe.quantizer(QuantizerRole(match.module_type, "grad_output", match.name))
                if isinstance(answer, Quantizer) and answer.operand_spec().is_stochastic:
                    self.slots.add_rounded((match.name, "grad_output", 0))
        spread = _Spread.of(match, product, answers, self.all_ranks)
        outcome = partial(_outcome, quantizers, match.remark, skip, spread)
        about = {"matmul": matmul, "part": product_name(product, match.name)}
        decisions = self.decisions(match, product, needs_grad, roles, outcome, **about)
        if bits:
            sides = [side for gemm in gemms(needs_grad) for side in GEMM_OPERANDS[gemm]]
            decisions = tuple(replace(d, bits=bits.get(side, 0.0)) for d, side in zip(decisions, sides, strict=True))
        quantized = not all(quantizer.is_identity for quantizer in quantizers.values())
        written, over = quantizers if quantized else None, spread.groups(quantizers)
        return Resolved(quantizers=written, decisions=decisions, numbers=numbers, over=over)

    def tried(
        self, match: Match, product: Product, quantizers: Mapping[str, Quantizer], needs_grad: tuple[bool, bool]
    ) -> dict[tuple[str, Direction], float]:
        """Tries users' quantizers in the directions that are needed; returns the bits an element of each."""
        bits: dict[tuple[str, Direction], float] = {}
        lhs, rhs = value_of(product.lhs), value_of(product.rhs)
        for gemm in gemms(needs_grad):
            for operand, direction in GEMM_OPERANDS[gemm]:
                quantizer = quantizers[operand].side(direction)
                if quantizer.spec(direction).key and isinstance(lhs, Tensor) and isinstance(rhs, Tensor):
                    dtype = match.autocast or torch.promote_types(lhs.dtype, rhs.dtype)
                    sizes = tuple(map(size_hint, (*product.batch, *_rows(operand, product))))
                    tried = Tried(match.name, operand, sizes, dtype, lhs.device)
                    bits[operand, direction] = bits_an_element(quantizer, direction, tried)
        return bits

    def decisions(
        self, match: Match, product: Product, needs_grad: tuple[bool, bool], roles: Mapping[str, QuantizerRole],
        outcome: Callable[[str, Gemm, Direction], Outcome], **about: Any,
    ) -> tuple[Decision, ...]:  # fmt: skip
        """Decides on every operand of the GEMMs of a product; `about` has all that its time depends on."""
        flops = product.counted
        if flops is None:
            flops = 2 * int(product_of(map(size_hint, (*product.batch, product.m, product.k, product.n))))
        decisions, weight = [], _stored(product)
        for gemm in gemms(needs_grad):
            for operand, direction in GEMM_OPERANDS[gemm]:
                quantizer, reason, detail = outcome(operand, gemm, direction)
                if operand == "weight" and weight is not None:
                    stored = _as_stored(weight, quantizer, direction, self.stored_weights)
                    detail = "; ".join(filter(None, (detail, stored)))
                detail = "; ".join(filter(None, (detail, match.inside)))
                decisions.append(Decision(
                    role=roles[operand], gemm=gemm, direction=direction, shape=_shape(operand, match, product),
                    quantizer=quantizer, skip_reason=reason, detail=detail, form=match.form, site=self.site,
                    flops=flops, **about,
                ))  # fmt: skip
        self.site += 1
        return tuple(decisions)

    def with_slots(self, answers: Mapping[str, Answer], match: Match, product: Product) -> dict[str, Quantizer]:
        """Returns the quantizers, each request of delayed scaling with a slot of the graph's state for each group.

        Linears that read the same tensor, such as those of q, k and v, share its slot, and one quantization.
        """
        sources = {"input": tensor_of(product.lhs), "weight": product.rhs} if match.form == "linear" else {}
        groups = product.weights if isinstance(product.weights, int) else 1

        def add(request: DelayedScalingRequest, operand: str, dtype: torch.dtype) -> int:
            tensor = (sources.get(operand), operand, match.autocast)
            if tensor in self.shared:
                self.slots.check(request, (match.name, operand, 0))
                return self.shared[tensor]
            first, *_ = (self.slots.add(request, (match.name, operand, 0), dtype) for _ in range(groups))
            if operand in sources:
                self.shared[tensor] = first
            return first

        quantizers: dict[str, Quantizer] = {}
        request: DelayedScalingRequest | None = None
        for operand, answer in answers.items():
            if isinstance(answer, DelayedScalingRequest):
                request, dtype = answer, answer.fp8_format.dtype(operand)
                answer = Float8Quantizer(dtype, add(answer, operand, dtype))
            quantizers[operand] = answer
        if request is not None and "grad_output" not in answers:
            # without gradients nobody asks for it, but the slots stay those of the training graph
            add(request, "grad_output", request.fp8_format.dtype("grad_output"))
        return quantizers

    def attention(self, match: Match) -> Match:
        """Resolves a match that is an attention, or one of the two products of an attention."""
        whole, answer, attended = [match], ResolvedAttention(skip=match.skip or (SkipReason.HIGH_PRECISION, "")), None
        attention = match.attention
        if attention is not None:
            whole = [m for m in self.matches if m.attention is not None and m.attention.node is attention.node]
            if attention.node not in self.attentions:
                self.roles += attention_roles(match.name).values()
                reasons = (_unusable_tensors(m, product, self.allow_float64) for m in whole for product in m.products)
                skip = next(filter(None, reasons), None)
                answer = ResolvedAttention(skip=skip or answer.skip)
                if skip is None:
                    answer = resolve_attention(attention, whole[-1], self.recipe, self.slots)
                resolved = replace(attention, spec=answer.spec)
                self.attentions[attention.node] = answer, _attended(whole, resolved, self.site)
            answer, attended = self.attentions[attention.node]
            attention = replace(attention, spec=answer.spec)
        products = []
        for index, (product, needs_grad) in enumerate(zip(match.products, match.needs_grad, strict=True)):
            slot_of = SCORES if index == 0 and match is whole[0] else CONTEXT
            roles = {operand: QuantizerRole("dpa", slot, match.name) for operand, slot in slot_of.items()}
            outcome = partial(attention_outcome, answer, slot_of)
            about = {"attention": attended, "part": "QK^T" if slot_of is SCORES else "PV"}
            decisions = self.decisions(match, product, needs_grad, roles, outcome, **about)
            products.append(Resolved(quantizers=None, decisions=decisions))
        return replace(match, attention=attention, resolved=tuple(products))


def resolve(
    matches: Sequence[Match],
    recipe: Recipe,
    slots: Slots | None = None,
    *,
    allow_float64: bool = False,
    first_site: int = 0,
    stored_weights: bool = False,
    all_ranks: bool = False,
) -> tuple[list[Match], list[QuantizerRole]]:
    """Returns the matches with their quantizers and decisions, and the roles that the recipe was asked for.

    Operands with delayed scaling or stochastic rounding get a place in `slots`. With `stored_weights` weights are kept
    quantized. `all_ranks` says that delayed scaling takes the largest amaxes of all ranks.

    Raises RecipeError for a pair that cannot multiply, naming layer, GEMM and both quantizers.
    """
    sources: defaultdict[fx.Node, str] = defaultdict(lambda: f"{first_site}.{len(sources)}")
    resolver = _Resolver(
        matches=matches, recipe=recipe, slots=Slots() if slots is None else slots, site=first_site,
        allow_float64=allow_float64, stored_weights=stored_weights, all_ranks=all_ranks, sources=sources,
    )  # fmt: skip
    return [resolver.match(match) for match in matches], resolver.roles
