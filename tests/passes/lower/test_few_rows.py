"""The kernels for few rows: which GEMMs become them, what they take over, and what is left as it was."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from helpers import calls_left, listing, size_up_to
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.functional import gelu, silu

from fxquant.compat.private import inductor_decompositions, make_fx, triton_kernel_wrapper_functional
from fxquant.kernels.linear import choice
from fxquant.passes.lower.few_rows import few_rows
from fxquant.passes.settings import Settings


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "capability", lambda device: (9, 0))


def lowered(
    rows: int, spec: str, weight_spec: str = "", *, fast: bool = True, gemms: int = 1, multiplier: bool = False,
    read: bool = False, made: bool = False, after: Any = None, length: int = 256, width: int = 384,
    most: int | None = None, **options: bool,
) -> list[str]:  # fmt: skip
    """What is left to run of a quantization and GEMMs of its result: launches by what they write, and other operators.

    `after` is what becomes of the GEMMs' results. With `most` the number of rows is symbolic, and at most that.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv())
    size = rows if most is None else size_up_to(mode, rows, most)
    with mode:
        x = torch.empty(size, length, device="cuda", dtype=torch.bfloat16)
        weights = torch.ops.fxquant.quantize(
            torch.empty(width, length, device="cuda", dtype=torch.bfloat16), weight_spec or spec, "rowwise"
        )
        one = torch.ones(1, device="cuda")

        def run(x: Tensor, w: Tensor, w_scale: Tensor, one: Tensor) -> list[Tensor]:
            x = x.exp() if made else x
            a = torch.ops.fxquant.quantize(x, spec, "rowwise", *([one] if multiplier else []))
            args = ([w, w_scale], spec, weight_spec or spec, None, torch.bfloat16, fast)
            products = [torch.ops.fxquant.scaled_mm(a, *args) for _ in range(gemms)]
            return [*(products if after is None else after(*products)), *([a[0]] if read else [])]

        graph = make_fx(run, decomposition_table=dict(inductor_decompositions()))(x, *weights, one).graph
    names = []
    for node in calls_left(graph, **options):
        if node.target is triton_kernel_wrapper_functional:
            names.append(",".join(node.kwargs["tensors_to_clone"]))
        elif node.op == "call_function" and "scaled_mm" in str(node.target):
            names.append("scaled_mm")
        elif "amax" in str(node.target):
            names.append("amax")
        elif node.target in (torch.ops.aten.add.Tensor, torch.ops.aten.erf.default):
            names.append(str(node.target).split(".")[1])
    return names


BLOCKS = ("block_1x128_e4m3(pow2)", "block_128x128_e4m3(pow2)")


def test_one_token_is_quantized_as_it_is_read() -> None:
    for spec in ("per_tensor_e4m3", "per_row_e4m3(pow2,torchao)"):
        assert lowered(1, spec) == ["y"], spec
        assert lowered(1, spec, made=True) == ["y"], spec
    assert lowered(1, *BLOCKS) == ["y"]
    assert lowered(1, "per_tensor_e4m3", gemms=3) == ["y", "y", "y"]
    assert lowered(1, "per_tensor_e4m3", multiplier=True) == ["y"]


def test_more_are_quantized_once_by_a_kernel() -> None:
    assert lowered(16, "per_row_e4m3", gemms=2) == ["data,scale", "y", "y"]
    assert lowered(2, *BLOCKS) == ["data,scale", "y"]
    assert lowered(64, "per_tensor_e4m3") == ["part", "data,scale", "y"]
    assert lowered(16, "per_tensor_e4m3", gemms=2) == ["part", "data,scale", "y", "y"]
    assert lowered(64, "per_tensor_e4m3", multiplier=True) == ["data,scale", "y"]


def test_one_scale_is_applied_as_the_activation_is_read() -> None:
    assert lowered(16, "per_tensor_e4m3") == ["part", "y"]
    assert lowered(16, "per_tensor_e4m3", multiplier=True, gemms=2) == ["y", "y"]
    assert lowered(16, "per_tensor_e4m3", multiplier=True, read=True) == ["y"]


def test_what_follows_is_part_of_the_gemm() -> None:
    """A sum with a residual, and activations; not where another reads the product, or its sums are partial."""
    wide = {"width": 16384}

    def residual(y: Tensor, *_: Tensor) -> list[Tensor]:
        return [(y.view(-1, 1, 128) + torch.ones_like(y).view(-1, 1, 128)).view(y.shape)]

    for rows in (1, 16):
        assert lowered(rows, *BLOCKS, after=residual, **wide)[-1] == "y", rows
        assert lowered(rows, *BLOCKS, after=lambda y: [gelu(y)], **wide)[-1] == "y", rows
        assert lowered(rows, *BLOCKS, after=lambda y, z: [silu(y) * z], gemms=2, **wide)[-1] == "y", rows
        assert lowered(rows, *BLOCKS, after=lambda y: [y, *residual(y)], **wide)[-1] == "add", rows
        assert lowered(rows, *BLOCKS, after=lambda y: [y + y], **wide)[-1] == "add", rows
        assert lowered(rows, *BLOCKS, after=lambda y: [y.t() + torch.ones_like(y.t())], **wide)[-1] == "add", rows
    assert lowered(1, *BLOCKS, after=residual) == ["y"]
    assert lowered(16, *BLOCKS, after=residual, length=4096)[-1] == "add"


def test_a_dynamic_number_of_rows() -> None:
    """One whose range says that they are few; otherwise cuBLAS does better where they turn out to be many."""
    assert lowered(16, "per_row_e4m3", most=64) == ["data,scale", "y"]
    assert lowered(16, "per_tensor_e4m3", most=64) == ["part", "data,scale", "y"]
    assert lowered(16, *BLOCKS, most=32) == ["data,scale", "y"]
    assert lowered(16, "per_tensor_e4m3", multiplier=True, most=16) == ["y"]
    assert lowered(16, "per_row_e4m3", most=65)[-1] == "scaled_mm"


def test_packages_compile_the_kernels_in() -> None:
    """What is saved as a graph cannot name them."""
    assert lowered(16, "per_row_e4m3", portable=True, kernels=True) == ["data,scale", "y"]
    assert lowered(1, *BLOCKS, portable=True, kernels=True) == ["y"]
    assert lowered(16, "per_row_e4m3", portable=True, kernels=False) == ["amax", "scaled_mm"]


def test_inductor_fuses_a_cast_into_what_makes_its_tensor() -> None:
    """But not where an amax of the tensor comes between."""
    assert lowered(16, "per_row_e4m3", made=True) == ["amax", "y"]
    assert lowered(64, "per_tensor_e4m3", multiplier=True, made=True) == ["y"]
    assert lowered(64, "per_tensor_e4m3", made=True) == ["part", "data,scale", "y"]


def test_what_else_reads_a_payload_keeps_it() -> None:
    assert lowered(1, "per_row_e4m3", read=True) == ["data,scale", "y"]


def test_which_gemms_stay() -> None:
    """Many rows, GEMMs that are not to accumulate fast, and other formats."""
    assert lowered(65, "per_tensor_e4m3")[-1] == "scaled_mm"
    assert lowered(16, "per_row_e4m3", fast=False)[-1] == "scaled_mm"
    assert "y" not in lowered(16, "mxfp8_e4m3")


def test_what_is_launched_early_is_quantized_by_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch costs less than casting in the GEMM then; not in packages, whose launches are not early."""
    monkeypatch.setattr(sys.modules["fxquant.passes.lower.few_rows"], "launches_early", lambda device: True)
    assert lowered(16, "per_tensor_e4m3") == ["part", "data,scale", "y"]
    assert lowered(16, "per_tensor_e4m3", multiplier=True) == ["data,scale", "y"]
    assert lowered(1, "per_tensor_e4m3") == ["y"]
    assert lowered(16, "per_tensor_e4m3", multiplier=True, portable=True, kernels=True) == ["y"]


def test_other_cards_keep_their_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "capability", lambda device: (8, 9))
    assert lowered(1, "per_row_e4m3")[-1] == "scaled_mm"


_SIZES = ((1, 256), (1, 384), (384, 256))


def decoding(x: Tensor, residual: Tensor, w: Tensor, w_scale: Tensor) -> list[Tensor]:
    """One row through two GEMMs, the first with a residual behind it."""
    parts, one = torch.ops.fxquant.quantize(x, BLOCKS[0], "rowwise"), (*BLOCKS, None, torch.bfloat16, True)
    return [
        torch.ops.fxquant.scaled_mm(parts, [w, w_scale], *one) + residual,
        torch.ops.fxquant.scaled_mm(parts, [w, w_scale], *one),
    ]


def test_one_row_before_and_after() -> None:
    """The residual goes into its GEMM, the row is quantized by each as it is read, and a second run changes nothing."""
    with FakeTensorMode():
        row, residual, wide = (torch.empty(size, device="cuda", dtype=torch.bfloat16) for size in _SIZES)
        weight = torch.ops.fxquant.quantize(wide, BLOCKS[1], "rowwise")
        gm = make_fx(decoding, decomposition_table=dict(inductor_decompositions()))(row, residual, *weight)
    for changed in (True, False):
        assert bool(few_rows(gm.graph, Settings())) is changed
        gm.graph.lint()
        assert_expected_inline(
            listing(gm.graph),
            """\
%0 = input [1, 256]
%1 = input [1, 384]
%2 = input [384, 256]
%3 = input [3, 2]
%4 = scaled_mm([%0], [%2, %3], block_1x128_e4m3(pow2), block_128x128_e4m3(pow2), None, bfloat16,
    True, epilogue=add, other=%1)
%5 = scaled_mm([%0], [%2, %3], block_1x128_e4m3(pow2), block_128x128_e4m3(pow2), None, bfloat16,
    True)
return [%4, %5]""",
        )
