"""Finds every matmul of a captured graph and of the bodies that its higher-order operators call, as a `Match`.

The graph is only read. A node with a form (forms.py) gets the sizes and operands of its products and a way to be
rewritten; one that costs matmul FLOPs without a form gets a reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.compat.private import (
    HigherOrderOperator,
    enter_autocast,
    exit_autocast,
    is_traceable_wrapper_subclass,
    source_text,
    tree_leaves,
)
from fxquant.decisions import SkipReason
from fxquant.passes.find.attention.pairs import join_attentions
from fxquant.passes.find.facts import Match
from fxquant.passes.find.forms import FORMS, form_name, read_form
from fxquant.passes.find.opaque import opaque, refused
from fxquant.passes.find.site import Site, requires_grad
from fxquant.passes.find.transforms import Transforms
from fxquant.passes.find.uses import Uses
from fxquant.passes.find.weights import Computed, find_weight
from fxquant.passes.graph.meta import UNPLACED
from fxquant.passes.graph.names import higher_order_op
from fxquant.passes.graph.values import maybe_value, value_of
from fxquant.weights import QuantizedWeight

Regions = Mapping[str, torch.dtype | None]
"""The autocast dtype in force, by device type; None where autocast is off."""

_LOOPS = ("scan", "while_loop", "associative_scan")
"""Higher-order operators whose steps torch differentiates one by one; it cannot stack what they save in FP8."""

_INSIDE = {
    "cond": "in a branch of torch.cond: one of its branches runs",
    **dict.fromkeys(("map_impl", *_LOOPS), "in the body of a loop: one of its steps counts"),
}
"""The words for products in a body that does not run just once, by the operator that calls it."""


class _Walk:
    """A walk over a graph and its bodies, which visits a body once."""

    def __init__(self) -> None:
        self.outer: dict[fx.Node, fx.Node] = {}
        self.seen: set[int] = set()
        self.free: set[Any] = set()
        self.computed = Computed(self.outer)

    def graph(self, gm: fx.GraphModule, regions: Regions) -> Iterator[Match]:
        if id(gm) in self.seen:
            return
        self.seen.add(id(gm))
        before: dict[Any, Regions] = {}
        uses = Uses.of(gm.graph)
        transforms = Transforms(gm.graph)
        for node in gm.graph.nodes:
            matches: Iterator[Match]
            self.computed.add(node)
            if transforms.enter(node):
                continue
            if node.target is enter_autocast:
                before[node] = regions
                regions = {**regions, **_region(*node.args)}
            elif node.target is exit_autocast:
                regions = before.get(node.args[0], regions)
            elif node.op in ("call_function", "call_method") and node in uses.used:
                matches = self.node(node, regions)
                if transforms.depth:
                    matches = _closed(map(transforms.of_all_entries, matches), transforms.text)
                yield from matches if node in uses.trained else map(_untrained, matches)

    def node(self, node: fx.Node, regions: Regions) -> Iterator[Match]:
        form = form_name(node)
        if form not in FORMS and isinstance(node.target, HigherOrderOperator):
            yield from self.bodies(node, higher_order_op(node), regions)
            return
        match = None
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(maybe_value(node))):
            site = Site(node=node, outer=self.outer, computed=self.computed)
            match = _described(site, form) if form in FORMS else opaque(site, self.free)
        if match is not None:
            autocast = regions.get(_device(node)) if match.takes_autocast else None
            yield replace(match, autocast=autocast, source=self.source(match))

    def source(self, match: Match) -> str:
        """The place of the weight of a single product."""
        several = len(match.products) != 1 or not match.products[0].rhs_is_weight
        weight = None if several else find_weight(match.products[0].rhs, self.outer)
        node = None if weight is None else weight.parameter
        while node in self.outer:
            node = self.outer[node]
        return "" if node is None else source_text(node)

    def bodies(self, node: fx.Node, op: str, regions: Regions) -> Iterator[Match]:
        """Walks the graphs that a higher-order operator calls."""
        if op == "wrap_with_autocast":
            regions = {**regions, **_region(*node.args[:3])}
        trained_loop = op in _LOOPS and requires_grad(node)
        graphs = [source for source in node.all_input_nodes if isinstance(maybe_value(source), fx.GraphModule)]
        operands = [leaf for leaf in tree_leaves(node.args) if isinstance(leaf, fx.Node) and leaf not in graphs]
        for index, graph in enumerate(graphs):
            body: fx.GraphModule = value_of(graph)
            if op == "autograd_function_apply" and index == 1:
                yield from _closed(self.graph(body, regions), "in the backward of a custom autograd.Function")
                continue
            inputs = body.graph.find_nodes(op="placeholder")
            if len(inputs) <= len(operands):  # a predicate comes before them
                self.outer |= dict(zip(inputs, operands[len(operands) - len(inputs) :], strict=True))
            matches = self.graph(body, regions)
            matches = _closed(matches, f"in a {op} that gets gradients") if trained_loop else matches
            yield from (replace(match, inside=match.inside or _INSIDE.get(op, "")) for match in matches)


def find_matmuls(gm: fx.GraphModule, *, autocast: Regions | None = None) -> list[Match]:
    """Returns all matches in graph order, a body's where its operator stands; `autocast` was entered outside."""
    return join_attentions(list(_Walk().graph(gm, autocast or {})))


def _described(site: Site, form: str) -> Match | None:
    """Describes a node by its form, or says that its operands are no plain tensors."""
    tensors = [source for source in site.node.all_input_nodes if isinstance(maybe_value(source), Tensor)]
    wrapped = ""
    for tensor in tensors:
        value = value_of(tensor)
        if not wrapped and is_traceable_wrapper_subclass(value) and not isinstance(value, QuantizedWeight):
            wrapped = f"{tensor.name} is a {type(value).__name__}"
        if value.layout != torch.strided:
            linear = any(map(site.is_weight, tensors))
            skip = SkipReason.LAYOUT, wrapped or f"{tensor.name} is a {value.layout}"
            return refused(site, "linear" if linear else "matmul", tensors[0], tensors[-1], linear, skip)
    match = read_form(site, form, tensors)
    if match is not None and wrapped:
        unplaced = site.node.meta.get(UNPLACED)
        skip = (SkipReason.LAYOUT, wrapped) if unplaced is None else (SkipReason.PLACEMENT, unplaced)
        return replace(match, emit=None, contraction=None, skip=skip)
    return match


def _closed(matches: Iterator[Match], why: str) -> Iterator[Match]:
    """Yields the same matches, none of which is rewritten."""
    for match in matches:
        yield replace(match, emit=None, attention=None, skip=match.skip or (SkipReason.UNSUPPORTED_FORM, why))


def _untrained(match: Match) -> Match:
    return replace(match, needs_grad=((False, False),) * len(match.products))


def _region(device: Any, dtype: Any = None, enabled: Any = True, *_: Any) -> Regions:
    return {device: (dtype or torch.get_autocast_dtype(device)) if enabled else None}


def _device(node: fx.Node) -> str:
    tensors = [leaf for leaf in tree_leaves(value_of(node)) if isinstance(leaf, Tensor)]
    return tensors[0].device.type if tensors else ""
