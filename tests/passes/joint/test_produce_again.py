"""The backward makes quantized norms' results and attention's output again, of tensors that it keeps anyway."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from helpers import assert_same_bits, listing, train_step
from saved import saved_tensors
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fxquant import Backend
from fxquant.bench.training import Stack
from fxquant.compat.private import (
    aot_autograd,
    inductor_config,
    inductor_decompositions,
    make_boxed_func,
    tree_leaves,
)
from fxquant.passes.graph.names import fxquant_op, op_name
from fxquant.passes.joint.produce_again import produce_again
from fxquant.passes.lower.directions import pair_directions
from fxquant.passes.lower.lower import lower
from fxquant.passes.pipeline import Partition
from fxquant.passes.settings import Settings

CPU = Settings(device="cpu")
ROWS = 128
SMALL = Stack(blocks=1, hidden=128, ffn=384, heads=4, kv_heads=2, batch=2, length=64)
_ops = torch.ops.fxquant


def normed(x: Tensor, weight: Tensor, scale: Tensor, tangents: Tensor) -> list[Tensor]:
    """A norm that two linears read, and the part of a backward that reads their input in columns."""
    wide = x.float()
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    y = (wide * rstd * weight).to(x.dtype)
    text = "per_tensor_e4m3"
    shape = (x.shape[0] * x.shape[1], x.shape[2])
    rows = [_ops.quantize(y.view(shape), text, "rowwise", scale)[0] for _ in range(2)]
    columns = _ops.quantize(y.view(shape), text, "columnwise", scale)
    grad = _ops.scaled_mm(_ops.quantize(tangents, text, "columnwise", scale), columns, text, text, None, x.dtype, False)
    return [*rows, grad]


def with_backward(x: Tensor, weight: Tensor, scale: Tensor, tangents: Tensor) -> list[Tensor]:
    """The same, and a part of the norm's own backward."""
    return [*normed(x, weight, scale, tangents), tangents.view(x.shape) * x]


def joint(run: Callable[..., Any], mode: str = "fake") -> fx.Graph:
    x, tangents = torch.randn(2, ROWS // 2, 64).bfloat16(), torch.randn(ROWS, 64).bfloat16()
    table = dict(inductor_decompositions())
    return make_fx(run, tracing_mode=mode, decomposition_table=table)(
        x, torch.ones(64).bfloat16(), torch.ones(1), tangents
    ).graph


def test_a_norm_is_made_again() -> None:
    graph = joint(with_backward)
    assert produce_again(graph, CPU) == 1
    made = [node for node in graph.nodes if fxquant_op(node) == "produce_quantize"]
    assert [node.args[1] for node in made] == [
        "rms_norm rowwise=per_tensor_e4m3", "rms_norm columnwise=per_tensor_e4m3"
    ]  # fmt: skip
    assert ["recompute" in node.meta for node in made] == [False, True]
    assert_expected_inline(listing(graph), """\
%0 = input [2, 64, 64]
%1 = input [64]
%2 = input [1]
%3 = input [128, 64]
%4 = prims::convert_element_type(%0, float32)
%5 = pow(%4, 2)
%6 = mean(%5, [-1], True)
%7 = add(%6, 1e-05)
%8 = rsqrt(%7)
%9 = reshape(%0, [128, 64])
%10 = reshape(%8, [128, 1])
%11 = produce_quantize([%9, %10, %1], rms_norm rowwise=per_tensor_e4m3, [%2], [None], False)
%12 = getitem(%11, 0)
%13 = getitem(%11, 1)
%14 = reshape(%0, [128, 64])
%15 = reshape(%8, [128, 1])
%16 = produce_quantize([%14, %15, %1], rms_norm columnwise=per_tensor_e4m3, [None], [%2], False)
%17 = getitem(%16, 0)
%18 = getitem(%16, 1)
%19 = quantize(%3, per_tensor_e4m3, columnwise, %2)
%20 = getitem(%19, 0)
%21 = getitem(%19, 1)
%22 = scaled_mm([%20, %21], [%17, %18], per_tensor_e4m3, per_tensor_e4m3, None, bfloat16, False)
%23 = view(%3, [2, 64, 64])
%24 = mul(%23, %0)
return [%12, %12, %22, %24]""")  # fmt: skip
    before = listing(graph)
    assert produce_again(graph, CPU) == 0 and listing(graph) == before
    for settings in (Settings(), replace(CPU, save="least"), replace(CPU, exact_recompute=True)):
        assert produce_again(joint(with_backward), settings) == 0


def scaled_over_ranks(x: Tensor, weight: Tensor, scale: Tensor, tangents: Tensor) -> list[Tensor]:
    """The norm, with a scale of its own amax behind something, as where ranks have one scale."""
    y = (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5) * weight).to(x.dtype).view(ROWS, -1)
    text = "per_tensor_e4m3"
    scale = _ops.scale_from_amax(_ops.amax(y) * 2, text)
    row, columns = (_ops.quantize(y, text, direction, scale) for direction in ("rowwise", "columnwise"))
    grad = _ops.scaled_mm(_ops.quantize(tangents, text, "columnwise", scale), columns, text, text, None, x.dtype, False)
    return [row[0], grad, tangents.view(x.shape) * x]


def test_an_amax_that_is_no_record_stays() -> None:
    graph = joint(scaled_over_ranks)
    assert produce_again(graph, CPU) == 1
    assert [node.args[-1] for node in graph.nodes if fxquant_op(node) == "produce_quantize"] == [False, False]
    assert sum(fxquant_op(node) == "amax" for node in graph.nodes) == 1


def joined(o: Tensor, scale: Tensor, tangents: Tensor) -> list[Tensor]:
    """Heads side by side as a linear reads them, and the part of a backward that reads them in columns."""
    text, x = "per_tensor_e4m3", o.transpose(1, 2).contiguous().view(ROWS, -1)
    scale = _ops.scale_from_amax(_ops.amax(x), text)
    row, columns = (_ops.quantize(x, text, direction, scale) for direction in ("rowwise", "columnwise"))
    grad = _ops.scaled_mm(_ops.quantize(tangents, text, "columnwise", scale), columns, text, text, None, x.dtype, False)
    return [row[0], grad, tangents.view(2, 2, ROWS // 2, 32) * o]


def test_heads_that_are_joined_are_read_from_memory() -> None:
    o, tangents = torch.randn(2, 2, ROWS // 2, 32).bfloat16(), torch.randn(ROWS, 64).bfloat16()
    graph = make_fx(joined, tracing_mode="fake", decomposition_table=dict(inductor_decompositions()))(
        o, torch.ones(1), tangents
    ).graph
    assert produce_again(graph, CPU) == 1
    (amax,) = (node for node in graph.nodes if fxquant_op(node) == "amax")
    assert amax.args[0].op == "placeholder" and not any(op_name(node) == "clone" for node in graph.nodes)


def test_sizes_that_are_not_known_stay_nodes() -> None:
    graph = joint(with_backward, "symbolic")
    assert produce_again(graph, CPU) == 1
    leaves = [leaf for node in graph.nodes for leaf in tree_leaves(node.args)]
    assert not any(isinstance(leaf, torch.SymInt) for leaf in leaves) and any(
        op_name(n) == "reshape" for n in graph.nodes
    )


def test_what_the_backward_does_not_keep_is_saved() -> None:
    graph = joint(normed)
    before = listing(graph)
    assert produce_again(graph, CPU) == 0 and listing(graph) == before


class Split(Backend):
    """Runs the forward and the backward as Inductor would get them, `lowered` or not, and keeps them."""

    def __init__(self, recipe: str, save: str, lowered: bool) -> None:
        super().__init__(recipe, inner="aot_eager", save=save)
        self.graphs: list[list[str]] = []
        self.lowered = lowered

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        def compiler(graph_module: fx.GraphModule, _inputs: Sequence[Any]) -> Any:
            pair_directions(graph_module.graph, CPU)
            self.graphs.append([fxquant_op(node) for node in graph_module.graph.nodes if fxquant_op(node)])
            if self.lowered:
                lower(graph_module.graph, Settings())
            graph_module.recompile()
            return make_boxed_func(graph_module)

        run = aot_autograd(
            fw_compiler=compiler, bw_compiler=compiler, partition_fn=Partition(replace(self.settings, device="cpu")),
            decompositions=dict(inductor_decompositions()),
        )  # fmt: skip
        return run(gm, list(example_inputs))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("recipe", "save", "count"), [("delayed_scaling", "less", 4), ("float8_blockwise", "quantized", 3)]
)
def test_a_decoder_trains_with_the_same_bits(recipe: str, save: str, count: int) -> None:
    """Two norms and attention are made again, and with ``less`` SiLU x factor."""
    found = []
    for without in ("produce_again", ""):
        torch.compiler.reset()
        torch.manual_seed(0)
        model, backend = SMALL.model(), Split(recipe, save, lowered=not without)
        run = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
        with inductor_config.patch(disabled_passes=without):
            steps = []
            for _ in range(2):
                x = SMALL.input().requires_grad_()
                steps.append({**train_step(model, run, x), "x": x.grad})
        found.append({f"{key} {i}": value for i, step in enumerate(steps) for key, value in step.items()})
        found[-1] |= backend.state_dict()
    forward, backward = backend.graphs
    assert [names.count("produce_quantize") for names in (forward, backward)] == [count, count]
    assert_same_bits(*found)


class Autocast(nn.Module):
    """A decoder with float32 parameters and sums, whose linear layers round what they read."""

    def __init__(self) -> None:
        super().__init__()
        self.model = SMALL.model().float()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("recipe", ["current_scaling", "float8_blockwise"])
def test_of_float32_parameters_no_payload_is_saved(recipe: str) -> None:
    """Norms in float32 are made again too."""

    def make() -> tuple[nn.Module, Tensor]:
        return Autocast(), SMALL.input().float()

    backend = saved_tensors(make, recipe, device="cpu")
    assert not [x for x in backend.saved if x.dtype.itemsize == 1], [(x.shape, x.dtype) for x in backend.saved]
    made = [str(n.args[1]).split()[0] for n in backend.backward.graph.nodes if fxquant_op(n) == "produce_quantize"]
    assert sorted(made) == ["joined_heads", "rms_norm_wide", "rms_norm_wide", "silu_mul"]


@pytest.mark.parametrize(
    ("recipe", "save"), [("current_scaling", "less"), ("delayed_scaling", "quantized"), ("mxfp8", "quantized")]
)
def test_only_the_product_of_a_block_is_saved_as_a_payload(recipe: str, save: str) -> None:
    """bfloat16 of queries, keys, values, attention's output, gate, up, sums; and SiLU x factor quantized.

    With ``less`` not that either.
    """

    def make() -> tuple[nn.Module, Tensor]:
        return SMALL.model(), SMALL.input()

    rows, (hidden, ffn) = SMALL.batch * SMALL.length, (SMALL.hidden, SMALL.ffn)
    total = saved_tensors(make, recipe, device="cpu", save=save).total
    payload = 0 if save == "less" else ffn
    matrices = SMALL.blocks * (2 * (4 * hidden + 2 * ffn) + payload) + 2 * (SMALL.blocks - 1) * hidden
    vectors = SMALL.blocks * (SMALL.heads + 2)
    scales = SMALL.blocks * ffn * rows // 32 if recipe == "mxfp8" else 0
    assert 0 <= total - rows * (matrices + 4 * vectors) - scales < 1024
