"""The GEMM with epilogues without a GPU: its values in the interpreter, and which operands it takes."""

from __future__ import annotations

from pathlib import Path

import torch
from interpreting import run_interpreted
from torch._subclasses.fake_tensor import FakeTensorMode

from fxquant.formats import QuantSpec
from fxquant.kernels.cast import reference
from fxquant.kernels.linear.problem import triton_multiplies


def test_values_in_the_interpreter() -> None:
    run_interpreted(Path(__file__).with_name("interpreted_gemm.py"))


def test_what_it_takes() -> None:
    def takes(m: int, k: int, n: int, a: str, b: str, dtype: torch.dtype = torch.bfloat16) -> bool:
        specs = QuantSpec.parse(a), QuantSpec.parse(b)
        with FakeTensorMode():
            left, right = (
                reference.quantize(torch.empty(rows, k), spec) for rows, spec in zip((m, n), specs, strict=True)
            )
            return triton_multiplies(left, specs[0], right, specs[1], dtype)

    tensor, row = "per_tensor_e4m3", "per_row_e5m2"
    assert takes(1, 100, 8, tensor, row) and takes(100, 16, 264, row, tensor, torch.float16)
    assert takes(8, 16, 4, tensor, tensor, torch.float32), "rows of the result in 16 bytes"
    assert not takes(8, 16, 4, tensor, tensor) and not takes(8, 16, 6, tensor, tensor, torch.float32)
    assert not takes(0, 16, 8, tensor, tensor) and not takes(8, 0, 8, tensor, tensor), "nothing"
    assert not takes(128, 128, 128, "block_1x128_e4m3", "block_128x128_e4m3") and not takes(8, 64, 8, "nvfp4", "nvfp4")
