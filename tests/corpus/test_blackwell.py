"""Whole models lowered for Blackwell without such a card: their GEMMs and casts, and what they compute."""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_same_bits
from models import llama, qwen3_moe_model, tokens
from tensor_cores import SCALED_MM, OnTensorCores, accepted, described
from torch import Tensor, fx, nn

import fxquant
from fxquant import Backend
from fxquant.compat.private import (
    aot_autograd,
    knows_grouped_kinds,
    make_boxed_func,
    triton_kernel_wrapper_functional,
)
from fxquant.kernels import operator
from fxquant.kernels.cast import choice as casts
from fxquant.kernels.grouped import choice as groups
from fxquant.kernels.linear import choice as gemms
from fxquant.passes.graph.names import op_name
from fxquant.passes.insert import cache_weights
from fxquant.passes.look import half
from fxquant.passes.pipeline import SPLIT, Partition, run
from fxquant.passes.settings import Settings
from fxquant.weights import parts


class Lowered(Backend):
    """A backend that lowers graphs as Inductor's are, and runs them; with Triton `kernels` it only keeps them."""

    def __init__(self, recipe: str, kernels: bool, **options: Any) -> None:
        super().__init__(recipe, inner="aot_eager", **options)
        self.graphs: dict[str, fx.GraphModule] = {}
        self.kernels = kernels

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        def lowered(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
            run(SPLIT, module.graph, Settings(kernels=self.kernels))
            module.recompile()
            self.graphs[half(module.graph)] = module
            return make_boxed_func(zeros(module) if self.kernels else OnTensorCores(module).run)

        compilers = dict.fromkeys(("fw_compiler", "bw_compiler", "inference_compiler"), lowered)
        return aot_autograd(**compilers, partition_fn=Partition(self.settings))(gm, list(example_inputs))


def zeros(module: fx.GraphModule) -> Callable[..., Any]:
    """A function that gives zeros in the place of the results of a graph."""
    values = fx.node.map_arg(module.graph.output_node().args[0], lambda node: node.meta["val"])
    return lambda *inputs: [torch.zeros(v.shape, dtype=v.dtype) if isinstance(v, Tensor) else v for v in values]


@pytest.fixture
def blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has every tensor seem to lie on a card of compute capability 10.0."""
    for module in (operator, casts, gemms, groups, cache_weights, parts):
        monkeypatch.setattr(module, "capability", lambda device: (10, 0))


def step(model: nn.Module, batch: Any, backend: Any) -> tuple[Tensor, dict[str, Tensor]]:
    torch.compiler.reset()
    loss = torch.compile(model, backend=backend)(**batch).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "most"), [("mxfp8", 1e-5), pytest.param("nvfp4", 0.02, marks=pytest.mark.sweep)])
def test_llama_learns_on_tensor_cores_what_it_learns_emulated(
    recipe: str, most: float, request: pytest.FixtureRequest
) -> None:
    """NVFP4's global factors come behind the product, and what differs in a last bit may round to another code."""
    torch.manual_seed(0)
    model, batch = llama(num_hidden_layers=1), tokens()
    expected = step(model, batch, Backend(recipe, inner="aot_eager"))
    model.zero_grad()
    request.getfixturevalue("blackwell")
    backend = Lowered(recipe, kernels=False)
    loss, gradients = step(model, batch, backend)
    calls = {
        name: len(gm.graph.find_nodes(op="call_function", target=SCALED_MM)) for name, gm in backend.graphs.items()
    }
    assert calls == {"forward": 8, "backward": 16}
    torch.testing.assert_close(loss, expected[0], rtol=most, atol=0)
    assert gradients.keys() == expected[1].keys()
    for name, gradient in gradients.items():
        difference = (gradient - expected[1][name]).norm() / expected[1][name].norm()
        assert difference <= most, (name, difference)


@pytest.mark.usefixtures("blackwell")
@pytest.mark.parametrize("recipe", [pytest.param("mxfp8", marks=pytest.mark.sweep), "nvfp4"])
def test_the_number_of_rows_may_change(recipe: str) -> None:
    """All three GEMMs, one of which sums over the rows, stay on tensor cores, in one compilation."""
    layer, backend = nn.Linear(96, 64), Lowered(recipe, kernels=False)
    compiled = torch.compile(layer, backend=backend, dynamic=True)
    for rows in (40, 72, 33):
        x = torch.randn(rows, 96, requires_grad=True)
        y = compiled(x)
        y.sum().backward()
        assert (y - layer(x)).norm() < 0.2 * y.norm()
    counts = [len(gm.graph.find_nodes(op="call_function", target=SCALED_MM)) for gm in backend.graphs.values()]
    assert counts == [1, 2] and backend.captured == 1


_MORE = (("mxfp8", False), ("nvfp4", True), ("nvfp4", False))


class Experts(nn.Module):
    """Groups of rows, some of which are empty, each times weights of its own; rows behind the last are of none."""

    def __init__(self, products: int) -> None:
        super().__init__()
        sizes = ((40, 56), (48, 40))[:products]
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(4, *size).bfloat16()) for size in sizes)

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        for i, weight in enumerate(self.weights):
            x = torch._grouped_mm(x if i == 0 else x.relu(), weight.mT, offs=offs)
        return x


@pytest.mark.parametrize(
    ("recipe", "cached", "products"),
    [("mxfp8", True, 2), ("nvfp4", False, 1), *(pytest.param(*case, 2, marks=pytest.mark.sweep) for case in _MORE)],
)
def test_experts_learn_on_tensor_cores_what_they_learn_emulated(
    recipe: str, cached: bool, products: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One compilation serves all numbers of rows; both round products to bfloat16."""
    torch.manual_seed(0)
    experts, inputs = Experts(products), list[tuple[Tensor, Tensor]]()
    for ends in ([3, 3, 140, 200], [0, 0, 16, 33]):
        x = torch.randn(ends[-1] + 5, 56, dtype=torch.bfloat16, requires_grad=True)
        torch._dynamo.mark_dynamic(x, 0)  # type: ignore[no-untyped-call]
        inputs.append((x, torch.tensor(ends, dtype=torch.int32)))

    def run(backend: Any) -> list[Tensor]:
        torch.compiler.reset()
        compiled, results = torch.compile(experts, backend=backend), []
        for x, offs in inputs:
            y = compiled(x, offs)
            results += [y.detach(), *torch.autograd.grad(y.float().square().sum(), (x, *experts.parameters()))]
        return results

    expected = run(Backend(recipe, inner="aot_eager"))
    request.getfixturevalue("blackwell")
    monkeypatch.setattr(casts, "capability", lambda device: (0, 0))  # by their meaning, without Triton
    backend = Lowered(recipe, kernels=False, cache_weights=cached)
    for got, want in zip(run(backend), expected, strict=True):
        assert (got - want).float().norm() <= 2**-7 * want.float().norm()
    for name, count in (("forward", products), ("backward", 2 * products)):
        calls = [n for n in backend.graphs[name].graph.nodes if "scaled_grouped_mm" in str(n.target)]
        assert len(calls) == count
    assert backend.captured == 1


def origin(node: fx.Node) -> fx.Node:
    """The node whose memory another one is."""
    while op_name(node) in ("alias", "detach", "view", "view_dtype"):
        node = node.all_input_nodes[0]
    return node


@pytest.mark.usefixtures("blackwell")
@pytest.mark.parametrize(("way", "recipe"), [("cached", "mxfp8"), ("cached", "nvfp4"), ("stored", "mxfp8")])
def test_scales_of_weights_that_last_are_read_as_they_lie(way: str, recipe: str) -> None:
    """No call of a graph brings them into the order of tensor cores, in either direction."""
    layer, x = nn.Linear(96, 160), torch.randn(40, 96, requires_grad=True)
    expected = step_of(layer, x, Lowered(recipe, kernels=False))
    layer = fxquant.quantize_parameters(copy.deepcopy(layer), recipe) if way == "stored" else layer
    backend = Lowered(recipe, kernels=False, cache_weights=way == "cached")
    assert_same_bits(step_of(layer, x, backend), expected)
    for name, count in (("forward", 1), ("backward", 2)):
        calls = backend.graphs[name].graph.find_nodes(op="call_function", target=SCALED_MM)
        assert len(calls) == count and {origin(node.args[5][0]).op for node in calls} == {"placeholder"}  # type: ignore[index]


def step_of(layer: nn.Module, x: Tensor, backend: Any) -> dict[str, Tensor]:
    torch.compiler.reset()
    torch.manual_seed(0)
    layer.zero_grad()
    y = torch.compile(layer, backend=backend)(x)
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    return {"output": y.detach(), "gradient": gradient}


def listing(gm: fx.GraphModule) -> str:
    """The calls for tensor cores, and the tensors that launches of Triton kernels write, each with its number."""
    launches = [n for n in gm.graph.nodes if n.target is triton_kernel_wrapper_functional]
    texts = [",".join(node.kwargs["tensors_to_clone"]) for node in launches]
    calls = [node for node in gm.graph.nodes if node.target is SCALED_MM or "scaled_grouped_mm" in str(node.target)]
    assert all(accepted(node) == tuple(node.meta["val"].shape) for node in calls), "by torch's meta functions"
    assert not [n for n in gm.graph.nodes if op_name(n) in ("index_copy", "index_select")], "scales lie in tiles"
    texts += [f"{op_name(node).split('::')[-1]} {described(node)}" for node in calls]
    return "\n".join(f"{count} x {text}" for text, count in Counter(texts).items())


@pytest.mark.usefixtures("blackwell")
@pytest.mark.parametrize(
    ("name", "recipe"),
    [("llama", "mxfp8"), ("llama", "nvfp4"), ("qwen3_moe", "mxfp8"), ("qwen3_moe", "nvfp4")],
)
def test_lowered(name: str, recipe: str) -> None:
    """The graph is that of `blackwell_<name>_<recipe>.txt`; FXQUANT_WRITE_SNAPSHOTS=1 writes it anew.

    That of experts is `.._2.15.txt` where torch traces a grouped GEMM that is told the kinds of its scales. Kinds 2
    and 3 are 1x16 and 1x32, 0 is of the whole tensor; swizzle 1 is 32_4_4.
    """
    backend = Lowered(recipe, kernels=True)
    model = llama(num_hidden_layers=1) if name == "llama" else qwen3_moe_model(num_hidden_layers=1, num_experts=4)
    step(model.bfloat16(), tokens(), backend)
    text = "".join(f"{half}\n{listing(gm)}\n" for half, gm in backend.graphs.items())
    newer = "_2.15" if name == "qwen3_moe" and knows_grouped_kinds() else ""
    path = Path(__file__).with_name(f"blackwell_{name}_{recipe}{newer}.txt")
    if os.environ.get("FXQUANT_WRITE_SNAPSHOTS") == "1":
        path.write_text(text)
    assert text == path.read_text()
