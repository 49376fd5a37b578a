"""Concatenate GEMMs: linear layers that read one tensor, such as q, k and v or gate and up, become one with all rows.

    q = fxquant.scaled_mm(parts, [b_q_weight_data, b_q_weight_scale], ...)
    k = fxquant.scaled_mm(parts, [b_k_weight_data, b_k_weight_scale], ...)
    # becomes, with a weight of the rows of both in the state
    both = fxquant.scaled_mm(parts, [b_q_weight_data_joined, b_q_weight_scale_joined], ...)
    q, k = aten.slice(both, 1, 0, 4096), aten.slice(both, 1, 4096, 5120)

One GEMM of few rows reads its weight faster than several, each of which begins and ends by itself. For programs that
are compiled and not looked into: layers lose their names.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.compat.values import on_fakes
from fxquant.formats import QuantSpec
from fxquant.passes.export.program_state import ProgramState, Value
from fxquant.passes.export.store_weights import erase_unused_users
from fxquant.passes.graph.meta import VAL
from fxquant.passes.graph.names import SAME_VALUES, STRICT_RESHAPES, calls, is_fxquant
from fxquant.passes.graph.values import val

_aten = torch.ops.aten
_TILE = 128


def concatenate_gemms(state: ProgramState) -> int:
    """Joins layers of the outermost graph whose weights are stored; returns how many became part of another."""
    count = 0
    graph = state.bodies.top.graph
    for node in list(graph.nodes):
        for group in _groups(node, state):
            if _in_order(group, graph):
                _join(group, state)
                count += len(group) - 1
    return count


def _groups(source: fx.Node, state: ProgramState) -> Iterator[list[fx.Node]]:
    """The GEMMs of a tensor, quantized or as it is, that differ in their weights alone, in the order of the graph."""
    if is_fxquant(source, "quantize"):
        readers = {user for item in source.users for user in item.users if item.target is operator.getitem}
    else:
        readers = {user for user in source.users if is_fxquant(user, "scaled_mm") and user.args[0] == [source]}
    if len(readers) < 2:
        return
    alike: dict[Any, list[fx.Node]] = {}
    for node in source.graph.nodes:
        if node in readers and is_fxquant(node, "scaled_mm") and _is_joinable(node, state):
            a, _, a_spec, b_spec, bias, *rest = node.args
            alike.setdefault((tuple(a), a_spec, b_spec, bias is None, *rest), []).append(node)
    yield from (group for group in alike.values() if len(group) > 1)


def _is_joinable(node: fx.Node, state: ProgramState) -> bool:
    """Returns True if a GEMM shares its weight, a matrix, with nothing, and its scales can stand below others."""
    _, parts, a_spec, b_spec, bias, *_ = node.args
    constants = [*parts, *([bias] if bias is not None else [])]  # type: ignore[misc]
    if not all(isinstance(c, fx.Node) and [*c.users] == [node] and state.value(c) is not None for c in constants):
        return False
    of_input, row = (QuantSpec.parse(str(spec)).row for spec in (a_spec, b_spec))
    weight = val(parts[0])  # type: ignore[index]
    if weight.ndim != 2 or val(node).ndim != 2:
        return False
    if row.family == "nvfp4":  # an amax for each row is part of the format; it is emulated beside a quantized input
        return of_input.family == "identity"
    if row.family == "per_tensor":  # the same scale for each row; then those of the input may be anything cuBLAS takes
        return of_input.family in ("identity", "per_tensor", "per_row")
    return row.family == "per_row" or (row.family == "block" and weight.shape[0] % _TILE == 0)


def _in_order(group: Sequence[fx.Node], graph: fx.Graph) -> bool:
    """Returns True if all that the GEMMs of a group read is made before the first: weights and scales are inputs."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    return all(order[source] < order[group[0]] for node in group for source in node.all_input_nodes)


def _join(group: Sequence[fx.Node], state: ProgramState) -> None:
    first = group[0]
    graph = first.graph
    args: list[tuple[Any, ...]] = [node.args for node in group]
    parts, biases = [*zip(*(arg[1] for arg in args), strict=True)], [arg[4] for arg in args]
    a, _, a_spec, b_spec, _, *rest = args[0]
    sizes = [int(val(node).shape[0]) for node in parts[0]]
    spec = QuantSpec.parse(str(b_spec))
    values = [[_constant(state, node)[0] for node in nodes] for nodes in parts]
    if spec.row.family in ("per_tensor", "nvfp4"):  # what a tensor has one of, each of its rows gets
        values[-1] = [part.reshape(-1, 1).expand(size, 1) for part, size in zip(values[-1], sizes, strict=True)]
        assert spec.row.element is not None
        by_row = replace(spec, row_scaled=True) if spec.row.family == "nvfp4" else None
        b_spec = str(by_row or f"per_row_{spec.row.element.name}")
    weight = [_added(state, nodes, of_part) for nodes, of_part in zip(parts, values, strict=True)]
    bias = None if biases[0] is None else _added(state, biases, [_constant(state, node)[0] for node in biases])
    with graph.inserting_before(first), on_fakes(val(first)):
        whole = graph.call_function(first.target, (a, weight, a_spec, b_spec, bias, *rest))  # type: ignore[arg-type]
        whole.meta = {**first.meta, VAL: val(first).new_empty((val(first).shape[0], sum(sizes)))}
        start = 0
        for node, size in zip(group, sizes, strict=True):
            columns = graph.call_function(_aten.slice.Tensor, (whole, 1, start, start + size))
            columns.meta = {**node.meta, VAL: val(whole)[:, start : start + size]}
            if _is_output(node):
                order: dict[str, Any] = {"memory_format": torch.contiguous_format}
                columns = graph.call_function(_aten.clone.default, (columns,), order)
                columns.meta = {**node.meta}
            else:
                _reshape_views(node)
            node.replace_all_uses_with(columns)
            start += size
    replaced = {root for node in (*chain(*parts), *biases) if node is not None for root in _roots(state, node)}
    for node in group:
        graph.erase_node(node)
    erase_unused_users(replaced)
    state.drop_unused(replaced)


def _added(state: ProgramState, nodes: Sequence[fx.Node], values: Sequence[Tensor]) -> fx.Node:
    """Adds a tensor with the rows of several to the state, under the name of the first; returns its placeholder."""
    roots = sorted(map(state.name, _roots(state, nodes[0])))
    return state.add(f"{roots[0] if roots else nodes[0].name}_joined", _cat(values))


def _roots(state: ProgramState, node: fx.Node) -> set[fx.Node]:
    """Returns the placeholders that a constant is made from."""
    return {*_constant(state, node)[1], *([node] if node.op == "placeholder" else [])}


def _constant(state: ProgramState, node: fx.Node) -> Value:
    value = state.value(node)
    assert value is not None
    return value


def _cat(tensors: Sequence[Tensor]) -> Tensor:
    """Puts rows below each other, those of FP8 too."""
    if tensors[0].element_size() > 1:
        return torch.cat(list(tensors))
    return torch.cat([t.view(torch.uint8) for t in tensors]).view(tensors[0].dtype)


def _is_output(node: fx.Node) -> bool:
    """Returns True if a program returns a tensor, or a view of it, that is dense and is to stay so."""
    for user in node.users:
        if user.op == "output" and val(node).is_contiguous():
            return True
        if calls(user, SAME_VALUES) and _is_output(user):
            return True
    return False


def _reshape_views(node: fx.Node) -> None:
    """Lets the views of a tensor copy where columns of a wider one cannot be seen as they want."""
    for user in node.users:
        if calls(user, SAME_VALUES):
            if calls(user, STRICT_RESHAPES):
                user.target = _aten.reshape.default
            _reshape_views(user)
