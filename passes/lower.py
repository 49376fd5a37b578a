"""Lower: replaces every fxquant operator by what runs on its device. After it the graph speaks of kernels only.

On the CPU that is the reference itself, spelled in ATen operators for Inductor to fuse. On CUDA, per-tensor and
rowwise GEMMs become `_scaled_mm`, those of few rows on Hopper a Triton kernel that may quantize as it reads; formats
that the device has no GEMM for are dequantized, exactly, to bfloat16.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.compat import (
    converts_to_fp8,
    enable_python_dispatcher,
    faking,
    inductor_decompositions,
    make_fx,
    statically_known_true,
    tree_flatten,
    tree_map_only,
    triton_kernel_wrapper_functional,
    triton_kernel_wrapper_mutation,
    unguarded_sizes,
    written_by,
)
from fxquant.errors import GraphVerificationError
from fxquant.formats import QuantSpec
from fxquant.kernels import (
    attention_cuda,
    attention_ops,
    choice,
    gemm,
    grouped_gemm,
    grouped_ops,
    grouped_reference,
    ops,
    reference,
    triton_amax,
    triton_cast,
    triton_delayed,
)
from fxquant.kernels import triton_grouped_cast as grouped_cast
from fxquant.kernels.grouped_mm import portable_grouped_mm
from fxquant.kernels.producers import CastSpec
from fxquant.passes import few_rows
from fxquant.passes.base import behind_views, in_memory, is_fxquant, val

_ORIGIN = ("nn_module_stack", "fwd_nn_module_stack", "stack_trace", "custom", "seq_nr", "partitioner_tag")
"""What a lowered node keeps of the operator it comes from."""

_GROUPED_MM = torch.ops.fxquant_kernels.grouped_mm.default
_PORTABLE: dict[Any, Callable[..., Any]] = {
    _GROUPED_MM: portable_grouped_mm,
    torch.ops.aten._scaled_mm_v2.default: gemm.portable_block_mm,
}
"""What runs where fxquant is not."""

_READS_VALUES = (
    "quantize", "hybrid_quantize", "amax", "split_quantize", "hybrid_split_quantize", "split_amax",
    "split_quantize_and_amax", "quantize_heads", "quantize_qkv", "quantize_qkv_into",
    "attention_backward",
)  # fmt: skip
"""Operators whose result depends on the last bit of what they read."""


def implementation(node: fx.Node, portable: bool = False, kernels: bool = True) -> Callable[..., Any]:
    """What to trace in the place of a node: the reference, or what suits the device better.

    `portable` and `kernels` are those of `lower`.
    """
    if node.target is _GROUPED_MM:
        return portable_grouped_mm
    name = str(getattr(node.target, "_opname"))  # noqa: B009
    device = next(value.device for value in map(val, node.all_input_nodes) if isinstance(value, Tensor))
    if name == "scaled_mm" and device.type == "cuda":
        return few_rows.scaled_mm if kernels and few_rows.decodes(node) else gemm.scaled_mm
    lies = name in _READS_VALUES and in_memory(node.args[0])
    if device.type == "cuda" and kernels:
        if name == "quantize" and (few_rows.quantizes_few_rows(node) or few_rows.quantizes_rows_in_memory(node)):
            return few_rows.quantize
        if name == "amax" and lies and 0 not in val(node.args[0]).shape:
            return triton_amax.tensor_amax
        if name in ("quantize", "hybrid_quantize") and _by_triton(name, node):
            run = triton_quantize if name == "quantize" else triton_hybrid_quantize
            return functools.partial(run, triton_amax.tensor_amax if lies else _amax_of_rounded)
    if device.type == "cuda" and not portable:
        if name in attention_cuda.IMPLEMENTATIONS:
            return attention_cuda.IMPLEMENTATIONS[name]
        if name == "quantize_heads" and attention_cuda.casts(*_values(node)):
            return attention_cuda.quantize_heads
        if name in ("quantize_qkv", "quantize_qkv_into") and _casts_qkv(node):
            return attention_cuda.quantize_qkv if name == "quantize_qkv" else attention_cuda.quantize_qkv_into
        if name == "split_amax" and lies and _some_groups(*(val(arg) for arg in node.args)):
            return grouped_cast.group_amax
        if name == "split_quantize_and_amax" and lies and _weights_by_triton(node):
            return triton_split_quantize_and_amax
        if name in ("split_quantize", "hybrid_split_quantize") and _groups_by_triton(name, node, lies):
            split = triton_split_quantize if name == "split_quantize" else triton_hybrid_split_quantize
            return functools.partial(split, grouped_cast.group_amax if lies else _group_amax_of_rounded)
        if name == "produce_quantize":
            return triton_produce_quantize
        if name == "produce_quantize_into":
            return triton_produce_quantize_into
        if name == "delayed_update":
            return triton_delayed.update
        if name == "delayed_advance":
            return triton_delayed.advance
        if name == "fused_scaled_mm":
            return gemm.fused_scaled_mm
    if name == "grouped_scaled_mm" and portable:
        return grouped_gemm.portable_scaled_mm
    if name == "grouped_scaled_mm" and device.type == "cuda":
        return grouped_gemm.grouped_scaled_mm
    meaning = (ops.IMPLEMENTATIONS | grouped_ops.IMPLEMENTATIONS | attention_ops.IMPLEMENTATIONS)[name]
    if name in ("quantize_qkv", "quantize_qkv_into"):
        return functools.partial(_of_three_rounded, meaning)
    if name not in _READS_VALUES or behind_views(node.args[0]).op in ("placeholder", "get_attr"):
        return meaning  # what a graph is given is rounded
    return functools.partial(_of_rounded, meaning)


def _values(node: fx.Node) -> tuple[Any, str]:
    """What a quantization is of, and its spec."""
    return val(node.args[0]), str(node.args[1])


def _casts_qkv(node: fx.Node) -> bool:
    q, k, v, spec, *_ = node.args
    return attention_cuda.casts_qkv(val(q), val(k), val(v), str(spec))


def _by_triton(name: str, node: fx.Node) -> bool:
    """Whether a Triton kernel writes a quantization: it is transposed, or comes after an amax of the whole tensor."""
    x, *args = node.args
    specs = tuple(QuantSpec.parse(str(spec)) for spec in (args[:1] if name == "quantize" else args[:2]))
    columnwise = name != "quantize" or args[1] == "columnwise"
    given = args[2] if len(args) > 2 else None
    own_scale = not isinstance(given, fx.Node) or is_fxquant(given, "scale_from_amax")
    value = val(x)
    return choice.casts_by_triton(
        specs, apart=columnwise or (specs[0].row.family == "per_tensor" and own_scale), dtype=value.dtype,
        matrix=value.ndim == 2 and 0 not in value.shape, fp8=converts_to_fp8(value.device),
    )  # fmt: skip


def triton_quantize(
    amax: Callable[[Tensor], Tensor], x: Tensor, spec: str, direction: str, scale: Tensor | None = None
) -> list[Tensor]:
    """`fxquant::quantize` of a matrix by a Triton kernel."""
    parsed = QuantSpec.parse(spec)
    row, column = (None, parsed) if direction == "columnwise" else (parsed, None)
    return triton_cast.quantize(x, row, column, scale, scale, amax)


def triton_hybrid_quantize(
    amax: Callable[[Tensor], Tensor],
    x: Tensor,
    rowwise_spec: str,
    columnwise_spec: str,
    rowwise_scale: Tensor | None = None,
    columnwise_scale: Tensor | None = None,
) -> list[Tensor]:
    """`fxquant::hybrid_quantize` of a matrix by a Triton kernel."""
    row, column = QuantSpec.parse(rowwise_spec), QuantSpec.parse(columnwise_spec)
    return triton_cast.quantize(x, row, column, rowwise_scale, columnwise_scale, amax)


def _groups_by_triton(name: str, node: fx.Node, lies: bool) -> bool:
    """As `_by_triton`, for groups of rows, and for weights that lie in memory, which nothing can be fused with.

    How many rows there are may be known on the device alone.
    """
    x, offs, *args = (val(arg) for arg in node.args)
    texts, columnwise = (args[:1], args[1] == "columnwise") if name == "split_quantize" else (args[:2], True)
    specs = [QuantSpec.parse(str(text)) for text in texts]
    row, column = specs if len(specs) == 2 else (None, specs[0]) if columnwise else (specs[0], None)
    alone = columnwise or (offs is None and lies)
    known = grouped_cast.supported(x, offs, row, column)
    return alone and known and _some_groups(x, offs) and converts_to_fp8(x.device)


def _weights_by_triton(node: fx.Node) -> bool:
    x, spec = val(node.args[0]), QuantSpec.parse(str(node.args[1]))
    return grouped_cast.supported(x, None, spec, None) and _some_groups(x, None) and converts_to_fp8(x.device)


def _some_groups(x: Tensor, offs: Tensor | None) -> bool:
    """Whether there is something in groups that Triton's kernels take."""
    some = statically_known_true(x.shape[-1] > 0) and (offs is not None or statically_known_true(x.numel() > 0))
    return some and x.dtype != torch.float64 and x.ndim == (3 if offs is None else 2)


GroupAmax = Callable[[Tensor, Tensor | None], Tensor]


def triton_split_quantize(
    amax: GroupAmax, x: Tensor, offs: Tensor | None, spec: str, direction: str, state: Tensor | None = None
) -> list[Tensor]:
    """`fxquant::split_quantize` by a Triton kernel."""
    parsed = QuantSpec.parse(spec)
    row, column = (None, parsed) if direction == "columnwise" else (parsed, None)
    return grouped_cast.quantize(x, offs, row, column, state, state, amax)


def triton_hybrid_split_quantize(
    amax: GroupAmax,
    x: Tensor,
    offs: Tensor | None,
    rowwise_spec: str,
    columnwise_spec: str,
    rowwise_state: Tensor | None = None,
    columnwise_state: Tensor | None = None,
) -> list[Tensor]:
    """`fxquant::hybrid_split_quantize` by a Triton kernel."""
    row, column = QuantSpec.parse(rowwise_spec), QuantSpec.parse(columnwise_spec)
    return grouped_cast.quantize(x, offs, row, column, rowwise_state, columnwise_state, amax)


def triton_split_quantize_and_amax(x: Tensor, spec: str) -> list[Tensor]:
    """`fxquant::split_quantize_and_amax` by a Triton kernel."""
    return grouped_cast.quantize_and_amax(x, QuantSpec.parse(spec))


def _group_amax_of_rounded(x: Tensor, offs: Tensor | None) -> Tensor:
    return _of_rounded(grouped_reference.group_amax, x, offs)  # type: ignore[no-any-return]


def triton_produce_quantize(
    inputs: Sequence[Tensor], spec: str, rowwise_states: Sequence[Tensor | None],
    columnwise_states: Sequence[Tensor | None], record: bool | triton_cast.Record,
) -> list[Tensor]:  # fmt: skip
    """`fxquant::produce_quantize` by a Triton kernel."""
    cast, dense = CastSpec.parse(spec), [x.contiguous() for x in inputs]
    states = rowwise_states, columnwise_states
    return triton_cast.produce(cast.name, dense, cast.rowwise, cast.columnwise, *states, record)


def triton_produce_quantize_into(
    inputs: Sequence[Tensor], spec: str, rowwise_states: Sequence[Tensor | None],
    columnwise_states: Sequence[Tensor | None], amaxes: Tensor, step: Tensor | None, from_last: bool,
) -> list[Tensor]:  # fmt: skip
    """`fxquant::produce_quantize_into` by a Triton kernel."""
    record = triton_cast.Record(amaxes, step, from_last)
    return triton_produce_quantize(inputs, spec, rowwise_states, columnwise_states, record)


def _amax_of_rounded(x: Tensor) -> Tensor:
    return _of_rounded(reference.amax, x)  # type: ignore[no-any-return]


def _of_rounded(run: Any, x: Tensor, *args: Any) -> Any:
    """Quantizes what `x` holds in memory.

    A kernel that Inductor fuses with the producer of a 16-bit tensor keeps it in float32, unrounded, and the scale
    would be another one than for the tensor that everything else sees. So the value is rounded again, by arithmetic
    that changes nothing in a rounded one; a cast to and fro would be dropped.
    """
    if x.dtype not in (torch.bfloat16, torch.float16):
        return run(x, *args)
    if x.dtype == torch.float16:
        return run(_round_to_float16(x.float()).half(), *args)
    if x.device.type == "cuda":  # the conversion to a 16-bit integer is not dropped, and costs a fraction
        return run((x.view(torch.int16).to(torch.int32) << 16).view(torch.float32).bfloat16(), *args)
    return run(reference.round_to_bfloat16(x.float()).bfloat16(), *args)


def _of_three_rounded(run: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any) -> Any:
    return run(*(_of_rounded(lambda x: x, each) for each in (q, k, v)), *args)


def _round_to_float16(y: Tensor) -> Tensor:
    bits = y.view(torch.int32)
    normal = ((bits + 0xFFF + (bits >> 13 & 1)) & -0x2000).view(torch.float32)
    subnormal = torch.round(y * 2.0**24) * 2.0**-24
    rounded = torch.where(y.abs() < torch.finfo(torch.float16).tiny, subnormal, normal)
    rounded = torch.where(rounded.abs() > torch.finfo(torch.float16).max, y * torch.inf, rounded)
    return torch.where(y == y, rounded, y)


def _trace(
    run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], portable: bool, in_place: bool
) -> fx.GraphModule:
    """`run` as an ATen graph whose inputs are the tensors among the arguments, in order.

    Only what writes `in_place` writes into them.
    """
    flat, tree = tree_flatten((args, kwargs))
    tensors = [i for i, value in enumerate(flat) if isinstance(value, Tensor)]

    def call(*inputs: Tensor) -> Any:
        filled = list(flat)
        for i, value in zip(tensors, inputs, strict=True):
            filled[i] = value
        args, kwargs = tree.unflatten(filled)
        return run(*args, **kwargs)

    inputs = [flat[i] for i in tensors]
    # without the dispatcher, composite ops such as `pad` turn symbolic sizes into numbers
    with faking(*inputs), enable_python_dispatcher():
        table = {**inductor_decompositions(), **(_PORTABLE if portable else {})}
        body = make_fx(call, decomposition_table=table)(*inputs)
    _make_functional(body.graph, in_place)
    body.graph.eliminate_dead_code()
    return body


def _make_functional(graph: fx.Graph, in_place: bool) -> None:
    """Turns launches that write into their arguments into ones that return what was written.

    What the graph is given stays what a launch writes to, where that is meant `in_place`.
    """
    for node in list(graph.nodes):
        if node.target is not triton_kernel_wrapper_mutation:
            continue
        given = node.kwargs["kwargs"]
        written = [name for name in written_by(node.kwargs) if not in_place or given[name].op != "placeholder"]
        with graph.inserting_before(node):
            call = graph.call_function(
                triton_kernel_wrapper_functional, kwargs={**node.kwargs, "tensors_to_clone": written}
            )
            results = {name: graph.call_function(operator.getitem, (call, name)) for name in written}
        for name, result in results.items():
            buffer = given[name]
            # what stands before the launch reads a buffer as it was, or its sizes and strides alone
            buffer.replace_all_uses_with(result, delete_user_cb=lambda user, launch=node: user > launch)
        graph.erase_node(node)


def _inline(node: fx.Node, body: fx.GraphModule) -> list[fx.Node]:
    """Copies a traced graph in front of `node`; returns its outputs."""
    flat, _ = tree_flatten((node.args, node.kwargs))
    inputs = [item for item in flat if isinstance(item, fx.Node) and isinstance(val(item), Tensor)]
    mode = faking(*map(val, inputs))
    env = dict(zip((n for n in body.graph.nodes if n.op == "placeholder"), inputs, strict=True))
    with node.graph.inserting_before(node):
        for inner in body.graph.nodes:
            if inner.op == "placeholder":
                continue
            if inner.op == "output":
                outputs = inner.args[0]
                return [env[n] for n in (outputs if isinstance(outputs, (list, tuple)) else [outputs])]
            if inner.op == "get_attr":
                name = f"_fxquant_{node.name}_{inner.target}"
                owner = node.graph.owning_module
                assert owner is not None
                owner.register_buffer(name, getattr(body, str(inner.target)), persistent=False)
                env[inner] = node.graph.get_attr(name)
                env[inner].meta = dict(inner.meta)
                continue
            copy = env[inner] = node.graph.node_copy(inner, env.__getitem__)
            # a trace serves several nodes, but Inductor takes equal fake storages for aliases: each gets its own
            args, kwargs = fx.node.map_arg((copy.args, copy.kwargs), val)
            with mode:
                value = inner.target(*args, **kwargs)
            copy.meta = {**{key: node.meta[key] for key in _ORIGIN if key in node.meta}, **inner.meta, "val": value}
    raise AssertionError("a traced graph has an output")


def lower(graph: fx.Graph, *, portable: bool = False, kernels: bool | None = None) -> int:
    """Rewrites `graph` in place; returns how many operators were lowered.

    A `portable` graph has no operators of fxquant's own, so that it runs where fxquant is not. Its Triton kernels for
    GEMMs and casts stay out as well, unless it is told that `kernels` will be compiled into what runs: a graph that is
    saved could not name them.
    """
    with unguarded_sizes() if portable else contextlib.nullcontext():
        return _lower(graph, portable, not portable if kernels is None else kernels)


def _lower(graph: fx.Graph, portable: bool, kernels: bool) -> int:
    count = 0
    if kernels:
        few_rows.prepare(graph, packaged=portable)
    traced: dict[Any, fx.GraphModule] = {}
    nodes = [node for node in graph.nodes if is_fxquant(node) or (portable and node.target is _GROUPED_MM)]
    # chosen before any of them goes, since a choice looks at what a node reads
    for node, run in [(node, implementation(node, portable, kernels)) for node in nodes]:
        args, kwargs = _values_apart(node)
        key = _key(run, args, kwargs)
        if key is None or key not in traced:
            traced[key] = _trace(run, args, kwargs, portable, _writes(node))
        outputs = _inline(node, traced[key])
        if isinstance(val(node), (list, tuple)):
            for item in list(node.users):
                item.replace_all_uses_with(outputs[item.args[1]])
                graph.erase_node(item)
        else:
            node.replace_all_uses_with(outputs[0])
        graph.erase_node(node)
        count += 1
    left = [node.format_node() for node in graph.nodes if is_fxquant(node)]
    if left:
        raise GraphVerificationError(f"operators left after lowering: {left}")
    graph.lint()
    return count


def _writes(node: fx.Node) -> bool:
    """Whether an operator writes into its arguments."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _values_apart(node: fx.Node) -> Any:
    """The values of a node's arguments: one object where they are one node, and several where they are several.

    A trace tells its inputs apart by that, while a pass may have given two nodes one fake value.
    """
    values: dict[fx.Node, Any] = {}
    taken: set[int] = set()

    def value(source: fx.Node) -> Any:
        if source not in values:
            found = val(source)
            if isinstance(found, Tensor) and id(found) in taken:
                found = found.detach()
            values[source] = found
            taken.add(id(found))
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
        *(f"{part.__module__}.{part.__name__}" for part in parts),
        tuple(map(str, tree_flatten(tree_map_only(Tensor, describe, (args, kwargs)))[0])),
        same,
    )
