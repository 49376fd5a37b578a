"""The facts that all forms of one parameter share: its shard, the gathered weight, and their copies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(eq=False)
class Layer:
    """The layer of a weight, by its full `name`, and facts that its gathers need.

    `runs_again` says that a backward repeats the layer's forward, in an activation checkpoint, and so needs both
    directions. `outputs` are the tensors that FSDP receives the parts of each direction into.
    """

    name: str = ""
    runs_again: bool = False
    outputs: dict[str, list[Tensor]] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> Layer:
        copied = memo[id(self)] = Layer(self.name, self.runs_again)
        return copied

    def __reduce__(self) -> Any:
        return Layer, (self.name,)
