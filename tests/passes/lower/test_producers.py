"""Producers fused with quantizations, in graphs as Inductor decomposes them. A CPU stands in for the GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from helpers import GatedBlock, assert_same_bits, shape, train_step
from torch import Tensor, fx, nn
from torch.nn.functional import gelu, silu

from fxquant import Backend
from fxquant.compat.private import (
    aot_autograd,
    inductor_decompositions,
    make_boxed_func,
    make_fx,
    min_cut_rematerialization_partition,
)
from fxquant.passes.graph.considered import not_fused
from fxquant.passes.lower.directions import pair_directions
from fxquant.passes.lower.lower import lower
from fxquant.passes.lower.producers import fuse_producers
from fxquant.passes.settings import Settings

aten, quantize, amax = torch.ops.aten, torch.ops.fxquant.quantize, torch.ops.fxquant.amax
BLOCK, TENSOR, DELAYED = "block_1x128_e4m3(pow2)", "per_tensor_e4m3", "per_tensor_e4m3(slot={})"
CPU = Settings(device="cpu")
ROWS = "per_row_e4m3(pow2,torchao)"


def both(x: Tensor, spec: str, state: Tensor | None = None) -> list[Tensor]:
    return [part for direction in ("rowwise", "columnwise") for part in quantize(x, spec, direction, state)]


def tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(each, generator=generator).bfloat16() for each in shapes]


def story(graph: fx.Graph) -> str:
    """fxquant's operators: of a fused one the producer, the shapes of its inputs, and a line for each side."""
    lines = []
    for node in graph.nodes:
        if getattr(node.target, "namespace", "") == "fxquant" and node.target._opname != "produce_quantize":
            lines.append(node.target._opname)
        elif getattr(node.target, "namespace", "") == "fxquant":
            inputs, spec, row_states, column_states, record = node.args
            producer, *sides = spec.split()
            lines.append(f"{producer}({', '.join(map(shape, inputs))}){' and amax' if record else ''}")
            for side in sides:
                given = filter(None, row_states if side.startswith("row") else column_states)
                by = ", ".join(state.args[0].name for state in given)
                lines.append(f"  {side}" + (f" by {by}" if by else ""))
    return "\n".join(lines)


def traced(run: Callable[..., list[Tensor]], *args: Tensor) -> fx.GraphModule:
    """A function as Inductor would have it, merged."""
    table = dict(inductor_decompositions())
    gm = make_fx(run, tracing_mode="fake", decomposition_table=table)(*args)
    pair_directions(gm.graph, Settings())
    return gm


def fused(run: Callable[..., list[Tensor]], *args: Tensor, settings: Settings = CPU) -> str:
    """The story of a traced function after the pass, which, once it is lowered, gives the same bits as before."""
    gm = traced(run, *args)
    wanted = gm(*args)
    fuse_producers(gm.graph, settings)
    told = story(gm.graph)
    lower(gm.graph, Settings())
    gm.recompile()
    assert_same_bits(*({str(i): part.float() for i, part in enumerate(parts)} for parts in (wanted, gm(*args))))
    return told


def test_silu_mul_in_blocks() -> None:
    def run(gate: Tensor, up: Tensor) -> list[Tensor]:
        return both((silu(gate) * up).reshape(-1, 128), BLOCK)

    assert_expected_inline(fused(run, *tensors((2, 16, 128), (2, 16, 128))), """\
silu_mul([32, 128], [32, 128])
  rowwise=block_1x128_e4m3(pow2)
  columnwise=block_1x128_e4m3(pow2)""")  # fmt: skip


def test_gradients_of_both_factors() -> None:
    def run(gate: Tensor, up: Tensor, grad: Tensor, scale: Tensor) -> list[Tensor]:
        grad, gate, up = (x.reshape(2, 16, 128) for x in (grad, gate, up))
        grad_up = (grad * silu(gate)).reshape(32, 128)
        grad_gate = aten.silu_backward(grad * up, gate).reshape(32, 128)
        if scale.numel() == 1:
            return [*both(grad_up, BLOCK), *both(grad_gate, BLOCK)]
        first = [amax(grad_up), *both(grad_up, DELAYED.format(5), scale.narrow(0, 5, 1))]
        return [*first, amax(grad_gate), *both(grad_gate, DELAYED.format(2), scale.narrow(0, 2, 1))]

    inputs = tensors((32, 128), (32, 128), (32, 128))
    assert_expected_inline(fused(run, *inputs, torch.ones(1)), """\
silu_mul_grad([32, 128], [32, 128], [32, 128])
  rowwise=block_1x128_e4m3(pow2)
  columnwise=block_1x128_e4m3(pow2)""")  # fmt: skip
    assert_expected_inline(fused(run, *inputs, torch.arange(1.0, 9)), """\
silu_mul_grad([32, 128], [32, 128], [32, 128]) and amax
  rowwise=per_tensor_e4m3(slot=2) by scale_1, scale_1
  columnwise=per_tensor_e4m3(slot=2) by scale_1, scale_1""")  # fmt: skip


def test_scales_of_the_tensors_own_amax() -> None:
    """Nothing but its amax is taken of the tensor before, where that saves more than it costs to read inputs twice."""

    def run(gate: Tensor, up: Tensor, grad: Tensor) -> list[Tensor]:
        scale = torch.ops.fxquant.scale_from_amax(amax(h := silu(gate) * up), TENSOR)
        backward = [aten.silu_backward(grad * up, gate), grad * silu(gate)]
        return [*both(h, TENSOR, scale), *(part for y in backward for part in both(y, TENSOR))]

    assert_expected_inline(fused(run, *tensors((32, 128), (32, 128), (32, 128))), """\
amax
scale_from_amax
hybrid_quantize
silu_mul_grad([32, 128], [32, 128], [32, 128])
  rowwise=per_tensor_e4m3
  columnwise=per_tensor_e4m3""")  # fmt: skip


def test_a_scale_of_the_tensor_beside_those_of_blocks() -> None:
    def run(x: Tensor, rstd: Tensor, weight: Tensor) -> list[Tensor]:
        y = (x.float() * rstd.float() * weight).to(x.dtype)
        return torch.ops.fxquant.hybrid_quantize(y, TENSOR, BLOCK)  # type: ignore[no-any-return]

    x, rstd, weight = tensors((32, 128), (32, 1), (128,))
    assert_expected_inline(fused(run, x, rstd.float(), weight), """\
amax
scale_from_amax
rms_norm([32, 128], [32, 1], [128])
  rowwise=per_tensor_e4m3 by amax_default
  columnwise=block_1x128_e4m3(pow2)""")  # fmt: skip


def test_a_norm_in_float32_that_autocast_rounds() -> None:
    def run(x: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
        rms = nn.functional.rms_norm(x, (128,), weight, 1e-5).bfloat16()
        layer = nn.functional.layer_norm(x, (128,), weight, bias).bfloat16()
        llama = (weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)))).bfloat16()
        return [*both(llama, BLOCK), *both(rms, TENSOR), *both(layer, BLOCK)]

    wide = [x.float() for x in tensors((32, 128), (128,), (128,))]
    assert_expected_inline(fused(run, *wide), """\
rms_norm_wide([32, 128], [32, 1], [128])
  rowwise=block_1x128_e4m3(pow2)
  columnwise=block_1x128_e4m3(pow2)
amax
scale_from_amax
rms_norm_wide([32, 128], [32, 1], [128])
  rowwise=per_tensor_e4m3 by amax_default
  columnwise=per_tensor_e4m3 by amax_default
layer_norm_wide([32, 128], [32, 1], [32, 1], [128], [128])
  rowwise=block_1x128_e4m3(pow2)
  columnwise=block_1x128_e4m3(pow2)""")  # fmt: skip


def test_scales_of_rows() -> None:
    def run(gate: Tensor, up: Tensor, grad: Tensor) -> list[Tensor]:
        return [*both(silu(gate) * up, ROWS), *both(gelu(grad), ROWS)]

    assert_expected_inline(fused(run, *tensors((32, 128), (32, 128), (32, 128))), """\
silu_mul([32, 128], [32, 128])
  rowwise=per_row_e4m3(pow2,torchao)
  columnwise=per_row_e4m3(pow2,torchao)
hybrid_quantize""")  # fmt: skip


def test_heads_are_joined_by_the_cast() -> None:
    """Which reads them as attention left them, and so does the amax."""

    def run(heads: Tensor, scale: Tensor) -> list[Tensor]:
        flat = lambda: heads.transpose(1, 2).flatten(2).reshape(32, 64)  # noqa: E731
        if scale.numel() == 1:
            return [*both(flat(), BLOCK), *both(flat() + 0, TENSOR)]
        own = torch.ops.fxquant.scale_from_amax(amax(x := flat()), TENSOR)
        return both(x, TENSOR, own)

    (heads,) = tensors((2, 4, 16, 16))
    assert_expected_inline(fused(run, heads, torch.ones(1)), """\
joined_heads([2, 4, 16, 16])
  rowwise=block_1x128_e4m3(pow2)
  columnwise=block_1x128_e4m3(pow2)
hybrid_quantize""")  # fmt: skip
    assert_expected_inline(fused(run, heads, torch.ones(2)), """\
amax
scale_from_amax
joined_heads([2, 4, 16, 16])
  rowwise=per_tensor_e4m3 by amax
  columnwise=per_tensor_e4m3 by amax""")  # fmt: skip


def test_the_amax_that_is_recorded_comes_with_the_cast() -> None:
    def run(x: Tensor, w: Tensor, scale: Tensor) -> list[Tensor]:
        y, z = x + 1, x.abs()
        weight = [amax(w), *quantize(w, DELAYED.format(0), "rowwise", scale.narrow(0, 0, 1))]
        made = [amax(y), *both(y, DELAYED.format(1), scale.narrow(0, 1, 1)), y]
        rowwise = [amax(z), *quantize(z, DELAYED.format(2), "rowwise", scale.narrow(0, 2, 1))]
        return [*weight, *made, *rowwise]

    told = fused(run, *tensors((32, 128), (48, 128)), torch.arange(1.0, 4))
    assert_expected_inline(told, """\
identity([48, 128]) and amax
  rowwise=per_tensor_e4m3(slot=0) by scale_1
identity([32, 128]) and amax
  rowwise=per_tensor_e4m3(slot=1) by scale_1
  columnwise=per_tensor_e4m3(slot=1) by scale_1
amax
quantize""")  # fmt: skip


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_and_its_gradient(approximate: str) -> None:
    def run(x: Tensor, grad: Tensor) -> list[Tensor]:
        backward = aten.gelu_backward(grad, x, approximate=approximate)
        return [*both(gelu(x, approximate=approximate), BLOCK), *both(backward, BLOCK)]

    suffix = "_tanh" if approximate == "tanh" else ""
    told = fused(run, *tensors((32, 128), (32, 128)))
    assert f"gelu{suffix}([32, 128])" in told and f"gelu{suffix}_grad([32, 128], [32, 128])" in told, told


def test_norms() -> None:
    def run(x: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
        rms = nn.functional.rms_norm(x, (128,), weight, 1e-5)
        by_hand = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
        layer = nn.functional.layer_norm(x, (128,), weight, bias)
        norms = (rms, weight * by_hand.to(x.dtype), layer)
        return [part for y in norms for part in both(y.reshape(-1, 128), BLOCK)]

    assert_expected_inline(fused(run, *tensors((2, 16, 128), (128,), (128,))), """\
rms_norm([32, 128], [32, 1], [128])
  rowwise=block_1x128_e4m3(pow2)
  columnwise=block_1x128_e4m3(pow2)
rms_norm_rounded([32, 128], [32, 1], [128])
  rowwise=block_1x128_e4m3(pow2)
  columnwise=block_1x128_e4m3(pow2)
layer_norm([32, 128], [32, 1], [32, 1], [128], [128])
  rowwise=block_1x128_e4m3(pow2)
  columnwise=block_1x128_e4m3(pow2)""")  # fmt: skip


def test_a_norm_whose_rows_alone_are_wanted_after_its_amax() -> None:
    """As a forward does it whose backward quantizes again; few rows have kernels of their own."""

    def run(x: Tensor, weight: Tensor) -> list[Tensor]:
        y = nn.functional.rms_norm(x, (128,), weight, 1e-5)
        return quantize(y.reshape(-1, 128), TENSOR, "rowwise")  # type: ignore[no-any-return]

    few, many = tensors((2, 32, 128), (2, 40, 128))
    weight = torch.ones(128, dtype=torch.bfloat16)
    exact = Settings(device="cpu", exact_recompute=True)
    assert not fuse_producers(traced(run, few, weight).graph, exact)
    assert_expected_inline(fused(run, many, weight, settings=exact), """\
amax
scale_from_amax
rms_norm([80, 128], [80, 1], [128])
  rowwise=per_tensor_e4m3 by amax_default""")  # fmt: skip


def test_what_does_not_pay_or_is_not_ours_is_left_alone() -> None:
    gate, up = tensors((32, 128), (32, 128))

    def cases() -> Any:
        h = lambda gate, up: silu(gate) * up  # noqa: E731
        yield "something else reads what", lambda g, u: [*both(y := h(g, u), BLOCK), y.sum(0)], (gate, up)
        yield "Inductor casts rowwise", lambda g, u: quantize(h(g, u), BLOCK, "rowwise"), (gate, up)
        yield "no kernel casts to nvfp4", lambda g, u: both(h(g, u), "nvfp4"), (gate, up)
        yield (
            "computing it twice, once for its amax, is slower (silu_mul)",
            lambda g, u: both(h(g, u), TENSOR),
            (gate, up),
        )
        yield "not 2 axes of float32", lambda g, u: both(h(g, u), BLOCK), (gate.float(), up.float())
        yield "not 3 axes of bfloat16", lambda g, u: both(h(g, u)[None], BLOCK), (gate, up)
        yield "no kernel computes what it quantizes", lambda g, u: both(silu(g) + u, BLOCK), (gate, up)
        yield "no kernel computes", lambda g, u: both(h(g.t(), u.t()), BLOCK), (gate, up)

    for reason, run, inputs in cases():
        assert reason in left(run, *inputs)
    assert not left(lambda g: both(g, BLOCK), gate), "nothing computes an input"
    run = lambda g, u: both(silu(g) * u, BLOCK)  # noqa: E731
    assert not left(run, gate, up, settings=Settings()), "another device"
    exact = Settings(device="cpu", exact_recompute=True)
    assert "must have the bits of Inductor's" in left(run, gate, up, settings=exact)
    graph = traced(run, gate, up).graph
    assert fuse_producers(graph, CPU) == 1 and not not_fused(graph)


def left(run: Callable[..., list[Tensor]], *inputs: Tensor, settings: Settings = CPU) -> str:
    """The reason why the one quantization of a function stays; empty if nothing was considered."""
    graph = traced(run, *inputs).graph
    assert not fuse_producers(graph, settings)
    reasons = not_fused(graph)
    assert len(reasons) <= 1 and all(each.step == "fuse_producers" for each in reasons)
    return "".join(each.reason for each in reasons)


class Decomposed(Backend):
    """Runs the forward and the backward graph as Inductor would get them: lowered with the pass, or without both."""

    def __init__(self, recipe: str, *, fuse: bool) -> None:
        super().__init__(recipe, inner="aot_eager")
        self.fuse, self.count = fuse, 0

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        def compiler(graph_module: fx.GraphModule, _inputs: Sequence[Any]) -> Any:
            pair_directions(graph_module.graph, Settings())
            if self.fuse:
                self.count += fuse_producers(graph_module.graph, CPU)
                lower(graph_module.graph, Settings())
            graph_module.recompile()
            return make_boxed_func(graph_module)

        run = aot_autograd(
            fw_compiler=compiler,
            bw_compiler=compiler,
            partition_fn=min_cut_rematerialization_partition,
            decompositions=dict(inductor_decompositions()),
        )
        return run(gm, list(example_inputs))  # type: ignore[no-any-return]


_MORE = (("current_scaling", 3), ("rowwise", 2))
RECIPES = [
    ("float8_blockwise", 4), ("delayed_scaling", 8), *(pytest.param(*case, marks=pytest.mark.sweep) for case in _MORE)
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "count"), RECIPES)
def test_a_block_trains_as_without_the_pass(recipe: str, count: int) -> None:
    x, seen = tensors((2, 128, 128))[0], []
    for fuse in (False, True):
        torch.manual_seed(0)
        model, backend = GatedBlock(128).bfloat16(), Decomposed(recipe, fuse=fuse)
        run = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        steps = [{**train_step(model, run, each), "dx": each.grad} for each in inputs]
        seen.append({f"{key} {i}": value for i, step in enumerate(steps) for key, value in step.items()})
        torch.compiler.reset()
    assert backend.count == count
    assert_same_bits(*seen)
