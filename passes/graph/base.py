"""What every pass over an ATen graph shares: a name, timing in the log, and the graph before and after it."""

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx

from fxquant.compat.private import lazy_format_graph_code
from fxquant.formats import QuantSpec

log = logging.getLogger(__name__)

FXQUANT_OPS = "fxquant"

_aten = torch.ops.aten
VIEWS = (
    _aten.view.default, _aten.reshape.default, _aten._unsafe_view.default, _aten.permute.default,
    _aten.transpose.int, _aten.t.default, _aten.unsqueeze.default, _aten.squeeze.dim, _aten.slice.Tensor,
)  # fmt: skip
"""Operators that leave elements where they are."""

EXTERNAL = (
    _aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten._scaled_mm.default,
    _aten._scaled_dot_product_flash_attention.default, _aten._scaled_dot_product_flash_attention_backward.default,
    _aten._scaled_dot_product_cudnn_attention.default, _aten._scaled_dot_product_cudnn_attention_backward.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_efficient_attention_backward.default,
)  # fmt: skip
"""What no kernel of Inductor's own computes."""


def behind_views(node: Any, views: tuple[Any, ...] = VIEWS) -> Any:
    """The tensor that a node is a view of, or the node itself; what is no node stays."""
    while isinstance(node, fx.Node) and node.target in views:
        node = node.args[0]
    return node


def is_fxquant(node: fx.Node, name: str | None = None) -> bool:
    """Whether a node calls an operator of fxquant, or the one called `name`."""
    if node.op != "call_function":
        return False
    packet = getattr(node.target, "overloadpacket", node.target)  # Dynamo records what a user wrote: often a packet
    space, _, operator = getattr(packet, "_qualified_op_name", "").partition("::")
    return space == FXQUANT_OPS and name in (None, operator)


class Side(NamedTuple):
    """One direction of a quantization; `state` is what it is given besides its tensor, such as a scale."""

    direction: str
    spec: str
    state: Any

    @property
    def per_tensor(self) -> bool:
        return QuantSpec.parse(self.spec).row.family == "per_tensor"


def sides_of(node: fx.Node) -> list[Side]:
    """The directions in which a node quantizes a tensor, its first argument; none for what is no quantization."""
    if is_fxquant(node, "quantize"):
        _, spec, direction, state, *_ = (*node.args, None)
        return [Side(str(direction), str(spec), state)]
    if is_fxquant(node, "hybrid_quantize"):
        _, row, column, row_state, column_state, *_ = (*node.args, None, None)
        return [Side("rowwise", str(row), row_state), Side("columnwise", str(column), column_state)]
    return []


def in_memory(x: Any) -> bool:
    """Whether a tensor is a graph's input or the result of a GEMM or an attention, seen through views."""
    x = behind_views(x)
    if isinstance(x, fx.Node) and x.target is operator.getitem:
        x = x.args[0]
    if not isinstance(x, fx.Node):
        return False
    if is_fxquant(x, "scaled_mm"):  # with a bias of another dtype something elementwise follows
        return x.args[4] is None or val(x).dtype == torch.bfloat16
    return x.op in ("placeholder", "get_attr") or x.target in EXTERNAL


def run_pass(name: str, run: Callable[[fx.Graph], int], graph: fx.Graph) -> int:
    """Runs one pass and logs how many nodes it changed, how long it took, and with DEBUG the graph after it."""
    start = time.perf_counter()
    changed = run(graph)
    log.info("%s: %d nodes in %.1f ms", name, changed, (time.perf_counter() - start) * 1e3)
    if changed and graph.owning_module is not None:
        log.debug("%s", lazy_format_graph_code(f"fxquant {name}", graph.owning_module))
    return changed


def val(node: Any) -> Any:
    """The fake value that AOTAutograd gave a node."""
    return node.meta["val"] if isinstance(node, fx.Node) else node
