"""Record in kernel: the kernel that has an amax takes it into the state of delayed scaling itself, on CUDA.

    parts = fxquant.produce_quantize([x], ..., record=True)
    amaxes.copy_(fxquant.record(amaxes, [parts[2], other], [5, 6]))
    # becomes
    parts = fxquant.produce_quantize_into([x], ..., aten.slice(amaxes, 0, 5, 6), ...)
    amaxes.copy_(fxquant.record(amaxes, [other], [6]))

and so `record_since`, which is the backward's, and the casts and the forward of attention. What of a record is left
reads the state after the kernels have written.
"""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

import torch
from torch import fx

from fxquant.compat.values import on_fakes
from fxquant.kernels.cast.producers import CastSpec
from fxquant.kernels.operator import traits_of
from fxquant.passes.graph.considered import allowed
from fxquant.passes.graph.meta import VAL
from fxquant.passes.graph.names import is_fxquant
from fxquant.passes.graph.values import val
from fxquant.passes.settings import Settings

_aten = torch.ops.aten
_STEP = "record_in_kernel"


def record_in_kernel(graph: fx.Graph, settings: Settings) -> int:
    """Rewrites `graph` in place; returns how many operators record by themselves."""
    count = 0
    for copy in list(graph.find_nodes(op="call_function", target=_aten.copy_.default)):
        state, record, *_ = _arguments(copy)
        if not isinstance(record, fx.Node) or not is_fxquant(record, "record", "record_since"):
            continue
        updates_itself = state.op == "placeholder" and record.args[0] is state and list(record.users) == [copy]
        if updates_itself and val(state).device.type == settings.device:
            count += _take(record)
            if not record.args[-1]:
                graph.erase_node(copy)
                graph.erase_node(record)
    return count


def _take(record: fx.Node) -> int:
    """Has what makes the amaxes of a record take them, where it can."""
    *before, new, slots = _arguments(record)
    times: Counter[fx.Node] = Counter(new)
    places: dict[fx.Node, int] = dict(zip(new, slots, strict=True))
    count = 0
    for node in dict.fromkeys(_arguments(amax)[0] for amax in times if amax.target is operator.getitem):
        results = _results(node, before)
        if not allowed(node, _STEP, "" if results else "the kernel that has the amax writes no state"):
            continue
        parts = len(node.meta[VAL]) // results
        items = {_arguments(user)[1]: user for user in node.users}
        amaxes = [items[place] for i in range(results) if (place := parts * (i + 1) - 1) in items]
        alone = len(amaxes) == results and all(times[amax] == 1 and list(amax.users) == [record] for amax in amaxes)
        alone = alone and len({places[amax] for amax in amaxes}) == results
        if allowed(node, _STEP, "" if alone else "something else reads its amaxes, or one slot has several"):
            _record_itself(node, [places[amax] for amax in amaxes], before, parts)
            pairs = zip(*_arguments(record)[-2:], strict=True)
            remaining = [(amax, slot) for amax, slot in pairs if amax not in amaxes]
            record.args = (*before, [amax for amax, _ in remaining], [slot for _, slot in remaining])
            for amax in amaxes:
                record.graph.erase_node(amax)
            record.graph.erase_node(node)
            count += 1
    return count


def _results(node: fx.Node, before: list[fx.Node]) -> int:
    """How many amaxes an operator gives, each behind as many other items, that it can take into a state by itself."""
    if is_fxquant(node, "produce_quantize"):
        return CastSpec.parse(str(node.args[1])).producer.results if node.args[-1] else 0
    by_given_scale = is_fxquant(node, "quantize_qkv") and len(node.args) == 6 and node.args[-1] and node.args[-2]
    return int(len(before) == 1 and bool(by_given_scale or is_fxquant(node, "attention_forward")))


def _record_itself(produce: fx.Node, slots: list[int], before: list[fx.Node], parts: int) -> None:
    """Puts an operator that takes its amaxes into `slots` in the place of one, whose last items of `parts` they are."""
    graph, first, last = produce.graph, min(slots), max(slots)
    with graph.inserting_before(produce):
        amaxes, step = (*(_entries(node, first, last) for node in before), None)[:2]
        recording = traits_of(produce).recording
        assert recording is not None
        operands = produce.args if is_fxquant(produce, "attention_forward") else produce.args[:-1]
        more = (step, slots[0] == last and len(slots) > 1) if is_fxquant(produce, "produce_quantize") else ()
        fused = graph.call_function(recording.target, (*operands, amaxes, *more))
        kept = [value for i, value in enumerate(produce.meta[VAL]) if (i + 1) % parts]
        fused.meta = {**produce.meta, VAL: kept}
        for item in list(produce.users):
            _, place = _arguments(item)
            if (place + 1) % parts:
                kept_item = graph.call_function(operator.getitem, (fused, place - place // parts))
                kept_item.meta = dict(item.meta)
                item.replace_all_uses_with(kept_item)
                graph.erase_node(item)


def _entries(state: fx.Node, first: int, last: int) -> fx.Node:
    """The first and the last of some slots of a state."""
    view = state.graph.call_function(_aten.slice.Tensor, (state, 0, first, last + 1, max(last - first, 1)))
    with on_fakes(val(state)):
        view.meta[VAL] = _aten.slice.Tensor(*map(val, view.args))
    return view


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    return node.args
