"""Triton's interpreter, in which kernels run without a GPU.

`run_interpreted` is for tests, `interpret` for the scripts that they run.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter

from fxquant.formats import ELEMENTS
from fxquant.kernels.cast import reference

FP8 = {tl.float8e4nv: "e4m3", tl.float8e5: "e5m2"}


def run_interpreted(script: str | Path) -> None:
    """Runs a script in a process of its own, since Triton decides at import whether it interprets."""
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    with tempfile.NamedTemporaryFile("r") as output:
        server.stdin.write(json.dumps([str(script), output.name]) + "\n")
        server.stdin.flush()
        status = server.stdout.readline().strip()
        assert status == "0", f"{script} ended with {status}\n" + output.read()[-3000:]


@functools.cache
def _server() -> subprocess.Popen[str]:
    """The process that imports torch and the kernels once, from which each script gets one; it ends with this one."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(sys.path)}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, __file__], env=environment, stdin=pipe, stdout=pipe, text=True)


def _serve() -> None:
    for line in sys.stdin:
        script, output = json.loads(line)
        if (child := os.fork()) == 0:
            _run(script, output)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _run(script: str, output: str) -> None:
    """Runs a script as Python would, with its output in a file, and ends the process."""
    file, status = os.open(output, os.O_WRONLY), 1
    os.dup2(file, 1)
    os.dup2(file, 2)
    try:
        runpy.run_path(script, run_name="__main__")
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(status)


class Launcher:
    """What `wrap_triton` gives, without its check that tensors are on a GPU."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        return self.kernel[grid]


def interpret(*modules: Any) -> None:
    """Has the launches of modules run in the interpreter, with what it does otherwise than a GPU mended.

    Its conversions of float32 to FP8 and bfloat16 do not round to nearest even, that of bfloat16's subnormals to
    float32 gives other numbers, and its NaN of FP8 is 480, so torch's stand in for them. Its maximum is NaN where
    either side is, which on a GPU is the other side. It multiplies the bits of bfloat16 matrices. With NumPy 2.4 Triton
    3.6 cannot use a number of its own as the end of a range.
    """
    for module in modules:
        module.wrap_triton = Launcher
    convert, patch = interpreter._convert_float, interpreter._patch_lang_tensor
    patch_all, patched = interpreter._patch_lang, set[Any]()
    multiply = interpreter.InterpreterBuilder.create_dot

    def convert_float(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source in FP8 and target == tl.float32:
            codes = torch.from_numpy(np.ascontiguousarray(values).view(np.uint8))
            return codes.view(ELEMENTS[FP8[source]].dtype).float().numpy().view(np.uint32).reshape(values.shape)
        if source == tl.bfloat16 and target == tl.float32:
            return np.ascontiguousarray(values).view(np.uint16).astype(np.uint32).reshape(values.shape) << 16
        if source != tl.float32 or target not in (*FP8, tl.bfloat16):
            return convert(values, source, target, rounding)
        floats = torch.from_numpy(np.ascontiguousarray(values).view(np.float32))
        if target == tl.bfloat16:
            return floats.bfloat16().view(torch.int16).numpy().view(np.uint16).reshape(values.shape)
        return reference.cast_fp8(floats, ELEMENTS[FP8[target]]).view(torch.uint8).numpy().reshape(values.shape)

    def patch_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def patch_language(function: Any) -> Any:
        parts = {value for value in function.__globals__.values() if value is tl or value is tl.core}
        if parts <= patched:
            return interpreter._LangPatchScope()
        patched.update(parts)
        scope = patch_all(function)
        restore = scope.restore
        scope.restore = lambda: (patched.clear(), restore())
        return scope

    def dot(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
        floats = [
            interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
            if x.dtype == tl.bfloat16
            else x
            for x in (a, b)
        ]
        return multiply(builder, *floats, *rest)

    interpreter._convert_float = convert_float
    interpreter.InterpreterBuilder.create_dot = dot
    interpreter.InterpreterBuilder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    interpreter._patch_lang_tensor = patch_tensor
    interpreter._patch_lang = patch_language


if __name__ == "__main__":
    _serve()
