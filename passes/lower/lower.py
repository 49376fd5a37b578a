"""Lower: replaces every fxquant operator by what runs on its device. After it the graph speaks of kernels only.

The operator chooses its kernel by the facts of a node; the kernel is traced, and the trace put in the node's place. On
the CPU that is the meaning itself, spelled in ATen operators for Inductor to fuse; beside fxquant, its casts are pieces
that all graphs call (`fxquant.kernels.cast.pieces`).
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.compat.patches import written_by
from fxquant.compat.private import (
    DENSE,
    inductor_decompositions,
    tree_flatten,
    tree_leaves,
    tree_map_only,
    triton_kernel_wrapper_functional,
    triton_kernel_wrapper_mutation,
)
from fxquant.compat.values import statically_known_true, unguarded_sizes
from fxquant.errors import GraphVerificationError
from fxquant.kernels.cast.rounded import of_rounded
from fxquant.kernels.grouped.high_precision import portable_grouped_mm
from fxquant.kernels.linear import cublas as gemm
from fxquant.kernels.linear.choice import GemmKernel
from fxquant.kernels.linear.ops import scaled_mm
from fxquant.kernels.operator import Facts, operator_of
from fxquant.passes.graph.builder import Builder, put_in_places
from fxquant.passes.graph.considered import allowed
from fxquant.passes.graph.match import behind_views
from fxquant.passes.graph.names import is_fxquant, writes
from fxquant.passes.graph.trace import inline, trace
from fxquant.passes.graph.values import val
from fxquant.passes.joint.sides import in_memory
from fxquant.passes.lower.few_rows import quantizes_few_rows
from fxquant.passes.settings import Settings

_GROUPED_MM = torch.ops.fxquant_kernels.grouped_mm.default
_PORTABLE: dict[Any, Callable[..., Any]] = {
    _GROUPED_MM: portable_grouped_mm,
    torch.ops.aten._scaled_mm_v2.default: gemm.portable_block_mm,
}
"""The functions that run without fxquant, by the operator that they stand for."""


def _trace(
    run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], portable: bool, in_place: bool
) -> fx.GraphModule:
    """Returns `run` as an ATen graph whose inputs are the tensors among the arguments; it writes to them `in_place`."""
    table = {**inductor_decompositions(), **(_PORTABLE if portable else {})}
    body = trace(run, args, kwargs, guarded=not portable, decomposition_table=table)
    _make_functional(body.graph, in_place)
    body.graph.eliminate_dead_code()
    return body


def _make_functional(graph: fx.Graph, in_place: bool) -> None:
    """Turns launches that write into their arguments into ones that return what was written.

    With `in_place`, launches still write into the inputs of the graph.
    """
    for node in list(graph.nodes):
        if node.target is not triton_kernel_wrapper_mutation:
            continue
        arguments = node.kwargs["kwargs"]
        written = [name for name in written_by(node.kwargs) if not in_place or arguments[name].op != "placeholder"]
        with graph.inserting_before(node):
            call = graph.call_function(
                triton_kernel_wrapper_functional, kwargs={**node.kwargs, "tensors_to_clone": written}
            )
            results = {name: graph.call_function(operator.getitem, (call, name)) for name in written}
        for name, result in results.items():
            buffer = arguments[name]
            # what stands before the launch reads a buffer as it was, or its sizes and strides alone
            buffer.replace_all_uses_with(result, delete_user_cb=lambda user, launch=node: user > launch)
        graph.erase_node(node)


def lower(graph: fx.Graph, settings: Settings) -> int:
    """Rewrites `graph` in place; returns how many operators were lowered.

    A portable graph has no operators of fxquant's own, so that it runs where fxquant is not. Triton kernels for GEMMs
    and casts stay out as well, unless they will be compiled into what runs: a graph that is saved could not name them.
    """
    with unguarded_sizes() if settings.portable else contextlib.nullcontext():
        return _lower(graph, settings)


def implementation(node: fx.Node, settings: Settings) -> Callable[..., Any]:
    """Returns the function to trace in the place of a node: the kernel that its operator chooses, or its meaning."""
    called = operator_of(node.target)
    assert called is not None
    facts = facts_of(node, settings)
    chosen = called.choose(facts)
    kernel = chosen.kernel
    allowed(node, "lower", str(chosen) if chosen.reason and facts.on_cuda else "")
    if kernel is called.reference and called.pieces is not None and settings.pieces and _on_cpu(node):
        return called.pieces
    if kernel is GemmKernel.EMULATED and called is scaled_mm and facts.triton:
        return gemm.emulated_at_once
    if kernel is not called.reference or not called.traits.reads_values:
        return called.run(kernel)
    is_input = called.traits.reads_values == 1 and behind_views(node.args[0]).op in ("placeholder", "get_attr")
    return called.meaning if is_input else functools.partial(of_rounded, called)  # inputs are rounded


def _on_cpu(node: fx.Node) -> bool:
    return all(value.is_cpu for value in tree_leaves(val(node)))


def facts_of(node: fx.Node, settings: Settings) -> Facts:
    """Returns the facts of a node's arguments and of the graph around it."""
    called = operator_of(node.target)
    assert called is not None

    def value(source: fx.Node) -> Any:  # a scale that the graph makes of a tensor's amax is as none
        of_tensor = is_fxquant(source, "scale_from_amax", "tensor_scale") and val(source).ndim == 1
        return None if of_tensor else val(source)

    args: Any = fx.node.map_arg(node.args, value)
    facts: Facts = called.facts_of(*args, **fx.node.map_arg(node.kwargs, value))
    few_rows = facts.on_cuda and settings.kernels and is_fxquant(node, "quantize") and quantizes_few_rows(node)
    return replace(
        facts, triton=settings.kernels, launches=not settings.portable, in_memory=in_memory(node.args[0]),
        for_few_rows=few_rows,
    )  # fmt: skip


def _lower(graph: fx.Graph, settings: Settings) -> int:
    count = 0
    traced: dict[Any, fx.GraphModule] = {}
    # chosen before any of them goes, since a choice looks at what a node reads
    chosen = [(node, implementation(node, settings)) for node in graph.nodes if is_fxquant(node)]
    if settings.portable:
        chosen += [(node, portable_grouped_mm) for node in graph.nodes if node.target is _GROUPED_MM]
    for node, run in chosen:
        args, kwargs = _values_apart(node)
        key = _key(run, args, kwargs)
        if key is None or key not in traced:
            traced[key] = _trace(run, args, kwargs, settings.portable, writes(node))
        results, copies = inline(Builder(node), traced[key])
        for copy in copies.values():
            copy.meta[DENSE] = True
        if isinstance(val(node), (list, tuple)):
            put_in_places(results, node)
        else:
            node.replace_all_uses_with(results[0] if isinstance(results, (list, tuple)) else results)
            graph.erase_node(node)
        count += 1
    remaining = [node.format_node() for node in graph.nodes if is_fxquant(node)]
    if remaining:
        raise GraphVerificationError(f"operators left after lowering: {remaining}")
    return count


def _values_apart(node: fx.Node) -> Any:
    """The values of a node's arguments: one object where they are one node, and several where they are several.

    A trace tells its inputs apart by that, while a pass may have given two nodes one fake value.
    """
    values: dict[fx.Node, Any] = {}
    taken: set[int] = set()

    def value(source: fx.Node) -> Any:
        if source not in values:
            tensor = val(source)
            if isinstance(tensor, Tensor) and id(tensor) in taken:
                tensor = tensor.detach()
            values[source] = tensor
            taken.add(id(tensor))
        return values[source]

    return fx.node.map_arg((node.args, node.kwargs), value)


def _key(run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Equal for calls with equal traces; None where a number is symbolic, since no input of a trace brings it.

    Sizes that are symbolic are told apart by their expressions: a trace asks its inputs for them.
    """

    def describe(t: Tensor) -> Any:
        # where entries of a vector, such as slots of a state, begin is not in a trace
        offset = 0 if statically_known_true(t.numel() <= 2) else t.storage_offset()
        return (t.dtype, t.device, tuple(t.shape), t.stride(), offset)

    flat, _ = tree_flatten((args, kwargs))
    first: dict[int, int] = {}  # a trace holds which arguments are one tensor
    same = tuple(first.setdefault(id(x), i) for i, x in enumerate(flat) if isinstance(x, Tensor))
    if any(isinstance(x, torch.SymInt) for x in flat):
        return None
    parts = (run.func, *run.args) if isinstance(run, functools.partial) else (run,)
    return (
        parts,
        tuple(map(str, tree_flatten(tree_map_only(Tensor, describe, (args, kwargs)))[0])),
        same,
    )
