"""Facts about the matmuls of a captured graph. They are frozen: each stage returns new ones."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import mul
from typing import Protocol

import torch
from torch import fx

from fxquant.decisions import Decision, SkipReason
from fxquant.formats import AttentionSpec, Step
from fxquant.passes.graph.builder import Builder
from fxquant.passes.graph.values import Dim, value_of
from fxquant.quantizers import Quantizer
from fxquant.roles import Direction

Label = Hashable
Skip = tuple[SkipReason, str]


@dataclass(frozen=True, kw_only=True)
class Product:
    """One matmul of a node: lhs [*batch, M, K] x rhs [*batch, N, K], transposed, gives [*batch, M, N].

    With `groups` the rows of lhs [M, K] lie in that many groups, and each group has its own rhs [N, K].

    `lhs` and `rhs` are the graph nodes the operands come from (before any view), for dtypes, layouts and gradients.
    `rhs_is_weight` says that `rhs` is a parameter, seen through views and casts, or stands where only a weight can.
    `counted` has the FLOPs of an operator whose products are not known; m, k and n are 0 then.
    """

    m: Dim
    k: Dim
    n: Dim
    batch: tuple[Dim, ...] = ()
    groups: Dim | None = None
    lhs: fx.Node
    rhs: fx.Node
    rhs_is_weight: bool = True
    counted: int | None = None

    @classmethod
    def unknown(cls, flops: int, lhs: fx.Node, rhs: fx.Node, rhs_is_weight: bool) -> Product:
        """Returns the product that stands for all of an operator, of which only the FLOPs are known."""
        return cls(m=0, k=0, n=0, lhs=lhs, rhs=rhs, rhs_is_weight=rhs_is_weight, counted=flops)

    @property
    def weights(self) -> Dim | None:
        """The number of weights, where every group of rows or entry of the batch has its own."""
        if self.groups is None and self.batch and self.rhs_is_weight:
            return product_of(self.batch)
        return self.groups


class Gemm2d(Protocol):
    """Writes product `index` of a match: lhs [*, M, K] x rhs [N, K] (or [*batch, N, K]) + bias [N].

    With the ends of groups `offs` [G]: lhs [M, K] x rhs [G, N, K].
    """

    def __call__(
        self, index: int, lhs: fx.Node, rhs: fx.Node, bias: fx.Node | None = None, offs: fx.Node | None = None
    ) -> fx.Node: ...


Finish = Callable[[Builder, fx.Node], fx.Node]
"""Adds operations on one node to the graph."""

Emit = Callable[[Builder, Gemm2d], fx.Node]
"""Writes the products of a match and the views around them in front of its node; returns the node's replacement."""


class Attend(Protocol):
    """Writes an attention: q [*batch, Hq, Sq, D], k and v [*batch, Hkv, Sk, D], the tensors of its steps."""

    def __call__(self, q: fx.Node, k: fx.Node, v: fx.Node, extras: Sequence[fx.Node]) -> fx.Node: ...


@dataclass(frozen=True, kw_only=True)
class Operand:
    """A tensor, a label for each axis, and the axes' sizes; an axis labelled None repeats, and its first entry does.

    `view` is applied first: labels and sizes are those of its result.
    """

    node: fx.Node
    labels: tuple[Label, ...]
    sizes: tuple[Dim, ...]
    view: Finish | None = None

    @classmethod
    def of(cls, node: fx.Node, labels: Sequence[Label]) -> Operand:
        return cls(node=node, labels=tuple(labels), sizes=tuple(value_of(node).shape))

    @property
    def kept(self) -> tuple[Label, ...]:
        """The labels of the axes that do not repeat."""
        return tuple(label for label in self.labels if label is not None)

    def size(self, label: Label) -> Dim:
        return self.sizes[self.labels.index(label)]

    def viewed(self, builder: Builder, node: fx.Node) -> fx.Node:
        """Adds the view of `node`, which stands for the operand when the graph is rewritten."""
        return node if self.view is None else self.view(builder, node)


@dataclass(frozen=True, kw_only=True)
class Contraction:
    """Two operands and their axes by what becomes of them; `out` is the order of the result's axes."""

    left: Operand
    right: Operand
    out: tuple[Label, ...]
    batch: tuple[Label, ...]
    rows: tuple[Label, ...]
    columns: tuple[Label, ...]
    inner: tuple[Label, ...]

    def size(self, label: Label) -> Dim:
        """Returns the size of an axis of the result."""
        return (self.left if label in self.left.labels else self.right).size(label)

    def product(self, rhs_is_weight: bool) -> Product:
        return Product(
            m=product_of(map(self.left.size, self.rows)),
            k=product_of(map(self.left.size, self.inner)),
            n=product_of(map(self.right.size, self.columns)),
            batch=tuple(map(self.left.size, self.batch)),
            lhs=self.left.node,
            rhs=self.right.node,
            rhs_is_weight=rhs_is_weight,
        )


def axes(name: str, count: int) -> tuple[Label, ...]:
    """Returns labels for a number of axes of one kind."""
    return tuple((name, index) for index in range(count))


def product_of(sizes: Iterable[Dim]) -> Dim:
    """Returns the product of sizes; 1 for none."""
    return reduce(mul, sizes, 1)


def shape_text(sizes: Iterable[Dim]) -> str:
    """Returns a shape as it stands in details of decisions."""
    return f"[{', '.join(map(str, sizes))}]"


@dataclass(frozen=True, kw_only=True)
class Attention:
    """One attention: the steps that make weights of its scores, and how it is written in front of its last node.

    Two matches share an attention that was found as two products: `node`, the last of its nodes, identifies it.
    Nothing else reads the nodes `inside`; `axes` counts the axes of q; `learned` says that a tensor of the steps gets a
    gradient. `spec` is None until the attention is resolved, and for one that stays in high precision, whose node
    `simplify` may change, given the dtype of autocast: it returns True if it has.
    """

    node: fx.Node
    steps: tuple[Step, ...]
    dropout: float = 0.0
    emit: Callable[[Builder, Attend], fx.Node]
    inside: frozenset[fx.Node] = frozenset()
    axes: int
    learned: bool
    spec: AttentionSpec | None = None
    simplify: Callable[[torch.dtype | None], bool] | None = None


@dataclass(frozen=True, kw_only=True)
class Match:
    """A matmul-like node. Without `emit` it cannot be rewritten, and `skip` says why."""

    node: fx.Node
    form: str
    module_type: str
    products: tuple[Product, ...]
    emit: Emit | None = None
    skip: Skip | None = None
    name: str = ""
    source: str = ""
    """Dynamo's spelling of the place of the weight, for a single product that has one."""
    autocast: torch.dtype | None = None
    takes_autocast: bool = True
    """False for an operator whose dtypes autocast leaves alone."""
    can_open: bool = False
    """True for a module that was captured as one node, which `open_modules` can replace by the operators inside it."""
    attention: Attention | None = None
    """The attention that this node is, or is one of the two products of."""
    remark: str = ""
    """The reason why a product of two activations is not quantized as part of an attention."""
    contraction: Contraction | None = None
    """The axes of a product of two tensors."""
    needs_grad: tuple[tuple[bool, bool], ...] = ()
    """A pair for each product: True where lhs, and where rhs, gets a gradient."""
    inside: str = ""
    """The conditional or loop that it stands in, and how often it counts."""
    takes_state: bool = True
    """True if the state of delayed scaling and stochastic rounding can be passed to this node's graph."""
    resolved: tuple[Resolved, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """The quantizers of one product by operand (`input`, `weight`, `grad_output`); None keeps the product as it is.

    `numbers` has the number in the graph of each operand that is rounded stochastically, `over` the process groups
    whose ranks have scales of an operand in common, by direction.
    """

    quantizers: Mapping[str, Quantizer] | None
    decisions: tuple[Decision, ...]
    numbers: Mapping[str, int] = field(default_factory=dict)
    over: Mapping[str, Mapping[Direction, Sequence[str]]] = field(default_factory=dict)


def quantized(match: Match) -> bool:
    """Returns True if anything of a resolved match is quantized."""
    attention = match.attention is not None and match.attention.spec is not None
    return attention or any(resolved.quantizers is not None for resolved in match.resolved)


def decisions_of(matches: Iterable[Match]) -> list[Decision]:
    """Returns the decisions of all matches, in order."""
    return [decision for match in matches for resolved in match.resolved for decision in resolved.decisions]
