"""Changes to torch: each says for which defect, has a probe for it, and acts for quantized graphs alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.exc import InductorError
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.compile_tasks import _worker_compile_triton
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import flop_counter

from fxquant import Backend, aoti_compile_and_package, quantize_program
from fxquant.compat import OLDEST_TORCH, flops, patches, torch_version
from fxquant.compat.inside import memory
from fxquant.compat.inside.memory import DATA, Memory
from fxquant.compat.patch import Patch, apply, compiles_quantized_graph
from fxquant.compat.private import inductor_config, inductor_decompositions, make_fx
from fxquant.passes.pipeline import Lowering
from fxquant.passes.settings import Settings


@pytest.fixture(autouse=True)
def no_caches() -> Iterator[None]:
    with inductor_config.patch(force_disable_caches=True):
        yield


@pytest.mark.parametrize("patch", patches.PATCHES, ids=lambda patch: patch.function)
def test_every_change_names_its_defect_and_the_versions_with_it(patch: Patch) -> None:
    assert patch.defect.endswith(".")
    assert re.match(r"https://github.com/pytorch/pytorch/(issues|pull)/\d+\b|none found", patch.upstream)
    assert patch.fixed_in is None or patch.fixed_in > OLDEST_TORCH, "no torch that is supported has the defect"


@pytest.mark.parametrize("patch", patches.PATCHES, ids=lambda patch: patch.function)
def test_torch_has_the_defects_that_are_mended_and_no_others(patch: Patch) -> None:
    assert patch.still_needed() is (patch.fixed_in is None or torch_version() < patch.fixed_in)


@pytest.mark.parametrize("name", ["sdpa_flop_count", "sdpa_backward_flop_count"])
def test_flops_of_attention_in_groups_are_those_of_a_key_for_each_query(name: str) -> None:
    flops.count_groups()
    count, q, k = getattr(flop_counter, name), (2, 4, 8, 16), (2, 2, 8, 16)
    more = [q] if "backward" in name else []
    assert count(*more, q, k, k) == count(*more, q, q, q) > 0
    with pytest.raises(AssertionError, match=r"incompatible|mismatch"):
        count(*more, q, (3, 4, 8, 16), k)


def rows_and_columns(x: Tensor) -> tuple[Tensor, Tensor]:
    """A row and a column quantization in one kernel, whose loops Inductor's C++ backend cannot split."""
    rows = (x.view(128, 2, 32) * x[:, :2, None]).view(128, 64)
    columns = (x.t().reshape(64, 4, 32) * x[:64, :4, None]).view(64, 128)
    return rows.to(torch.float8_e4m3fn), columns.to(torch.float8_e4m3fn)


def test_a_graph_without_quantization_is_compiled_by_torch_as_it_is() -> None:
    x = torch.ones(128, 64)
    with pytest.raises(InductorError, match="AssertionError"):
        torch.compile(rows_and_columns, backend=Backend("mxfp8"), dynamic=False)(x)
    torch.compiler.reset()
    with inductor_config.patch(post_grad_custom_post_pass=Lowering(Settings())):
        got = torch.compile(rows_and_columns, dynamic=False)(x)
    for a, b in zip(got, rows_and_columns(x), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.usefixtures("without_cpp")
@pytest.mark.slow
@pytest.mark.parametrize("quantized", [True, False])
def test_changes_act_in_the_forward_and_the_backward_of_quantized_graphs(
    monkeypatch: pytest.MonkeyPatch, quantized: bool
) -> None:
    acts: list[bool] = []
    split: Any = CppScheduling.try_loop_split

    def note(self: Any, nodes: Any) -> Any:
        acts.append(compiles_quantized_graph())
        return split(self, nodes)

    monkeypatch.setattr(CppScheduling, "try_loop_split", note)
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU()) if quantized else nn.Sigmoid()
    out = torch.compile(model, backend=Backend("mxfp8"))(torch.randn(32, 32, requires_grad=True))
    forward = len(acts)
    out.sum().backward()
    assert 0 < forward < len(acts), "a backward is compiled when it first runs"
    assert set(acts) == {quantized}


def test_changes_act_in_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Reached(Exception):
        pass

    def stop(self: Any, nodes: Any) -> Any:
        raise Reached(compiles_quantized_graph())

    monkeypatch.setattr(CppScheduling, "try_loop_split", stop)
    program = torch.export.export(nn.Linear(32, 32), (torch.randn(32, 32),))
    with pytest.raises(InductorError, match="Reached: True"):
        aoti_compile_and_package(quantize_program(program, "mxfp8"), package_path=tmp_path / "model.pt2")


def test_data_is_what_it_was_and_noted_where_a_memory_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[int] = []
    monkeypatch.setattr(memory, "_note", lambda tensor: noted.append(id(tensor)))
    monkeypatch.setattr(memory, "_asked", {})
    weight, other = nn.Parameter(torch.zeros(2)), torch.ones(2)
    apply(DATA)
    weight.data = other
    assert weight.data.data_ptr() == other.data_ptr() and not weight.data.requires_grad and not noted
    watched = Memory(other, list)
    assert weight.data is not weight and noted == [id(weight)]
    weight.data = other
    assert noted == [id(weight), id(weight), id(other)] and not watched.unchanged(other), "it is shared"
    del weight
    assert watched.unchanged(other)


def test_processes_that_compile_kernels_know_how_they_will_be_launched() -> None:
    submitted: list[tuple[Any, ...]] = []
    submit = patches.WORKER_SETTING.changed(lambda self, run, *args: submitted.append((run, *args)))
    call = (_worker_compile_triton, len, {"A": "b"}, {"other": 1})
    submit(object(), *call)
    with inductor_config.patch({patches.STATIC_LAUNCH: True, "post_grad_custom_post_pass": Lowering(Settings())}):
        submit(object(), *call)
        submit(object(), len, [])
    assert submitted == [
        call,
        (_worker_compile_triton, len, {"A": "b"}, {"other": 1, patches.STATIC_LAUNCH: True}),
        (len, []),
    ]


def test_kernels_that_wait_may_be_launched_early() -> None:
    """Inductor's text of a launch gets the attribute, and that of a kernel which does not wait stays."""
    lines: list[str] = []
    define = patches.EARLY_LAUNCH.changed(lambda self, name, body: lines.append(body))
    early, late = (f"triton_meta={{'constants': {{'EARLY': {value}}}}}, custom_kernel=True" for value in (True, False))
    define(object(), "name", early)
    with inductor_config.patch(post_grad_custom_post_pass=Lowering(Settings())):
        define(object(), "name", early)
        define(object(), "name", late)
    assert lines[0] == early and lines[2] == late
    assert lines[1].startswith("triton_meta={'launch_pdl': True, 'constants'")


def test_products_and_sums_of_our_kernels_are_joined_whatever_tritons_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of Inductor, and of users, keep what they say."""

    def cast_kernel() -> None: ...

    lines: list[str] = []
    monkeypatch.setitem(patches._written, cast_kernel, lambda arguments: [])
    define = patches.FUSED_ARITHMETIC.changed(lambda self, name, body: lines.append(body))
    body = "triton_meta={'constants': {}}, custom_kernel=True"
    define(object(), "cast_kernel_0", body)
    with inductor_config.patch(post_grad_custom_post_pass=Lowering(Settings())):
        define(object(), "cast_kernel_0", body)
        define(object(), "users_kernel_0", body)
        define(object(), "cast_kernel_0", "triton_meta={}")
    assert lines[1] == "triton_meta={'enable_fp_fusion': True, 'constants': {}}, custom_kernel=True"
    assert lines == [body, lines[1], body, "triton_meta={}"]


@pytest.mark.slow
@pytest.mark.usefixtures("casts_as_meant")
@pytest.mark.parametrize("cpp_wrapper", [False, True])
def test_nan_assertions_look_at_what_they_can_ask(cpp_wrapper: bool) -> None:
    """They pass payloads by, between forward and backward too, and still find an infinite input."""
    settings = {"nan_asserts": True, "cpp_wrapper": cpp_wrapper}
    layers = nn.Sequential(nn.Linear(64, 32), nn.GELU())
    model, x = torch.compile(layers, backend=Backend("current_scaling", inductor=settings)), torch.randn(32, 64)
    model(x).sum().backward()
    if not cpp_wrapper:  # in C++ torch 2.11 asserts nothing
        with pytest.raises(AssertionError):
            model(x.fill_(torch.inf))


@pytest.mark.parametrize(("kind", "block", "element"), [(3, 32, torch.float8_e4m3fn), (2, 16, torch.float4_e2m1fn_x2)])
def test_inductor_leaves_gemms_with_swizzled_scales_to_torch(kind: int, block: int, element: torch.dtype) -> None:
    """In a backward too, where it asks more of the operands of operators that it does not know."""
    apply(patches.SWIZZLED_SCALES)
    scale_type = torch.float8_e8m0fnu if kind == 3 else torch.float8_e4m3fn
    width = 128 if kind == 3 else 64

    def gemm(a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor) -> torch.Tensor:
        left, right = (a + 1).view(element), b.view(element).t()
        scales = [[scale.view(scale_type)] for scale in (a_scale + 1, b_scale)]
        return torch.ops.aten._scaled_mm_v2(
            left, right, scales[0], [kind], [1], scales[1], [kind], [1], None, torch.bfloat16
        )

    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        shapes = ((40, width), (48, width), (128, 128 // block), (128, 128 // block))
        inputs = [torch.empty(shape, device="cuda", dtype=torch.uint8) for shape in shapes]
        traced = make_fx(gemm, decomposition_table=inductor_decompositions())(*inputs)
    lowering = GraphLowering(traced, example_inputs=inputs, shape_env=mode.shape_env, is_backward=True)
    with V.set_graph_handler(lowering), V.set_fake_mode(mode):
        lowering.run(*inputs)
    (call,) = (step for step in lowering.operations if type(step).__name__ == "FallbackKernel")
    assert call.op_overload is torch.ops.aten._scaled_mm_v2.default
    strides = [list(operand.get_stride()) for operand in call.inputs]
    assert strides == [[width, 1], [1, width], [128 // block, 1], [128 // block, 1]]
