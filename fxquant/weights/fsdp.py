"""The all-gather of FSDP2 in low precision: a shard is quantized, its bytes travel, and a product takes them.

A shard [n, K] of a weight [N, K] sends the payload [n, K] and the scales of one direction, laid out as the weight is,
so that shards behind each other are the whole. The columnwise parts of a product are then transposed views. Each
direction has memory of its own, which FSDP frees and allocates as it does for every parameter: compiled graphs save
the columnwise parts for the backward before they are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fxquant.compat.fsdp import Gather, current_gather, fill, over, unallocated
from fxquant.errors import RecipeError
from fxquant.formats import OperandSpec, QuantSpec
from fxquant.roles import Direction
from fxquant.weights.layer import Layer
from fxquant.weights.parts import quantized, side


@dataclass
class Sent:
    """The bytes of the shards that a gather sends, and the tensors that they arrive in; `gather` is FSDP's own."""

    gather: Gather
    shards: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)


def directions_of(gather: Gather, layer: Layer) -> tuple[Direction, ...]:
    """Returns the directions that products read until the weight is gathered again."""
    if gather.kept or not (gather.forward or gather.backward):
        return tuple(Direction)
    if gather.forward:
        return (Direction.ROWWISE,)
    return tuple(Direction) if layer.runs_again else (Direction.COLUMNWISE,)


def send(shard: Tensor, spec: OperandSpec, layer: Layer) -> Sent:
    """Quantizes a shard in the directions that are needed."""
    gather = current_gather()
    if gather is None:
        raise RecipeError(f"{layer.name}.weight is gathered by other code than fully_shard's")
    for direction in Direction:
        _check_shard(shard, side(spec, direction), direction, gather, layer)
    sent, values = Sent(gather), shard.to(gather.dtype)
    rowwise: Sequence[Tensor] = ()
    for direction in directions_of(gather, layer):
        parts = quantized(values, spec, direction, rowwise)
        rowwise = parts if direction is Direction.ROWWISE else rowwise
        flat = [(part.mT.contiguous() if _turned(gather, direction) else part).view(torch.uint8) for part in parts]
        if direction not in layer.outputs:
            layer.outputs[direction] = [unallocated(part.numel(), gather.ranks, part.device) for part in flat]
        sent.shards += flat
        sent.outputs += layer.outputs[direction]
    gather.receive_into(sent.outputs)
    return sent


def receive(sent: Sent) -> None:
    """Lets the parts have the bytes that have arrived: all of them have already, unless there is one rank."""
    if sent.gather.ranks == 1:  # FSDP copies the first, and leaves out others
        for output, shard in list(zip(sent.outputs, sent.shards, strict=True))[1:]:
            fill(output, shard.view(-1))


def gathered_parts(
    sent: Sent, size: torch.Size, dtype: torch.dtype, spec: OperandSpec, layer: Layer
) -> dict[Direction, list[Tensor]]:
    """The parts of a whole weight in the memory that shards arrive in, for both directions, whatever is there now."""
    whole = torch.empty(size, dtype=dtype, device="meta")
    parts: dict[Direction, list[Tensor]] = {}
    for direction in Direction:
        kinds = quantized(whole, spec, direction)
        turned = _turned(sent.gather, direction)
        if direction not in layer.outputs:
            shards = quantized(whole.new_empty(sent.gather.padded_size), spec, direction)
            bytes = [part.numel() * part.itemsize for part in shards]
            layer.outputs[direction] = [unallocated(n, sent.gather.ranks, sent.gather.device) for n in bytes]
        parts[direction] = [
            over(output, kind.dtype, kind.shape, kind.mT.contiguous().mT.stride() if turned else kind.stride())
            for kind, output in zip(kinds, layer.outputs[direction], strict=True)
        ]
    return parts


def _turned(gather: Gather, direction: Direction) -> bool:
    """Returns True where parts travel transposed, which puts those of one shard in a row; one rank has the whole."""
    return direction is Direction.COLUMNWISE and gather.ranks > 1


def _check_shard(shard: Tensor, spec: QuantSpec, direction: Direction, gather: Gather, layer: Layer) -> None:
    """Raises RecipeError for a cut through a block."""
    if gather.ranks == 1 or spec.is_identity:
        return
    contracted = gather.shard_axis == (1 if direction is Direction.ROWWISE else 0)
    multiple = spec.row.alignment if contracted else max(spec.row.block[0], 1)
    length = gather.padded_size[gather.shard_axis]
    if length % multiple or shard.shape != gather.padded_size:
        raise RecipeError(
            f"{layer.name}.weight {list(gather.size)} is cut into {gather.ranks} shards of {length} along axis "
            f"{gather.shard_axis}, and {spec.row.name}, {direction}, wants multiples of {multiple}: leave it out of "
            "prepare_fsdp (`layers=`), or shard over fewer ranks"
        )
