"""Weights that FSDP2 gathers quantized, in the graphs that take them: which directions a backward will need.

From their first graph on, what quantizes them for a gather is compiled as the graph is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.backend.outside import Quantizations
from fxquant.backend.stored import dtype_read
from fxquant.compat.inside.checkpoints import checkpoints_around
from fxquant.compat.inside.placements import local_part, local_part_of
from fxquant.compat.inside.subclass import is_allocated
from fxquant.compat.private import recomputes_activations
from fxquant.errors import RecipeError
from fxquant.formats import LinearSpec
from fxquant.kernels.operator import traits_of
from fxquant.passes.settings import Settings
from fxquant.roles import Direction
from fxquant.state import DelayedState, State
from fxquant.weights import QuantizedWeight


def quantizing(quantizations: Quantizations) -> Callable[[Tensor, str, str, Tensor | None], list[Tensor]]:
    """Returns `fxquant::quantize` as a function of a tensor, a spec, a direction and a state, compiled for each."""

    def quantize(x: Tensor, spec: str, direction: str, state: Tensor | None) -> list[Tensor]:
        def run(*tensors: Tensor) -> list[list[Tensor]]:
            return [torch.ops.fxquant.quantize(tensors[0], spec, direction, *tensors[1:])]

        (parts,) = quantizations((spec, direction), run, *([x] if state is None else [x, state]))
        return parts

    return quantize


class GatheredWeights:
    """The weights with quantized forms among the inputs of a graph.

    A backward reads their columnwise parts alone, unless it repeats the forward, or something else than a product of
    fxquant reads their values.
    """

    def __init__(
        self, gm: fx.GraphModule, inputs: Sequence[Any], settings: Settings, quantizations: Quantizations
    ) -> None:
        self._quantize = quantizing(quantizations)
        self._places = [i for i, x in enumerate(inputs) if isinstance(local_part_of(x), QuantizedWeight)]
        if not self._places:
            return
        placeholders = gm.graph.find_nodes(op="placeholder")
        self._dtypes = [dtype_read(placeholders[i]) for i in self._places]
        repeats = settings.save == "least" or recomputes_activations(gm)
        self._again = [repeats or not all(map(_multiplies, placeholders[i].users)) for i in self._places]
        self._slots = [next(_slots(placeholders[i]), -1) for i in self._places]

    def use(self, inputs: Sequence[Any], states: Sequence[State]) -> None:
        """Looks at the weights of a call that reads these states, before its kernels do.

        Raises RecipeError for one of which other bytes were gathered than a forward reads.
        """
        if not self._places:
            return
        around = bool(checkpoints_around().first)
        state = next((state for state in states if isinstance(state, DelayedState)), None)
        facts = zip(self._places, self._again, self._slots, self._dtypes, strict=True)
        for place, again, slot, dtype in facts:
            weight: QuantizedWeight = local_part_of(inputs[place])
            weight.refresh(dtype)
            weight.layer.runs_again |= around or again
            weight.layer.quantize = self._quantize
            if weight.layer.delayed is not None and state is not None and slot >= 0:
                weight.layer.delayed.read_from(state, slot)
            if not all(map(is_allocated, weight.parts(Direction.ROWWISE))):
                raise RecipeError(
                    f"{weight.layer.name}.weight was gathered for a backward, in columns, and a forward reads it: call "
                    "the model's forward through its FSDP modules"
                )


def _slots(node: fx.Node) -> Iterator[int]:
    """Gives the slots of the delayed scales by which products quantize a weight."""
    for user in node.users:
        if user.target is local_part:
            yield from _slots(user)
        elif traits_of(user).stored_weights:
            text = next(argument for argument in reversed(user.args) if isinstance(argument, str))
            yield LinearSpec.parse(text).weight.rowwise.slot


def _multiplies(node: fx.Node) -> bool:
    """Returns True for a product that takes a weight as it is, and for what nothing reads."""
    if node.target is local_part:  # of a tensor parallel layer
        return all(map(_multiplies, node.users))
    return traits_of(node).stored_weights or traits_of(node).stateful is not None or not node.users
