"""Pairs: the two products of an attention that is written out, with a softmax between them."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

from torch import fx

from fxquant.passes.find.attention.written_out import read_chain
from fxquant.passes.find.facts import Attention, Match
from fxquant.passes.graph.names import SAME_VALUES, op_name

_BETWEEN = SAME_VALUES | frozenset(
    """mul div truediv true_divide add sub neg masked_fill where tanh cat concat concatenate dropout amax max clamp
    maximum minimum nan_to_num imul iadd isub itruediv sum native_dropout""".split()
)
"""Operators that may stand between the products, besides the softmax: scale, mask, bias, cap, sink, dropout."""

_SOFTMAX = frozenset(("softmax", "_softmax", "log_softmax", "_log_softmax", "exp", "_safe_softmax", "special_softmax"))


def join_attentions(matches: Sequence[Match]) -> list[Match]:
    """Joins two products of activations to an attention where a softmax, and nothing but its trimmings, is between.

    Products that cannot be joined stay two products, with a remark that says why.
    """
    joined = {match.node: match for match in matches}
    products = [match.node for match in matches if match.module_type == "matmul"]
    for node in products:
        _name_writes(node)
    pairs = [(first, second) for first in products for second in _products_after_softmax(first, set(products))]
    for first, second in pairs:
        both = (joined[first], joined[second])
        alone = all(sum(node in pair for pair in pairs) == 1 for node in (first, second))
        attention = read_chain(*both) if alone else "its products belong to several attentions"
        for match in both:
            if isinstance(attention, Attention):
                joined[match.node] = replace(match, module_type="dpa", attention=attention)
            else:
                remark = f"attention of {first.name} and {second.name}: {attention}"
                joined[match.node] = replace(match, remark=remark)
    return [joined[match.node] for match in matches]


def _name_writes(node: fx.Node) -> None:
    """Makes later readers of ``scores.mul_(2)`` read its result, which is the same tensor."""
    while True:
        writes = [user for user in node.users if op_name(user).endswith("_") and user.args[:1] == (node,)]
        writes = [user for user in writes if user.op == "call_method" and not user.users]
        if not writes:
            return
        first = min(writes)
        node.replace_all_uses_with(first, partial(operator.lt, first))
        node = first


def _products_after_softmax(first: fx.Node, products: Collection[fx.Node]) -> list[fx.Node]:
    """Returns the products that a softmax of this product's result goes into."""
    reached: list[fx.Node] = []
    seen: set[tuple[fx.Node, bool]] = set()
    queue = [(user, False) for user in first.users]
    while queue:
        node, soft = queue.pop()
        if (node, soft) in seen:
            continue
        seen.add((node, soft))
        name = op_name(node).strip("_") if node.op in ("call_function", "call_method") else ""
        if node in products:
            if soft:
                reached.append(node)
        elif name in _BETWEEN or name in _SOFTMAX or op_name(node) in _BETWEEN:
            queue += [(user, soft or name in _SOFTMAX) for user in node.users]
    return reached
