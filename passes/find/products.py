"""Products by their own names: each function binds an op's arguments and says which axes it contracts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxquant.compat.values import statically_known_true
from fxquant.decisions import SkipReason
from fxquant.passes.find.contraction import (
    Site,
    by_flops,
    contract,
    contraction_of,
    multiply,
    requires_grad,
    settle,
    transposed,
)
from fxquant.passes.find.facts import Contraction, Finish, Gemm2d, Label, Match, Operand, Product, product_of
from fxquant.passes.graph.builder import Builder
from fxquant.passes.graph.values import value_of

aten = torch.ops.aten


def linear(site: Site, input: fx.Node, weight: fx.Node, bias: fx.Node | None = None) -> Match:
    """`F.linear`: the second operand is the weight, whatever computed it."""
    rows = _axes("m", value_of(input).ndim - 1)
    columns = _axes("n", value_of(weight).ndim - 1)
    left, right = Operand.of(input, (*rows, "k")), Operand.of(weight, (*columns, "k"))
    return contract(site, left, right, (*rows, *columns), rhs_is_weight=True, bias=bias)


def matmul(site: Site, input: fx.Node, other: fx.Node) -> Match:
    """`@` with its broadcasting; also `mm`, `bmm`, `mv` and `dot`, which are `@` of fixed ranks."""
    batch = max(value_of(input).ndim, value_of(other).ndim) - 2
    left, right = _matmul_labels(value_of(input).ndim), _matmul_labels(value_of(other).ndim, right=True)
    ends = tuple(label for label in ("m", "n") if label in left + right)
    return contract(site, Operand.of(input, left), Operand.of(other, right), (*_axes("b", batch)[::-1], *ends))


def mm(site: Site, input: fx.Node, mat2: fx.Node) -> Match:
    """`mm`, `bmm` and `mv`, under the name that their second operand has there."""
    return matmul(site, input, mat2)


def mv(site: Site, input: fx.Node, vec: fx.Node) -> Match:
    """A matrix times a vector."""
    return matmul(site, input, vec)


def dot(site: Site, input: fx.Node, tensor: fx.Node) -> Match:
    """A vector times a vector."""
    return matmul(site, input, tensor)


def inner(site: Site, input: fx.Node, other: fx.Node) -> Match | None:
    """The last axes contracted; of two numbers, a multiplication."""
    if value_of(input).ndim == 0 or value_of(other).ndim == 0:
        return None
    rows, columns = _axes("m", value_of(input).ndim - 1), _axes("n", value_of(other).ndim - 1)
    return contract(site, Operand.of(input, (*rows, "k")), Operand.of(other, (*columns, "k")), (*rows, *columns))


def addmm(site: Site, input: fx.Node, mat1: fx.Node, mat2: fx.Node, **factors: Any) -> Match:
    """`beta * input + alpha * mat1 @ mat2`; `addbmm` contracts the batch axis as well."""
    ranks = value_of(mat1).ndim
    left, right = (("b", "m", "k"), ("b", "k", "n")) if ranks == 3 else (("m", "k"), ("k", "n"))
    return _added(site, input, Operand.of(mat1, left), Operand.of(mat2, right), "mn", **factors)


def addbmm(site: Site, input: fx.Node, batch1: fx.Node, batch2: fx.Node, **factors: Any) -> Match:
    """`beta * input + alpha * sum over b of batch1[b] @ batch2[b]`: a matmul with b * k inner features."""
    return addmm(site, input, batch1, batch2, **factors)


def baddbmm(site: Site, input: fx.Node, batch1: fx.Node, batch2: fx.Node, **factors: Any) -> Match:
    """`beta * input + alpha * batch1 @ batch2`, batch by batch."""
    left, right = Operand.of(batch1, "bmk"), Operand.of(batch2, "bkn")
    return _added(site, input, left, right, "bmn", **factors)


def addmv(site: Site, input: fx.Node, mat: fx.Node, vec: fx.Node, **factors: Any) -> Match:
    """`beta * input + alpha * mat @ vec`."""
    return _added(site, input, Operand.of(mat, "mk"), Operand.of(vec, "k"), "m", **factors)


def tensordot(site: Site, a: fx.Node, b: fx.Node, dims: Any = 2, dims_other: Any = None) -> Match:
    """`dims` is a count, a pair of lists, or (ATen) the two lists one after the other."""
    ranks = value_of(a).ndim, value_of(b).ndim
    if isinstance(dims, int):
        pairs = list(zip(range(ranks[0] - dims, ranks[0]), range(dims), strict=True))
    else:
        first, second = dims if dims_other is None else (dims, dims_other)
        pairs = [(i % ranks[0], j % ranks[1]) for i, j in zip(first, second, strict=True)]
    left: list[Label] = list(_axes("m", ranks[0]))
    right: list[Label] = list(_axes("n", ranks[1]))
    for index, (i, j) in enumerate(pairs):
        left[i] = right[j] = ("k", index)
    out = [label for label in (*left, *right) if label not in {("k", index) for index in range(len(pairs))}]
    return contract(site, Operand.of(a, left), Operand.of(b, right), out)


def einsum(site: Site, *args: Any, path: Any = None) -> Match | None:
    """Two operands that contract like a matmul, or a chain of weights applied to one activation."""
    if isinstance(args[0], fx.Node):  # operands and lists of axes in turn
        nodes, lists = list(args[: len(args) // 2 * 2 : 2]), args[1::2]
        out = tuple(args[-1]) if len(args) % 2 else None
        labels = _spread([tuple(axes) for axes in lists], out, [value_of(node).ndim for node in nodes])
    else:
        nodes = list(args[1]) if isinstance(args[1], (list, tuple)) else list(args[1:])
        left, arrow, right = args[0].replace(" ", "").partition("->")
        terms = [tuple(term.replace("...", ".")) for term in left.split(",")]
        out = tuple(right.replace("...", ".")) if arrow else None
        terms = [tuple(Ellipsis if label == "." else label for label in term) for term in terms]
        out = None if out is None else tuple(Ellipsis if label == "." else label for label in out)
        labels = _spread(terms, out, [value_of(node).ndim for node in nodes])
    *inputs, result = labels
    operands = [Operand.of(node, each) for node, each in zip(nodes, inputs, strict=True)]
    if len(operands) == 2:
        product = contract(site, operands[0], operands[1], result)
        # einsum multiplies elementwise, and costs no matmul, where nothing is contracted
        return product if product.emit or by_flops(site, nodes[0], nodes[1], False).m else None
    return chain(site, operands, result) if len(operands) > 2 else None


def chain_matmul(site: Site, *matrices: Any) -> Match:
    """`chain_matmul` and `multi_dot`: matrices in a row, of which the first and last may be vectors."""
    nodes = list(matrices[0]) if isinstance(matrices[0], (list, tuple)) else list(matrices)
    labels: list[tuple[Label, ...]] = [(index, index + 1) for index in range(len(nodes))]
    out: tuple[Label, ...] = (0, len(nodes))
    if value_of(nodes[0]).ndim == 1:
        labels[0], out = (1,), out[1:]
    if value_of(nodes[-1]).ndim == 1:
        labels[-1], out = (len(nodes) - 1,), out[:-1]
    operands = [Operand.of(node, each) for node, each in zip(nodes, labels, strict=True)]
    return contract(site, operands[0], operands[1], out) if len(operands) == 2 else chain(site, operands, out)


def chain(site: Site, operands: Sequence[Operand], out: Sequence[Label]) -> Match:
    """Several weights applied to one activation, from the left: each step a linear on the result of the one before."""
    weights = [site.is_weight(operand.node) for operand in operands]
    start = weights.index(False) if False in weights else 0
    current, rest = operands[start], [*operands[:start], *operands[start + 1 :]]
    steps: list[Contraction] = []
    grads: list[tuple[bool, bool]] = []
    trained, grad = requires_grad(site.node), requires_grad(current.node)
    while rest:
        operand = next((each for each in rest if set(each.labels) & set(current.labels)), rest[0])
        rest.remove(operand)
        needed = set(out).union(*(each.labels for each in rest))
        kept = tuple(dict.fromkeys(label for label in (*current.labels, *operand.labels) if label in needed))
        step = contraction_of(current, operand, kept if rest else out, rhs_is_weight=True)
        linear_like = site.is_weight(operand.node) and not isinstance(step, str) and not step.batch
        if isinstance(step, str) or not linear_like or not step.columns or not step.inner:
            product = by_flops(site, operands[start].node, operand.node, any(weights))
            detail = "not one activation that meets one weight after the other"
            return site.match("linear" if any(weights) else "matmul", product, skip=(SkipReason.MULTI_PRODUCT, detail))
        steps.append(step)
        grads.append((trained and grad, trained and requires_grad(operand.node)))
        grad = grad or requires_grad(operand.node)
        sizes = {**dict(zip(operand.labels, operand.sizes, strict=True)),
                 **dict(zip(current.labels, current.sizes, strict=True))}  # fmt: skip
        # the node itself stands for every intermediate result: it has their dtype
        current = Operand(node=site.node, labels=kept, sizes=tuple(sizes[label] for label in kept))

    slots = [site.node.all_input_nodes.index(step.right.node) for step in steps]
    start_slot = site.node.all_input_nodes.index(operands[start].node)

    def emit(builder: Builder, gemm: Gemm2d) -> fx.Node:
        inputs = builder.anchor.all_input_nodes
        result = inputs[start_slot]
        for index, (step, slot) in enumerate(zip(steps, slots, strict=True)):
            result = multiply(builder, gemm, index, step, result, inputs[slot])
        return settle(builder, result)

    return site.match("linear", *(step.product(True) for step in steps), emit=emit, needs_grad=tuple(grads))


def bilinear(site: Site, input1: fx.Node, input2: fx.Node, weight: fx.Node, bias: fx.Node | None = None) -> Match:
    """`nn.Bilinear`: out[o] = x1 W[o] x2."""
    columns, first, second = value_of(weight).shape
    rows = product_of(value_of(site.node).shape[:-1])
    product = Product(m=rows, k=first * second, n=columns, lhs=input1, rhs=weight)
    return site.match("linear", product, skip=(SkipReason.BILINEAR, f"[{columns}, {first}, {second}]"))


def convolution(
    site: Site,
    input: fx.Node,
    weight: fx.Node,
    bias: fx.Node | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    transposed: bool = False,
    output_padding: Any = 0,
    groups: int = 1,
) -> Match:
    """A 1x1 convolution is a linear over channels, one whose stride is its kernel a linear over patches."""
    out_channels, in_channels, *kernel = value_of(weight).shape
    count = len(kernel)
    shape = value_of(input).shape
    space, batched = tuple(shape[-count:]), len(shape) == count + 2
    many = tuple(shape[:1]) if batched else ()
    stride, padding, dilation = (_per_axis(value, count) for value in (stride, padding, dilation))
    if transposed:  # the weight is [in, out / groups, *kernel]
        rows, columns = product_of(many + space), in_channels * product_of(kernel)
        product = Product(m=rows, k=out_channels, n=columns, lhs=input, rhs=weight)
        return site.match("linear", product, skip=(SkipReason.CONVOLUTION, "a transposed convolution"))
    pointwise = all(isinstance(size, int) and size == 1 for size in kernel)
    unpadded = padding == ("valid",) * count or padding == (0,) * count or (pointwise and padding == ("same",) * count)
    patches = all(step == size and isinstance(size, int) for step, size in zip(stride, kernel, strict=True))
    divides = all(statically_known_true(size % step == 0) for size, step in zip(space, stride, strict=True))
    undilated = pointwise or dilation == (1,) * count
    if not (patches and divides and unpadded and undilated and groups == 1):
        outputs = tuple(value_of(site.node).shape[-count:])
        rows = product_of(many + outputs)
        product = Product(m=rows, k=in_channels * product_of(kernel), n=out_channels, lhs=input, rhs=weight)
        detail = f"kernel {_text(kernel)}, stride {_text(stride)}, padding {_text(padding)}, groups {groups}"
        return site.match("linear", product, skip=(SkipReason.CONVOLUTION, detail))

    batch: tuple[Label, ...] = ("batch",) if batched else ()
    axes, taps = _axes("space", count), _axes("tap", count)
    if pointwise:
        left = Operand.of(input, (*batch, "in", *axes))
        right = Operand.of(weight, ("out", "in", *(None for _ in kernel)))
    else:
        labels = tuple(label for pair in zip(axes, taps, strict=True) for label in pair)
        parts = tuple(part for size, step in zip(space, kernel, strict=True) for part in (size // step, step))
        left = Operand(
            node=input,
            labels=(*batch, "in", *labels),
            sizes=(*shape[:-count], *parts),
            view=_patches(len(shape) - count, tuple(kernel)),
        )
        right = Operand.of(weight, ("out", "in", *taps))
    return contract(site, left, right, (*batch, "out", *axes), rhs_is_weight=True, bias=bias)


def conv(
    site: Site,
    input: fx.Node,
    weight: fx.Node,
    bias: fx.Node | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Match:
    """`conv1d`, `conv2d`, `conv3d`."""
    return convolution(site, input, weight, bias, stride, padding, dilation, groups=groups)


def conv_transpose(site: Site, input: fx.Node, weight: fx.Node, *_: Any, **__: Any) -> Match:
    """`conv_transpose1d`, 2d and 3d: found, never rewritten."""
    return convolution(site, input, weight, transposed=True)


def grouped_mm(
    site: Site, input: fx.Node, mat2: fx.Node, offs: fx.Node | None = None, bias: Any = None, out_dtype: Any = None
) -> Match:
    """Rows in groups, each with a weight of its own; `offs` are the ends of the groups. No autocast touches it.

    Of two matrices the contracted axis is in groups, as in the gradient of a weight.
    """
    ranks = value_of(input).ndim, value_of(mat2).ndim
    if ranks == (3, 3):
        match = contract(site, Operand.of(input, "bmk"), Operand.of(mat2, "bkn"), "bmn", rhs_is_weight=True)
    elif ranks == (2, 2) or offs is None or bias is not None:
        match = _ungrouped(site, input, mat2)
    elif ranks == (2, 3):
        match = _by_rows(site, input, mat2, offs)
    else:  # [G, M, K] x [K, N] in groups of columns is the transpose of rows in groups
        match = _by_rows(site, mat2, input, offs, columns=True)
    return replace(match, takes_autocast=False)


def _by_rows(site: Site, rows: fx.Node, weight: fx.Node, offs: fx.Node, columns: bool = False) -> Match:
    """Ragged rows [M, K] and weights [G, K, N]; `columns` where both and the result are transposed in the node."""
    ragged, (groups, *matrix) = value_of(rows).shape, value_of(weight).shape
    (m, k), n = reversed(ragged) if columns else ragged, matrix[0] if columns else matrix[1]
    product = Product(m=m, k=k, n=n, groups=groups, lhs=rows, rhs=weight)
    if statically_known_true(groups == 0):
        return site.match("grouped_linear", product, skip=(SkipReason.TOO_SMALL, "no group"))
    slots = [site.node.all_input_nodes.index(each) for each in (rows, weight, offs)]

    def emit(builder: Builder, gemm: Gemm2d) -> fx.Node:
        lhs, rhs, ends = (builder.anchor.all_input_nodes[slot] for slot in slots)
        if columns:
            return settle(builder, transposed(builder, gemm(0, transposed(builder, lhs), rhs, offs=ends)))
        return settle(builder, gemm(0, lhs, transposed(builder, rhs), offs=ends))

    return site.match("grouped_linear", product, emit=emit)


def _ungrouped(site: Site, input: fx.Node, mat2: fx.Node) -> Match:
    """A grouped product that is no linear layer."""
    left, right = value_of(input).shape, value_of(mat2).shape
    product = Product(m=left[-2], k=left[-1], n=right[-1], lhs=input, rhs=mat2, rhs_is_weight=site.is_weight(mat2))
    detail = f"[{', '.join(map(str, left))}] x [{', '.join(map(str, right))}]: the contracted axis is in groups"
    return site.match("grouped_linear", product, skip=(SkipReason.GROUPED, detail))


def _added(
    site: Site,
    input: fx.Node,
    left: Operand,
    right: Operand,
    out: str,
    *,
    beta: Any = 1,
    alpha: Any = 1,
    in_place: bool = False,
) -> Match:
    """`beta * input + alpha * left @ right`: the bias of the GEMM where that is all it is."""
    value, columns = value_of(input), right.sizes[-1]
    plain = _is(beta, 1) and _is(alpha, 1) and not in_place
    bias = plain and value.ndim == 1 and statically_known_true(value.shape[0] == columns)
    if bias and out == "mn" and not site.is_weight(left.node):
        return contract(site, left, right, out, bias=input)
    slots = {"input": site.node.all_input_nodes.index(input)}
    for name, factor in (("alpha", alpha), ("beta", beta)):
        if isinstance(factor, fx.Node):
            slots[name] = site.node.all_input_nodes.index(factor)

    def finish(builder: Builder, result: fx.Node) -> fx.Node:
        inputs = builder.anchor.all_input_nodes
        this = inputs[slots["input"]]
        scale = inputs[slots["alpha"]] if "alpha" in slots else alpha
        weight = inputs[slots["beta"]] if "beta" in slots else beta
        if not _is(alpha, 1):
            result = builder.call(torch.mul, result, scale)
        if not _is(beta, 0):
            result = builder.call(torch.add, result, this, alpha=weight)
        return builder.call(aten.copy_.default, this, result) if in_place else result

    return contract(site, left, right, out, finish=finish)


def _is(factor: Any, number: int) -> bool:
    return isinstance(factor, (int, float)) and factor == number


def _axes(name: str, count: int) -> tuple[Label, ...]:
    return tuple((name, index) for index in range(count))


def _matmul_labels(ndim: int, *, right: bool = False) -> tuple[Label, ...]:
    if ndim == 1:
        return ("k",)
    return (*_axes("b", ndim - 2)[::-1], *(("k", "n") if right else ("m", "k")))


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


def _fill(term: tuple[Any, ...], count: int) -> tuple[Label, ...]:
    axes = _axes("...", count)[::-1]
    return tuple(each for label in term for each in (axes if label is Ellipsis else (label,)))


def _per_axis(value: Any, count: int) -> tuple[Any, ...]:
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return values * count if len(values) == 1 else values


def _text(values: Sequence[Any]) -> str:
    return "x".join(map(str, values))


def _patches(first: int, kernel: tuple[int, ...]) -> Finish:
    """Splits every axis from `first` on into positions and taps."""

    def view(builder: Builder, node: fx.Node) -> fx.Node:
        for axis in reversed(range(len(kernel))):
            node = builder.call(torch.unflatten, node, first + axis, (-1, kernel[axis]))
        return node

    return view


__all__ = [
    "addbmm", "addmm", "addmv", "baddbmm", "bilinear", "chain_matmul", "conv", "conv_transpose", "convolution",
    "dot", "einsum", "grouped_mm", "inner", "linear", "matmul", "mm", "mv", "tensordot",
]  # fmt: skip
