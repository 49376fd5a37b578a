"""What a report calls quantized has run quantized."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from helpers import eager_backend
from torch import fx, nn

import fxquant
from fxquant import Backend


def test_a_graph_counts_once_where_torch_starts_again() -> None:
    """A Python float of the embedding becomes a tensor: torch compiles the graph twice, and takes the second."""
    model = nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 96), nn.Linear(96, 32))
    for recipe in ("rowwise", "delayed_scaling"):
        torch.compiler.reset()
        backend = eager_backend(recipe)
        compiled = torch.compile(model, backend=backend, dynamic=True)
        compiled(torch.randint(64, (2, 8))).sum().backward()
        report = backend.report()
        assert backend.captured == 1 and report.summary()["matmuls"] == 2
        assert len({(d.site, d.gemm, d.direction, d.role) for d in report.decisions}) == len(report.decisions)


class Failing(Backend):
    """Fails to compile graphs of more than one layer."""

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        if len(gm.graph.find_nodes(op="call_function", target=torch.ops.fxquant.linear.default)) > 1:
            raise NotImplementedError
        return super().compile(gm, example_inputs)


def test_a_graph_that_cannot_be_compiled_does_not_count() -> None:
    model, x = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 32)), torch.randn(32, 64)
    backend = Failing("mxfp8", inner="aot_eager")
    with torch.no_grad(), torch._dynamo.config.patch(suppress_errors=True):
        assert torch.equal(torch.compile(model, backend=backend)(x), model(x))
    report = backend.report()
    assert not report.decisions and backend.captured == 0
    assert report.coverage == 0 and "not compiled: no graph has run" in str(report)


def test_a_graph_that_has_not_run_does_not_count() -> None:
    compiled = fxquant.compile(nn.Linear(64, 32), "mxfp8", options={"inner": "aot_eager"})
    assert compiled.report().coverage == 0
    compiled(torch.randn(32, 64))
    assert compiled.report().coverage == 1 and not compiled.report().uncompiled
