"""The kernels of probes in Triton's interpreter, beside the reference; run by test_launch.py."""

from __future__ import annotations

import math

import torch
from interpreting import interpret
from torch import Tensor

from fxquant import BlockQuantizer
from fxquant.formats import QuantSpec
from fxquant.kernels.cast import reference as cast
from fxquant.kernels.cast.ops import quantize_operand
from fxquant.kernels.probe import reference, triton_launch, triton_measure, triton_merge

interpret()
triton_measure.multiprocessors = lambda device: 1
triton_measure._PER_PROCESSOR = 3

FORMATS = (
    "per_tensor_e4m3", "per_tensor_e5m2", "per_row_e4m3", "block_1x128_e4m3", "block_128x128_e4m3",
    "mxfp8_e4m3(swizzled)", "mxfp8_2d_e5m2", "nvfp4", "nvfp4(rht)", "nvfp4_2d(swizzled)", "nvfp4(row_scaled=True)",
    "nvfp4(rht,random_signs=False,swizzled)", "identity",
)  # fmt: skip
SHAPES: tuple[tuple[tuple[int, ...], torch.dtype], ...] = (
    ((96, 144), torch.bfloat16), ((33, 80), torch.float32), ((2, 48, 48), torch.float16),
)  # fmt: skip


def values(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Numbers of many sizes, an outlier, zeros, and a few that are none."""
    generator = torch.Generator().manual_seed(len(shape))
    x = torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-9, 3, (shape[-1],), generator=generator))
    x[..., 5, 7] = 300.0
    x[..., 2, :] = 0.0
    if dtype != torch.float16:
        x[..., 3, 11] = math.inf
        x[..., 1, 40] = math.nan
        x[..., 9, :] *= 2.0**-70
    return x.to(dtype)


def same(got: Tensor, wanted: Tensor, what: str) -> None:
    for name, a, b in zip(reference.COLUMNS, got.tolist(), wanted.tolist(), strict=True):
        assert a == b or (math.isnan(a) and math.isnan(b)) or abs(a - b) <= 1e-5 * abs(b), (what, name, a, b)


def quantized(x: Tensor, text: str) -> tuple[list[Tensor], QuantSpec]:
    spec = QuantSpec.parse(text)
    return ([x] if spec.is_identity else cast.quantize(x, spec)), spec


def check_values_in_memory() -> None:
    """A quantizer that is no built-in format is compared with the values that it gives, beside codes or without."""
    for quantizer in (BlockQuantizer("int8", block=(4, 8)), BlockQuantizer("e2m3", block=(1, 48))):
        x = values((96, 144), torch.bfloat16)
        parts, spec = quantize_operand(x, quantizer.operand_spec(), "rowwise")
        wanted = reference.statistics(x, parts, spec, reference.GROUPS)
        same(triton_launch.statistics(x, parts, spec, reference.GROUPS), wanted, str(quantizer))


def check_products() -> None:
    generator = torch.Generator().manual_seed(0)
    for text, other, columns in (
        ("per_tensor_e5m2", "per_tensor_e4m3", 600), ("nvfp4(rht)", "nvfp4(rht)", 96), ("mxfp8_e4m3", "identity", 80),
    ):  # fmt: skip
        a = torch.randn(300, columns, generator=generator) * 2.0**-40
        b = torch.randn(columns, 70, generator=generator).bfloat16().mT
        sides = [quantized(x, name) for x, name in ((a, text), (b, other))]
        parts, specs = [side[0] for side in sides], [side[1] for side in sides]
        for gemm in ("fprop", "wgrad"):
            wanted = reference.products((a, b), parts, specs, gemm)
            for pair in ((a, b), (reference.sampled(a), reference.sampled(b))):
                same(triton_launch.products(pair, parts, specs, gemm), wanted, f"{text} {other} {gemm}")
                same(reference.products(pair, parts, specs, gemm), wanted, "rows that were picked")


def check_merging() -> None:
    x, spec = values((96, 144), torch.bfloat16), QuantSpec.parse("per_tensor_e4m3")
    vectors = [reference.statistics(t, cast.quantize(t, spec), spec, reference.GROUPS) for t in (x, x * 2, x[:48])]
    nothing = reference.neutral(x.device)
    old, new = (torch.stack([*pair, nothing]) for pair in (vectors[:2], vectors[1:]))
    for pair in ((old, new), (new, old), (old, old.flip(0))):
        assert torch.equal(triton_merge.merge(*pair), reference.merge(*pair))


def main() -> None:
    check_merging()
    check_products()
    check_values_in_memory()
    for number, text in enumerate(FORMATS):
        for at in (number % 3, (number + 1) % 3):
            shape, dtype = SHAPES[at]
            x = values(shape, dtype)
            t = x.mT if (number + at) % 2 else x
            parts, spec = quantized(t, text)
            for groups in (reference.GROUPS, ("blocks", "scales"))[: 1 + (at == 0)]:
                what = f"{text} {tuple(t.shape)} {dtype} {groups}"
                same(
                    triton_launch.statistics(t, parts, spec, groups), reference.statistics(t, parts, spec, groups), what
                )


if __name__ == "__main__":
    main()
