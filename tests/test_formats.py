from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from helpers import linear_step, per_role, problem
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fxquant
from fxquant import Float8BlockQuantizer, Quantizer
from fxquant.errors import RecipeError
from fxquant.formats import ELEMENTS, FORMATS, IDENTITY, MX_MODES, LinearSpec, OperandSpec, QuantSpec, gemm_mismatch
from fxquant.roles import Direction

of_nvfp4 = st.fixed_dictionaries(
    {
        "format": st.sampled_from(["nvfp4", "nvfp4_2d"]),
        "stochastic": st.booleans(),
        "stream": st.integers(0, 99),
        "row_scaled": st.booleans(),
        "four_over_six": st.sampled_from(["", "mae", "mse"]),
        "e4m3_max": st.sampled_from([448, 256]),
    }
).map(lambda settings: QuantSpec(**settings))
specs = of_nvfp4 | st.builds(
    QuantSpec,
    format=st.sampled_from(sorted(FORMATS)),
    pow2=st.booleans(),
    eps=st.sampled_from([0.0, 2.0**-6, 1e-12]),
    torchao=st.booleans(),
    mode=st.sampled_from(MX_MODES),
    rht=st.booleans(),
    random_signs=st.booleans(),
    dtype=st.sampled_from(["", "bfloat16"]),
)
operands = st.builds(OperandSpec, specs, specs, st.booleans())


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_fp8_facts_are_those_of_torch(name: str) -> None:
    element, info = ELEMENTS[name], torch.finfo(ELEMENTS[name].dtype)
    assert (element.max, element.smallest_normal, element.bits) == (info.max, info.tiny, info.bits)
    assert info.eps == 2.0**-element.mantissa_bits
    assert 1 + element.exponent_bits + element.mantissa_bits == element.bits


@pytest.mark.parametrize("row", FORMATS.values(), ids=FORMATS)
def test_padding_holds_whole_blocks_and_whole_bytes(row) -> None:
    assert row.alignment % (row.block[1] or 1) == 0
    assert row.element is None or row.alignment % row.element.packed == 0


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("identity", 2),
        ("per_tensor_e4m3", 1),
        ("block_1x128_e4m3", 1 + 4 / 128),
        ("block_128x128_e4m3", 1 + 4 / 128**2),
        ("mxfp8_e4m3", 1 + 1 / 32),
        ("mxfp8_2d_e4m3", 1 + 1 / 32),
        ("nvfp4", 0.5 + 1 / 16),
        ("nvfp4_2d", 0.5 + 1 / 16),
    ],
)
def test_bytes_per_element_count_payload_and_scales(name: str, size: float) -> None:
    assert FORMATS[name].bytes_per_element == size


@given(specs)
def test_spec_text_is_parsed_back(spec: QuantSpec) -> None:
    assert QuantSpec.parse(str(spec)) == spec


@given(operands)
def test_operand_text_is_parsed_back(spec: OperandSpec) -> None:
    assert OperandSpec.parse(str(spec)) == spec


@settings(max_examples=30, deadline=None)
@given(operands, operands, operands, st.sampled_from(["", "bfloat16"]), st.text(max_size=20))
def test_linear_text_is_parsed_back_with_any_name(x, w, dy, autocast, name) -> None:
    spec = LinearSpec(x, w, dy, autocast, name)
    assert LinearSpec.parse(str(spec)) == spec


def test_default_settings_leave_no_trace_in_the_text() -> None:
    assert str(QuantSpec(format="mxfp8_e4m3")) == "mxfp8_e4m3"
    assert str(QuantSpec(format="per_tensor_e4m3", pow2=True, eps=2.0**-6)) == "per_tensor_e4m3(pow2,eps=0.015625)"


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(RecipeError, match=r"unknown format 'mxpf8'.*mxfp8_e4m3"):
        QuantSpec(format="mxpf8")
    with pytest.raises(RecipeError, match=r"unknown MX scale mode 'up'.*rceil"):
        QuantSpec(format="mxfp8_e4m3", mode="up")
    with pytest.raises(RecipeError, match=r"unknown option 'pow3'"):
        QuantSpec.parse("per_tensor_e4m3(pow3)")


def spec(name: str, **options) -> QuantSpec:
    return QuantSpec(format=name, **options)


def test_every_format_but_e5m2_and_tiles_multiplies_itself() -> None:
    for name in FORMATS:
        works = not name.endswith("e5m2") and name != "block_128x128_e4m3"
        assert (gemm_mismatch(spec(name), spec(name)) is None) == works, name


def test_pairs_do_not_depend_on_their_order() -> None:
    for a, b in itertools.combinations(FORMATS, 2):
        assert gemm_mismatch(spec(a), spec(b)) == gemm_mismatch(spec(b), spec(a))


@pytest.mark.parametrize(
    ("a", "b", "problem"),
    [
        (spec("per_tensor_e4m3"), spec("per_row_e5m2"), None),
        (spec("block_1x128_e4m3"), spec("block_128x128_e4m3"), None),
        (spec("mxfp8_e5m2"), spec("mxfp8_2d_e4m3"), None),
        (spec("nvfp4"), spec("nvfp4_2d"), None),
        (spec("nvfp4", rht=True), spec("nvfp4", rht=True), None),
        (IDENTITY, spec("identity", dtype="bfloat16"), None),
        (IDENTITY, spec("mxfp8_e4m3"), None),
        (spec("mxfp8_e4m3"), spec("nvfp4"), None),
        (spec("per_tensor_e4m3"), spec("block_1x128_e4m3"), None),
        (spec("block_128x128_e4m3"), spec("block_128x128_e4m3"), "128x128"),
        (spec("per_row_e5m2"), spec("per_tensor_e5m2"), "e5m2 by e5m2"),
        (spec("nvfp4", rht=True), spec("nvfp4"), "Hadamard"),
        (spec("nvfp4", rht=True), spec("nvfp4", rht=True, random_signs=False), "Hadamard"),
    ],
    ids=str,
)
def test_gemm_mismatch_says_why(a: QuantSpec, b: QuantSpec, problem: str | None) -> None:
    found = gemm_mismatch(a, b)
    assert (found is None) == (problem is None), found
    assert problem is None or problem in str(found)


class Short(Float8BlockQuantizer):
    """Blocks of 64, which no kernel knows."""

    def spec(self, direction: Direction) -> QuantSpec:
        return QuantSpec(format="block_1x64_e4m3", pow2=True)


@pytest.mark.parametrize("weight", [Short(), Float8BlockQuantizer()], ids=["alike", "beside 128"])
def test_another_length_of_blocks_works_by_its_row_alone(monkeypatch: pytest.MonkeyPatch, weight: Quantizer) -> None:
    """The meaning of its family casts it; kernels of other lengths leave it alone; a pair of lengths is emulated."""
    row = replace(FORMATS["block_1x128_e4m3"], name="block_1x64_e4m3", block=(1, 64), alignment=64)
    monkeypatch.setitem(FORMATS, row.name, row)
    recipe = per_role(input=Short(), weight=weight, grad_output=Short())
    x, w, dy = problem()
    got = linear_step(recipe, x, w, dy)
    for name, a, b in (("y", x, w.mT), ("dx", dy, w), ("dw", dy.mT, x)):
        exact = a.float() @ b.float()
        assert (got[name].float() - exact).norm() < 0.06 * exact.norm()
    report = fxquant.explain(nn.Linear(96, 160).bfloat16(), recipe, x.requires_grad_()).on("H100")
    (kernels,) = (line for line in str(report).splitlines() if line.startswith("kernels: "))
    assert report.coverage == 1 and "Triton" not in kernels and "cuBLAS" not in kernels, kernels
