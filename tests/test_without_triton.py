"""Without Triton everything that needs no GPU works: compiling, reports, costs, measurements, exported programs.

The calls run in a process in which Triton cannot be imported, and use the CPU or a card that is only named. Inductor
writes its C++ kernels there, and does not compile them.
"""

from __future__ import annotations

import subprocess
import sys

BEGIN = """
import sys, traceback
sys.modules["triton"] = None  # as if it were not installed

import torch
import fxquant
import fxquant.backend
from torch._inductor.async_compile import AsyncCompile

AsyncCompile.cpp_pybinding = lambda *args: lambda *pointers: None

def new():
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64))

x = torch.randn(32, 64)
OPTIONS = {"recipe": "delayed_scaling", "inner": "aot_eager"}
q = torch.randn(1, 4, 4096, 64, dtype=torch.bfloat16, device="meta")
attend = torch.nn.functional.scaled_dot_product_attention
"""
CALLS = {
    "compile, aot_eager": 'fxquant.compile(model, "mxfp8", options={"inner": "aot_eager"})(x).sum().backward()',
    "compile": 'fxquant.compile(model[:2], "current_scaling")(x).sum().backward()',
    "by name": 'torch.compile(model, backend="fxquant", options=OPTIONS)(x).sum().backward()',
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


END = """
for name, call in CALLS.items():
    torch.compiler.reset()
    try:
        exec(call, {**globals(), "model": new()})
    except Exception:
        print(name, traceback.format_exc()[-2000:])
assert sys.modules["triton"] is None
"""


def test_everything_runs_without_triton() -> None:
    """In one process, most of whose time goes into its imports."""
    code = f"{BEGIN}\nCALLS = {CALLS!r}\n{END}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stdout, done.stdout + done.stderr[-3000:]
