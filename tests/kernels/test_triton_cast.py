"""The Triton cast kernels without a GPU: their bytes in the interpreter, and what the lowering makes of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

import fxquant.kernels.linear  # noqa: F401  registers the operators
from fxquant.compat import make_fx, triton_kernel_wrapper_functional
from fxquant.formats import FORMATS, QuantSpec
from fxquant.kernels import triton_cast
from fxquant.passes.lower import implementation, lower


def test_bytes_in_the_interpreter() -> None:
    """Another process, since Triton decides at import whether it interprets."""
    script = Path(__file__).with_name("interpreted_cast.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def captured(text: str, direction: str, device: str, *shape: int) -> fx.Graph:
    """A graph of one quantize."""
    with FakeTensorMode():
        x = torch.empty(shape, device=device, dtype=torch.bfloat16)

        def run(x: Tensor) -> list[Tensor]:
            return torch.ops.fxquant.quantize(x, text, direction)  # type: ignore[no-any-return]

        return make_fx(run)(x).graph


def lowered(text: str, *shape: int) -> list[str]:
    """The launches in the lowered graph of one columnwise quantize on CUDA, each as the arguments it writes."""
    graph = captured(text, "columnwise", "cuda", *shape)
    lower(graph)
    launches = [n for n in graph.nodes if n.target is triton_kernel_wrapper_functional]
    return [",".join(n.kwargs["tensors_to_clone"]) for n in launches]


def test_transposed_payloads_are_written_by_the_kernel_on_cuda() -> None:
    assert lowered("mxfp8_e4m3", 64, 96) == ["column_data,column_scale"]
    assert lowered("per_row_e4m3", 64, 96) == ["column_amax", "column_data,column_scale"]


@pytest.mark.parametrize("text", ["per_tensor_e4m3", "per_row_e4m3", "block_1x128_e4m3", "mxfp8_e4m3"])
def test_kernels_take_the_tensor_once(text: str) -> None:
    """Inductor writes what it could have fused once for each argument that it is given as."""
    graph = captured(text, "columnwise", "cuda", 64, 128)
    lower(graph)
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
        assert getattr(implementation(node), "__name__", "") != "triton_quantize", case


def test_supported_formats() -> None:
    """Everything but NVFP4 and the identity."""
    known = {name for name in FORMATS if triton_cast.supports(QuantSpec(format=name))}
    assert known == {name for name in FORMATS if not name.startswith(("nvfp4", "identity"))}
