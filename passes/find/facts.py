"""What the analysis passes know of a matmul: facts that rewriting passes read and never change."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import mul
from typing import Any, Protocol

import torch
from torch import fx

from fxquant.compat.private import enable_python_dispatcher
from fxquant.decisions import Decision, SkipReason
from fxquant.formats import AttentionSpec, Step
from fxquant.passes.graph.values import Dim, value_of
from fxquant.quantizers import Quantizer


@dataclass(frozen=True, kw_only=True)
class Product:
    """One matmul of a node: lhs [*batch, M, K] x rhs [*batch, N, K], transposed, gives [*batch, M, N].

    With `groups` the rows of lhs [M, K] are in so many groups, each with its own of rhs [groups, N, K].

    `lhs` and `rhs` are the graph nodes the operands come from (before any view), for dtypes, layouts and gradients.
    `rhs_is_weight` says that `rhs` is a parameter, seen through views and casts, or stands where only a weight can.
    """

    m: Dim
    k: Dim
    n: Dim
    batch: tuple[Dim, ...] = ()
    groups: Dim | None = None
    lhs: fx.Node
    rhs: fx.Node
    rhs_is_weight: bool = True

    @property
    def weights(self) -> Dim | None:
        """How many weights there are, where every group of rows or entry of the batch has its own."""
        if self.groups is None and self.batch and self.rhs_is_weight:
            return reduce(mul, self.batch)
        return self.groups


class Gemm2d(Protocol):
    """Adds product `index` of a match to the graph: lhs [*, M, K] x rhs [N, K] (or [*batch, N, K]) + bias [N].

    With the ends of groups `offs` [G]: lhs [M, K] x rhs [G, N, K].
    """

    def __call__(
        self, index: int, lhs: fx.Node, rhs: fx.Node, bias: fx.Node | None = None, offs: fx.Node | None = None
    ) -> fx.Node: ...


class Builder:
    """Adds nodes in front of `anchor`, each with its example value, so that later passes can ask for shapes."""

    def __init__(self, anchor: fx.Node) -> None:
        self.anchor = anchor
        self.graph = anchor.graph

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Adds a `call_function` node."""
        with self.graph.inserting_before(self.anchor):
            node = self.graph.call_function(target, args, kwargs)
        for key in ("nn_module_stack", "stack_trace", "source_fn_stack", "custom"):
            if key in self.anchor.meta:
                node.meta[key] = self.anchor.meta[key]
        fake_args, fake_kwargs = fx.node.map_arg((args, kwargs), value_of)
        with enable_python_dispatcher():  # without it, composite ops turn symbolic sizes into numbers
            node.meta["example_value"] = target(*fake_args, **fake_kwargs)
        return node

    def size(self, node: fx.Node, axis: int) -> int | fx.Node:
        """The size of an axis: a number where it is static, else a node that computes it."""
        size = value_of(node).shape[axis]
        if isinstance(size, int):
            return size
        return self.call(torch.ops.aten.sym_size.int, node, axis)


Emit = Callable[[Builder, Gemm2d], fx.Node]
"""Writes the products of a match and the views around them in front of its node; returns the node's replacement."""


class Attend(Protocol):
    """Adds an attention to the graph: q [*batch, Hq, Sq, D], k and v [*batch, Hkv, Sk, D], the tensors of its steps."""

    def __call__(self, q: fx.Node, k: fx.Node, v: fx.Node, extras: Sequence[fx.Node]) -> fx.Node: ...


@dataclass(kw_only=True)
class Attention:
    """One attention: what makes weights of its scores, and how it is written in front of the last of its nodes.

    `inside` are nodes that nothing else reads, `axes` how many q has, `learned` says that a tensor of the steps gets a
    gradient. `spec` is None until it is resolved, and where it stays as it is.
    """

    steps: tuple[Step, ...]
    dropout: float = 0.0
    emit: Callable[[Builder, Attend], fx.Node]
    inside: frozenset[fx.Node] = frozenset()
    axes: int
    learned: bool
    spec: AttentionSpec | None = None


@dataclass(kw_only=True)
class Match:
    """A matmul-like node. Without `emit` it cannot be rewritten, and `skip` says why."""

    node: fx.Node
    form: str
    module_type: str
    products: tuple[Product, ...]
    emit: Emit | None = None
    skip: tuple[SkipReason, str] | None = None
    name: str = ""
    autocast: torch.dtype | None = None
    takes_autocast: bool = True
    """Whether autocast changes the dtypes of this op."""
    attention: Attention | None = None
    """Of an attention that can be quantized as one; its scores and its context share it where they are two matches."""
    remark: str = ""
    """Of the product of two activations: why it is not quantized as part of an attention."""
    plan: Any = None
    """Of a product of two tensors: its `Contraction`."""
    needs_grad: tuple[tuple[bool, bool], ...] = ()
    """For each product, whether (lhs, rhs) get a gradient."""
    takes_state: bool = True
    """Whether the state of delayed scaling and stochastic rounding reaches this node's graph."""
    resolved: list[Resolved] = field(default_factory=list)


@dataclass(kw_only=True)
class Resolved:
    """The quantizers of one product by operand (`input`, `weight`, `grad_output`); None keeps the product as it is."""

    quantizers: dict[str, Quantizer] | None
    decisions: list[Decision]
    numbers: dict[str, int] = field(default_factory=dict)
    """Where an operand is rounded stochastically, its number in the graph."""


def quantized(match: Match) -> bool:
    """Whether anything of a resolved match is quantized."""
    attention = match.attention is not None and match.attention.spec is not None
    return attention or any(resolved.quantizers is not None for resolved in match.resolved)


def put_in_place(result: fx.Node, node: fx.Node) -> None:
    """Puts what was built of a node in its place, with what its meta says besides."""
    for key, value in node.meta.items():
        result.meta.setdefault(key, value)
    node.replace_all_uses_with(result)
    node.graph.erase_node(node)


def erase_unused(nodes: Iterable[fx.Node], keep: Collection[fx.Node] = ()) -> None:
    """Erases those of the nodes that nothing reads any more, and what was computed for them alone."""
    queue, gone = list(nodes), set(keep)
    while queue:
        node = queue.pop()
        if node.op == "call_function" and node not in gone and not node.users and not node.is_impure():
            gone.add(node)
            queue += node.all_input_nodes
            node.graph.erase_node(node)
