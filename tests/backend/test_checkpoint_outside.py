"""Activation checkpoints around compiled models: run again with the state of the forward, which goes on as without."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_same_bits, eager_backend, per_role, recomputable_mlp
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxquant
from fxquant import Backend, DelayedScaling, FxQuantError, NVFP4Quantizer, Recipe

Run = Callable[..., Tensor]
Around = Callable[[Run], Run]
"""Makes a checkpointed function of one."""

ROUNDED = NVFP4Quantizer(stochastic_rounding=True)
RECIPES = {
    "delayed": DelayedScaling(amax_history_len=4),
    "own algorithm": DelayedScaling(amax_history_len=3, amax_compute_algo=lambda history: history.amax(0) * 2),
    "rounded": per_role(input=ROUNDED, weight=ROUNDED, grad_output=ROUNDED),
}
STATEFUL = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def kept(run: Run) -> Run:
    return run


def checkpointed(run: Run, **kwargs: Any) -> Run:
    return lambda *args: checkpoint(run, *args, **{"use_reentrant": False, **kwargs})


def selective(run: Run) -> Run:
    """With modes of dispatch, which see what runs again."""
    policy = torch.utils.checkpoint.create_selective_checkpoint_contexts
    return checkpointed(run, context_fn=lambda: policy([torch.ops.aten.mm.default]))


def moved(run: Run) -> Run:
    """With other functions that pack saved tensors inside it."""

    def inside(x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: (saved,), lambda packed: packed[0]):
            return run(x.sin())

    return checkpointed(inside)


def blocks(small: bool = False) -> list[nn.Sequential]:
    torch.manual_seed(0)
    if small:
        return [nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(2)]
    return [nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32)) for _ in range(2)]


def compiled_blocks(backend: Backend) -> tuple[list[nn.Sequential], list[Run]]:
    """For Inductor, which takes long over each layer, they have one."""
    torch.compiler.reset()
    made = blocks(small=backend.options.inner == "inductor")
    return made, [torch.compile(block, backend=backend, dynamic=False) for block in made]


def batches(count: int) -> list[Tensor]:
    """Inputs that grow, so that each step has scales of its own."""
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(16, 32, generator=generator) * 3**i).requires_grad_() for i in range(count)]


def story(recipe: Recipe, around: Around, backend: Backend | None = None) -> dict[str, Tensor]:
    """Returns the `steps` of blocks that are compiled in the first of them."""
    return steps(*compiled_blocks(backend or eager_backend(recipe)), around)


def steps(made: list[nn.Sequential], runs: list[Run], around: Around) -> dict[str, Tensor]:
    """Outputs, gradients and states of two steps; all forwards of a step come before its backwards."""
    result = {}
    first, second = (around(run) for run in runs)
    inputs = batches(4)
    for step in range(2):
        outputs = [second(first(x)) for x in inputs[2 * step : 2 * step + 2]]
        for i, output in enumerate(outputs):
            output.square().sum().backward()
            result[f"output {step} {i}"] = output.detach()
        for i, parameter in enumerate(p for block in made for p in block.parameters()):
            result[f"gradient {step} {i}"], parameter.grad = parameter.grad, None
    state = fxquant.state_dict(nn.ModuleList(made))
    return {**result, **{f"input {i}": x.grad for i, x in enumerate(inputs)}, **state}


@functools.cache
def plain(recipe: str, around: Around, inner: str = "aot_eager") -> dict[str, Tensor]:
    """Returns the story of a recipe of `RECIPES` without a checkpoint, which many are compared with."""
    return story(RECIPES[recipe], around, Backend(RECIPES[recipe], inner=inner))


class Compiled:
    """Blocks under a recipe that are compiled once, and begin every story in the state behind their first step."""

    def __init__(self, recipe: Recipe) -> None:
        self.blocks, self.runs = compiled_blocks(eager_backend(recipe))
        steps(self.blocks, self.runs, kept)
        self.first = {name: value.clone() for name, value in fxquant.state_dict(nn.ModuleList(self.blocks)).items()}
        self.plain = functools.cache(self.story)

    def story(self, around: Around) -> dict[str, Tensor]:
        fxquant.load_state_dict(nn.ModuleList(self.blocks), self.first)
        return steps(self.blocks, self.runs, around)


def stories(recipe: str, around: Around, without: Around, shared: dict[str, Compiled]) -> list[dict[str, Tensor]]:
    """Returns the stories with checkpoints and without.

    Under one recipe the first checkpoint is where its blocks are compiled; those of the others were compiled before.
    """
    if recipe == "delayed":
        return [story(RECIPES[recipe], around), plain(recipe, without)]
    if recipe not in shared:
        shared.clear()
        shared[recipe] = Compiled(RECIPES[recipe])
    return [shared[recipe].story(around), shared[recipe].plain(without)]


def of_sine(run: Run) -> Run:
    return lambda x: run(x.sin())


def of_cosine(run: Run) -> Run:
    """With its input beside it."""
    return lambda x: run(x.cos()) + x


def reentrant(run: Run) -> Run:
    return checkpointed(run, use_reentrant=True)


def late(run: Run) -> Run:
    return checkpointed(run, early_stop=False)


@pytest.mark.parametrize("around", [checkpointed, late, moved, reentrant])
@pytest.mark.parametrize("recipe", RECIPES)
def test_it_trains_as_without_a_checkpoint(recipe: str, around: Around, shared: dict[str, Compiled]) -> None:
    """Invariant 45, also of micro-batches whose forwards all come before their backwards."""
    assert_same_bits(*stories(recipe, around, of_sine if around is moved else kept, shared))


KINDS = (checkpointed, late, reentrant)


@pytest.mark.parametrize(
    ("recipe", "outer", "inner"),
    [
        pytest.param(
            name,
            outer,
            inner,
            id=f"{name}-{outer.__name__}-{inner.__name__}",
            marks=[] if (i + j + k) % 3 == 0 else pytest.mark.sweep,  # each pair once, under recipes that take turns
        )
        for i, name in enumerate(RECIPES)
        for j, outer in enumerate(KINDS)
        for k, inner in enumerate(KINDS)
    ],
)
def test_it_may_be_nested(recipe: str, outer: Around, inner: Around, shared: dict[str, Compiled]) -> None:
    assert_same_bits(*stories(recipe, lambda run: outer(of_cosine(inner(run))), of_cosine, shared))


@pytest.mark.parametrize(
    ("recipe", "dynamic"),
    [
        *(pytest.param(recipe, False, id=f"{name}-static") for name, recipe in RECIPES.items()),
        *(
            pytest.param(recipe, True, id=f"{name}-dynamic", marks=pytest.mark.sweep if i else [])
            for i, (name, recipe) in enumerate(RECIPES.items())
        ),
    ],
)
def test_an_evaluation_writes_nothing_before_a_reentrant_checkpoint_or_after(recipe: Recipe, dynamic: bool) -> None:
    """Both run without gradients: one graph of torch.compile's is compiled for each of them."""
    results = []
    for around in (kept, reentrant):
        torch.compiler.reset()
        (block, _), backend = blocks(), eager_backend(recipe)
        run = torch.compile(block, backend=backend, dynamic=dynamic)
        outputs = []
        for x in batches(3):
            with torch.no_grad():
                outputs.append(run(x[:8]))
                outputs.append(run(x))
            before = backend.state_dict()
            with torch.no_grad():
                assert torch.equal(run(x), outputs[-1])
            assert_same_bits(backend.state_dict(), before)
            outputs += [around(run)(x), around(run)(2 * x)]
            outputs[-2].sum().backward()
            outputs[-1].sum().backward()
        grads = {name: p.grad for name, p in block.named_parameters()}
        results.append({**dict(zip(map(str, range(99)), outputs, strict=False)), **grads, **backend.state_dict()})
    assert_same_bits(*results)


def test_a_compiled_checkpoint_inside_a_reentrant_one() -> None:
    """The body is bound to the state of both graphs."""
    results = []
    for around in (kept, reentrant):
        torch.compiler.reset()
        net, backend = recomputable_mlp(recompute=True), eager_backend(RECIPES["delayed"])
        run = torch.compile(net, backend=backend)
        x = torch.ones(8, 64, requires_grad=True)
        for _ in range(2):
            with torch.no_grad():
                run(x)
            around(run)(x).sum().backward()
        results.append({name: p.grad for name, p in net.named_parameters()} | backend.state_dict())
    assert_same_bits(*results)


@pytest.mark.usefixtures("casts_as_meant")
@pytest.mark.parametrize("around", [checkpointed, reentrant])
def test_inductor_repeats_with_the_same_bits(around: Around) -> None:
    recipe = RECIPES["delayed"]
    assert_same_bits(story(recipe, around, Backend(recipe)), plain("delayed", kept, "inductor"))


def test_it_may_save_some_of_what_runs_beside_the_graph() -> None:
    assert_same_bits(story(RECIPES["delayed"], selective), plain("delayed", kept))


@STATEFUL
def test_a_retained_graph_goes_backward_again(recipe: Recipe) -> None:
    """Each backward runs the forward again."""
    gradients = []
    for around in (kept, checkpointed):
        made, (run, _) = compiled_blocks(eager_backend(recipe))
        x, later = batches(2)
        y = around(run)(x)
        run(later)
        for _ in range(2):
            y.sum().backward(retain_graph=True)
        gradients.append({name: p.grad for name, p in made[0].named_parameters()} | {"x": x.grad})
    assert_same_bits(*gradients)


@STATEFUL
def test_a_backward_inside_a_checkpoint(recipe: Recipe) -> None:
    """It runs again too, and its gradients count for the step in which it does so last."""

    def energy_and_force(run: Run, around: Around) -> Run:
        def body(x: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(around(run)(x).sum(), x)
            return run(x) * force

        return body

    results = []
    for outer, inner in ((kept, kept), (late, kept), (late, late)):
        made, (run, _) = compiled_blocks(backend := eager_backend(recipe))
        for x in batches(2):
            outer(energy_and_force(run, inner))(x).sum().backward()
        state = {name: value for name, value in backend.state_dict().items() if not name.endswith("amax_history")}
        results.append({name: p.grad for name, p in made[0].named_parameters()} | state)
    assert_same_bits(results[0], results[1])
    assert_same_bits(results[0], results[2])


def test_a_restored_state_is_not_that_of_an_earlier_forward() -> None:
    _, (run, _) = compiled_blocks(backend := eager_backend(RECIPES["rounded"]))
    x, later = batches(2)
    run(later)
    saved = backend.state_dict()
    y = checkpointed(run)(x)
    backend.load_state_dict(saved)
    y.sum().backward()
    assert_same_bits(backend.state_dict(), saved)


def test_a_repetition_that_differs_is_refused() -> None:
    _, (run, _) = compiled_blocks(eager_backend(RECIPES["rounded"]))
    runs = iter([lambda x: x.sin(), run])
    y = checkpointed(lambda x: next(runs)(x), determinism_check="none", early_stop=False)(batches(1)[0])
    with pytest.raises(FxQuantError, match="has run a compiled graph 0 times in the forward, and repeats it 1 times"):
        y.sum().backward()
