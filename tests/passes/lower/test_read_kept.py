"""Kernels of a backward read what a forward kept as it is kept, and give the same bits."""

from __future__ import annotations

import torch
from helpers import assert_same_bits, listing
from torch import Tensor, fx

from fxquant.compat.private import make_fx
from fxquant.kernels.cast.producers import KEPT
from fxquant.passes.lower.lower import lower
from fxquant.passes.lower.read_kept import read_kept
from fxquant.passes.settings import Settings

ops = torch.ops.fxquant
CPU = Settings(device="cpu")
SPEC = "per_tensor_e4m3"


def kept(*shape: int, seed: int = 0) -> list[Tensor]:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return [part.view(*shape[:-1], -1) for part in ops.quantize_kept(x.flatten(0, -2))]


def restored(parts: list[Tensor], rows: int, length: int) -> Tensor:
    size = [parts[0].shape[-2], length]
    return ops.dequantize(parts, KEPT, "rowwise", size, torch.bfloat16).permute(0, 1, 2).view(rows, length)  # type: ignore[no-any-return]


def backward(spec: str) -> tuple[fx.GraphModule, list[Tensor]]:
    """The gradients of SiLU times a factor, and the product again, of kept tensors [2, 16, 128]."""

    def run(*x: Tensor) -> list[Tensor]:
        gate, up = (restored([*x[at : at + 2]], 32, 128) for at in (0, 2))
        grads = ops.produce_quantize([gate, up, x[4]], f"silu_mul_grad rowwise={spec}", [None] * 2, [None] * 2, False)
        product = ops.produce_quantize([gate, up], f"silu_mul columnwise={spec}", [None], [None], False)
        return [*grads, *product]

    inputs = [*kept(2, 16, 128), *kept(2, 16, 128, seed=1), torch.randn(32, 128).bfloat16()]
    return make_fx(run, tracing_mode="fake")(*inputs), inputs


def test_nothing_is_restored_for_kernels_that_read_what_is_kept() -> None:
    (plain, inputs), (gm, _) = backward(SPEC), backward(SPEC)
    assert read_kept(gm.graph, CPU) == 2 and read_kept(gm.graph, CPU) == 0
    assert "dequantize" not in listing(gm.graph)
    fused = [node for node in gm.graph.nodes if node.target is ops.produce_quantize.default]
    assert [node.args[1].split()[0] for node in fused] == ["silu_mul_grad_kept", "silu_mul_kept"]
    assert [[*map(str, (x.meta["val"].shape for x in node.args[0]))] for node in fused][1] == [
        "torch.Size([32, 128])", "torch.Size([32, 128])", "torch.Size([32, 1])", "torch.Size([32, 1])"
    ]  # fmt: skip
    for each in (plain, gm):
        lower(each.graph, CPU)
        each.recompile()
    assert_same_bits(*({str(i): part.float() for i, part in enumerate(each(*inputs))} for each in (plain, gm)))


def test_amaxes_of_lines_are_taken_of_restored_tensors() -> None:
    gm, _ = backward("per_row_e4m3(pow2,torchao)")
    assert read_kept(gm.graph, CPU) == 0


def test_what_another_order_has_is_restored() -> None:
    def run(data: Tensor, scale: Tensor, grad: Tensor) -> list[Tensor]:
        x = ops.dequantize([data, scale], KEPT, "rowwise", [16, 128], torch.bfloat16)
        return ops.produce_quantize(  # type: ignore[no-any-return]
            [x.permute(1, 0, 2).reshape(32, 128), grad], f"gelu_grad rowwise={SPEC}", [None], [None], False
        )

    gm = make_fx(run, tracing_mode="fake")(*kept(2, 16, 128), torch.randn(32, 128).bfloat16())
    assert read_kept(gm.graph, CPU) == 0
