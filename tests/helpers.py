"""What several test files need: one linear layer through the compiled path, captured graphs, and their short story."""

from __future__ import annotations

import contextlib
import io
import runpy
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import SymInt, Tensor, fx, nn
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext, StrictMinMaxConstraint
from torch.utils._sympy.value_ranges import ValueRanges
from torch.utils.checkpoint import checkpoint

from fxquant import Backend, CustomRecipe, HybridQuantizer, Quantizer, QuantizerRole, Recipe
from fxquant.backend.backend import compile_eager
from fxquant.formats import QuantSpec
from fxquant.passes.graph.names import op_name
from fxquant.passes.graph.values import value_of
from fxquant.passes.lower.few_rows import few_rows
from fxquant.passes.lower.lower import lower
from fxquant.passes.settings import Settings

Tensors = dict[str, Tensor]

NAMES = ("current_scaling", "rowwise", "float8_blockwise", "mxfp8", "nvfp4")
"""The recipes that quantize."""


class Block(nn.Module):
    """A residual block of one linear layer, whose state is `up`'s."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.gelu(self.up(x))


def calls_left(graph: fx.Graph, **options: Any) -> list[fx.Node]:
    """The calls of a graph once its GEMMs of few rows are found and operators are kernels."""
    settings = Settings(**options)
    few_rows(graph, settings)
    lower(graph, settings)
    graph.eliminate_dead_code()
    return [node for node in graph.nodes if node.op == "call_function"]


def eager_backend(recipe: Recipe | str, **options: Any) -> Backend:
    """A backend without Inductor: fast to compile, and its operators can be looked at."""
    return Backend(recipe, inner="aot_eager", **options)


class Eager(Backend):
    """Runs what it has captured and rewritten as it is: a forward has the products that AOTAutograd would leave it."""

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return gm.forward


def compiled(run: Callable[..., Any], recipe: Recipe | str, **kwargs: Any) -> Callable[..., Any]:
    """`run`, which has to be one graph, compiled with `recipe`."""
    return torch.compile(run, backend=eager_backend(recipe), fullgraph=True, **kwargs)


def per_role(**quantizers: Quantizer) -> CustomRecipe:
    """A recipe with a quantizer for each tensor type."""
    return CustomRecipe(qfactory=lambda role: quantizers[role.tensor_type])


def recipe_of(quantizer: Quantizer) -> CustomRecipe:
    """A recipe with one quantizer for all operands of linear layers."""
    return per_role(input=quantizer, weight=quantizer, grad_output=quantizer)


def hybrid(row: Quantizer, column: Quantizer, source: str = "original") -> HybridQuantizer:
    return HybridQuantizer(rowwise_quantizer=row, columnwise_quantizer=column, columnwise_source=source)


def linear_step(
    recipe: Recipe | str | None, x: Tensor, w: Tensor, dy: Tensor, bias: Tensor | None = None, **kwargs: Any
) -> Tensors:
    """Output and gradients of one nn.Linear: y, dx, dw and, with a bias, db. No recipe: torch's own aot_eager."""
    layer = nn.Linear(*w.shape[::-1], bias=bias is not None, dtype=w.dtype)
    with torch.no_grad():
        layer.weight.copy_(w)
        if bias is not None:
            layer.bias.copy_(bias)
    x = x.detach().clone().requires_grad_()
    torch.compiler.reset()
    run = torch.compile(layer, backend="aot_eager", **kwargs) if recipe is None else compiled(layer, recipe, **kwargs)
    y = run(x)
    y.backward(dy)
    result = {"y": y.detach(), "dx": x.grad, "dw": layer.weight.grad}
    return result if bias is None else {**result, "db": layer.bias.grad}


def train_step(model: nn.Module, run: Callable[..., Any], *args: Any) -> Tensors:
    """Output and every gradient of one step of `run`, a compiled `model`; the gradients are cleared."""
    output = run(*args)
    output.float().square().sum().backward()
    result = {"output": output.detach()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            result[name] = parameter.grad
            parameter.grad = None
    return result


def assert_same_bits(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    different = {key: (a[key] != b[key]).sum().item() for key in a if not torch.equal(a[key], b[key])}
    assert not different, f"elements that differ: {different}"


def stacked(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The values of a quantization state by name, those of all slots in order along the last axis."""
    names = dict.fromkeys(key.rpartition(".")[2] for key in state)
    return {name: torch.stack([state[key] for key in state if key.endswith(f".{name}")], -1) for name in names}


def unstacked(addresses: Iterable[str], **values: Tensor) -> dict[str, Tensor]:
    """The quantization state of slots, of values along the last axis."""
    return {f"{slot}.{name}": value[..., i] for i, slot in enumerate(addresses) for name, value in values.items()}


def problem(
    m: int = 64, k: int = 96, n: int = 160, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor]:
    """x [m, k], w [n, k] and dy [m, n], of normal values."""
    generator = torch.Generator().manual_seed(m + k + n)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in ((m, k), (n, k), (m, n)))


def captured(run: Callable[..., Any], *args: Any, **kwargs: Any) -> list[fx.GraphModule]:
    """The graphs that Dynamo captures of a call."""
    graphs: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    torch.compile(run, backend=backend, **kwargs)(*args)
    return graphs


class Recorder(Backend):
    """Keeps the graphs after partitioning and merging, and runs them as they are."""

    def __init__(self, recipe: Recipe | str) -> None:
        super().__init__(recipe, inner="aot_eager")
        self.graphs: list[fx.GraphModule] = []

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        def record(graph_module: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
            self.graphs.append(graph_module)
            return graph_module

        return compile_eager(gm, example_inputs, record)

    def story(self) -> str:
        return "\n".join(f"{phase(gm)}\n{story(gm)}" for gm in self.graphs)


def phase(gm: fx.GraphModule) -> str:
    backward = any(n.op == "placeholder" and n.name.startswith("tangents") for n in gm.graph.nodes)
    return "backward:" if backward else "forward:"


def story(gm: fx.GraphModule) -> str:
    """The quantizations and GEMMs of a graph, one a line, without the names that differ between torch versions.

    A tensor that comes in, or that an ordinary operator makes, is shown as its shape; ``#0`` is the first quantized
    operand, ``#0.column`` the second half of a hybrid one. What is saved for the backward is listed last.
    """
    lines, labels = [], {}

    def text(value: Any) -> str:
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], fx.Node):
            return labels.get(value[0], shape(value[0]))
        return shape(value) if isinstance(value, fx.Node) else str(value).removeprefix("torch.")

    for node in gm.graph.nodes:
        if getattr(node.target, "namespace", "") != "fxquant":
            continue
        arguments = ", ".join(text(value) for value in node.args)
        name = node.target._opname
        if "quantize" not in name or name == "dequantize":
            lines.append(f"  {name}({arguments}) -> {shape(node)}")
            continue
        label = f"#{len(set(v.partition('.')[0] for v in labels.values()))}"
        parts = sorted((user for user in node.users), key=lambda user: user.args[1])
        spec = next(arg for arg in node.args if isinstance(arg, str))
        row_parts = 3 if QuantSpec.parse(spec).row.has_global_amax else 2
        for part in parts:
            more = ".column" if name.startswith("hybrid") else ".amax"
            labels[part] = label + (more if part.args[1] >= row_parts else "")
        lines.append(f"  {label} = {name}({arguments})")
    outputs = [n for n in next(n for n in gm.graph.nodes if n.op == "output").args[0] if n is not None]
    saved = [labels[n] for n in outputs if n in labels and n.meta["val"].ndim]
    if saved:
        lines.append(f"  saves {', '.join(dict.fromkeys(saved))}")
    return "\n".join(lines)


def shape(node: fx.Node) -> str:
    return str(list(node.meta["val"].shape))


def listing(graph: fx.Graph) -> str:
    """The nodes of a graph, one a line, by number: names of nodes differ between versions of torch."""
    numbers = {node: f"%{i}" for i, node in enumerate(graph.nodes)}

    def text(value: Any) -> str:
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(text, value))}]"
        return numbers[value] if isinstance(value, fx.Node) else str(value).removeprefix("torch.")

    lines = []
    for node, number in numbers.items():
        args = node.args[:1] if node.target is getattr else node.args  # since torch 2.14 an attribute is an operator
        arguments = ", ".join([*map(text, args), *(f"{key}={text(x)}" for key, x in node.kwargs.items())])
        value = value_of(node) if node.op == "placeholder" else None
        call = f"input {list(value.shape)}" if isinstance(value, Tensor) else op_name(node).removeprefix("fxquant::")
        lines.append(f"return {arguments}" if node.op == "output" else f"{number} = {call}({arguments})")
    return "\n".join(textwrap.fill(line.removesuffix("()"), 100, subsequent_indent="    ") for line in lines)


def recorded_story(model: Callable[..., Any], recipe: Recipe | str, *args: Any) -> str:
    """The story of a forward and, where something requires grad, a backward."""
    backend = Recorder(recipe)
    output = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(*args)
    leaves = [output] if isinstance(output, Tensor) else output
    if any(leaf.requires_grad for leaf in leaves):
        sum(leaf.sum() for leaf in leaves).backward()
    return backend.story()


class Asked:
    """A factory that notes what it was asked and answers as `recipe` does."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.roles: list[QuantizerRole] = []

    def __call__(self, role: QuantizerRole) -> Quantizer:
        self.roles.append(role)
        return self.recipe.quantizer(role)


class OneLinear(nn.Module):
    """One layer, `fc`."""

    def __init__(self, features: int = 64) -> None:
        super().__init__()
        self.fc = nn.Linear(features, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


class Region(nn.Module):
    """A layer in a region that torch captures once for all that are alike."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class GatedBlock(nn.Module):
    """A residual SwiGLU block behind a norm."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(size)
        self.gate, self.up = (nn.Linear(size, 3 * size, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * size, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class RecomputableMlp(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.recompute = nn.Linear(64, 96), nn.Linear(96, 32), recompute

    def body(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False) if self.recompute else self.body(x)


def recomputable_mlp(recompute: bool = False) -> RecomputableMlp:
    torch.manual_seed(0)
    return RecomputableMlp(recompute)


class TwoLinears(nn.Module):
    """Two layers, equal unless `inner` is another size, for a `forward` of a test's own."""

    def __init__(self, size: int = 32, inner: int | None = None) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(size, inner or size), nn.Linear(inner or size, size)


class BrokenLinears(TwoLinears):
    """A break of the graph between the two layers."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        torch._dynamo.graph_break()
        return self.b(x)


class LayerInABranch(TwoLinears):
    """A region that takes no state: `b` runs in a branch of cond."""

    def forward(self, x: Tensor) -> Tensor:
        return self.a(torch.cond(x.sum() > 0, lambda x: self.b(x), lambda x: x + 1, (x,)))


class OneWeight(nn.Module):
    """A weight of a layer that a test spells in its own way."""

    def __init__(self, *sizes: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*sizes).to(dtype))


class OneGroupedWeight(OneWeight):
    """The weights [G, K, N] of experts."""

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        return torch._grouped_mm(x, self.weight, offs=offs)


def size_up_to(mode: FakeTensorMode, hint: int, most: int) -> int | SymInt:
    """Returns a symbolic size, between 1 and `most`, of graphs that are traced in `mode`, which is not active yet."""
    within = StrictMinMaxConstraint(vr=ValueRanges(1, most), warn_only=False)
    dims: StatelessSymbolicContext[Any, Any] = StatelessSymbolicContext([DimDynamic.DYNAMIC], constraint_sizes=[within])
    return mode.from_tensor(torch.empty(hint), source=ConstantSource("rows"), symbolic_context=dims).shape[0]


def gathered(graph: fx.Graph) -> list[fx.Node]:
    """The gathers of a graph over the ranks of a group."""
    target = torch.ops._c10d_functional.all_gather_into_tensor.default
    return [*graph.find_nodes(op="call_function", target=target)]


def assembled(ptx: str) -> str:
    """Returns what Triton's assembler says of a program for Hopper: registers, spills and advice."""
    import triton

    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
        command = [str(ptxas), "-arch=sm_90a", "-v", "-o", "/dev/null", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def refusal(script: Path, *arguments: str) -> str:
    """Returns the words of a script that ends with status 2, run in this process."""
    error = io.StringIO()
    with (
        mock.patch.object(sys, "argv", [str(script), *arguments]),
        mock.patch.object(sys, "path", [str(script.parent), *sys.path]),
        contextlib.redirect_stderr(error),
        pytest.raises(SystemExit) as ended,
    ):
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 2
    return error.getvalue()
