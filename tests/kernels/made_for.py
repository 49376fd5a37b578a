"""Triton kernels compiled for cards that are not here, by the ptxas that Triton ships: registers, spills, stack."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

_BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_POINTERS = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5", torch.uint8: "*u8", torch.int8: "*i8", torch.int32: "*i32", torch.int64: "*i64",
    torch.bool: "*i1",
}  # fmt: skip


@dataclass(frozen=True)
class Made:
    """What became of one launch."""

    name: str
    ptx: str
    shared: int
    registers: int
    spilled: int
    stack: int


class Compiler:
    """What `wrap_triton` gives, but a launch compiles for an architecture (90, 100, ..) and runs nothing."""

    def __init__(self, architecture: int) -> None:
        self.architecture = architecture
        self.launches: list[Made] = []

    def __call__(self, kernel: Any) -> Any:
        return _Launcher(self, kernel)


@dataclass(frozen=True)
class _Launcher:
    compiler: Compiler
    kernel: Any

    def __getitem__(self, grid: Any) -> Any:
        return self.compile

    def compile(self, *values: Any, **options: Any) -> None:
        named = {name: options.pop(name) for name in list(options) if name in self.kernel.arg_names}
        arguments = {**dict(zip(self.kernel.arg_names, values, strict=False)), **named}
        constants = {p.name: arguments[p.name] for p in self.kernel.params if p.is_constexpr}
        constants |= {name: value for name, value in arguments.items() if value is None}
        types = {name: _type(arguments[name]) for name in self.kernel.arg_names}
        types |= dict.fromkeys(constants, "constexpr")
        aligned = [["tt.divisibility", 16]]
        attributes = {
            (i,): aligned for i, (name, value) in enumerate(arguments.items())
            if name not in constants and (isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0))
        }  # fmt: skip
        source = ASTSource(self.kernel, types, constants, attributes)
        made = triton.compile(source, GPUTarget("cuda", self.compiler.architecture, 32), options)
        log = _assembled(made.asm["ptx"], self.compiler.architecture)

        def number(pattern: str) -> int:
            return max((int(text) for text in re.findall(pattern, log)), default=0)

        self.compiler.launches.append(
            Made(
                self.kernel.__name__, made.asm["ptx"], made.metadata.shared, number(r"Used (\d+) registers"),
                number(r"(\d+) bytes spill stores"), number(r"(\d+) bytes stack frame"),
            )
        )  # fmt: skip


def _type(value: Any) -> str:
    if isinstance(value, Tensor):
        return _POINTERS[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def _assembled(ptx: str, architecture: int) -> str:
    """What ptxas says of code; the one for newer cards stands beside it."""
    newer = _BIN / "ptxas-blackwell"
    assembler = newer if architecture >= 100 and newer.exists() else _BIN / "ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [assembler, f"-arch=sm_{architecture}a", "-v", "-O3", "-o", "/dev/null", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stderr
