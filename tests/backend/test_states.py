"""The quantization state by the names of layers: independent of what was compiled first, checked, and plain."""

from __future__ import annotations

import io
import warnings
from typing import Any, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import BrokenLinears, assert_same_bits, eager_backend
from torch import Tensor, nn

import fxquant
from fxquant import DelayedScaling, FxQuantWarning, OptionError, RecipeError
from fxquant.formats import LINEAR_OPERANDS

EAGER = {"inner": "aot_eager"}
RECIPES = [DelayedScaling(amax_history_len=4), fxquant.recipes.resolve("nvfp4")]


class Branches(nn.Module):
    """Calls of one, of the other, or of both layers are graphs of their own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor, names: str) -> Tensor:
        for name in names:
            x = getattr(self, name)(x)
        return x


def branches(recipe: Any = RECIPES[0]) -> Any:
    torch.compiler.reset()
    return fxquant.compile(Branches(), recipe, options=EAGER)


def train(run: Any, *calls: str) -> dict[str, Tensor]:
    """The output and the gradient of the input of each call."""
    results: dict[str, Tensor] = {}
    for i, names in enumerate(calls):
        factor = {"a": 100, "b": 1, "ab": 10, "ba": 5}[names]
        x = (factor * torch.randn(32, 64, generator=torch.Generator().manual_seed(len(names)))).requires_grad_()
        y = run(x, names)
        y.square().sum().backward()
        results |= {f"output {i}": y.detach(), f"gradient {i}": x.grad}
    return results


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_another_order_of_compilation_restores_each_layer(recipe: Any) -> None:
    run = branches(recipe)
    train(run, "a", "b", "a")
    saved = run.quantization_state_dict()
    expected = train(run, "b", "a")
    for before in ((), ("b",), ("a", "b")):  # nothing, a part and all of it compiled before it is loaded
        again = branches(recipe)
        train(again, *before)
        again.load_quantization_state_dict(saved)
        assert_same_bits(fxquant.state_dict(again), saved)
        assert_same_bits(train(again, "b", "a"), expected)


def test_a_layer_has_one_scale_in_all_graphs() -> None:
    run = branches()
    train(run, "a", "ab", "b", "ba")
    largest = fxquant.state_dict(run)["a.weight.amax_history"].max()
    assert largest == run.a.weight.abs().max()
    train(run, "ab")  # reads what the others have recorded
    state = fxquant.state_dict(run)
    whole = branches()
    whole.load_quantization_state_dict(state)
    assert_same_bits(train(run, "a", "ba"), train(whole, "a", "ba"))


def test_the_state_is_there_before_anything_runs() -> None:
    run = branches()
    state = fxquant.state_dict(run)
    assert list(state)[:2] == ["a.input.scale", "a.input.amax_history"] and len(state) == 12
    assert all(value == 1 for name, value in state.items() if name.endswith("scale"))
    train(run, "ab")
    saved = fxquant.state_dict(run)
    assert saved.keys() == state.keys()
    again = branches()
    again.load_quantization_state_dict(saved)
    assert_same_bits(fxquant.state_dict(again), saved)
    with pytest.raises(RecipeError, match="lacks 6 of the 6 states of this"):
        fxquant.load_state_dict(fxquant.compile(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), "delayed_scaling"), {})


def changed(state: dict[str, Tensor], name: str, value: Any) -> dict[str, Any]:
    return {**state, name: value}


def test_what_does_not_fit_is_refused_and_nothing_is_changed() -> None:
    run = branches()
    train(run, "a", "b")
    state = run.quantization_state_dict()
    loaded = {name: 2 * value for name, value in state.items()}
    wrong: list[tuple[Any, str]] = [
        (None, "is a dict of tensors, not a NoneType"),
        ({}, r"lacks 6 of the 6 states of this .*: a\.input, .*It holds nothing"),
        ({k: v for k, v in loaded.items() if k.startswith("a.")}, r"lacks 3 of the 6 .*: b\.input, b\.weight"),
        ({k: v for k, v in loaded.items() if k != "b.input.scale"}, r"has b\.input\.amax_history but not .*scale"),
        (changed(loaded, "b.weight.scale", torch.ones(3)), r"the shape \[3\] in the place of a scalar in 'b\.weight"),
        (changed(loaded, "b.weight.scale", torch.tensor(torch.nan)), r"has nan in 'b\.weight\.scale'"),
        (changed(loaded, "b.weight.scale", torch.tensor(0.0)), r"has 0\.0 in 'b\.weight\.scale'"),
        (changed(loaded, "b.weight.amax_history", torch.tensor([0, torch.nan])), r"has NaN in 'b\.weight"),
        (changed(loaded, "b.weight.scale", 1.0), "a float in the place of a tensor"),
        (changed(loaded, "b.weight.scale", torch.tensor(1)), r"torch\.int64 in 'b\.weight\.scale'"),
        ({"0.scale": torch.ones(6), "0.amax_history": torch.zeros(4, 6)}, "by the order of compilation"),
        (dict(run.state_dict()), "is no key of a quantization state.*not the model's state_dict"),
        (
            {k.replace("a.", prefix): v for prefix in ("a.", "c.0.", "a.7.") for k, v in loaded.items()},
            r"has layers that this .* has not: a\.7\.",
        ),
        ({f"{n}.{op}.random": torch.zeros(2, dtype=torch.int64) for n in "ab" for op in LINEAR_OPERANDS}, "lacks 6"),
    ]
    for saved, message in wrong:
        for load in (run.load_quantization_state_dict, lambda saved: fxquant.load_state_dict(run._orig_mod, saved)):
            with pytest.raises(RecipeError, match=message):
                load(saved)
        assert_same_bits(run.quantization_state_dict(), state)
    run.load_quantization_state_dict(loaded)
    assert_same_bits(run.quantization_state_dict(), loaded)
    stateless = branches("mxfp8")
    with pytest.raises(RecipeError, match=r"is of a\.input, .* and the recipe of this .* has no state"):
        stateless.load_quantization_state_dict(state)


def test_a_state_that_begins_anew_after_a_load_is_told() -> None:
    class Product(Branches):
        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            return nn.functional.linear(self.b(self.a(x)), weight)

    weight, x = nn.Parameter(torch.randn(64, 64)), torch.randn(32, 64)
    run = fxquant.compile(Product(), RECIPES[0], options=EAGER)
    run.load_quantization_state_dict(fxquant.state_dict(branches()))  # has nothing for the product
    with pytest.warns(FxQuantWarning, match="that was loaded has nothing for input, weight, grad_output, which begin"):
        run(x, weight)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FxQuantWarning)
        run(x, weight).sum().backward()
        again = fxquant.compile(Product(), RECIPES[0], options=EAGER)
        again.load_quantization_state_dict(run.quantization_state_dict())
        again(x, weight)


def test_blocks_with_a_tied_parameter_have_scales_of_their_own() -> None:
    class Block(nn.Module):
        def __init__(self, shared: nn.Linear) -> None:
            super().__init__()
            self.shared, self.up = shared, nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.up(self.shared(x))

    shared, x = nn.Linear(64, 64), torch.randn(32, 64)
    blocks, backend = nn.ModuleList([Block(shared) for _ in range(3)]), eager_backend(RECIPES[0])
    for block in blocks:
        block.compile(backend=backend)
    for _ in range(2):
        for i, block in enumerate(blocks):
            block((1 + 9 * i) * x).sum().backward()
    assert backend.captured == 1
    scales = [fxquant.state_dict(blocks)[f"{i}.up.input.scale"].item() for i in range(3)]
    assert len(set(scales)) == 3
    with pytest.raises(OptionError, match=r"several modules that one backend has compiled have a state shared.input"):
        backend.state_dict()


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_tools_that_save_tensors_take_it(recipe: Any, tmp_path: Any) -> None:
    run = branches(recipe)
    train(run, "a", "b")
    saved = fxquant.state_dict(run)
    torch.save(saved, buffer := io.BytesIO())
    buffer.seek(0)
    assert_same_bits(torch.load(buffer, weights_only=True), saved)
    assert len({value.untyped_storage().data_ptr() for value in saved.values()}) == len(saved), "as safetensors wants"
    state = fxquant.QuantizationState(run)
    assert isinstance(state, torch.distributed.checkpoint.stateful.Stateful)
    dcp.save({"quantization": state}, checkpoint_id=tmp_path, no_dist=True)
    cold = branches(recipe)
    dcp.load({"quantization": fxquant.QuantizationState(cold)}, checkpoint_id=tmp_path, no_dist=True)
    assert_same_bits(fxquant.state_dict(cold), saved)
    assert_same_bits(train(cold, "b", "a"), train(run, "b", "a"))


def test_blocks_behind_graph_breaks_have_full_names_by_any_spelling() -> None:
    blocks, x = nn.ModuleList([BrokenLinears(64), BrokenLinears(64)]), torch.randn(32, 64)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = blocks

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[1](8 * self.blocks[0](x))

    torch.compiler.reset()
    run = torch.compile(Model(), backend="fxquant", options={"recipe": RECIPES[0], **EAGER})
    expected = fxquant.state_dict(run)
    for _ in range(2):
        run(x).sum().backward()
    state = fxquant.state_dict(run)
    assert state.keys() == expected.keys() and len(state) == 24
    scales = [state[f"blocks.{i}.{name}.input.scale"].item() for i in range(2) for name in "ab"]
    assert len(set(scales)) == 4 and 1 not in scales
    assert {d.layer for d in fxquant.report(run).decisions} == {f"blocks.{i}.{n}" for i in "01" for n in "ab"}


class Hooked(nn.Module):
    """Has its gradient multiplied by a buffer, which Dynamo of torch 2.11 adds behind the layers before."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 32)
        self.register_buffer("factor", torch.full((1, 32), factor))

    def forward(self, x: Tensor) -> Tensor:
        y, factor = self.first(x), self.factor
        if y.requires_grad:
            y.register_hook(lambda grad: grad * factor)
        return cast(Tensor, self.last(y))


@pytest.mark.parametrize("recipe", ["nvfp4", "delayed_scaling"])
def test_states_and_probes_come_behind_what_hooks_read(recipe: str) -> None:
    grads = []
    for factor in (1.0, 4.0):
        torch.manual_seed(0)
        model = Hooked(factor)
        compiled = fxquant.compile(model, recipe, options={"inner": "aot_eager"})
        x = torch.randn(32, 32)
        compiled(x).sum().backward()
        assert model.first.bias.grad is not None
        grads.append(model.first.bias.grad)
        with fxquant.probe(compiled, every=1) as log:
            compiled(x).sum().backward()
        assert {row["layer"] for row in log.rows} == {"first", "last"}
    torch.testing.assert_close(grads[1], grads[0] * 4)
