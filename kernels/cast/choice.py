"""The kernels that a quantization can be, and their conditions: formats, sizes, the device and the graph around."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fxquant.compat.device import capability
from fxquant.compat.values import statically_known_true
from fxquant.formats import QuantSpec
from fxquant.kernels.linear import few_rows as limits
from fxquant.kernels.operator import Dim, Facts, Kernel, Operator, Side


class CastKernel(Kernel):
    """The kernels that a quantization, or the amax for one, can be."""

    ROWS = "Triton cast of rows"
    FEW_ROWS = "Triton cast of few rows"
    STORED = "Triton cast and amax"
    TRITON = "Triton cast"
    FUSED = "fused by Inductor"


def one_direction(x: Tensor, spec: str, direction: str, state: Tensor | None = None) -> list[Side]:
    """The sides of the arguments of `fxquant::quantize`."""
    return [Side(direction, spec, state)]


def both_sides(
    x: Tensor, row: str, column: str, row_state: Tensor | None = None, column_state: Tensor | None = None
) -> list[Side]:
    """The sides of the arguments of `fxquant::hybrid_quantize`."""
    return [Side("rowwise", row, row_state), Side("columnwise", column, column_state)]


def register_casts(
    operators: Sequence[Operator[..., Any]], facts: Callable[..., CastFacts], run: Callable[..., list[Tensor]],
    kernels: Sequence[tuple[CastKernel, Callable[[CastFacts], str], Any]],
) -> None:  # fmt: skip
    """Registers Triton's casts of an operator for one direction, and of one for both.

    `kernels` have conditions and what takes the amax before. `facts` and `run` get the sides of the arguments first.
    """
    for called, sides in zip(operators, (one_direction, both_sides), strict=True):
        called.facts(partial(facts, sides))
        for kernel, when, amax in kernels:
            called.implementation(kernel, when=when)(partial(run, sides, amax))


def by_direction(sides: Sequence[Side]) -> list[tuple[QuantSpec | None, Tensor | None]]:
    """The format and the state of a rowwise and of a columnwise quantization, None for what there is not."""
    specs = {side.direction: (QuantSpec.parse(side.spec), side.state) for side in sides}
    return [specs.get(direction, (None, None)) for direction in ("rowwise", "columnwise")]


@dataclass(frozen=True, kw_only=True)
class CastFacts(Facts):
    """A tensor and the formats that it is cast to in each direction.

    `after_amax` says that its scales are made of an amax that the same graph takes, `ragged` that a tensor has the ends
    of its groups of rows, `rows_given` that rows get their scales, or global amaxes, from elsewhere.
    """

    shape: tuple[Dim, ...]
    dtype: torch.dtype
    row: QuantSpec | None = None
    column: QuantSpec | None = None
    after_amax: bool = False
    ragged: bool = False
    rows_given: bool = False

    @classmethod
    def of(cls, x: Tensor, sides: Sequence[Side] = (), **more: Any) -> CastFacts:
        """The facts of a tensor that is quantized in some directions."""
        (row, _), (column, _) = by_direction(sides)
        return cls(
            capability=capability(x.device), shape=tuple(x.shape), dtype=x.dtype, row=row, column=column,
            after_amax=bool(sides) and sides[0].state is None,
            rows_given=any(side.state is not None for side in sides if QuantSpec.parse(side.spec).scaled == "row"),
            **more,
        )  # fmt: skip

    @classmethod
    def of_tensor(cls, x: Tensor, *_: object) -> CastFacts:
        """The facts of a tensor that is only read."""
        return cls.of(x)

    @property
    def specs(self) -> list[QuantSpec]:
        return [spec for spec in (self.row, self.column) if spec is not None]


def supports(spec: QuantSpec) -> bool:
    """Returns True if the Triton casts know a format with its options."""
    row = spec.row
    if row.family not in ("per_tensor", "per_row", "block", "mxfp8") or spec.rht:
        return False
    if row.family == "block" and row.block[1] != 128:
        return False
    return not spec.torchao or (row.family != "block" and not spec.eps)


def supports_nvfp4(spec: QuantSpec) -> bool:
    """Returns True if the Triton casts to NVFP4 know a format with its options."""
    return spec.row.family == "nvfp4" and not spec.row_scaled and not spec.four_over_six


def supports_groups(spec: QuantSpec, *, ragged: bool) -> bool:
    """Returns True if the Triton casts of groups know a format, for `ragged` groups or a batch of matrices."""
    return (supports(spec) or supports_nvfp4(spec)) and not (ragged and spec.row.block[0] > 1)


def _knows_groups(facts: CastFacts, spec: QuantSpec) -> bool:
    """Returns True for a format with a Triton cast of groups: to NVFP4 where tensor cores multiply it."""
    in_four_bits = spec.row.family == "nvfp4"
    return supports_groups(spec, ragged=facts.ragged) and (not in_four_bits or facts.reads_block_scales)


def few_rows(facts: CastFacts) -> str:
    """Returns why no kernel for few rows quantizes a tensor."""
    return _no_triton(facts) or ("" if facts.for_few_rows else "not for GEMMs of few rows alone")


def rows(facts: CastFacts) -> str:
    """Returns why no program quantizes a whole row in one read."""
    if reason := _no_triton(facts) or _not_stored(facts):
        return reason
    fits = facts.row is not None and facts.column is None and limits.quantizes_rows(facts.shape, facts.dtype, facts.row)
    return "" if fits else "not rows with a scale each"


def triton(facts: CastFacts) -> str:
    """Returns why no Triton kernel quantizes a tensor.

    Inductor fuses a rowwise cast into the producer of its tensor, unless the amax of the whole tensor or of a tile of
    several rows comes between, and stores transposed payloads a byte at a time. Swizzled scales it writes twice. The
    global amax of NVFP4 always comes between, or elements are packed behind a transform.
    """
    if reason := _no_triton(facts):
        return reason
    first = facts.specs[0]
    amax_between = first.row.family == "per_tensor" and facts.after_amax
    tiled = first.row.block[0] > 1 or first.row.family == "nvfp4" or (first.swizzled and facts.in_memory)
    if facts.column is None and not amax_between and not tiled:
        return "fused with what makes the tensor"
    unknown = [str(spec) for spec in facts.specs if not (supports(spec) or supports_nvfp4(spec))]
    if unknown:
        return f"no Triton cast to {unknown[0]}"
    return _no_matrix(facts)


def kept(facts: CastFacts) -> str:
    """Returns why no Triton kernel quantizes a tensor that a forward keeps.

    Its readers are kernels, for which it is written anyway. Inductor would take amaxes in one kernel, and divide by
    them for every element in another.
    """
    return _no_triton(facts) or _no_matrix(facts)


def stored(facts: CastFacts) -> str:
    """Returns why no Triton kernel quantizes a tensor after another that takes its amax."""
    return triton(facts) or _not_stored(facts)


def amax(facts: CastFacts) -> str:
    """Returns why no Triton kernel takes the amax of a tensor."""
    if not (facts.on_cuda and facts.triton):
        return "no Triton"
    return _not_stored(facts) or ("an empty tensor" if 0 in facts.shape else "")


def stored_scale(facts: CastFacts) -> str:
    """Returns why no Triton kernels make the scale of a tensor that lies in memory."""
    return amax(facts) or ("" if supports(facts.specs[0]) else f"no Triton scale of {facts.specs[0]}")


def made_scale(facts: CastFacts) -> str:
    """Returns why no Triton kernel makes the scale of a tensor of the amaxes of its rows, which Inductor takes.

    Inductor makes the scale of a single row, or of a vector, where it takes the amax.
    """
    if not (facts.on_cuda and facts.triton):
        return "no Triton"
    if not supports(facts.specs[0]):
        return f"no Triton scale of {facts.specs[0]}"
    return no_rows(facts.shape, facts.dtype)


def no_rows(shape: Any, dtype: torch.dtype) -> str:
    """Returns why Inductor does not leave the amaxes of a tensor's rows to a launch."""
    plain = all(isinstance(size, int) for size in shape) and dtype != torch.float64
    return "" if plain and 0 not in shape and math.prod(shape[:-1]) > 1 else "no rows of a known number"


def groups(facts: CastFacts) -> str:
    """Returns why no Triton kernel quantizes groups.

    A rowwise cast of what does not lie in memory is fused, unless the tiles of scales of each group are put together.
    """
    if not (facts.launches and facts.makes_fp8):
        return "no Triton casts of groups"
    swizzled = any(spec.swizzled for spec in facts.specs)
    if facts.column is None and not swizzled and (facts.ragged or not facts.in_memory):
        return "fused with what makes the tensor"
    unknown = [str(spec) for spec in facts.specs if not _knows_groups(facts, spec)]
    return f"no Triton cast of groups to {unknown[0]}" if unknown else _no_groups(facts)


def stored_groups(facts: CastFacts) -> str:
    """Returns why no Triton kernel quantizes groups after another that takes their amaxes."""
    return groups(facts) or _not_stored(facts)


def amax_of_groups(facts: CastFacts) -> str:
    """Returns why no Triton kernel takes the amaxes of groups."""
    if not (facts.on_cuda and facts.launches):
        return "no Triton"
    return _not_stored(facts) or _no_groups(facts)


def _no_groups(facts: CastFacts) -> str:
    shape: Any = facts.shape
    some = statically_known_true(shape[-1] > 0) and (facts.ragged or statically_known_true(math.prod(shape) > 0))
    matrices = some and facts.dtype != torch.float64 and len(shape) == (2 if facts.ragged else 3)
    return "" if matrices else "no groups of rows"


def _no_matrix(facts: CastFacts) -> str:
    matrix = len(facts.shape) == 2 and 0 not in facts.shape and facts.dtype != torch.float64
    return "" if matrix else "no matrix"


def _no_triton(facts: CastFacts) -> str:
    if facts.rows_given:
        return "the scales of its rows are given"
    return "" if facts.triton and facts.makes_fp8 else "no Triton casts"


def _not_stored(facts: CastFacts) -> str:
    return "" if facts.in_memory else "made by a kernel of Inductor's"
