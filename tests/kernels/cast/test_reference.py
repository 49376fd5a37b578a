"""The reference against the golden vectors, and against itself: traced, compiled, empty, batched."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import golden
import pytest
import torch
from torch import Tensor

from fxquant.compat.private import make_fx
from fxquant.compat.values import FakeTensorMode
from fxquant.formats import ELEMENTS, FORMATS, QuantSpec
from fxquant.kernels.cast import reference
from fxquant.kernels.cast.reference import dequantize, quantize, scaled_mm
from fxquant.kernels.linear import choice
from fxquant.kernels.linear.cublas import by_cublas

QUANTIZING = [name for name in FORMATS if name != "identity"]
FIRST_NAN = {"e4m3": 0x7F, "e5m2": 0x7D}


def bits(tensor: Tensor) -> Tensor:
    """The raw bits, so that signs of zero count and NaN equals itself."""
    return tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def assert_bits(got: Tensor, expected: Tensor) -> None:
    assert got.shape == expected.shape
    different = bits(got) != bits(expected)
    assert not different.any(), f"{int(different.sum())} of {got.numel()} differ"


def assert_same_parts(got: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        assert_bits(a, b)


def assert_codes(data: Tensor, expected: Tensor, element: str) -> None:
    """8-bit codes; NaN codes are one class."""
    codes = [torch.where(c & 0x7F >= FIRST_NAN[element], 0x7F, c) for c in (bits(data), expected)]
    assert_bits(*codes)


def quantize_as(x: Tensor, spec: QuantSpec, direction: str) -> tuple[Tensor, list[Tensor]]:
    """Data and scales in the orientation of the golden files, [M, K], without the padding."""
    x = x.mT if direction == "col" else x
    data, *rest = quantize(x, spec)
    data = data[..., : x.shape[-1]]
    if direction == "col":
        return data.mT, [scale.mT if scale.ndim > 1 else scale for scale in rest]
    return data, rest


def fp8_spec(family: str, config: str) -> tuple[str, QuantSpec]:
    element, *options = config.split("_")
    eps = 2.0**-6 if "eps" in options else 0.0
    spec = QuantSpec(format=f"{family}_{element}", pow2="pow2" in options, eps=eps, torchao="ao" in options)
    return element, spec


FACTORS = ("scale_inv", "scale", "amax")
CURRENT = golden.keys("current", "payload", reads=FACTORS)
CURRENT += golden.keys("special", "payload", under="current/", reads=FACTORS)


@pytest.mark.parametrize("key", CURRENT)
@pytest.mark.parametrize("direction", ["row", "col"])
def test_per_tensor(key: str, direction: str) -> None:
    vectors = golden.load("special" if key.startswith("current/") else "current")
    name, config = key.split("/")[-2:]
    element, spec = fp8_spec("per_tensor", config)
    x = golden.source(name)
    data, (scale,) = quantize_as(x, spec, direction)
    assert_codes(data, vectors[f"{key}/payload"], element)
    assert_bits(scale.flatten(), vectors[f"{key}/scale_inv"])
    amax = reference.amax(x)
    if f"{key}/amax" in vectors:
        assert_bits(amax, vectors[f"{key}/amax"])
    assert_bits(reference.multiplier_from_amax(amax, spec), vectors[f"{key}/scale"])


ROWS = golden.keys("rows", "payload", reads=FACTORS)
ROWS += golden.keys("special", "payload", under="rows/", reads=FACTORS)


@pytest.mark.parametrize("key", ROWS)
def test_per_row(key: str) -> None:
    vectors = golden.load("special" if key.startswith("rows/") else "rows")
    name, config, direction = key.split("/")[-3:]
    element, spec = fp8_spec("per_row", config)
    x = golden.source(name)
    data, (scale,) = quantize_as(x, spec, direction)
    assert_codes(data, vectors[f"{key}/payload"], element)
    assert_bits(scale.flatten(), vectors[f"{key}/scale_inv"])
    amax = torch.stack([reference.amax(line) for line in x.unbind(0 if direction == "row" else 1)]).flatten()
    assert_bits(reference.multiplier_from_amax(amax, spec), vectors[f"{key}/scale"])


BLOCKS = golden.keys("block", "payload", reads=["scale_inv"])
BLOCKS += golden.keys("special", "payload", under="block/", reads=["scale_inv"])


@pytest.mark.parametrize("key", BLOCKS)
def test_blocks_of_128(key: str) -> None:
    """Invariant 63."""
    vectors = golden.load("special" if key.startswith("block/") else "block")
    name, config, shape = key.split("/")[-3:]
    element, spec = fp8_spec("block_128x128" if shape == "2d" else "block_1x128", config)
    for direction in ("row", "col") if shape == "2d" else (shape,):
        data, (scale,) = quantize_as(golden.source(name), spec, direction)
        assert_codes(data, vectors[f"{key}/payload"], element)
        assert_bits(scale, vectors[f"{key}/scale_inv"])


MX_FILES = {"mxfp8": "", "mx_modes": "", "special": "mxfp8/", "variants": "mx_code0/"}
MX_PARTS = ("scale", "scale_row", "scale_col")
MX_KEYS = [
    (file, key) for file, under in MX_FILES.items() for key in golden.keys(file, "payload", under=under, reads=MX_PARTS)
]


@pytest.mark.parametrize(("file", "key"), MX_KEYS)
def test_mxfp8(file: str, key: str) -> None:
    """Invariants 52 and 54."""
    vectors = golden.load(file)
    name, config, shape = key.split("/")[-3:]
    element, _, mode = config.partition("_")
    spec = QuantSpec(format=f"mxfp8_{'2d_' if shape == '2d' else ''}{element}", mode=mode or "rceil")
    for direction in ("row", "col") if shape == "2d" else (shape,):
        data, (scale,) = quantize_as(golden.source(name), spec, direction)
        assert_codes(data, vectors[f"{key}/payload"], element)
        assert_bits(scale, vectors[f"{key}/scale_{direction}" if shape == "2d" else f"{key}/scale"])


NV_FILES = [("nvfp4", ""), ("special", "nvfp4/"), ("nvfp4_rht", ""), ("nvfp4_4over6", "")]
NV_FILES += [("variants", f"{v}/") for v in ("nv_underflow_saturate", "nv_negzero_keep", "nv2d_kernel")]
NV_FILES += [("variants", "rht_order_sensitive/")]
NV_PARTS = ("scale", "amax", "y", "pick4")
NV_KEYS = [
    (f, key) for f, under in NV_FILES for key in golden.keys(f, "payload", "payload_t", under=under, reads=NV_PARTS)
]


@pytest.mark.parametrize(("file", "key"), NV_KEYS)
def test_nvfp4(file: str, key: str) -> None:
    """Invariants 57, 59 and 62."""
    vectors = golden.load(file)
    name, config = key.split("/")[-2:]
    kind, direction, *four_over_six = config.split("_")
    x = golden.source(name)
    if direction == "col":
        x = x.mT
    if rht := kind in ("signs", "plain"):
        y = reference.hadamard(x, random_signs=kind == "signs")
        assert_bits(y, vectors[f"{key}/y"].float())
    spec = QuantSpec(
        format="nvfp4_2d" if kind == "2d" else "nvfp4", rht=rht, random_signs=kind == "signs" or not rht,
        row_scaled=kind == "rs",
    )  # fmt: skip
    if four_over_six:
        largest, mode = four_over_six
        spec = dataclasses.replace(spec, e4m3_max=int(largest), four_over_six=mode)
    data, scale, amax = quantize(x, spec)
    assert_bits(data, vectors[f"{key}/{'payload_t' if direction == 'col' else 'payload'}"])
    assert_bits(scale, vectors[f"{key}/scale"])
    assert_bits(amax.flatten(), vectors[f"{key}/amax"])
    if four_over_six:
        rows = spec.row.block[0]
        block_amax = reference.block_amax(x, spec.row.block)
        _, to_four = reference.four_over_six(x.float().unflatten(-1, (-1, 16)), block_amax, amax, spec)
        assert_bits(to_four.repeat_interleave(rows, 0)[: len(x)].to(torch.uint8), vectors[f"{key}/pick4"])


@pytest.mark.parametrize("key", golden.keys("stochastic", "payload", "payload_t", reads=(*NV_PARTS, "random_bytes")))
def test_nvfp4_stochastic(key: str) -> None:
    """With the random bytes given."""
    vectors = golden.load("stochastic")
    name, config = key.split("/")
    x = golden.source(name)
    if config.endswith("col"):
        x = x.mT
    if config == "rht_col":
        x = reference.hadamard(x)
    spec = QuantSpec(format="nvfp4", stochastic=True)
    data, scale, amax = reference.quantize_nvfp4(x, spec, vectors[f"{key}/random_bytes"])
    assert_bits(data, vectors[f"{key}/{'payload_t' if config.endswith('col') else 'payload'}"])
    assert_bits(scale, vectors[f"{key}/scale"])
    assert_bits(amax, vectors[f"{key}/amax"])


golden.taken("stochastic", "table/.*")


def test_stochastic_codes_of_every_byte() -> None:
    vectors = golden.load("stochastic")
    y, byte = vectors["table/y"].unsqueeze(-1), torch.arange(256)
    assert_bits(reference.encode_e2m1_stochastic(y, byte), vectors["table/codes"])


golden.taken("casts", ".*")


@pytest.mark.parametrize("kind", ["finite", "special"])
def test_casts(kind: str) -> None:
    vectors = golden.load("casts")
    x = vectors[f"{kind}/x"]
    for element in ("e4m3", "e5m2"):
        assert_codes(reference.cast_fp8(x, ELEMENTS[element]), vectors[f"{kind}/{element}"], element)
    assert_bits(reference.encode_e2m1(x), vectors[f"{kind}/e2m1"])


def test_decoded_codes() -> None:
    vectors = golden.load("casts")
    assert_bits(reference.decode_e2m1(torch.arange(16, dtype=torch.uint8)), vectors["decode/e2m1"])
    assert_bits(reference.decode_e8m0(torch.arange(256).to(torch.uint8)), vectors["decode/e8m0"])
    for element in ("e4m3", "e5m2"):
        values = torch.arange(256, dtype=torch.uint8).view(ELEMENTS[element].dtype).float()
        expected = vectors[f"decode/{element}"]
        assert_bits(values.where(~values.isnan(), torch.nan), expected.where(~expected.isnan(), torch.nan))
    assert_bits(
        reference.e8m0_reciprocal(torch.arange(255, dtype=torch.int32)), vectors["decode/e8m0_reciprocal"][:255]
    )


def test_exponents_are_rounded_up() -> None:
    """NaN, for which the golden is 255, is no amax."""
    x, code = (golden.load("casts")[f"e8m0_roundup/{part}"] for part in ("x", "code"))
    known = ~x.isnan()
    assert_bits(reference.e8m0_round_up(x[known]).to(torch.uint8), code[known])


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_scales_of_every_kind_of_amax(element: str) -> None:
    vectors = golden.load("casts")
    amax = vectors["scale_from_amax/amax"]
    for pow2 in ("", "_pow2"):
        _, spec = fp8_spec("per_tensor", element + pow2)
        for name, largest in (("fltmax", torch.finfo(torch.float32).max), ("bf16max", torch.finfo(torch.bfloat16).max)):
            got = reference.multiplier_from_amax(amax, spec, largest)
            assert_bits(got, vectors[f"scale_from_amax/{element}{pow2}_{name}"])
    known = ~amax.isnan()  # a block's amax ignores NaN
    code = reference.e8m0_from_amax(amax[known], QuantSpec(format=f"mxfp8_{element}"))
    assert_bits(code.to(torch.uint8), vectors[f"scale_from_amax/mx_{element}_rceil"][known])


def test_nvfp4_global_scales() -> None:
    vectors = golden.load("casts")
    amax = vectors["scale_from_amax/amax"]
    known = ~amax.isnan()
    encode, decode = reference.nvfp4_global_scale(amax[known])
    assert_bits(encode, vectors["scale_from_amax/nvfp4_global_encode"][known])
    assert_bits(decode, vectors["scale_from_amax/nvfp4_global_decode"][known])


@pytest.mark.parametrize("key", golden.keys("dequant", "row", "col"))
def test_dequantize(key: str) -> None:
    name, operand = key.split("/")
    x, spec = golden.source(name), golden.SPECS[operand]
    vectors = golden.load("dequant")
    for direction in ("row", "col"):
        if f"{key}/{direction}" in vectors:
            source = x.mT if direction == "col" else x
            values = dequantize(quantize(source, spec), spec)[..., : source.shape[-1]]
            assert_bits(values.mT if direction == "col" else values, vectors[f"{key}/{direction}"])


golden.taken("hybrid", ".*/source")


@pytest.mark.parametrize("key", golden.keys("hybrid", "payload", "payload_t", reads=("scale", "scale_inv", "amax")))
def test_columns_from_dequantized_rows(key: str) -> None:
    vectors = golden.load("hybrid")
    name, row, column = key.split("/")
    x, spec = golden.source(name), golden.SPECS[row]
    source = dequantize(quantize(x, spec), spec)[..., : x.shape[-1]].to(x.dtype)
    # compared as values: the source of a row half is stored without the sign of its zeros
    assert torch.equal(source, vectors[f"{name}/{row}/source"])
    operand = column.partition("_col")[0]
    if operand == "nv":
        data, scale, amax = quantize(source.mT, golden.SPECS["nv"])
        assert_bits(data, vectors[f"{key}/payload_t"])
        assert_bits(amax, vectors[f"{key}/amax"])
    else:
        data, (scale,) = quantize_as(source, golden.SPECS[operand], "col")
        assert_bits(data, vectors[f"{key}/payload"])
    scale_name = "scale_inv" if f"{key}/scale_inv" in vectors else "scale"
    assert_bits(scale, vectors[f"{key}/{scale_name}"])


RECIPES: dict[str, tuple[str, str, str]] = {
    "current_e4m3": ("tensor:e4m3", "tensor:e4m3", "tensor:e4m3"),
    "current_hybrid": ("tensor:e4m3", "tensor:e4m3", "tensor:e5m2"),
    "current_hybrid_pow2": ("tensor:e4m3:pow2", "tensor:e4m3:pow2", "tensor:e5m2:pow2"),
    "rows_e4m3": ("rows:e4m3", "rows:e4m3", "rows:e4m3"),
    "rows_hybrid": ("rows:e4m3", "rows:e4m3", "rows:e5m2"),
    "rows_ao_pow2": ("rows:e4m3:ao_pow2", "rows:e4m3:ao_pow2", "rows:e4m3:ao_pow2"),
    "rows_ao_gw_hp": ("rows:e4m3:ao_pow2/identity", "rows:e4m3:ao_pow2/tensor:e4m3:pow2", "rows:e4m3:ao_pow2/identity"),
    "block_pow2": ("block1d", "block2d", "block1d"),
    "block_f32": ("block1d:f32", "block2d:f32", "block1d:f32"),
    "mxfp8_e4m3": ("mx:e4m3", "mx:e4m3", "mx:e4m3"),
    "mxfp8_hybrid": ("mx:e4m3", "mx:e4m3", "mx:e5m2"),
    "mxfp8_w2d": ("mx:e4m3", "mx2d:e4m3", "mx:e4m3"),
    "nvfp4_1d": ("nv", "nv", "nv"),
    "nvfp4_w2d": ("nv", "nv2d", "nv"),
    "nvfp4_w2d_rht": ("nv/nvrht", "nv2d", "nv/nvrht"),
    "nvfp4_1d_weight_deq": ("nv", "nv/<nv", "nv"),
    "nvfp4_w2d_rht_sr": ("nv/nvrht", "nv2d", "nv/nvrht"),
    "nvfp4_row_scaled": ("nvrs", "nv", "nv"),
    "nvfp4_row_scaled_fwd_mxfp8_bwd_deq": ("nvrs/<mx:e4m3", "nv/<mx:e4m3", "mx:e4m3"),
    "nvfp4_row_scaled_fwd_identity_bwd_deq": ("nvrs/<identity", "nv/<identity", "identity"),
    "mxfp8_fwd_nvfp4_bwd_wdeq_rht_sr": ("mx:e4m3/nvrht", "mx:e4m3/<nv", "nv/nvrht"),
    "mxfp8_fwd_nvfp4_bwd_original": ("mx:e4m3/nv", "mx:e4m3/nv", "nv"),
    "mxfp8_fwd_nvfp4_bwd_wdeq": ("mx:e4m3/nv", "mx:e4m3/<nv", "nv"),
    "mxfp8_fwd_nvfp4_bwd_xwdeq": ("mx:e4m3/<nv", "mx:e4m3/<nv", "nv"),
    "mxfp8_fwd_nvfp4_bwd_wdeq_rht": ("mx:e4m3/nvrht", "mx:e4m3/<nv", "nv/nvrht"),
    "nvfp4_fwd_mxfp8_bwd_original": ("nv/mx:e4m3", "nv/mx:e4m3", "mx:e4m3"),
    "nvfp4_fwd_mxfp8_bwd_deq": ("nv/<mx:e4m3", "nv/<mx:e4m3", "mx:e4m3"),
    "route_current_mxfp8_nvfp4": ("tensor:e4m3/nv", "tensor:e4m3/mx:e4m3", "mx:e4m3/nv"),
    "route_nvfp4_current_mxfp8": ("nv/mx:e4m3", "nv/tensor:e4m3", "tensor:e5m2/mx:e4m3"),
    "route_mxfp8_block_nvfp4": ("mx:e4m3/nv", "mx:e4m3/block2d", "block1d/nv"),
    "route_block_nvfp4_current": ("block1d/tensor:e4m3", "block2d/nv", "nv/tensor:e5m2"),
}
"""Operands of x, w and dy: "row/column", or one for both; ``<`` marks a column made from the dequantized row."""

GEMMS = {"y": (("x", 0), ("w", 0)), "dx": (("dy", 0), ("w", 1)), "dw": (("dy", 1), ("x", 1))}


def operand_of(
    x: Tensor, text: str, column: int, random_bytes: Tensor | None = None
) -> tuple[QuantSpec, list[Tensor]] | None:
    """Spec and quantized parts of one operand in one direction; None where it is not quantized."""
    row = text.split("/")[0]
    name = text.split("/")[-1] if column else row
    if name.endswith("identity"):
        return None
    if name.startswith("<"):
        row_spec = golden.SPECS[row]
        x = dequantize(quantize(x, row_spec), row_spec)[..., : x.shape[-1]].to(x.dtype)
    spec = golden.SPECS[name.removeprefix("<")]
    x = x.mT if column else x
    if random_bytes is not None:
        return spec, reference.quantize_nvfp4(reference.hadamard(x) if spec.rht else x, spec, random_bytes)
    return spec, quantize(x, spec)


GEMM_PARTS = ("dx", "dw", "random_bytes_dy_row", "random_bytes_dy_col")
golden.taken("gemm", "g[1-4]/(x|w|dy)")


@pytest.mark.parametrize("key", golden.keys("gemm", "y", reads=GEMM_PARTS, only=RECIPES))
def test_gemms(key: str) -> None:
    """Float32 sums within (contraction length) * 2^-23 * sum|a*b| of the golden float64 ones."""
    vectors = golden.load("gemm")
    problem, recipe = key.split("/")
    texts = dict(zip(("x", "w", "dy"), RECIPES[recipe], strict=True))
    for result, operands in GEMMS.items():
        sides = [
            operand_of(
                vectors[f"{problem}/{name}"], texts[name], column,
                vectors.get(f"{key}/random_bytes_{name}_{'col' if column else 'row'}"),
            )
            for name, column in operands
        ]  # fmt: skip
        if None in sides:
            continue
        (a_spec, a), (b_spec, b) = sides
        got = scaled_mm(a, a_spec, b, b_spec, None, torch.float32)
        a_values, b_values = dequantize(a, a_spec).double(), dequantize(b, b_spec).double()
        bound = a_values.shape[-1] * 2.0**-23 * (a_values.abs() @ b_values.abs().mT)
        assert ((got.double() - vectors[f"{key}/{result}"]).abs() <= bound).all()


def test_gemm_adds_bias_before_its_one_rounding() -> None:
    a, b = torch.randn(5, 32), torch.randn(7, 32)
    bias = torch.randn(7).bfloat16()
    spec = QuantSpec(format="mxfp8_e4m3")
    parts = quantize(a, spec), quantize(b, spec)
    exact = scaled_mm(parts[0], spec, parts[1], spec, None, torch.float32)
    got = scaled_mm(parts[0], spec, parts[1], spec, bias, torch.bfloat16)
    assert_bits(got, (exact + bias.float()).bfloat16())


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("nvfp4", "nvfp4_2d"),
        ("nvfp4(row_scaled)", "nvfp4"),
        ("nvfp4", "nvfp4(row_scaled)"),
        ("nvfp4(row_scaled)", "nvfp4(row_scaled,four_over_six=mse)"),
        ("nvfp4(four_over_six=mae,e4m3_max=256)", "nvfp4_2d(four_over_six=mae)"),
        ("mxfp8_e4m3", "mxfp8_2d_e4m3"),
    ],
)
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)], ids=str)
def test_emulated_gemm_multiplies_exact_values(
    a: str, b: str, batch: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of CUDA devices, with the products of bfloat16 operands that they sum in float32."""
    for name in ("mm", "bmm"):
        monkeypatch.setattr(torch, name, lambda a, b, out_dtype: (a.float() @ b.float()).to(out_dtype))
    monkeypatch.setattr(choice, "capability", lambda device: (8, 9))
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(*batch, rows, 96, generator=generator) for rows in (40, 56))
    x[..., 3, :] *= 1e3
    parts = [quantize(operand, QuantSpec.parse(spec)) for operand, spec in ((x, a), (w, b))]
    bias = torch.randn(56, generator=generator)
    got = by_cublas(*parts, a, b, bias, torch.float32, False)
    expected = scaled_mm(parts[0], QuantSpec.parse(a), parts[1], QuantSpec.parse(b), bias, torch.float32)
    assert (got - expected).norm() < 1e-6 * expected.norm()


@pytest.mark.parametrize("format", QUANTIZING)
def test_batches_are_quantized_one_by_one(format: str) -> None:
    """Except for what is taken over the whole tensor: its members then share an amax."""
    x = torch.randn(2, 3, 40, 70)
    x[..., 0, 0] = 8
    spec = QuantSpec(format=format)
    whole = quantize(x, spec)
    values = dequantize(whole, spec)
    for i in range(2):
        for j in range(3):
            part = quantize(x[i, j], spec)
            assert_bits(whole[0][i, j], part[0])
            assert_bits(values[i, j], dequantize(part, spec))


@pytest.mark.parametrize("format", QUANTIZING)
@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0), (2, 0, 64), (1, 1)], ids=str)
def test_empty_and_single_elements(format: str, shape: tuple[int, ...]) -> None:
    spec = QuantSpec(format=format, rht=format == "nvfp4")
    for x in (torch.ones(shape), torch.ones(shape).mT):
        parts = quantize(x, spec)
        padded = -(-x.shape[-1] // spec.row.alignment) * spec.row.alignment
        assert dequantize(parts, spec).shape == (*x.shape[:-1], padded)
        product = scaled_mm(parts, spec, parts, spec, None, torch.bfloat16)
        assert product.shape == (*x.shape[:-1], x.shape[-2])
        if spec.row.family == "per_tensor" and not x.numel():
            assert parts[1].item() == 1


def test_float64_is_rounded_to_float32_first() -> None:
    x = torch.randn(16, 32, dtype=torch.float64)
    for format in QUANTIZING:
        spec = QuantSpec(format=format)
        for a, b in zip(quantize(x, spec), quantize(x.float(), spec), strict=True):
            assert_bits(a, b)


VARIANTS = [
    *(QuantSpec(format=format) for format in QUANTIZING),
    *(QuantSpec(format=format, pow2=True) for format in QUANTIZING if format.startswith(("per_", "block"))),
    QuantSpec(format="per_row_e4m3", pow2=True, torchao=True),
    QuantSpec(format="block_1x128_e4m3", eps=2.0**-6),
    QuantSpec(format="mxfp8_e4m3", mode="floor"),
    QuantSpec(format="mxfp8_e5m2", mode="ceil"),
    QuantSpec(format="mxfp8_2d_e4m3", mode="even"),
    QuantSpec(format="nvfp4", rht=True),
    QuantSpec(format="nvfp4", row_scaled=True),
    QuantSpec(format="nvfp4", row_scaled=True, four_over_six="mae", e4m3_max=256),
    QuantSpec(format="nvfp4_2d", four_over_six="mse"),
]


@pytest.mark.parametrize("spec", VARIANTS, ids=str)
def test_fake_tensors_have_the_real_layout(spec: QuantSpec) -> None:
    for shape in ((40, 70), (3, 128, 256)):
        for x in (torch.randn(shape), torch.randn(shape).bfloat16().mT):
            with FakeTensorMode() as mode:
                fakes = quantize(mode.from_tensor(x), spec)
            for fake, real in zip(fakes, quantize(x, spec), strict=True):
                assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


TRACED = [spec for spec in VARIANTS if "e5m2" not in str(spec) and not spec.pow2]


@pytest.mark.parametrize("spec", TRACED, ids=str)
def test_one_symbolic_trace_serves_other_sizes(spec: QuantSpec) -> None:
    """Ragged sizes and multiples of the block share a graph; a size of one block may have its own."""
    graphs = []

    def backend(gm: torch.fx.GraphModule, _inputs: Sequence[Tensor]) -> torch.fx.GraphModule:
        graphs.append(gm)
        return gm

    def both(x: Tensor) -> tuple[list[Tensor], Tensor]:
        parts = quantize(x, spec)
        return parts, dequantize(parts, spec)

    run = torch.compile(both, backend=backend, dynamic=True, fullgraph=True)
    for shape in ((150, 300), (256, 384), (257, 512), (384, 129)):
        x = torch.randn(shape)
        (parts, values), (expected_parts, expected_values) = run(x), both(x)
        assert_same_parts([*parts, values], [*expected_parts, expected_values])
    assert len(graphs) == 1


@pytest.mark.parametrize("spec", TRACED, ids=str)
def test_make_fx_records_only_torch_operators(spec: QuantSpec) -> None:
    x = torch.randn(40, 70)
    graph = make_fx(lambda x: quantize(x, spec), tracing_mode="fake")(x)
    assert not list(graph.named_buffers()), "a constant was baked in"
    other = torch.randn(40, 70)
    assert_same_parts(graph(other), quantize(other, spec))


# with vectorized tails of dynamic length, stores of one-byte elements lose lanes on AVX-512 (torch 2.11 to 2.13)
INDUCTOR = {"cpp.enable_loop_tail_vec": False}
EDGES = [
    "edge448_f32", "huge_f32", "huge_bf16", "subnormal_f32", "subnormal_bf16", "tiny_f32", "wide_f32", "zeros_mix_bf16",
    "ties_e4m3_f32", "ties_e5m2_f32", "nv_ties_f32", "nv_scale_edges_f32", "odd_f32", "odd_bf16",
    "nan_f32", "nan_bf16", "inf_f32", "inf_bf16", "naninf_f32", "all_nan_f32", "nv_underflow_f32", "negzero_bf16",
]  # fmt: skip


COMPILED = [
    *TRACED,
    QuantSpec(format="per_tensor_e5m2", pow2=True),
    QuantSpec(format="per_row_e4m3", pow2=True, torchao=True),
    QuantSpec(format="mxfp8_e5m2", mode="ceil"),
]
ALWAYS = ("per_tensor_e4m3", "per_row_e4m3(pow2,torchao)", "mxfp8_e4m3")
"""nvfp4 runs with static sizes below; the rest is for `make sweep`."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec", [pytest.param(s, id=str(s), marks=[] if str(s) in ALWAYS else pytest.mark.sweep) for s in COMPILED]
)
def test_inductor_gives_the_bytes_of_eager(spec: QuantSpec) -> None:
    run = torch.compile(lambda x: quantize(x, spec), dynamic=True, fullgraph=True, options=INDUCTOR)
    # all of one size: four compilations, of each dtype and direction
    inputs = [golden.source(name).repeat(7, 7)[:150, :300] for name in EDGES]
    for x in inputs:
        for source in (x, x.mT):
            assert_same_parts(run(source), quantize(source, spec))
    values = torch.compile(lambda parts: dequantize(parts, spec), dynamic=True, fullgraph=True, options=INDUCTOR)
    for x in inputs[:2]:
        parts = quantize(x, spec)
        assert_bits(values(parts), dequantize(parts, spec))


@pytest.mark.slow
@pytest.mark.parametrize("format", ["per_tensor_e4m3", "per_row_e4m3", "block_1x128_e4m3", "mxfp8_e4m3", "nvfp4"])
def test_inductor_with_static_sizes_gives_the_bytes_of_eager(format: str) -> None:
    spec = QuantSpec(format=format)
    sources = [torch.randn(128, 256), torch.randn(50, 33).bfloat16().mT]
    run = torch.compile(lambda *xs: [quantize(x, spec) for x in xs], dynamic=False, fullgraph=True, options=INDUCTOR)
    for got, source in zip(run(*sources), sources, strict=True):  # in one graph, which is one file to compile
        assert_same_parts(got, quantize(source, spec))


@pytest.mark.parametrize("other", ["nvfp4", "nvfp4_2d", "nvfp4(row_scaled)"])
def test_a_row_scaled_gemm_is_that_of_its_dequantized_operands(other: str) -> None:
    """Invariant 61."""
    a_spec, b_spec = QuantSpec(format="nvfp4", row_scaled=True), QuantSpec.parse(other)
    a, b = quantize(torch.randn(40, 96) * torch.rand(40, 1) * 100, a_spec), quantize(torch.randn(24, 96), b_spec)
    expected = dequantize(a, a_spec) @ dequantize(b, b_spec).mT
    assert_bits(scaled_mm(a, a_spec, b, b_spec, None, torch.float32), expected)
