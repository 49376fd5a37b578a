"""Weights among operands: parameters seen through views, casts and the boundaries of nested graphs.

A matrix that a module holds as a buffer or an attribute is one too, unless a call writes into it, and so is one that is
computed from a weight, element by element, with what modules hold alone: by a parametrization, or with adapters added.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from fxquant.compat.private import held_by_module
from fxquant.compat.values import version
from fxquant.passes.graph.axes import order_of, same, same_sizes
from fxquant.passes.graph.meta import HELD
from fxquant.passes.graph.names import (
    DETACHES,
    EXPANDS,
    GATHERS,
    PICKS,
    RESHAPES,
    SAME_PLACES,
    SAME_VALUES,
    UNIT_AXES,
    calls,
    op_name,
)
from fxquant.passes.graph.values import maybe_value, value_of


@dataclass(frozen=True, kw_only=True)
class Weight:
    """The node of a parameter, or of a matrix held like one, in the outermost graph.

    `picked` says that one of its entries is selected on the way, `gathered` that entries are, by a tensor of indices.
    """

    parameter: fx.Node
    gathered: bool
    picked: bool

    @property
    def stacked(self) -> bool:
        """True for one of several matrices that a parameter holds."""
        return self.picked and value_of(self.parameter).ndim > 2


def find_weight(node: fx.Node, outer: Mapping[fx.Node, fx.Node]) -> Weight | None:
    """Returns the parameter that a node shows, if it shows one."""
    gathered = picked = False
    while True:
        if node.op in ("placeholder", "get_attr"):
            value = value_of(node)
            if isinstance(value, torch.nn.Parameter) or _is_held(node, value):
                # rows of an embedding are activations; only whole matrices picked from a stack are weights
                return None if gathered and value.ndim < 3 else Weight(parameter=node, gathered=gathered, picked=picked)
            if node not in outer:
                return None
            node = outer[node]
            continue
        name = op_name(node)
        picked = picked or name in GATHERS or name in PICKS
        indices = map(value_of, node.all_input_nodes[1:])
        if name in GATHERS or (name == "getitem" and any(isinstance(index, torch.Tensor) for index in indices)):
            gathered = True
        elif name not in SAME_VALUES:
            return None
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node):
            return None
        node = source


def _is_held(node: fx.Node, value: object) -> bool:
    if not (isinstance(value, torch.Tensor) and value.ndim == 2 and value.is_floating_point()):
        return False
    if HELD in node.meta:
        return True
    written = not value.is_inference() and version(value) > 0
    return not written and (node.op == "get_attr" or held_by_module(node))


_BY_ELEMENTS = frozenset(
    "add iadd sub isub mul imul multiply div divide truediv itruediv neg pow tanh sigmoid softmax abs round clamp "
    "clamp_min clamp_max where tril triu masked_fill dropout _weight_norm _weight_norm_interface".split()
)
"""Operators that make a weight of a weight."""

_OF_MATRICES = frozenset("matmul rmatmul mm addmm einsum tensordot inner linalg_multi_dot chain_matmul".split())
"""Operators that make a weight of weights by products; `linear` has an activation in the first place."""

_JOINS = frozenset(("cat", "concat"))
"""Operators that make a weight of several."""


class Computed:
    """The matrices that are computed from weights, among the nodes that it was told of in the order of their graph."""

    def __init__(self, outer: Mapping[fx.Node, fx.Node]) -> None:
        self._outer = outer
        self._held: set[fx.Node] = set()
        self._made: set[fx.Node] = set()

    def __contains__(self, node: object) -> bool:
        return node in self._made

    def add(self, node: fx.Node) -> None:
        """Looks at the next node."""
        value = maybe_value(node)
        if node in self._outer:
            sources = [self._outer[node]]
        elif node.op == "placeholder":
            is_parameter = isinstance(value, torch.nn.Parameter)
            if isinstance(value, torch.Tensor) and not (is_parameter or HELD in node.meta or held_by_module(node)):
                return
            sources = []
        else:
            sources = node.all_input_nodes
        if not self._held.issuperset(sources):
            return
        self._held.add(node)
        if isinstance(value, torch.Tensor) and value.ndim == 2 and value.is_floating_point():
            alike = [x for x in sources if same_sizes(getattr(maybe_value(x), "shape", ()), value.shape)]
            computed = calls(node, _BY_ELEMENTS) and any(map(self._shows, alike))
            joined = calls(node, _JOINS) and all(map(self._shows, sources))
            multiplied = calls(node, _OF_MATRICES) and all(map(self._shows, sources))
            seen = (node in self._outer or calls(node, SAME_VALUES)) and sources[0] in self._made
            if computed or joined or multiplied or seen:
                self._made.add(node)

    def _shows(self, node: fx.Node) -> bool:
        return node in self._made or find_weight(node, self._outer) is not None


@dataclass(frozen=True, kw_only=True)
class Gather:
    """Matrices that an index picks from a stack: ``stack[index]``, or that with its matrices transposed."""

    stack: fx.Node
    index: fx.Node
    transposed: bool


def find_gather(node: fx.Node, outer: Mapping[fx.Node, fx.Node]) -> Gather | None:
    """Returns the gather of a batch of matrices from the stack [E, rows, columns] that a parameter is, if it is one.

    Casts, copies, transposes of the matrices and views of the batch may follow.
    """
    transposed = False
    while True:
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node):
            return None
        index = _index_of(node)
        if index is not None:
            stack = find_weight(source, outer)
            whole = stack is not None and not stack.gathered and not stack.picked and value_of(source).ndim == 3
            return Gather(stack=source, index=index, transposed=transposed) if whole else None
        before, after = value_of(source), value_of(node)
        if order_of(node, before.ndim) == [*range(before.ndim - 2), before.ndim - 1, before.ndim - 2]:
            transposed = not transposed
        elif not calls(node, SAME_PLACES | DETACHES) and not (
            calls(node, RESHAPES | UNIT_AXES) and after.ndim > 2 and same_sizes(before.shape[-2:], after.shape[-2:])
        ):
            return None
        node = source


def expanded_from(node: fx.Node, repeating: Collection[int]) -> fx.Node | None:
    """Returns the tensor that was expanded along the axes `repeating`, if it has the other axes and no more.

    Unlike an entry of the expanded tensor it does not depend on a dynamic size, so that a weight stays a constant.
    """
    expanded = value_of(node).shape
    shape = torch.Size([size for axis, size in enumerate(expanded) if axis not in repeating])
    repeats = any(not same(expanded[axis], 1) for axis in repeating)
    while repeats and calls(node, EXPANDS | RESHAPES | UNIT_AXES) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
        if same_sizes(value_of(node).shape, shape):
            return node
    return None


def _index_of(node: fx.Node) -> fx.Node | None:
    """Returns the tensor of whole numbers by which a node picks entries of its first argument's first axis."""
    name, rest = op_name(node), node.args[1:]
    index: object = None
    if name == "getitem" and len(rest) == 1:
        index = rest[0]
    elif name == "index" and len(rest) == 1 and isinstance(rest[0], (list, tuple)) and len(rest[0]) == 1:
        index = rest[0][0]
    elif name == "index_select" and len(rest) == 2 and rest[0] == 0:
        index = rest[1]
    value = value_of(index) if isinstance(index, fx.Node) else None
    whole = isinstance(value, torch.Tensor) and value.ndim > 0 and value.dtype in (torch.int64, torch.int32)
    return index if whole and isinstance(index, fx.Node) else None
