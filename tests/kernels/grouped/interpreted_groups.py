"""Casts of groups whose scales tensor cores read, in Triton's interpreter; run by test_tensor_cores.py.

Byte by byte the reference's, and what the goldens have of one tensor, which is a group behind an empty one here.
"""

from __future__ import annotations

from dataclasses import replace

import golden
import torch
from interpreting import interpret
from torch import Tensor

from fxquant.formats import QuantSpec
from fxquant.kernels.cast.choice import CastKernel, supports_groups
from fxquant.kernels.cast.swizzle import unswizzle
from fxquant.kernels.grouped import reference, triton_cast, triton_nvfp4
from fxquant.kernels.grouped.ops import hybrid_split_quantize
from fxquant.kernels.grouped.places import padded_ends
from fxquant.kernels.grouped.swizzle import unit_ends

interpret(triton_cast, triton_nvfp4)

MX = (
    ("mxfp8_e4m3(swizzled)", "mxfp8_e5m2(mode=even,swizzled)"), ("mxfp8_e4m3(swizzled)", None),
    ("per_tensor_e4m3", "mxfp8_e4m3(swizzled)"), ("mxfp8_2d_e4m3(swizzled)", "mxfp8_2d_e4m3(swizzled)"),
    ("mxfp8_2d_e4m3", "mxfp8_2d_e4m3"),
)  # fmt: skip
NVFP4 = (
    ("nvfp4(swizzled)", "nvfp4(rht,swizzled)"), ("nvfp4", "nvfp4(rht,random_signs=False)"), ("nvfp4(swizzled)", None),
    ("nvfp4(stochastic,swizzled)", "nvfp4(rht,stochastic,stream=1,swizzled)"),
    ("nvfp4_2d(swizzled)", "nvfp4_2d(swizzled)"), (None, "nvfp4(stochastic,nonfinite,swizzled)"),
)  # fmt: skip
SPLITS = ([3, 3, 132, 140], [0, 0], [128, 128, 140])
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
STATE = torch.tensor([12345678901234, 7, 5])


def values(dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(shape[-2])
    x = torch.randn(shape, generator=generator) * torch.randint(-8, 8, shape, generator=generator).float().exp2()
    x[..., shape[-2] // 2, :], x[..., 3] = 0.0, 0.0
    x[..., 1, 5], x[..., -1, 7] = torch.nan, torch.inf
    return x.to(dtype)


def as_bytes(x: Tensor) -> Tensor:
    """With one code for every NaN of FP8."""
    x = x.contiguous().flatten()
    raw = x.view(torch.uint8)
    return raw if x.itemsize > 1 or x.dtype == torch.uint8 else torch.where(x.isnan(), 0xFF, raw)


def written(part: Tensor, place: int, spec: QuantSpec, columnwise: bool, offs: Tensor, rows: int) -> Tensor:
    """The bytes of a part of a ragged operand that belong to a group."""
    last, block = int(offs[-1]), spec.row.block[1]
    if place == 0 and columnwise:
        ends = unit_ends(offs) if spec.swizzled else padded_ends(offs, spec.row.alignment)
        return part[:, : int(ends[-1]) // spec.row.packed]
    if place == 1 and spec.swizzled:
        if columnwise:
            blocks = padded_ends(padded_ends(offs, block) // block, 4)
            return part.flatten()[: int(blocks[-1]) * part.shape[0]]
        return part[: int(padded_ends(offs, 128)[-1])]
    if place == 1 and columnwise and block:
        return part[:, : int(padded_ends(offs, block)[-1]) // block]
    return part[:last] if part.shape[0] == rows else part


def check(x: Tensor, offs: Tensor | None, texts: tuple[str | None, str | None]) -> None:
    specs = [QuantSpec.parse(text) if text else None for text in texts]
    if not all(supports_groups(spec, ragged=offs is not None) for spec in specs if spec is not None):
        return
    states = [STATE if spec is not None and spec.stochastic else None for spec in specs]
    if None in texts:
        cast = triton_nvfp4 if any(spec is not None and spec.row.family == "nvfp4" for spec in specs) else triton_cast
        got = iter(cast.quantize(x, offs, *specs, *states))
    else:  # by the operator, which makes two casts of two families
        got = iter(hybrid_split_quantize.run(CastKernel.STORED)(x, offs, *texts, *states))
    for spec, state, direction in zip(specs, states, ("rowwise", "columnwise"), strict=True):
        if spec is None:
            continue
        for place, want in enumerate(reference.quantize(x, offs, spec, direction, state)):
            part, case = next(got), f"{x.dtype} {texts} {direction} {offs} part {place}"
            assert part.shape == want.shape and part.dtype == want.dtype, (case, part.shape, want.shape)
            if offs is not None:
                part, want = (
                    written(t, place, spec, place < 2 and direction == "columnwise", offs, len(x)) for t in (part, want)
                )
            assert torch.equal(as_bytes(part), as_bytes(want)), case
    assert next(got, None) is None


def goldens() -> int:
    count = 0
    for file, text, columns in (
        ("mxfp8", "mxfp8_e4m3", False), ("mxfp8", "mxfp8_e4m3", True), ("nvfp4", "nvfp4", False),
        ("nvfp4", "nvfp4", True), ("nvfp4_rht", "nvfp4(rht)", True),
    ):  # fmt: skip
        vectors, spec = golden.load(file), replace(QuantSpec.parse(text), swizzled=True)
        way = {"mxfp8": "e4m3/col" if columns else "e4m3/row", "nvfp4_rht": "signs_col"}.get(file)
        way = way or ("1d_col" if columns else "1d_row")
        for key in sorted(key for key in vectors if key.endswith(f"/{way}/scale"))[:2]:
            x, stem = golden.source(key.split("/")[0]), key.removesuffix("/scale")
            payload, scale = vectors.get(f"{stem}/payload_t", vectors.get(f"{stem}/payload")), vectors[key]
            assert payload is not None
            if file == "mxfp8" and columns:
                payload, scale = payload.mT, scale.mT
            offs = torch.tensor([0, len(x)], dtype=torch.int32)
            cast = triton_cast if file == "mxfp8" else triton_nvfp4
            data, got, *_ = cast.quantize(x, offs, *((None, spec) if columns else (spec, None)))
            rows, across = scale.shape
            tiles = -(-rows // 128) * 128 * -(-across // 4) * 4
            got = unswizzle(got.flatten()[:tiles].reshape(-1, -(-across // 4) * 4), rows, across)
            assert torch.equal(got.view(torch.uint8), scale.view(torch.uint8)), key
            data = data[: payload.shape[0], : payload.shape[1]].view(torch.uint8)
            assert torch.equal(data, payload.contiguous().view(torch.uint8)), key
            count += 1
    return count


def main() -> None:
    for i, texts in enumerate((*MX, *NVFP4)):
        for j, ends in enumerate(SPLITS):
            if j != i % 3 and i not in (0, 5):
                continue
            check(values(DTYPES[(i + j) % 3], ends[-1] + 7, 50), torch.tensor(ends, dtype=torch.int32), texts)
        if None not in texts:
            check(values(DTYPES[i % 3], 2, 133, 50), None, texts)
    check(values(torch.bfloat16, 2, 48, 37).mT, None, NVFP4[4])
    check(values(torch.bfloat16, 137, 50), torch.tensor([0, 5, 130], dtype=torch.int32), (MX[1][0], NVFP4[5][1]))
    for texts in (MX[0], NVFP4[0]):  # a rank without rows
        check(torch.empty(0, 50), torch.zeros(2, dtype=torch.int32), texts)
    assert goldens() == 10


if __name__ == "__main__":
    main()
