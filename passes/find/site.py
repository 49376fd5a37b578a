"""The place of a matmul in a graph: its node, and which of its operands are weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from fxquant.decisions import SkipReason
from fxquant.passes.find.facts import Emit, Match, Product
from fxquant.passes.find.weights import find_weight
from fxquant.passes.graph.names import op_name
from fxquant.passes.graph.values import value_of


@dataclass(frozen=True, kw_only=True)
class Site:
    """A node that may be a matmul. `outer` maps a body's placeholders to what the calling graph passes for them."""

    node: fx.Node
    outer: Mapping[fx.Node, fx.Node]

    def is_weight(self, node: fx.Node) -> bool:
        return find_weight(node, self.outer) is not None

    def is_expert(self, node: fx.Node) -> bool:
        """Returns True if a matrix is one of several that a parameter holds."""
        weight = find_weight(node, self.outer)
        return weight is not None and weight.stacked and value_of(node).ndim == 2

    def slots(self, *nodes: fx.Node) -> list[int]:
        """The places of inputs. By the time the node is rewritten, the matmuls among them have been replaced."""
        return [self.node.all_input_nodes.index(node) for node in nodes]

    def match(
        self,
        module_type: str,
        *products: Product,
        emit: Emit | None = None,
        skip: tuple[SkipReason, str] | None = None,
        needs_grad: tuple[tuple[bool, bool], ...] | None = None,
    ) -> Match:
        """A match of this node; gradients are those of the products' own operands unless given."""
        if needs_grad is None:
            trained = requires_grad(self.node)
            needs_grad = tuple((trained and requires_grad(p.lhs), trained and requires_grad(p.rhs)) for p in products)
        return Match(
            node=self.node, form=op_name(self.node), module_type=module_type, products=products, emit=emit, skip=skip,
            needs_grad=needs_grad,
        )  # fmt: skip


@dataclass(frozen=True)
class Arguments:
    """The form of an operator with many arguments: a dataclass with them as fields, by their names and in order."""

    site: Site

    def match(self) -> Match | None:
        """Describes the node."""
        raise NotImplementedError


def requires_grad(node: fx.Node) -> bool:
    """Returns True if a node's example value, or any tensor in it, gets a gradient."""
    value = value_of(node)
    values = value if isinstance(value, (tuple, list)) else (value,)
    return any(isinstance(v, torch.Tensor) and v.requires_grad for v in values)
