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
from torch.distributed.tensor import DTensor

from fxquant.checks import checked
from fxquant.compat.inside.placements import local_part_of
from fxquant.compat.values import version
from fxquant.errors import ArgumentError, FxQuantWarning, tell
from fxquant.formats import OperandSpec, QuantSpec
from fxquant.kernels.cast import reference
from fxquant.kernels.cast.ops import amax as tensor_amax
from fxquant.roles import Direction
from fxquant.weights.layer import Agreed, Layer, has_one_scale
from fxquant.weights.parts import as_quantized, side
from fxquant.weights.weight import QuantizedWeight


@checked(ArgumentError, called="fxquant.precompute_scales")
def precompute_scales(model: nn.Module) -> None:
    """Takes the amaxes of all weights that `prepare_fsdp` has prepared, over all ranks, in one all-reduce.

        optimizer.step()
        fxquant.precompute_scales(model)

    After each step of the optimizer, on every rank. Without it each group of `fully_shard` asks the other ranks when
    it gathers its weights. Formats in blocks (MXFP8, blocks of 128) have nothing to agree on. Warns of a model whose
    weights nothing has prepared.
    """
    weights = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
    if not any(map(is_quantized_shard, weights)):
        tell(
            f"fxquant.prepare_fsdp has prepared no weight of {type(model).__name__}: precompute_scales has no effect",
            FxQuantWarning,
        )
    agree(weights)


Groups = tuple[dist.ProcessGroup, ...]


@dataclass(frozen=True)
class _Measured:
    """The amaxes of one direction of a shard, which are to be the largest of those of all ranks in `groups`."""

    shard: QuantizedWeight
    direction: Direction
    groups: Groups
    local: Tensor


def agree(weights: Iterable[DTensor]) -> None:
    """Lets all ranks have the largest amaxes of the weights whose shards have changed since they last had."""
    shards = ((weight, local_part_of(weight)) for weight in weights if is_quantized_shard(weight))
    changed = [weight for weight, shard in shards if not is_agreed(shard.layer, shard.master, shard.dtype)]
    with torch.no_grad():
        for weight in changed:
            shard = local_part_of(weight)
            shard.layer.agreed = Agreed(*moment(shard.layer, shard.master, shard.dtype))
        for derived in (False, True):  # columns of what the rows stand for come after the rows
            by_groups: dict[Groups, list[_Measured]] = {}
            for weight in changed:
                for measured in _measure(weight, derived):
                    by_groups.setdefault(measured.groups, []).append(measured)
            for groups, some in by_groups.items():
                _reduce(some, groups)


def is_quantized_shard(weight: Tensor) -> bool:
    """Returns True for a DTensor of which a rank holds a weight with quantized forms."""
    return isinstance(weight, DTensor) and isinstance(local_part_of(weight), QuantizedWeight)


def moment(layer: Layer, master: Tensor, dtype: torch.dtype) -> tuple[int, torch.dtype]:
    """Returns what changes whenever the amaxes of a shard may: the writes into it, and the dtype that is quantized.

    Those through the subclass are counted by it; others, such as of a checkpoint that is loaded in place, by torch.
    """
    return layer.writes + version(master), layer.dtype or dtype


def is_agreed(layer: Layer, master: Tensor, dtype: torch.dtype) -> bool:
    """Returns True if the ranks have the amaxes of a shard as it is."""
    agreed = layer.agreed
    return agreed is not None and (agreed.version, agreed.dtype) == moment(layer, master, dtype)


def _groups(weight: DTensor, spec: QuantSpec, direction: Direction) -> Groups:
    """Returns the groups of ranks with which a rank shares the scales of a direction, dimension by dimension."""
    contracted = 0 if direction is Direction.COLUMNWISE else 1
    mesh, groups = weight.device_mesh, []
    for dim, placement in enumerate(weight.placements):
        axis = getattr(placement, "dim", None)
        shares = spec.scaled == "tensor" or (spec.scaled == "row" and axis == contracted)
        if axis is not None and shares and mesh.size(dim) > 1:
            groups.append(mesh.get_group(dim))
    return tuple(groups)


def _measure(weight: DTensor, derived: bool) -> Iterator[_Measured]:
    """Gives the amaxes of a shard that need those of others, of its own values or of what the rows stand for."""
    shard = local_part_of(weight)
    spec, agreed = OperandSpec.parse(shard.spec), shard.layer.agreed
    assert shard.master is not None and agreed is not None
    for direction in Direction:
        from_rows = spec.from_rowwise and direction is Direction.COLUMNWISE
        groups = _groups(weight, side(spec, direction), direction)
        again = has_one_scale(spec) and direction is Direction.COLUMNWISE
        if from_rows != derived or not groups or again:
            continue
        values = shard.master.to(agreed.dtype)
        if from_rows:
            values = as_quantized(values, spec, agreed.of(Direction.ROWWISE, spec))
        amaxes = _amaxes(values, side(spec, direction), direction)  # of a shard that is offloaded, on the CPU
        yield _Measured(shard, direction, groups, amaxes.to(weight.device_mesh.device_type))


def _amaxes(values: Tensor, spec: QuantSpec, direction: Direction) -> Tensor:
    """The amaxes of the values that a direction quantizes: [1], or one of each of its rows [rows, 1]."""
    if spec.scaled == "row":
        return reference.amax(values.mT if direction is Direction.COLUMNWISE else values, -1).unsqueeze(-1)
    if spec.rht:
        return reference.amax(reference.hadamard(values.mT, random_signs=spec.random_signs))
    return tensor_amax.best(values)


def _reduce(measured: Sequence[_Measured], groups: Groups) -> None:
    """Gives shards the largest amaxes of all ranks in these groups."""
    largest = torch.cat([m.local.flatten() for m in measured])
    for group in groups:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    for m, values in zip(measured, torch.split(largest, [m.local.numel() for m in measured]), strict=True):
        assert m.shard.layer.agreed is not None
        m.shard.layer.agreed.amaxes[m.direction] = values.reshape(m.local.shape)
