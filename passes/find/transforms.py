"""The transforms of `torch.func` that are in force at a node, and how often `vmap` has its operands.

_vmap_increment_nesting(4, ..)            # a level of vmap begins, over 4 entries
row = _add_batch_dim(x, 0, 1)             # [64] of each entry, by its example value
y = linear(row, weight)                   # one product of 4 rows
_remove_batch_dim(y, 1, 4, 0)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import Tensor, fx

from fxquant.compat.private import tree_leaves
from fxquant.passes.find.facts import Match, Product, product_of
from fxquant.passes.graph.names import calls
from fxquant.passes.graph.values import Dim, maybe_value, value_of


class Transforms:
    """The transforms that the nodes of a graph stand in, which come in order: `enter` is called for each."""

    def __init__(self, graph: fx.Graph) -> None:
        self.depth = 0
        self._derivatives = 0
        self.trained = trained_entries(graph)
        self._vmapped: list[Dim] = []
        self._sizes: dict[object, Dim] = {}
        self._levels: dict[fx.Node, frozenset[object]] = {}

    def enter(self, node: fx.Node) -> bool:
        """Notes a node; returns True if it begins or ends a transform."""
        name = getattr(node.target, "__name__", "")
        begins, ends = name.endswith("_increment_nesting"), name.endswith("_decrement_nesting")
        self.depth += begins - ends
        self._derivatives += (begins - ends) * (not name.startswith("_vmap"))
        if name == "_vmap_increment_nesting":
            self._vmapped.append(_size(node.args[0]))
        elif name == "_vmap_decrement_nesting":
            self._vmapped.pop()
        levels = frozenset[object]().union(*(self._levels.get(source, ()) for source in node.all_input_nodes))
        if name == "_add_batch_dim":
            self._sizes[node.args[2]] = self._vmapped[-1]
            levels |= {node.args[2]}
        elif name == "_remove_batch_dim":
            levels -= {node.args[1]}
        if levels:
            self._levels[node] = levels
        return begins or ends

    @property
    def text(self) -> str:
        """The place of what stands here, and what its FLOPs leave out."""
        counted = ", whose own derivatives are not counted" if self._derivatives else ""
        return f"inside a torch.func transform{counted}"

    def of_all_entries(self, match: Match) -> Match:
        """Returns a match with the products of all entries that `vmap` has: more rows of one weight, or a batch."""
        levels = self._levels.get(match.node)
        if not levels:
            return match
        products = tuple(self._of_all_entries(product, levels) for product in match.products)
        return replace(match, products=products, needs_grad=tuple(self._needs_grad(match, p) for p in match.products))

    def _needs_grad(self, match: Match, product: Product) -> tuple[bool, bool]:
        lhs, rhs = (_trained(operand, self.trained) for operand in (product.lhs, product.rhs))
        return (lhs, rhs) if match.node in self.trained else (False, False)

    def _of_all_entries(self, product: Product, levels: Iterable[object]) -> Product:
        if product.counted is not None:
            return replace(product, counted=product.counted * int(product_of(self._sizes[level] for level in levels)))
        of_lhs, of_rhs = (self._levels.get(operand, frozenset()) for operand in (product.lhs, product.rhs))
        shared = [level for level in levels if level in of_lhs and level not in of_rhs]
        rows = product_of(self._sizes[level] for level in shared)
        batch = tuple(self._sizes[level] for level in levels if level not in shared)
        return replace(product, m=product.m * rows, batch=(*batch, *product.batch))


def _size(argument: object) -> Dim:
    return value_of(argument) if isinstance(argument, fx.Node) else argument  # type: ignore[return-value]


def trained_entries(graph: fx.Graph) -> frozenset[fx.Node]:
    """Returns the nodes inside `vmap` that get gradients from outside, which their example values do not show."""
    trained, levels = set[fx.Node](), 0
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "")
        levels += (name == "_vmap_increment_nesting") - (name == "_vmap_decrement_nesting")
        outermost = levels == 1 and name == "_remove_batch_dim"  # its value says so itself
        if levels and not outermost and not calls(node, ("detach", "detach_")) and _floats(node):
            if any(_trained(source, trained) for source in node.all_input_nodes):
                trained.add(node)
    return frozenset(trained)


def _floats(node: fx.Node) -> bool:
    leaves = tree_leaves(maybe_value(node))
    return any(isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in leaves)


def _trained(node: fx.Node, trained: Iterable[fx.Node]) -> bool:
    leaves = tree_leaves(maybe_value(node))
    return node in trained or any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)
