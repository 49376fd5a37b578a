"""The Triton cast kernels without a GPU: their bytes in the interpreter, and what the lowering makes of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from interpreting import run_interpreted
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch._inductor.runtime.static_triton_launcher import StaticallyLaunchedCudaKernel
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fxquant.compat.private import make_fx, triton_kernel_wrapper_functional
from fxquant.formats import FORMATS, QuantSpec
from fxquant.kernels.cast import choice, triton_cast
from fxquant.kernels.cast.choice import CastKernel, supports
from fxquant.kernels.cast.ops import quantize
from fxquant.passes.lower.lower import facts_of, lower
from fxquant.passes.settings import Settings


@pytest.mark.parametrize("name", ["cast", "nvfp4", "producers", "delayed"])
def test_bytes_in_the_interpreter(name: str) -> None:
    run_interpreted(Path(__file__).with_name(f"interpreted_{name}.py"))


POINTERS = {
    torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float8_e4m3fn: "*fp8e4nv", torch.uint8: "*u8",
    torch.int64: "*i64",
}  # fmt: skip


class Compiled:
    """What `wrap_triton` gives, but a launch compiles for Hopper and runs nothing."""

    kernel: Any

    def __init__(self) -> None:
        self.launches: list[Any] = []

    def __call__(self, kernel: Any) -> Compiled:
        self.kernel = kernel
        return self

    def __getitem__(self, grid: Any) -> Any:
        return self.compile

    def compile(self, *values: Any, num_warps: int) -> None:
        arguments = dict(zip(self.kernel.arg_names, values, strict=True))
        constants = {p.name: arguments[p.name] for p in self.kernel.params if p.is_constexpr}
        types = {n: POINTERS[v.dtype] if isinstance(v, Tensor) else "i32" for n, v in arguments.items()}
        types |= dict.fromkeys(constants, "constexpr")
        aligned = [["tt.divisibility", 16]]
        attributes = {
            (i,): aligned for i, (name, v) in enumerate(arguments.items())
            if name not in constants and (isinstance(v, Tensor) or v % 16 == 0)
        }  # fmt: skip
        source = ASTSource(self.kernel, types, constants, attributes)
        self.launches.append(triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": num_warps}))


@pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="the layouts that Triton 3.6 chooses")
@pytest.mark.parametrize(("text", "words"), [("mxfp8_e4m3", 2), ("block_1x128_e4m3(pow2)", 4)])
def test_payloads_are_transposed_in_registers(text: str, words: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors in, 8 or 16 bytes of a column out, and shared memory for no more than scales."""
    record = Compiled()
    monkeypatch.setattr(triton_cast, "wrap_triton", record)
    spec = QuantSpec.parse(text)
    triton_cast.quantize(torch.zeros(4096, 2048, dtype=torch.bfloat16), spec, spec)
    (launch,) = record.launches
    ptx = launch.asm["ptx"]
    assert set(re.findall(r"ld\.global\.(v\d)\.b32", ptx)) == {"v2"}
    assert set(re.findall(r"st\.global\.(v\d)\.b32", ptx)) == {f"v{words}"}
    assert launch.metadata.shared <= 4096
    assert "local" not in ptx


@pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="what Triton 3.6 makes of it")
def test_a_tile_with_one_scale_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """At odd sizes, where loads are narrow, Triton recomputed the whole tile in each thread to store its scale."""
    record = Compiled()
    monkeypatch.setattr(triton_cast, "wrap_triton", record)
    spec = QuantSpec.parse("block_128x128_e4m3")
    triton_cast.quantize(torch.zeros(33, 50, dtype=torch.bfloat16), spec, spec)
    (launch,) = record.launches
    assert launch.asm["ptx"].count("cvt.rn.satfinite.e4m3x2") == 64
    assert len(re.findall(r"ld\.global", launch.asm["ptx"])) <= 64


def test_amaxes_go_into_a_state_by_a_kernel_that_inductor_can_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """By one atomic maximum each; and torch can launch and keep the kernel as one of its own."""
    record = Compiled()
    monkeypatch.setattr(triton_cast, "wrap_triton", record)
    spec, scale = QuantSpec.parse("per_tensor_e4m3(slot=0)"), torch.ones(1)
    state, step = (torch.zeros(4, 2, dtype=torch.int64)[1:2, 0] for _ in range(2))
    x = torch.zeros(4096, 2048, dtype=torch.bfloat16)
    triton_cast.produce("identity", [x], spec, spec, [scale], [scale], triton_cast.Record(state, step))
    (launch,) = record.launches
    assert len(re.findall(r"(?:atom|red)\.global[.\w]*\.max\.[su]64", launch.asm["ptx"])) == 1
    launch._cubin_path = "unused"
    assert StaticallyLaunchedCudaKernel(launch).arg_tys.startswith("O" * 13 + "i")


@pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="the layouts that Triton 3.6 chooses")
def test_a_norm_and_its_cast_stay_in_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors of rows and columns come in the layout of the tile."""
    record = Compiled()
    monkeypatch.setattr(triton_cast, "wrap_triton", record)
    spec, scale = QuantSpec.parse("per_tensor_e4m3"), torch.ones(1)
    x, weight = torch.zeros(4096, 2048, dtype=torch.bfloat16), torch.zeros(2048, dtype=torch.bfloat16)
    triton_cast.produce("rms_norm", [x, torch.zeros(4096, 1), weight], spec, spec, [scale], [scale], False)
    (launch,) = record.launches
    ptx = launch.asm["ptx"]
    assert launch.metadata.shared == 0 and "bar.sync" not in ptx
    assert len(re.findall(r"ld\.global\.v2\.b32", ptx)) == 16 + 1
    assert len(re.findall(r"ld\.global\.b32", ptx)) == 16 + 2


def captured(text: str, direction: str, device: str, *shape: int) -> fx.Graph:
    """A graph of one quantize."""
    with FakeTensorMode():
        x = torch.empty(shape, device=device, dtype=torch.bfloat16)

        def run(x: Tensor) -> list[Tensor]:
            return torch.ops.fxquant.quantize(x, text, direction)  # type: ignore[no-any-return]

        return make_fx(run)(x).graph


def lowered(text: str, *shape: int, direction: str = "columnwise") -> list[str]:
    """The launches in the lowered graph of one quantize on CUDA, each as the arguments it writes."""
    return launches_of(captured(text, direction, "cuda", *shape))


def launches_of(graph: fx.Graph) -> list[str]:
    lower(graph, Settings())
    launches = [n for n in graph.nodes if n.target is triton_kernel_wrapper_functional]
    return [",".join(n.kwargs["tensors_to_clone"]) for n in launches]


def test_transposed_payloads_are_written_by_the_kernel_on_cuda() -> None:
    assert lowered("mxfp8_e4m3", 64, 96) == ["column_data,column_scale"]
    assert lowered("per_row_e4m3", 64, 96) == ["column_amax", "column_data,column_scale"]
    assert lowered("nvfp4(rht)", 64, 96) == ["out", "out", "column_data,column_scale"]


@pytest.mark.parametrize(
    "text", ["per_row_e4m3", "block_1x128_e4m3", "mxfp8_e4m3", "mxfp8_e4m3(swizzled)", "nvfp4(swizzled)"]
)
def test_rows_may_be_a_symbol(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strides of what a launch writes, which stand before it, are not taken from what it returns."""
    monkeypatch.setattr(choice, "capability", lambda device: (10, 0))
    mode = FakeTensorMode(shape_env=ShapeEnv())
    sizes: StatelessSymbolicContext[Any, Any] = StatelessSymbolicContext(
        dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC]
    )
    like = mode.from_tensor(torch.empty(96, 128), source=ConstantSource("x"), symbolic_context=sizes)
    with mode:
        x = torch.empty(like.shape[0], 128, device="cuda", dtype=torch.bfloat16)
        graph = make_fx(lambda x: torch.ops.fxquant.hybrid_quantize(x, text, text))(x).graph
    assert launches_of(graph)[-1] == "row_data,row_scale,column_data,column_scale"
    graph.lint()


def test_rowwise_casts_of_weights_are_the_kernels_on_cuda() -> None:
    """With the scale of its own amax, which the backward takes again, with scales of tiles, and of rows."""

    def weight(w: Tensor) -> list[Tensor]:
        scale = torch.ops.fxquant.scale_from_amax(torch.ops.fxquant.amax(w), "per_tensor_e4m3")
        return [scale, *torch.ops.fxquant.quantize(w, "per_tensor_e4m3", "rowwise", scale)]

    with FakeTensorMode():
        graph = make_fx(weight)(torch.empty(64, 128, device="cuda", dtype=torch.bfloat16)).graph
    assert launches_of(graph) == ["out", "row_data,row_scale"]
    assert lowered("block_128x128_e4m3", 128, 256, direction="rowwise") == ["row_data,row_scale"]
    assert lowered("per_row_e4m3", 128, 256, direction="rowwise") == ["data,scale"]


def test_a_producer_and_its_casts_are_one_launch_after_that_of_an_amax() -> None:
    def launches(text: str, record: bool) -> list[str]:
        with FakeTensorMode():
            inputs = [torch.empty(64, 96, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
            state = torch.empty(1, device="cuda") if record else None

            def run(*inputs: Tensor) -> list[Tensor]:
                states = [state, state]
                spec = f"silu_mul_grad rowwise={text} columnwise={text}"
                return torch.ops.fxquant.produce_quantize(inputs, spec, states, states, record)  # type: ignore[no-any-return]

            graph = make_fx(run)(*inputs).graph
        return launches_of(graph)

    cast = "row_data,row_scale,column_data,column_scale"
    assert launches("per_tensor_e4m3(slot=1)", True) == [f"{cast},recorded"]
    assert launches("block_1x128_e4m3", False) == [cast]
    assert launches("per_tensor_e4m3", False) == ["out", cast]
    assert launches("per_row_e4m3", False) == ["row_amax,column_amax", cast]


@pytest.mark.parametrize(("column", "one"), [("per_tensor_e4m3", True), ("per_tensor_e5m2", False)])
def test_one_multiplier_of_both_directions_is_one_scale(column: str, one: bool) -> None:
    """Of two results it is a part of a tensor, which takes a launch of its own to be one."""
    with FakeTensorMode():
        inputs = [torch.empty(64, 96, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        spec, none = f"silu_mul_grad rowwise=per_tensor_e4m3 columnwise={column}", [None, None]
        run = torch.ops.fxquant.produce_quantize
        graph = make_fx(lambda *inputs: run(inputs, spec, none, none, False))(*inputs).graph
    lower(graph, Settings())
    (output,) = graph.find_nodes(op="output")
    first, second = output.args[0][1::2][:2], output.args[0][1::2][2:]
    assert (first[0] is first[1]) == (second[0] is second[1]) == one and first[0] is not second[0]
    assert len(graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)) == (2 if one else 4)


@pytest.mark.parametrize("text", ["per_tensor_e4m3", "per_row_e4m3", "block_1x128_e4m3", "mxfp8_e4m3"])
def test_kernels_take_the_tensor_once(text: str) -> None:
    """Inductor writes what it could have fused once for each argument that it is given as."""
    graph = captured(text, "columnwise", "cuda", 64, 128)
    lower(graph, Settings())
    x = next(n for n in graph.nodes if n.op == "placeholder")
    launches = [n for n in graph.nodes if n.target is triton_kernel_wrapper_functional]
    assert launches
    for launch in launches:
        assert list(launch.kwargs["kwargs"].values()).count(x) == 1


def test_what_inductor_fuses_is_left_to_it() -> None:
    """Rowwise casts, batches, empty tensors, and everything on a CPU."""
    for case in (
        ("rowwise", "cuda", 64, 96), ("columnwise", "cpu", 64, 96), ("columnwise", "cuda", 2, 64, 96),
        ("columnwise", "cuda", 0, 96),
    ):  # fmt: skip
        graph = captured("mxfp8_e4m3", *case)
        (node,) = (n for n in graph.nodes if n.target is torch.ops.fxquant.quantize.default)
        assert quantize.choose(facts_of(node, Settings())).kernel is CastKernel.FUSED, case


def test_supported_formats() -> None:
    """Everything but NVFP4 and the identity."""
    known = {name for name in FORMATS if supports(QuantSpec(format=name))}
    assert known == {name for name in FORMATS if not name.startswith(("nvfp4", "identity"))}
