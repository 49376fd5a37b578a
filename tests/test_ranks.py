"""Two ranks of one run: whose amaxes count, who waits for whom, and which random bits are drawn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers import assert_same_bits, eager_backend
from ranks import Ranks
from torch import Tensor, nn

import fxquant

DELAYED = fxquant.DelayedScaling(amax_history_len=4)


def layer_and_input() -> tuple[nn.Module, Tensor]:
    """The same layer on both ranks, and an input that is larger on the second."""
    layer = nn.Linear(64, 64)
    return layer, torch.randn(32, 64) * (1 + 7 * dist.get_rank())


def scales(reduce_amax: bool, group: Any) -> Tensor:
    layer, x = layer_and_input()
    backend = eager_backend(fxquant.DelayedScaling(amax_history_len=4, reduce_amax=reduce_amax), amax_group=group)
    run = torch.compile(layer, backend=backend)
    for _ in range(3):
        run(x).sum().backward()
    return torch.cat([tensor.flatten() for key, tensor in backend.state_dict().items() if key.endswith("scale")])


def test_amaxes_are_those_of_all_ranks_unless_a_recipe_or_a_group_says_otherwise(ranks: Ranks) -> None:
    default, local = (ranks.run(scales, reduce_amax, None) for reduce_amax in (True, False))
    assert torch.equal(*default) and torch.equal(default[0], torch.stack(local).amin(0))
    assert not torch.equal(*local)
    assert torch.equal(ranks.run(scales, True, "world")[0], default[0])


def evaluated_alone() -> list[Tensor]:
    """The outputs of forwards without gradients between two steps; the first rank runs one that the other does not."""
    layer, x = layer_and_input()
    run = torch.compile(layer, backend=eager_backend(DELAYED))
    same, outputs = torch.ones(32, 64), []
    for _ in range(2):
        run(x).sum().backward()
        with torch.no_grad():
            outputs.append(run(same))
        if dist.get_rank() == 0:
            with torch.inference_mode():
                run(x)
    return outputs


def test_evaluation_waits_for_no_rank_and_has_the_scales_of_all(ranks: Ranks) -> None:
    first, second = ranks.run(evaluated_alone)
    assert all(map(torch.equal, first, second))


def random_state(resumed: dict[str, Tensor] | None) -> tuple[Tensor, dict[str, Tensor]]:
    """The gradient of a step under stochastic rounding, with one input on both ranks, and the state behind it."""
    layer, backend = nn.Linear(64, 64), eager_backend("nvfp4")
    x = torch.randn(32, 64)
    if resumed is not None:
        backend.load_state_dict(resumed)
    run = torch.compile(layer, backend=backend)
    (run(x) * x).sum().backward()
    gradient = layer.weight.grad.clone()
    if resumed is None:
        layer.weight.grad = None
        (run(x) * x).sum().backward()
    return (layer.weight.grad if resumed is None else gradient), backend.state_dict()


def test_random_bits_differ_between_ranks_and_repeat_in_a_restart(ranks: Ranks) -> None:
    (first, state), (second, other) = ranks.run(random_state, None)
    assert not torch.equal(first, second)
    assert_same_bits(state, other)  # what one rank saves is the state of all
    again = [gradient for gradient, _ in ranks.run(random_state, None)]
    assert torch.equal(first, again[0]) and torch.equal(second, again[1])
    for tensor in state.values():  # a step before
        tensor[1] -= 1
    resumed = [gradient for gradient, _ in ranks.run(random_state, state)]
    assert torch.equal(first, resumed[0]) and torch.equal(second, resumed[1])


def checkpointed(recipe: Any, folder: str, phase: str) -> list[Tensor]:
    """The gradient of a step behind a distributed checkpoint, saved, or loaded before or after a first step."""
    torch.compiler.reset()
    layer, x = layer_and_input()
    run = fxquant.compile(nn.Sequential(layer), recipe, options={"inner": "aot_eager"})
    state = {"quantization": fxquant.QuantizationState(run)}
    for step in range({"saved": 3, "cold": 0, "warm": 1}[phase]):
        ((step + 1) * run(x * (step + 1))).sum().backward()
    if phase == "saved":
        dcp.save(state, checkpoint_id=folder)
    else:
        dcp.load(state, checkpoint_id=folder)
    layer.weight.grad = None
    run(x).square().sum().backward()
    return [layer.weight.grad, *fxquant.state_dict(run).values()]


@pytest.mark.parametrize("recipe", [DELAYED, "nvfp4"], ids=str)
def test_a_distributed_checkpoint_restores_every_rank(recipe: Any, ranks: Ranks, tmp_path: Any) -> None:
    expected = ranks.run(checkpointed, recipe, str(tmp_path), "saved")
    for phase in ("cold", "warm"):
        for rank, restored in enumerate(ranks.run(checkpointed, recipe, str(tmp_path), phase)):
            assert all(map(torch.equal, restored, expected[rank])), (phase, rank)


def measured_alone() -> int:
    if dist.get_rank() == 1:
        return 0
    layer, x = layer_and_input()
    return len(fxquant.measure(layer, DELAYED, x).losses)


def test_a_rank_measures_alone(ranks: Ranks) -> None:
    assert ranks.run(measured_alone)[0] > 0
