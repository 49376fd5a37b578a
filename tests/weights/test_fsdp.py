"""FSDP2 that gathers weights quantized, two gloo processes: the bits of one process that runs each rank's batch.

Every shard has whole blocks, so that shards behind each other are the quantized whole.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers import assert_same_bits
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed import checkpoint as checkpoint_files
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import fxquant
from fxquant import FxQuantWarning, RecipeError
from fxquant.weights import QuantizedWeight, fsdp
from fxquant.weights import parts as weight_parts

EAGER = {"inner": "aot_eager"}
STEPS = 3


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Checkpointed(Block):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class Model(nn.Module):
    def __init__(self, kind: type[Block] = Block, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Linear(32, width)
        self.layers = nn.ModuleList(kind(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x


def model(width: int = 64, kind: type[Block] = Block) -> Model:
    torch.manual_seed(0)
    return Model(kind, width)


def batch(step: int, rank: int, part: int = 0) -> Tensor:
    return torch.randn(32, 32, generator=torch.Generator().manual_seed(100 * part + 10 * step + rank))


@contextlib.contextmanager
def counted() -> Iterator[list[tuple[torch.dtype, int]]]:
    """Gives the dtype and the bytes of each all-gather's input in this scope."""
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    gather, sent = getattr(dist, name), []

    def count(*args: Any, **kwargs: Any) -> Any:
        shard = kwargs["input_tensor"] if "input_tensor" in kwargs else args[1]
        sent.append((shard.dtype, shard.numel() * shard.element_size()))
        return gather(*args, **kwargs)

    setattr(dist, name, count)
    try:
        yield sent
    finally:
        setattr(dist, name, gather)


def sharded(run: Model, recipe: Any, mesh: DeviceMesh | None = None, **keywords: Any) -> Model:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if mesh is None else mesh
    fxquant.prepare_fsdp(run, recipe, run.layers)
    options = {**EAGER, **keywords.pop("options", {})}
    for layer in run.layers:
        fully_shard(layer, mesh=mesh, **keywords)
    fully_shard(run, mesh=mesh, **keywords)
    fxquant.compile_blocks(run, recipe, run.layers, options=options)
    return run


def trained(run: Model, parts: Callable[[int], list[Tensor]], *, agree: bool = False) -> dict[str, Tensor]:
    """The outputs of the last part of each step, and the parameters after the last one."""
    optimizer, results = torch.optim.AdamW(run.parameters(), 1e-2), {}
    for step in range(STEPS):
        inputs = parts(step)
        for x in inputs:
            output = run(x)
            (output.float().square().mean() / len(inputs)).backward()
        results[f"output {step}"] = output.detach().clone()
        optimizer.step()
        optimizer.zero_grad()
        if agree:
            fxquant.precompute_scales(run)
    shards = {name: p.detach() for name, p in run.state_dict().items()}
    assert not any(isinstance(getattr(p, "_local_tensor", p), QuantizedWeight) for p in shards.values())
    return results | {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in shards.items()}


def reference(recipe: Any, width: int, kind: type[Block] = Block, parts: int = 1) -> dict[str, Tensor]:
    """The same of one process with the batches of both ranks, this one's last: sums of two have one order."""
    run = fxquant.compile_blocks(model(width, kind), recipe, options=EAGER)
    ranks = (1 - dist.get_rank(), dist.get_rank())
    return trained(run, lambda step: [batch(step, rank, part) for rank in ranks for part in range(parts)])


def compare(recipe: Any, width: int, keywords: dict[str, Any], agree: bool = False) -> tuple[Model, list[Any]]:
    """Holds bits to those of the reference; returns the model, and what the next forward and backward gathered."""
    expected = reference(recipe, width)
    torch.compiler.reset()
    run = sharded(model(width), recipe, **keywords)
    results = trained(run, lambda step: [batch(step, dist.get_rank())], agree=agree)
    decisions = fxquant.report(run).decisions
    assert decisions and not [d for d in decisions if d.quantizer is None]
    assert_same_bits(results, expected)
    with counted() as sent:
        run(batch(0, dist.get_rank())).sum().backward()
    return run, sent


def bytes_an_element(sent: list[tuple[torch.dtype, int]], width: int) -> list[float]:
    """The bytes of the weights of a block in each gather of one, a bias and a norm left out."""
    rest = 4 * 4 * width // 2
    return [(count - rest) / (4 * width * width // 2) for dtype, count in sent if dtype == torch.uint8]


NVFP4 = fxquant.NVFP4BlockScaling(disable_stochastic_rounding=True)  # each rank draws bits of its own

SIZES = {
    "mxfp8": (64, [1 + 1 / 32] * 4),
    "current_scaling": (64, [1] * 4),
    "float8_blockwise": (256, [1 + 4 / 128**2] * 4),
    "rowwise": (64, [1 + 4 * 1.5 / 128] * 2 + [1] * 2),
    "nvfp4": (64, [0.5 + 1 / 16] * 4),
}
"""The width of the model, and the bytes an element in the forward of both blocks and in their backward.

A scale a row has 4 bytes for K elements; that of a column goes through all shards, and is not sent.
"""


def sizes_of(recipe: str, reshard: bool) -> list[float]:
    width = SIZES[recipe][0]
    _, sent = compare(NVFP4 if recipe == "nvfp4" else recipe, width, {"reshard_after_forward": reshard})
    return bytes_an_element(sent, width)


@pytest.mark.parametrize("recipe", SIZES)
def test_a_shard_sends_its_bytes_in_the_direction_of_the_pass(ranks: Ranks, recipe: str) -> None:
    """Invariant 47: what was gathered is what the shards stand for, so that every bit is that of the whole."""
    for sizes in ranks.run(sizes_of, recipe, True):
        assert sizes == SIZES[recipe][1], "a gather for each block in each pass"


@pytest.mark.parametrize(("recipe", "size"), [("mxfp8", 2 + 2 / 32), ("current_scaling", 1)])
def test_what_is_kept_is_gathered_once(ranks: Ranks, recipe: str, size: float) -> None:
    for sizes in ranks.run(sizes_of, recipe, False):
        assert sizes == [size] * 2, "both directions, which have one payload under one scale"


def in_tiles() -> tuple[set[str], list[float]]:
    """The formats of gathered weights on a card that reads scales of blocks, and the bytes that were sent."""
    specs, gathered = set[str](), fsdp.gathered_parts

    def parts(sent: Any, layer: Any) -> Any:
        specs.add(f"{layer.name.split('.')[-1]}: {sent.spec}")
        return gathered(sent, layer)

    with (
        mock.patch.object(weight_parts, "capability", lambda device: (10, 0)),
        mock.patch.object(fsdp, "gathered_parts", parts),
    ):
        _, sent = compare("mxfp8", 128, {})
    return specs, bytes_an_element(sent, 128)


def test_rows_in_shards_of_whole_tiles_arrive_as_tensor_cores_read_them(ranks: Ranks) -> None:
    """A shard of `up` has 128 rows, one of `down` 64."""
    plain, rows = "mxfp8_e4m3", "mxfp8_e4m3(swizzled)|mxfp8_e4m3"
    for specs, sizes in ranks.run(in_tiles):
        assert specs == {f"up: {rows}", f"down: {plain}"} and sizes == [1 + 1 / 32] * 4


@contextlib.contextmanager
def counted_reductions() -> Iterator[list[int]]:
    """Gives the number of elements of each all-reduce in this scope."""
    reduce, sizes = dist.all_reduce, []

    def count(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.numel())
        return reduce(tensor, *args, **kwargs)

    dist.all_reduce = count
    try:
        yield sizes
    finally:
        dist.all_reduce = reduce


def agreed() -> tuple[list[int], list[int], list[int]]:
    run, _ = compare("current_scaling", 64, {}, agree=True)
    with torch.no_grad():
        for p in run.parameters():
            p.mul_(0.5)
    with counted_reductions() as at_once:
        fxquant.precompute_scales(run)
        fxquant.precompute_scales(run)
        run(batch(0, dist.get_rank())).sum().backward()
    with torch.no_grad():
        for p in run.parameters():
            p.mul_(0.5)
    with counted_reductions() as by_group:
        for _ in range(2):
            run(batch(0, dist.get_rank())).sum().backward()
    with counted_reductions() as blocks:
        sharded(model(), "mxfp8")(batch(0, dist.get_rank())).sum().backward()
    return at_once, by_group, blocks


def test_all_amaxes_are_agreed_on_in_one_reduction(ranks: Ranks) -> None:
    for at_once, by_group, blocks in ranks.run(agreed):
        assert at_once == [4], "all weights at once, and no more until they change"
        assert by_group == [2, 2], "without it, those of a block when it is gathered"
        assert blocks == []


def delayed() -> None:
    recipe = fxquant.DelayedScaling(amax_history_len=4)
    expected = ranks_averaged(recipe)
    torch.compiler.reset()
    run = sharded(model(), recipe)
    state = {}

    def parts(step: int) -> list[Tensor]:
        if step == 2:  # goes on after a restart
            state.update(fxquant.state_dict(run))
        return [batch(step, dist.get_rank())]

    assert_same_bits(trained(run, parts), expected)
    weights = {key: value for key, value in state.items() if ".weight.scale" in key}
    assert len(weights) == 4 and all(value != 1 for value in weights.values())
    again = sharded(model(), recipe)
    fxquant.load_state_dict(again, state)
    run.load_state_dict(again.state_dict())
    outputs = [m(batch(7, dist.get_rank())) for m in (run, again)]
    fxquant.load_state_dict(run, state)
    assert torch.equal(run(batch(7, dist.get_rank())), outputs[1])


def ranks_averaged(recipe: Any) -> dict[str, Tensor]:
    """The plain FSDP2 of the same recipe, which gathers in high precision."""
    run = model()
    for layer in run.layers:
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    fully_shard(run, mesh=init_device_mesh("cpu", (2,)))
    fxquant.compile_blocks(run, recipe, run.layers, options=EAGER)
    return trained(run, lambda step: [batch(step, dist.get_rank())])


def test_delayed_scales_are_those_that_the_graph_takes(ranks: Ranks) -> None:
    ranks.run(delayed)


def accumulated(options: dict[str, Any]) -> None:
    expected = reference("current_scaling", 64, parts=2)
    torch.compiler.reset()
    run = sharded(model(), "current_scaling", options=options)
    results = trained(run, lambda step: [batch(step, dist.get_rank(), part) for part in range(2)])
    for name, value in results.items():  # sums of four have another order
        torch.testing.assert_close(value, expected[name], atol=2e-3, rtol=0)
    assert_same_bits({"first": results["output 0"]}, {"first": expected["output 0"]})


@pytest.mark.parametrize("options", [{}, {"cache_weights": True}])
def test_gradients_add_up(ranks: Ranks, options: dict[str, Any]) -> None:
    ranks.run(accumulated, options)


def mixed(by_hand: bool) -> dict[str, Tensor]:
    torch.compiler.reset()
    run, policy = model(), MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if by_hand:
        mesh = init_device_mesh("cpu", (2,))
        for layer in run.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(run, mesh=mesh, mp_policy=policy)
        fxquant.compile_blocks(run, "current_scaling", run.layers, options=EAGER)
    else:
        run = sharded(
            run,
            "current_scaling",
            mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        )
    return trained(run, lambda step: [batch(step, dist.get_rank())])


def same_with_mixed_precision() -> None:
    assert_same_bits(mixed(False), mixed(True))


def test_a_policy_of_mixed_precision_gives_the_bits_of_a_gather_in_bfloat16(ranks: Ranks) -> None:
    ranks.run(same_with_mixed_precision)


def on_two_axes(shape: tuple[int, int]) -> list[float]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))
    _, sent = compare("current_scaling", 64, {"mesh": mesh})
    return bytes_an_element(sent, 64)


@pytest.mark.parametrize("shape", [(1, 2), (2, 1)])
def test_a_mesh_of_replicas_and_shards(ranks: Ranks, shape: tuple[int, int]) -> None:
    for sizes in ranks.run(on_two_axes, shape):
        assert sizes == [1.0] * (4 if shape == (1, 2) else 0)


def tensor_parallel(recipe: str) -> list[float]:
    inputs = [batch(0, 0), batch(0, 1)]
    expected = trained(fxquant.compile_blocks(model(), recipe, options=EAGER), lambda step: inputs)
    torch.compiler.reset()
    run, mesh = model(), init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    for layer in run.layers:
        parallelize_module(layer, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    sharded(run, recipe, mesh["data"])
    assert isinstance(run.layers[0].up.weight, DTensor) and run.layers[0].up.weight.device_mesh.ndim == 2
    results = trained(run, lambda step: inputs)
    decisions = fxquant.report(run).decisions
    assert decisions and not [d for d in decisions if d.quantizer is None]
    return [float((results[f"output {step}"] - expected[f"output {step}"]).abs().max()) for step in range(STEPS)]


@pytest.mark.parametrize("recipe", ["mxfp8", "current_scaling", "rowwise"])
def test_beside_tensor_parallel_layers(ranks: Ranks, recipe: str) -> None:
    for first, *others in ranks.run(tensor_parallel, recipe):
        assert first < 1e-5
        assert max(others) < 0.05, "a gradient near 0 may have another sign, and AdamW looks at that"


def saved(folder: str) -> dict[str, Tensor]:
    run = sharded(model(), "current_scaling")
    optimizer = torch.optim.AdamW(run.parameters(), 1e-2)
    run(batch(0, dist.get_rank())).sum().backward()
    optimizer.step()
    parameters, states = get_state_dict(run, optimizer)
    checkpoint_files.save({"model": parameters, "optimizer": states}, checkpoint_id=folder)
    return {name: p.full_tensor() for name, p in run.state_dict().items()}


def test_a_checkpoint_is_loaded_by_one_process_and_by_two(ranks: Ranks, tmp_path: Path) -> None:
    expected, _ = ranks.run(saved, str(tmp_path))
    run = model()
    optimizer = torch.optim.AdamW(run.parameters(), 1e-2)
    parameters, states = get_state_dict(run, optimizer)
    checkpoint_files.load({"model": parameters, "optimizer": states}, checkpoint_id=str(tmp_path), no_dist=True)
    set_state_dict(run, optimizer, model_state_dict=parameters, optim_state_dict=states)
    assert_same_bits(dict(run.state_dict()), expected)
    for loaded in ranks.run(reloaded, str(tmp_path)):
        assert_same_bits(loaded, expected)


def reloaded(folder: str) -> dict[str, Tensor]:
    run = sharded(model(), "current_scaling")
    run(batch(0, dist.get_rank())).sum().backward()
    optimizer = torch.optim.AdamW(run.parameters(), 1e-2)
    optimizer.zero_grad()
    with torch.no_grad():
        for p in run.parameters():
            p.zero_()
    parameters, states = get_state_dict(run, optimizer)
    checkpoint_files.load({"model": parameters, "optimizer": states}, checkpoint_id=folder)
    set_state_dict(run, optimizer, model_state_dict=parameters, optim_state_dict=states)
    output = run(batch(1, dist.get_rank()))
    other = fxquant.compile_blocks(model(), "current_scaling", options=EAGER)
    other.load_state_dict({name: p.full_tensor() for name, p in run.state_dict().items()})
    assert torch.equal(output, other(batch(1, dist.get_rank())))
    return {name: p.full_tensor() for name, p in run.state_dict().items()}


def by_inductor(recipe: str) -> None:
    EAGER["inner"] = "inductor"
    try:
        compare(recipe, 64, {})
    finally:
        EAGER["inner"] = "aot_eager"


@pytest.mark.slow
def test_a_compiled_quantization_sends_the_same_bits(ranks: Ranks) -> None:
    """From the first graph on, shards are quantized by what Inductor has compiled."""
    ranks.run(by_inductor, "current_scaling", seconds=180)


def checkpointed(reentrant: bool, outside: bool) -> None:
    Checkpointed.reentrant = reentrant
    expected = reference("mxfp8", 64, Checkpointed)
    torch.compiler.reset()
    run = model(kind=Checkpointed)
    if outside:  # the checkpoint is around what is sharded and compiled
        run = sharded(model(), "mxfp8")
        for i, layer in enumerate(run.layers):
            run.layers[i] = Around(layer, reentrant)
    else:
        run = sharded(run, "mxfp8")
    results = trained(run, lambda step: [batch(step, dist.get_rank())])
    results = {name.replace(".layer.", "."): value for name, value in results.items()}
    assert_same_bits(results, expected)


class Around(nn.Module):
    def __init__(self, layer: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.layer, self.reentrant = layer, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_run_again_with_what_the_first_run_had(ranks: Ranks, reentrant: bool, outside: bool) -> None:
    ranks.run(checkpointed, reentrant, outside)


def uncompiled() -> list[str]:
    run, mesh = model(), init_device_mesh("cpu", (2,))
    fxquant.prepare_fsdp(run, "mxfp8")
    for layer in run.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(run, mesh=mesh)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            run(batch(0, 0)).sum().backward()
    return [str(warning.message) for warning in told if warning.category is FxQuantWarning]


def test_a_layer_that_runs_uncompiled_is_told_once(ranks: Ranks) -> None:
    for told in ranks.run(uncompiled):
        assert [text.partition(" was")[0] for text in told] == [
            "embed.weight", "layers.0.up.weight", "layers.0.down.weight", "layers.1.up.weight", "layers.1.down.weight",
        ]  # fmt: skip


def test_a_model_that_is_prepared_and_not_sharded_is_as_it_was() -> None:
    def states(run: nn.Module) -> Any:
        return trained(fxquant.compile_blocks(run, "current_scaling", options=EAGER), lambda s: [batch(s, 0)])

    plain = states(model())
    torch.compiler.reset()
    prepared = model()
    fxquant.prepare_fsdp(prepared, "current_scaling")
    assert_same_bits(plain, states(prepared))


def cut_blocks() -> str:
    run = sharded(model(width=48), "mxfp8")
    with pytest.raises(RecipeError) as caught:
        run(batch(0, 0))
    return str(caught.value)


def test_a_cut_through_a_block_is_refused_with_its_layer(ranks: Ranks) -> None:
    for message in ranks.run(cut_blocks):
        assert message.startswith("layers.0.up.weight [96, 48] is cut into 2 shards of 48 along axis 0"), message
        assert "multiples of 32" in message
