"""Casts fused with what produces their tensor, on CUDA: bytes, and a block that trains as without the fusion."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from helpers import GatedBlock
from torch import Tensor

import fxquant
from fxquant.formats import QuantSpec
from fxquant.kernels.cast import reference, triton_cast
from fxquant.kernels.cast.producers import KEPT, PRODUCERS, named

pytestmark = pytest.mark.gpu

SPECS = (
    "per_tensor_e4m3", "per_tensor_e5m2(slot=1)", "per_row_e4m3(pow2,torchao)", "block_1x128_e4m3(pow2)", "mxfp8_e4m3",
)  # fmt: skip


def inputs_of(name: str, rows: int, length: int) -> list[Tensor]:
    heads = (2, length // 32, rows // 2, 32)
    shapes = {"matrix": (rows, length), "row": (rows, 1), "column": (length,), "heads": heads}
    generator = torch.Generator().manual_seed(rows)
    made = [(torch.randn(shapes[kind], generator=generator), kind) for kind in PRODUCERS[name].inputs]
    return [(x if kind == "row" or PRODUCERS[name].wide else x.bfloat16()).cuda() for x, kind in made]


@pytest.mark.parametrize("shape", [(384, 640), (200, 416)], ids=str)
@pytest.mark.parametrize("name", PRODUCERS)
def test_payloads_are_those_of_the_tensor_that_is_not_written(name: str, shape: tuple[int, int]) -> None:
    """Computed in float64 and rounded once; float32 arithmetic may now and then round to the neighbour."""
    inputs = inputs_of(name, *shape)
    made = [y.bfloat16() for y in PRODUCERS[name]([x.double() for x in inputs])]
    for text in SPECS:
        spec = QuantSpec.parse(text)
        scales = [torch.tensor([3.0 + i], device="cuda") if spec.is_delayed else None for i in range(len(made))]
        got = triton_cast.produce(name, inputs, spec, spec, scales, scales, spec.is_delayed)
        expected = []
        for y, scale in zip(made, scales, strict=True):
            expected += [*reference.quantize(y, spec, scale), *reference.quantize(y.mT, spec, scale)]
            expected += [reference.amax(y)] if spec.is_delayed else []
        for i, (a, b) in enumerate(zip(got, expected, strict=True)):
            assert a.shape == b.shape and a.dtype == b.dtype
            same = a.contiguous().view(torch.uint8) == b.contiguous().view(torch.uint8)
            assert same.float().mean() > 0.999, f"{text}, part {i}"


@pytest.mark.parametrize("shape", [(384, 640), (200, 256)], ids=str)
@pytest.mark.parametrize(
    "name", ["silu_mul", "silu_mul_grad", "silu_mul_grad_gate", "gelu", "gelu_grad", "rms_norm", "rms_norm_rounded"]
)
def test_kept_inputs_give_the_bytes_of_restored_ones(name: str, shape: tuple[int, int]) -> None:
    kept, spec = named(f"{name}_kept").kept, QuantSpec.parse(KEPT)
    inputs = inputs_of(name, *shape)
    parts = [triton_cast.quantize(x, spec, None) for x in inputs[:kept]]
    for (data, scale), x in zip(parts, inputs, strict=False):
        wanted = reference.quantize(x, spec)
        assert torch.equal(data.view(torch.uint8), wanted[0].view(torch.uint8)) and torch.equal(scale, wanted[1])
    read = [*(data for data, _ in parts), *inputs[kept:], *(scale.t().contiguous() for _, scale in parts)]
    restored = [*(reference.dequantize(each, spec).bfloat16() for each in parts), *inputs[kept:]]
    for text in (*SPECS[:2], *SPECS[3:]):
        side = QuantSpec.parse(text)
        scales = [torch.tensor([3.0], device="cuda") if side.is_delayed else None] * named(name).results
        got, expected = (
            triton_cast.produce(producer, given, side, side, scales, scales, side.is_delayed)
            for producer, given in ((f"{name}_kept", read), (name, restored))
        )
        for i, (a, b) in enumerate(zip(got, expected, strict=True)):
            assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)), f"{text}, part {i}"


@contextmanager
def without_fusion() -> Iterator[None]:
    with torch._inductor.config.patch(force_disable_caches=True, disabled_passes="fuse_producers"):
        yield


@pytest.mark.parametrize("recipe", ["current_scaling", "delayed_scaling", "rowwise", "float8_blockwise"])
def test_a_block_trains_as_without_fusion(recipe: str) -> None:
    def steps() -> dict[str, Tensor]:
        torch.compiler.reset()
        torch.manual_seed(0)
        model = GatedBlock(256).bfloat16().cuda()
        x = torch.randn(4, 128, 256).bfloat16().cuda().requires_grad_()
        run = fxquant.compile(model, recipe, dynamic=False)
        for _ in range(2):
            x.grad = None
            model.zero_grad()
            run(x).float().square().mean().backward()
        return {"dx": x.grad, **{name: p.grad for name, p in model.named_parameters()}}

    with without_fusion():
        plain = steps()
    for name, gradient in steps().items():
        difference = (gradient.float() - plain[name].float()).norm() / plain[name].float().norm()
        assert difference < 0.01, name
