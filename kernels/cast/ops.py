"""The operators that quantize tensors, alone or with what produces them.

A quantized operand is laid out with the contracted axis last (see `fxquant.kernels.cast.reference`). Specs cross as the
text of a `QuantSpec`, those of `produce_quantize` as that of a `CastSpec`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fxquant.compat.private import largest_over_ranks
from fxquant.formats import OperandSpec, QuantSpec, check_state
from fxquant.kernels import custom
from fxquant.kernels.cast import choice, reference
from fxquant.kernels.cast.choice import CastFacts, CastKernel, both_sides, by_direction, one_direction, register_casts
from fxquant.kernels.cast.producers import KEPT, CastSpec
from fxquant.kernels.cast.rounded import rounded
from fxquant.kernels.cast.swizzle import padded_sizes
from fxquant.kernels.operator import Dim, Parts, Side, States, Traits, operator, runs_beside
from fxquant.kernels.state import reference as delayed
from fxquant.kernels.state.step import STATELESS, StepState

if TYPE_CHECKING:
    from fxquant.kernels.cast.triton_cast import Record


def _oriented(x: Tensor, direction: str) -> Tensor:
    return x.mT if direction == "columnwise" else x


def fake_operand(
    x: Tensor, spec: QuantSpec, *, tensors: Dim = 1, tile_rows: Dim = None, lines: Sequence[Any] | None = None
) -> list[Tensor]:
    """Empty parts of the shapes and dtypes of a quantized operand [*, rows, length].

    `tensors` have a scale each where it is one of a whole tensor, tiles cover `tile_rows`, and scales of rows lie as
    `lines`, where those are not the operand's.
    """
    row = spec.row
    assert row.element is not None and row.scale_dtype is not None
    *batch, rows, length = x.shape
    lines = [*batch, rows, 1] if lines is None else lines
    padded = (length + row.alignment - 1) // row.alignment * row.alignment
    block_rows, block_columns = row.block
    if row.family == "per_tensor":
        scale_shape = [tensors]
    elif row.family == "per_row":
        scale_shape = [*lines]
    else:
        covered = rows if tile_rows is None else tile_rows
        tiled = row.family == "block" and block_rows > 1
        down = (covered + block_rows - 1) // block_rows if tiled else rows
        down, across = padded_sizes(down, padded // block_columns) if spec.swizzled else (down, padded // block_columns)
        scale_shape = [*batch, down, across]
    shapes: list[Any] = [
        [*batch, rows, padded // row.element.packed],
        scale_shape,
        lines if spec.row_scaled else [tensors],
    ]
    return [x.new_empty(shape, dtype=dtype) for shape, dtype in zip(shapes, row.dtypes, strict=False)]


@operator(reference=CastKernel.FUSED, traits=Traits(reads_values=1))
def amax(x: Tensor) -> Tensor:
    """The largest magnitude of a tensor, NaN ignored: float32 [1]."""
    return reference.amax(x)


@amax.fake
def _amax_fake(x: Tensor) -> Tensor:
    return x.new_empty([1], dtype=torch.float32)


amax.facts(CastFacts.of)


@amax.implementation(CastKernel.TRITON, when=choice.amax)
def _triton_amax(x: Tensor) -> Tensor:
    from fxquant.kernels.cast.amax import tensor_amax

    return tensor_amax(x)


@operator(reference=CastKernel.FUSED, traits=Traits(reads_values=1))
def amaxes_of(x: Tensor, spec: str, direction: str) -> Tensor:
    """The amaxes of one direction that a format's scales of rows, or its global amax, are made of."""
    return reference.largest(_oriented(x, direction), QuantSpec.parse(spec))


amaxes_of.facts(CastFacts.of_tensor)


def _rounded_amax(x: Tensor) -> Tensor:
    return reference.amax(rounded(x))


def _stored_amax(x: Tensor) -> Tensor:
    from fxquant.kernels.cast.amax import stored_amax

    return stored_amax(x)


def _made_amax(x: Tensor) -> Tensor:
    if choice.no_rows(tuple(x.shape), x.dtype):
        return _rounded_amax(x)
    from fxquant.kernels.cast.amax import made_amax

    return made_amax(x)


@operator()
def scale_from_amax(amax: Tensor, spec: str) -> Tensor:
    """The number by which a tensor of this amax is multiplied."""
    return reference.multiplier_from_amax(amax, QuantSpec.parse(spec))


@scale_from_amax.fake
def _scale_from_amax_fake(amax: Tensor, spec: str) -> Tensor:
    return torch.empty_like(amax, dtype=torch.float32)


@operator(reference=CastKernel.FUSED, traits=Traits(reads_values=1))
def tensor_scale(x: Tensor, spec: str) -> Tensor:
    """The number by which a tensor is multiplied so that its amax becomes the format's largest value: float32 [1]."""
    return scale_from_amax.meaning(amax.meaning(x), spec)


@tensor_scale.fake
def _tensor_scale_fake(x: Tensor, spec: str) -> Tensor:
    return _amax_fake(x)


@tensor_scale.facts
def _tensor_scale_facts(x: Tensor, spec: str) -> CastFacts:
    return CastFacts.of(x, [Side("rowwise", spec, None)])


@tensor_scale.implementation(CastKernel.STORED, when=choice.stored_scale)
def _triton_tensor_scale(x: Tensor, spec: str) -> Tensor:
    from fxquant.kernels.cast import amax

    return amax.tensor_scale(x, QuantSpec.parse(spec))


@tensor_scale.implementation(CastKernel.TRITON, when=choice.made_scale)
def _triton_made_tensor_scale(x: Tensor, spec: str) -> Tensor:
    from fxquant.kernels.cast import amax

    return amax.made_tensor_scale(x, QuantSpec.parse(spec))


@operator(reference=CastKernel.FUSED, traits=Traits(reads_values=1, sides=both_sides, amax=amax))
def hybrid_quantize(
    x: Tensor,
    rowwise_spec: str,
    columnwise_spec: str,
    rowwise_state: Tensor | None = None,
    columnwise_state: Tensor | None = None,
) -> list[Tensor]:
    """`quantize` in both directions."""
    row = quantize.meaning(x, rowwise_spec, "rowwise", rowwise_state)
    return [*row, *quantize.meaning(x, columnwise_spec, "columnwise", columnwise_state)]


@hybrid_quantize.fake
def _hybrid_quantize_fake(x: Tensor, rowwise_spec: str, columnwise_spec: str, *states: Tensor | None) -> list[Tensor]:
    return [*fake_operand(x, QuantSpec.parse(rowwise_spec)), *fake_operand(x.mT, QuantSpec.parse(columnwise_spec))]


@operator(
    reference=CastKernel.FUSED, traits=Traits(reads_values=1, sides=one_direction, amax=amax, both=hybrid_quantize)
)
def quantize(x: Tensor, spec: str, direction: str, state: Tensor | None = None) -> list[Tensor]:
    """Quantizes `x` [*, M, K] with K contracted (rowwise) or M (columnwise: the payload is [*, K, M]).

    `state` is the scale [1] of a per-tensor format (delayed, static, or of this tensor: `scale_from_amax`), a static
    global amax [1] (NVFP4), or seed, step and number [3] of stochastic rounding, without which RecipeError.
    """
    # of a transposed tensor every elementwise result is transposed too, while a GEMM wants the contracted axis dense
    return [part.contiguous() for part in reference.quantize(_oriented(x, direction), QuantSpec.parse(spec), state)]


@quantize.fake
def _quantize_fake(x: Tensor, spec: str, direction: str, state: Tensor | None = None) -> list[Tensor]:
    check_state(state, QuantSpec.parse(spec))
    return fake_operand(_oriented(x, direction), QuantSpec.parse(spec))


def _facts(sides: Callable[..., list[Side]], x: Tensor, *args: Any, **_: object) -> CastFacts:
    return CastFacts.of(x, sides(x, *args))


@quantize.implementation(CastKernel.FEW_ROWS, when=choice.few_rows)
@quantize.implementation(CastKernel.ROWS, when=choice.rows)
def _quantize_few_rows(
    x: Tensor, spec: str, direction: str, multiplier: Tensor | None = None, ahead: Tensor | None = None,
    early: bool = False,
) -> list[Tensor]:  # fmt: skip
    from fxquant.kernels.linear import triton_few_rows

    return triton_few_rows.quantize(x, QuantSpec.parse(spec), multiplier, ahead, early)


def _triton_quantize(
    sides: Callable[..., list[Side]], measures: Sequence[Callable[[Tensor], Tensor]], x: Tensor, *args: Any
) -> list[Tensor]:
    """A cast behind the amax that one of `measures` takes: the first for Inductor to go on with, the last for NVFP4."""
    from fxquant.kernels.cast import triton_cast, triton_nvfp4

    (row, row_state), (column, column_state) = by_direction(sides(x, *args))
    in_four_bits = [spec.row.family == "nvfp4" for spec in (row, column) if spec is not None]
    if len(set(in_four_bits)) > 1:  # a kernel for each direction
        parts = [_triton_quantize(one_direction, measures, x, *side) for side in map(_arguments, sides(x, *args))]
        return [part for of_side in parts for part in of_side]
    cast = triton_nvfp4.quantize if in_four_bits[0] else triton_cast.quantize
    return cast(x, row, column, row_state, column_state, measures[in_four_bits[0]])


def _arguments(side: Side) -> tuple[str, str, Tensor | None]:
    """The arguments of `quantize` behind its tensor."""
    return side.spec, side.direction, side.state


register_casts(
    (quantize, hybrid_quantize), _facts, _triton_quantize,
    [
        (CastKernel.STORED, choice.stored, (_triton_amax, _stored_amax)),
        (CastKernel.TRITON, choice.triton, (_rounded_amax, _made_amax)),
    ],
)  # fmt: skip


@operator(mutates=["amaxes"])
def produce_quantize_into(
    inputs: Parts, spec: str, rowwise_states: States, columnwise_states: States, amaxes: Tensor, step: Tensor | None,
    from_last: bool,
) -> list[Tensor]:  # fmt: skip
    """`produce_quantize` that takes the amax of each result into an entry of the state of delayed scaling.

    The results take entries of `amaxes` in their order or `from_last` on; those of a backward have its `step`.
    """
    new = [reference.amax(x) for x in CastSpec.parse(spec).producer(inputs)]
    slots = range(len(new))
    new = new[::-1] if from_last else new
    taken = delayed.record(amaxes, new, slots) if step is None else delayed.record_since(amaxes, step, new, slots)
    amaxes.copy_(taken)
    return produce_quantize.meaning(inputs, spec, rowwise_states, columnwise_states, False)


@produce_quantize_into.fake
def _produce_quantize_into_fake(inputs: Parts, spec: str, *_: object) -> list[Tensor]:
    return _produce_quantize_fake(inputs, spec)


@operator(traits=Traits(recording=produce_quantize_into))
def produce_quantize(
    inputs: Parts, spec: str, rowwise_states: States, columnwise_states: States, record: bool
) -> list[Tensor]:
    """Computes what a producer makes of its inputs, and quantizes each result as a `CastSpec` says.

    To `record`, the amax of each result comes behind its parts.
    """
    cast, parts = CastSpec.parse(spec), []
    for x, row_state, column_state in zip(cast.producer(inputs), rowwise_states, columnwise_states, strict=True):
        parts += quantize.meaning(x, str(cast.rowwise), "rowwise", row_state) if cast.rowwise else []
        parts += quantize.meaning(x, str(cast.columnwise), "columnwise", column_state) if cast.columnwise else []
        parts += [reference.amax(x)] if record else []
    return parts


@produce_quantize.fake
def _produce_quantize_fake(
    inputs: Parts, spec: str, rowwise_states: States = (), columnwise_states: States = (), record: bool = False
) -> list[Tensor]:
    cast, parts = CastSpec.parse(spec), []
    x = inputs[0].new_empty(cast.producer.shape(inputs[0]), dtype=cast.producer.made(inputs[0]))
    for _ in range(cast.producer.results):
        parts += fake_operand(x, cast.rowwise) if cast.rowwise else []
        parts += fake_operand(x.mT, cast.columnwise) if cast.columnwise else []
        parts += [_amax_fake(x)] if record else []
    return parts


def _triton_produce(
    inputs: Parts, spec: str, rowwise_states: States, columnwise_states: States, record: bool | Record
) -> list[Tensor]:
    from fxquant.kernels.cast import triton_cast

    cast = CastSpec.parse(spec)
    kinds = zip(inputs, cast.producer.inputs, strict=True)
    dense = [x.t().contiguous() if kind == "scale" else x.contiguous() for x, kind in kinds]
    states = rowwise_states, columnwise_states
    return triton_cast.produce(cast.name, dense, cast.rowwise, cast.columnwise, *states, record)


produce_quantize.implementation(CastKernel.TRITON, when=runs_beside)(_triton_produce)


@produce_quantize_into.implementation(CastKernel.TRITON, when=runs_beside)
def _triton_produce_into(
    inputs: Parts, spec: str, rowwise_states: States, columnwise_states: States, amaxes: Tensor, step: Tensor | None,
    from_last: bool,
) -> list[Tensor]:  # fmt: skip
    from fxquant.kernels.cast.triton_cast import Record

    return _triton_produce(inputs, spec, rowwise_states, columnwise_states, Record(amaxes, step, from_last))


@operator(reference=CastKernel.FUSED, traits=Traits(reads_values=1))
def quantize_kept(x: Tensor) -> list[Tensor]:
    """Quantizes `x` [M, K] rowwise as a forward keeps it for its backward, in the format `KEPT`.

    Scales [M, K / 128] lie transposed, so that those of rows below each other are neighbours.
    """
    data, scale = quantize.meaning(x, KEPT, "rowwise")
    return [data, scale.t().contiguous().t()]


@quantize_kept.fake
def _quantize_kept_fake(x: Tensor) -> list[Tensor]:
    data, scale = _quantize_fake(x, KEPT, "rowwise")
    return [data, scale.t().contiguous().t()]


@quantize_kept.facts
def _quantize_kept_facts(x: Tensor) -> CastFacts:
    return CastFacts.of(x, [Side("rowwise", KEPT, None)])


@quantize_kept.implementation(CastKernel.TRITON, when=choice.kept)
def _triton_quantize_kept(x: Tensor) -> list[Tensor]:
    from fxquant.kernels.cast import triton_cast

    return triton_cast.quantize(x, QuantSpec.parse(KEPT), None)


@operator()
def dequantize(parts: Parts, spec: str, direction: str, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The values of one direction as [*, M, K] (`size` = [M, K]) in `dtype`."""
    return cut_to_size(reference.dequantize(parts, QuantSpec.parse(spec)), direction, size, dtype)


def cut_to_size(values: Tensor, direction: str, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Dequantized values as [*, M, K] (`size` = [M, K]) in `dtype`, without their padding."""
    length = size[-2] if direction == "columnwise" else size[-1]
    return _oriented(values.narrow(-1, 0, length), direction).to(dtype).contiguous()


def dequantize_operand(parts: Parts, spec: str, direction: str, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The values of one direction as [*, M, K] (`size` = [M, K]) in `dtype`."""
    parsed = QuantSpec.parse(spec)
    if parsed.key:
        length = size[-2] if direction == "columnwise" else size[-1]
        return _oriented(custom.get(parsed).dequantize_side(parts, length), direction).to(dtype)
    if parsed.is_identity:
        return _oriented(parts[0], direction).to(dtype)
    return dequantize(parts, spec, direction, size, dtype)


class HoldsQuantized(Tensor):
    """A tensor with quantized forms of itself, which products take in the place of a new quantization."""

    def held(self, spec: OperandSpec, direction: str) -> tuple[list[Tensor], QuantSpec] | None:
        """The parts of one direction and their spec; None where they are not there, and its values are quantized.

        Raises RecipeError where they are of another format.
        """
        raise NotImplementedError


def quantize_operand(
    x: Tensor, spec: OperandSpec, direction: str, state: StepState = STATELESS, stored: list[Tensor] | None = None
) -> tuple[list[Tensor], QuantSpec]:
    """One direction of an operand [*, M, K] with the spec of its parts: an identity gives the oriented tensor itself.

    `state` is that of the graph, for specs that name a slot or round stochastically. A columnwise half that is made
    from the rowwise one takes that as it was `stored`, if it was.
    """
    held = x.held(spec, direction) if isinstance(x, HoldsQuantized) else None
    if held is not None:
        return held
    row, row_spec = stored, spec.rowwise
    if isinstance(x, HoldsQuantized) and direction == "columnwise" and spec.from_rowwise:
        row, row_spec = x.held(spec, "rowwise") or (None, spec.rowwise)
    if direction == "rowwise":
        return _one_side(x, spec.rowwise, direction, state), parts_spec(spec.rowwise)
    if spec.from_rowwise:
        row = _one_side(x, spec.rowwise, "rowwise", state) if row is None else row
        x = dequantize_operand(row, str(row_spec), "rowwise", x.shape[-2:], x.dtype)
    return _one_side(x, spec.columnwise, direction, state), parts_spec(spec.columnwise)


@functools.lru_cache(maxsize=4096)
def parts_spec(spec: QuantSpec) -> QuantSpec:
    """The spec of what was quantized by another, as GEMMs read it: `shared_spec` without what casts alone need."""
    return replace(shared_spec(spec), nonfinite=False)


def shared_spec(spec: QuantSpec) -> QuantSpec:
    """The spec without its operand's slot, number or ranks, which the state stands for: operands share one lowering."""
    if spec.over:
        spec = replace(spec, over="")
    if spec.is_delayed:
        return replace(spec, slot=0)
    return replace(spec, stream=spec.stream % 2) if spec.stochastic else spec


def _one_side(x: Tensor, spec: QuantSpec, direction: str, state: StepState) -> list[Tensor]:
    if spec.is_identity:
        return [_oriented(x.to(getattr(torch, spec.dtype)) if spec.dtype else x, direction)]
    if spec.key:
        return custom.quantize(x, spec, direction, state.of(spec))
    taken = state.of(spec)
    if spec.over and not spec.is_delayed:
        taken = _over_ranks(x, spec, direction, taken)
    return quantize(x, str(shared_spec(spec)), direction, taken)


def _over_ranks(x: Tensor, spec: QuantSpec, direction: str, random: Tensor | None) -> Tensor:
    """The state of a quantization whose scales are made of the largest amaxes of all ranks that hold a part of x."""
    plain = str(shared_spec(spec))
    part = amax(x) if spec.scaled == "tensor" and not spec.rht else amaxes_of(x, plain, direction)
    largest = largest_over_ranks(part, spec.over)
    if spec.row.family != "nvfp4":
        return scale_from_amax(largest, plain)
    return largest if random is None else reference.beside_random(random, largest)
