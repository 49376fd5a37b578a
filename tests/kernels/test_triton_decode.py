"""The kernels for few tokens without a GPU: their values in the interpreter, and which GEMMs become them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fxquant.kernels.linear  # noqa: F401  registers the operators
from fxquant.compat import make_fx, triton_kernel_wrapper_functional
from fxquant.passes.lower import lower


def test_values_in_the_interpreter() -> None:
    """Another process, since Triton decides at import whether it interprets."""
    script = Path(__file__).with_name("interpreted_decode.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["fxquant.passes.few_rows"], "is_hopper", lambda device: True)


def lowered(
    rows: int, spec: str, weight_spec: str = "", *, fast: bool = True, launches: bool = True, gemms: int = 1,
    multiplier: bool = False, read: bool = False, made: bool = False,
) -> list[str]:  # fmt: skip
    """What is left to run of a quantization and GEMMs of its result: launches by what they write, GEMMs, amaxes."""
    with FakeTensorMode():
        x = torch.empty(rows, 256, device="cuda", dtype=torch.bfloat16)
        weights = torch.ops.fxquant.quantize(
            torch.empty(384, 256, device="cuda", dtype=torch.bfloat16), weight_spec or spec, "rowwise"
        )
        one = torch.ones(1, device="cuda")

        def run(x: Tensor, w: Tensor, w_scale: Tensor, one: Tensor) -> list[Tensor]:
            x = x.exp() if made else x
            a = torch.ops.fxquant.quantize(x, spec, "rowwise", *([one] if multiplier else []))
            args = ([w, w_scale], spec, weight_spec or spec, None, torch.bfloat16, fast)
            return [torch.ops.fxquant.scaled_mm(a, *args) for _ in range(gemms)] + ([a[0]] if read else [])

        graph = make_fx(run)(x, *weights, one).graph
    lower(graph, portable=not launches)
    graph.eliminate_dead_code()
    names = []
    for node in graph.nodes:
        if node.target is triton_kernel_wrapper_functional:
            names.append(",".join(node.kwargs["tensors_to_clone"]))
        elif node.op == "call_function" and "scaled_mm" in str(node.target):
            names.append("scaled_mm")
        elif "amax" in str(node.target):
            names.append("amax")
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
    assert lowered(64, "per_tensor_e4m3", multiplier=True) == ["data,scale", "y"]


def test_inductor_fuses_a_cast_into_what_makes_its_tensor() -> None:
    """But not where an amax of the tensor comes between."""
    assert lowered(16, "per_row_e4m3", made=True) == ["amax", "y"]
    assert lowered(16, "per_tensor_e4m3", multiplier=True, made=True) == ["y"]
    assert lowered(16, "per_tensor_e4m3", made=True) == ["part", "data,scale", "y"]


def test_what_else_reads_a_payload_keeps_it() -> None:
    assert lowered(1, "per_row_e4m3", read=True) == ["amax", "y"]


def test_which_gemms_stay() -> None:
    """Many rows, GEMMs that are not to accumulate fast, other formats, and graphs that are saved."""
    assert lowered(65, "per_tensor_e4m3")[-1] == "scaled_mm"
    assert lowered(16, "per_row_e4m3", fast=False)[-1] == "scaled_mm"
    assert lowered(16, "per_row_e4m3", launches=False) == ["amax", "scaled_mm"]
    assert "y" not in lowered(16, "mxfp8_e4m3")


def test_other_cards_keep_their_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["fxquant.passes.few_rows"], "is_hopper", lambda device: False)
    assert lowered(1, "per_row_e4m3")[-1] == "scaled_mm"
