"""The place of a matmul in a graph: its node, and which of its operands are weights."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxquant.passes.find.facts import Emit, Match, Product, Skip
from fxquant.passes.find.layout import settle
from fxquant.passes.find.weights import find_weight
from fxquant.passes.graph.builder import Builder
from fxquant.passes.graph.names import op_name
from fxquant.passes.graph.values import value_of


@dataclass(frozen=True, kw_only=True)
class Site:
    """A node that may be a matmul. `outer` maps a body's placeholders to what the calling graph passes for them.

    `computed` are the matrices that are computed from weights.
    """

    node: fx.Node
    outer: Mapping[fx.Node, fx.Node]
    computed: Container[fx.Node] = ()

    def is_weight(self, node: fx.Node) -> bool:
        return find_weight(node, self.outer) is not None or node in self.computed

    def slots(self, *nodes: fx.Node) -> list[int]:
        """Returns the places of inputs, which outlast them: matmuls among them are replaced before this node is."""
        return [self.node.all_input_nodes.index(node) for node in nodes]

    def emit(self, write: Callable[..., fx.Node], *nodes: fx.Node) -> Callable[[Builder, Any], fx.Node]:
        """Returns the way to rewrite this node.

        `write` gets the builder, the function that adds a product or an attention, and these inputs. Its result gets
        the dtype and the memory layout of the node.
        """
        slots = self.slots(*nodes)

        def emit(builder: Builder, add: Any) -> fx.Node:
            return settle(builder, write(builder, add, *(builder.anchor.all_input_nodes[slot] for slot in slots)))

        return emit

    def match(
        self,
        module_type: str,
        *products: Product,
        emit: Emit | None = None,
        skip: Skip | None = None,
        needs_grad: tuple[tuple[bool, bool], ...] | None = None,
    ) -> Match:
        """Returns a match of this node. Without `needs_grad`, the operands of its products say who gets gradients."""
        if needs_grad is None:
            trained = requires_grad(self.node)
            needs_grad = tuple((trained and requires_grad(p.lhs), trained and requires_grad(p.rhs)) for p in products)
        return Match(
            node=self.node, form=op_name(self.node), module_type=module_type, products=products, emit=emit, skip=skip,
            needs_grad=needs_grad,
        )  # fmt: skip


@dataclass(frozen=True)
class Arguments:
    """A form with many arguments: a dataclass whose fields are those of the operator, by name and in order."""

    site: Site

    def match(self) -> Match | None:
        """Returns the match of the node, or None where it is no matmul."""
        raise NotImplementedError


def requires_grad(node: fx.Node) -> bool:
    """Returns True if a node's example value, or any tensor in it, gets a gradient."""
    value = value_of(node)
    values = value if isinstance(value, (tuple, list)) else (value,)
    return any(isinstance(v, torch.Tensor) and v.requires_grad for v in values)
