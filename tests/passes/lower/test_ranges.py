"""Ranges of a profiler around products, by layer and GEMM (`mark_gemms`, `name_products`, `name_meanings`)."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import fxquant
from fxquant import recipes
from fxquant.passes.graph.names import fxquant_op
from fxquant.passes.lower.ranges import mark_gemms, name_meanings, name_products
from fxquant.passes.settings import Settings


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


NAMES = {
    f"layers.{i}.{part} {gemm}" for i in range(2) for part in ("up", "down") for gemm in ("fprop", "dgrad", "wgrad")
}
NAMES -= {"layers.0.up dgrad"}  # whose input needs no gradient


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def stepped(model: nn.Module, path: Path | None, **options: Any) -> tuple[list[torch.Tensor], Counter[str]]:
    """Output and gradients of a step, and the ranges by name that a Chrome trace of another has."""
    torch.compiler.reset()
    compiled = fxquant.compile(model, options.pop("recipe", "mxfp8"), options=options)
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    model.zero_grad()
    output = compiled(x)
    output.sum().backward()
    results = [output.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    if path is None:
        return results, Counter()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        compiled(x).sum().backward()
    profiler.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    names = (event["name"] for event in events if event.get("cat") == "user_annotation")
    return results, Counter(
        name for name in names if name.endswith(("prop", "grad", "attention", "attention backward"))
    )


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_chrome_trace_reads_as_the_model_does(inner: str, tmp_path: Path) -> None:
    model = Model()
    results, ranges = stepped(model, tmp_path / "trace.json", inner=inner, ranges=True)
    assert ranges == Counter(NAMES)
    if inner == "aot_eager":  # whose products run one by one with and without
        plain, none = stepped(model, tmp_path / "trace.json", inner=inner)
        assert not none and all(map(torch.equal, results, plain))


def test_without_the_option_a_graph_stays_as_it_is() -> None:
    backend = fxquant.Backend("mxfp8", inner="aot_eager")
    torch.compile(Model(), backend=backend)(torch.randn(32, 64)).sum().backward()
    texts = backend.report().graphs.values()
    assert len(texts) == 2 and not any("in_range" in text for text in texts)
    graph = torch.fx.Graph()
    graph.call_function(torch.ops.fxquant.scaled_mm.default, ([], [], "", "", None, torch.float32, True))
    for run in (mark_gemms, name_products, name_meanings):
        assert run(graph, Settings()) == 0 and [fxquant_op(node) for node in graph.nodes] == ["scaled_mm"]
    assert mark_gemms(graph, Settings(ranges=True)) == name_products(graph, Settings(ranges=True)) == 1
    (node,) = graph.nodes
    assert node.args[:2] == ("<model> fprop", True) and "in_range" in str(node.target)


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x).view(1, 32, 2, 32).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(q, q, q)


def test_attention_has_ranges_too(tmp_path: Path) -> None:
    recipe = recipes.DelayedScaling(fp8_dpa=True)
    _, ranges = stepped(Attends(), tmp_path / "trace.json", inner="aot_eager", ranges=True, recipe=recipe)
    assert ranges == Counter(["q fprop", "q wgrad", "<model> attention", "<model> attention backward"])


class Mixed(nn.Module):
    """Products that a recipe leaves in high precision beside one that it quantizes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up = nn.Conv2d(4, 8, 3), nn.Linear(64, 64)
        self.head, self.tied = nn.Linear(64, 8, bias=False), nn.Parameter(torch.randn(8, 24) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(self.conv(x.view(2, 4, 10, 10)).flatten(2))
        q = x.view(2, 8, 2, 32).transpose(1, 2)
        x = nn.functional.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)
        return self.head(x) @ self.tied


MIXED = ["conv fprop", "conv backward", *(f"up {gemm}" for gemm in ("fprop", "dgrad", "wgrad"))]
MIXED += [f"{name} {gemm}" for name in ("head", "<model>") for gemm in ("fprop", "dgrad", "wgrad")]
MIXED += ["<model> attention", "<model> attention backward"]


@pytest.mark.parametrize("recipe", ["mxfp8", "high_precision"])
@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_products_in_high_precision_have_ranges_too(recipe: str, inner: str, tmp_path: Path) -> None:
    x = torch.randn(2, 400, generator=torch.Generator().manual_seed(0))
    model = Mixed()
    torch.compiler.reset()
    compiled = fxquant.compile(model, recipe, options={"inner": inner, "ranges": True})
    y = compiled(x)
    y.sum().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    if recipe == "high_precision":
        model.zero_grad()
        model(x).sum().backward()
        torch.testing.assert_close(y, model(x))
        torch.testing.assert_close(gradients, [p.grad for p in model.parameters() if p.grad is not None])
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        compiled(x).sum().backward()
    names = Counter(event.name for event in profiler.events() if event.name.rpartition(" ")[0] in {
        "conv", "up", "head", "<model>", "<model> attention",
    })  # fmt: skip
    assert names == Counter(MIXED)


@pytest.mark.parametrize("wide", [True, False])
def test_gradients_of_torchs_products_are_told_apart(wide: bool) -> None:
    """They are told by what they contract, whichever way autograd writes them, and for square weights too."""
    weight, x = torch.randn(64 if wide else 8, 64), torch.randn(16, 64)
    graph = torch.fx.Graph()
    g, w, a = (graph.placeholder(name) for name in ("tangents_1", "primals_1", "primals_2"))
    g.meta["val"], w.meta["val"], a.meta["val"] = x @ weight.T, weight, x

    def call(target: Any, *args: Any) -> torch.fx.Node:
        node = graph.call_function(target, args)
        node.meta["val"] = target(*torch.fx.node.map_arg(args, lambda n: n.meta["val"]))
        return node

    aten = torch.ops.aten
    turned = call(aten.permute.default, g, [1, 0])
    nodes = {
        "dgrad": [call(aten.mm.default, g, w), call(aten.mm.default, call(aten.t.default, w), turned)],
        "wgrad": [call(aten.mm.default, turned, a), call(aten.mm.default, call(aten.permute.default, a, [1, 0]), g)],
        "fprop": [call(aten.mm.default, a, call(aten.t.default, w))],
    }
    assert mark_gemms(graph, Settings(ranges=True)) == 5
    assert {name: {node.meta["fxquant_gemm"] for node in of} for name, of in nodes.items()} == {
        name: {name} for name in nodes
    }
