"""What is saved for the backward, what is computed again there, and what outlives a step."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import NAMES, Recorder, assert_same_bits, eager_backend, train_step
from saved import saved_tensors
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import fxquant
from fxquant import Backend, DelayedScaling, OptionError
from fxquant.backend.inductor import memory_settings
from fxquant.bench.training import LLAMA3_8B, Stack
from fxquant.compat.private import inductor_config

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


SMALL = Stack(blocks=2, hidden=128, ffn=384, heads=4, kv_heads=2, batch=2, length=64)
ROWS_OF_SMALL = SMALL.batch * SMALL.length


def test_the_least_of_a_decoder_block() -> None:
    """Queries, keys, values, attention's output, gate, up, and what goes from block to block; of norms 1 / rms."""

    def make() -> tuple[nn.Module, Tensor]:
        return SMALL.model(), SMALL.input()

    total = saved_tensors(make, "delayed_scaling", save="least").total
    matrices = SMALL.blocks * (3 * SMALL.hidden + 2 * SMALL.ffn) + (SMALL.blocks - 1) * SMALL.hidden
    vectors = SMALL.blocks * (SMALL.heads + 2)
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
    line = 'with save="least" the backward computes again, besides casts: {0,2}.project'
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


@pytest.mark.parametrize(("recipe", "save"), [("current_scaling", "quantized"), ("mxfp8", "least")])
def test_a_copy_of_a_float32_parameter_lives_no_longer_than_its_cast(recipe: str, save: str) -> None:
    """Under autocast a weight is rounded to bfloat16 for its payload, and again in the backward for the other one."""
    with torch.autocast("cpu", torch.bfloat16):
        found = saved_tensors(lambda: (GatedMlp(), torch.randn(128, 64)), recipe, save=save)
    weights = {(96, 64), (64, 96)}
    assert not [t for t in found.saved if tuple(t.shape) in weights], "neither copies nor payloads of weights are saved"
    copies = 0
    for graph in (found.forward.graph, found.backward.graph):
        nodes = list(graph.nodes)
        for node in nodes:
            value = node.meta.get("val")
            if not isinstance(value, Tensor) or tuple(value.shape) not in weights or value.dtype != torch.bfloat16:
                continue
            if node.target is SCALED_MM or node.all_input_nodes[0].op != "placeholder":
                continue
            copies += 1
            last = max(map(nodes.index, node.users))
            assert all("fxquant" in str(user.target) for user in node.users)
            between = [other for other in nodes[nodes.index(node) : last] if other.target is SCALED_MM]
            assert not between, f"{node} is held over a product"
    assert copies == 6, "of three weights, in each half"


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
        model, backend = nn.Sequential(Attends(behind=0.5), Attends()), eager_backend(recipe, save=save)
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
    histories = {name: value for name, value in recorder.state_dict().items() if name.endswith("amax_history")}
    recorded = [name.rpartition(".")[0] for name, value in histories.items() if value[0] > 0]
    assert len(recorded) == 8, "one input of gate and up, and that of down; three weights, three gradients"
    forward = [n for n in recorder.graphs[0].graph.nodes if "quantize" in str(n.target)]
    assert len(forward) == 5


def test_inductor_holds_no_buffers_in_training_on_a_gpu() -> None:
    with FakeTensorMode():
        weights = {device: torch.empty(4, device=device, requires_grad=True) for device in ("cuda", "cpu")}
    lean = {"allow_buffer_reuse": False}
    assert memory_settings([weights["cuda"], 1]) == lean
    assert memory_settings([weights["cuda"]], "fp8") == {**lean, "reorder_for_peak_memory": False}
    assert memory_settings([weights["cpu"]]) == memory_settings([weights["cuda"].detach()]) == {}
    with torch.no_grad():
        assert memory_settings([weights["cuda"]]) == {}


def test_unknown_choices_are_refused() -> None:
    with pytest.raises(OptionError, match="'least' or 'fp8', not 'most'"):
        Backend("mxfp8", save="most")
