"""Weights that a probe has the forward quantize for the backward are not saved in that form."""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxquant.passes.graph.names import fxquant_op
from fxquant.passes.joint.compute_once import compute_once
from fxquant.passes.joint.measured import quantize_measured_again
from fxquant.passes.settings import Settings

CPU = Settings(device="cpu")
TEXT = "per_tensor_e4m3"
_ops = torch.ops.fxquant


def joint(*, measured: bool, read: bool = False) -> fx.Graph:
    """A weight that the backward multiplies in columns, `measured` in the forward, or `read` there."""

    def run(w: Tensor, scale: Tensor, tangents: Tensor) -> list[Tensor]:
        results = []
        column = _ops.quantize(w, TEXT, "columnwise", scale)
        if measured:
            results.append(_ops.probe_operand(w.mT, _ops.quantize(w, TEXT, "columnwise", scale), TEXT, "values"))
        if read:
            results.append(column[0] + 1 if column[0].dtype == torch.uint8 else column[0].float())
        grad = _ops.quantize(tangents, TEXT, "rowwise", scale)
        return [*results, _ops.scaled_mm(grad, column, TEXT, TEXT, None, w.dtype, False)]

    w, tangents = torch.randn(48, 64).bfloat16(), torch.randn(32, 48).bfloat16()
    return make_fx(run, tracing_mode="fake")(w, torch.ones(1), tangents).graph


def marked(graph: fx.Graph) -> list[str]:
    return [fxquant_op(node) or node.name for node in graph.nodes if "recompute" in node.meta]


def test_a_weight_that_is_measured_is_quantized_again() -> None:
    graph = joint(measured=True)
    assert compute_once(graph, CPU) == 1
    assert quantize_measured_again(graph, CPU) == 1
    assert marked(graph)[0] == "quantize" and len(marked(graph)) == 3


def test_what_the_forward_does_not_measure_or_multiplies_itself_stays() -> None:
    for graph in (joint(measured=False), joint(measured=True, read=True)):
        compute_once(graph, CPU)
        assert quantize_measured_again(graph, CPU) == 0 and not marked(graph)
