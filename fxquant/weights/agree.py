"""Scales that cover more than a shard: the ranks take the largest amaxes of all, in one all-reduce for all weights.

Blocks lie in one shard and need none of this. A scale of the whole tensor (FP8), NVFP4's global amax, and scales of
columns that go through all shards do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from fxquant.compat.values import version
from fxquant.formats import OperandSpec, QuantSpec
from fxquant.kernels.cast import reference
from fxquant.kernels.cast.ops import amax as tensor_amax
from fxquant.roles import Direction
from fxquant.weights.layer import Agreed
from fxquant.weights.parts import as_quantized, side
from fxquant.weights.weight import QuantizedWeight


def precompute_scales(model: nn.Module) -> None:
    """Takes the amaxes of all weights that `prepare_fsdp` has prepared, over all ranks, in one all-reduce.

        optimizer.step()
        fxquant.precompute_scales(model)

    After each step of the optimizer, on every rank. Without it each group of `fully_shard` asks the other ranks when
    it gathers its weights. Formats in blocks (MXFP8, blocks of 128) have nothing to agree on.
    """
    agree(p for p in model.parameters() if isinstance(p, DTensor) and isinstance(p.to_local(), QuantizedWeight))


@dataclass(frozen=True)
class _Measured:
    """The amaxes of one direction of a shard, which are to be those of all shards."""

    shard: QuantizedWeight
    direction: Direction
    local: Tensor


def agree(weights: Iterable[DTensor]) -> None:
    """Lets all ranks have the largest amaxes of the weights whose shards have changed since they last had."""
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[QuantizedWeight]] = {}
    for weight in weights:
        shard = weight.to_local()
        groups = tuple(_groups(weight))
        if isinstance(shard, QuantizedWeight) and groups and not is_agreed(shard):
            by_groups.setdefault(groups, []).append(shard)
    with torch.no_grad():
        for groups, shards in by_groups.items():
            for shard in shards:
                shard.layer.agreed = Agreed(*moment(shard))
            for derived in (False, True):  # columns of what the rows stand for come after the rows
                _reduce([m for shard in shards for m in _measure(shard, derived)], groups)


def moment(shard: QuantizedWeight) -> tuple[int, torch.dtype]:
    """Returns what changes whenever the amaxes of a shard may: the writes into it, and the dtype that is quantized.

    Those through the subclass are counted by it; others, such as of a checkpoint that is loaded in place, by torch.
    """
    assert shard.master is not None
    return shard.layer.writes + version(shard.master), shard.layer.dtype or shard.dtype


def is_agreed(shard: QuantizedWeight) -> bool:
    """Returns True if the ranks have the amaxes of a shard as it is."""
    agreed = shard.layer.agreed
    return agreed is not None and (agreed.version, agreed.dtype) == moment(shard)


def _groups(weight: DTensor) -> Iterator[dist.ProcessGroup]:
    """Gives the groups of ranks that have other shards of a weight."""
    for axis, placement in enumerate(weight.placements):
        if isinstance(placement, Shard) and weight.device_mesh.size(axis) > 1:
            yield weight.device_mesh.get_group(axis)


def _measure(shard: QuantizedWeight, derived: bool) -> Iterator[_Measured]:
    """Gives the amaxes of a shard that need those of the others, of its own values or of what the rows stand for."""
    spec = OperandSpec.parse(shard.spec)
    assert shard.master is not None and shard.layer.agreed is not None
    for direction in Direction:
        from_rows = spec.from_rowwise and direction is Direction.COLUMNWISE
        if from_rows != derived or not spans_shards(side(spec, direction), direction):
            continue
        if spec.rowwise == spec.columnwise and not from_rows and direction is Direction.COLUMNWISE:
            if side(spec, direction).row.family == "per_tensor":  # one scale serves both
                continue
        values = shard.master.to(shard.layer.agreed.dtype)
        if from_rows:
            values = as_quantized(values, spec, shard.layer.agreed.of(Direction.ROWWISE, spec))
        yield _Measured(shard, direction, _amaxes(values, side(spec, direction), direction))


def spans_shards(spec: QuantSpec, direction: Direction) -> bool:
    """Returns True if scales of one direction cover elements of several shards, cut along the first axis."""
    family = spec.row.family
    if family in ("per_tensor", "nvfp4") and not spec.row_scaled:
        return True
    return (family == "per_row" or spec.row_scaled) and direction is Direction.COLUMNWISE


def _amaxes(values: Tensor, spec: QuantSpec, direction: Direction) -> Tensor:
    """The amaxes of the values that a direction quantizes: [1], or one of each of its rows [rows, 1]."""
    if spec.row.family == "per_row" or spec.row_scaled:
        return reference.amax(values.mT if direction is Direction.COLUMNWISE else values, -1).unsqueeze(-1)
    if spec.rht:
        return reference.amax(reference.hadamard(values.mT, random_signs=spec.random_signs))
    return tensor_amax.best(values)


def _reduce(measured: Sequence[_Measured], groups: Sequence[dist.ProcessGroup]) -> None:
    """Gives every shard the largest amaxes of all ranks."""
    if not measured:
        return
    largest = torch.cat([m.local.flatten() for m in measured])
    for group in groups:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    for m, values in zip(measured, torch.split(largest, [m.local.numel() for m in measured]), strict=True):
        assert m.shard.layer.agreed is not None
        m.shard.layer.agreed.amaxes[m.direction] = values.reshape(m.local.shape)
