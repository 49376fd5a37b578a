"""Operators of ours that forward and backward have in common run once, in any version of torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import Recorder, hybrid, per_role
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fxquant import MXFP8Quantizer, NVFP4Quantizer
from fxquant.passes.joint.compute_once import compute_once
from fxquant.passes.settings import Settings

_ops = torch.ops.fxquant
SPEC = "mxfp8_e4m3"


def traced(run: Any) -> Any:
    return make_fx(run, tracing_mode="fake")(torch.randn(32, 64))


def count(gm: Any, target: Any) -> int:
    return len(gm.graph.find_nodes(op="call_function", target=target))


def test_equal_operators_become_one() -> None:
    def run(x: Tensor) -> Tensor:
        row, again = _ops.quantize(x, SPEC, "rowwise"), _ops.quantize(x, SPEC, "rowwise")
        column = _ops.quantize(x, SPEC, "columnwise")
        high = [_ops.dequantize(parts, SPEC, "rowwise", x.shape, x.dtype) for parts in (row, again)]
        other = _ops.dequantize(column, SPEC, "columnwise", x.shape, x.dtype)
        return high[0] * 2 + high[1] + other  # type: ignore[no-any-return]

    gm, x = traced(run), torch.randn(32, 64)
    before = gm(x)
    assert compute_once(gm.graph, Settings()) == 2
    gm.recompile()
    assert count(gm, _ops.quantize.default) == 2 and count(gm, _ops.dequantize.default) == 2
    assert torch.equal(gm(x), before)


def test_results_share_no_memory() -> None:
    def run(x: Tensor) -> list[Tensor]:
        parts = _ops.quantize(x, SPEC, "rowwise")
        high = [_ops.dequantize(parts, SPEC, "rowwise", x.shape, x.dtype) for _ in range(3)]
        return [high[0], high[1].t(), high[2] + 1]

    gm = traced(run)
    assert compute_once(gm.graph, Settings()) == 0
    assert count(gm, _ops.dequantize.default) == 3


@pytest.mark.parametrize("inner", [False, True])
def test_a_backward_takes_what_the_forward_has_quantized(inner: bool) -> None:
    """Columns that are made of rows: of a graph's input, and of a tensor that would have to be saved for them."""
    recipe = per_role(
        input=hybrid(MXFP8Quantizer(), NVFP4Quantizer(), "rowwise_dequantized"), weight=MXFP8Quantizer(),
        grad_output=hybrid(MXFP8Quantizer(), NVFP4Quantizer()),
    )  # fmt: skip
    recorder = Recorder(recipe)
    model = nn.Sequential(nn.ReLU() if inner else nn.Identity(), nn.Linear(64, 96, bias=False))
    torch.compiler.reset()
    torch.compile(model, backend=recorder)(torch.randn(32, 64, requires_grad=True)).sum().backward()
    forward, backward = recorder.graphs
    assert count(forward, _ops.dequantize.default) == 1 and count(backward, _ops.dequantize.default) == 0
