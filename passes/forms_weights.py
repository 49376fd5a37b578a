"""Which operands are weights: parameters seen through views, casts and the boundaries of nested graphs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from fxquant.compat import OpOverload, OpOverloadPacket
from fxquant.passes.facts import value_of

VIEWS = frozenset(
    """T H mT mH t transpose swapaxes swapdims permute movedim moveaxis adjoint numpy_T matrix_H
    view view_as reshape reshape_as flatten unflatten squeeze unsqueeze expand expand_as broadcast_to
    getitem select narrow slice chunk split split_with_sizes tensor_split unbind unsafe_split unsafe_chunk
    to _to_copy type type_as float half bfloat16 double contiguous clone detach alias""".split()
)
"""Ops whose result holds the values of their first argument, in another shape, order or dtype."""

GATHERS = frozenset(("index_select", "index", "take_along_dim", "gather"))
"""Ops that pick some of the entries of their first argument by a tensor of indices."""


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A parameter's node in the outermost graph, and what happens on the way from it.

    `picked`: one of its entries is selected. `gathered`: entries are, by a tensor of indices.
    """

    parameter: fx.Node
    gathered: bool
    picked: bool

    @property
    def stacked(self) -> bool:
        """Whether this is one of several matrices that one parameter holds."""
        return self.picked and value_of(self.parameter).ndim > 2


_PICKS = frozenset(("getitem", "select", "unbind"))


def op_name(node: fx.Node) -> str:
    """A short name that method, function and ATen spellings of one op share; attributes are named as such."""
    target = node.target
    if target is getattr:
        return str(node.args[1])
    if isinstance(target, str):
        return target
    if isinstance(target, OpOverload):
        return target._schema.name.removeprefix("aten::")
    if isinstance(target, OpOverloadPacket):
        return target._qualified_op_name.removeprefix("aten::")
    return str(getattr(target, "__name__", target))


def find_weight(node: fx.Node, outer: Mapping[fx.Node, fx.Node]) -> Weight | None:
    """The parameter a node shows, if it shows one."""
    gathered = picked = False
    while True:
        if node.op in ("placeholder", "get_attr"):
            value = value_of(node)
            if isinstance(value, torch.nn.Parameter):
                # rows of an embedding are activations; only whole matrices picked from a stack are weights
                return None if gathered and value.ndim < 3 else Weight(parameter=node, gathered=gathered, picked=picked)
            if node not in outer:
                return None
            node = outer[node]
            continue
        name = op_name(node)
        picked = picked or name in GATHERS or name in _PICKS
        if name in GATHERS or (name == "getitem" and _indexes_by_tensor(node)):
            gathered = True
        elif name not in VIEWS:
            return None
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node):
            return None
        node = source


def _indexes_by_tensor(node: fx.Node) -> bool:
    return any(isinstance(value_of(index), torch.Tensor) for index in node.all_input_nodes[1:])
