"""Operators by name, and the one vocabulary of those that move elements: which keep all of them, which their order.

A name is that of a function, a method or an attribute in Dynamo's graphs and of an operator in ATen's; `op_name` gives
it for both. A pass that looks through views takes its classes from here.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from fxquant.compat.private import HigherOrderOperator, OpOverload, OpOverloadPacket

FXQUANT_OPS = "fxquant"
"""The namespace of the operators of this project."""

STRICT_RESHAPES = frozenset(("view", "_unsafe_view"))
"""Reshapes that never copy: they refuse strides that the new shape cannot have."""

RESHAPES = STRICT_RESHAPES | frozenset("reshape view_as reshape_as flatten unflatten".split())
"""Operators that give the same elements in the same order another shape."""

UNIT_AXES = frozenset(("squeeze", "unsqueeze"))
"""Reshapes that add or remove axes of size 1; what is broadcast has to tell them from others."""

EXCHANGES = frozenset(("transpose", "swapaxes", "swapdims"))
"""Operators that exchange two axes, given by number."""

MATRIX_TRANSPOSES = frozenset(("mT", "mH", "adjoint"))
"""Operators that exchange the last two axes."""

REVERSALS = frozenset(("t", "T", "H", "numpy_T", "matrix_H"))
"""Operators that put the axes in reverse order."""

ORDERS = EXCHANGES | MATRIX_TRANSPOSES | REVERSALS | frozenset(("permute", "movedim", "moveaxis"))
"""Operators that put the axes in another order. Numbers are real here, so conjugates are the same."""

COPIES = frozenset(("clone", "contiguous"))
"""Operators that write the same tensor to other memory."""

ALIASES = frozenset(("alias",))
"""Operators whose result is their argument."""

DETACHES = frozenset(("detach",))
"""Aliases without a gradient. What replaces nodes of a captured graph must not reach through them."""

CASTS = frozenset("to _to_copy type type_as float half bfloat16 double".split())
"""Operators that change the dtype, or may."""

REINTERPRETS = frozenset(("view_dtype",))
"""Operators that read the same bytes as another dtype; `op_name` tells them from other views."""

EXPANDS = frozenset(("expand", "expand_as", "broadcast_to"))
"""Operators that repeat the elements along axes."""

SLICES = frozenset(("slice", "narrow"))
"""Operators that take a range of an axis."""

SPLITS = frozenset("chunk split split_with_sizes tensor_split unsafe_split unsafe_chunk".split())
"""Operators that divide an axis into ranges."""

PICKS = frozenset(("getitem", "select", "unbind"))
"""Operators that take entries of an axis by number, which may then go away."""

GATHERS = frozenset(("index_select", "index", "take_along_dim", "gather"))
"""Operators that take entries by a tensor of indices."""

VIEWS = RESHAPES | UNIT_AXES | ORDERS | ALIASES | DETACHES | SLICES
"""Operators that leave elements where they are; a reshape may copy them."""

SAME_ELEMENTS = RESHAPES | UNIT_AXES | ORDERS | ALIASES | DETACHES | COPIES
"""Operators that keep all elements, each once, and their dtype."""

SAME_PLACES = CASTS | COPIES | ALIASES
"""Operators that keep every element at its place, perhaps in another dtype."""

PARTS = frozenset(("local_part", "to_local"))
"""Functions that give what one rank holds of a tensor that is spread over a mesh."""

SAME_VALUES = VIEWS | COPIES | CASTS | REINTERPRETS | EXPANDS | SPLITS | PICKS | PARTS
"""Operators whose result holds values of their first argument, in another shape, order or dtype."""


def op_name(node: fx.Node) -> str:
    """A short name that method, function and ATen spellings of one operator share; attributes are named as such."""
    target = node.target
    if target is getattr:
        return str(node.args[1])
    if isinstance(target, str):
        return "view_dtype" if target == "view" and isinstance(node.args[-1], torch.dtype) else target
    if target is torch.ops.aten.view.dtype:
        return "view_dtype"
    if isinstance(target, OpOverload):
        return target._schema.name.removeprefix("aten::")
    if isinstance(target, OpOverloadPacket):
        return target._qualified_op_name.removeprefix("aten::")
    return str(getattr(target, "__name__", target))


def calls(node: Any, names: Collection[str]) -> bool:
    """Returns True if this is a node that calls an operator of one of the names."""
    return isinstance(node, fx.Node) and node.op in ("call_function", "call_method") and op_name(node) in names


COMPOSITES = frozenset(("linear", "grouped_linear", "attention"))
"""The operators of fxquant that autograd differentiates."""


def fxquant_op(node: fx.Node) -> str:
    """Returns the name of the operator of fxquant that a node calls, without namespace; "" for another node."""
    if node.op != "call_function":
        return ""
    packet = getattr(node.target, "overloadpacket", node.target)  # Dynamo records what a user wrote: often a packet
    space, _, name = getattr(packet, "_qualified_op_name", "").partition("::")
    return name if space == FXQUANT_OPS else ""


def is_fxquant(node: fx.Node, *names: str) -> bool:
    """Returns True if a node calls an operator of fxquant, or one of those called `names`."""
    operator = fxquant_op(node)
    return operator != "" and (not names or operator in names)


def is_collective(node: Any) -> bool:
    """Returns True if a node calls, or waits for, an operator over several ranks."""
    return (
        isinstance(node, fx.Node)
        and isinstance(node.target, OpOverload)
        and node.target.namespace == "_c10d_functional"
    )


def higher_order_op(node: fx.Node) -> str:
    """Returns the name of the operator over graphs that a node calls; "" for another node."""
    return str(node.target._name) if isinstance(node.target, HigherOrderOperator) else ""


def writes(node: fx.Node) -> bool:
    """Returns True if a node calls an operator that writes into its arguments."""
    return isinstance(node.target, OpOverload) and bool(node.target._schema.is_mutable)


def argument_named(node: fx.Node, name: str, default: Any = None) -> Any:
    """Returns the argument that the schema of a node's operator calls `name`, the default where none is given."""
    if not isinstance(node.target, OpOverload):
        return default
    for index, argument in enumerate(node.target._schema.arguments):
        if argument.name == name:
            return node.args[index] if index < len(node.args) else node.kwargs.get(name, default)
    return default


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """Returns the arguments that a node writes into."""
    written: list[fx.Node] = []
    for index, argument in enumerate(node.target._schema.arguments if isinstance(node.target, OpOverload) else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
            values = value if isinstance(value, (list, tuple)) else [value]
            written += [value for value in values if isinstance(value, fx.Node)]
    return written
