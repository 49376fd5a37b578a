"""Stochastic rounding: eagerly, and in compiled graphs with their state."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    BrokenLinears,
    LayerInABranch,
    assert_same_bits,
    compiled,
    eager_backend,
    per_role,
    recomputable_mlp,
    recorded_story,
    stacked,
    unstacked,
)
from torch import Tensor, nn

import fxquant
from fxquant import HybridQuantizer, NVFP4Quantizer, RecipeError
from fxquant.formats import OperandSpec, QuantSpec
from fxquant.kernels.cast import ops, reference
from fxquant.state import RandomState

SR, RN = NVFP4Quantizer(stochastic_rounding=True), NVFP4Quantizer()
RECIPE = per_role(input=RN, weight=RN, grad_output=SR)
SPEC = QuantSpec(format="nvfp4", stochastic=True)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def factors(q: fxquant.QuantizedTensor) -> Tensor:
    """What the codes of the rowwise half are multiplied by, for each element."""
    return (q.rowwise.scale.float() * q.rowwise.global_amax / 2688).repeat_interleave(16, -1)


def test_the_mean_of_many_draws_is_the_value() -> None:
    """Invariant 60: the mean's error is below that of rounding to nearest, and shrinks with the number of draws."""
    x = torch.randn(64, 64, generator=seeded(0))
    nearest = RN.quantize(x).dequantize() - x
    generator, draws = seeded(1), 256
    drawn = torch.stack([SR.quantize(x, columnwise=False, generator=generator).dequantize() for _ in range(draws)])
    error = drawn.mean(0) - x
    assert error.square().mean() < 0.05 * nearest.square().mean()
    y = x.abs() / factors(RN.quantize(x))
    step = torch.where(y < 2, 0.5, torch.where(y < 4, 1.0, 2.0)) * factors(RN.quantize(x))
    # the probability is a multiple of 1/256, rounded down, and a draw's deviation at most half a step
    bound = step / 256 + 5 * step / (2 * draws**0.5)
    assert (error.abs() <= bound)[y <= 6].all()  # the largest of a block may saturate
    assert (error[y <= 6].mean()).abs() < 5 * step.mean() / (2 * (draws * x.numel()) ** 0.5) + step.mean() / 256


def test_a_draw_is_one_of_two_neighbours() -> None:
    x = torch.randn(32, 64, generator=seeded(0))
    nearest, drawn = RN.quantize(x), [SR.quantize(x, generator=seeded(i)) for i in range(64)]
    assert torch.equal(drawn[0].rowwise.scale.view(torch.uint8), nearest.rowwise.scale.view(torch.uint8))
    codes = torch.stack([q.dequantize() for q in drawn]) / factors(nearest)
    grid = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
    below, above = codes.abs().amin(0), codes.abs().amax(0)
    places = [(each.unsqueeze(-1) - grid).abs().argmin(-1) for each in (below, above)]
    assert ((places[1] - places[0]) <= 1).all()


def test_eager_draws_repeat_with_their_generator() -> None:
    x = torch.randn(32, 64)
    a, b = (SR.quantize(x, generator=seeded(3)).rowwise.data.view(torch.uint8) for _ in range(2))
    assert torch.equal(a, b)
    torch.manual_seed(0)
    first, second = (SR.quantize(x).rowwise.data.view(torch.uint8) for _ in range(2))
    torch.manual_seed(0)
    assert torch.equal(SR.quantize(x).rowwise.data.view(torch.uint8), first)
    assert not torch.equal(first, second)


def test_padding_moves_no_random_bits() -> None:
    state, x = torch.tensor([11, 4, 0]), torch.randn(24, 40)
    x[0, 0] = 8
    padded = nn.functional.pad(x, (0, 24, 0, 8))
    small, large = (reference.quantize(each, SPEC, state)[0] for each in (x, padded))
    assert torch.equal(small[:, :20], large[:24, :20])


def test_a_spec_without_state_is_refused() -> None:
    with pytest.raises(RecipeError, match="needs the seed and step"):
        ops.quantize(torch.randn(16, 32), str(SPEC), "rowwise")
    with pytest.raises(RecipeError, match="part of NVFP4 alone"):
        QuantSpec(format="mxfp8_e4m3", stochastic=True)


def test_each_direction_and_operand_has_a_stream_of_its_own() -> None:
    spec = OperandSpec(SPEC, SPEC).numbered(3)
    assert (spec.rowwise.stream, spec.columnwise.stream) == (6, 7)
    assert OperandSpec.parse(str(spec)) == spec
    assert OperandSpec(QuantSpec(format="nvfp4"), SPEC).numbered(3).rowwise.stream == 0


def gradients(net: nn.Module, run: object, steps: int = 1) -> list[dict[str, Tensor]]:
    """Those of `steps` equal steps."""
    x = torch.randn(16, 64, generator=seeded(1))
    made = []
    for _ in range(steps):
        run(x).square().sum().backward()  # type: ignore[operator]
        made.append({name: p.grad.clone() for name, p in net.named_parameters()})
        net.zero_grad()
    return made


def test_steps_differ_and_a_restored_state_replays_them() -> None:
    net, backend = recomputable_mlp(), eager_backend(RECIPE)
    run = torch.compile(net, backend=backend, fullgraph=True)
    first, second = gradients(net, run, 2)
    assert not torch.equal(first["up.weight"], second["up.weight"])
    saved = backend.state_dict()
    assert saved["up.grad_output.random"].tolist() == [0, 2]  # torch's seed, steps so far
    third = gradients(net, run)[0]
    backend.load_state_dict(saved)
    assert_same_bits(gradients(net, run)[0], third)

    other, resumed = recomputable_mlp(), eager_backend(RECIPE)
    resumed.load_state_dict(saved)
    assert_same_bits(gradients(other, torch.compile(other, backend=resumed))[0], third)


def test_the_seed_is_that_of_torch() -> None:
    made = []
    for seed in (5, 5, 6):
        net = recomputable_mlp()
        torch.manual_seed(seed)
        made += gradients(net, torch.compile(net, backend=eager_backend(RECIPE)))
    assert_same_bits(made[0], made[1])
    assert not torch.equal(made[0]["up.weight"], made[2]["up.weight"])


def test_the_backward_rounds_by_the_step_of_its_forward() -> None:
    """The reference, with the streams and the step that the state says, gives the same gradients."""
    torch.manual_seed(9)
    layer, backend = nn.Linear(64, 48, bias=False), eager_backend(RECIPE)
    run, x = torch.compile(layer, backend=backend), torch.randn(32, 64, requires_grad=True)
    dy = torch.randn(32, 48)
    for step in (1, 2, 3):
        x.grad = layer.weight.grad = None
        run(x).backward(dy)
        assert backend.state_dict()["grad_output.random"].tolist() == [9, step]
        seed = RandomState(["grad_output"], 9, torch.device("cpu")).random[0].item()
        state = torch.tensor([seed, step, 0])
        rn, spec = QuantSpec(format="nvfp4"), OperandSpec(SPEC, SPEC).numbered(0)
        row = reference.quantize(dy, spec.rowwise, state)
        column = reference.quantize(dy.mT, spec.columnwise, state)
        w, xt = reference.quantize(layer.weight.detach().mT, rn), reference.quantize(x.detach().mT, rn)
        assert torch.equal(x.grad, reference.scaled_mm(row, spec.rowwise, w, rn, None, torch.float32))
        assert torch.equal(layer.weight.grad, reference.scaled_mm(column, spec.columnwise, xt, rn, None, torch.float32))


def test_an_earlier_graph_keeps_its_step() -> None:
    """Two forwards, then their backwards."""
    net, backend = recomputable_mlp(), eager_backend(RECIPE)
    run = torch.compile(net, backend=backend)
    expected = gradients(net, run, 2)
    backend.load_state_dict({key: torch.tensor([0, 0]) for key in backend.state_dict()})
    x = torch.randn(16, 64, generator=seeded(1))
    outputs = [run(x) for _ in range(2)]
    for i in (1, 0):
        outputs[i].square().sum().backward()
        assert_same_bits({name: p.grad for name, p in net.named_parameters()}, expected[i])
        net.zero_grad()


@pytest.mark.parametrize("everything", [False, True], ids=["gradients", "every operand"])
def test_recomputation_rounds_as_the_forward_did(everything: bool) -> None:
    """Invariant 45, with the operands of the forward rounded at random too."""
    recipe = per_role(input=SR, weight=SR, grad_output=SR) if everything else RECIPE
    results = []
    for recompute in (False, True):
        net = recomputable_mlp(recompute)
        results.append(gradients(net, torch.compile(net, backend=eager_backend(recipe), fullgraph=True), 3))
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)


def test_without_gradients_the_step_stays() -> None:
    net, backend = recomputable_mlp(), eager_backend(per_role(input=SR, weight=RN, grad_output=SR))
    run, x = torch.compile(net, backend=backend), torch.randn(16, 64)
    run(x)
    before = backend.state_dict()
    with torch.no_grad():
        assert torch.equal(run(x), run(x))
    assert_same_bits(before, backend.state_dict())


def test_graphs_of_one_model_have_different_seeds() -> None:
    backend = eager_backend(RECIPE)
    torch.compile(BrokenLinears(), backend=backend)(torch.randn(16, 32)).sum().backward()
    names = ["a.grad_output", "b.grad_output"]
    state = backend.state_dict()
    assert {name: value.tolist() for name, value in state.items()} == {
        f"{name}.random": [torch.initial_seed(), 1] for name in names
    }
    first, second = (RandomState([name], 0, torch.device("cpu")).random[0] for name in names)
    assert first != second


def test_shapes_of_one_model_share_its_state() -> None:
    net, backend = recomputable_mlp(), eager_backend(RECIPE)
    run = torch.compile(net, backend=backend, dynamic=False)
    for rows in (16, 32, 16):
        run(torch.randn(rows, 64)).sum().backward()
    assert (stacked(backend.state_dict())["random"][1] == 3).all()


def test_delayed_scaling_beside_it() -> None:
    delayed = fxquant.DelayedScalingRequest(amax_history_len=4)
    recipe = fxquant.CustomRecipe(
        qfactory=lambda role: delayed if role.name == "up" else RECIPE.qfactory(role)  # one kind a layer
    )
    results = []
    for recompute in (False, True):
        net, backend = recomputable_mlp(recompute), eager_backend(recipe)
        results += gradients(net, torch.compile(net, backend=backend, fullgraph=True), 2)[1:]
        state = backend.state_dict()
        assert {key.rpartition(".")[2] for key in state if key.startswith("up.")} == {"scale", "amax_history"}
        assert [key for key in state if not key.startswith("up.")] == ["down.grad_output.random"]
        again = eager_backend(recipe)
        again.load_state_dict(state)
        gradients(net, torch.compile(net, backend=again))
        assert again.state_dict()["down.grad_output.random"][1] == 3
    assert_same_bits(*results)


def test_a_state_of_another_kind_is_refused() -> None:
    backend = eager_backend(RECIPE)
    torch.compile(nn.Linear(32, 32), backend=backend)(torch.randn(16, 32)).sum().backward()
    with pytest.raises(RecipeError, match=r"lacks 1 of the 1 states of .*: grad_output. It holds input: scale"):
        backend.load_state_dict(unstacked(["input"], scale=torch.ones(1), amax_history=torch.ones(4, 1)))
    with pytest.raises(RecipeError, match=r"'weight' is no key of a quantization state.*not the model's state_dict"):
        backend.load_state_dict(nn.Linear(32, 32).state_dict())


def test_a_run_goes_on_under_the_recipe_it_changed_to() -> None:
    net, x = nn.Linear(32, 32), torch.randn(16, 32)
    first, second = (
        fxquant.compile(net, name, options={"inner": "aot_eager"}) for name in ("nvfp4", "delayed_scaling")
    )
    first(x).sum().backward()
    first.set_recipe("delayed_scaling")
    first(x).sum().backward()
    saved = first.quantization_state_dict()
    second.load_quantization_state_dict(saved)
    with torch.no_grad():
        second(x)
    assert_same_bits(second.quantization_state_dict(), saved)


def test_regions_without_state_are_skipped_with_a_reason() -> None:
    report = fxquant.explain(LayerInABranch(), RECIPE, torch.randn(4, 32))
    assert {d.layer: d.skip_reason for d in report.decisions} == {"a": None, "b": fxquant.SkipReason.STATE}
    with torch.no_grad():
        report = fxquant.explain(LayerInABranch(), RECIPE, torch.randn(4, 32))
    assert {d.skip_reason for d in report.decisions} == {None}, "without gradients nothing is rounded at random"


def test_columns_from_rows_follow_the_row_that_was_drawn() -> None:
    """The column half quantizes what the row half, with its random bits, stands for."""
    both = HybridQuantizer(SR, NVFP4Quantizer(with_2d_quantization=True), "rowwise_dequantized")
    q = both.quantize(torch.randn(32, 64), generator=seeded(2))
    again = NVFP4Quantizer(with_2d_quantization=True).quantize(q.dequantize("rowwise"), rowwise=False)
    assert torch.equal(q.columnwise.data.view(torch.uint8), again.columnwise.data.view(torch.uint8))


def test_both_directions_of_a_gradient_are_one_node_that_all_layers_share() -> None:
    """Its spec names no layer: the operand's number is in its state [3]."""
    model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64))
    story = recorded_story(model, "nvfp4", torch.randn(32, 64, requires_grad=True))
    for columns in (64, 96):
        specs = "nvfp4(stochastic,nonfinite), nvfp4(rht,stochastic,stream=1,nonfinite)"
        node = f"hybrid_quantize([32, {columns}], {specs}, [3], [3])"
        assert story.count(node) == 1


@pytest.mark.sweep
def test_inductor_rounds_with_the_same_bits() -> None:
    results = []
    for backend in (eager_backend(RECIPE), fxquant.Backend(RECIPE)):
        torch.manual_seed(4)
        layer = nn.Linear(64, 48, bias=False)
        run = torch.compile(layer, backend=backend)
        results += gradients(layer, run, 2)
    assert_same_bits(results[0], results[2])
    assert_same_bits(results[1], results[3])


def test_one_compiled_function_serves_all_shapes() -> None:
    layer = nn.Linear(64, 48)
    run = compiled(layer, RECIPE, dynamic=True)
    for rows in (32, 48, 33):
        run(torch.randn(rows, 64)).sum().backward()
    assert layer.weight.grad.isfinite().all()
