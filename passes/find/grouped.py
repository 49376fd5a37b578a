"""Grouped products: rows in groups, each with a weight of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx

from fxquant.compat.values import statically_known_true
from fxquant.decisions import SkipReason
from fxquant.passes.find.contraction import contract
from fxquant.passes.find.facts import Gemm2d, Match, Operand, Product, shape_text
from fxquant.passes.find.layout import transposed
from fxquant.passes.find.site import Site
from fxquant.passes.graph.builder import Builder
from fxquant.passes.graph.values import value_of


def grouped_mm(
    site: Site, input: fx.Node, mat2: fx.Node, offs: fx.Node | None = None, bias: Any = None, out_dtype: Any = None
) -> Match:
    """Reads rows in groups, each with a weight of its own; `offs` are the ends of the groups. Autocast leaves it alone.

    Two matrices have groups along the contracted axis, as in the gradient of a weight.
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
    """Reads rows [M, K] and weights [G, K, N]; `columns` says that the node has both, and the result, transposed."""
    ragged, (groups, *matrix) = value_of(rows).shape, value_of(weight).shape
    (m, k), n = reversed(ragged) if columns else ragged, matrix[0] if columns else matrix[1]
    product = Product(m=m, k=k, n=n, groups=groups, lhs=rows, rhs=weight)
    if statically_known_true(groups == 0):
        return site.match("grouped_linear", product, skip=(SkipReason.TOO_SMALL, "no group"))

    def write(builder: Builder, gemm: Gemm2d, lhs: fx.Node, rhs: fx.Node, ends: fx.Node) -> fx.Node:
        if columns:
            return transposed(builder, gemm(0, transposed(builder, lhs), rhs, offs=ends))
        return gemm(0, lhs, transposed(builder, rhs), offs=ends)

    return site.match("grouped_linear", product, emit=site.emit(write, rows, weight, offs))


def _ungrouped(site: Site, input: fx.Node, mat2: fx.Node) -> Match:
    """Describes a grouped product that is no linear layer."""
    left, right = value_of(input).shape, value_of(mat2).shape
    product = Product(m=left[-2], k=left[-1], n=right[-1], lhs=input, rhs=mat2, rhs_is_weight=site.is_weight(mat2))
    detail = f"{shape_text(left)} x {shape_text(right)}: the contracted axis is in groups"
    return site.match("grouped_linear", product, skip=(SkipReason.GROUPED, detail))
