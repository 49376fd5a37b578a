"""Implementations: what runs in the place of each fxquant operator, by its device, formats and sizes.

On the CPU that is the reference itself, spelled in ATen operators for Inductor to fuse. On CUDA, per-tensor and
rowwise GEMMs become `_scaled_mm`, those of few rows on Hopper a Triton kernel that may quantize as it reads; formats
that the device has no GEMM for are dequantized, exactly, to bfloat16.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from fxquant.compat.device import converts_to_fp8
from fxquant.compat.values import statically_known_true
from fxquant.formats import QuantSpec
from fxquant.kernels.attention import choice as attention_choice
from fxquant.kernels.attention import ops as attention_ops
from fxquant.kernels.cast import reference
from fxquant.kernels.cast.producers import CastSpec
from fxquant.kernels.grouped import reference as grouped_reference
from fxquant.kernels.grouped import supported as supported_groups
from fxquant.kernels.linear import choice
from fxquant.kernels.operator import OPERATORS, operator_of
from fxquant.passes.graph.match import behind_views
from fxquant.passes.graph.names import fxquant_op, is_fxquant
from fxquant.passes.graph.values import val
from fxquant.passes.joint.sides import in_memory
from fxquant.passes.lower import few_rows

if TYPE_CHECKING:
    from fxquant.kernels.cast.triton_cast import Record

_READS_VALUES = (
    "quantize", "hybrid_quantize", "amax", "split_quantize", "hybrid_split_quantize", "split_amax",
    "split_quantize_and_amax", "quantize_heads", "quantize_qkv", "quantize_qkv_into",
    "attention_backward",
)  # fmt: skip
"""Operators whose result depends on the last bit of what they read."""


def implementation(node: fx.Node, portable: bool = False, kernels: bool = True) -> Callable[..., Any]:
    """The function to trace in the place of a node: the reference, or what suits the device better.

    `portable` and `kernels` are those of `lower`.
    """
    name = fxquant_op(node)
    chosen = operator_of(node.target)
    if chosen is not None and chosen.implementations:
        values: Any = fx.node.map_arg((node.args, node.kwargs), val)
        facts = replace(chosen.facts_of(*values[0], **values[1]), triton=kernels, launches=not portable)
        return chosen.run(chosen.choose(facts).kernel)
    device = next(value.device for value in map(val, node.all_input_nodes) if isinstance(value, Tensor))
    lies = name in _READS_VALUES and in_memory(node.args[0])
    if device.type == "cuda":
        found = (kernels and _inlined(name, node, lies)) or (not portable and _launched(name, node, lies))
        if found:
            return found
    return _meaning(name, node)


def _inlined(name: str, node: fx.Node, lies: bool) -> Callable[..., Any] | None:
    """Triton kernels whose source can be compiled into a package, too."""
    from fxquant.kernels.cast import amax as triton_amax

    if name == "quantize" and (few_rows.quantizes_few_rows(node) or few_rows.quantizes_rows_in_memory(node)):
        return few_rows.quantize
    if name == "amax" and lies and 0 not in val(node.args[0]).shape:
        return triton_amax.tensor_amax
    if name in ("quantize", "hybrid_quantize") and _by_triton(name, node):
        run = triton_quantize if name == "quantize" else triton_hybrid_quantize
        return functools.partial(run, triton_amax.tensor_amax if lies else _amax_of_rounded)
    return None


def _launched(name: str, node: fx.Node, lies: bool) -> Callable[..., Any] | None:
    """Kernels, and operators of fxquant's own that launch them, for graphs that run where it is."""
    from fxquant.kernels.attention import cuda as attention_cuda
    from fxquant.kernels.grouped import triton_cast as grouped_cast

    always = (attention_cuda.IMPLEMENTATIONS | _LAUNCHED).get(name)
    if always is not None:
        return always
    if name == "quantize_heads" and attention_choice.casts(val(node.args[0]), str(node.args[1])):
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
    return None


def _meaning(name: str, node: fx.Node) -> Callable[..., Any]:
    """The reference, of values as they are in memory."""
    meaning = OPERATORS[name].meaning if name in OPERATORS else attention_ops.IMPLEMENTATIONS[name]
    if name in ("quantize_qkv", "quantize_qkv_into"):
        return functools.partial(_of_three_rounded, meaning)
    if name not in _READS_VALUES or behind_views(node.args[0]).op in ("placeholder", "get_attr"):
        return meaning  # what a graph is given is rounded
    return functools.partial(_of_rounded, meaning)


def _casts_qkv(node: fx.Node) -> bool:
    q, k, v, spec, *_ = node.args
    return attention_choice.casts_qkv(val(q), val(k), val(v), str(spec))


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


def _sides(spec: str, direction: str) -> tuple[QuantSpec | None, QuantSpec | None]:
    """What is written rowwise and columnwise where one direction is wanted."""
    parsed = QuantSpec.parse(spec)
    return (None, parsed) if direction == "columnwise" else (parsed, None)


def triton_quantize(
    amax: Callable[[Tensor], Tensor], x: Tensor, spec: str, direction: str, scale: Tensor | None = None
) -> list[Tensor]:
    """`fxquant::quantize` of a matrix by a Triton kernel."""
    from fxquant.kernels.cast import triton_cast

    return triton_cast.quantize(x, *_sides(spec, direction), scale, scale, amax)


def triton_hybrid_quantize(
    amax: Callable[[Tensor], Tensor],
    x: Tensor,
    rowwise_spec: str,
    columnwise_spec: str,
    rowwise_scale: Tensor | None = None,
    columnwise_scale: Tensor | None = None,
) -> list[Tensor]:
    """`fxquant::hybrid_quantize` of a matrix by a Triton kernel."""
    from fxquant.kernels.cast import triton_cast

    row, column = QuantSpec.parse(rowwise_spec), QuantSpec.parse(columnwise_spec)
    return triton_cast.quantize(x, row, column, rowwise_scale, columnwise_scale, amax)


def _groups_by_triton(name: str, node: fx.Node, lies: bool) -> bool:
    """As `_by_triton`, for groups of rows, and for weights that lie in memory, which nothing can be fused with.

    How many rows there are may be known on the device alone.
    """
    x, offs, first, second, *_ = (val(arg) for arg in node.args)
    row, column = _sides(first, second) if name == "split_quantize" else map(QuantSpec.parse, (first, second))
    alone = column is not None or (offs is None and lies)
    known = supported_groups.takes(x, offs, row, column)
    return alone and known and _some_groups(x, offs) and converts_to_fp8(x.device)


def _weights_by_triton(node: fx.Node) -> bool:
    x, spec = val(node.args[0]), QuantSpec.parse(str(node.args[1]))
    return supported_groups.takes(x, None, spec, None) and _some_groups(x, None) and converts_to_fp8(x.device)


def _some_groups(x: Tensor, offs: Tensor | None) -> bool:
    """Whether there is something in groups that Triton's kernels take."""
    some = statically_known_true(x.shape[-1] > 0) and (offs is not None or statically_known_true(x.numel() > 0))
    return some and x.dtype != torch.float64 and x.ndim == (3 if offs is None else 2)


GroupAmax = Callable[[Tensor, Tensor | None], Tensor]


def triton_split_quantize(
    amax: GroupAmax, x: Tensor, offs: Tensor | None, spec: str, direction: str, state: Tensor | None = None
) -> list[Tensor]:
    """`fxquant::split_quantize` by a Triton kernel."""
    from fxquant.kernels.grouped import triton_cast as grouped_cast

    return grouped_cast.quantize(x, offs, *_sides(spec, direction), state, state, amax)


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
    from fxquant.kernels.grouped import triton_cast as grouped_cast

    row, column = QuantSpec.parse(rowwise_spec), QuantSpec.parse(columnwise_spec)
    return grouped_cast.quantize(x, offs, row, column, rowwise_state, columnwise_state, amax)


def triton_split_quantize_and_amax(x: Tensor, spec: str) -> list[Tensor]:
    """`fxquant::split_quantize_and_amax` by a Triton kernel."""
    from fxquant.kernels.grouped import triton_cast as grouped_cast

    return grouped_cast.quantize_and_amax(x, QuantSpec.parse(spec))


def _group_amax_of_rounded(x: Tensor, offs: Tensor | None) -> Tensor:
    return _of_rounded(grouped_reference.group_amax, x, offs)  # type: ignore[no-any-return]


def triton_produce_quantize(
    inputs: Sequence[Tensor], spec: str, rowwise_states: Sequence[Tensor | None],
    columnwise_states: Sequence[Tensor | None], record: bool | Record,
) -> list[Tensor]:  # fmt: skip
    """`fxquant::produce_quantize` by a Triton kernel."""
    from fxquant.kernels.cast import triton_cast

    cast, dense = CastSpec.parse(spec), [x.contiguous() for x in inputs]
    states = rowwise_states, columnwise_states
    return triton_cast.produce(cast.name, dense, cast.rowwise, cast.columnwise, *states, record)


def triton_produce_quantize_into(
    inputs: Sequence[Tensor], spec: str, rowwise_states: Sequence[Tensor | None],
    columnwise_states: Sequence[Tensor | None], amaxes: Tensor, step: Tensor | None, from_last: bool,
) -> list[Tensor]:  # fmt: skip
    """`fxquant::produce_quantize_into` by a Triton kernel."""
    from fxquant.kernels.cast import triton_cast

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


def triton_delayed_update(*state: Any) -> list[Tensor]:
    """`fxquant::delayed_update` by a Triton kernel."""
    from fxquant.kernels.state import triton as triton_delayed

    return triton_delayed.update(*state)


def triton_delayed_advance(*state: Any) -> list[Tensor]:
    """`fxquant::delayed_advance` by a Triton kernel."""
    from fxquant.kernels.state import triton as triton_delayed

    return triton_delayed.advance(*state)


_LAUNCHED: dict[str, Callable[..., Any]] = {
    "produce_quantize": triton_produce_quantize,
    "produce_quantize_into": triton_produce_quantize_into,
    "delayed_update": triton_delayed_update,
    "delayed_advance": triton_delayed_advance,
}
"""Operators that have one implementation on CUDA, whatever they are given."""
