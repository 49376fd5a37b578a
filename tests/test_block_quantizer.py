"""`BlockQuantizer`: any element, block and scale without a class, in graphs, reports and programs."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from bits import same
from helpers import OneLinear, assert_same_bits, linear_step, per_role, recipe_of
from torch import Tensor, nn

import fxquant
from fxquant import (
    BlockQuantizer,
    Direction,
    Float8BlockQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
    RecipeError,
)

E4M3, E5M2, E2M1 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float4_e2m1fn_x2

SAME: list[tuple[BlockQuantizer, Quantizer]] = [
    (BlockQuantizer("e4m3"), MXFP8Quantizer()),
    (BlockQuantizer(E5M2, (1, 32), torch.float8_e8m0fnu), MXFP8Quantizer(E5M2)),
    (
        BlockQuantizer("e4m3", [32, 32], scale_mode="floor"),
        MXFP8Quantizer(with_2d_quantization=True, scale_mode="floor"),
    ),
    (
        BlockQuantizer(E4M3, (1, 128), torch.float32),
        Float8BlockQuantizer(force_pow_2_scales=False, block_scaling_dim=1),
    ),
    (BlockQuantizer("e2m1", (1, 16), E4M3), NVFP4Quantizer()),
    (BlockQuantizer(E2M1, (16, 16), "e4m3"), NVFP4Quantizer(with_2d_quantization=True)),
    (BlockQuantizer("e2m1", (1, 16), "e4m3", "stochastic"), NVFP4Quantizer(stochastic_rounding=True)),
]


@pytest.mark.parametrize(("quantizer", "known"), SAME, ids=[str(q.spec(Direction.ROWWISE)) for _, q in SAME])
def test_a_format_of_this_package_is_that_format(quantizer: BlockQuantizer, known: Quantizer) -> None:
    assert all(quantizer.spec(direction) == known.spec(direction) for direction in Direction)


def test_mxfp8_by_another_name_has_the_bits_of_mxfp8() -> None:
    x, w, dy = torch.randn(33, 96), torch.randn(40, 96), torch.randn(33, 40)
    assert_same_bits(
        linear_step(recipe_of(BlockQuantizer("e4m3")), x, w, dy), linear_step(recipe_of(MXFP8Quantizer()), x, w, dy)
    )


OWN = [
    BlockQuantizer("e2m3"),
    BlockQuantizer("e3m2", (4, 8), "float32"),
    BlockQuantizer("int8", (1, 32), "e8m0"),
    BlockQuantizer("e2m1", (1, 32), E4M3),
    BlockQuantizer("int8", (1, 0), "bfloat16"),
    BlockQuantizer("e5m2", (1, 20), "e8m0", scale_mode="even"),
]
own = pytest.mark.parametrize("quantizer", OWN, ids=[str(q.row.name) for q in OWN])


ONE_SIDED = (OWN[1], OWN[4])
"""Formats with a scale for a tile and for a row, which run beside an operand in high precision; all do in a sweep."""


@pytest.mark.parametrize(
    ("quantizer", "one_sided"),
    [
        pytest.param(q, one, id=f"{one}-{q.row.name}", marks=pytest.mark.sweep if one and q not in ONE_SIDED else [])
        for one in (False, True)
        for q in OWN
    ],
)
def test_all_three_gemms_multiply_its_values(quantizer: BlockQuantizer, one_sided: bool) -> None:
    x, w, dy = torch.randn(33, 90), torch.randn(42, 90), torch.randn(33, 42)
    kept = IdentityQuantizer() if one_sided else quantizer
    got = linear_step(per_role(input=kept, weight=quantizer, grad_output=quantizer), x, w, dy)

    def seen(t: Tensor, direction: str = "rowwise") -> Tensor:
        return quantizer.quantize(t).dequantize(direction)

    rows, columns = (x, x) if one_sided else (seen(x), seen(x, "columnwise"))
    wanted = {
        "y": rows @ seen(w).mT,
        "dx": seen(dy) @ seen(w, "columnwise"),
        "dw": seen(dy, "columnwise").mT @ columns,
    }
    for key, value in wanted.items():
        torch.testing.assert_close(got[key], value, rtol=1e-4, atol=1e-4)


@own
def test_the_columnwise_half_is_that_of_the_transposed(quantizer: BlockQuantizer) -> None:
    x = torch.randn(33, 90, dtype=torch.bfloat16)
    both, transposed = quantizer.quantize(x), quantizer.quantize(x.mT.contiguous())
    for a, b in zip(both.columnwise.tensors(), transposed.rowwise.tensors(), strict=True):
        assert same(a.contiguous(), b.contiguous())
    assert both.shape == x.shape and both.dequantize("columnwise").shape == x.shape


@own
def test_equal_settings_are_equal_values(quantizer: BlockQuantizer) -> None:
    for twin in (copy.deepcopy(quantizer), pickle.loads(pickle.dumps(quantizer)), quantizer.copy()):
        assert twin == quantizer and hash(twin) == hash(quantizer)
        assert twin.spec(Direction.ROWWISE) == quantizer.spec(Direction.ROWWISE)
    assert len({q.spec(Direction.ROWWISE).key for q in OWN}) == len(OWN)
    assert BlockQuantizer(torch.int8, scale=torch.float32) == BlockQuantizer("int8", (1, 32), "float32")
    assert eval(repr(quantizer)) == quantizer


def test_reports_and_measure_have_it() -> None:
    model, x = OneLinear(96), torch.randn(32, 96)
    report = fxquant.explain(model, recipe_of(BlockQuantizer("e2m3")), x)
    assert {d.bits for d in report.decisions} == {6.25} and report.coverage == 1
    assert "e2m3_1x32_e8m0 (6.25 bits an element)" in str(report)
    (loss,) = fxquant.measure(model, recipe_of(BlockQuantizer("int8")), x).losses
    assert 0 < loss.error < 0.02


def test_inductor_gives_the_bits_of_operators_run_one_by_one() -> None:
    model, x = OneLinear(96), torch.randn(32, 96)
    results = []
    for inner in ("aot_eager", "inductor"):
        torch.compiler.reset()
        weight = BlockQuantizer("e3m2", (8, 4), "float32")
        recipe = per_role(input=BlockQuantizer("e2m3"), weight=weight, grad_output=weight)
        with torch.no_grad():
            results.append(fxquant.compile(model, recipe, options={"inner": inner})(x))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block", [(1, 32), (4, 8), (1, 0), (0, 0)])
def test_sizes_stay_dynamic(block: tuple[int, int]) -> None:
    backend = fxquant.Backend(recipe_of(BlockQuantizer("e2m3", block)), inner="aot_eager")
    model = OneLinear(96)
    compiled = torch.compile(model, backend=backend, dynamic=True, fullgraph=True)
    model.requires_grad_(block == (4, 8))  # whose columns are those of a backward too
    for rows in (40, 33, 64):
        x = torch.randn(rows, 96)
        y = compiled(x)
        if y.requires_grad:
            y.sum().backward()
    assert backend.captured == 1
    quantizer = BlockQuantizer("e2m3", block)
    with torch.no_grad():
        weight = quantizer.quantize(model.fc.weight).dequantize()
        wanted = nn.functional.linear(quantizer.quantize(x).dequantize(), weight, model.fc.bias)
    torch.testing.assert_close(compiled(x), wanted, rtol=1e-4, atol=1e-4)


def test_a_program_stores_packed_weights() -> None:
    model, x = OneLinear(96).eval(), torch.randn(32, 96)
    program = fxquant.quantize_program(torch.export.export(model, (x,)), recipe_of(BlockQuantizer("e2m3")))
    stored = {tuple(t.shape): t.dtype for t in program.state_dict.values()}
    assert stored[64, 72] == torch.uint8 and (64, 96) not in stored, "96 elements of 6 bits are 72 bytes"
    compiled = fxquant.compile(model, recipe_of(BlockQuantizer("e2m3")), options={"inner": "aot_eager"})
    with torch.no_grad():
        torch.testing.assert_close(program.module()(x), compiled(x))


def test_stochastic_rounding_goes_by_the_state_of_the_graph() -> None:
    recipe = recipe_of(BlockQuantizer("e3m2", rounding="stochastic"))
    torch.manual_seed(0)
    model, x = OneLinear(96), torch.randn(32, 96)
    compiled = fxquant.compile(model, recipe, options={"inner": "aot_eager"})
    state = compiled.quantization_state_dict()

    def step() -> list[Tensor]:
        model.zero_grad()
        y = compiled(x)
        y.square().sum().backward()
        return [y.detach(), model.fc.weight.grad.clone()]

    first = step()
    state = {key: value.clone() for key, value in compiled.quantization_state_dict().items()}
    second = step()
    compiled.load_quantization_state_dict(state)
    again = step()
    assert not torch.equal(first[0], second[0]) and not torch.equal(first[1], second[1])
    assert all(map(torch.equal, second, again))
    with pytest.raises(RecipeError, match="rounding='nearest'"):
        fxquant.quantize_program(torch.export.export(model.eval(), (x,)), recipe)


def test_stochastic_rounding_outside_a_graph_draws_from_a_generator() -> None:
    quantizer, x = BlockQuantizer("int8", (1, 24), rounding="stochastic"), torch.randn(8, 50)
    a, b, c = (quantizer.quantize(x, generator=torch.Generator().manual_seed(seed)).dequantize() for seed in (1, 1, 2))
    assert torch.equal(a, b) and not torch.equal(a, c)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"element": "e2m4"}, "element must be one of 'e4m3', .*not 'e2m4'; did you mean 'e2m[31]'"),
        ({"element": "E2M3"}, "did you mean 'e2m3'"),
        ({"element": "fp4"}, "did you mean 'e2m1'"),
        ({"element": torch.float16}, "element must be one of .*torch.int8, not torch.float16"),
        ({"element": "int8", "scale": "e5m2"}, "scale must be one of 'e8m0', 'e4m3', 'bfloat16', 'float32'"),
        ({"element": "int8", "scale": torch.float64}, "not torch.float64; did you mean 'float32'|not torch.float64"),
        ({"element": "int8", "block": 32}, r"two sizes, rows and columns such as \(1, 32\), not 32: write \(1, 32\)"),
        ({"element": "int8", "block": (1, 32, 1)}, "block must be two sizes"),
        ({"element": "int8", "block": (1, -1)}, "block must be two sizes"),
        ({"element": "int8", "block_size": 32}, r"write block=\(1, 32\)"),
        ({"element": "int8", "rounding": "random"}, "rounding must be 'nearest' or 'stochastic'"),
        ({"element": "int8", "scale": "float32", "scale_mode": "floor"}, "is a setting of scales in e8m0"),
        ({}, "BlockQuantizer needs element"),
    ],
)  # fmt: skip
def test_wrong_settings_are_told_where_they_are_made(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        BlockQuantizer(**arguments)
