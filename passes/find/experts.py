"""Experts: rows that are multiplied by matrices which an index picks from a stack, as groups of rows.

result = torch.bmm(x[:, None], stack[index])
# becomes, with the rows in the order of their experts, and back
grouped = gemm(0, rows, stack, offs=ends)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from fxquant.passes.find.facts import Contraction, Finish, Gemm2d, Label, Match, Product, product_of
from fxquant.passes.find.layout import arrange, permute, sizes, transposed
from fxquant.passes.find.site import Site
from fxquant.passes.find.weights import Gather, find_gather
from fxquant.passes.graph.builder import Builder
from fxquant.passes.graph.values import value_of

aten = torch.ops.aten


def by_expert(site: Site, contraction: Contraction, finish: Finish | None) -> Match | None:
    """Returns the match of rows that are multiplied by `stack[index]`; None for another product.

    A weight is then quantized once, and not for each row that its expert gets.
    """
    left, right = contraction.left, contraction.right
    gather = find_gather(right.node, site.outer)
    if gather is None or right.view is not None or None in right.labels:
        return None
    chosen, ends, inner = right.labels[:-2], right.labels[-2:], contraction.inner
    if len(inner) != 1 or inner[0] not in ends or not set(ends) <= {*inner, *contraction.columns}:
        return None
    (k,), (n,) = inner, (label for label in ends if label not in inner)
    experts = _Experts(contraction, chosen, k, n, rows_last=(ends[1] == k) != gather.transposed)
    rows = product_of(map(right.size, chosen)) * product_of(map(left.size, contraction.rows))
    groups = value_of(gather.stack).shape[0]
    product = Product(m=rows, k=left.size(k), n=right.size(n), groups=groups, lhs=left.node, rhs=right.node)

    def write(builder: Builder, gemm: Gemm2d, lhs: fx.Node, rhs: fx.Node) -> fx.Node:
        gather = find_gather(rhs, site.outer)  # again: matmuls in front of it are replaced by now
        assert gather is not None
        result = experts.write(builder, gemm, gather, lhs, rhs)
        return result if finish is None else finish(builder, result)

    return site.match("grouped_linear", product, emit=site.emit(write, left.node, right.node))


@dataclass(frozen=True)
class _Experts:
    """The axes of such a product: `chosen` are those of the index, and `rows_last` says that the stack is [E, N, K]."""

    contraction: Contraction
    chosen: tuple[Label, ...]
    k: Label
    n: Label
    rows_last: bool

    @property
    def shared(self) -> tuple[Label, ...]:
        """The axes of the index that the rows have too."""
        return tuple(label for label in self.chosen if label in self.contraction.left.kept)

    def write(self, builder: Builder, gemm: Gemm2d, gather: Gather, lhs: fx.Node, rhs: fx.Node) -> fx.Node:
        """Adds the product of the rows in the order of their experts, and gives the result the order they had."""
        left, rows = self.contraction.left, self.contraction.rows
        weight = gather.stack if self.rows_last else transposed(builder, gather.stack)
        if value_of(weight).dtype != value_of(rhs).dtype:
            weight = builder.call(aten.to.dtype, weight, value_of(rhs).dtype)
        lhs = left.viewed(builder, lhs)
        batch = self.batch(builder, gather, lhs, rhs)
        split = [*sizes(builder, lhs, left, rows)]
        lhs = self.rows(builder, lhs, batch)
        order, ends = _by_index(builder, gather)
        offs = builder.call(torch.mul, ends, builder.size(lhs, 1))
        offs = builder.call(aten.to.dtype, offs, torch.int32)
        ragged = builder.call(torch.flatten, builder.call(aten.index.Tensor, lhs, [order]), 0, 1)
        result = builder.call(torch.unflatten, gemm(0, ragged, weight, offs=offs), 0, [-1, builder.size(lhs, 1)])
        result = builder.call(aten.index.Tensor, result, [builder.call(torch.argsort, order)])
        if not split:
            result = builder.call(torch.squeeze, result, 1)
        elif len(split) > 1:
            result = builder.call(torch.unflatten, result, 1, split)
        if len(batch) > 1:
            result = builder.call(torch.unflatten, result, 0, batch)
        return permute(builder, result, (*self.chosen, *rows, self.n), self.contraction.out)

    def batch(self, builder: Builder, gather: Gather, lhs: fx.Node, rhs: fx.Node) -> list[int | fx.Node]:
        """Returns the sizes of the index's axes, read of tensors that stay in the graph where possible."""
        left, whole = self.contraction.left, value_of(gather.index).ndim == len(self.chosen)
        return [
            builder.size(lhs, left.labels.index(label)) if label in self.shared
            else builder.size(gather.index if whole else rhs, axis)
            for axis, label in enumerate(self.chosen)
        ]  # fmt: skip

    def rows(self, builder: Builder, lhs: fx.Node, batch: list[int | fx.Node]) -> fx.Node:
        """Arranges the rows as [entries of the index, rows of an entry, K]."""
        left, shared = self.contraction.left, self.shared
        lhs = arrange(builder, lhs, left, [*((label,) for label in shared), self.contraction.rows, (self.k,)])
        for axis, label in enumerate(self.chosen):
            lhs = lhs if label in shared else builder.call(torch.unsqueeze, lhs, axis)
        if len(shared) < len(self.chosen):
            lhs = builder.call(aten.expand.default, lhs, [*batch, -1, -1])
        return builder.call(torch.flatten, lhs, 0, -3) if len(self.chosen) > 1 else lhs


def _by_index(builder: Builder, gather: Gather) -> tuple[fx.Node, fx.Node]:
    """Adds the order of the index's entries by expert, and the end of each expert's entries in it."""
    index = builder.call(torch.flatten, gather.index)
    experts = builder.size(gather.stack, 0)
    behind = builder.call(torch.add, index, experts)
    index = builder.call(torch.where, builder.call(torch.lt, index, 0), behind, index)
    order = builder.call(torch.argsort, index, stable=True)
    behind = builder.call(torch.cumsum, builder.call(aten.new_ones.default, index, [experts]), 0)
    return order, builder.call(torch.searchsorted, builder.call(aten.index.Tensor, index, [order]), behind)
