"""The facts that all forms of one parameter share: its shard, the gathered weight, and their copies."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fxquant.formats import OperandSpec
from fxquant.roles import Direction

if TYPE_CHECKING:
    from fxquant.weights.delayed import DelayedScale


Quantize = Callable[[Tensor, str, str, Tensor | None], list[Tensor]]
"""`fxquant::quantize` of a tensor, its spec and direction, and the scale or amax that it is to have."""


@dataclass
class Agreed:
    """The amaxes of a whole weight by direction, as it was at a `version` of its shard and in the dtype that counts."""

    version: int
    dtype: torch.dtype
    amaxes: dict[Direction, Tensor] = field(default_factory=dict)

    def of(self, direction: Direction, spec: OperandSpec) -> Tensor | None:
        """The amaxes of a direction; those of the rows where one scale of the tensor serves both."""
        return self.amaxes.get(Direction.ROWWISE if has_one_scale(spec) else direction)


def has_one_scale(spec: OperandSpec) -> bool:
    """Returns True if both directions are quantized by one scale of the tensor."""
    return spec.rowwise == spec.columnwise and spec.rowwise.row.family == "per_tensor" and not spec.from_rowwise


@dataclass(eq=False)
class Layer:
    """The layer of a weight, by its full `name`, and facts that its gathers need.

    `runs_again` says that a backward repeats the layer's forward, in an activation checkpoint, and so needs both
    directions. `outputs` are the tensors that FSDP receives the parts of each direction into, and `common` the parts
    that are equal on all ranks, by direction and place. `dtype` is that of the values that are quantized. `writes`
    counts those into the master that an operator made. `delayed` is there under delayed scaling, and `amax` [1] of the
    whole weight then. `told` says that the user was warned. `initial` has the values that the weight began with, where
    they are preserved. `quantize` is compiled, and there once a graph has taken the weight.
    """

    name: str = ""
    runs_again: bool = False
    told: bool = False
    writes: int = 0
    dtype: torch.dtype | None = None
    outputs: dict[Direction, list[Tensor]] = field(default_factory=dict)
    common: dict[tuple[Direction, int], Tensor] = field(default_factory=dict)
    agreed: Agreed | None = None
    initial: Tensor | None = None
    quantize: Quantize | None = None
    delayed: DelayedScale | None = None
    amax: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Layer:
        copied = memo[id(self)] = Layer(self.name, self.runs_again, delayed=copy.deepcopy(self.delayed, memo))
        return copied

    def __reduce__(self) -> Any:
        return Layer, (self.name,)
