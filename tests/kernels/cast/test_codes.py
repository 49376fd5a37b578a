"""Kernels that call functions of other files: what Inductor copies of them is whole."""

from __future__ import annotations

import builtins
import dis
import importlib
import linecache
from typing import Any

import pytest
from torch._inductor.codegen.wrapper import user_defined_triton_kernel_transitive_closure_source_code as closure
from triton import JITFunction

MODULES = (
    "attention.triton_backward",
    "attention.triton_cast",
    "attention.triton_dequantize",
    "attention.triton_forward",
    "cast.amax",
    "cast.triton_cast",
    "cast.triton_producers",
    "grouped.triton_cast",
    "grouped.triton_gemm",
    "linear.triton_few_rows",
    "linear.triton_gemm",
    "linear.triton_weight_only",
    "state.triton",
)


@pytest.mark.parametrize("module", MODULES)
def test_every_name_of_a_copied_kernel_is_there(module: str) -> None:
    """A function that is imported under another name is copied under its own, and then not found."""
    kernels = {n: k for n, k in vars(importlib.import_module(f"fxquant.kernels.{module}")).items() if _is_kernel(n, k)}
    assert kernels
    for name, kernel in kernels.items():
        source, file = f"import triton\nimport triton.language as tl\n@triton.jit\n{closure(kernel)}", f"<{name}>"
        linecache.cache[file] = (len(source), None, source.splitlines(True), file)
        made: dict[str, Any] = {"__name__": name}
        exec(compile(source, file, "exec"), made)
        functions = [f for f in made.values() if isinstance(f, JITFunction)]
        loads = {i.argval for f in functions for i in dis.get_instructions(f.fn) if i.opname == "LOAD_GLOBAL"}
        assert not {load for load in loads if load not in made and not hasattr(builtins, load)}, name


def _is_kernel(name: str, value: Any) -> bool:
    return isinstance(value, JITFunction) and name.endswith("_kernel") and not name.startswith("_")
