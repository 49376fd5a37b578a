"""Advance state: the delayed scaling of a graph goes on to its next step in one kernel, on CUDA.

scales, new_history = fxquant.delayed_update(scale, history, forward_amax, ...)
a = aten.slice(scales, 0, 0, 1)
amaxes = fxquant.record(aten.full([n], 0), ...)
scale.copy_(scales); history.copy_(new_history); forward_amax.copy_(amaxes); step.copy_(step + 1)
# becomes
a, ... = fxquant.delayed_advance(scale, history, forward_amax, ...)    # writes all four
amaxes = fxquant.record(forward_amax, ...)
forward_amax.copy_(amaxes)
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fxquant.compat.values import on_fakes
from fxquant.passes.graph.builder import erase_unused
from fxquant.passes.graph.meta import VAL
from fxquant.passes.graph.names import is_fxquant
from fxquant.passes.graph.values import val
from fxquant.passes.settings import Settings

_aten = torch.ops.aten


def advance_state(graph: fx.Graph, settings: Settings) -> int:
    """Rewrites `graph` in place; returns how many updates advance the state."""
    copies = {node.args[0]: node for node in graph.find_nodes(op="call_function", target=_aten.copy_.default)}
    count = 0
    for update in list(graph.nodes):
        if is_fxquant(update, "delayed_update") and val(update.args[0]).device.type == settings.device:
            count += _advance(update, copies)
    return count


def _advance(update: fx.Node, copies: dict[Any, fx.Node]) -> bool:
    """Rewrites an update if nothing else reads or writes its state; returns True if it has."""
    scale, history, forward_amax, _, step, *_ = update.args
    results = {user.args[1]: user for user in update.users if user.target is operator.getitem}
    states = (scale, history, forward_amax, step)
    if not all(state in copies for state in states) or not {0, 1} <= results.keys():
        return False
    new_scale, new_history, recorded, counted = (copies[state].args[1] for state in states)
    assert isinstance(recorded, fx.Node) and isinstance(counted, fx.Node)
    root, reader = recorded, copies[forward_amax]
    while is_fxquant(root, "record"):
        root, reader = root.args[0], root  # type: ignore[assignment]
    counts = counted.target is _aten.add.Tensor and counted.args == (step, 1)
    zeros = root.target is _aten.full.default and root.args[1] == 0
    if new_scale is not results[0] or new_history is not results[1] or not counts or not zeros:
        return False
    expected = {update, counted, *(copies[state] for state in states)}
    if any(user not in expected for state in states for user in state.users):  # type: ignore[union-attr]
        return False
    if any(copies[state].users for state in states):
        return False
    _replace(update, results[0], copies[scale])
    root.replace_all_uses_with(forward_amax, delete_user_cb=lambda user: user is reader)  # type: ignore[arg-type]
    done = [copies[scale], copies[history], copies[step], counted, *results.values(), update]
    for node in [*done, *([reader] if reader is copies[forward_amax] else [])]:
        update.graph.erase_node(node)
    return True


def _replace(update: fx.Node, scales: fx.Node, copy: fx.Node) -> None:
    """Puts the operator that advances in front of an update, and its scales in the place of the update's."""
    graph, like = update.graph, val(scales)
    with graph.inserting_before(update), on_fakes(like):
        advance = graph.call_function(torch.ops.fxquant.delayed_advance.default, update.args)
        values = [torch.empty(1, dtype=like.dtype, device=like.device) for _ in range(like.shape[0])]
        advance.meta = {**update.meta, VAL: values}
        entries = [graph.call_function(operator.getitem, (advance, i)) for i in range(len(values))]
        for entry, value in zip(entries, values, strict=True):
            entry.meta = {**scales.meta, VAL: value}
        whole = graph.call_function(_aten.cat.default, (entries,))
        whole.meta = dict(scales.meta)
    for user in list(scales.users):
        if user is not copy and user.target is _aten.slice.Tensor and tuple(val(user).shape) == (1,):
            user.replace_all_uses_with(entries[user.args[2]])  # type: ignore[index]
            graph.erase_node(user)
    scales.replace_all_uses_with(whole, delete_user_cb=lambda user: user is not copy)
    erase_unused([whole, *entries])
