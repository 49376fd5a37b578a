"""The all-gather of FSDP2 in low precision: a shard is quantized, its bytes travel, and a product takes them.

A shard [n, K] of a weight [N, K] sends the payload [n, K] and the scales of one direction, laid out as the weight is,
so that shards behind each other are the whole. The columnwise parts of a product are then transposed views. Each
direction has memory of its own, which FSDP frees and allocates as it does for every parameter: compiled graphs save
the columnwise parts for the backward before they are there. Where both directions have the same elements and scales,
one payload is both.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fxquant.compat.inside.fsdp import Gather, current_gather, fill, over, unallocated
from fxquant.errors import RecipeError
from fxquant.formats import OperandSpec, QuantSpec
from fxquant.kernels import custom
from fxquant.kernels.cast.ops import amax as tensor_amax
from fxquant.kernels.cast.swizzle import TILE
from fxquant.roles import Direction
from fxquant.weights.agree import agree, is_agreed
from fxquant.weights.delayed import DelayedScale
from fxquant.weights.layer import Layer
from fxquant.weights.parts import laid_out, quantized, side


@dataclass
class Sent:
    """The bytes of the shards that a gather sends, and the tensors that they arrive in; `gather` is FSDP's own.

    `spec` is that of the whole weight.
    """

    gather: Gather
    spec: OperandSpec
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
    if gather.smaller:
        raise RecipeError(
            f"{layer.name}.weight: torch gathers no quantized weight from a part of the ranks, which a number as "
            "reshard_after_forward asks for: write True or False"
        )
    for direction in Direction:
        _check_shard(shard, side(spec, direction), direction, gather, layer)
    layer.dtype = gather.dtype
    if not is_agreed(layer, shard, gather.dtype):
        agree(gather.weights)
    spec = _in_tiles(spec, gather)
    sent, values = Sent(gather, spec), shard.to(gather.dtype)
    if layer.delayed is not None:
        _take_delayed(layer, layer.delayed, values, gather)
    directions = (Direction.ROWWISE,) if has_one_payload(spec, gather.size) else directions_of(gather, layer)
    for direction in directions:
        parts = quantized(values, spec, direction, *_amaxes(layer, spec, direction), layer.quantize)
        kinds = _kinds(gather.size, gather.dtype, spec, direction)
        flat = []
        for i, (part, kind) in enumerate(zip(parts, kinds, strict=True)):
            if _is_common(part, kind, gather):
                _common(layer, direction, i, part).copy_(part)
            else:
                flat.append((part.mT.contiguous() if _turned(gather, direction) else part).view(torch.uint8))
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


def _in_tiles(spec: OperandSpec, gather: Gather) -> OperandSpec:
    """The spec of a gathered weight whose shards have scales in the order of tensor cores.

    So have rows in shards of whole tiles, which are those of the whole behind each other. Of columns every tile row has
    tiles of all shards: they are put in order behind the gather, by a kernel of the graph that reads them.
    """
    order = laid_out(spec, gather.device)
    whole = gather.ranks == 1
    row = order.rowwise if whole or gather.padded_size[0] % TILE[0] == 0 else spec.rowwise
    return OperandSpec(row, order.columnwise if whole else spec.columnwise, spec.from_rowwise)


def gathered_parts(sent: Sent, layer: Layer) -> dict[Direction, list[Tensor]]:
    """The parts of a whole weight in the memory that shards arrive in, for both directions, whatever is there now."""
    gather, spec, parts = sent.gather, sent.spec, dict[Direction, list[Tensor]]()
    one = has_one_payload(spec, gather.size)
    for direction in Direction:
        if one and direction is Direction.COLUMNWISE:
            parts[direction] = [part if part.ndim < 2 else over_turned(part) for part in parts[Direction.ROWWISE]]
        else:
            parts[direction] = _parts(gather, spec, layer, direction)
    return parts


def _parts(gather: Gather, spec: OperandSpec, layer: Layer, direction: Direction) -> list[Tensor]:
    kinds = _kinds(gather.size, gather.dtype, spec, direction)
    shards = _kinds(gather.padded_size, gather.dtype, spec, direction)
    cut = [not _is_common(shard, kind, gather) for shard, kind in zip(shards, kinds, strict=True)]
    if direction not in layer.outputs:
        layer.outputs[direction] = [
            unallocated(shard.numel() * shard.itemsize, gather.ranks, gather.device)
            for shard, is_cut in zip(shards, cut, strict=True)
            if is_cut
        ]
    outputs, parts = iter(layer.outputs[direction]), []
    for i, (kind, is_cut) in enumerate(zip(kinds, cut, strict=True)):
        source = next(outputs) if is_cut else _common(layer, direction, i, kind, gather.device)
        turned = is_cut and _turned(gather, direction)
        parts.append(
            over(source, kind.dtype, kind.shape, kind.mT.contiguous().mT.stride() if turned else kind.stride())
        )
    return parts


def over_turned(part: Tensor) -> Tensor:
    """The transpose of a matrix, as a tensor whose writes are counted by itself."""
    return over(part, part.dtype, part.shape[::-1], part.stride()[::-1])


@functools.lru_cache(maxsize=4096)
def has_one_payload(spec: OperandSpec, size: torch.Size) -> bool:
    """Returns True if the columnwise parts of a weight are its rowwise ones, transposed."""
    row = spec.rowwise.row
    square = row.family == "per_tensor" or (row.family == "block" and row.block[0] == row.block[1])
    whole = all(length % row.alignment == 0 for length in size)
    return square and whole and spec.rowwise == spec.columnwise and not spec.from_rowwise


@functools.lru_cache(maxsize=4096)
def _kinds(size: torch.Size, dtype: torch.dtype, spec: OperandSpec, direction: Direction) -> list[Tensor]:
    """Tensors without values that are as the parts of a weight, or a shard, of this size."""
    return quantized(torch.empty(size, dtype=dtype, device="meta"), spec, direction)


def _take_delayed(layer: Layer, delayed: DelayedScale, values: Tensor, gather: Gather) -> None:
    """Takes the delayed scale, and the amax that the graph will record. A backward has those of its forward."""
    if delayed.used is not None and (gather.backward or gather.repeats):
        return
    amax = None if layer.agreed is None else layer.agreed.amaxes.get(Direction.ROWWISE)
    amax = tensor_amax.best(values) if amax is None else amax.to(gather.dtype).float()
    layer.amax = torch.empty_like(amax) if layer.amax is None else layer.amax
    layer.amax.copy_(amax)
    delayed.used = delayed.following(gather.device)


def _amaxes(layer: Layer, spec: OperandSpec, direction: Direction) -> tuple[Tensor | None, Tensor | None]:
    """The amaxes that all ranks have in common, of a direction and of the rows; or the delayed scale."""
    if layer.delayed is not None:
        return layer.delayed.used, None
    agreed = layer.agreed
    return (None, None) if agreed is None else (agreed.of(direction, spec), agreed.of(Direction.ROWWISE, spec))


def _is_common(shard: Tensor, whole: Tensor, gather: Gather) -> bool:
    """Returns True for parts that do not grow with the weight, and so are not gathered, but equal on all ranks."""
    return gather.ranks > 1 and shard.shape == whole.shape


def _common(layer: Layer, direction: Direction, place: int, like: Tensor, device: torch.device | None = None) -> Tensor:
    key = direction, place
    if key not in layer.common:
        layer.common[key] = torch.empty(like.shape, dtype=like.dtype, device=device or like.device)
    return layer.common[key]


def _turned(gather: Gather, direction: Direction) -> bool:
    """Returns True where parts travel transposed, which puts those of one shard in a row; one rank has the whole."""
    return direction is Direction.COLUMNWISE and gather.ranks > 1


def _check_shard(shard: Tensor, spec: QuantSpec, direction: Direction, gather: Gather, layer: Layer) -> None:
    """Raises RecipeError for a shard that cannot be quantized without the others."""
    if gather.ranks == 1 or spec.is_identity:
        return
    where = f"{layer.name}.weight {list(gather.size)} is cut into {gather.ranks} shards"
    if gather.shard_axis:
        raise RecipeError(f"{where} along axis {gather.shard_axis}: quantized gathers take shards of rows, Shard(0)")
    block = getattr(custom.get(spec), "alignment", 1) if spec.key else 0
    if block == 1:
        raise RecipeError(
            f"{where}, and a quantizer of your own that declares no blocks (`alignment`) has to see the whole: leave "
            "the layer out of prepare_fsdp"
        )
    alignment, rows = (block, block) if spec.key else (spec.row.alignment, max(spec.row.block[0], 1))
    multiple = alignment if direction is Direction.COLUMNWISE else rows
    length = gather.padded_size[0]
    if length % multiple or shard.shape != gather.padded_size:
        raise RecipeError(
            f"{where} of {length} along axis 0, and {spec.row.name}, {direction}, wants multiples of {multiple}: leave "
            "the layer out of prepare_fsdp, or shard over another number of ranks"
        )
