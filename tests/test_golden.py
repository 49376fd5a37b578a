"""Every golden vector is read by some test."""

from __future__ import annotations

import importlib.util
from functools import cache
from types import ModuleType

import golden

TESTS = ("test_delayed.py", "kernels/cast/test_reference.py", "kernels/cast/test_layout.py", "test_invariants.py")
"""The files whose tables take golden keys."""


@cache
def read(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"read_{name}", golden.FOLDER.parent / name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tests_that_run_on_a_gpu_are_there() -> None:
    """Each is chosen at least once: a table of keys is not empty."""
    for file, names in golden.ON_DEVICE.items():
        for name in names:
            tables = [mark.args[1] for mark in getattr(getattr(read(file), name), "pytestmark", ())]
            assert all(len(table) > 0 for table in tables), f"{file}::{name}"


def test_no_key_is_left_out() -> None:
    for name in TESTS:
        read(name)
    used = {part for _, key in golden.TABLES for part in key.split("/")}
    left = []
    for path in golden.FOLDER.glob("*.safetensors"):
        file = path.stem.partition("_")[0] if path.stem.startswith("gemm_") else path.stem
        for key in golden.load(path.stem):
            is_input = file == "inputs" or key.startswith("in/")
            if not (key.split("/")[-1] in used if is_input else (file, key) in golden.TABLES):
                left.append(f"{file}: {key}")
    assert not left, f"{len(left)} keys that no table takes: {left[:20]}"
