"""What is saved for the backward, what is computed again there, and what outlives a step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers import NAMES, Recorder, assert_same_bits, eager_backend, recomputable_mlp, train_step
from saved import saved_tensors
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import fxquant
from fxquant import Backend, DelayedScaling, OptionError
from fxquant.backend.inductor import memory_settings
from fxquant.backend.weight_cache import WeightCache
from fxquant.bench.training import LLAMA3_8B, Stack
from fxquant.compat.private import inductor_config
from fxquant.passes.insert.cache_weights import Taken, Weight

ROWS, HIDDEN, FFN = 2 * 8192, 4096, 14336
"""Llama3-8B's, of two sequences."""
SCALED_MM = torch.ops.fxquant.scaled_mm.default


class GatedMlp(nn.Module):
    """The norm, products and activation of a decoder's second half; `recompute` checkpoints it."""

    def __init__(self, recompute: bool = False, hidden: int = 64, ffn: int = 96) -> None:
        super().__init__()
        self.norm, self.recompute = nn.RMSNorm(hidden), recompute
        self.gate, self.up = (nn.Linear(hidden, ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(ffn, hidden, bias=False)

    def body(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False) if self.recompute else self.body(x)  # type: ignore[no-any-return]


def steps(recipe: Any, recompute: bool = False, **options: Any) -> dict[str, Tensor]:
    """Outputs, gradients, weights and state of two steps of two micro-batches each, with evaluations between them."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model, backend = GatedMlp(recompute), eager_backend(recipe, **options)
    run, optimizer = torch.compile(model, backend=backend, fullgraph=True), torch.optim.SGD(model.parameters(), lr=0.1)
    found: dict[str, Tensor] = {}
    for step in range(2):
        for batch in range(2):
            x = torch.randn(32, 64, requires_grad=True)
            output = run(x)
            output.square().sum().backward()
            found |= {f"output {step} {batch}": output.detach(), f"input {step} {batch}": x.grad}
        with torch.no_grad():
            found[f"evaluation {step}"] = run(torch.randn(32, 64))
        found |= {f"{name} {step}": p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return found | dict(model.named_parameters()) | backend.state_dict()


def large_mlp() -> tuple[nn.Module, Tensor]:
    return GatedMlp(hidden=HIDDEN, ffn=FFN).bfloat16(), torch.randn(ROWS, HIDDEN, dtype=torch.bfloat16)


@pytest.mark.parametrize("recipe", ["current_scaling", "delayed_scaling"])
def test_saved_are_quantized_activations_and_no_weights(recipe: str) -> None:
    """bfloat16 only of what something else than a product needs: gate and up. Their inputs are payloads."""
    total = saved_tensors(large_mlp, recipe).total
    assert 0 <= total - ROWS * (2 * 2 * FFN + FFN + HIDDEN + 4) < 1024


@pytest.mark.parametrize("recipe", ["delayed_scaling", "mxfp8"])
def test_the_least_has_nothing_for_products(recipe: str) -> None:
    total = saved_tensors(large_mlp, recipe, save="least").total
    assert 0 <= total - ROWS * (2 * 2 * FFN + 4) < 1024


SMALL = Stack(blocks=3, hidden=128, ffn=384, heads=4, kv_heads=2, batch=2, length=64)
ROWS_OF_SMALL = SMALL.batch * SMALL.length


def test_the_least_of_a_decoder_block() -> None:
    """Queries, keys, values, attention's output, gate, up, and what goes from block to block; of norms 1 / rms."""

    def make() -> tuple[nn.Module, Tensor]:
        return SMALL.model(), SMALL.input()

    total = saved_tensors(make, "delayed_scaling", save="least").total
    matrices = 3 * (3 * SMALL.hidden + 2 * SMALL.ffn) + 2 * SMALL.hidden
    vectors = 3 * (SMALL.heads + 2)
    assert 0 <= total - ROWS_OF_SMALL * (2 * matrices + 4 * vectors) < 1024


class Attends(nn.Module):
    """The first half of a decoder block, with dropout before or behind the projection."""

    def __init__(self, before: float = 0.0, behind: float = 0.0, ffn: int = 512) -> None:
        super().__init__()
        self.before, self.behind = before, behind
        self.project = nn.Linear(128, 128)
        self.feed = nn.Sequential(nn.RMSNorm(128), nn.Linear(128, ffn), nn.SiLU(), nn.Linear(ffn, 128))

    def forward(self, x: Tensor) -> Tensor:
        heads = x.view(2, 64, 4, 32).transpose(1, 2)
        o = nn.functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).reshape(x.shape)
        o = self.project(nn.functional.dropout(o, self.before) if self.before else o)
        x = x + (nn.functional.dropout(o, self.behind) if self.behind else o)
        return x + self.feed(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "again"),
    [
        (Attends(), 1),
        (Attends(before=0.5), 0),  # what is random is made once
        (Attends(behind=0.5), 0),
        (Attends(ffn=256), 1),  # its second product is added to a sum that is made again
    ],
)
def test_products_that_a_backward_makes_again(model: nn.Module, again: int) -> None:
    saved = saved_tensors(lambda: (model, torch.randn(2, 64, 128)), "current_scaling", save="least")
    graphs = [gm.graph.find_nodes(op="call_function", target=SCALED_MM) for gm in (saved.forward, saved.backward)]
    assert [len(nodes) for nodes in graphs] == [3, 6 + again]


def test_reports_name_what_a_backward_makes_again() -> None:
    model = nn.Sequential(Attends(), Attends(before=0.5), Attends())
    report = fxquant.explain(model, "current_scaling", torch.randn(2, 64, 128, requires_grad=True))
    assert report.again == ["0.project", "2.project"]
    line = 'with save="least" the backward computes again, besides casts: 0.project, 2.project'
    assert line in report.text() and '"again"' in report.to_json()


@pytest.mark.sweep
@pytest.mark.parametrize("recipe", ["delayed_scaling", *NAMES])
def test_four_8b_blocks(recipe: str) -> None:
    def make() -> tuple[nn.Module, Tensor]:
        return LLAMA3_8B.model(), LLAMA3_8B.input()

    quantized, least = (saved_tensors(make, recipe, save=save).total / 2**30 for save in ("quantized", "least"))
    plain = saved_tensors(make, "high_precision").total / 2**30
    assert quantized < 7.35
    assert least < 5.14  # and the input, an eighth, with both
    assert least + 1 / 8 < 0.6 * (plain + 1 / 8)


def test_one_amax_serves_forward_and_backward() -> None:
    """Of the input, of the weights and of the output's gradient, which nothing shares."""
    layer, backend = nn.Linear(64, 96, bias=False), Recorder("current_scaling")
    torch.compile(layer, backend=backend)(torch.randn(32, 64, requires_grad=True)).sum().backward()
    forward, backward = ([n.target for n in gm.graph.nodes if n.op == "call_function"] for gm in backend.graphs)
    amax = torch.ops.fxquant.amax.default
    assert forward.count(amax) == 2 and backward.count(amax) == 0
    given = [n for n in backend.graphs[1].graph.nodes if "quantize" in str(n.target) and n.args[-1] is not None]
    assert any(isinstance(n.args[-1], torch.fx.Node) and n.args[-1].op == "placeholder" for n in given)


QUICK = [("nvfp4", True), ("delayed_scaling", False)]
SWEEP = itertools.product(("delayed_scaling", *NAMES), (False, True))


@pytest.mark.parametrize(
    ("recipe", "recompute"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.sweep) for case in SWEEP if case not in QUICK)],
)
def test_options_change_no_bit(recipe: str, recompute: bool) -> None:
    """Seeds, steps and scales of the forward included: NVFP4's gradients are rounded stochastically."""
    plain = steps(recipe)
    assert_same_bits(plain, steps(recipe, recompute, save="least", cache_weights=True))


@pytest.mark.parametrize("recipe", ["delayed_scaling", "nvfp4"])
def test_attention_has_the_bits_of_the_default_under_the_least(recipe: str) -> None:
    """In two steps, so that a state which the backward changed would show, with dropout where a decoder has it."""
    results = []
    for save in ("quantized", "least"):
        torch.compiler.reset()
        torch.manual_seed(0)
        model, backend = nn.Sequential(Attends(), Attends(behind=0.5), Attends()), eager_backend(recipe, save=save)
        run = torch.compile(model, backend=backend, fullgraph=True)
        found: dict[str, Tensor] = {}
        for step in range(2):
            x = torch.randn(2, 64, 128, requires_grad=True)
            torch.manual_seed(step)
            found |= {f"{name} {step}": t.clone() for name, t in train_step(model, run, x).items()} | {
                f"x {step}": x.grad
            }
        results.append(found | backend.state_dict())
    assert_same_bits(*results)


def test_shared_amaxes_give_the_bits_of_separate_ones() -> None:
    with inductor_config.patch(disabled_passes="save_scales"):
        separate = steps("current_scaling")
    assert_same_bits(separate, steps("current_scaling", save="least", cache_weights=True))


@pytest.mark.sweep
@pytest.mark.parametrize("recipe", ["current_scaling", "delayed_scaling", "rowwise"])
@pytest.mark.parametrize(("make", "size"), [(GatedMlp, (32, 64)), (Attends, (2, 64, 128))])
def test_inductor_recomputes_the_bits_of_the_forward(
    recipe: str, make: Callable[[], nn.Module], size: tuple[int, ...]
) -> None:
    """In bfloat16, where rounding decides, and for Inductor's own fusions."""
    results = []
    for options in ({"inductor": {"emulate_precision_casts": True}}, {"save": "least"}):
        torch.compiler.reset()
        torch.manual_seed(0)
        model, x = make().bfloat16(), torch.randn(size, dtype=torch.bfloat16, requires_grad=True)
        run = torch.compile(model, backend=Backend(recipe, **options), fullgraph=True, dynamic=False)
        results.append(train_step(model, run, x) | {"x": x.grad})
    assert_same_bits(*results)


def test_linears_that_read_one_tensor_share_its_slot() -> None:
    """gate and up quantize their input once, in the backward too."""
    recorder = Recorder(DelayedScaling())
    torch.compile(GatedMlp(), backend=recorder)(torch.randn(32, 64, requires_grad=True)).sum().backward()
    sizes = {tuple(t.shape) for t in recorder.state_dict().values()}
    assert sizes == {(8,), (1024, 8)}  # inputs of gate and up, and of down; three weights, three gradients
    forward = [n for n in recorder.graphs[0].graph.nodes if "quantize" in str(n.target)]
    assert len(forward) == 5


class Counted:
    """A model whose weights are cached, and how many of them each call quantizes."""

    def __init__(self, model: nn.Module, recipe: Any = "mxfp8", **kwargs: Any) -> None:
        self.backend = eager_backend(recipe, cache_weights=True)
        self.run, self.count = torch.compile(model, backend=self.backend, **kwargs), 0
        assert self.backend.weights is not None
        quantize = self.backend.weights._quantize

        def counted(*args: Any) -> Any:
            self.count += 1
            return quantize(*args)

        self.backend.weights._quantize = counted  # type: ignore[method-assign]
        self.reference = torch.compile(model, backend=eager_backend(recipe))

    def __call__(self, x: Tensor, *, grad: bool = True) -> int:
        before = self.count
        with torch.set_grad_enabled(grad):
            y = self.run(x.requires_grad_(grad))
        with torch.no_grad():
            assert torch.equal(y, self.reference(x.detach())), "a stale weight"
        if grad:
            y.sum().backward()
        return self.count - before


def test_cached_weights_are_as_dense_as_graphs_expect_them() -> None:
    """Whatever strides the kernels give to scales."""

    def transposing(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., list[Tensor]]:
        return lambda *values: [part.mT.contiguous().mT for part in graph(*values)]

    weight = Weight((), torch.float32, "mxfp8_e4m3", False)
    directions = ("rowwise", "columnwise")
    cached = WeightCache(transposing).parts([Taken(0, weight, d) for d in directions], [torch.randn(96, 64)])
    assert [tuple(part.shape) for part in cached] == [(96, 64), (96, 2), (64, 96), (64, 3)]
    assert all(part.is_contiguous() for part in cached)


class WritesData(torch.optim.Optimizer):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.data.add_(1)


def test_a_changed_weight_is_quantized_again() -> None:
    layer, x = nn.Linear(64, 96, bias=False), torch.randn(32, 64)
    counted = Counted(layer)
    assert [counted(x), counted(x), counted(x, grad=False), counted(x)] == [1, 0, 0, 0]

    def swap_data() -> None:
        layer.weight.data = layer.weight.data * 2

    def write_in_place() -> None:
        with torch.no_grad():
            layer.weight.mul_(2)

    def new_parameter() -> None:
        layer.weight = nn.Parameter(torch.randn(96, 64))

    changes: dict[str, Callable[[], Any]] = {
        "memory": swap_data,
        "in place": write_in_place,
        "state_dict": lambda: layer.load_state_dict({"weight": torch.randn(96, 64)}),
        "parameter": new_parameter,
        "optimizer without versions": lambda: WritesData(layer.parameters(), {}).step(),
    }
    for name, change in changes.items():
        change()
        assert [counted(x), counted(x)] == [1, 0], name
    assert counted.backend.weights is not None
    assert len(counted.backend.weights._entries) == 1, "of a parameter that is gone"


def test_writes_without_a_version_need_clear_cache() -> None:
    layer, x = nn.Linear(64, 96, bias=False), torch.randn(32, 64)
    counted = Counted(layer)
    counted(x)
    layer.weight.data.mul_(2)
    with pytest.raises(AssertionError, match="a stale weight"):
        counted(x)
    counted.backend.clear_cache()
    assert counted(x) == 1


@pytest.mark.parametrize("write", ["parameter", "view", "data", "in a checkpoint"])
def test_weights_that_a_graph_writes_into_are_not_cached(write: str) -> None:
    """What was quantized before the call is not what the product reads."""

    def halve(weight: Tensor) -> Tensor:
        with torch.no_grad():
            {"view": weight[:], "data": weight.data}.get(write, weight).mul_(0.5)
        return weight

    class Halving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

        def body(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, halve(self.first.weight))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            x = checkpoint(self.body, x, use_reentrant=False) if write == "in a checkpoint" else self.body(x)
            return self.last(x)

    results = []
    for cached in (False, True):
        torch.compiler.reset()
        model, backend = Halving(), eager_backend("mxfp8", cache_weights=cached)
        run = torch.compile(model, backend=backend)
        x = torch.ones(32, 64)
        with torch.no_grad():
            results.append([run(x), run(x), model.first.weight])
    assert len(backend.weights._entries) == 1  # type: ignore[union-attr]
    for plain, cached_result in zip(*results, strict=True):
        assert torch.equal(plain, cached_result)


def test_weights_seen_through_views_and_casts_are_cached() -> None:
    """Autocast over float32 weights, a transposed parameter, and one that two layers share."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(64, 64), nn.Parameter(torch.randn(64, 96) / 8)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.a(self.a(x)) @ self.b

    results = []
    for options in ({}, {"cache_weights": True}):
        torch.compiler.reset()
        torch.manual_seed(0)
        net, backend = Net(), eager_backend("mxfp8", **options)
        run = torch.compile(net, backend=backend, fullgraph=True)
        x = torch.randn(32, 64, requires_grad=True)
        results.append(train_step(net, run, x) | train_step(net, run, x))
    assert_same_bits(*results)
    assert backend.weights is not None and len(backend.weights._entries) == 2


def test_set_recipe_keeps_a_cache_for_each() -> None:
    torch.manual_seed(0)
    net, x = recomputable_mlp(), torch.randn(8, 64)
    options = {"inner": "aot_eager", "cache_weights": True}
    run = fxquant.compile(net, "mxfp8", options=options)
    first = run(x).detach()
    run.set_recipe("current_scaling")
    other = run(x).detach()
    run.set_recipe("mxfp8")
    assert torch.equal(run(x), first) and not torch.equal(first, other)
    with torch.no_grad():
        net.up.weight.mul_(2)
    doubled = run(x).detach()
    assert torch.equal(doubled, torch.compile(net, backend=eager_backend("mxfp8"))(x))
    for p in net.parameters():
        p.data.mul_(2)
    run.clear_cache()
    assert torch.equal(run(x), torch.compile(net, backend=eager_backend("mxfp8"))(x))


def test_inductor_holds_no_buffers_in_training_on_a_gpu() -> None:
    with FakeTensorMode():
        weights = {device: torch.empty(4, device=device, requires_grad=True) for device in ("cuda", "cpu")}
    assert memory_settings([weights["cuda"], 1]) == {"allow_buffer_reuse": False}
    assert memory_settings([weights["cpu"]]) == memory_settings([weights["cuda"].detach()]) == {}
    with torch.no_grad():
        assert memory_settings([weights["cuda"]]) == {}


def test_unknown_choices_are_refused() -> None:
    with pytest.raises(OptionError, match="quantized, least"):
        Backend("mxfp8", save="most")


def test_graphs_of_the_backend_by_name_share_their_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training, and evaluation of another size: the first quantizes."""
    made: list[list[str]] = []
    quantize = WeightCache._quantize
    monkeypatch.setattr(WeightCache, "_quantize", lambda self, p, w, d: made.append(d) or quantize(self, p, w, d))
    options = {"recipe": "mxfp8", "inner": "aot_eager", "cache_weights": True}
    layer = nn.Linear(64, 96, bias=False)
    run = torch.compile(layer, backend="fxquant", options=options)
    run(torch.randn(32, 64, requires_grad=True)).sum().backward()
    with torch.no_grad():
        run(torch.randn(16, 64))
    assert made == [["rowwise", "columnwise"]]
