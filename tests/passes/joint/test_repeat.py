"""What a backward computes again, and which inputs it may change between two backwards."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from helpers import listing
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxquant.compat.private import prefer_recompute
from fxquant.passes.graph.names import op_name
from fxquant.passes.joint.repeat import mark_recompute, save_state_itself
from fxquant.passes.settings import Settings

_ops = torch.ops.fxquant
ROWS, INNER, OUTER = 2048, 64, 64


def block(x: Tensor, h: Tensor, w: Tensor, tangents: Tensor) -> list[Tensor]:
    """A product that is added to a block's input, and a backward that reads what the product was made of."""
    a = _ops.quantize(x, "mxfp8_e4m3", "rowwise")
    b = _ops.quantize(w, "mxfp8_e4m3", "rowwise")
    heads = _ops.quantize_heads(h, "per_tensor_e4m3", 1, False)
    o = _ops.dequantize_heads(heads, "per_tensor_e4m3", 1, False, h.shape[-2:], h.dtype)
    total = _ops.scaled_mm(a, b, "mxfp8_e4m3", "mxfp8_e4m3", None, torch.bfloat16, False) + x
    return [total, o, tangents * x, tangents * total]


@pytest.mark.parametrize("save", ["quantized", "least"])
def test_marks(save: str) -> None:
    inputs = [torch.randn(s, dtype=torch.bfloat16) for s in ((ROWS, INNER), (1, 2, 16, 32), (OUTER, INNER))]
    gm = make_fx(block, tracing_mode="fake")(*inputs, torch.randn(ROWS, OUTER, dtype=torch.bfloat16))
    before = listing(gm.graph)
    count = mark_recompute(gm.graph, Settings(save=save))
    assert listing(gm.graph) == before
    again = fx.Graph().placeholder("x")
    prefer_recompute(again)
    marked = [node for node in gm.graph.nodes if node.meta.get("recompute") is again.meta["recompute"]]
    names = " ".join(op_name(node).removeprefix("fxquant::") for node in marked)
    assert len(marked) == count
    assert (
        names
        == {"quantized": "dequantize_heads", "least": "quantize getitem getitem dequantize_heads scaled_mm add"}[save]
    )


def test_the_backward_reaches_the_state_that_it_records_into() -> None:
    """What it changes, and the step of its records, are not saved by autograd."""

    def run(x: Tensor, amaxes: Tensor, step: Tensor, other: Tensor, tangents: Tensor) -> Tensor:
        torch.ops.aten.copy_.default(other, x)
        record = torch.ops.fxquant.record_since.default(amaxes, step, [tangents.amax(0)], [0])
        torch.ops.aten.copy_.default(amaxes, record)
        return tangents * x

    counts = torch.zeros(4, dtype=torch.int64)
    gm = make_fx(run, tracing_mode="fake")(torch.ones(4), counts, counts.clone(), torch.ones(4), torch.ones(4, 4))
    assert_expected_inline(listing(gm.graph), """\
%0 = input [4]
%1 = input [4]
%2 = input [4]
%3 = input [4]
%4 = input [4, 4]
%5 = copy_(%3, %0)
%6 = amax(%4, [0])
%7 = record_since(%1, %2, [%6], [0])
%8 = copy_(%1, %7)
%9 = mul(%4, %0)
return %9""")  # fmt: skip
    metas = {node: dict(node.meta) for node in gm.graph.nodes}
    assert save_state_itself(gm.graph, Settings()) == 2
    assert [node.target for node in gm.graph.nodes if node.meta != metas[node]] == ["amaxes_1", "step_1"]
