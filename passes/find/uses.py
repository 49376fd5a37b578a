"""The nodes of a captured graph whose results are used, and those that get a gradient.

What nothing reads does not run, whatever the model wrote: a backend's first step is to drop it. A result that is only
compared, cast to whole numbers or detached has no backward, though it is differentiable.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, fx

from fxquant.compat.private import HigherOrderOperator, tree_leaves
from fxquant.passes.find.transforms import trained_entries
from fxquant.passes.graph.names import calls, op_name, writes
from fxquant.passes.graph.values import maybe_value

_IN_PLACE = frozenset(f"i{name}" for name in "add sub mul truediv floordiv matmul pow mod and or xor".split())
_OTHER_EFFECTS = frozenset(("setitem", "__setitem__", "grad", "backward"))

_FACTS = frozenset("size shape numel nelement dim ndim stride storage_offset dtype device".split())
"""Names of what is known of a tensor without its values."""


@dataclass(frozen=True)
class Uses:
    """The nodes of a graph that are `used`, and those that are `trained`, for which a backward has a gradient."""

    used: frozenset[fx.Node]
    trained: frozenset[fx.Node]

    @classmethod
    def of(cls, graph: fx.Graph) -> Uses:
        used, trained, entries = set[fx.Node](), set[fx.Node](), trained_entries(graph)
        for node in reversed(graph.nodes):
            effects = has_effects(node)
            if effects or node in used:
                used |= {node, *(() if calls(node, _FACTS) else node.all_input_nodes)}
                if effects or node in trained:
                    trained |= {node, *(x for x in node.all_input_nodes if x in entries or _differentiable(x))}
        return cls(frozenset(used), frozenset(trained))


def has_effects(node: fx.Node) -> bool:
    """Returns True for a graph's output, and for what may write or do more than give a result."""
    if node.op not in ("call_function", "call_method"):
        return node.op == "output"
    name, home = op_name(node), getattr(node.target, "__module__", None) or "torch"
    if isinstance(node.target, HigherOrderOperator) or writes(node) or "out" in node.kwargs or "::" in name:
        return True
    if node.op == "call_function" and home.split(".")[0] not in ("torch", "_operator", "builtins", "fxquant"):
        return True  # a function of the user's own
    in_place = name.endswith("_") and not name.endswith("__") and home != "_operator"  # which has `and_`
    return in_place or name in _IN_PLACE or name in _OTHER_EFFECTS


def _differentiable(node: fx.Node) -> bool:
    leaves: Iterable[object] = tree_leaves(maybe_value(node))
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)
