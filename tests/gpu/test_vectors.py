"""The golden vectors on CUDA: payloads, scales and delayed-scaling traces eagerly, GEMMs through the compiled path."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import golden
import pytest
import torch
from test_invariants import CASES, GOLDEN, ROUTES
from torch import Tensor, nn

from fxquant import Backend

pytestmark = pytest.mark.gpu

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("file", golden.ON_DEVICE)
def test_vectors_on_the_gpu(file: str) -> None:
    """Tests of the CPU, with every vector on the GPU."""
    tests = [f"{TESTS / file}::{name}" for name in golden.ON_DEVICE[file]]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "FXQUANT_GOLDEN_DEVICE": "cuda"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    print(file, done.stdout.splitlines()[-1])
    assert passed and int(passed[1]) > len(tests), done.stdout[-200:]


@pytest.mark.parametrize("route", ROUTES)
def test_compiled_gemms(route: str) -> None:
    """Compiled by Inductor. Hopper's FP8 tensor cores keep about 14 bits of a product: 2^-11 of the sum of |a b|."""
    for problem in (p for p, r in CASES if r == route):
        x, w, dy = (GOLDEN[f"{problem}/{key}"].cuda() for key in ("x", "w", "dy"))
        layer = nn.Linear(w.shape[1], w.shape[0], bias=False, device="cuda", dtype=w.dtype)
        layer.weight = nn.Parameter(w)
        x.requires_grad_()
        y = torch.compile(layer, backend=Backend(ROUTES[route]), dynamic=False)(x)
        y.backward(dy)
        got: dict[str, Tensor | None] = {"y": y.detach(), "dx": x.grad, "dw": layer.weight.grad}
        x, w, dy = x.detach().float(), w.float(), dy.float()
        magnitude = {"y": x.abs() @ w.abs().mT, "dx": dy.abs() @ w.abs(), "dw": dy.abs().mT @ x.abs()}
        for key, total in magnitude.items():
            exact, value = GOLDEN[f"{problem}/{route}/{key}"].cuda(), got[key]
            assert value is not None
            bound = 2.0**-11 * total + 2.0**-8 * exact.abs()
            worst = ((value.float() - exact).abs() / bound).nan_to_num(0.0).max().item()
            print(f"{problem} {route} {key}: {worst:.2f} of the bound")
            assert worst <= 1, f"{problem} {key}: {worst:.1f} times the bound"
