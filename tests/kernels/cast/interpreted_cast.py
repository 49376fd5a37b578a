"""The cast kernels in Triton's interpreter against the reference, byte by byte; run by test_triton_cast.py."""

from __future__ import annotations

import torch
from interpreting import interpret
from torch import Tensor

from fxquant.formats import QuantSpec
from fxquant.kernels.cast import amax as triton_amax
from fxquant.kernels.cast import reference, triton_cast, triton_producers
from fxquant.kernels.cast.choice import supports_groups
from fxquant.kernels.grouped import reference as grouped_reference
from fxquant.kernels.grouped import triton_cast as triton_grouped_cast

SPECS = (
    "per_tensor_e4m3", "per_tensor_e5m2(pow2)", "per_tensor_e4m3(eps=0.015625)", "per_row_e4m3(pow2,torchao)",
    "per_row_e5m2", "block_1x128_e4m3(pow2)", "block_1x128_e5m2", "block_128x128_e4m3(pow2)", "mxfp8_e4m3",
    "mxfp8_e5m2(mode=even)", "mxfp8_e4m3(mode=floor)", "mxfp8_e4m3(mode=ceil)", "mxfp8_2d_e4m3",
    "per_tensor_e5m2(nonfinite)", "block_1x128_e4m3(pow2,nonfinite)",
)  # fmt: skip
MIXED = (
    ("block_128x128_e4m3(pow2)", "block_1x128_e4m3"), ("mxfp8_e4m3", None), (None, "per_row_e4m3"),
    ("per_tensor_e4m3", "per_tensor_e5m2"), ("per_row_e4m3", "mxfp8_2d_e4m3"),
    ("block_128x128_e5m2(nonfinite)", "per_row_e5m2(nonfinite)"), ("mxfp8_e5m2(swizzled)", "mxfp8_2d_e4m3(swizzled)"),
    ("mxfp8_2d_e4m3(swizzled)", "mxfp8_e4m3(mode=even,swizzled)"),
)  # fmt: skip
GROUPED = (
    ("per_tensor_e4m3", "per_tensor_e5m2(pow2)"), ("per_row_e4m3(pow2,torchao)", "per_row_e5m2"),
    ("block_1x128_e4m3(pow2)", "block_1x128_e4m3"), (None, "mxfp8_e4m3"), ("per_tensor_e4m3", "per_tensor_e4m3"),
    ("per_row_e5m2(nonfinite)", "block_1x128_e4m3(pow2,nonfinite)"),
)  # fmt: skip
SPLITS = ([0, 0, 37, 38, 170], [0, 0, 0])
INPUTS = (((96, 160), torch.bfloat16), ((33, 50), torch.float32), ((129, 48), torch.bfloat16))

interpret(triton_amax, triton_cast, triton_grouped_cast, triton_producers)


def quantize(x: Tensor, row: QuantSpec | None, column: QuantSpec | None) -> list[Tensor]:
    left = [] if row is None else reference.quantize(x, row)
    right = [] if column is None else reference.quantize(x.mT, column)
    return [*left, *right]


def as_bytes(x: Tensor) -> Tensor:
    """With one code for every NaN."""
    flat = x.reshape(-1).clone()
    return (
        torch.where(flat != flat, 0xFF, flat.view(torch.uint8)) if flat.element_size() == 1 else flat.view(torch.uint8)
    )


def values(dtype: torch.dtype, shape: tuple[int, int]) -> Tensor:
    generator = torch.Generator().manual_seed(shape[0])
    exponents = torch.randint(-8, 8, shape, generator=generator).float()
    x = torch.randn(shape, generator=generator) * exponents.exp2()
    x[shape[0] // 2] = 0.0
    x[:, 3] = 0.0
    x[4], x[:, 5] = torch.nan, torch.nan
    x[shape[0] // 3, ::7], x[5, 9], x[6, 8] = torch.nan, torch.inf, -torch.inf
    x[1], x[:, 11] = x[1] * 2.0**-100, x[:, 11] * 2.0**115
    return x.to(dtype)


def quantize_groups(x: Tensor, offs: Tensor | None, row: QuantSpec | None, column: QuantSpec | None) -> list[Tensor]:
    made = [] if row is None else grouped_reference.quantize(x, offs, row, "rowwise")
    made += [] if column is None else grouped_reference.quantize(x, offs, column, "columnwise")
    return [part.contiguous() for part in made]


def check(got: list[Tensor], expected: list[Tensor], rows: int, last: int, case: str) -> None:
    """Rows behind the last group have no meaning."""
    for part, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert a.shape == b.shape and a.dtype == b.dtype, (case, part, a.shape, b.shape)
        assert a.stride() == b.stride() or a.dtype == torch.float32, (case, part, "payloads are dense")
        if a.shape[0] == rows:
            a, b = a[:last], b[:last]
        assert torch.equal(as_bytes(a), as_bytes(b)), (case, part)


def ragged(offs: list[int]) -> tuple[Tensor, Tensor]:
    """Rows, those of no group NaN, and the ends of groups."""
    x = values(torch.bfloat16, (offs[-1] + 7, 50))
    x[offs[-1] :] = float("nan")
    return x, torch.tensor(offs, dtype=torch.int32)


def groups() -> None:
    """`triton_grouped_cast` of ragged and batched operands."""
    for offs in SPLITS:
        x, ends = ragged(offs)
        assert torch.equal(triton_grouped_cast.group_amax(x, ends), grouped_reference.group_amax(x, ends)), offs
    for texts in (*GROUPED, ("block_128x128_e4m3(pow2)", "block_128x128_e4m3(pow2)")):
        row, column = (QuantSpec.parse(text) if text else None for text in texts)
        for offs in SPLITS:
            x, ends = ragged(offs)
            if all(supports_groups(spec, ragged=True) for spec in (row, column) if spec is not None):
                got = triton_grouped_cast.quantize(x, ends, row, column)
                check(got, quantize_groups(x, ends, row, column), offs[-1] + 7, offs[-1], f"{texts} {offs}")
        x = torch.stack([values(torch.bfloat16, (133, 50)) * scale for scale in (1e-3, 1e3)])
        for stored in (x, x.mT.contiguous().mT) if texts == GROUPED[1] else (x,):
            assert all(supports_groups(spec, ragged=False) for spec in (row, column) if spec is not None)
            got = triton_grouped_cast.quantize(stored, None, row, column)
            check(got, quantize_groups(x, None, row, column), -1, 0, f"{texts} batch {stored.stride()}")
            if row is not None and row.row.family == "per_row":
                *parts, amax = triton_grouped_cast.quantize_and_amax(stored, row)
                assert torch.equal(amax, reference.amax(x.mT, -1))
                parts += triton_grouped_cast.quantize(stored, None, None, row, None, amax)
                check(parts, quantize_groups(x, None, row, row), -1, 0, f"{texts} amaxes {stored.stride()}")
    out, ends = torch.full((40, 50), 3.0), torch.tensor([0, 20, 33], dtype=torch.int32)
    assert torch.equal(triton_grouped_cast.clear(out.clone(), ends), torch.cat([out[:33], 0 * out[33:]]))
    out = torch.full((3, 40, 50), 3.0)
    assert torch.equal(triton_grouped_cast.clear(out.clone(), ends), torch.cat([0 * out[:1], out[1:]]))


def scales() -> None:
    """Scales by one launch have the bits of the reference, also of amaxes that have no quotient."""
    largest = [0.0, 1e-45, 1e-39, 1.3e-38, 2**-100, 1e-12, 0.015, 0.3, 447.99, 448.0, 57344.5, 3e38, torch.inf]
    for text in ("per_tensor_e5m2(nonfinite,pow2)", "per_tensor_e4m3(torchao)", *SPECS):
        spec = QuantSpec.parse(text)
        for amax in largest if spec.row.family == "per_tensor" else ():
            for dtype in (torch.float32, torch.bfloat16):
                x = torch.full((3, 5, 7), amax, dtype=dtype) * torch.linspace(-1, 1, 7).to(dtype)
                x[0, 0, :2] = torch.tensor([-amax, torch.nan])
                want = reference.multiplier_from_amax(reference.amax(x), spec)
                for got in (triton_amax.tensor_scale(x, spec), triton_amax.made_tensor_scale(x, spec)):
                    assert torch.equal(as_bytes(got), as_bytes(want)), (text, amax, dtype, got, want)
    many = torch.rand(9, 1 << 12)
    spec = QuantSpec.parse("per_tensor_e4m3")
    want = reference.multiplier_from_amax(reference.amax(many), spec)
    for seen in (many.flatten()[:, None], many.reshape(-1, 2, 1)):
        assert torch.equal(triton_amax.made_tensor_scale(seen, spec), want)


def main() -> None:
    groups()
    scales()
    pairs = [*((spec, spec) for spec in SPECS), *MIXED]
    for shape, dtype in INPUTS:
        x = values(dtype, shape)
        for seen in (x, x.t(), x.abs().nan_to_num().repeat(3, 6)):
            assert torch.equal(triton_amax.tensor_amax(seen), reference.amax(seen)), (shape, dtype)
        for texts in pairs if dtype == torch.float32 else pairs[::2]:
            row, column = (QuantSpec.parse(text) if text else None for text in texts)
            expected = quantize(x, row, column)
            for stored in (x, x.t().contiguous().t()) if texts in MIXED and dtype == torch.float32 else (x,):
                got = triton_cast.quantize(stored, row, column)
                for part, (a, b) in enumerate(zip(got, expected, strict=True)):
                    case = f"{shape} {dtype} {texts} strides {stored.stride()} part {part}"
                    assert a.shape == b.shape and a.dtype == b.dtype, case
                    assert torch.equal(as_bytes(a), as_bytes(b)), case
    x = values(torch.bfloat16, (96, 160))
    for text in ("per_tensor_e4m3", "per_tensor_e5m2(nonfinite,slot=0)"):
        spec, multiplier = QuantSpec.parse(text), torch.tensor([3.0])
        got = triton_cast.quantize(x, spec, spec, multiplier, multiplier)
        expected = [*reference.quantize(x, spec, multiplier), *reference.quantize(x.mT, spec, multiplier)]
        assert all(torch.equal(as_bytes(a), as_bytes(b)) for a, b in zip(got, expected, strict=True)), (
            "given multiplier"
        )


if __name__ == "__main__":
    main()
