"""The operators that a quantized graph is made of: schemas, fake kernels, and their meaning on any device.

`quantize`, `hybrid_quantize`, `dequantize` and `scaled_mm` say what is meant; the lowering decides how it runs.
`produce_quantize` computes what a producer makes of its inputs and quantizes each result as a `CastSpec` says
(`fxquant.kernels.cast.producers`), and takes its amax if asked to `record` it.
`fused_scaled_mm` is a `scaled_mm` with what reads its result: activation(a x b^T + bias) + residual, and its amax if
asked to `record` it. A quantized operand is a list of tensors, [data, scale] or [data, scale, global_amax], laid out
with the contracted axis last (see `fxquant.kernels.cast.reference`). Specs cross as the text of a `QuantSpec`.
`record` and `record_since` take amaxes into the state of delayed scaling, and `delayed_update` gives the scales and the
history of a graph after a step (`fxquant.kernels.state.reference`). `delayed_advance` and `produce_quantize_into` are
what lowering makes of them: they write the state in place. The first returns the scales one by one; the second takes
the amax of each result into an entry of `amaxes`, in their order or from the last on, those of a backward with its
`step`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fxquant.compat.private import fake_kernel, operator_library
from fxquant.errors import RecipeError
from fxquant.formats import OperandSpec, QuantSpec, check_parts, check_state
from fxquant.kernels import custom
from fxquant.kernels.cast import reference
from fxquant.kernels.cast.producers import CastSpec
from fxquant.kernels.linear.epilogues import ACTIVATIONS
from fxquant.kernels.state import reference as delayed

_library = operator_library("fxquant")

_SCHEMAS = {
    "quantize": "(Tensor x, str spec, str direction, Tensor? state=None) -> Tensor[]",
    "hybrid_quantize": (
        "(Tensor x, str rowwise_spec, str columnwise_spec, Tensor? rowwise_state=None, Tensor? columnwise_state=None)"
        " -> Tensor[]"
    ),
    "produce_quantize": (
        "(Tensor[] inputs, str spec, Tensor?[] rowwise_states, Tensor?[] columnwise_states, bool record) -> Tensor[]"
    ),
    "produce_quantize_into": (
        "(Tensor[] inputs, str spec, Tensor?[] rowwise_states, Tensor?[] columnwise_states, Tensor(a!) amaxes,"
        " Tensor? step, bool from_last) -> Tensor[]"
    ),
    "amax": "(Tensor x) -> Tensor",
    "scale_from_amax": "(Tensor amax, str spec) -> Tensor",
    "delayed_update": (
        "(Tensor scale, Tensor history, Tensor forward_amax, Tensor backward_amax, Tensor step, Tensor fp8_max,"
        " float margin, str algorithm) -> Tensor[]"
    ),
    "delayed_advance": (
        "(Tensor(a!) scale, Tensor(b!) history, Tensor(c!) forward_amax, Tensor backward_amax, Tensor(d!) step,"
        " Tensor fp8_max, float margin, str algorithm) -> Tensor[]"
    ),
    "record": "(Tensor amaxes, Tensor[] new, int[] slots) -> Tensor",
    "record_since": "(Tensor amaxes, Tensor step, Tensor[] new, int[] slots) -> Tensor",
    "dequantize": "(Tensor[] parts, str spec, str direction, SymInt[] size, ScalarType dtype) -> Tensor",
    "scaled_mm": (
        "(Tensor[] a, Tensor[] b, str a_spec, str b_spec, Tensor? bias, ScalarType out_dtype, bool fast_accum)"
        " -> Tensor"
    ),
    "fused_scaled_mm": (
        "(Tensor[] a, Tensor[] b, str a_spec, str b_spec, Tensor? bias, ScalarType out_dtype, bool fast_accum,"
        " str activation, Tensor? residual, bool record) -> Tensor[]"
    ),
}
for _name, _schema in _SCHEMAS.items():
    _library.define(_name + _schema, tags=torch.Tag.pt2_compliant_tag)


def _oriented(x: Tensor, direction: str) -> Tensor:
    return x.mT if direction == "columnwise" else x


def _quantize(x: Tensor, spec: str, direction: str, state: Tensor | None = None) -> list[Tensor]:
    # of a transposed tensor every elementwise result is transposed too, while a GEMM wants the contracted axis dense
    return [part.contiguous() for part in reference.quantize(_oriented(x, direction), QuantSpec.parse(spec), state)]


def _hybrid_quantize(
    x: Tensor,
    rowwise_spec: str,
    columnwise_spec: str,
    rowwise_state: Tensor | None = None,
    columnwise_state: Tensor | None = None,
) -> list[Tensor]:
    row = _quantize(x, rowwise_spec, "rowwise", rowwise_state)
    return [*row, *_quantize(x, columnwise_spec, "columnwise", columnwise_state)]


def _produce_quantize(
    inputs: Sequence[Tensor], spec: str, rowwise_states: Sequence[Tensor | None],
    columnwise_states: Sequence[Tensor | None], record: bool,
) -> list[Tensor]:  # fmt: skip
    cast, parts = CastSpec.parse(spec), []
    for x, row_state, column_state in zip(cast.producer(inputs), rowwise_states, columnwise_states, strict=True):
        parts += _quantize(x, str(cast.rowwise), "rowwise", row_state) if cast.rowwise else []
        parts += _quantize(x, str(cast.columnwise), "columnwise", column_state) if cast.columnwise else []
        parts += [_amax(x)] if record else []
    return parts


def _produce_quantize_into(
    inputs: Sequence[Tensor], spec: str, rowwise_states: Sequence[Tensor | None],
    columnwise_states: Sequence[Tensor | None], amaxes: Tensor, step: Tensor | None, from_last: bool,
) -> list[Tensor]:  # fmt: skip
    new = [_amax(x) for x in CastSpec.parse(spec).producer(inputs)]
    slots = range(len(new))
    new = new[::-1] if from_last else new
    taken = delayed.record(amaxes, new, slots) if step is None else delayed.record_since(amaxes, step, new, slots)
    amaxes.copy_(taken)
    return _produce_quantize(inputs, spec, rowwise_states, columnwise_states, False)


def _amax(x: Tensor) -> Tensor:
    return reference.amax(x)


def _scale_from_amax(amax: Tensor, spec: str) -> Tensor:
    return reference.multiplier_from_amax(amax, QuantSpec.parse(spec))


def _delayed_update(
    scale: Tensor, history: Tensor, forward_amax: Tensor, backward_amax: Tensor, step: Tensor, fp8_max: Tensor,
    margin: float, algorithm: str,
) -> list[Tensor]:  # fmt: skip
    last = delayed.recorded(forward_amax, backward_amax, step)
    return list(delayed.update(scale, history, last, fp8_max, margin=margin, algorithm=algorithm))


def _delayed_advance(
    scale: Tensor, history: Tensor, forward_amax: Tensor, backward_amax: Tensor, step: Tensor, fp8_max: Tensor,
    margin: float, algorithm: str,
) -> list[Tensor]:  # fmt: skip
    new = _delayed_update(scale, history, forward_amax, backward_amax, step, fp8_max, margin, algorithm)
    scale.copy_(new[0])
    history.copy_(new[1])
    forward_amax.zero_()
    step.add_(1)
    return [new[0].narrow(0, i, 1).clone() for i in range(len(new[0]))]


def _dequantize(parts: Sequence[Tensor], spec: str, direction: str, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    values = reference.dequantize(parts, QuantSpec.parse(spec))
    length = size[-2] if direction == "columnwise" else size[-1]
    return _oriented(values.narrow(-1, 0, length), direction).to(dtype).contiguous()


def _scaled_mm(
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    a_spec: str,
    b_spec: str,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> Tensor:
    return reference.scaled_mm(a, QuantSpec.parse(a_spec), b, QuantSpec.parse(b_spec), bias, out_dtype)


def _fused_scaled_mm(
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    a_spec: str,
    b_spec: str,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
    activation: str,
    residual: Tensor | None,
    record: bool,
) -> list[Tensor]:
    y = _scaled_mm(a, b, a_spec, b_spec, bias, out_dtype, fast_accum)
    y = ACTIVATIONS[activation](y) if activation else y
    y = y if residual is None else y + residual
    return [y, _amax(y)] if record else [y]


IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "quantize": _quantize,
    "hybrid_quantize": _hybrid_quantize,
    "produce_quantize": _produce_quantize,
    "produce_quantize_into": _produce_quantize_into,
    "amax": _amax,
    "scale_from_amax": _scale_from_amax,
    "delayed_update": _delayed_update,
    "delayed_advance": _delayed_advance,
    "record": delayed.record,
    "record_since": delayed.record_since,
    "dequantize": _dequantize,
    "scaled_mm": _scaled_mm,
    "fused_scaled_mm": _fused_scaled_mm,
}
"""The meaning of each operator in plain torch, by name."""

for _name, _kernel in IMPLEMENTATIONS.items():
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")


def _fake_operand(x: Tensor, spec: QuantSpec) -> list[Tensor]:
    """Shapes and dtypes of `reference.quantize(x, spec)`."""
    row = spec.row
    assert row.element is not None and row.scale_dtype is not None
    *batch, rows, length = x.shape
    padded = (length + row.alignment - 1) // row.alignment * row.alignment
    block_rows, block_columns = row.block
    if row.family == "per_tensor":
        scale_shape = [1]
    elif row.family == "per_row":
        scale_shape = [*batch, rows, 1]
    else:
        tiled = row.family == "block" and block_rows > 1
        scale_rows = (rows + block_rows - 1) // block_rows if tiled else rows
        scale_shape = [*batch, scale_rows, padded // block_columns]
    packed = row.element.packed
    parts = [
        x.new_empty([*batch, rows, padded // packed], dtype=row.dtypes[0]),
        x.new_empty(scale_shape, dtype=row.dtypes[1]),
    ]
    amax_shape = [*batch, rows, 1] if spec.row_scaled else [1]
    return [*parts, x.new_empty(amax_shape, dtype=torch.float32)] if row.has_global_amax else parts


@fake_kernel(_library, "quantize")
def _quantize_fake(x: Tensor, spec: str, direction: str, state: Tensor | None = None) -> list[Tensor]:
    check_state(state, QuantSpec.parse(spec))
    return _fake_operand(_oriented(x, direction), QuantSpec.parse(spec))


@fake_kernel(_library, "hybrid_quantize")
def _hybrid_quantize_fake(
    x: Tensor,
    rowwise_spec: str,
    columnwise_spec: str,
    rowwise_state: Tensor | None = None,
    columnwise_state: Tensor | None = None,
) -> list[Tensor]:
    return [
        *_fake_operand(x, QuantSpec.parse(rowwise_spec)),
        *_fake_operand(x.mT, QuantSpec.parse(columnwise_spec)),
    ]


@fake_kernel(_library, "produce_quantize")
def _produce_quantize_fake(
    inputs: Sequence[Tensor], spec: str, rowwise_states: Sequence[Tensor | None],
    columnwise_states: Sequence[Tensor | None], record: bool,
) -> list[Tensor]:  # fmt: skip
    cast, parts = CastSpec.parse(spec), []
    x = inputs[0].new_empty(cast.producer.shape(inputs[0]))
    for _ in range(cast.producer.results):
        parts += _fake_operand(x, cast.rowwise) if cast.rowwise else []
        parts += _fake_operand(x.mT, cast.columnwise) if cast.columnwise else []
        parts += [_amax_fake(x)] if record else []
    return parts


@fake_kernel(_library, "produce_quantize_into")
def _produce_quantize_into_fake(
    inputs: Sequence[Tensor], spec: str, rowwise_states: Sequence[Tensor | None],
    columnwise_states: Sequence[Tensor | None], amaxes: Tensor, step: Tensor | None, from_last: bool,
) -> list[Tensor]:  # fmt: skip
    return _produce_quantize_fake(inputs, spec, rowwise_states, columnwise_states, False)


@fake_kernel(_library, "amax")
def _amax_fake(x: Tensor) -> Tensor:
    return x.new_empty([1], dtype=torch.float32)


@fake_kernel(_library, "scale_from_amax")
def _scale_from_amax_fake(amax: Tensor, spec: str) -> Tensor:
    return torch.empty_like(amax)


@fake_kernel(_library, "delayed_update")
def _delayed_update_fake(
    scale: Tensor, history: Tensor, forward_amax: Tensor, backward_amax: Tensor, step: Tensor, fp8_max: Tensor,
    margin: float, algorithm: str,
) -> list[Tensor]:  # fmt: skip
    return [torch.empty_like(scale), torch.empty_like(history)]


@fake_kernel(_library, "delayed_advance")
def _delayed_advance_fake(
    scale: Tensor, history: Tensor, forward_amax: Tensor, backward_amax: Tensor, step: Tensor, fp8_max: Tensor,
    margin: float, algorithm: str,
) -> list[Tensor]:  # fmt: skip
    return [scale.new_empty(1) for _ in range(scale.shape[0])]


@fake_kernel(_library, "record")
def _record_fake(amaxes: Tensor, new: Sequence[Tensor], slots: Sequence[int]) -> Tensor:
    return torch.empty_like(amaxes)


@fake_kernel(_library, "record_since")
def _record_since_fake(amaxes: Tensor, step: Tensor, new: Sequence[Tensor], slots: Sequence[int]) -> Tensor:
    return torch.empty_like(amaxes)


@fake_kernel(_library, "dequantize")
def _dequantize_fake(
    parts: Sequence[Tensor], spec: str, direction: str, size: Sequence[int], dtype: torch.dtype
) -> Tensor:
    check_parts(parts, QuantSpec.parse(spec))
    batch = parts[0].shape[:-2]
    return parts[0].new_empty([*batch, *size[-2:]], dtype=dtype)


@fake_kernel(_library, "scaled_mm")
def _scaled_mm_fake(
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    a_spec: str,
    b_spec: str,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> Tensor:
    check_parts(a, QuantSpec.parse(a_spec))
    check_parts(b, QuantSpec.parse(b_spec))
    return a[0].new_empty([*a[0].shape[:-1], b[0].shape[-2]], dtype=out_dtype)


@fake_kernel(_library, "fused_scaled_mm")
def _fused_scaled_mm_fake(
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    a_spec: str,
    b_spec: str,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
    activation: str,
    residual: Tensor | None,
    record: bool,
) -> list[Tensor]:
    y = _scaled_mm_fake(a, b, a_spec, b_spec, bias, out_dtype, fast_accum)
    return [y, _amax_fake(y)] if record else [y]


def quantize(x: Tensor, spec: str, direction: str, state: Tensor | None = None) -> list[Tensor]:
    """Quantizes `x` [*, M, K] with K contracted (rowwise) or M (columnwise: the payload is [*, K, M]).

    `state` is the scale [1] of a per-tensor format (delayed, static, or of this tensor: `scale_from_amax`), a static
    global amax [1] (NVFP4), or seed, step and number [3] of stochastic rounding, without which RecipeError.
    """
    if state is None and QuantSpec.parse(spec).stochastic:
        raise RecipeError(f"{spec} rounds stochastically: it needs the seed and step of a graph's state")
    if state is None:
        return torch.ops.fxquant.quantize(x, spec, direction)  # type: ignore[no-any-return]
    return torch.ops.fxquant.quantize(x, spec, direction, state)  # type: ignore[no-any-return]


def dequantize(parts: Sequence[Tensor], spec: str, direction: str, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The values of one direction as [*, M, K] (`size` = [M, K]) in `dtype`."""
    parsed = QuantSpec.parse(spec)
    if parsed.key:
        return _oriented(custom.get(parsed).dequantize_side(parts), direction).to(dtype)
    if parsed.is_identity:
        return _oriented(parts[0], direction).to(dtype)
    return torch.ops.fxquant.dequantize(parts, spec, direction, size, dtype)  # type: ignore[no-any-return]


def quantize_operand(
    x: Tensor, spec: OperandSpec, direction: str, scales: Tensor | None = None, random: Tensor | None = None
) -> tuple[list[Tensor], QuantSpec]:
    """One direction of an operand [*, M, K] with the spec that applies: an identity gives the oriented tensor itself.

    `scales` are the delayed scales of the graph, for specs that name a slot; `random` is its seed and step, for specs
    that round stochastically.
    """
    if direction == "rowwise":
        return _one_side(x, spec.rowwise, direction, scales, random), shared_spec(spec.rowwise)
    if spec.from_rowwise:
        row = _one_side(x, spec.rowwise, "rowwise", scales, random)
        x = dequantize(row, str(spec.rowwise), "rowwise", x.shape[-2:], x.dtype)
    return _one_side(x, spec.columnwise, direction, scales, random), shared_spec(spec.columnwise)


def shared_spec(spec: QuantSpec) -> QuantSpec:
    """The spec without its operand's slot or number, which the state stands for: all operands share one lowering."""
    if spec.is_delayed:
        return replace(spec, slot=0)
    return replace(spec, stream=spec.stream % 2) if spec.stochastic else spec


def random_state(spec: QuantSpec, random: Tensor) -> Tensor:
    """Seed, step and the number of the operand: int64 [3] from the graph's [2]."""
    return torch.nn.functional.pad(random, (0, 1), value=spec.stream // 2)


def _one_side(x: Tensor, spec: QuantSpec, direction: str, scales: Tensor | None, random: Tensor | None) -> list[Tensor]:
    if spec.is_identity:
        return [_oriented(x.to(getattr(torch, spec.dtype)) if spec.dtype else x, direction)]
    if spec.key:
        return custom.quantize(x, spec, direction)
    state = None
    if spec.is_delayed:
        assert scales is not None, spec
        state = scales.narrow(0, spec.slot, 1)
    elif spec.stochastic and random is not None:
        state = random_state(spec, random)
    return quantize(x, str(shared_spec(spec)), direction, state)
