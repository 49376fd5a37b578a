"""Puts `fxquant::linear`, or `fxquant::grouped_linear`, in the place of every product that is quantized.

    linear = torch._C._nn.linear(x, w, b)
    # becomes
    linear = torch.ops.fxquant.linear.default(x, w, b, "input=mxfp8_e4m3 weight=... name=layers.0.mlp")

A match of which no product is quantized stays untouched, so that high precision keeps the bits it had.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import fx

from fxquant.formats import IDENTITY, LINEAR_OPERANDS, LinearSpec, OperandSpec, QuantSpec
from fxquant.passes.find.facts import Match, Resolved
from fxquant.passes.find.forms import apply_match
from fxquant.passes.graph.builder import Builder
from fxquant.passes.graph.meta import MODULE_TYPE, inserted_for
from fxquant.passes.graph.values import value_of
from fxquant.passes.insert.attention import insert_attention
from fxquant.quantizers import Quantizer
from fxquant.roles import Direction

_NONE = OperandSpec(IDENTITY, IDENTITY)


def _spec(match: Match, resolved: Resolved, quantizers: Mapping[str, Quantizer]) -> str:
    numbers, over = resolved.numbers, resolved.over
    input, weight, grad_output = (
        _over(quantizers[op].operand_spec().numbered(numbers.get(op, 0)), over.get(op, {}))
        if op in quantizers
        else _NONE
        for op in LINEAR_OPERANDS
    )
    return str(LinearSpec(input, weight, grad_output, _autocast(match), match.name))


def _over(spec: OperandSpec, groups: Mapping[Direction, Sequence[str]]) -> OperandSpec:
    """Returns a spec whose scales are made of the largest amaxes of the ranks of process groups, by direction."""

    def over(side: QuantSpec, direction: Direction) -> QuantSpec:
        names = dict.fromkeys([*side.over.split("+"), *groups.get(direction, ())])
        return replace(side, over="+".join(filter(None, names)))

    row, column = over(spec.rowwise, Direction.ROWWISE), over(spec.columnwise, Direction.COLUMNWISE)
    return OperandSpec(row, column, spec.from_rowwise)


def _autocast(match: Match) -> str:
    return str(match.autocast).removeprefix("torch.") if match.autocast else ""


def _without_state(match: Match) -> str:
    """Returns a spec that gives the same shape and dtype: the delayed scales of the real one are bound later."""
    return str(LinearSpec(_NONE, _NONE, _NONE, _autocast(match), match.name))


def _plain(builder: Builder, lhs: fx.Node, rhs: fx.Node, bias: fx.Node | None) -> fx.Node:
    """Adds a product of a rewritten node that itself stays in high precision."""
    if value_of(rhs).ndim == 2:
        return builder.call(F.linear, lhs, rhs, bias)
    product = builder.call(torch.matmul, lhs, builder.call(torch.transpose, rhs, -2, -1))
    return product if bias is None else builder.call(torch.add, product, bias)


def insert(matches: Sequence[Match]) -> int:
    """Rewrites the graphs of the matches in place; returns how many nodes were replaced."""
    count = insert_attention(matches)
    for match in matches:
        written = match.module_type != "dpa" and match.emit is not None
        if written and any(resolved.quantizers is not None for resolved in match.resolved):
            apply_match(match, partial(_gemm, match))
            count += 1
    return count


def _gemm(
    match: Match, builder: Builder, index: int, lhs: fx.Node, rhs: fx.Node, bias: fx.Node | None = None,
    offs: fx.Node | None = None,
) -> fx.Node:  # fmt: skip
    """Adds product `index` of a match; with `offs`, the ends of its groups of rows."""
    resolved = match.resolved[index]
    if resolved.quantizers is None:
        return _plain(builder, lhs, rhs, bias)
    grouped = match.products[index].weights is not None
    target = torch.ops.fxquant.grouped_linear if grouped else torch.ops.fxquant.linear
    third = offs if grouped else bias
    node = builder.call(target.default, lhs, rhs, third, _without_state(match))
    node.args = (lhs, rhs, third, _spec(match, resolved, resolved.quantizers))
    inserted_for(node, match.name, resolved.decisions[0].site)
    node.meta[MODULE_TYPE] = match.module_type
    return node
