"""Without Triton everything that needs no GPU works: compiling, reports, costs, measurements, exported programs.

Each call runs in a process in which Triton cannot be imported, and uses the CPU or a card that is only named.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

BEGIN = """
import sys
sys.modules["triton"] = None  # as if it were not installed

import torch
import fxquant
import fxquant.backend

model, x = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64)), torch.randn(32, 64)
q = torch.randn(1, 4, 4096, 64, dtype=torch.bfloat16, device="meta")
attend = torch.nn.functional.scaled_dot_product_attention
"""
CALLS = {
    "compile, aot_eager": 'fxquant.compile(model, "mxfp8", options={"inner": "aot_eager"})(x).sum().backward()',
    "compile": 'fxquant.compile(model, "current_scaling")(x).sum().backward()',
    "by name": 'torch.compile(model, backend="fxquant", options={"recipe": "delayed_scaling"})(x).sum().backward()',
    "explain and report": (
        'report = fxquant.explain(model, "nvfp4", x).on("H100")\n'
        'assert report.to_json() and report._repr_html_() and "NVIDIA H100" in str(report)'
    ),
    "cost": (
        'report = fxquant.explain(model.to(torch.bfloat16), "current_scaling", x.bfloat16()).on("H100")\n'
        'assert report.time()["quantized_us"] > report.time()["unquantized_us"] and report.slower() == ["0", "2"]'
    ),
    "measure": 'assert fxquant.measure(model, "mxfp8", x).losses',
    "explain attention": (
        'str(fxquant.explain(lambda q: attend(q, q, q), fxquant.DelayedScaling(fp8_dpa=True), q).on("H100"))'
    ),
    "quantize_program": 'fxquant.quantize_program(torch.export.export(model.eval(), (x,)), "mxfp8").module()(x)',
}


@pytest.mark.parametrize("call", CALLS)
def test_runs_without_triton(call: str) -> None:
    code = f"{BEGIN}{CALLS[call]}\nassert sys.modules['triton'] is None"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
