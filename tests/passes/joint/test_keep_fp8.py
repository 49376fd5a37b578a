"""A forward keeps tensors in FP8 for its backward: which ones, how many bytes, and what gradients lose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from helpers import NAMES, eager_backend, listing, train_step
from saved import saved_tensors
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from fxquant import Report
from fxquant.bench.training import LLAMA3_8B, Stack
from fxquant.formats import QuantSpec
from fxquant.kernels.cast import reference
from fxquant.kernels.cast.producers import KEPT
from fxquant.passes.graph.meta import VAL
from fxquant.passes.graph.names import op_name
from fxquant.passes.joint.keep_fp8 import keep_fp8
from fxquant.report.text import ERROR_OF_KEPT

BLOCK = Stack(blocks=1, hidden=128, ffn=384, heads=2, kv_heads=1, batch=2, length=64)


def halves(*, last: bool = False, dtype: torch.dtype = torch.bfloat16, sums: bool = False) -> tuple[fx.Graph, fx.Graph]:
    """A forward that keeps [4, 2, 8, 128] with its heads transposed, and a backward that reads it."""
    forward, backward = fx.Graph(), fx.Graph()
    x, w = forward.placeholder("x"), forward.placeholder("w")
    heads = forward.call_function(
        torch.ops.aten.cumsum.default if sums else torch.ops.aten.sin.default, (x, 0)[: 1 + sums]
    )
    turned = forward.call_function(torch.ops.aten.permute.default, (heads, [0, 2, 1, 3]))
    y = forward.call_function(torch.ops.aten.mm.default, (w, w) if last else (turned, w))
    forward.output((y, w, turned))
    place, tangents = backward.placeholder(turned.name), backward.placeholder("tangents_1")
    backward.output((backward.call_function(torch.ops.aten.mul.Tensor, (place, tangents)),))
    values = {x: torch.randn(4, 8, 2, 128).to(dtype), w: torch.randn(128, 128).bfloat16()}
    values[heads] = values[x].sin()
    values[turned] = values[place] = values[tangents] = values[heads].permute(0, 2, 1, 3)
    for node in (*forward.nodes, *backward.nodes):
        node.meta[VAL] = values.get(node, values[w])
    return forward, backward


def test_a_tensor_is_kept_in_the_order_of_its_memory() -> None:
    forward, backward = halves()
    (kept,) = keep_fp8(forward, backward, 1)
    assert kept.what == "sin [4, 2, 8, 128]" and (kept.bytes, kept.instead) == (64 * 128 + 4 * 64, 2 * 64 * 128)
    assert_expected_inline(listing(forward), """\
%0 = input [4, 8, 2, 128]
%1 = input [128, 128]
%2 = sin(%0)
%3 = permute(%2, [0, 2, 1, 3])
%4 = permute(%3, [0, 2, 1, 3])
%5 = view(%4, [-1, 128])
%6 = quantize_kept(%5)
%7 = getitem(%6, 0)
%8 = getitem(%6, 1)
%9 = view(%7, [4, 8, 2, 128])
%10 = view(%8, [4, 8, 2, 1])
%11 = mm(%3, %1)
return [%11, %1, %9, %10]""")  # fmt: skip
    assert_expected_inline(listing(backward), """\
%0 = input [4, 8, 2, 128]
%1 = input [4, 8, 2, 1]
%2 = input [4, 2, 8, 128]
%3 = dequantize([%0, %1], block_1x128_e4m3, rowwise, [2, 128], bfloat16)
%4 = permute(%3, [0, 2, 1, 3])
%5 = mul(%4, %2)
return [%5]""")  # fmt: skip
    (x,) = (node for node in backward.nodes if op_name(node) == "permute")
    assert x.meta[VAL].shape == (4, 2, 8, 128) and x.meta[VAL].stride() == (2048, 128, 256, 1), "as the tensor has them"


def test_of_float32_sums_are_kept_as_they_are() -> None:
    """The log-sum-exp of an attention is one of these; a residual stream that norms read is not."""
    (kept,) = keep_fp8(*halves(dtype=torch.float32), 1)
    assert (kept.bytes, kept.instead) == (64 * 128 + 4 * 64, 4 * 64 * 128)
    assert not keep_fp8(*halves(dtype=torch.float32, sums=True), 1) and keep_fp8(*halves(sums=True), 1)


def test_what_stands_behind_the_last_product_is_kept_as_it_is() -> None:
    forward, backward = halves(last=True)
    before = listing(forward), listing(backward)
    assert not keep_fp8(forward, backward, 1) and (listing(forward), listing(backward)) == before


def block() -> tuple[nn.Module, Tensor]:
    return BLOCK.model(), BLOCK.input()


@pytest.mark.parametrize("recipe", ["current_scaling", "nvfp4"])
def test_a_block_keeps_bytes(recipe: str) -> None:
    """An element takes one, 128 of them a scale: queries, keys, values, attention's output, the sum, gate and up."""
    kept = saved_tensors(block, recipe, save="fp8")
    rows, elements = BLOCK.batch * BLOCK.length, 3 * BLOCK.hidden + 2 * BLOCK.kv_heads * 64 + 2 * BLOCK.ffn
    vectors = 4 * (BLOCK.heads + 2)
    assert 0 <= kept.total - rows * (elements + elements // 32 + vectors) < 1024
    assert kept.total < 0.45 * saved_tensors(block, "high_precision").total, "log-sum-exps weigh more here"


@pytest.mark.sweep
@pytest.mark.parametrize("recipe", ["delayed_scaling", *NAMES])
def test_four_8b_blocks(recipe: str) -> None:
    def make() -> tuple[nn.Module, Tensor]:
        return LLAMA3_8B.model(), LLAMA3_8B.input()

    kept, plain = (saved_tensors(make, name, save=save).total / 2**30 for name, save in
                   ((recipe, "fp8"), ("high_precision", "quantized")))  # fmt: skip
    assert kept < 2.92 and kept + 1 / 8 < 0.4 * (plain + 1 / 8)


class Repeated(nn.Module):
    """A block inside of an activation checkpoint, and one behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = BLOCK.model(), BLOCK.model()

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(checkpoint(self.inner, x, use_reentrant=False))  # type: ignore[no-any-return]


def gradients(
    recipe: str, save: str = "", make: Any = BLOCK.model, batches: Sequence[int] = (2,)
) -> tuple[dict[str, Tensor], Report]:
    """Outputs and gradients of a step for each batch, in one graph, and the report."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model, found = make().bfloat16(), {}
    backend = eager_backend(recipe, save=save or "quantized")
    run = torch.compile(model, backend=backend, fullgraph=True, dynamic=len(batches) > 1)
    for batch in batches:
        x = torch.randn(batch, BLOCK.length, BLOCK.hidden).bfloat16().requires_grad_()
        step = train_step(model, run, x) | {"input": x.grad}
        found |= {f"{name} {batch}": value.float() for name, value in step.items()}
    return found, backend.report()


def off(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("recipe", ["delayed_scaling", "nvfp4"])
def test_outputs_are_the_same_and_gradients_lose_little(recipe: str) -> None:
    plain, default, kept = (gradients(*case)[0] for case in (("high_precision", ""), (recipe, ""), (recipe, "fp8")))
    assert torch.equal(default.pop("output 2"), kept["output 2"])
    errors = {name: (off(kept[name], plain[name]), off(default[name], plain[name])) for name in default}
    assert all(after < 1.2 * before + 0.02 for after, before in errors.values()), errors
    assert any(not torch.equal(kept[name], default[name]) for name in default)


def test_reports_say_what_is_kept_and_how_far_off() -> None:
    _, report = gradients("mxfp8", "fp8")
    assert (
        len(report.kept_fp8) == 7 and report.saved is not None and report.saved.total < 0.53 * report.saved.unquantized
    )
    (line,) = (line for line in str(report).splitlines() if line.startswith("kept in FP8 for the backward"))
    assert ERROR_OF_KEPT in line and "2 x scaled_mm [128, 384]" in line
    assert Report.from_json(report.to_json()).kept_fp8 == report.kept_fp8


def test_batches_of_any_size_are_kept() -> None:
    default, _ = gradients("mxfp8", batches=(2, 3))
    kept, report = gradients("mxfp8", "fp8", batches=(2, 3))
    assert max(off(kept[name], value) for name, value in default.items()) < 0.1 and len(report.kept_fp8) == 7


def test_beside_checkpoints() -> None:
    default, _ = gradients("current_scaling", "", Repeated)
    kept, report = gradients("current_scaling", "fp8", Repeated)
    assert max(off(kept[name], value) for name, value in default.items()) < 0.1
    assert 7 <= len(report.kept_fp8) < 10, "of one block, and what the checkpoint begins with"


def test_the_error_that_is_told() -> None:
    x = torch.randn(1024, 1024)
    row = QuantSpec.parse(KEPT)
    kept = reference.dequantize(reference.quantize(x, row), row)
    assert f"{off(kept, x):.1%} rms of normal values" in ERROR_OF_KEPT
    large = x.abs() > x.abs().max() / 1024
    assert ((kept - x).abs() / x.abs())[large].max() <= 0.0625
