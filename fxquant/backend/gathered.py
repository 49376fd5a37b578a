"""Weights that FSDP2 gathers quantized, in the graphs that take them: which directions a backward will need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from fxquant.compat.checkpoints import checkpoints_around
from fxquant.compat.private import recomputes_activations
from fxquant.compat.subclass import is_allocated
from fxquant.errors import RecipeError
from fxquant.kernels.operator import traits_of
from fxquant.passes.settings import Settings
from fxquant.roles import Direction
from fxquant.weights import QuantizedWeight


class GatheredWeights:
    """The weights with quantized forms among the inputs of a graph.

    A backward reads their columnwise parts alone, unless it repeats the forward, or something else than a product of
    fxquant reads their values.
    """

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any], settings: Settings) -> None:
        self._places = [i for i, x in enumerate(inputs) if isinstance(x, QuantizedWeight)]
        if not self._places:
            return
        placeholders = gm.graph.find_nodes(op="placeholder")
        repeats = settings.save == "least" or recomputes_activations(gm)
        self._again = [repeats or not all(map(_multiplies, placeholders[i].users)) for i in self._places]

    def use(self, inputs: Sequence[Any]) -> None:
        """Looks at the weights of a call, before its kernels do.

        Raises RecipeError for one of which other bytes were gathered than a forward reads.
        """
        if not self._places:
            return
        around = bool(checkpoints_around().first)
        for place, again in zip(self._places, self._again, strict=True):
            weight: QuantizedWeight = inputs[place]
            weight.refresh()
            weight.layer.runs_again |= around or again
            if not all(map(is_allocated, weight.parts(Direction.ROWWISE))):
                raise RecipeError(
                    f"{weight.layer.name}.weight was gathered for a backward, in columns, and a forward reads it: call "
                    "the model's forward through its FSDP modules"
                )


def _multiplies(node: fx.Node) -> bool:
    """Returns True for a product that takes a weight as it is, and for what nothing reads."""
    return traits_of(node).stored_weights or traits_of(node).stateful is not None or not node.users
