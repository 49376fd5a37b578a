"""Passes leave nothing of their own in the shape environment of a compilation, or of a source program."""

from __future__ import annotations

import ast
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._pytree import tree_map_only

import fxquant
from fxquant.compat.private import inductor_decompositions, make_fx
from fxquant.compat.values import on_fakes
from fxquant.formats import LinearSpec, OperandSpec, QuantSpec
from fxquant.passes import pipeline
from fxquant.passes.pipeline import JOINT, SPLIT
from fxquant.passes.settings import Settings

ENVIRONMENTS: weakref.WeakSet[ShapeEnv] = weakref.WeakSet()


def held(env: ShapeEnv) -> tuple[Any, ...]:
    """What a shape environment holds a graph to."""
    symbols = len(env.var_to_range)
    asserts = sum(map(len, env.deferred_runtime_asserts.values()))
    return [guard.expr for guard in env.guards], dict(env.replacements), symbols, asserts


def assert_leaves_nothing(run: Callable[..., Any], label: str, *args: Any) -> Any:
    before = {env: held(env) for env in ENVIRONMENTS}
    result = run(*args)
    for env, had in before.items():
        assert held(env) == had, f"{label} leaves something in a shape environment"
    return result


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Has each pass leave all shape environments as it has found them; gives where graphs were looked at."""
    places: list[str] = []
    before: dict[ShapeEnv, tuple[Any, ...]] = {}
    initialize, check = ShapeEnv.__init__, pipeline.check
    ENVIRONMENTS.clear()

    def register(self: ShapeEnv, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        ENVIRONMENTS.add(self)

    def look(subject: Any, form: Any, settings: Settings, place: str) -> None:
        check(subject, form, settings, place)
        if not place.startswith("before"):
            assert all(held(env) == had for env, had in before.items()), f"symbols are held to more {place}"
        before.clear()
        before.update({env: held(env) for env in ENVIRONMENTS})
        places.append(place)

    monkeypatch.setattr(ShapeEnv, "__init__", register)
    monkeypatch.setattr(pipeline, "check", look)
    monkeypatch.setattr(pipeline, "verifies", lambda: True)
    return places


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(48), nn.Linear(48, 80), nn.Linear(80, 48)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class Patches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Conv2d(3, 32, 8, 8), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.embed(x).flatten(2).transpose(1, 2))


MODELS: dict[str, tuple[type[nn.Module], Callable[[int], Tensor], tuple[int, ...]]] = {
    "batch and rows": (Mlp, lambda n: torch.randn(n, 60 + n, 48), (0, 1)),
    "length": (Attention, lambda n: torch.randn(2, 20 + n, 64), (1,)),
    "image": (Patches, lambda n: torch.randn(n, 3, 33 + 9 * n, 40 + 8 * n), (0, 2, 3)),
}
"""Models, their input of a size, and the axes of it that are dynamic."""
RECIPES: dict[str, Callable[[], fxquant.Recipe]] = {
    "current": lambda: fxquant.Float8CurrentScaling(fp8_dpa=True),
    "delayed": lambda: fxquant.DelayedScaling(fp8_dpa=True),
    "blocks": fxquant.Float8BlockScaling,
    "mxfp8": lambda: fxquant.MXFP8BlockScaling(fp8_dpa=True),
}


COMPILATIONS = [
    pytest.param(name, recipe, marks=[] if (i + j) % 3 < 2 else pytest.mark.sweep)
    for i, name in enumerate(MODELS)
    for j, recipe in enumerate(RECIPES)
]


@pytest.mark.parametrize(("name", "recipe"), COMPILATIONS)
def test_passes_leave_nothing_in_the_environment_of_a_compilation(name: str, recipe: str, watched: list[str]) -> None:
    torch.compiler.reset()
    kind, make, axes = MODELS[name]
    model = fxquant.compile(kind(), RECIPES[recipe](), options={"inner": "aot_eager"})
    for size in (3, 5, 6):
        x = make(size)
        for axis in axes:
            torch._dynamo.mark_dynamic(x, axis)
        model(x).square().sum().backward()
    assert not model.report().recompilations
    assert all(any(name in place for place in watched) for name in ("insert", "save_scales", "pair_directions"))


PROGRAMS = [
    pytest.param(name, recipe, marks=[] if (i + j) % 3 < 2 else pytest.mark.sweep)
    for i, name in enumerate(MODELS)
    for j, recipe in enumerate(("current", "blocks", "mxfp8"))
]


@pytest.mark.parametrize(("name", "recipe"), PROGRAMS)
def test_passes_leave_nothing_in_a_source_program(name: str, recipe: str, watched: list[str]) -> None:
    kind, make, axes = MODELS[name]
    dims = {axis: Dim(f"size{axis}", min=16 if axis else 1) for axis in axes}
    program = torch.export.export(kind(), (make(3),), dynamic_shapes=(dims,)).run_decompositions()
    (env,) = {size.node.shape_env for size in _symbols(program.graph)}
    before = held(env)
    quantized = fxquant.quantize_program(program, RECIPES[recipe]())
    lowered = fxquant.lower_program(quantized)
    assert held(env) == before
    for size in (1, 5, 6):
        x = make(size)
        want = quantized.module()(x)
        torch.testing.assert_close(lowered.module()(x), want)
        program.module()(x)
    assert all(any(name in place for place in watched) for name in ("insert", "decompose_composites", "to_aten"))


def _symbols(graph: fx.Graph) -> list[torch.SymInt]:
    values = [node.meta.get("val") for node in graph.find_nodes(op="placeholder")]
    return [size for value in values if isinstance(value, Tensor) for size in value.shape if not isinstance(size, int)]


SPECS = {
    "current": ("per_tensor_e4m3", "per_tensor_e4m3", "per_tensor_e5m2"),
    "rows": ("per_row_e4m3(pow2,torchao)",) * 3,
    "blocks": ("block_1x128_e4m3(pow2)", "block_128x128_e4m3(pow2)", "block_1x128_e4m3(pow2)"),
    "mxfp8": ("mxfp8_e4m3",) * 3,
}


def symbolic(mode: FakeTensorMode, *sizes: int, dynamic: tuple[int, ...]) -> Tensor:
    kinds = [DimDynamic.DYNAMIC if axis in dynamic else DimDynamic.STATIC for axis in range(len(sizes))]
    context: StatelessSymbolicContext[Any, Any] = StatelessSymbolicContext(dynamic_sizes=kinds)
    like = mode.from_tensor(torch.empty(sizes), source=ConstantSource("x"), symbolic_context=context)
    with mode:
        return torch.empty(*like.shape, dtype=torch.bfloat16, requires_grad=True)


def on_device(graph: fx.Graph, device: str) -> None:
    """Moves the values of a graph: torch without CUDA differentiates no tensor on it."""

    def moved(x: Tensor) -> Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)

    for node in graph.nodes:
        if "val" in node.meta:
            with on_fakes(node.meta["val"]):
                node.meta["val"] = tree_map_only(Tensor, moved, node.meta["val"])
        node.kwargs = {
            key: torch.device(device) if isinstance(value, torch.device) else value
            for key, value in node.kwargs.items()
        }


KERNELS = [
    pytest.param(name, device, dynamic, marks=[] if dynamic == ((0,), (0, 1))[(i + j) % 2] else pytest.mark.sweep)
    for i, name in enumerate(SPECS)
    for j, device in enumerate(("cpu", "cuda"))
    for dynamic in ((0,), (0, 1))
]


@pytest.mark.parametrize(("name", "device", "dynamic"), KERNELS)
def test_kernels_of_both_directions_leave_nothing(name: str, device: str, dynamic: tuple[int, ...]) -> None:
    """A gated MLP behind a norm, with its producers, residual and backward in one graph."""
    spec = str(LinearSpec(*(OperandSpec(*[QuantSpec.parse(text)] * 2) for text in SPECS[name])))
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x, dy = (symbolic(mode, 16, 34, 256, dynamic=dynamic) for _ in range(2))
    with mode:
        up, down = (torch.empty(*sizes, dtype=x.dtype, requires_grad=True) for sizes in ((512, 256), (256, 512)))
        dy = torch.empty_like(x)
    linear = torch.ops.fxquant.linear

    def step(x: Tensor, up: Tensor, down: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        h = F.layer_norm(x, (256,))
        h = F.silu(linear(h, up, None, spec)) * linear(h, up, None, spec)
        y = x + linear(F.gelu(h), down, None, spec)
        return (y, *torch.autograd.grad(y, (x, up, down), dy))

    with mode, enable_python_dispatcher():
        graph = make_fx(step, decomposition_table=dict(inductor_decompositions()))(x, up, down, dy).graph
    on_device(graph, device)
    ENVIRONMENTS.clear()
    ENVIRONMENTS.add(mode.shape_env)
    for stage in (JOINT, SPLIT):
        for each in stage:
            assert_leaves_nothing(each.run, each.name, graph, Settings())
    graph.lint()


ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for folder in ("passes", "kernels", "fxquant") for path in (ROOT / folder).rglob("*.py"))
DOORS = {"detect_fake_mode", "enable_python_dispatcher", "FakeTensorMode"}
"""What a module would run operators on fakes with, past `on_fakes`."""
OF_THEIR_OWN = {"passes/plan/trial.py", "passes/export/program_state.py"}
"""Modules with a mode of their own, in which no symbol is, and with that of a program for new inputs."""
QUESTIONS = {
    "dim", "size", "stride", "numel", "storage_offset", "element_size", "is_contiguous", "is_floating_point", 
    "is_complex", "untyped_storage",
}  # fmt: skip


def _past_the_door(tree: ast.Module) -> Iterator[str]:
    """Yields lines of a module that run operators on fakes otherwise than in a scope of `on_fakes`."""
    inside: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.With):
            contexts = [ast.unparse(item.context_expr) for item in node.items]
            if any(text.startswith("on_fakes(") for text in contexts):
                inside.update(ast.walk(node))
            if any(text.split(" or ")[0] in ("mode", "fake_mode") for text in contexts):
                yield f"{node.lineno}: with {', '.join(contexts)}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node not in inside:
            source = ast.unparse(node.func.value)
            of_node = source.startswith(("val(", "value_of(")) or source.endswith((".meta[VAL]", ".meta['val']"))
            if of_node and source.count("(") <= 1 and node.func.attr not in QUESTIONS:
                yield f"{node.lineno}: {source}.{node.func.attr}"
        elif isinstance(node, ast.alias) and node.name in DOORS:
            yield f"{node.lineno}: import {node.name}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_operators_run_on_fakes_through_one_door(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    if not name.startswith("fxquant/compat/") and name not in OF_THEIR_OWN:
        assert not list(_past_the_door(ast.parse(path.read_text(encoding="utf-8"))))
