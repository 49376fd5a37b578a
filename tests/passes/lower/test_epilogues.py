"""GEMMs fused with what reads them, in graphs as Inductor decomposes them. A CPU stands in for the GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from helpers import TwoLinears, shape
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import gelu, relu, silu

import fxquant
from fxquant.compat.private import inductor_decompositions, make_fx, triton_kernel_wrapper_functional
from fxquant.cost.gemms import choose_gemm
from fxquant.kernels.linear import timing as gemm_timing
from fxquant.kernels.linear.choice import GemmKernel
from fxquant.kernels.linear.problem import Problem, Times
from fxquant.passes.lower.directions import pair_directions
from fxquant.passes.lower.epilogues import fuse_epilogues
from fxquant.passes.lower.lower import lower
from fxquant.passes.settings import Settings

SPEC = "per_tensor_e4m3"
ops = torch.ops.fxquant


def tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(each, generator=generator).bfloat16() for each in shapes]


def linear(x: Tensor, w: Tensor, bias: Tensor | None = None, spec: str = SPEC) -> Tensor:
    left, right = ops.quantize(x.reshape(-1, x.shape[-1]), spec, "rowwise"), ops.quantize(w, spec, "rowwise")
    y = ops.scaled_mm(left, right, spec, spec, bias, torch.bfloat16, True)
    return y.reshape(*x.shape[:-1], w.shape[0])


def traced(run: Callable[..., Any], *args: Tensor) -> fx.GraphModule:
    """A function as Inductor would have it, merged."""
    table = dict(inductor_decompositions())
    gm = make_fx(run, tracing_mode="fake", decomposition_table=table)(*args)
    pair_directions(gm.graph, Settings())
    return gm


def story(graph: fx.Graph) -> str:
    """GEMMs and amaxes; of a fused one what comes behind the product."""
    lines = []
    for node in graph.nodes:
        if getattr(node.target, "namespace", "") != "fxquant" or node.target._opname == "quantize":
            continue
        line = node.target._opname
        if line == "scaled_mm":
            line = f"{line} of {node.args[2]} {shape(node.args[0][1])}"
        if line == "fused_scaled_mm":
            _, _, _, _, bias, _, _, activation, residual, record = node.args
            parts = ["+ bias"] * (bias is not None) + [activation] * bool(activation)
            parts += [] if residual is None else [f"+ {shape(residual)}"]
            parts += ["amax"] * record
            line = ", ".join([line, *parts])
        lines.append(line)
    return "\n".join(lines)


def fused(run: Callable[..., Any], *args: Tensor, gemm: str = "triton") -> str:
    """The story of a traced function after the pass, which, once it is lowered, computes the same as before.

    To the bit, but for biases that were added to a rounded product.
    """
    gm = traced(run, *args)
    wanted = gm(*args)
    fuse_epilogues(gm.graph, Settings(gemm=gemm, device="cpu"))
    told = story(gm.graph)
    lower(gm.graph, Settings())
    gm.recompile()
    near = 2**-6 if "+ bias" in told else 0.0
    for part, want in zip(gm(*args), wanted, strict=True):
        torch.testing.assert_close(part.float(), want.float(), rtol=near, atol=near)
    return told


X, W, BIAS, RESIDUAL = (2, 40, 64), (48, 64), (48,), (2, 40, 48)


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu", "relu"])
def test_bias_activation_residual_and_amax(name: str) -> None:
    run = {"gelu": gelu, "gelu_tanh": lambda y: gelu(y, approximate="tanh"), "silu": silu, "relu": relu}[name]

    def layer(x: Tensor, w: Tensor, bias: Tensor, residual: Tensor) -> list[Tensor]:
        y = residual + run(linear(x, w, bias))
        return [y, ops.amax(y.reshape(-1, 48))]

    assert fused(layer, *tensors(X, W, BIAS, RESIDUAL)) == f"fused_scaled_mm, + bias, {name}, + [80, 48], amax"


def test_a_linear_without_anything_is_still_a_choice() -> None:
    def layer(x: Tensor, w: Tensor, bias: Tensor) -> list[Tensor]:
        return [linear(x, w), linear(x, w) + bias]

    assert_expected_inline(fused(layer, *tensors(X, W, BIAS)), """\
fused_scaled_mm
fused_scaled_mm, + bias""")  # fmt: skip


def test_gradients_of_an_input_are_summed_by_the_gemms() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> list[Tensor]:
        return [linear(q, w) + linear(k, w) + linear(v, w)]

    assert_expected_inline(fused(attention, *tensors(X, X, X, W)), """\
fused_scaled_mm
fused_scaled_mm, + [80, 48]
fused_scaled_mm, + [80, 48]""")  # fmt: skip


def test_quantizations_take_their_scale_of_the_amax() -> None:
    def layers(x: Tensor, w: Tensor, again: Tensor) -> list[Tensor]:
        y = linear(x, w)
        z = linear(relu(y), again)
        return [z, *ops.hybrid_quantize(z.reshape(-1, 64), SPEC, "per_tensor_e5m2(pow2)")]

    x, w, again = tensors(X, W, (64, 48))
    assert_expected_inline(fused(layers, x, w, again), """\
fused_scaled_mm, relu, amax
scale_from_amax
fused_scaled_mm, amax
scale_from_amax
scale_from_amax
hybrid_quantize""")  # fmt: skip


def test_what_is_read_in_between_stays_apart() -> None:
    def cases() -> Any:
        yield "saved for the backward", lambda y, r: [gelu(y), y], "fused_scaled_mm"
        yield "two readers of the activation", lambda y, r: [(z := silu(y)) + r, z * 2], "fused_scaled_mm, silu"
        yield "another dtype", lambda y, r: [y.float() + r], "fused_scaled_mm"
        yield "another shape", lambda y, r: [y.reshape(80, 48) + r.reshape(80, 48)[:1]], "fused_scaled_mm, + bias"
        yield "twice itself", lambda y, r: [y + y], "fused_scaled_mm"
        yield "by columns", lambda y, r: [y.reshape(80, 48) + r.reshape(48, 80).t()], "fused_scaled_mm"
        yield "not aligned", lambda y, r: [y + torch.cat([r, r]).view(-1)[1:3841].view(2, 40, 48)], "fused_scaled_mm"
        yield "a scalar", lambda y, r: [relu(y + 1.0)], "fused_scaled_mm"

    x, w, residual = tensors(X, W, RESIDUAL)
    for name, run, want in cases():

        def layer(x: Tensor, w: Tensor, r: Tensor) -> list[Tensor]:
            return run(linear(x, w), r)  # type: ignore[no-any-return]  # noqa: B023

        assert fused(layer, x, w, residual) == want, name


def test_other_formats_and_settings_are_left_alone() -> None:
    x, w, residual = tensors((40, 64), W, (40, 48))
    for spec in ("mxfp8_e4m3", "nvfp4"):
        gm = traced(lambda x, w, r: linear(x, w, spec=spec) + r, x, w, residual)  # noqa: B023
        assert not fuse_epilogues(gm.graph, Settings(gemm="triton", device="cpu")), spec
    gm = traced(lambda x, w, r: linear(x, w) + r, x, w, residual)
    assert not fuse_epilogues(gm.graph, Settings(gemm="triton")), "another device"
    assert not fuse_epilogues(gm.graph, Settings(gemm="cublas", device="cpu"))
    for setting in ("exact_recompute", "cpp_wrapper"):
        settings = Settings(gemm="triton", device="cpu", **{setting: True})
        assert not fuse_epilogues(gm.graph, settings), setting
    assert fuse_epilogues(gm.graph, Settings(gemm="triton", device="cpu")) == 1


def test_on_hopper_it_becomes_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["fxquant.passes.lower.epilogues"], "is_hopper", lambda device: True)

    def layer(x: Tensor, w: Tensor, bias: Tensor, residual: Tensor) -> list[Tensor]:
        y = residual + gelu(linear(x, w, bias))
        return [y, ops.amax(y.reshape(-1, 48))]

    with FakeTensorMode():
        gm = traced(layer, *(torch.empty(each, device="cuda", dtype=torch.bfloat16) for each in (X, W, BIAS, RESIDUAL)))
        assert fuse_epilogues(gm.graph, Settings(gemm="triton")) == 1
        lower(gm.graph, Settings())
    launches = gm.graph.find_nodes(op="call_function", target=triton_kernel_wrapper_functional)
    (launch,) = (node for node in launches if "y" in node.kwargs["tensors_to_clone"])
    given = {name: shape(arg) if isinstance(arg, fx.Node) else arg for name, arg in launch.kwargs["kwargs"].items()}
    assert_expected_inline("\n".join(f"{name}: {arg}" for name, arg in given.items()), """\
a: [80, 64]
b: [48, 64]
a_scale: [1]
b_scale: [1]
bias: [48]
residual: [80, 48]
y: [80, 48]
amax: [1]
M: 80
N: 48
K: 64
a_step: 64
b_step: 64
residual_step: 48
A_ROWS: False
B_ROWS: False
ACTIVATION: 1
FAST: True
PROGRAMS: 132
BM: 128
BN: 256
BK: 128
PARTS: 4
DOWN: 8""")  # fmt: skip


def test_autotune_measures_once_and_auto_remembers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    problems: list[Problem] = []

    def measure(problem: Problem, device: torch.device) -> Times:
        problems.append(problem)
        return Times((100.0, 98.0, 101.0 if problem.residual else 104.0), copy=5.0)

    monkeypatch.setattr(gemm_timing, "measure", measure)
    cuda = torch.device("cuda")
    plain = Problem(512, 256, 384, SPEC, SPEC, torch.bfloat16, True)
    summed = replace(plain, residual=True)
    assert gemm_timing.remembered(plain, cuda) is None
    times = [gemm_timing.measured(each, cuda) for each in (plain, summed, plain, summed)]
    assert problems == [plain, summed] and times[:2] == times[2:]
    for problem, kernel in ((plain, GemmKernel.PER_ROW), (summed, GemmKernel.TRITON)):
        remembered = gemm_timing.remembered(problem, cuda)
        assert remembered and remembered.chosen(problem, "measured").kernel is kernel
    (next(tmp_path.glob("*.json"))).write_text("{")
    assert gemm_timing.remembered(plain, cuda) is None, "a file that is cut off counts for nothing"


def test_the_kernel_for_scales_of_rows_takes_one_scale_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_timing, "remembered", lambda problem, device: Times((100.0, 95.0, 96.0), 2.0))

    def layer(x: Tensor, w: Tensor, bias: Tensor, residual: Tensor) -> list[Tensor]:
        return [linear(x, w, bias), residual + linear(x, w)]

    assert_expected_inline(fused(layer, *tensors(X, W, BIAS, RESIDUAL), gemm="auto"), """\
scaled_mm of per_row_e4m3 [80, 1]
fused_scaled_mm, + [80, 48]""")  # fmt: skip


def test_layers_of_one_input_share_the_scales_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_timing, "remembered", lambda problem, device: Times((100.0, 95.0, 99.0), 2.0))

    def layers(x: Tensor, w: Tensor, other: Tensor) -> list[Tensor]:
        return [linear(x, w), linear(x, other)]

    def wide_scales(**settings: bool) -> int:
        gm = traced(layers, *tensors(X, W, W))
        assert fuse_epilogues(gm.graph, Settings(device="cpu", **settings)) == 2
        return len(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default))

    assert wide_scales() == 1
    assert wide_scales(cpp_wrapper=True) == 1, "no Triton kernel in a package, but this one"


@pytest.mark.parametrize(
    ("size", "kernel"),
    [
        ((16384, 4096, 14336), GemmKernel.PER_ROW),
        ((8192, 8192, 28672), GemmKernel.PER_ROW),
        ((4096, 4096, 4096), GemmKernel.PER_TENSOR),
    ],
    ids=str,
)
def test_scales_of_rows_where_they_were_measured_to_be_faster(size: tuple[int, int, int], kernel: GemmKernel) -> None:
    for residual in (False, True):
        problem = Problem(*size, SPEC, SPEC, torch.bfloat16, True, residual=residual)
        assert choose_gemm(problem, "NVIDIA H100 80GB HBM3").kernel is kernel
    slow = Problem(*size, SPEC, SPEC, torch.bfloat16, False)
    assert choose_gemm(slow, "NVIDIA H100 80GB HBM3").kernel is GemmKernel.PER_TENSOR


def test_explain_names_the_kernel() -> None:
    class Layers(TwoLinears):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.b(relu(self.a(x)))

    x = torch.randn(128, 64).bfloat16().requires_grad_()
    report = fxquant.explain(Layers(64, 96).bfloat16(), "current_scaling", x)
    assert report.epilogue_table() == "", "nothing to choose on a CPU"
    table = report.on("H100").epilogue_table()
    assert_expected_inline("\n".join(line.partition(" (")[0] for line in table.splitlines()), """\
layer  graph     M x K x N      epilogue            kernel
a      forward   128 x 64 x 96  + bias, relu, amax  cuBLAS _scaled_mm, per tensor
b      forward   128 x 96 x 64  + bias, + residual  cuBLAS _scaled_mm, per tensor
a      backward  128 x 96 x 64  + residual          cuBLAS _scaled_mm, per tensor""")  # fmt: skip
    assert "estimated: rowwise" in table and report.on("H100").epilogue_table("b").count("\n") == 1
