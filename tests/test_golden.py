"""Every golden vector is read by some test."""

from __future__ import annotations

import importlib.util

import golden

TESTS = ("test_delayed.py", "kernels/cast/test_reference.py", "kernels/cast/test_layout.py", "test_invariants.py")
"""The files whose tables take golden keys."""


def test_no_key_is_left_out() -> None:
    for name in TESTS:
        spec = importlib.util.spec_from_file_location(f"read_{name}", golden.FOLDER.parent / name)
        assert spec is not None and spec.loader is not None
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    used = {part for _, key in golden.TABLES for part in key.split("/")}
    left = []
    for path in golden.FOLDER.glob("*.safetensors"):
        file = path.stem.partition("_")[0] if path.stem.startswith("gemm_") else path.stem
        for key in golden.load(path.stem):
            is_input = file == "inputs" or key.startswith("in/")
            if not (key.split("/")[-1] in used if is_input else (file, key) in golden.TABLES):
                left.append(f"{file}: {key}")
    assert not left, f"{len(left)} keys that no table takes: {left[:20]}"
