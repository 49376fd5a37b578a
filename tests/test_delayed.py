"""Delayed scaling: the update against its goldens, and the state of a compiled model over several steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import golden
import pytest
import torch
from helpers import LayerInABranch, assert_same_bits, eager_backend, recomputable_mlp, stacked, unstacked
from torch import Tensor, fx, nn

import fxquant
from fxquant import CustomRecipe, DelayedScaling, DelayedScalingRequest, IdentityQuantizer, MXFP8Quantizer, RecipeError
from fxquant.formats import LINEAR_OPERANDS, QuantSpec
from fxquant.kernels.cast.reference import quantize
from fxquant.kernels.state import reference as delayed

GOLDEN = golden.load("delayed")
golden.taken("delayed", ".*")
SEQUENCES = sorted({key.rsplit("/", 1)[0] for key in GOLDEN if key.startswith("fused")})


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, 64, generator=generator) for _ in range(count)]


def train(run: object, steps: list[Tensor]) -> None:
    for x in steps:
        run(x).square().sum().backward()  # type: ignore[operator]


@pytest.mark.parametrize("sequence", SEQUENCES)
def test_update_is_golden(sequence: str) -> None:
    """Invariants 19 and 20."""
    name = sequence.split("/")[-1]
    settings = {
        "margin": float(name.split("margin")[1]),
        "algorithm": "most_recent" if "most_recent" in name else "max",
    }
    fp8_max = torch.tensor([448.0 if "e4m3" in name else 57344.0], device=golden.DEVICE)
    scales, histories = GOLDEN[f"{sequence}/scale"], GOLDEN[f"{sequence}/history"]
    reduced = GOLDEN.get(f"{sequence}/buffer")
    for step, amax in enumerate(GOLDEN[f"{sequence}/amax"]):
        last = amax if reduced is None or reduced[step] == 0 else reduced[step]
        history = histories[step].reshape(-1, 1)
        scale, history = delayed.update(scales[step].reshape(1), history, last.reshape(1), fp8_max, **settings)
        assert torch.equal(scale[0], scales[step + 1])
        assert torch.equal(history[:, 0].nan_to_num(-1), histories[step + 1].nan_to_num(-1))


@pytest.mark.parametrize("key", sorted({k.rsplit("/", 1)[0] for k in GOLDEN if k.startswith("quantize/")}))
def test_quantize_by_a_given_scale_is_golden(key: str) -> None:
    _, source, setting = key.split("/")
    spec = QuantSpec(format=f"per_tensor_{setting.split('_')[0]}", slot=0)
    x = golden.load("inputs")[source]
    data, scale_inv = quantize(x, spec, GOLDEN[f"{key}/scale"].reshape(1))
    assert torch.equal(data[:, : x.shape[1]].view(torch.uint8), GOLDEN[f"{key}/payload"])
    assert torch.equal(scale_inv, GOLDEN[f"{key}/scale_inv"].reshape(1))


def test_history_and_scales_follow_the_steps() -> None:
    """Invariant 18: the scales of step t come from the amaxes up to t - 1."""
    layer = nn.Linear(64, 32, bias=False)
    backend = eager_backend(DelayedScaling(amax_history_len=3))
    run = torch.compile(layer, backend=backend)
    steps = batches(5)
    for t, x in enumerate(steps):
        run(x.requires_grad_()).sum().backward()
        history = stacked(backend.state_dict())["amax_history"]
        seen = [s.detach().abs().amax() for s in steps[: t + 1]]
        assert history[0, 0] == seen[-1]
        assert history[-1, 0] == (seen[-2] if t else 0)
        assert history[0, 2] == 1  # the gradient of a sum
    # at the last forward the window held the amaxes of the three steps before it
    assert stacked(backend.state_dict())["scale"][0] == 448 / torch.stack(seen[1:4]).amax()


@pytest.mark.parametrize("algorithm", ["max", "most_recent", lambda history: history.amax(0)])
def test_a_step_with_an_infinite_gradient_leaves_the_scale_alone(algorithm: object) -> None:
    """As `GradScaler` leaves the weights alone: the steps behind it have the scale that their gradients ask for."""
    layer, (x, *_) = nn.Linear(64, 32), batches(1)
    backend = eager_backend(DelayedScaling(amax_history_len=8, amax_compute_algo=algorithm))
    run = torch.compile(layer, backend=backend)
    scales = []
    for factor in (1.0, torch.inf, 128.0, 1.0):
        (factor * run(x)).sum().backward()
        state = backend.state_dict()
        assert all(value.isfinite().all() for value in state.values())
        scales.append(state["grad_output.scale"].item())
    assert scales == [1.0, 57344.0, 57344.0, 57344.0 / 128]


def test_infinities_of_a_saved_history_do_not_count() -> None:
    backend, (x, *_) = eager_backend(DelayedScaling(amax_history_len=4)), batches(1)
    history = torch.full((4, 3), torch.inf)
    history[3] = 7.0
    backend.load_state_dict(unstacked(LINEAR_OPERANDS, scale=torch.full((3,), 2.0), amax_history=history))
    run = torch.compile(nn.Linear(64, 32), backend=backend)
    run(x)
    run(x)
    assert stacked(backend.state_dict())["scale"][0] == 448 / 7.0


def test_recomputation_uses_the_scales_of_the_forward() -> None:
    """Invariant 45, for delayed scaling."""
    results = []
    for recompute in (False, True):
        net, backend = recomputable_mlp(recompute), eager_backend(DelayedScaling(amax_history_len=4))
        train(torch.compile(net, backend=backend), batches(3))
        results.append({name: p.grad for name, p in net.named_parameters()} | backend.state_dict())
    assert_same_bits(*results)


def test_without_gradients_the_state_is_read_only() -> None:
    net, backend = recomputable_mlp(), eager_backend(DelayedScaling(amax_history_len=4))
    run = torch.compile(net, backend=backend)
    train(run, batches(2))
    before = backend.state_dict()
    with torch.no_grad():
        run(100 * batches(1)[0])
    assert_same_bits(before, backend.state_dict())


def test_resumed_training_equals_uninterrupted_training() -> None:
    """Invariant 44, for the state: plain tensors, restored into a model that is not compiled yet."""
    steps = batches(6)
    whole, backend = recomputable_mlp(), eager_backend(DelayedScaling(amax_history_len=4))
    run = torch.compile(whole, backend=backend)
    train(run, steps[:3])
    saved, grads = backend.state_dict(), [p.grad.clone() for p in whole.parameters()]
    assert all(type(t) is Tensor for t in saved.values())
    train(run, steps[3:])

    resumed, second = recomputable_mlp(), eager_backend(DelayedScaling(amax_history_len=4))
    second.load_state_dict(saved)
    for p, grad in zip(resumed.parameters(), grads, strict=True):
        p.grad = grad
    train(torch.compile(resumed, backend=second), steps[3:])
    assert_same_bits(backend.state_dict(), second.state_dict())
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_state_is_sized_to_the_requests() -> None:
    """Invariant 16."""

    def factory(role: fxquant.QuantizerRole) -> object:
        if role.name == "up":
            return DelayedScalingRequest(amax_history_len=2)
        return MXFP8Quantizer()

    backend = eager_backend(CustomRecipe(qfactory=factory))
    train(torch.compile(recomputable_mlp(), backend=backend), batches(1))
    assert {key: tuple(t.shape) for key, t in backend.state_dict().items()} == {
        f"up.{operand}.{name}": shape
        for operand in LINEAR_OPERANDS
        for name, shape in (("scale", ()), ("amax_history", (2,)))
    }


def test_requests_that_disagree_are_refused() -> None:
    """Invariant 17."""

    def factory(role: fxquant.QuantizerRole) -> object:
        return DelayedScalingRequest(margin=1 if role.name == "down" else 0)

    with pytest.raises(RecipeError, match=r"layer 'down', input: margin=1 .* differs from 0"):
        fxquant.explain(recomputable_mlp(), CustomRecipe(qfactory=factory), batches(1)[0])


def test_callable_algorithms_are_traced() -> None:
    recipe = DelayedScaling(
        amax_history_len=4,
        amax_compute_algo=lambda history: history.amax(0) * 2,
        scaling_factor_compute_algo=lambda amax, scale, fp8_max, recipe: torch.where(amax > 0, fp8_max / amax, scale),
    )
    backend = eager_backend(recipe)
    run, steps = torch.compile(nn.Linear(64, 32), backend=backend), batches(2)
    train(run, steps)
    assert stacked(backend.state_dict())["scale"][0] == 448 / (2 * steps[0].abs().amax())


def test_regions_without_state_are_skipped_with_a_reason() -> None:
    report = fxquant.explain(LayerInABranch(), "delayed_scaling", torch.randn(4, 32))
    reasons = {d.skip_reason for d in report.decisions if d.quantizer is None}
    assert reasons == {fxquant.SkipReason.STATE}


def test_attention_like_identity_needs_no_state() -> None:
    backend = eager_backend(CustomRecipe(qfactory=lambda role: IdentityQuantizer()))
    train(torch.compile(recomputable_mlp(), backend=backend), batches(1))
    assert backend.state_dict() == {}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("order", ["sum", "first", "last"])
def test_forwards_before_their_backwards(order: str, recompute: bool) -> None:
    """Two losses of one model in a step: all gradients since the last forward count, whichever comes first."""
    net, backend = recomputable_mlp(recompute), eager_backend(DelayedScaling(amax_history_len=4))
    run = torch.compile(net, backend=backend)
    x, y = batches(2)
    for _ in range(2):
        losses = [run(x).sum(), 8 * run(y).sum()]
        for loss in {"sum": [losses[0] + losses[1]], "first": losses, "last": losses[::-1]}[order]:
            loss.backward()
        assert stacked(backend.state_dict())["amax_history"][0, 5] == 8  # of the gradient of `down`
    losses = [run(x).sum(), run(y).sum(), run(x).sum()]
    assert stacked(backend.state_dict())["scale"][5] == 57344 / 8
    losses[0].backward()
    assert stacked(backend.state_dict())["amax_history"][0, 5] == 1, "a late gradient counts for the next step"
    run(x)
    assert stacked(backend.state_dict())["amax_history"][-1, 5] == 1


def test_a_retained_graph_goes_backward_again() -> None:
    """Two losses over one forward, or gradients asked for one by one: as often as it is wanted."""
    net, backend = recomputable_mlp(), eager_backend(DelayedScaling(amax_history_len=4))
    run, (x, _) = torch.compile(net, backend=backend), batches(2)
    y = run(x)
    y.sum().backward(retain_graph=True)
    first = [p.grad.clone() for p in net.parameters()]
    (8 * y).sum().backward(retain_graph=True)
    assert stacked(backend.state_dict())["amax_history"][0, 5] == 8
    net.zero_grad()
    (again,) = torch.autograd.grad(y.sum(), [net.up.weight])
    assert torch.equal(again, first[0])


def test_compiled_autograd_advances_the_same_state() -> None:
    states = []
    for captured in (False, True):
        torch.compiler.reset()
        net, backend = recomputable_mlp(), eager_backend(DelayedScaling(amax_history_len=4))
        run = torch.compile(lambda x, net=net: net(x).sum().backward(), backend=backend)
        with torch._dynamo.config.patch(compiled_autograd=captured):
            for x in batches(2):
                run(x)
        states.append(backend.state_dict() | {name: p.grad for name, p in net.named_parameters()})
    assert_same_bits(*states)


def test_graphs_of_the_backend_by_name_share_their_state() -> None:
    """Evaluation and other shapes are graphs of their own, which would start with scales of one."""
    nets = [recomputable_mlp(), nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64))]
    for net in nets:
        for p in net.parameters():
            p.data.mul_(1e-3 if p.ndim > 1 else 0)
    options = {"recipe": "delayed_scaling", "inner": "aot_eager"}
    runs = [torch.compile(net, backend="fxquant", options=dict(options)) for net in nets]
    for run in runs:
        train(run, batches(2))
    x = batches(1)[0]
    for net, run in zip(nets, runs, strict=True):
        with torch.no_grad():
            assert (run(x) - net(x)).norm() < 0.1 * net(x).norm()
        assert (run(x[:7]) - net(x[:7])).norm() < 0.1 * net(x[:7]).norm()


def test_a_cuda_graph_may_write_the_state() -> None:
    """Its tensors are known to lie at one address in every call."""
    seen: list[set[str]] = []

    class Looking(fxquant.Backend):
        def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            nodes = gm.graph.find_nodes(op="placeholder")
            seen.append(
                {node.name for node in nodes if "_dynamo_static_input_type" in node.meta.get("tensor_dict", {})}
            )
            return super().compile(gm, example_inputs)

    model = nn.Linear(64, 32)
    torch.compile(model, backend=Looking("delayed_scaling", inner="aot_eager"))(torch.randn(16, 64))
    names = ("scale", "history", "forward_amax", "backward_amax", "step", "latest_step", "fp8_max")
    assert seen[0] >= {f"fxquant_{name}" for name in names}
