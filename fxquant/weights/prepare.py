"""Gives the linear layers of a model weights that FSDP2 gathers in low precision."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from fxquant.checks import checked
from fxquant.compat.inside.placements import local_part_of
from fxquant.errors import ArgumentError
from fxquant.formats import OperandSpec
from fxquant.quantizers import DelayedScalingRequest, Float8Quantizer, Quantizer
from fxquant.recipes import Recipe, resolve
from fxquant.roles import QuantizerRole
from fxquant.weights.delayed import DelayedScale
from fxquant.weights.layer import Layer
from fxquant.weights.state import own_weight, watch
from fxquant.weights.weight import QuantizedWeight


@checked(
    ArgumentError,
    called="fxquant.prepare_fsdp",
    takes={
        "model": "a module that fully_shard has not sharded yet",
        "recipe": "the name or the Recipe that the model is compiled with",
    },
)
def prepare_fsdp(model: nn.Module, recipe: Recipe | str, blocks: Iterable[nn.Module] | str | None = None) -> nn.Module:
    """Lets `fully_shard`, which is called next, gather the weights that a recipe quantizes as quantized bytes.

        fxquant.prepare_fsdp(model, "mxfp8", model.layers)
        for block in model.layers:
            fully_shard(block)
        fully_shard(model)
        fxquant.compile_blocks(model, "mxfp8", model.layers)

    `blocks` are the parts of the model that are compiled under the recipe, as modules or as a regular expression for
    their names; None is the whole model. Their linear layers get weights of a subclass of Tensor that holds them as
    before, in high precision: optimizers, clipping and checkpoints work as they did, and `state_dict()` has plain
    tensors. Returns the model. Raises ArgumentError for a model that is sharded already.
    """
    recipe = resolve(recipe)
    within = None if blocks is None else inside(model, blocks)
    sharded = {id(p) for part in model.modules() if isinstance(part, FSDPModule) for p in part.parameters()}
    for name, layer in list(quantizable(model)):
        spec, request = _gathered_spec(recipe, name)
        if spec is None or (within is not None and id(layer) not in within) or is_quantized(layer.weight):
            continue
        if id(layer.weight) in sharded:
            raise ArgumentError(f"{name}.weight is sharded already: call prepare_fsdp before fully_shard")
        put(model, layer.weight, _shard(layer.weight.detach(), name, spec, request))
    return model


def inside(model: nn.Module, blocks: Iterable[nn.Module] | str) -> set[int]:
    """The ids of the modules in the blocks of a model. Raises ArgumentError where there are none."""
    if isinstance(blocks, str):
        pattern = re.compile(blocks)
        blocks = [module for name, module in model.named_modules() if pattern.fullmatch(name)]
    chosen = {id(module) for block in blocks for module in block.modules()}
    if not chosen & {id(module) for module in model.modules()}:
        raise ArgumentError(f"blocks has no module of this {type(model).__name__}")
    return chosen


def is_quantized(weight: Tensor) -> bool:
    """Returns True for a weight with quantized forms, sharded or not."""
    return isinstance(local_part_of(weight), QuantizedWeight)


def quantizable(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Gives the linear layers whose weights nothing else reads, by their names."""
    users: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(id(parameter), []).append(module)
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
            continue
        weight = own_weight(module)
        if (
            weight is not None
            and not is_lazy(weight)
            and all(isinstance(user, nn.Linear) for user in users[id(weight)])
        ):
            yield name, module


def weight_spec(recipe: Recipe, name: str) -> OperandSpec | None:
    """The spec of a linear layer's weight; None where it stays in high precision, or differs from step to step."""
    answer = recipe.quantizer(QuantizerRole("linear", "weight", name))
    if not isinstance(answer, Quantizer) or answer.is_identity or answer.operand_spec().is_stochastic:
        return None
    return answer.operand_spec()


def _gathered_spec(recipe: Recipe, name: str) -> tuple[OperandSpec | None, DelayedScalingRequest | None]:
    """The same of a weight that may have a delayed scale, and the request of that."""
    answer = recipe.quantizer(QuantizerRole("linear", "weight", name))
    if isinstance(answer, DelayedScalingRequest):
        return Float8Quantizer(answer.fp8_format.dtype("weight"), 0).operand_spec(), answer
    return weight_spec(recipe, name), None


def _shard(weight: Tensor, name: str, spec: OperandSpec, request: DelayedScalingRequest | None) -> Tensor:
    """A weight that is quantized when it is gathered: of a tensor parallel one, this rank's part."""
    delayed = None if request is None else DelayedScale(request)
    new = QuantizedWeight(str(spec), master=local_part_of(weight), layer=Layer(name, delayed=delayed))
    if not isinstance(weight, DTensor):
        return new
    return DTensor.from_local(
        new, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )


def put(model: nn.Module, old: Tensor, new: Tensor) -> None:
    """Gives all linear layers of a model that have a weight a quantized one in its place."""
    parameter = nn.Parameter(new, requires_grad=old.requires_grad)
    for module in model.modules():
        if isinstance(module, nn.Linear) and own_weight(module) is old:
            module.weight = parameter
            watch(module)
