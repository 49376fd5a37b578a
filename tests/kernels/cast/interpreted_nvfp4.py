"""Casts to NVFP4 in Triton's interpreter, byte by byte: goldens, and the reference; run by test_triton_cast.py."""

from __future__ import annotations

from dataclasses import replace

import golden
import torch
from interpreted_cast import INPUTS, as_bytes, values
from interpreting import interpret
from torch import Tensor

from fxquant.formats import QuantSpec
from fxquant.kernels.cast import reference, triton_cast, triton_nvfp4, triton_values
from fxquant.kernels.cast.swizzle import unswizzle

interpret(triton_nvfp4, triton_cast, triton_values)

CASES = (
    ("nvfp4", "nvfp4"), ("nvfp4_2d(swizzled)", "nvfp4_2d(swizzled)"), ("nvfp4(swizzled)", "nvfp4(rht,swizzled)"),
    ("nvfp4(stochastic,swizzled)", "nvfp4(rht,stochastic,stream=1,swizzled)"), (None, "nvfp4(rht,random_signs=False)"),
    ("nvfp4(nonfinite,swizzled)", None),
)  # fmt: skip
STATE = torch.tensor([12345678901234, 7, 5])


def check(x: Tensor, row: str | None, column: str | None) -> None:
    sides = [QuantSpec.parse(text) if text else None for text in (row, column)]
    states = [
        None if spec is None else STATE if spec.stochastic else torch.tensor([3.0]) if x.stride(-1) > 1 else None
        for spec in sides
    ]
    got = triton_nvfp4.quantize(x, *sides, *states)
    expected = [
        part
        for t, spec, state in zip((x, x.mT), sides, states, strict=True)
        for part in ([] if spec is None else reference.quantize(t, spec, state))
    ]
    for part, (a, b) in enumerate(zip(got, expected, strict=True)):
        case = f"{tuple(x.shape)} {x.dtype} {row} {column} strides {x.stride()} part {part}"
        assert a.shape == b.shape and a.dtype == b.dtype and a.is_contiguous(), case
        assert torch.equal(as_bytes(a), as_bytes(b)), case


def goldens() -> int:
    """Compares the casts with the goldens, scales in both orders in turn, and returns how many there were."""
    count = 0
    for file, ways in (
        ("nvfp4", {"1d_row": "nvfp4", "2d_row": "nvfp4_2d", "1d_col": "nvfp4", "2d_col": "nvfp4_2d"}),
        ("nvfp4_rht", {"signs_col": "nvfp4(rht)", "plain_col": "nvfp4(rht,random_signs=False)"}),
        ("mxfp8", {"e4m3": "mxfp8_e4m3"}),
    ):
        vectors = golden.load(file)
        for key in sorted(key for key in vectors if key.endswith("/scale"))[::2]:
            name, way, *direction = key.split("/")[:-1]
            if way not in ways or (direction and direction not in (["row"], ["col"])):
                continue
            columnwise = way.endswith("_col") or file == "nvfp4_rht" or direction == ["col"]
            stem, x = key.removesuffix("/scale"), golden.source(name)
            payload = vectors.get(f"{stem}/payload_t", vectors.get(f"{stem}/payload"))
            scale = vectors[key]
            assert payload is not None
            if file == "mxfp8" and columnwise:
                payload, scale = payload.mT, scale.mT
            spec = replace(QuantSpec.parse(ways[way]), swizzled=count % 2 == 0)
            cast = triton_cast.quantize if file == "mxfp8" else triton_nvfp4.quantize
            data, got, *_ = cast(x, *((None, spec) if columnwise else (spec, None)))
            got = unswizzle(got, *scale.shape) if spec.swizzled else got
            assert torch.equal(got.view(torch.uint8), scale.view(torch.uint8)), (key, spec)
            assert torch.equal(as_bytes(data), as_bytes(payload.contiguous().view(data.dtype))), (key, spec)
            count += 1
    return count


def check_values(*shape: int) -> None:
    """Every code under scales of all sizes, as bfloat16 holds the values of a unit of the global amax."""
    spec = QuantSpec.parse("nvfp4")
    data = torch.arange(shape[0] * shape[1] // 2).to(torch.uint8).reshape(shape[0], -1)
    scale = (torch.arange(shape[0] * shape[1] // 16) % 127).to(torch.uint8).view(torch.float8_e4m3fn)
    parts = [data, scale.reshape(shape[0], -1), torch.tensor([spec.unit_amax])]
    expected = reference.dequantize(parts, spec).bfloat16()
    assert torch.equal(as_bytes(triton_values.nvfp4_values(parts)), as_bytes(expected))


def main() -> None:
    check_values(130, 320)
    assert goldens() > 40
    for i, (shape, dtype) in enumerate(INPUTS[1:]):
        x = values(dtype, shape)
        for j, case in enumerate(CASES):
            check(x if (i + j) % 2 else x.nan_to_num(0, 0, 0), *case)
    check(x.t(), "nvfp4", "nvfp4_2d(swizzled)")


if __name__ == "__main__":
    main()
