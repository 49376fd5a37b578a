"""Products by their own names: each function binds an operator's arguments and says which axes it contracts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from fxquant.compat.values import statically_known_true
from fxquant.decisions import SkipReason
from fxquant.passes.find.contraction import contract, contraction_of
from fxquant.passes.find.facts import Contraction, Gemm2d, Label, Match, Operand, Product, axes, product_of
from fxquant.passes.find.layout import is_one, multiply
from fxquant.passes.find.opaque import node_flops, refused
from fxquant.passes.find.site import Site, requires_grad
from fxquant.passes.graph.builder import Builder
from fxquant.passes.graph.values import value_of

aten = torch.ops.aten


def linear(site: Site, input: fx.Node, weight: fx.Node, bias: fx.Node | None = None) -> Match:
    """Reads `F.linear`: the second operand is the weight, whatever computed it."""
    rows = axes("m", value_of(input).ndim - 1)
    columns = axes("n", value_of(weight).ndim - 1)
    left, right = Operand.of(input, (*rows, "k")), Operand.of(weight, (*columns, "k"))
    return contract(site, left, right, (*rows, *columns), rhs_is_weight=True, bias=bias)


def matmul(site: Site, input: fx.Node, other: fx.Node) -> Match:
    """Reads `@` with its broadcasting; `mm`, `bmm`, `mv` and `dot` are `@` of fixed ranks."""
    batch = max(value_of(input).ndim, value_of(other).ndim) - 2
    left, right = _matmul_labels(value_of(input).ndim), _matmul_labels(value_of(other).ndim, right=True)
    ends = tuple(label for label in ("m", "n") if label in left + right)
    return contract(site, Operand.of(input, left), Operand.of(other, right), (*axes("b", batch)[::-1], *ends))


def rmatmul(site: Site, other: fx.Node, input: fx.Node) -> Match:
    """Reads `input @ other` as a method of the second operand."""
    return matmul(site, input, other)


def inner(site: Site, input: fx.Node, other: fx.Node) -> Match | None:
    """Contracts the last axes; a product with a number is no matmul."""
    if value_of(input).ndim == 0 or value_of(other).ndim == 0:
        return None
    rows, columns = axes("m", value_of(input).ndim - 1), axes("n", value_of(other).ndim - 1)
    return contract(site, Operand.of(input, (*rows, "k")), Operand.of(other, (*columns, "k")), (*rows, *columns))


def vecdot(site: Site, x: fx.Node, y: fx.Node, dim: int = -1) -> Match:
    """Contracts one axis of two tensors that broadcast."""
    ranks = value_of(x).ndim, value_of(y).ndim
    labels: list[Label] = list(axes("b", max(ranks)))
    labels[dim] = "k"
    left, right = (Operand.of(node, labels[max(ranks) - rank :]) for node, rank in zip((x, y), ranks, strict=True))
    return contract(site, left, right, [label for label in labels if label != "k"])


def addmm(site: Site, input: fx.Node, mat1: fx.Node, mat2: fx.Node, **factors: Any) -> Match:
    """Reads `beta * input + alpha * mat1 @ mat2`; `addbmm` contracts the batch axis as well."""
    ranks = value_of(mat1).ndim
    left, right = (("b", "m", "k"), ("b", "k", "n")) if ranks == 3 else (("m", "k"), ("k", "n"))
    return _added(site, input, (Operand.of(mat1, left), Operand.of(mat2, right)), "mn", **factors)


def baddbmm(site: Site, input: fx.Node, batch1: fx.Node, batch2: fx.Node, **factors: Any) -> Match:
    """Reads `beta * input + alpha * batch1 @ batch2`, batch by batch."""
    return _added(site, input, (Operand.of(batch1, "bmk"), Operand.of(batch2, "bkn")), "bmn", **factors)


def addmv(site: Site, input: fx.Node, mat: fx.Node, vec: fx.Node, **factors: Any) -> Match:
    """Reads `beta * input + alpha * mat @ vec`."""
    return _added(site, input, (Operand.of(mat, "mk"), Operand.of(vec, "k")), "m", **factors)


def tensordot(site: Site, a: fx.Node, b: fx.Node, dims: Any = 2, dims_other: Any = None) -> Match:
    """Contracts `dims`: a count, a pair of lists, or (ATen) the two lists one after the other."""
    ranks = value_of(a).ndim, value_of(b).ndim
    if isinstance(dims, int):
        pairs = list(zip(range(ranks[0] - dims, ranks[0]), range(dims), strict=True))
    else:
        first, second = dims if dims_other is None else (dims, dims_other)
        pairs = [(i % ranks[0], j % ranks[1]) for i, j in zip(first, second, strict=True)]
    left: list[Label] = list(axes("m", ranks[0]))
    right: list[Label] = list(axes("n", ranks[1]))
    for index, (i, j) in enumerate(pairs):
        left[i] = right[j] = ("k", index)
    out = [label for label in (*left, *right) if label not in {("k", index) for index in range(len(pairs))}]
    return contract(site, Operand.of(a, left), Operand.of(b, right), out)


def einsum(site: Site, *args: Any, path: Any = None) -> Match | None:
    """Reads two operands that contract like a matmul, or a chain of weights applied to one activation."""
    if isinstance(args[0], fx.Node):  # operands and lists of axes in turn
        nodes, terms = list(args[: len(args) // 2 * 2 : 2]), [tuple(labels) for labels in args[1::2]]
        out = tuple(args[-1]) if len(args) % 2 else None
    else:
        nodes = list(args[1]) if isinstance(args[1], (list, tuple)) else list(args[1:])
        left, arrow, right = args[0].replace(" ", "").replace("...", ".").partition("->")
        terms, out = [_letters(term) for term in left.split(",")], _letters(right) if arrow else None
    *inputs, result = _spread(terms, out, [value_of(node).ndim for node in nodes])
    operands = [Operand.of(node, term) for node, term in zip(nodes, inputs, strict=True)]
    if len(operands) == 2:
        product = contract(site, operands[0], operands[1], result)
        # einsum multiplies elementwise, and costs no matmul, where nothing is contracted, or an axis of one
        contracts = product.emit and not is_one(product.products[0].k)
        return product if contracts or node_flops(site.node) else None
    return chain(site, operands, result) if len(operands) > 2 else None


def chain_matmul(site: Site, *matrices: Any) -> Match:
    """Reads `chain_matmul` and `multi_dot`: matrices in a row, the first and last of which may be vectors."""
    nodes = list(matrices[0]) if isinstance(matrices[0], (list, tuple)) else list(matrices)
    labels: list[tuple[Label, ...]] = [(index, index + 1) for index in range(len(nodes))]
    out: tuple[Label, ...] = (0, len(nodes))
    if value_of(nodes[0]).ndim == 1:
        labels[0], out = (1,), out[1:]
    if value_of(nodes[-1]).ndim == 1:
        labels[-1], out = (len(nodes) - 1,), out[:-1]
    operands = [Operand.of(node, term) for node, term in zip(nodes, labels, strict=True)]
    return contract(site, operands[0], operands[1], out) if len(operands) == 2 else chain(site, operands, out)


def chain(site: Site, operands: Sequence[Operand], out: Sequence[Label]) -> Match:
    """Applies several weights to one activation, from the left: a step is a linear on the result of the one before."""
    weights = [site.is_weight(operand.node) for operand in operands]
    start = weights.index(False) if False in weights else 0
    current, rest = operands[start], [*operands[:start], *operands[start + 1 :]]
    steps: list[Contraction] = []
    grads: list[tuple[bool, bool]] = []
    trained, grad = requires_grad(site.node), requires_grad(current.node)
    while rest:
        operand = next((other for other in rest if set(other.labels) & set(current.labels)), rest[0])
        rest.remove(operand)
        needed = set(out).union(*(other.labels for other in rest))
        kept = tuple(dict.fromkeys(label for label in (*current.labels, *operand.labels) if label in needed))
        step = contraction_of(current, operand, kept if rest else out, rhs_is_weight=True)
        linear_like = site.is_weight(operand.node) and not isinstance(step, str) and not step.batch
        if isinstance(step, str) or not linear_like or not step.columns or not step.inner:
            kind, lhs = "linear" if any(weights) else "matmul", operands[start].node
            skip = SkipReason.MULTI_PRODUCT, "not one activation that meets one weight after the other"
            return refused(site, kind, lhs, operand.node, any(weights), skip)
        steps.append(step)
        grads.append((trained and grad, trained and requires_grad(operand.node)))
        grad = grad or requires_grad(operand.node)
        # the node itself stands for every intermediate result: it has their dtype
        sizes = tuple((current if label in current.labels else operand).size(label) for label in kept)
        current = Operand(node=site.node, labels=kept, sizes=sizes)

    def write(builder: Builder, gemm: Gemm2d, result: fx.Node, *weights: fx.Node) -> fx.Node:
        for index, (step, weight) in enumerate(zip(steps, weights, strict=True)):
            result = multiply(builder, partial(gemm, index), step, result, weight)
        return result

    emit = site.emit(write, operands[start].node, *(step.right.node for step in steps))
    return site.match("linear", *(step.product(True) for step in steps), emit=emit, needs_grad=tuple(grads))


def bilinear(site: Site, input1: fx.Node, input2: fx.Node, weight: fx.Node, bias: fx.Node | None = None) -> Match:
    """Describes `nn.Bilinear`: out[o] = x1 W[o] x2."""
    columns, first, second = value_of(weight).shape
    rows = product_of(value_of(site.node).shape[:-1])
    product = Product(m=rows, k=first * second, n=columns, lhs=input1, rhs=weight)
    return site.match("linear", product, skip=(SkipReason.BILINEAR, f"[{columns}, {first}, {second}]"))


def _added(
    site: Site, addend: fx.Node, operands: tuple[Operand, Operand], out: str, *, beta: Any = 1, alpha: Any = 1,
    in_place: bool = False,
) -> Match:  # fmt: skip
    """Reads `beta * addend + alpha * left @ right`; an addend that can be the bias of the GEMM is that."""
    left, right = operands
    value = value_of(addend)
    plain = _is(beta, 1) and _is(alpha, 1) and not in_place
    bias = plain and value.ndim == 1 and statically_known_true(value.shape[0] == right.sizes[-1])
    if bias and out == "mn" and not site.is_weight(left.node):
        return contract(site, left, right, out, bias=addend)
    # numbers, or the places of nodes among the inputs
    places = {x: site.slots(x)[0] for x in (addend, alpha, beta) if isinstance(x, fx.Node)}

    def finish(builder: Builder, result: fx.Node) -> fx.Node:
        inputs = builder.anchor.all_input_nodes
        addend_now, alpha_now, beta_now = (inputs[places[x]] if x in places else x for x in (addend, alpha, beta))
        if not _is(alpha, 1):
            result = builder.call(torch.mul, result, alpha_now)
        if not _is(beta, 0):
            result = builder.call(torch.add, result, addend_now, alpha=beta_now)
        return builder.call(aten.copy_.default, addend_now, result) if in_place else result

    return contract(site, left, right, out, finish=finish)


def _is(factor: Any, number: int) -> bool:
    return isinstance(factor, (int, float)) and factor == number


def _matmul_labels(ndim: int, *, right: bool = False) -> tuple[Label, ...]:
    if ndim == 1:
        return ("k",)
    return (*axes("b", ndim - 2)[::-1], *(("k", "n") if right else ("m", "k")))


def _spread(
    terms: Sequence[tuple[Any, ...]], out: tuple[Any, ...] | None, ranks: Sequence[int]
) -> list[tuple[Label, ...]]:
    """Replaces every ellipsis by labels of its axes, counted from the right, and writes out an implicit result."""
    spread: list[tuple[Label, ...]] = []
    widest = 0
    for term, rank in zip(terms, ranks, strict=True):
        count = rank - sum(label is not Ellipsis for label in term)
        widest = max(widest, count if Ellipsis in term else 0)
        spread.append(_fill(term, count))
    if out is None:
        letters = [label for term in terms for label in term if label is not Ellipsis]
        out = (Ellipsis, *sorted(label for label in set(letters) if letters.count(label) == 1))
    return [*spread, _fill(out, widest)]


def _letters(term: str) -> tuple[Any, ...]:
    return tuple(Ellipsis if letter == "." else letter for letter in term)


def _fill(term: tuple[Any, ...], count: int) -> tuple[Label, ...]:
    ellipsis = axes("...", count)[::-1]
    return tuple(x for label in term for x in (ellipsis if label is Ellipsis else (label,)))
