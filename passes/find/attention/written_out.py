"""Attention written by hand: read backwards from its second product, through dropout, softmax, mask and scale.

    scores = torch.matmul(q, k.transpose(-1, -2)); weights = softmax(scores / 8 + mask, -1); out = weights @ v
    # is read as
    steps mul 0.125, add mask, of q, k and v

Axes may stand in any order, as those of einsum do. Every operation must be known, and nothing outside may read what
lies between the products; else a reason is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from torch import fx

from fxquant.compat.values import statically_known_true
from fxquant.formats import Step
from fxquant.passes.find.attention import emit as writing
from fxquant.passes.find.attention.emit import Context, Extra, Scores, Unknown
from fxquant.passes.find.attention.steps import Chain, alike, read_product, scores_before, scores_of_weights
from fxquant.passes.find.attention.undo_layout import undone, undone_like
from fxquant.passes.find.facts import Attend, Attention, Contraction, Match, product_of
from fxquant.passes.find.layout import settle
from fxquant.passes.find.site import requires_grad
from fxquant.passes.graph.axes import same_sizes
from fxquant.passes.graph.builder import Builder
from fxquant.passes.graph.names import op_name


def read_chain(first: Match, second: Match) -> Attention | str:
    """Returns the attention of two products of activations, or the reason why they are none."""
    if first.contraction is None or second.contraction is None:
        return "one of its products is not a plain matmul"
    reason = ""
    try:
        chain, scores, context = _read(first.node, first.contraction, second.contraction)
    except Unknown as unknown:
        return str(unknown)
    before, scale = undone(scores)
    lead = [before.size(label) for label in before.out[:-2]]
    for plans in ((before, undone_like(context, lead)), (scores, context)):
        try:
            return _attention(chain, second, plans, scale if plans[0] is before else 1.0)
        except Unknown as unknown:
            reason = str(unknown)
    return reason


def _read(first: fx.Node, product: Contraction, context: Contraction) -> tuple[Chain, Contraction, Contraction]:
    """Reads the chain between two products; returns it and both, with axes [*batch, queries, keys] of the scores."""
    reached = _reached([first])
    if context.left.node not in reached:
        context = _exchanged(context)
    start = context.left.node
    path = reached & _reached([start], lambda node: node.all_input_nodes)
    if start not in path or context.right.node in reached:
        raise Unknown("the softmax is not one operand of the second product")
    chain = Chain(first, path, _order_of_weights(context))
    node = scores_of_weights(chain, start)
    while node is not first:
        node = scores_before(chain, node)
    read_product(chain, first)
    scores = replace(product, out=tuple(product.out[axis] for axis in chain.order))
    return chain, scores if scores.out[-1] in scores.columns else _exchanged(scores), context


def _exchanged(plan: Contraction) -> Contraction:
    """Returns the same product with its left operand on the right."""
    return replace(plan, left=plan.right, right=plan.left, rows=plan.columns, columns=plan.rows)


def _order_of_weights(context: Contraction) -> tuple[int, ...]:
    """Returns the order in which the axes of weights are [*batch, queries, keys]."""
    labels = context.left.labels
    rows = [axis for axis, label in enumerate(labels) if label in context.rows]
    if len(context.inner) != 1 or not rows or None in labels:
        raise Unknown("its second product does not contract the keys")
    batch = [axis for axis, label in enumerate(labels) if label in context.batch]
    return (*batch, *rows, labels.index(context.inner[0]))


def _attention(chain: Chain, second: Match, plans: tuple[Contraction, Contraction], scale: float) -> Attention:
    """Makes an attention of the chain. Raises Unknown where one operator cannot compute it."""
    first, (scores, context) = chain.first, plans
    assert second.contraction is not None
    into, out_of = Scores(scores), Context(context, len(second.contraction.out))
    inside = _closed(chain, second.node)
    _check(chain, inside)
    steps, extras = _steps(chain, scale)
    if not statically_known_true(product_of(into.shared) == product_of(out_of.shared)):
        raise Unknown("keys and values differ in their heads")
    lead = into.canonical
    repeated = [size for extra in extras if not same_sizes(extra.lead, lead) for size in extra.repeated()]
    if len(writing.unknown_sizes(out_of.lead, lead)) > 1 or writing.unknown_sizes(repeated, lead):
        raise Unknown("batch axes are reshaped and dynamic")
    qk = [first.all_input_nodes.index(operand.node) for operand in (scores.left, scores.right)]
    v_slot = second.node.all_input_nodes.index(context.right.node)

    def emit(builder: Builder, attend: Attend) -> fx.Node:
        q, k = into.operands(builder, *(first.all_input_nodes[slot] for slot in qk))
        v = writing.with_lead(builder, out_of.operand(builder, second.node.all_input_nodes[v_slot]), into.shared, k)
        k, v = writing.without_repeats(k, v)
        result = attend(q, k, v, [extra.build(builder, lead, q) for extra in extras])
        return settle(builder, out_of.result(builder, writing.with_lead(builder, result, out_of.lead, result)))

    return Attention(
        node=second.node, steps=steps, dropout=chain.dropout, emit=emit, inside=inside | {first}, axes=len(lead) + 2,
        learned=any(requires_grad(extra.node) for extra in extras),
    )  # fmt: skip


def _check(chain: Chain, inside: frozenset[fx.Node]) -> None:
    """Raises Unknown for operations that do not fit together."""
    extras = [(kind, value, extra.node) for kind, value, extra in chain.steps if extra is not None]
    if any(node in inside for _, _, node in extras):
        raise Unknown("a mask or scale is computed from the scores")
    if chain.dropped_column != (chain.sink is not None):
        raise Unknown("a column is added before the softmax or dropped after it, but not both")
    hidden = [node for kind, value, node in extras if (kind, value) == ("fill", -math.inf)]
    if not all(any(alike(mask, node) for node in hidden) for mask in chain.zeroed):
        raise Unknown("its weights are masked otherwise than its scores")


def _steps(chain: Chain, scale: float) -> tuple[tuple[Step, ...], list[Extra]]:
    """Returns the steps in the order in which they are computed, and their tensors."""
    read: list[tuple[str, float, Extra | None]] = [("mul", scale, None)] if scale != 1 else []
    read += reversed(chain.steps)
    return writing.numbered([*read, ("sink", 0.0, chain.sink)] if chain.sink else read)


def _closed(chain: Chain, last: fx.Node) -> frozenset[fx.Node]:
    """Returns the nodes between the products. Raises Unknown where another node than the last product reads them."""
    inside = _reached((*chain.read, chain.first), lambda node: [user for user in node.users if user is not last])
    for node in inside:
        if op_name(node) == "_assert_tensor_metadata" or (op_name(node) == "getitem" and not node.users):
            continue  # in an exported program, of a cast and of a result that nobody takes: it goes with the chain
        if node.op == "output" or not node.users:
            reader = "what the graph returns" if node.op == "output" else node.name
            raise Unknown(f"{reader} reads its scores or weights too")
    return inside


def _reached(
    nodes: Iterable[fx.Node], following: Callable[[fx.Node], Iterable[fx.Node]] = lambda node: node.users
) -> frozenset[fx.Node]:
    """Returns the nodes and all that follow them: those computed from them, if nothing else is said."""
    queue = list(nodes)
    seen = set(queue)
    while queue:
        more = set(following(queue.pop())) - seen
        seen |= more
        queue += more
    return frozenset(seen)
