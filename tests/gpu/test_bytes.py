"""On CUDA, eager and compiled: the bytes of the CPU reference, and GEMMs within what tensor cores promise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fxquant import Backend
from fxquant.formats import QuantSpec
from fxquant.kernels.cast import reference

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
DIRECTIONS = ("rowwise", "columnwise")
SPECS = (
    "per_tensor_e4m3", "per_tensor_e5m2", "per_tensor_e4m3(pow2)", "per_tensor_e5m2(pow2)",
    "per_tensor_e4m3(eps=0.015625)", "per_row_e4m3(pow2,torchao)", "per_row_e4m3", "per_row_e5m2(torchao)",
    "block_1x128_e4m3(pow2)", "block_1x128_e4m3", "block_1x128_e5m2(pow2)", "block_128x128_e4m3(pow2)",
    "block_128x128_e4m3", "mxfp8_e4m3", "mxfp8_e5m2", "mxfp8_2d_e4m3", "mxfp8_2d_e5m2", "mxfp8_e4m3(mode=floor)",
    "mxfp8_e4m3(mode=even)", "nvfp4", "nvfp4_2d", "nvfp4(rht)", "nvfp4(rht,random_signs=False)",
    "nvfp4(stochastic,stream=1)", "nvfp4(rht,stochastic)", "nvfp4(row_scaled)", "nvfp4(four_over_six=mae,e4m3_max=256)",
    "nvfp4_2d(four_over_six=mse)",
)  # fmt: skip
GOLDEN = Path(__file__).parents[1] / "golden" / "inputs.safetensors"


def noise(dtype: torch.dtype, *shape: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def specials(dtype: torch.dtype, *shape: int) -> Tensor:
    """Exponents from the smallest subnormal to the largest finite value; zeros of both signs; NaN and infinities."""
    generator = torch.Generator().manual_seed(7)
    exponent = torch.rand(shape, generator=generator) * 277 - 149
    x = torch.randn(shape, generator=generator).sign() * exponent.exp2().clamp(max=torch.finfo(dtype).max)
    flat = x.flatten()
    flat[::97], flat[1::101] = 0.0, -0.0
    rows = x.shape[0]
    x[rows // 2] = 0.0
    x[rows // 3, ::5], x[rows // 4, 3], x[rows // 5, 4] = float("nan"), float("inf"), -float("inf")
    return x.to(dtype)


@cache
def golden() -> dict[str, Tensor]:
    if not GOLDEN.exists():
        return {}
    load_file = pytest.importorskip("safetensors.torch").load_file
    return {f"golden {k}": v for k, v in load_file(GOLDEN).items() if v.is_floating_point() and v.ndim == 2}


@cache
def inputs() -> dict[str, Tensor]:
    made = dict(golden())
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        name = str(dtype).removeprefix("torch.")
        made |= {
            f"normal {name}": noise(dtype, 96, 160),
            f"small {name}": noise(dtype, 96, 160, scale=2.0**-20),
            f"ragged {name}": noise(dtype, 33, 50, scale=3.0),
            f"odd {name}": noise(dtype, 129, 127),
            f"special {name}": specials(dtype, 64, 96),
            f"zero {name}": torch.zeros(32, 64, dtype=dtype),
            f"one row {name}": noise(dtype, 1, 48),
        }
    return made


def tiled(x: Tensor, rows: int, columns: int) -> Tensor:
    """`x` repeated and cut to a size, so that many inputs share one compilation."""
    times = -(-rows // x.shape[0]), -(-columns // x.shape[1])
    return x.repeat(times)[:rows, :columns].contiguous()


def is_nan(data: Tensor) -> Tensor:
    return data.isnan() if data.dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float32) else data < 0


def difference(got: Tensor, expected: Tensor) -> str:
    """What differs in two tensors, bit by bit with NaN as one class; empty when nothing does."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return f"{got.dtype} {list(got.shape)}, expected {expected.dtype} {list(expected.shape)}"
    strides = "" if got.is_contiguous() else f"strides {got.stride()}"
    got = got.cpu().contiguous()
    integer = {1: torch.uint8, 4: torch.int32}[got.element_size()]
    same = (got.view(integer) == expected.contiguous().view(integer)) | (is_nan(got) & is_nan(expected))
    wrong = (~same).nonzero()
    if not len(wrong):
        return strides
    where = tuple(wrong[0].tolist())
    bits = [hex(t.contiguous().view(integer)[where].item() & 0xFFFFFFFF) for t in (got, expected)]
    return f"{len(wrong)} of {got.numel()} differ, first at {where}: {bits[0]}, expected {bits[1]}"


def differences(got: Sequence[Tensor], expected: Sequence[Tensor], case: str) -> list[str]:
    assert len(got) == len(expected), case
    names = ("payload", "scale", "global amax")
    texts = ((name, difference(g, e)) for name, g, e in zip(names, got, expected, strict=False))
    return [f"{case}, {name}: {text}" for name, text in texts if text]


def state_of(spec: str, device: str) -> Tensor | None:
    """Seed, step and number, for specs that round stochastically."""
    return torch.tensor([5, 7, 3], device=device) if QuantSpec.parse(spec).stochastic else None


def quantize_both(x: Tensor, spec: str, state: Tensor | None = None) -> list[list[Tensor]]:
    return [torch.ops.fxquant.quantize(x, spec, direction, state) for direction in DIRECTIONS]


def compiled(run: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(run, backend=Backend("high_precision"), fullgraph=True, dynamic=False)


@pytest.mark.parametrize("spec", SPECS)
def test_eager_bytes(spec: str) -> None:
    wrong = []
    for name, x in inputs().items():
        got, expected = (quantize_both(x.to(where), spec, state_of(spec, where)) for where in (DEVICE, "cpu"))
        for g, e, direction in zip(got, expected, DIRECTIONS, strict=True):
            wrong += differences(g, e, f"{name} {direction}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("rows", "columns"), [(304, 272), (33, 50)])
@pytest.mark.parametrize("spec", SPECS)
def test_compiled_bytes(spec: str, rows: int, columns: int) -> None:
    """Through the passes: both directions merge to one node, which is lowered for Inductor."""
    run = compiled(quantize_both)
    wrong = []
    for name, whole in inputs().items():
        if whole.dtype == torch.float16 and columns < 128:
            continue
        x = tiled(whole, rows, columns)
        got = run(x.to(DEVICE), spec, state_of(spec, DEVICE))
        expected = quantize_both(x, spec, state_of(spec, "cpu"))
        for g, e, direction in zip(got, expected, DIRECTIONS, strict=True):
            wrong += differences(g, e, f"{name} {direction}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("spec", ["per_tensor_e4m3", "per_row_e4m3(pow2,torchao)", "mxfp8_e4m3", "nvfp4"])
def test_compiled_bytes_behind_a_producer(spec: str) -> None:
    """A quantize that Inductor fuses with what makes its input sees that input rounded to its dtype."""

    def run(x: Tensor, y: Tensor) -> tuple[Tensor, list[list[Tensor]]]:
        z = torch.nn.functional.silu(x) * y
        return z, quantize_both(z, spec)

    x, y = noise(torch.bfloat16, 192, 256), noise(torch.bfloat16, 192, 256, scale=2.0)
    z, parts = compiled(run)(x.to(DEVICE), y.to(DEVICE))
    wrong = []
    for got, expected, direction in zip(parts, quantize_both(z.cpu(), spec), DIRECTIONS, strict=True):
        wrong += differences(got, expected, direction)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("spec", SPECS)
def test_dequantize(spec: str) -> None:
    x = noise(torch.bfloat16, 96, 160)
    size = list(x.shape)

    def run(x: Tensor, state: Tensor | None) -> list[Tensor]:
        return [
            torch.ops.fxquant.dequantize(parts, spec, direction, size, torch.float32)
            for parts, direction in zip(quantize_both(x, spec, state), DIRECTIONS, strict=True)
        ]

    wrong = []
    expected = run(x, state_of(spec, "cpu"))
    inputs = x.to(DEVICE), state_of(spec, DEVICE)
    for how, got in (("eager", run(*inputs)), ("compiled", compiled(run)(*inputs))):
        for g, e, direction in zip(got, expected, DIRECTIONS, strict=True):
            wrong += differences([g.contiguous()], [e], f"{how} {direction}")
    assert not wrong, "\n".join(wrong)


PAIRS = (
    ("per_tensor_e4m3", "per_tensor_e4m3"), ("per_tensor_e5m2", "per_tensor_e4m3"),
    ("per_row_e4m3(pow2,torchao)", "per_row_e4m3(pow2,torchao)"), ("per_row_e5m2", "per_row_e4m3"),
    ("per_tensor_e4m3", "per_row_e4m3"), ("per_row_e4m3", "per_tensor_e4m3"),
    ("block_1x128_e4m3(pow2)", "block_128x128_e4m3(pow2)"), ("block_1x128_e4m3", "block_1x128_e4m3"),
    ("mxfp8_e4m3", "mxfp8_e4m3"), ("mxfp8_e5m2", "mxfp8_2d_e4m3"), ("nvfp4", "nvfp4_2d"), ("nvfp4(rht)", "nvfp4(rht)"),
    ("nvfp4(row_scaled)", "nvfp4_2d"), ("nvfp4", "nvfp4(row_scaled)"),
    ("nvfp4(four_over_six=mae,e4m3_max=256)", "nvfp4_2d(four_over_six=mae)"),
)  # fmt: skip
SHAPES = ((64, 96, 160), (136, 272, 40), (17, 640, 50), (1, 128, 16), (272, 384, 256))
"""(M, K, N): rectangular; N that no tile divides; N that is no multiple of 16; one row; whole tiles of 128 in N."""


def allowance(a: str, b: str, fast_accum: bool) -> float:
    """The accumulation error of a GEMM, as a share of the sum of |a b|.

    FP8 tensor cores of Hopper keep about 14 bits of each addend, relative to the largest; fast accumulation keeps no
    more in the running sum. What is emulated accumulates in float32.
    """
    native = all(QuantSpec.parse(spec).row.family in ("per_tensor", "per_row", "block") for spec in (a, b))
    return 2.0 ** (-11 if fast_accum else -12) if native else 2.0**-18


@pytest.mark.parametrize("fast_accum", [True, False])
@pytest.mark.parametrize(("a_spec", "b_spec"), PAIRS)
def test_gemm(a_spec: str, b_spec: str, fast_accum: bool, record_property: Callable[[str, object], None]) -> None:
    """Every family, output dtype and shape, with and without bias, against the float64 product of the operands."""
    specs = QuantSpec.parse(a_spec), QuantSpec.parse(b_spec)
    wrong, worst = [], 0.0

    def run(a: list[Tensor], b: list[Tensor], bias: Tensor) -> list[Tensor]:
        return [
            torch.ops.fxquant.scaled_mm(a, b, a_spec, b_spec, term, dtype, fast_accum)
            for dtype in (torch.bfloat16, torch.float32)
            for term in (None, bias.to(dtype))
        ]

    for m, k, n in SHAPES:
        parts = [
            reference.quantize(noise(torch.bfloat16, rows, k), spec)
            for rows, spec in zip((m, n), specs, strict=True)
        ]  # fmt: skip
        bias = noise(torch.bfloat16, n)
        a, b = (reference.dequantize(p, s).double() for p, s in zip(parts, specs, strict=True))
        product, size = a @ b.T, a.abs() @ b.abs().T
        on_device = [[t.to(DEVICE) for t in p] for p in parts]
        outputs = compiled(run)(*on_device, bias.to(DEVICE))
        for i, out in enumerate(outputs):
            expected = product + bias.double() if i % 2 else product
            rounding = 2.0**-8 if out.dtype == torch.bfloat16 else 2.0**-22
            error = (out.cpu().double() - expected).abs()
            spare = error - rounding * (product.abs() + expected.abs())
            share = (spare / size).max().item()
            worst = max(worst, share)
            if not share <= allowance(a_spec, b_spec, fast_accum) or out.shape != expected.shape:
                wrong.append(f"{(m, k, n)} {out.dtype} {'with' if i % 2 else 'no'} bias: {share:.2e} of sum |a b|")
    record_property("worst", worst)
    print(f"{a_spec} x {b_spec}, fast_accum={fast_accum}: largest error {worst:.2e} of sum |a b|")
    assert not wrong, "\n".join(wrong)
