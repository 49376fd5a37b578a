"""Values of nodes: the fake tensors and symbols that a graph was traced with."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxquant.passes.graph.meta import EXAMPLE_VALUE, VAL

Dim = int | torch.SymInt
"""The size of an axis."""


def val(node: Any) -> Any:
    """Returns the value of a node of an ATen graph; anything else stays."""
    return node.meta[VAL] if isinstance(node, fx.Node) else node


def value_of(node: Any) -> Any:
    """Returns the value of a node of any graph: a fake tensor, a symbol, or a tuple of them; anything else stays."""
    if not isinstance(node, fx.Node):
        return node
    for key in (EXAMPLE_VALUE, VAL):
        if key in node.meta:
            return node.meta[key]
    if node.op != "get_attr":
        raise KeyError(f"node {node.name} ({node.op} {node.target}) has no example value")
    value: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        value = getattr(value, part)
    return value


def maybe_value(node: fx.Node) -> Any:
    """Returns the value of a node, None if it has none."""
    try:
        return value_of(node)
    except KeyError:
        return None
