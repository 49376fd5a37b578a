"""Quantized weights in checkpoints: masters and payloads, through every way of saving, to the bit."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import NAMES, assert_same_bits, eager_backend
from torch import Tensor, nn

import fxquant
from fxquant import RecipeError

State = dict[str, Tensor]


def model(*, masters: bool | None = None, recipe: str = "mxfp8", seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    plain = nn.Sequential(nn.Linear(96, 128), nn.ReLU(), nn.Linear(128, 64, bias=False))
    return fxquant.quantize_parameters(plain, recipe, masters=masters)


def by_torch(state: State, folder: Path, like: State) -> State:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def by_safetensors(state: State, folder: Path, like: State) -> State:
    torch_files = pytest.importorskip("safetensors.torch")
    torch_files.save_file(state, folder / "model.safetensors")
    return torch_files.load_file(folder / "model.safetensors")


def distributed(state: State, folder: Path, like: State) -> State:
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    dcp.load(like, checkpoint_id=folder, no_dist=True)
    return like


WAYS = pytest.mark.parametrize("way", [by_torch, by_safetensors, distributed])
Way = Callable[[State, Path, State], State]


def bits(state: State) -> State:
    return {key: value.contiguous().view(torch.uint8) for key, value in state.items()}


@WAYS
def test_masters_come_back_and_so_does_what_is_stored(way: Way, tmp_path: Path) -> None:
    saved, other = model(), model(seed=1)
    state = saved.state_dict()
    assert list(state) == ["0.weight", "0.bias", "2.weight"] and all(type(v) is Tensor for v in state.values())
    other.load_state_dict(way(state, tmp_path, other.state_dict()))
    assert_same_bits(other.state_dict(), saved.state_dict())
    assert_same_bits(bits(fxquant.payload_state_dict(other)), bits(fxquant.payload_state_dict(saved)))


@WAYS
@pytest.mark.parametrize("recipe", NAMES)
def test_payloads_come_back_byte_for_byte(way: Way, recipe: str, tmp_path: Path, shared: dict[str, Any]) -> None:
    """Invariant 44: the payload is preserved exactly."""
    if recipe not in shared:
        torch.compiler.reset()
        shared.clear()
        both = model(recipe=recipe), model(recipe=recipe, masters=False)
        shared[recipe] = both, [torch.compile(one, backend=eager_backend(recipe)) for one in both]
    (saved, other), runs = shared[recipe]
    other.load_state_dict(fxquant.payload_state_dict(model(recipe=recipe, masters=False, seed=1)))
    state = fxquant.payload_state_dict(saved)
    assert all(type(value) is Tensor for value in state.values())
    assert "0.weight.rowwise.data" in state and "0.weight.rowwise.scale" in state and "0.weight" not in state
    other.load_state_dict(way(state, tmp_path, fxquant.payload_state_dict(other)))
    assert_same_bits(bits(fxquant.payload_state_dict(other)), bits(state))
    x = torch.randn(32, 96)
    assert torch.equal(*(run(x) for run in runs))


@pytest.mark.parametrize("recipe", NAMES)
def test_masters_that_load_payloads_get_their_values_and_keep_the_bytes(recipe: str) -> None:
    """Also the bytes of columns, and of a largest element that the values of the rows have lost."""
    saved, other = model(recipe=recipe), model(recipe=recipe, seed=1)
    with torch.no_grad():
        for layer in (saved[0], saved[2]):
            layer.weight.mul_(torch.rand_like(layer.weight).add(0.01) ** 3)
    state = {key: value.clone() for key, value in fxquant.payload_state_dict(saved).items()}
    other.load_state_dict(state)
    assert_same_bits(bits(fxquant.payload_state_dict(other)), bits(state))
    frozen = model(recipe=recipe, masters=False)
    frozen.load_state_dict(state)
    assert torch.equal(other[0].weight.master, frozen[0].weight + 0)
    with torch.no_grad():
        other[0].weight.neg_()  # and a write is seen
    assert not torch.equal(
        bits(fxquant.payload_state_dict(other))["0.weight.rowwise.data"], bits(state)["0.weight.rowwise.data"]
    )


def test_a_plain_model_and_a_quantized_one_load_each_other() -> None:
    plain = nn.Sequential(nn.Linear(96, 128), nn.ReLU(), nn.Linear(128, 64, bias=False))
    plain.load_state_dict(model().state_dict())
    assert type(plain[0].weight) is nn.Parameter and torch.equal(plain[0].weight, model()[0].weight.master)
    other = model(seed=1)
    other.load_state_dict(plain.state_dict())
    assert_same_bits(bits(fxquant.payload_state_dict(other)), bits(fxquant.payload_state_dict(model())))
    frozen = model(masters=False)
    assert torch.equal(frozen.state_dict()["0.weight"], frozen[0].weight + 0), "what the payload stands for"


@pytest.mark.parametrize("masters", [None, False])
@pytest.mark.parametrize("form", [nn.Module.state_dict, fxquant.payload_state_dict])
def test_assigned_weights_are_quantized_too(form: Callable[[nn.Module], State], masters: bool | None) -> None:
    with torch.device("meta"):
        other = model(masters=masters)
    assert other[0].weight.is_meta
    saved = model()
    other.load_state_dict({k: v.clone() for k, v in form(saved).items()}, assign=True)
    assert_same_bits(bits(fxquant.payload_state_dict(other)), bits(fxquant.payload_state_dict(saved)))
    assert (other[0].weight.master is None) == (masters is False)
    assert other[0].weight.requires_grad == (masters is None)
    torch.compiler.reset()
    assert torch.compile(other, backend=eager_backend("mxfp8"))(torch.randn(32, 96)).shape == (32, 64)


def test_payloads_of_another_format_are_refused() -> None:
    text = r"^Recipe mismatch for 0\.weight: stored as nvfp4_2d, recipe wants mxfp8_e4m3"
    with pytest.raises(RecipeError, match=text):
        model().load_state_dict(fxquant.payload_state_dict(model(recipe="nvfp4")))


def test_missing_and_unknown_keys_are_told_as_ever() -> None:
    state = fxquant.payload_state_dict(model())
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "2.bias"'):
        model().load_state_dict({**state, "2.bias": torch.zeros(64)})
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "0.weight"'):
        model().load_state_dict({key: value for key, value in state.items() if not key.startswith("0.weight")})


def test_a_whole_model_is_pickled_with_its_weights() -> None:
    saved, buffer = model(), io.BytesIO()
    torch.save(saved, buffer)
    buffer.seek(0)
    other = torch.load(buffer, weights_only=False)
    assert_same_bits(bits(fxquant.payload_state_dict(other)), bits(fxquant.payload_state_dict(saved)))
    assert_same_bits(other.state_dict(), saved.state_dict())
    assert other[0].weight.layer.name == "0" and other[0].weight.requires_grad


def test_an_optimizer_goes_on_from_masters_as_if_it_had_never_stopped() -> None:
    """Invariant 44."""

    def steps(run: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
        torch.compiler.reset()
        compiled = torch.compile(run, backend=eager_backend("mxfp8"))
        for number in numbers:
            x = torch.randn(32, 96, generator=torch.Generator().manual_seed(number))
            compiled(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    whole, first, second = model(), model(), model(seed=1)
    optimizers = [torch.optim.AdamW(run.parameters(), 1e-2) for run in (whole, first, second)]
    steps(whole, optimizers[0], range(4))
    steps(first, optimizers[1], range(2))
    second.load_state_dict(first.state_dict())
    optimizers[2].load_state_dict(optimizers[1].state_dict())
    steps(second, optimizers[2], range(2, 4))
    assert_same_bits(second.state_dict(), whole.state_dict())


def test_a_model_without_quantized_weights_is_told() -> None:
    plain = nn.Sequential(nn.Linear(32, 32))
    text = "no weight of Sequential is quantized: fxquant.quantize_par"
    with pytest.warns(fxquant.FxQuantWarning, match=text) as told:
        assert fxquant.payload_state_dict(plain).keys() == plain.state_dict().keys()
    with pytest.warns(fxquant.FxQuantWarning, match="prepare_fsdp has prepared no weight of Sequential") as also:
        fxquant.precompute_scales(plain)
    assert {warning.filename for warning in (*told, *also)} == {__file__}
