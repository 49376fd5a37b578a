"""Resolve: asks the recipe for the quantizers of every product and checks that each GEMM's pair can multiply.

Everything that could go wrong in a GEMM, in the backward included, is found here, before anything runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxquant.compat.device import capability, card_name
from fxquant.compat.values import size_hint, upper_bound
from fxquant.decisions import Attended, Decision, Matmul, Size, SkipReason
from fxquant.errors import RecipeError
from fxquant.formats import gemm_mismatch
from fxquant.passes.find.contraction import product_of
from fxquant.passes.find.facts import Attention, Match, Product, Resolved
from fxquant.passes.graph.values import Dim, value_of
from fxquant.passes.plan.attention import Skip, attention_decision, attention_roles, resolve_attention
from fxquant.quantizers import DelayedScalingRequest, Float8Quantizer, Quantizer, quantizer_text
from fxquant.recipes import Recipe
from fxquant.roles import GEMM_OPERANDS, Direction, Gemm, QuantizerRole
from fxquant.state import Slots

SMALLEST = 16
"""FP8 GEMMs want 16-byte rows: products with fewer input or output features stay as they are."""

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def tensor_type(operand: str, product: Product) -> str:
    """The role's tensor type: the right operand of a product of two activations is an input as well."""
    return "input" if operand == "weight" and not product.rhs_is_weight else operand


def _sizes(*dims: Dim) -> tuple[Size, ...]:
    return tuple(dim if isinstance(dim, int) else str(dim) for dim in dims)


def _shape(operand: str, product: Product) -> tuple[Size, ...]:
    m, k, n = product.m, product.k, product.n
    rows = {"input": (m, k), "weight": (n, k), "grad_output": (m, n)}[operand]
    groups = () if product.groups is None or operand != "weight" else (product.groups,)
    return _sizes(*product.batch, *groups, *rows)


def _flops(product: Product) -> int:
    return 2 * int(product_of(map(size_hint, (*product.batch, product.m, product.k, product.n))))


def _matmul(match: Match, product: Product, stored: bool, sources: dict[object, str]) -> Matmul | None:
    """What the product's time depends on; None for attention, whose products are one kernel."""
    lhs, rhs = value_of(product.lhs), value_of(product.rhs)
    if match.module_type == "dpa" or not isinstance(lhs, Tensor) or not isinstance(rhs, Tensor):
        return None
    dims = {"m": product.m, "k": product.k, "n": product.n}
    return Matmul(
        m=size_hint(product.m), k=size_hint(product.k), n=size_hint(product.n),
        most_m=upper_bound(product.m), batch=int(product_of(map(size_hint, product.batch))),
        batch_weights=bool(product.batch) and product.rhs_is_weight, groups=size_hint(product.groups or 0),
        dynamic="".join(name for name, dim in dims.items() if not isinstance(dim, int)),
        dtype=match.autocast or (lhs.dtype if lhs.dtype.itemsize == 1 else torch.promote_types(lhs.dtype, rhs.dtype)),
        input=sources[product.lhs], weight=sources[product.rhs], stored=stored and product.rhs_is_weight,
        device=card_name(lhs.device), capability=capability(lhs.device),
    )  # fmt: skip


class _Sources(dict[object, str]):
    """A name for each node that is an operand, unlike those in other graphs."""

    def __init__(self, graph: int) -> None:
        super().__init__()
        self.graph = graph

    def __missing__(self, node: object) -> str:
        self[node] = f"{self.graph}.{len(self)}"
        return self[node]


def gemms(needs_grad: tuple[bool, bool]) -> list[Gemm]:
    """The GEMMs that a product runs, given whether (lhs, rhs) get a gradient."""
    return [Gemm.FPROP] + [Gemm.DGRAD] * needs_grad[0] + [Gemm.WGRAD] * needs_grad[1]


def _cannot(match: Match, product: Product, allow_float64: bool) -> tuple[SkipReason, str] | None:
    """Why the tensors themselves cannot be quantized."""
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


def _check_pairs(match: Match, quantizers: dict[str, Quantizer], wanted: list[Gemm]) -> None:
    for gemm in wanted:
        (left, left_side), (right, right_side) = GEMM_OPERANDS[gemm]
        problem = gemm_mismatch(quantizers[left].spec(left_side), quantizers[right].spec(right_side))
        if problem is None:
            continue
        sides = ((left, left_side), (right, right_side))
        first, second = (f"{op}.{side} {quantizer_text(quantizers[op].side(side))}" for op, side in sides)
        raise RecipeError(
            f"layer {match.name or '<model>'!r}: {gemm} cannot multiply {first} by {second}: {problem}. "
            f"Give both operands of {gemm} quantizers of one kind; HybridQuantizer sets each direction by itself."
        )


Answers = dict[str, Quantizer | DelayedScalingRequest]
"""What the recipe answers, by operand. It is asked once for each."""


Shared = dict[Any, int]
"""The slots of tensors that several products may read, by the tensor."""


def _with_slots(
    answers: Answers, match: Match, product: Product, slots: Slots, groups: int, shared: Shared
) -> dict[str, Quantizer]:
    """The quantizers, with a slot of the graph's state for each group and request of delayed scaling.

    Linears that read the same tensor, such as those of q, k and v, share its slot, and one quantization.
    """
    read = {"input": product.lhs, "weight": product.rhs} if match.form == "linear" else {}

    def add(request: DelayedScalingRequest, operand: str, dtype: torch.dtype) -> int:
        tensor = (read.get(operand), operand, match.autocast)
        if tensor in shared:
            slots.check(request, (match.name, operand, 0))
            return shared[tensor]
        first, *_ = (slots.add(request, (match.name, operand, 0), dtype) for _ in range(groups))
        if operand in read:
            shared[tensor] = first
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


def _needs_state(answer: Quantizer | DelayedScalingRequest) -> bool:
    return isinstance(answer, DelayedScalingRequest) or answer.operand_spec().is_stochastic


def _ungroupable(answers: Answers) -> tuple[SkipReason, str] | None:
    """Why a quantizer of a grouped product cannot take all groups at once."""
    for operand, answer in answers.items():
        if isinstance(answer, DelayedScalingRequest):
            continue
        for direction in Direction:
            spec, name = answer.spec(direction), type(answer.side(direction)).__name__
            if spec.key:
                return SkipReason.GROUPED, f"{name}, a quantizer of your own for {operand}, takes one matrix at a time"
    return None


def _resolve_product(
    match: Match, index: int, site: int, recipe: Recipe, allow_float64: bool, roles: list[QuantizerRole], slots: Slots,
    shared: Shared, matmul: Matmul | None,
) -> Resolved:  # fmt: skip
    product, wanted = match.products[index], gemms(match.needs_grad[index])
    operands = ["input", "weight"] + ["grad_output"] * (len(wanted) > 1)
    role_of = {op: QuantizerRole(match.module_type, tensor_type(op, product), match.name) for op in operands}
    roles += role_of.values()
    skip = _cannot(match, product, allow_float64)
    quantizers: dict[str, Quantizer] | None = None
    numbers: dict[str, int] = {}
    groups = 1 if product.weights is None else product.weights
    answers = {operand: recipe.quantizer(role) for operand, role in role_of.items()} if skip is None else {}
    stateful = [answer for answer in answers.values() if _needs_state(answer)]
    uncounted = not isinstance(groups, int) and any(isinstance(answer, DelayedScalingRequest) for answer in stateful)
    if skip is None and stateful and (uncounted or not match.takes_state):
        region = "this region is called as a function of its own"
        skip = SkipReason.STATE, region if not uncounted else "the number of groups is not known"
    if skip is None and product.weights is not None:
        skip = _ungroupable(answers)
    if skip is None:
        quantizers = _with_slots(answers, match, product, slots, groups if isinstance(groups, int) else 1, shared)
        _check_pairs(match, quantizers, wanted)
        for operand, quantizer in quantizers.items():
            if quantizer.operand_spec().is_stochastic:
                numbers[operand] = slots.add_rounded((match.name, operand, 0))
    decisions = []
    for gemm in wanted:
        for operand, direction in GEMM_OPERANDS[gemm]:
            used, reason, detail = None, skip, ""
            if quantizers is not None:
                used = quantizers[operand].side(direction)
                if direction is Direction.COLUMNWISE and quantizers[operand].operand_spec().from_rowwise:
                    detail = "from the dequantized rowwise half"
                detail = detail or match.remark
                if quantizers[operand].spec(direction).is_identity:
                    why = SkipReason.ATTENTION if match.remark else SkipReason.HIGH_PRECISION
                    used, reason = None, (why, match.remark)
            decisions.append(
                Decision(
                    role=role_of[operand], gemm=gemm, direction=direction, shape=_shape(operand, product),
                    quantizer=used, skip_reason=reason[0] if used is None and reason else None,
                    detail=reason[1] if used is None and reason and reason[1] else detail, form=match.form, site=site,
                    flops=_flops(product), matmul=matmul,
                )
            )  # fmt: skip
    if quantizers is not None and all(quantizers[op].is_identity for op in quantizers):
        quantizers = None
    return Resolved(quantizers=quantizers, decisions=decisions, numbers=numbers)


_Known = tuple[dict[str, Quantizer], Skip | None, Attended]
"""What was resolved of an attention: its quantizers by slot or why it stays as it is, and what its time depends on."""


def _attended(whole: Sequence[Match], attention: Attention, site: int) -> Attended:
    """What the time of an attention depends on, whose first product has this site."""
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


def _resolve_attention(
    match: Match, matches: Sequence[Match], site: int, recipe: Recipe, allow_float64: bool,
    roles: list[QuantizerRole], slots: Slots, known: dict[int, _Known],
) -> list[Resolved]:  # fmt: skip
    """The products of a match that is an attention, or one half of one; `known` are attentions resolved already."""
    whole = [match] if match.attention is None else [m for m in matches if m.attention is match.attention]
    quantizers: dict[str, Quantizer] = {}
    skip, attended = match.skip, None
    if match.attention is not None:
        if id(match.attention) not in known:
            roles += attention_roles(match.name).values()
            cannot = [_cannot(m, product, allow_float64) for m in whole for product in m.products]
            skip = next(filter(None, cannot), None)
            quantizers, skip = (
                resolve_attention(match.attention, whole[-1], recipe, slots) if skip is None else ({}, skip)
            )
            known[id(match.attention)] = (quantizers, skip, _attended(whole, match.attention, site))
        quantizers, skip, attended = known[id(match.attention)]
    resolved = []
    for index, product in enumerate(match.products):
        first = index == 0 and match is whole[0]
        decisions = [
            attention_decision(
                match, product, first, gemm, i, quantizers, skip,
                Decision(
                    role=QuantizerRole("dpa"), gemm=gemm, direction=direction, shape=_shape(operand, product),
                    skip_reason=SkipReason.ATTENTION, form=match.form, site=site + index, flops=_flops(product),
                    attention=attended,
                ),
            )
            for gemm in gemms(match.needs_grad[index])
            for i, (operand, direction) in enumerate(GEMM_OPERANDS[gemm])
        ]  # fmt: skip
        resolved.append(Resolved(quantizers=None, decisions=decisions))
    return resolved


def resolve(
    matches: Sequence[Match],
    recipe: Recipe,
    slots: Slots | None = None,
    *,
    allow_float64: bool = False,
    first_site: int = 0,
    stored_weights: bool = False,
) -> tuple[list[Decision], list[QuantizerRole]]:
    """Fills `match.resolved` and returns all decisions, and all roles that were found.

    What asks for delayed scaling or rounds stochastically gets its place in `slots`. With `stored_weights` weights are
    kept quantized.

    Raises RecipeError for a pair that cannot multiply, naming layer, GEMM and both quantizers.
    """
    decisions: list[Decision] = []
    roles: list[QuantizerRole] = []
    slots = Slots() if slots is None else slots
    site, shared, sources = first_site, Shared(), _Sources(first_site)
    attentions: dict[int, _Known] = {}
    for match in matches:
        if match.module_type == "dpa" and match.form != "multi_head_attention_forward":
            match.resolved = _resolve_attention(
                match, matches, site, recipe, allow_float64, roles, slots, attentions
            )  # fmt: skip
            decisions += [decision for resolved in match.resolved for decision in resolved.decisions]
            site += len(match.products)
            continue
        match.resolved = []
        for index in range(len(match.products)):
            matmul = _matmul(match, match.products[index], stored_weights, sources)
            resolved = _resolve_product(match, index, site, recipe, allow_float64, roles, slots, shared, matmul)
            match.resolved.append(resolved)
            decisions += match.resolved[-1].decisions
            site += 1
    return decisions, roles
