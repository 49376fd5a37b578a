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
    detect_fake_mode,
    enable_python_dispatcher,
    inductor_decompositions,
    is_hopper,
    make_fx,
    tree_flatten,
    tree_map_only,
    triton_kernel_wrapper_functional,
    triton_kernel_wrapper_mutation,
)
from fxquant.errors import GraphVerificationError
from fxquant.formats import QuantSpec
from fxquant.kernels import gemm, grouped_gemm, grouped_ops, ops, reference, triton_cast, triton_decode
from fxquant.kernels.grouped_mm import portable_grouped_mm
from fxquant.passes.base import is_fxquant, val

_ORIGIN = ("nn_module_stack", "fwd_nn_module_stack", "stack_trace", "custom", "seq_nr", "partitioner_tag")
"""What a lowered node keeps of the operator it comes from."""

_GROUPED_MM = torch.ops.fxquant_kernels.grouped_mm.default

_VIEWS = tuple(getattr(torch.ops.aten, name).default for name in ("view", "reshape", "_unsafe_view", "unsqueeze"))
_CONVERT = torch.ops.prims.convert_element_type.default

_READS_VALUES = (
    "quantize", "hybrid_quantize", "amax", "split_quantize", "hybrid_split_quantize", "split_amax",
)  # fmt: skip
"""Operators whose result depends on the last bit of what they read."""


def implementation(node: fx.Node, portable: bool = False, launches: bool = True) -> Callable[..., Any]:
    """What to trace in the place of a node: the reference, or what suits the device better.

    `portable` keeps to operators that torch itself has, for programs that run where fxquant is not; of Triton kernels
    `launches` are meant, which a compiled program holds, but not a saved graph.
    """
    if node.target is _GROUPED_MM:
        return portable_grouped_mm
    name = str(getattr(node.target, "_opname"))  # noqa: B009
    device = next(value.device for value in map(val, node.all_input_nodes) if isinstance(value, Tensor))
    if name == "scaled_mm" and device.type == "cuda":
        return decode_scaled_mm if launches and _decodes(node) else gemm.scaled_mm
    if name == "quantize" and device.type == "cuda" and launches and _quantizes_few_rows(node):
        return decode_quantize
    if name in ("quantize", "hybrid_quantize") and device.type == "cuda" and not portable and _transposes(name, node):
        return triton_quantize if name == "quantize" else triton_hybrid_quantize
    if name == "grouped_scaled_mm" and portable:
        return grouped_gemm.portable_scaled_mm
    if name == "grouped_scaled_mm" and device.type == "cuda":
        return grouped_gemm.grouped_scaled_mm
    meaning = (ops.IMPLEMENTATIONS | grouped_ops.IMPLEMENTATIONS)[name]
    return functools.partial(_of_rounded, meaning) if name in _READS_VALUES else meaning


def _decodes(node: fx.Node) -> bool:
    """Whether a GEMM is of so few rows that a kernel which reads the weight once is quicker than cuBLAS."""
    given: Any = fx.node.map_arg(node.args, val)
    a, b, a_spec, b_spec, _, _, fast_accum = given
    specs = QuantSpec.parse(a_spec), QuantSpec.parse(b_spec)
    return fast_accum and is_hopper(b[0].device) and triton_decode.supports(a, specs[0], b, specs[1])


def decode_scaled_mm(
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    a_spec: str,
    b_spec: str,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> Tensor:
    """`fxquant::scaled_mm` of few rows by a Triton kernel; `a` may be what `_leave_unquantized` gives."""
    return triton_decode.scaled_mm(a, QuantSpec.parse(a_spec), b, QuantSpec.parse(b_spec), bias, out_dtype)


def _leave_unquantized(graph: fx.Graph) -> None:
    """Gives GEMMs of one row the tensor itself, with its multiplier where it has one, to quantize as they read it.

    Only where no one else reads the quantized one.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.fxquant.quantize.default):
        x, _, direction, *multiplier = node.args
        gemms = _few_row_gemms(node)
        if direction == "rowwise" and gemms and triton_decode.quantizes_itself(val(x)):
            for user in gemms:
                user.args = ([x, *multiplier], *user.args[1:])
            for item in [*node.users, node]:
                graph.erase_node(item)


def _few_row_gemms(node: fx.Node) -> set[fx.Node]:
    """The GEMMs that read a quantization, where nothing else does and `_decodes` them all."""
    users = {user for item in node.users for user in item.users}
    alone = all(
        user.target is torch.ops.fxquant.scaled_mm.default and user.args[0] == [*node.users] and _decodes(user)
        for user in users
    )
    return users if alone else set()


def _quantizes_few_rows(node: fx.Node) -> bool:
    """Whether a quantization is left to a Triton kernel.

    Fused by Inductor with what makes its tensor it costs no launch; but an amax of the whole tensor does.
    """
    x, text, direction, *multiplier = node.args
    spec = QuantSpec.parse(str(text))
    if direction != "rowwise" or not is_hopper(val(x).device) or not triton_decode.quantizes(val(x), spec):
        return False
    own_pass = spec.row.family == "per_tensor" and not multiplier
    return bool(_few_row_gemms(node)) and (own_pass or not _is_fused(x))


def _is_fused(x: Any) -> bool:
    """Whether Inductor makes a tensor in a kernel of its own, into which it can fuse more."""
    while x.op == "call_function" and x.target in _VIEWS:
        x = x.args[0]
    tags = getattr(x.target, "tags", ())
    return x.op == "call_function" and (torch.Tag.pointwise in tags or x.target is _CONVERT)


def _transposes(name: str, node: fx.Node) -> bool:
    """Whether a quantization writes a transposed payload that a Triton kernel can write.

    Inductor fuses a rowwise cast into the producer of its tensor, but stores transposed ones a byte at a time.
    """
    x, *args = node.args
    specs, columnwise = (args[:1], args[1] == "columnwise") if name == "quantize" else (args[:2], True)
    known = all(triton_cast.supports(QuantSpec.parse(str(spec))) for spec in specs)
    value = val(x)
    matrix = value.ndim == 2 and value.dtype != torch.float64 and 0 not in value.shape
    return columnwise and known and matrix and converts_to_fp8(value.device)


def decode_quantize(x: Tensor, spec: str, direction: str, multiplier: Tensor | None = None) -> list[Tensor]:
    """`fxquant::quantize` of few rows by Triton kernels, rowwise."""
    return triton_decode.quantize(x, QuantSpec.parse(spec), multiplier)


def triton_quantize(x: Tensor, spec: str, direction: str, scale: Tensor | None = None) -> list[Tensor]:
    """`fxquant::quantize` of a matrix by a Triton kernel."""
    parsed = QuantSpec.parse(spec)
    return triton_cast.quantize(x, None, parsed, None, scale, _amax_of_rounded)


def triton_hybrid_quantize(
    x: Tensor,
    rowwise_spec: str,
    columnwise_spec: str,
    rowwise_scale: Tensor | None = None,
    columnwise_scale: Tensor | None = None,
) -> list[Tensor]:
    """`fxquant::hybrid_quantize` of a matrix by a Triton kernel."""
    row, column = QuantSpec.parse(rowwise_spec), QuantSpec.parse(columnwise_spec)
    return triton_cast.quantize(x, row, column, rowwise_scale, columnwise_scale, _amax_of_rounded)


def _amax_of_rounded(x: Tensor) -> Tensor:
    return _of_rounded(reference.amax, x)  # type: ignore[no-any-return]


def _of_rounded(run: Any, x: Tensor, *args: Any) -> Any:
    """Quantizes what `x` holds in memory.

    A kernel that Inductor fuses with the producer of a 16-bit tensor keeps it in float32, unrounded, and the scale
    would be another one than for the tensor that everything else sees. So the value is rounded again, by arithmetic
    that changes nothing in a rounded one; casting to and fro would be dropped.
    """
    if x.dtype not in (torch.bfloat16, torch.float16):
        return run(x, *args)
    rounded_to = reference.round_to_bfloat16 if x.dtype == torch.bfloat16 else _round_to_float16
    return run(rounded_to(x.float()).to(x.dtype), *args)


def _round_to_float16(y: Tensor) -> Tensor:
    bits = y.view(torch.int32)
    normal = ((bits + 0xFFF + (bits >> 13 & 1)) & -0x2000).view(torch.float32)
    subnormal = torch.round(y * 2.0**24) * 2.0**-24
    rounded = torch.where(y.abs() < torch.finfo(torch.float16).tiny, subnormal, normal)
    rounded = torch.where(rounded.abs() > torch.finfo(torch.float16).max, y * torch.inf, rounded)
    return torch.where(y == y, rounded, y)


def _trace(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], portable: bool) -> fx.GraphModule:
    """`run` as an ATen graph whose inputs are the tensors among the arguments, in order."""
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
    with detect_fake_mode(inputs) or contextlib.nullcontext(), enable_python_dispatcher():
        table = {**inductor_decompositions(), **({_GROUPED_MM: portable_grouped_mm} if portable else {})}
        body = make_fx(call, decomposition_table=table)(*inputs)
    _make_functional(body.graph)
    body.graph.eliminate_dead_code()
    return body


def _make_functional(graph: fx.Graph) -> None:
    """Turns launches that write into their arguments into ones that return what was written."""
    for node in list(graph.nodes):
        if node.target is not triton_kernel_wrapper_mutation:
            continue
        given = node.kwargs["kwargs"]
        written = triton_cast.written(given) or triton_decode.written(given)
        with graph.inserting_before(node):
            call = graph.call_function(
                triton_kernel_wrapper_functional, kwargs={**node.kwargs, "tensors_to_clone": written}
            )
            results = {name: graph.call_function(operator.getitem, (call, name)) for name in written}
        for name, result in results.items():
            buffer = given[name]
            buffer.replace_all_uses_with(result, delete_user_cb=lambda user, own=(call, node): user not in own)
        graph.erase_node(node)


def _inline(node: fx.Node, body: fx.GraphModule) -> list[fx.Node]:
    """Copies a traced graph in front of `node`; returns its outputs."""
    flat, _ = tree_flatten((node.args, node.kwargs))
    inputs = [item for item in flat if isinstance(item, fx.Node) and isinstance(val(item), Tensor)]
    mode = detect_fake_mode([val(item) for item in inputs]) or contextlib.nullcontext()
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


def lower(graph: fx.Graph, *, portable: bool = False, launches: bool = True) -> int:
    """Rewrites `graph` in place; returns how many operators were lowered.

    A `portable` graph has none of fxquant's own operators either, so that it runs where fxquant is not. Without
    `launches` it has no launch of a Triton kernel, so that it can be saved.
    """
    count = 0
    if launches:
        _leave_unquantized(graph)
    traced: dict[Any, fx.GraphModule] = {}
    for node in list(graph.nodes):
        if not is_fxquant(node) and not (portable and node.target is _GROUPED_MM):
            continue
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), val)
        run = implementation(node, portable, launches)
        key = _key(run, args, kwargs)
        if key is None or key not in traced:
            body = _trace(run, args, kwargs, portable)
            traced[key] = body
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


def _key(run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Equal for calls with equal traces; None where sizes are symbolic, since a trace holds their symbols."""

    def describe(t: Tensor) -> Any:
        return (t.dtype, t.device, tuple(t.shape), t.stride(), t.storage_offset())

    flat, _ = tree_flatten((args, kwargs))
    symbolic = any(
        isinstance(x, torch.SymInt) or (isinstance(x, Tensor) and any(isinstance(s, torch.SymInt) for s in x.shape))
        for x in flat
    )
    if symbolic:
        return None
    inner = run.args[0] if isinstance(run, functools.partial) else run
    return (inner.__name__, tuple(map(str, tree_flatten(tree_map_only(Tensor, describe, (args, kwargs)))[0])))
