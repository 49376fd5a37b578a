"""Scales lie in the order of tensor cores where these, and dequantizations, are all that reads them."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from helpers import listing
from torch import Tensor, fx

from fxquant.compat.private import make_fx
from fxquant.kernels.linear import choice
from fxquant.passes.joint.swizzle_scales import swizzle_scales
from fxquant.passes.settings import Settings

_ops = torch.ops.fxquant


@pytest.fixture(autouse=True)
def blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "capability", lambda device: (10, 0))


def traced(shared: str, text: str = "mxfp8_e4m3") -> fx.GraphModule:
    """A product of x and w, and what is `shared` besides: nothing, values, or the scale of x."""

    def run(x: Tensor, w: Tensor) -> list[Tensor]:
        left, right = _ops.quantize(x, text, "rowwise"), _ops.quantize(w, text, "rowwise")
        y = _ops.scaled_mm(left, right, text, text, None, torch.float32, False)
        more = {
            "": lambda: [],
            "values": lambda: [_ops.dequantize(left, text, "rowwise", [40, 96], torch.float32)],
            "scale": lambda: [left[1]],
        }
        return [y, *more[shared]()]

    return make_fx(run, tracing_mode="fake")(torch.randn(40, 96), torch.randn(48, 96))


def test_before_and_after() -> None:
    gm = traced("values")
    x = torch.randn(40, 96), torch.randn(48, 96)
    expected = gm(*x)
    assert swizzle_scales(gm.graph, Settings()) == 2
    assert_expected_inline(
        listing(gm.graph),
        """\
%0 = input [40, 96]
%1 = input [48, 96]
%2 = quantize(%0, mxfp8_e4m3(swizzled), rowwise)
%3 = getitem(%2, 0)
%4 = getitem(%2, 1)
%5 = quantize(%1, mxfp8_e4m3(swizzled), rowwise)
%6 = getitem(%5, 0)
%7 = getitem(%5, 1)
%8 = scaled_mm([%3, %4], [%6, %7], mxfp8_e4m3(swizzled), mxfp8_e4m3(swizzled), None, float32, False)
%9 = dequantize([%3, %4], mxfp8_e4m3(swizzled), rowwise, [40, 96], float32)
return [%8, %9]""",
    )
    gm.recompile()
    assert all(map(torch.equal, gm(*x), expected)), "the meaning knows every order"
    scale = next(node for node in gm.graph.nodes if node.name == "getitem_1")
    assert scale.meta["val"].shape == (128, 4)
    assert swizzle_scales(gm.graph, Settings()) == 0


def test_what_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale that the graph returns, packages, other formats and other cards."""
    gm, x = traced("scale"), (torch.randn(40, 96), torch.randn(48, 96))
    expected = gm(*x)
    assert swizzle_scales(gm.graph, Settings()) == 1
    gm.recompile()
    assert all(map(torch.equal, gm(*x), expected)), "operands whose scales lie in two orders"
    assert swizzle_scales(traced("").graph, Settings(portable=True)) == 0
    assert swizzle_scales(traced("", "per_row_e4m3").graph, Settings()) == 0
    monkeypatch.setattr(choice, "capability", lambda device: (9, 0))
    assert swizzle_scales(traced("").graph, Settings()) == 0
