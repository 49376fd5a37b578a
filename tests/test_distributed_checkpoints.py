"""torch.distributed.checkpoint and the quantization state: other numbers of ranks, broken files, ranks that die."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers import Block, assert_same_bits
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import fxquant
from fxquant import FxQuantWarning, RecipeError
from fxquant.compat.inside.ranks import rank

EAGER = {"inner": "aot_eager"}
DELAYED = fxquant.DelayedScaling(amax_history_len=4)
OF_RANK = fxquant.DelayedScaling(amax_history_len=4, reduce_amax=False)
RECIPES = [DELAYED, fxquant.recipes.resolve("nvfp4")]
STEPS, EVERY = 6, 2


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    processes = Ranks(4)
    yield processes
    processes.end()


class Run:
    """A model in two blocks with its optimizer, sharded where there are several ranks, and all of its state."""

    def __init__(self, recipe: Any, seed: int = 0) -> None:
        torch.compiler.reset()
        torch.manual_seed(seed)
        self.model = nn.Sequential(Block(), Block())
        if dist.is_initialized():
            for module in (*self.model, self.model):
                fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        fxquant.compile_blocks(self.model, recipe, options=EAGER)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "quantization": fxquant.QuantizationState(self.model)}

    def load(self, folder: Path) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=folder, no_dist=not dist.is_initialized())
        names = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **names)

    def step(self, x: Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(x).square().mean().backward()
        self.optimizer.step()

    def tensors(self) -> dict[str, Tensor]:
        """Whole parameters and moments, and the quantization state."""
        _, optimizer = get_state_dict(self.model, self.optimizer)
        named = dict(self.model.named_parameters())
        for name, moments in optimizer["state"].items():
            named |= {f"{name} {kind}": value for kind, value in moments.items()}
        whole = {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in named.items()}
        return {key: value.detach().clone() for key, value in whole.items()} | fxquant.state_dict(self.model)


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank())
    return (1 + step) * torch.randn(32, 64, generator=generator)


def saved(recipe: Any, folder: Path) -> dict[str, Tensor]:
    run = Run(recipe)
    for step in range(3):
        run.step(batch(step))
    dcp.save(run.state(), checkpoint_id=folder)
    return after(run)


def restored(recipe: Any, folder: Path) -> dict[str, Tensor]:
    run = Run(recipe, seed=1)
    run.load(folder)
    return after(run)


def after(run: Run) -> dict[str, Tensor]:
    """The state, and the output of one more step, whose input is that of all ranks, and its gradients."""
    tensors = run.tensors()
    x = torch.ones(32, 64)
    run.optimizer.zero_grad()
    tensors["output"] = run.model(x)
    tensors["output"].square().mean().backward()
    if not any(key.endswith(".random") for key in tensors):  # which round otherwise on other ranks
        for name, parameter in run.model.named_parameters():
            gradient = parameter.grad
            tensors[f"{name} grad"] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return {key: value.detach() for key, value in tensors.items()}


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_a_checkpoint_of_two_ranks_restores_on_one_two_and_four(
    recipe: Any, ranks: Ranks, four: Ranks, tmp_path: Path
) -> None:
    """Invariant 44."""
    expected, other = ranks.run(saved, recipe, tmp_path)
    assert_same_bits(expected, other)
    for tensors in (
        restored(recipe, tmp_path),
        *ranks.run(restored, recipe, tmp_path),
        *four.run(restored, recipe, tmp_path),
    ):
        assert_same_bits(tensors, expected)


def scales_of_ranks(folder: Path, load: bool) -> dict[str, Tensor]:
    """The state of a replica whose amaxes are of its rank alone, and the gradient of its next step."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = fxquant.compile(nn.Sequential(nn.Linear(64, 64)), OF_RANK, options=EAGER)
    state, x = {"quantization": fxquant.QuantizationState(model)}, batch(0) * (1 + 7 * rank())
    if load:
        dcp.load(state, checkpoint_id=folder)
    else:
        for step in range(3):
            ((1 + step) * model(x)).sum().backward()
        dcp.save(state, checkpoint_id=folder)
    tensors = fxquant.state_dict(model)
    model.zero_grad()
    model(x).square().sum().backward()
    return {**tensors, "gradient": next(model.parameters()).grad}


def test_what_differs_by_rank_is_saved_by_rank(ranks: Ranks, tmp_path: Path) -> None:
    expected = ranks.run(scales_of_ranks, tmp_path, False)
    assert not torch.equal(expected[0]["0.input.scale"], expected[1]["0.input.scale"])
    for tensors, of_rank in zip(ranks.run(scales_of_ranks, tmp_path, True), expected, strict=True):
        assert_same_bits(tensors, of_rank)

    alone = fxquant.compile(nn.Sequential(nn.Linear(64, 64)), OF_RANK, options=EAGER)
    before = fxquant.state_dict(alone)
    with pytest.raises(dcp.api.CheckpointException, match="Missing key in checkpoint state_dict: quantization"):
        dcp.load({"quantization": fxquant.QuantizationState(alone)}, checkpoint_id=tmp_path, no_dist=True)
    assert_same_bits(fxquant.state_dict(alone), before)
    dcp_to_torch_save(tmp_path, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)["quantization"]
    with pytest.warns(FxQuantWarning, match=r"for the ranks 0, 1, and this is rank 0 of 1: the largest"):
        fxquant.load_state_dict(alone, whole)
    state = fxquant.state_dict(alone)
    for key in state:
        smaller = torch.minimum if key.endswith("scale") else torch.maximum
        assert torch.equal(state[key], smaller(expected[0][key], expected[1][key]))
    with pytest.warns(FxQuantWarning), pytest.raises(RecipeError, match=r"has 0\.0 in '0\.input\.scale'"):
        fxquant.load_state_dict(alone, {**whole, "0.input.scale@rank1": torch.tensor(0.0)})
    assert_same_bits(fxquant.state_dict(alone), state)


def refused(recipe: Any, folder: Path) -> str:
    """The refusal of a checkpoint, which leaves the quantization state as it was."""
    run = Run(recipe, seed=1)
    run.step(batch(7))
    before = fxquant.state_dict(run.model)
    with pytest.raises(dcp.api.CheckpointException) as error:
        run.load(folder)
    assert_same_bits(fxquant.state_dict(run.model), before)
    return str(error.value)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_a_checkpoint_that_is_truncated_or_of_another_recipe_is_refused(
    recipe: Any, ranks: Ranks, tmp_path: Path
) -> None:
    ranks.run(saved, recipe, tmp_path)
    other = RECIPES[recipe is RECIPES[0]]
    for text in ranks.run(refused, other, tmp_path):
        assert "Missing key in checkpoint state_dict: quantization.0.up." in text
    path = next(tmp_path.glob("__1_*.distcp"))
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    ranks.run(refused, recipe, tmp_path)
    path.write_bytes(data)
    (tmp_path / ".metadata").unlink()
    ranks.run(refused, recipe, tmp_path)


class Dying(dcp.FileSystemWriter):
    """Writes a half of its files."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        super().write_data(plan, planner)
        for path in Path(self.path).glob(f"__{rank()}_*"):
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        die()


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def trained(recipe: Any, folder: Path, killed: str = "") -> dict[str, Tensor]:
    """Trains from the last whole checkpoint on; the last rank may die in the second half."""
    run, begin = Run(recipe), 0
    whole = [int(path.parent.name) for path in folder.glob("*/.metadata")]
    if whole:
        begin = max(whole)
        run.load(folder / str(begin))
    doomed = killed if rank() == 1 else ""
    for step in range(begin, STEPS):
        if doomed == "step" and step == EVERY + 1:
            run.model[0].register_full_backward_hook(die)
        run.step(batch(step))
        if (step + 1) % EVERY == 0:
            kind = Dying if doomed == "save" and step > EVERY else dcp.FileSystemWriter
            dcp.save(run.state(), storage_writer=kind(folder / str(step + 1)))
    return {**run.tensors(), "begin": torch.tensor(begin)}


@functools.cache
def uninterrupted(recipe: Any, ranks: Ranks, folder: Path) -> list[dict[str, Tensor]]:
    return ranks.run(trained, recipe, folder)


@pytest.mark.parametrize("killed", ["step", "save"])
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_a_rank_that_dies_resumes_to_the_bit(recipe: Any, killed: str, ranks: Ranks, tmp_path: Path) -> None:
    """Invariant 44."""
    expected = uninterrupted(recipe, ranks, tmp_path / "whole")
    Ranks().run_until_killed(trained, recipe, tmp_path / "killed", killed)
    for tensors, of_rank in zip(ranks.run(trained, recipe, tmp_path / "killed"), expected, strict=True):
        assert tensors.pop("begin") == EVERY
        assert_same_bits(tensors, {key: value for key, value in of_rank.items() if key != "begin"})
